"""What a rank gets of a batch, what is refused, and what is noticed afterwards."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_par.comm import Group
from lightning_par.context import (
    AttentionNotUsedError,
    LabelsNotShiftedError,
    LossWeightError,
    PositionsNotUsedError,
    ShardedBatch,
    UnsupportedBatchError,
    Zigzag,
    ring_attention,
    shard_batch,
    verify_step,
)
from lightning_par.numerics import children


def _group(index: int = 0, size: int = 2) -> Group:
    return Group("cp", tuple(range(size)), index)


def _batch(total: int = 13, **more: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    return {"input_ids": torch.randint(0, 50, (3, total)), **more}


def _joined(batch: dict[str, Any], key: str, size: int) -> Tensor:
    shards = [shard_batch(batch, _group(index, size))[0].plain()[key] for index in range(size)]
    return Zigzag(batch["input_ids"].shape[1], size).join(shards, 1)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("total", [4, 7, 13, 16])
def test_C2_C3_labels_are_shifted_before_the_cut_and_none_is_lost(total: int, size: int) -> None:
    batch = _batch(total)
    batch["labels"] = batch["input_ids"].clone()
    batch["labels"][0, :3] = -100
    shifted = torch.cat([batch["labels"][:, 1:], torch.full((3, 1), -100)], 1)
    assert torch.equal(_joined(batch, "shift_labels", size), shifted)
    assert torch.equal(_joined(batch, "labels", size), batch["labels"])
    weights = [shard_batch(batch, _group(index, size))[0].weight() for index in range(size)]
    assert sum(weights) == (shifted != -100).sum()


def test_positions_are_added_or_cut() -> None:
    expected = torch.arange(13).expand(3, 13)
    assert torch.equal(_joined(_batch(), "position_ids", 2), expected)
    assert torch.equal(_joined(_batch(position_ids=torch.arange(13)[None] + 4), "position_ids", 2), expected + 4)


def test_tensors_along_the_sequence_are_cut_and_all_else_is_passed_on() -> None:
    batch = _batch(extra=torch.randn(3, 13, 2, 4), per_sample=torch.randn(3), name="a", other=torch.randn(3, 12))
    mine, total = shard_batch(batch, _group(1, 3))
    assert total == 13
    assert torch.equal(mine["extra"], Zigzag(13, 3).cut(batch["extra"], 1, 1))
    assert mine["per_sample"] is batch["per_sample"]
    assert mine["other"] is batch["other"]
    assert mine["name"] == "a"


def test_C10_padding_at_the_end_is_cut_along_and_remembered() -> None:
    mask = torch.ones(3, 13, dtype=torch.int64)
    assert not shard_batch(_batch(attention_mask=mask), _group())[0].padded
    mask[1, 9:] = 0
    mine, _ = shard_batch(_batch(attention_mask=mask), _group())
    assert mine.padded
    assert torch.equal(_joined(_batch(attention_mask=mask), "attention_mask", 2), mask)


def _left_padded() -> dict[str, Any]:
    mask = torch.ones(3, 13, dtype=torch.int64)
    mask[1, :2] = 0
    return _batch(attention_mask=mask)


def _labels_on_padding() -> dict[str, Any]:
    batch = _batch(attention_mask=torch.ones(3, 13, dtype=torch.int64))
    batch["attention_mask"][0, 10:] = 0
    return batch | {"labels": batch["input_ids"]}


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (torch.zeros(2, 8), "type Tensor; it needs a dict with 'input_ids'"),
        ({"x": torch.zeros(2, 8)}, r"keys \['x'\]; it needs a dict with 'input_ids'"),
        (_batch(1), "1 tokens cannot be cut over cp=2"),
        (_left_padded(), "padding_side='right'"),
        (_batch(attention_mask=torch.ones(3, 1, 13, 13)), r"attention_mask of shape \(3, 1, 13, 13\)"),
        (_batch(position_ids=torch.cat([torch.arange(6), torch.arange(7)])[None]), "packed documents"),
        (_batch(position_ids=torch.arange(12)[None]), "do not fit input_ids"),
        (_labels_on_padding(), "labels of padding to -100"),
    ],
)
def test_what_cannot_be_cut_says_so(batch: Any, says: str) -> None:
    with pytest.raises(UnsupportedBatchError, match=says):
        shard_batch(batch, _group())


def _step(ring_calls: dict[bool, int] | None = None, *read: str, causal: bool = True) -> None:
    batch, total = shard_batch(_batch(labels=torch.zeros(3, 13, dtype=torch.int64)), _group())
    ring = ring_attention(_group(), total)
    ring.calls = Counter({True: 1} if ring_calls is None else ring_calls)
    batch.weight(causal=causal)
    batch.plain()
    for key in read:
        batch[key]
    verify_step(batch, ring)


def test_a_step_that_ignores_positions_is_found_out() -> None:
    _step(None, "position_ids")
    with pytest.raises(PositionsNotUsedError, match=r"batch\['position_ids'\]"):
        _step(None, "input_ids")


def test_a_step_that_shifts_labels_itself_is_found_out() -> None:
    _step(None, "position_ids", "labels", "shift_labels")
    _step({False: 2}, "position_ids", "labels", causal=False)  # a masked language model does not shift
    with pytest.raises(LabelsNotShiftedError, match=r"batch\['shift_labels'\]"):
        _step(None, "position_ids", "labels")


def test_a_masked_language_model_weighted_by_shifted_labels_is_found_out() -> None:
    with pytest.raises(LossWeightError, match="set cp=1"):
        _step({False: 2}, "position_ids", "labels", "shift_labels")


def test_a_step_that_attends_by_other_means_is_found_out() -> None:
    with pytest.raises(AttentionNotUsedError, match="scaled_dot_product_attention"):
        _step({}, "position_ids")


def test_looking_at_its_parts_or_copying_is_no_reading() -> None:
    batch = ShardedBatch({"a": 1, "b": 2}, padded=True)
    other = copy.copy(batch)
    assert children(batch) == children(other) == {"a": 1, "b": 2}
    assert other.padded
    assert not batch.read
    assert other["a"] == 1
    assert batch.read == {"a"}


@pytest.mark.parametrize("read", [lambda b: (lambda **_: None)(**b), lambda b: dict(b), lambda b: list(b.items()), lambda b: {**b}])
def test_a_batch_notices_being_spread(read: Any) -> None:
    batch = ShardedBatch({"a": 1, "b": 2})
    assert not batch.read
    read(batch)
    assert batch.read == {"a", "b"}


def test_a_shard_without_labels_weighs_its_tokens() -> None:
    assert [shard_batch(_batch(), _group(index))[0].weight().item() for index in range(2)] == [21, 18]


def test_a_masked_language_model_weighs_labels_as_they_stand() -> None:
    labels = torch.zeros(3, 13, dtype=torch.int64)
    assert sum(shard_batch(_batch(labels=labels), _group(i))[0].weight(causal=False) for i in range(2)) == 39
    assert sum(shard_batch(_batch(labels=labels), _group(i))[0].weight(causal=True) for i in range(2)) == 36
