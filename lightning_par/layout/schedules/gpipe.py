"""GPipe (Huang et al., arXiv 1811.06965)."""

from __future__ import annotations

from lightning_par.layout.schedules.actions import Action, Kind
from lightning_par.layout.schedules.schedule import Schedule, Sizes


def _order(sizes: Sizes, rank: int) -> list[Action]:
    """All forwards, then all backwards."""
    return [Action(rank, kind, m) for kind in (Kind.F, Kind.B) for m in range(sizes.microbatches)]


GPIPE = Schedule("gpipe", _order)
"""Holds every micro-batch at once; bubble (p-1)/m."""
