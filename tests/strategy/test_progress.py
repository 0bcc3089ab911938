"""What Lightning's loops remember, told so that they go on right: see Note [Counts of a saved loop]."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from lightning_par.strategy.progress import batches_given, reopen, rewind


def _loop(batch: tuple[int, int, int, int], epoch: tuple[int, int, int, int], *, before: int = 0, last: bool = False) -> dict[str, Any]:
    """Counts of the epoch at hand: ready, started, processed, completed; ``before``: batches of earlier epochs."""
    names = ("ready", "started", "processed", "completed")
    counts = dict(zip(names, batch, strict=True))
    epochs = dict(zip(names, epoch, strict=True))
    total = {name: count + before for name, count in counts.items()}
    return {
        "epoch_progress": {"total": dict(epochs), "current": epochs},
        "epoch_loop.batch_progress": {"total": total, "current": counts, "is_last_batch": last},
        "epoch_loop.state_dict": {"_batches_that_stepped": before + batch[3]},
    }


WITHIN = (2, 2, 1, 1)
"""Counts of epochs within the second."""


@pytest.mark.parametrize(
    ("loop", "given"),
    [
        (_loop((3, 3, 3, 2), WITHIN, before=5), 3),
        (_loop((3, 3, 3, 3), WITHIN, before=5), 3),
        (_loop((3, 3, 2, 2), WITHIN, before=5), 2),
        (_loop((5, 5, 5, 4), WITHIN, before=5, last=True), 5),
        (_loop((5, 5, 5, 5), WITHIN, before=5, last=True), 5),
        (_loop((5, 5, 5, 5), (2, 2, 2, 1), before=5, last=True), None),
        (_loop((0, 0, 0, 0), (0, 0, 0, 0)), 0),
    ],
    ids=["at a batch's end", "validating", "failed within a batch", "at the last batch's end", "validating last", "epoch's end", "new"],
)
def test_K10_the_batches_of_an_epoch_that_weights_know(loop: dict[str, Any], given: int | None) -> None:
    assert batches_given(loop) == given


def test_K10_gradients_that_wait_are_taken_back() -> None:
    for loop, accumulate, stepped in (
        (_loop((3, 3, 3, 2), WITHIN, before=5), 2, 2),
        (_loop((3, 3, 2, 2), WITHIN, before=5), 2, 2),
        (_loop((3, 3, 2, 2), WITHIN, before=5), 3, 0),
        (_loop((1, 1, 1, 1), WITHIN, before=5), 4, 0),
    ):
        assert rewind(loop, accumulate) == stepped
        counts = {"ready": stepped, "started": stepped, "processed": stepped, "completed": stepped - 1}
        assert loop["epoch_loop.batch_progress"]["current"] == counts
        assert loop["epoch_loop.batch_progress"]["total"] == {name: count + 5 for name, count in counts.items()}
        assert batches_given(loop) == stepped


def test_nothing_is_taken_back_after_a_step() -> None:
    for loop in (_loop((4, 4, 4, 3), WITHIN), _loop((5, 5, 5, 4), WITHIN, last=True), _loop((0, 0, 0, 0), (0, 0, 0, 0))):
        before = deepcopy(loop)
        assert rewind(loop, 2) is None
        assert loop == before


def test_K10_a_fit_that_ended_within_an_epoch_goes_on_in_it() -> None:
    loop = _loop((3, 3, 3, 3), (2, 2, 2, 2), before=5)
    assert batches_given(loop) is None
    for by_steps in (True, False):
        again = deepcopy(loop)
        reopen(again, by_steps=by_steps)
        assert batches_given(again) == 3
        assert again["epoch_progress"]["current"] == {"ready": 2, "started": 2, "processed": 1, "completed": 1}
        assert again["epoch_loop.state_dict"]["_batches_that_stepped"] == 5 + 3 - 1


@pytest.mark.parametrize(
    "loop",
    [
        _loop((5, 5, 5, 5), (2, 2, 2, 1), before=5, last=True),
        _loop((5, 5, 5, 5), (2, 2, 2, 2), before=5, last=True),
        _loop((5, 5, 5, 4), WITHIN, before=5, last=True),
    ],
    ids=["epoch's end", "after the fit", "at the last batch's end"],
)
def test_an_epoch_that_is_over_is_told_as_over(loop: dict[str, Any]) -> None:
    reopen(loop, by_steps=True)
    assert batches_given(loop) is None
    assert set(loop["epoch_progress"]["current"].values()) == {2}
    assert set(loop["epoch_loop.batch_progress"]["current"].values()) == {5}
    assert loop["epoch_loop.state_dict"]["_batches_that_stepped"] == 10
