"""ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.1 and figure 2).

1F1B with the backward in two parts: only B is waited for by other ranks, so W is done where a rank would idle. Rank i, which in 1F1B
holds i micro-batches fewer than rank 0, may leave i W undone, and holds as many then; they fill its idle time at the end, 3 ranks::

    rank 0  f0 f1 f2 .. .. b0 w0 f3 b1 w1 b2 w2 b3 w3
    rank 1  .. f0 f1 .. b0 f2 b1 w0 f3 b2 w1 b3 w2 w3
    rank 2  .. .. f0 b0 f1 b1 f2 b2 w0 f3 b3 w1 w2 w3
"""

from __future__ import annotations

from lightning_par.layout.schedules.actions import Action, Kind
from lightning_par.layout.schedules.schedule import Schedule, Sizes, in_turn


def _order(sizes: Sizes, rank: int) -> list[Action]:
    """1F1B, and with a B the first W that is undone, unless fewer than ``rank`` would be left while forwards go on."""
    ranks, _, microbatches = sizes
    forwards, backwards, weights = ([Action(rank, kind, m) for m in range(microbatches)] for kind in (Kind.F, Kind.B, Kind.W))
    ahead = ranks - 1 - rank
    order: list[Action] = []
    done = 0
    for action in in_turn(forwards, backwards, ahead=ahead):
        order.append(action)
        undone = rank if action.microbatch < microbatches - ahead else 0
        if action.kind is Kind.B and action.microbatch - done >= undone:
            order.append(weights[done])
            done += 1
    return order + weights[done:]


ZB_H1 = Schedule("zb_h1", _order)
"""Bubble (p-1)(F+B-W) instead of 1F1B's (p-1)(F+B+W), in its memory: every rank holds min(m, p) micro-batches at most."""
