"""ShardSpec: the boxes of a shard are exactly its elements, whatever was cut. See Note [Boxes of a shard]."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_par.layout import ShardSpec, Span, split


@given(total=st.integers(0, 50), parts=st.integers(1, 9))
def test_split_is_torchs_tensor_split(total: int, parts: int) -> None:
    spans = split(total, parts)
    assert [span.size for span in spans] == [len(part) for part in torch.arange(total).tensor_split(parts)]
    assert [spans[0].start, *(span.stop for span in spans)] == [*(span.start for span in spans), total]


@given(st.data())
def test_boxes_are_the_elements_of_a_span_of_a_block(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    whole = torch.arange(math.prod(shape)).reshape(shape)
    dim = data.draw(st.integers(0, len(shape) - 1))
    cut = data.draw(st.lists(st.integers(0, shape[dim]), min_size=2, max_size=4).map(sorted))
    spans = tuple(Span(a, b) for a, b in zip(cut[::2], cut[1::2], strict=False) if b > a)
    spec = ShardSpec.whole(whole).narrow(dim, spans)
    block = torch.cat([whole.narrow(dim, span.start, span.size) for span in spans] or [whole.narrow(dim, 0, 0)], dim).flatten()
    start = data.draw(st.integers(0, block.numel()))
    span = Span(start, data.draw(st.integers(start, block.numel())))
    mine = block[span.slice()]
    rebuilt = torch.full_like(mine, -1)
    for box in spec.flat(span).boxes():
        where = tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))
        box.view(rebuilt).copy_(whole[where])
    assert torch.equal(rebuilt, mine)


def test_the_example_of_the_note() -> None:
    spec = ShardSpec.whole(torch.empty(4, 6)).narrow(0, (Span(2, 4),)).flat(Span(4, 11))
    assert [(box.offsets, box.sizes) for box in spec.boxes()] == [((2, 4), (1, 2)), ((3, 0), (1, 5))]
    assert spec.block_shape == (2, 6)
    assert not spec.is_whole


def test_a_scalar_is_one_box_and_so_is_an_empty_tensor() -> None:
    assert len(ShardSpec.whole(torch.tensor(1.0)).boxes()) == 1
    assert [(box.offsets, box.sizes) for box in ShardSpec.whole(torch.empty(0, 8)).boxes()] == [((0, 0), (0, 8))]


def test_a_dim_is_cut_once() -> None:
    spec = ShardSpec.whole(torch.empty(4, 6)).narrow(0, (Span(0, 2),))
    with pytest.raises(ValueError, match=r"dim 0 .* is cut already"):
        spec.narrow(0, (Span(0, 1),))
