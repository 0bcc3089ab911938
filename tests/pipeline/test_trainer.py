"""Zero-bubble schedules under the Trainer: beside ZeRO and other axes, with logging and validation, they equal one process in float64."""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import pytest

from tests.harness.models import TinyGPT, token_loader
from tests.harness.parity import Run, assert_same, fit, fit_world

ZB_H1 = {"pp": 2, "schedule": "zb_h1", "microbatches": 5}
ZBV = {"pp": 2, "schedule": "zbv", "chunks": 2, "microbatches": 5}
LOADER = partial(token_loader, 12)


@cache
def _reference(tie: bool, **options: Any) -> Run:
    return fit(partial(TinyGPT, tie=tie), LOADER, validation=LOADER, **options)


def _compare(layout: dict[str, Any], tie: bool, **options: Any) -> None:
    world = math.prod(layout.get(axis, 1) for axis in ("dp", "tp", "pp", "cp"))
    runs = fit_world(partial(TinyGPT, tie=tie), LOADER, layout, world, validation=LOADER, **options)
    assert_same(runs, _reference(tie, **options))


def _slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("layout", "tie"), [(ZB_H1, True), (ZBV, False), _slow(ZB_H1, False), _slow(ZBV, True)])
def test_P18_weight_gradients_that_come_late_are_reduced_at_every_stage_of_zero(layout: dict[str, Any], tie: bool, zero: int) -> None:
    _compare(layout | {"dp": 2, "zero": zero}, tie)


@pytest.mark.parametrize("layout", [ZB_H1 | {"tp": 2}, ZBV | {"cp": 2}])
def test_the_other_axes_beside_a_zero_bubble_schedule(layout: dict[str, Any]) -> None:
    _compare(layout, False)


@pytest.mark.parametrize("layout", [ZB_H1, ZBV | {"pp": 3}])
def test_L12_accumulated_batches_add_up(layout: dict[str, Any]) -> None:
    _compare(layout, False, accumulate_grad_batches=2)
