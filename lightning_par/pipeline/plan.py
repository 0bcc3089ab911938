"""Plans: a schedule by name, lowered, and proven by the simulator before anything runs."""

from __future__ import annotations

import functools

from lightning_par.layout import SCHEDULES, Action, Schedule
from lightning_par.pipeline.lower import lower
from lightning_par.pipeline.simulate import simulate

Plan = tuple[tuple[Action, ...], ...]


def schedule_of(name: str) -> Schedule:
    """The schedule of this name.

    Raises:
        ValueError: there is none.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule={name!r}: choose one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


@functools.cache
def training_plan(schedule: str, ranks: int, chunks: int, microbatches: int) -> Plan:
    """Every rank's complete list of actions for one training step."""
    return _proven(schedule_of(schedule)(ranks, chunks, microbatches))


@functools.cache
def forward_plan(schedule: str, ranks: int, chunks: int, microbatches: int) -> Plan:
    """Every rank's complete list of actions to run the stages forward only."""
    return _proven(schedule_of(schedule).forwards(ranks, chunks, microbatches))


def _proven(compute: list[list[Action]]) -> Plan:
    plan = lower(compute)
    simulate(plan)
    return tuple(tuple(actions) for actions in plan)
