"""Any way to cut a tensor, written and read back any other way, is the tensor: see Note [Boxes of a shard]."""

from __future__ import annotations

import math

import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from lightning_par.checkpoint.shard import LoadPlanner, SavePlanner, Shard
from lightning_par.layout import ShardSpec, Span, split


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[ShardSpec]:
    """A tensor cut over tp along one dim, each block then over ZeRO ranks into flat spans; some may be empty."""
    whole = ShardSpec.whole(torch.empty(shape))
    dim = draw(st.integers(0, len(shape) - 1))
    blocks = [whole.narrow(dim, (span,)) for span in split(shape[dim], draw(st.integers(1, 3)))]
    ranks = draw(st.integers(1, 4))
    return [block.flat(span) for block in blocks for span in split(math.prod(block.block_shape), ranks)]


def _shard(spec: ShardSpec, whole: torch.Tensor | None) -> Shard:
    flat = torch.zeros(spec.span.size)
    if whole is not None:
        for box in spec.boxes():
            where = tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))
            box.view(flat).copy_(whole[where])
    return Shard(spec, flat)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), shape=st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple))
def test_K4_K5_resharding_is_element_exact(data: st.DataObject, shape: tuple[int, ...], tmp_path_factory) -> None:
    whole = torch.arange(float(math.prod(shape))).reshape(shape)
    folder = tmp_path_factory.mktemp("shards")
    saved = {f"{i}": _shard(spec, whole) for i, spec in enumerate(data.draw(cuts(shape)))}
    dcp.save({"t": _Parts(saved)}, storage_writer=FileSystemWriter(folder, sync_files=False), planner=SavePlanner(), no_dist=True)
    for spec in data.draw(cuts(shape)):
        mine = _shard(spec, None)
        if spec.span.size:
            dcp.load({"t": mine}, checkpoint_id=folder, planner=LoadPlanner(), no_dist=True)
        assert torch.equal(mine.data, _shard(spec, whole).data)


class _Parts:
    """All ranks' shards of one tensor, saved by one process."""

    def __init__(self, shards: dict[str, Shard]) -> None:
        self.shards = list(shards.values())

    def __create_write_items__(self, fqn: str, _: object) -> list:
        return [item for shard in self.shards for item in shard.__create_write_items__(fqn, None)]

    def __get_tensor_shard__(self, index) -> torch.Tensor:
        owner = next(s for s in self.shards if any(torch.Size(box.offsets) == index.offset for box in s.spec.boxes()))
        return owner.__get_tensor_shard__(index)


def test_a_fused_weight_of_several_spans_comes_back(tmp_path) -> None:
    whole = torch.arange(24.0).reshape(12, 2)  # q rows 0:6, k 6:9, v 9:12
    spec = ShardSpec.whole(whole)
    first = spec.narrow(0, (Span(0, 3), Span(6, 7), Span(9, 10)))
    second = spec.narrow(0, (Span(3, 6), Span(7, 9), Span(10, 12)))
    parts = _Parts({"0": _shard(first, whole), "1": _shard(second, whole)})
    dcp.save({"t": parts}, checkpoint_id=tmp_path / "x", planner=SavePlanner(), no_dist=True)
    back = Shard.whole(torch.zeros(12, 2), writes=False)
    dcp.load({"t": back}, checkpoint_id=tmp_path / "x", planner=LoadPlanner(), no_dist=True)
    assert torch.equal(back.data, whole)
