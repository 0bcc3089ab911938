"""The promise: any layout equals one process running plain Lightning, to 1e-10 in float64.

Each world runs the same module object and the same training_step over non-round sizes: 7 layers, 13 tokens, micro-batches of uneven size,
rows with unequally many labels. Compared are loss, logged loss and gradient norm of three steps, the validation loss, and every weight.
"""

from __future__ import annotations

import math
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
    "pp2 interleaved": {"pp": 2, "schedule": "interleaved_1f1b", "chunks": 3, "microbatches": 5},
    "cp2": {"cp": 2},
    "dp2 tp2": {"dp": 2, "tp": 2},
    "dp2 pp2": {"dp": 2, "pp": 2},
    "dp2 cp2": {"dp": 2, "cp": 2},
    "tp2 pp2": {"tp": 2, "pp": 2},
    "tp2 cp2": {"tp": 2, "cp": 2},
    "pp2 cp2": {"pp": 2, "cp": 2},
}

CP2, PP2, TP2, DP2, ZERO1 = {"cp": 2}, {"pp": 2}, {"tp": 2}, {"dp": 2}, {"dp": 2, "zero": 1}


def _slow(layout: dict[str, Any], name: str) -> Any:
    """Runs in CI only: the promise is kept by a neighbour in the quick suite."""
    return pytest.param(layout, id=name, marks=pytest.mark.slow)


def _world(layout: dict[str, Any]) -> int:
    return math.prod(layout.get(axis, 1) for axis in ("dp", "tp", "pp", "cp"))


@cache
def _reference(module: partial[TinyGPT], **options: Any) -> Run:
    loader = partial(token_loader, BATCH)
    return fit(module, loader, validation=loader, **options)


@cache
def _module(**options: Any) -> partial[TinyGPT]:
    return partial(TinyGPT, **options)


def _compare(layout: dict[str, Any], module: partial[TinyGPT] | None = None, **options: Any) -> None:
    module = module or _module()
    loader = partial(token_loader, BATCH)
    runs = fit_world(module, loader, layout, _world(layout), validation=loader, **options)
    assert_same(runs, _reference(module, **options))


def test_the_reference_is_clipped_and_learns() -> None:
    run = _reference(_module())
    assert min(run.norms) > 0.5, "clipping at 0.5 must be at work in every comparison below"
    assert run.losses[-1] < run.losses[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_equals_one_process(name: str) -> None:
    _compare(LAYOUTS[name])


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(TP2, id="tp2"),
        pytest.param(PP2, id="pp2"),
        pytest.param(ZERO1 | PP2, id="T6 dp2 zero1 pp2"),
        _slow(DP2, "dp2"),
        _slow(ZERO1, "dp2 zero1"),
        _slow(DP2 | PP2, "dp2 pp2"),
        _slow(ZERO1 | TP2, "dp2 zero1 tp2"),
        _slow(PP2 | TP2, "pp2 tp2"),
    ],
)
def test_T7_P15_tied_embeddings_under_every_axis(layout: dict[str, Any]) -> None:
    _compare(layout, _module(tie=True))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(ZERO1 | TP2, id="tp2"),
        pytest.param(ZERO1 | PP2, id="pp2"),
        pytest.param(CP2 | {"zero": 1}, id="cp2"),
        _slow(ZERO1 | CP2, "dp2 cp2"),
    ],
)
def test_P18_zero1_beside_every_axis(layout: dict[str, Any]) -> None:
    _compare(layout)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(DP2, id="dp2"),
        pytest.param(ZERO1, id="dp2 zero1"),
        pytest.param(PP2, id="pp2"),
        pytest.param(CP2, id="cp2"),
        _slow(TP2, "tp2"),
    ],
)
def test_L12_accumulation_divides_once(layout: dict[str, Any]) -> None:
    _compare(layout, _module(optimizer="sgd", lr=0.1), accumulate_grad_batches=2, gradient_clip_val=None)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(ZERO1, id="dp2 zero1"),
        pytest.param(PP2, id="pp2"),
        _slow(DP2, "dp2"),
        _slow(TP2, "tp2"),
        _slow(CP2, "cp2"),
    ],
)
def test_clipping_by_value(layout: dict[str, Any]) -> None:
    _compare(layout, _module(optimizer="sgd", lr=0.1), gradient_clip_val=0.02, gradient_clip_algorithm="value")


@pytest.mark.parametrize(
    "layout", [pytest.param(DP2 | CP2, id="dp2 cp2"), _slow(TP2 | PP2, "tp2 pp2"), _slow(ZERO1 | PP2, "dp2 zero1 pp2")]
)
def test_sgd_shows_that_the_gradient_has_the_right_scale(layout: dict[str, Any]) -> None:
    _compare(layout, _module(optimizer="sgd", lr=0.1), gradient_clip_val=None)


@pytest.mark.slow
def test_three_axes_on_8_ranks() -> None:
    _compare(DP2 | TP2 | PP2)


@pytest.mark.slow
def test_all_axes_on_16_ranks() -> None:
    _compare(DP2 | TP2 | PP2 | CP2, _module(layers=3))
