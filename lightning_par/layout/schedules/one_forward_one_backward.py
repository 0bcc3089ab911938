"""1F1B, as a rank's forwards and backwards in turn (PipeDream-Flush: Narayanan et al., arXiv 2006.09503)."""

from __future__ import annotations

from lightning_par.layout.schedules.actions import Action, Kind
from lightning_par.layout.schedules.schedule import Schedule, Sizes, in_turn


def _order(sizes: Sizes, rank: int) -> list[Action]:
    """Rank i runs p-1-i forwards ahead, then a forward and a backward in turn."""
    forwards, backwards = ([Action(rank, kind, m) for m in range(sizes.microbatches)] for kind in (Kind.F, Kind.B))
    return in_turn(forwards, backwards, ahead=sizes.ranks - 1 - rank)


ONE_FORWARD_ONE_BACKWARD = Schedule("1f1b", _order)
"""Bubble (p-1)/m as GPipe, but rank i holds only min(m, p-i) micro-batches."""
