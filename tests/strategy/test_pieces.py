"""A batch of any make is cut into micro-batches, and what steps return is put together; what cannot be told is refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence

from lightning_par.numerics import batch_size
from lightning_par.strategy.pieces import join, microbatches, signature

X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(6)
BOXES = [{"boxes": torch.full((n, 4), float(n)), "name": str(n)} for n in range(6)]


@dataclass(frozen=True)
class Data:
    x: Tensor
    weight: float = 1.0


class Pair(NamedTuple):
    x: Tensor
    names: list[str]


def _cut(batch: Any) -> list[Any]:
    assert batch_size(batch) == 6
    return microbatches(batch, 2)


def test_targets_of_single_samples_are_cut_with_their_images() -> None:
    first, second = _cut((X, BOXES))
    assert [target["name"] for target in first[1]] == ["0", "1", "2"]
    assert [target["name"] for target in second[1]] == ["3", "4", "5"]
    images = tuple(torch.zeros(3, 8 + n, 8) for n in range(6))
    assert [len(part[0]) for part in _cut((images, tuple(BOXES)))] == [3, 3]
    assert [len(part) for part in _cut([torch.zeros(n, 2) for n in range(6)])] == [3, 3]


def test_arrays_dataclasses_and_named_tuples_are_cut() -> None:
    (x, ids), _ = _cut((X, Y.numpy()))
    assert ids.tolist() == [0, 1, 2]
    assert len(x) == 3
    assert len(_cut(Data(X))[1].x) == 3
    assert _cut({"data": Data(X), "pair": Pair(X, list("abcdef"))})[1]["pair"].names == list("def")
    assert signature(Data(X)) != signature(Data(X[:3]))
    assert signature(X.numpy()) != signature(X.numpy()[:3])


def test_fields_are_not_taken_for_samples_where_there_are_as_many() -> None:
    for batch in ([X[:2], Y[:2]], {"a": [X[:2], Y[:2]]}, {"a": (X[:2], torch.ones(3)), "y": Y[:2]}):
        first, _ = microbatches(batch, 2)
        fields = first["a"] if isinstance(first, dict) else first
        assert len(fields) == 2
        assert len(fields[0]) == 1
    for views in ([X[:2], X[2:4]], [("a", "b"), ("c", "d")]):
        with pytest.raises(ValueError, match=r"batch\['views'\] is a list of 2, and each of its items is as long.*microbatches=1"):
            microbatches({"x": X[:2], "views": views}, 2)
    pairs = [tuple("abcdef"), tuple("ghijkl")]
    assert _cut({"x": X, "pairs": pairs})[1]["pairs"] == [tuple("def"), tuple("jkl")]
    assert _cut({"x": X, "tokens": [[0] * n for n in range(6)]})[1]["tokens"] == [[0] * n for n in (3, 4, 5)]
    assert batch_size((np.ones(4), X)) == 6


def test_what_is_no_data_stays_whole_and_what_is_unknown_is_refused() -> None:
    rest = {"weights": torch.ones(3), "scale": 0.5, "note": "abcdef", "none": None, "three": np.ones(3)}
    first = _cut({"x": X, **rest})[0]
    assert all(first[key] is value for key, value in rest.items())
    for unknown in (pack_padded_sequence(X[..., None], torch.full((6,), 2), batch_first=True), object(), {1, 2}):
        with pytest.raises(ValueError, match=rf"batch\['graph'\] is a {type(unknown).__name__}.*microbatches=1"):
            microbatches({"x": X, "graph": unknown}, 2)


SHARES = [torch.tensor(0.75, dtype=torch.float64), torch.tensor(0.25, dtype=torch.float64)]


def _joined(first: Any, second: Any, samples: int = 5) -> Any:
    return join([first, second], SHARES, samples, "what test_step returned")


def test_outputs_are_those_of_the_whole_batch() -> None:
    joined = _joined(
        {"a": np.zeros((3, 2)), "m": 1.0, "n": np.float64(2), "flag": True},
        {"a": np.ones((2, 2)), "m": 3.0, "n": np.float64(6), "flag": True},
    )
    assert joined["a"].shape == (5, 2)
    assert (joined["m"], joined["n"], joined["flag"]) == (1.5, 3.0, True)
    assert _joined(torch.tensor(1.0), torch.tensor(2.0)) == torch.tensor(1.25)
    assert _joined(list("abc"), list("de")) == list("abcde")
    assert _joined(Pair(X[:3], ["a", "b", "c"]), Pair(X[3:5], ["d", "e"])).names == list("abcde")
    loss, rows = _joined([torch.tensor(1.0), X[:3]], [torch.tensor(5.0), X[3:5]])  # fields
    assert (loss.item(), len(rows)) == (2.0, 5)
    assert join([torch.tensor(3)], SHARES[:1], 5, "it").item() == 3


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        (3, 2, "is a whole number"),
        (torch.tensor(3), torch.tensor(2), "is a whole number"),
        ("[1, 2, 3]", "[4, 5]", "is a str"),
        (torch.zeros(7), torch.zeros(7), r"has \[7, 7\] rows for \[3, 2\] samples"),
        (torch.zeros(1, 7), torch.zeros(1, 7), r"has \[1, 1\] rows"),
        ([1.0] * 4, [1.0] * 3, r"has \[4, 3\] items"),
        ({"a": 1.0}, {"b": 1.0}, "has different keys"),
        (None, 1.0, "is of types NoneType, float"),
    ],
)
def test_outputs_that_cannot_be_those_of_the_whole_batch_are_refused(first: Any, second: Any, why: str) -> None:
    with pytest.raises(ValueError, match=rf"what test_step returned\['o'\] {why}.*one row or item for each sample"):
        _joined({"o": first}, {"o": second})
