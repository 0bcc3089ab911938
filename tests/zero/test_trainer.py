"""Every ZeRO stage through the Trainer, alone and beside the other axes, equals one process."""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import pytest

from tests.harness.models import TinyGPT, token_loader
from tests.harness.parity import Run, assert_same, fit, fit_world

BATCH = 12

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2 zero2": {"dp": 2, "zero": 2},
    "dp3 zero3": {"dp": 3, "zero": 3},
    "cp2 zero3": {"cp": 2, "zero": 3},
    "tp2 zero2": {"dp": 2, "tp": 2, "zero": 2},
    "tp2 zero3": {"dp": 2, "tp": 2, "zero": 3},
    "pp2 zero2": {"dp": 2, "pp": 2, "zero": 2},
    "pp2 zero3": {"dp": 2, "pp": 2, "zero": 3},
    "replicate2 zero1": {"dp": 4, "replicate": 2, "zero": 1},
    "replicate2 zero2": {"dp": 4, "replicate": 2, "zero": 2},
    "replicate2 zero3": {"dp": 4, "replicate": 2, "zero": 3},
}


LOADER = partial(token_loader, BATCH, ignore=False)


@cache
def _reference(module: partial[TinyGPT], **options: Any) -> Run:
    return fit(module, LOADER, validation=LOADER, **options)


@cache
def _module(**options: Any) -> partial[TinyGPT]:
    return partial(TinyGPT, **options)


def _compare(layout: dict[str, Any], module: partial[TinyGPT], **options: Any) -> None:
    world = math.prod(layout.get(axis, 1) for axis in ("dp", "tp", "pp", "cp"))
    assert_same(fit_world(module, LOADER, layout, world, validation=LOADER, **options), _reference(module, **options))


@pytest.mark.parametrize("name", LAYOUTS)
def test_P18_every_stage_beside_every_axis(name: str) -> None:
    _compare(LAYOUTS[name], _module())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_tied_weights_accumulation_and_sgd(stage: int) -> None:
    _compare({"dp": 2, "zero": stage}, _module(tie=True, optimizer="sgd", lr=0.1), accumulate_grad_batches=2)


@pytest.mark.parametrize("stage", [1, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (2, 3))])
def test_T6_tied_weights_across_stages_of_a_pipeline(stage: int) -> None:
    _compare({"dp": 2, "pp": 2, "zero": stage}, _module(tie=True))
