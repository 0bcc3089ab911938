"""The rules of loss scaling: against torch's GradScaler, DeepSpeed's own scaler, and each rule written down once more in a few lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_par.numerics import DynamicLossScale, LossScale, MinimumReachedError, StaticLossScale, named_loss_scale, overflowed

SCRIPT = st.lists(st.booleans(), min_size=60, max_size=60)


def trace(rule: LossScale, script: Sequence[bool]) -> list[float]:
    """The scale after each step; shorter if the minimum is reached."""
    state, scales = rule.start(), []
    for overflow in script:
        try:
            state = rule.after(state, overflow=overflow)
        except MinimumReachedError:
            break
        scales.append(state.scale)
    return scales


def _torchs(script: Sequence[bool], **options: Any) -> list[float]:
    scaler = torch.amp.GradScaler("cpu", **options)
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=0.0)
    scales = []
    for overflow in script:
        scaler.scale(torch.ones(1))
        param.grad = torch.full((1,), float("inf") if overflow else 0.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@given(SCRIPT, st.integers(1, 9))
@settings(max_examples=25, deadline=None)
def test_torchs_rule_is_that_of_its_grad_scaler(script: list[bool], interval: int) -> None:
    ours = trace(DynamicLossScale("torch", initial=2.0**20, growth_interval=interval), script)
    assert ours == _torchs(script, init_scale=2.0**20, growth_interval=interval)


def _megatrons(script: Sequence[bool], scale: float, low: float, interval: int, hysteresis: int) -> Iterator[float]:
    good, left = 0, hysteresis
    for overflow in script:
        if overflow:
            good, left = 0, left - 1
            scale = max(scale / 2, low) if left <= 0 else scale
        else:
            good += 1
            if good == interval:
                good, left, scale = 0, hysteresis, scale * 2
        yield scale


@given(SCRIPT, st.integers(1, 9), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_megatrons_rule(script: list[bool], interval: int, hysteresis: int) -> None:
    rule = DynamicLossScale("megatron", initial=2.0**10, growth_interval=interval, hysteresis=hysteresis)
    ours = trace(rule, script)
    assert ours == list(_megatrons(script, 2.0**10, 1.0, interval, hysteresis))[: len(ours)]
    if len(ours) < len(script):
        assert script[len(ours)]
        assert ours[-1] == 1.0


@given(SCRIPT, st.integers(1, 9), st.integers(1, 4), st.booleans())
@settings(max_examples=100, deadline=None)
def test_deepspeeds_rule_is_that_of_its_scaler(script: list[bool], interval: int, hysteresis: int, consecutive: bool) -> None:
    settings = {"init_scale": 2.0**10, "scale_window": interval, "min_scale": 1.0, "delayed_shift": hysteresis}
    theirs = _deepspeeds(script, consecutive_hysteresis=consecutive, **settings)
    options = {"growth_interval": interval, "hysteresis": hysteresis, "consecutive_hysteresis": consecutive}
    assert trace(DynamicLossScale("deepspeed", initial=2.0**10, **options), script) == theirs


def _deepspeeds(script: Sequence[bool], **options: Any) -> list[float]:
    from deepspeed.runtime.fp16 import loss_scaler

    scaler, scales = loss_scaler.DynamicLossScaler(**options), []
    with mock.patch.object(loss_scaler.dist, "get_rank", return_value=1):  # it wants a process group to know whether to log
        for overflow in script:
            try:
                scaler.update_scale(overflow)
            except Exception:  # already at its minimum
                break
            scales.append(scaler.cur_scale)
    return scales


def test_A4_the_minimum_is_reached_after_an_exact_count() -> None:
    for rule in ("megatron", "deepspeed"):
        scale = DynamicLossScale(rule, initial=16.0, minimum=1.0, hysteresis=2)
        assert trace(scale, [True] * 9) == [16, 8, 4, 2, 1], "one spends the hysteresis, four halve, the sixth raises"


def test_torchs_rule_has_no_minimum_and_stops_growing_at_what_float32_holds() -> None:
    assert trace(DynamicLossScale(initial=2.0**-20), [True])[-1] == 2.0**-21
    assert trace(DynamicLossScale(initial=2.0**-120), [True] * 99)[-1] == 2.0**-126, "what float32 holds ends it"
    assert trace(DynamicLossScale(initial=2.0**127, growth_interval=1), [False] * 3)[-1] == 2.0**127


def test_what_is_counted() -> None:
    state = DynamicLossScale().start()
    for overflow in (True, False, True):
        state = DynamicLossScale().after(state, overflow=overflow)
    assert (state.steps, state.skipped, state.scale) == (3, 2, 16384.0)
    state = StaticLossScale(8.0).after(StaticLossScale(8.0).start(), overflow=True)
    assert (state.scale, state.steps, state.skipped) == (8.0, 1, 1)


def test_rules_have_names_and_numbers_are_static() -> None:
    assert named_loss_scale("megatron") == DynamicLossScale("megatron")
    assert named_loss_scale(128) == StaticLossScale(128.0)
    assert DynamicLossScale().start().scale == 65536.0


def test_bad_values_are_named_all_at_once() -> None:
    with pytest.raises(ValueError, match="rule='apex' must be one of torch, megatron, deepspeed"):
        named_loss_scale("apex")
    with pytest.raises(ValueError, match=r"growth_interval=0.*initial=nan.*backoff_factor=2.*consecutive_hysteresis is of"):
        DynamicLossScale(growth_interval=0, initial=float("nan"), backoff_factor=2, consecutive_hysteresis=True)
    with pytest.raises(ValueError, match="initial='a' must be a number"):
        DynamicLossScale(initial="a")
    for bad in (0, -1.0, True, 1e39, float("nan"), "8"):
        with pytest.raises(ValueError, match="scale="):
            StaticLossScale(bad)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_one_bad_element_is_found(bad: float, dtype: torch.dtype) -> None:
    grads = [torch.ones(3, 2, dtype=dtype), torch.ones(5)]
    cpu = torch.device("cpu")
    assert overflowed(grads, cpu).tolist() == [0, 0]
    grads[0][2, 1] = bad
    assert overflowed(grads, cpu).tolist() == [1, 0]
    assert overflowed([], cpu).tolist() == []
