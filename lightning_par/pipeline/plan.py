"""Plans: a schedule by name, lowered, and proven by the simulator before anything runs."""

from __future__ import annotations

import functools

from lightning_par.pipeline.actions import Action
from lightning_par.pipeline.lower import lower
from lightning_par.pipeline.schedules import SCHEDULES, Schedule, forward_only
from lightning_par.pipeline.simulate import simulate

Plan = tuple[tuple[Action, ...], ...]


def training_plan(schedule: str, ranks: int, chunks: int, microbatches: int) -> Plan:
    """Every rank's complete list of actions for one training step."""
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r}: choose one of {', '.join(SCHEDULES)}")
    return _checked(SCHEDULES[schedule], ranks, chunks, microbatches)


def forward_plan(ranks: int, chunks: int, microbatches: int) -> Plan:
    """Every rank's complete list of actions to run the stages forward only."""
    return _checked(forward_only, ranks, chunks, microbatches)


@functools.cache
def _checked(schedule: Schedule, ranks: int, chunks: int, microbatches: int) -> Plan:
    plan = lower(schedule(ranks, chunks, microbatches))
    simulate(plan)
    return tuple(tuple(actions) for actions in plan)
