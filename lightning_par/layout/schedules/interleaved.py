"""Interleaved 1F1B (Narayanan et al., arXiv 2104.04473, section 2.2)."""

from __future__ import annotations

from lightning_par.layout.schedules.actions import Action, Kind
from lightning_par.layout.schedules.schedule import Schedule, Sizes, in_turn


def _order(sizes: Sizes, rank: int) -> list[Action]:
    """Blocks of p micro-batches visit chunk 0, then chunk 1, and so on, so that a micro-batch is back just when its rank is free.

    A last block is filled up. See Note [Any number of micro-batches].
    """
    ranks, chunks, microbatches = sizes
    blocks = [range(start, start + ranks) for start in range(0, microbatches, ranks)]
    stages = [chunk * ranks + rank for chunk in range(chunks)]
    forwards = [Action(stage, Kind.F, m) for block in blocks for stage in stages for m in block]
    backwards = [Action(stage, Kind.B, m) for block in blocks for stage in reversed(stages) for m in block]
    behind = ranks - 1 - rank
    return in_turn(forwards, backwards, ahead=behind if chunks == 1 else 2 * behind + (chunks - 1) * ranks)


INTERLEAVED = Schedule("interleaved_1f1b", _order, chunks=(1, None))
"""1F1B over v stages a rank: bubble (p-1)/(v·m)."""
