"""Loss scaling: which factor keeps small gradients representable, as a pure state machine.

Note [The rules]
~~~~~~~~~~~~~~~~
Gradients of a half-precision model are computed of ``scale · loss`` and divided by ``scale`` before anybody sees them. A step whose
gradient overflowed is skipped, and the scale goes down; after enough good steps it goes up::

    rule        overflow                                             good step
    torch       good = 0, left -= 1; if left <= 0: shrink            good += 1; if good == interval: good = 0, left = hysteresis, grow
    megatron    the same, with other defaults                        the same
    deepspeed   if left == 1: shrink, else left -= 1;                with consecutive_hysteresis: left = hysteresis;
                last = step                                          k = step - last - 1; if k > 0 and k % interval == 0:
                                                                     left = hysteresis (unless consecutive), grow

``shrink`` multiplies by ``backoff_factor`` but never below ``minimum``; ``grow`` multiplies by ``growth_factor`` as long as float32 can
hold the result. An overflow that would shrink a scale that is at its minimum already, or at float32's, has no remedy and raises. With
hysteresis 1 and no minimum the first rule is that of ``torch.amp.GradScaler``; with 2 that of Megatron-LM's ``DynamicGradScaler``, where
every further overflow in a row shrinks. The last is DeepSpeed's ``DynamicLossScaler``, where ``interval`` good steps follow one that does
not count, and an overflow that only costs hysteresis starts the wait anew. They differ in when, never in how, a step is skipped.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol, get_args

import torch

Rule = Literal["torch", "megatron", "deepspeed"]
DEFAULTS: dict[str, tuple[int, int, float]] = {"torch": (2000, 1, 0.0), "megatron": (1000, 2, 1.0), "deepspeed": (1000, 2, 1.0)}
"""Of each rule: growth_interval, hysteresis, minimum."""
GREATEST, SMALLEST = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny


class MinimumReachedError(ArithmeticError):
    """A gradient overflowed although the scale is at its minimum."""


@dataclass(frozen=True)
class ScaleState:
    """Everything a scale remembers. ``steps`` counts all steps, ``skipped`` those of them that overflowed."""

    scale: float
    good: int = 0
    left: int = 1
    last_overflow: int = -1
    steps: int = 0
    skipped: int = 0

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)


class LossScale(Protocol):
    """A rule: where it starts, and how it goes on."""

    def start(self) -> ScaleState: ...

    def after(self, state: ScaleState, *, overflow: bool) -> ScaleState:
        """The state after a step.

        Raises:
            MinimumReachedError: the step overflowed and the scale cannot become smaller.
        """


@dataclass(frozen=True)
class StaticLossScale:
    """The same scale for ever; steps that overflow are skipped."""

    scale: float

    def __post_init__(self) -> None:
        if not _is_scale(self.scale):
            raise ValueError(f"scale={self.scale!r} must be a number above 0 that float32 holds")

    def start(self) -> ScaleState:
        return ScaleState(self.scale)

    def after(self, state: ScaleState, *, overflow: bool) -> ScaleState:
        return replace(state, steps=state.steps + 1, skipped=state.skipped + overflow)


@dataclass(frozen=True)
class DynamicLossScale:
    """A scale that follows the gradients. See Note [The rules].

    Args:
        rule: torch, megatron or deepspeed.
        initial: the first scale.
        growth_interval: good steps before the scale grows (None: 2000; megatron and deepspeed 1000).
        hysteresis: overflows before it shrinks (None: 1; megatron and deepspeed 2).
        minimum: below which it never goes (None: 0, no minimum; megatron and deepspeed 1).
        growth_factor, backoff_factor: by which it changes.
        consecutive_hysteresis: deepspeed: every good step refills the hysteresis.

    Raises:
        ValueError: for values out of range, all of them named.
    """

    rule: Rule = "torch"
    initial: float = 65536.0
    growth_interval: int | None = None
    hysteresis: int | None = None
    minimum: float | None = None
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    consecutive_hysteresis: bool = False

    def __post_init__(self) -> None:
        if self.rule not in get_args(Rule):
            raise ValueError(f"rule={self.rule!r} must be one of {', '.join(get_args(Rule))}")
        for field, default in zip(("growth_interval", "hysteresis", "minimum"), DEFAULTS[self.rule], strict=True):
            if getattr(self, field) is None:
                object.__setattr__(self, field, default)
        faults = [
            f"{name}={getattr(self, name)!r} must be a whole number of at least 1"
            for name in ("growth_interval", "hysteresis")
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1
        ]
        numbers = ("minimum", "initial", "growth_factor", "backoff_factor")
        if wrong := [f"{name}={getattr(self, name)!r} must be a number" for name in numbers if not _is_number(getattr(self, name))]:
            raise ValueError("; ".join(faults + wrong))
        if not self.minimum >= 0:
            faults.append(f"minimum={self.minimum!r} must be at least 0")
        if not _is_scale(self.initial) or self.initial < self.minimum:
            faults.append(f"initial={self.initial!r} must be a number above 0 that float32 holds, and at least minimum={self.minimum!r}")
        if not 1 < self.growth_factor < math.inf:
            faults.append(f"growth_factor={self.growth_factor!r} must be above 1")
        if not 0 < self.backoff_factor < 1:
            faults.append(f"backoff_factor={self.backoff_factor!r} must lie between 0 and 1")
        if self.consecutive_hysteresis and self.rule != "deepspeed":
            faults.append(f"consecutive_hysteresis is of rule='deepspeed' only, not of rule={self.rule!r}")
        if faults:
            raise ValueError("; ".join(faults))

    def start(self) -> ScaleState:
        return ScaleState(self.initial, left=self.hysteresis)

    def after(self, state: ScaleState, *, overflow: bool) -> ScaleState:
        changed = self._overflowed(state) if overflow else self._went_well(state)
        return replace(changed, steps=state.steps + 1, skipped=state.skipped + overflow)

    def _overflowed(self, state: ScaleState) -> ScaleState:
        deepspeed = self.rule == "deepspeed"
        spent = replace(state, good=0, left=state.left - 1, last_overflow=state.steps)
        if state.left > 1:
            return spent
        if state.scale <= max(self.minimum, SMALLEST):
            raise MinimumReachedError(f"the gradient overflowed with the loss scale at its minimum, {state.scale:g}")
        return replace(spent, left=state.left if deepspeed else spent.left, scale=max(state.scale * self.backoff_factor, self.minimum))

    def _went_well(self, state: ScaleState) -> ScaleState:
        state = replace(state, good=state.good + 1, left=self.hysteresis if self.consecutive_hysteresis else state.left)
        if self.rule == "deepspeed":
            since = state.steps - state.last_overflow - 1
            if since <= 0 or since % self.growth_interval:
                return state
        elif state.good < self.growth_interval:
            return state
        grown = state.scale * self.growth_factor
        return replace(state, good=0, left=self.hysteresis, scale=grown if grown <= GREATEST else state.scale)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_scale(value: object) -> bool:
    return _is_number(value) and SMALLEST <= value <= GREATEST


def named_loss_scale(rule: str | float) -> LossScale:
    """``torch``, ``megatron``, ``deepspeed`` with their defaults, or a number: a static scale."""
    return DynamicLossScale(rule) if isinstance(rule, str) else StaticLossScale(rule)
