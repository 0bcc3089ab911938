"""The promise: any layout equals one process running plain Lightning, to 1e-10 in float64."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest

from tests.harness.models import TinyGPT, token_loader
from tests.harness.parity import Run, assert_same, fit, fit_world

BATCH = 12  # divides by 2 and 3 replicas, leaving micro-batches of uneven size

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2},
    "dp3": {"dp": 3},
    "dp2 zero1": {"dp": 2, "zero": 1},
    "dp3 zero1": {"dp": 3, "zero": 1},
    "tp2": {"tp": 2},
    "pp2 gpipe": {"pp": 2, "schedule": "gpipe", "microbatches": 5},
    "pp2 1f1b": {"pp": 2, "schedule": "1f1b", "microbatches": 5},
    "pp3 1f1b": {"pp": 3, "schedule": "1f1b", "microbatches": 4},
    "cp2": {"cp": 2},
    "dp2 tp2": {"dp": 2, "tp": 2},
    "dp2 pp2": {"dp": 2, "pp": 2},
    "dp2 cp2": {"dp": 2, "cp": 2},
    "tp2 pp2": {"tp": 2, "pp": 2},
    "tp2 cp2": {"tp": 2, "cp": 2},
    "pp2 cp2": {"pp": 2, "cp": 2},
}


@cache
def _reference(tie: bool = False) -> Run:
    return fit(partial(TinyGPT, tie=tie), partial(token_loader, BATCH), validation=partial(token_loader, BATCH))


def _compare(layout: dict[str, Any], *, tie: bool = False) -> None:
    world = 1
    for axis in ("dp", "tp", "pp", "cp"):
        world *= layout.get(axis, 1)
    loader = partial(token_loader, BATCH)
    runs = fit_world(partial(TinyGPT, tie=tie), loader, layout, world, validation=loader)
    assert_same(runs, _reference(tie))


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_equals_one_process(name: str) -> None:
    _compare(LAYOUTS[name])
