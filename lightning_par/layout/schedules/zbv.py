"""ZB-V (Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 6).

Two stages a rank in the shape of a V: rank i holds stage i on the way down and stage 2p-1-i on the way up, so the first rank has both
the first stage and the last, and the loss's gradient turns round where the batch comes in. With F, B and W as long as each other no rank
idles between its first action and its last, in the memory of 1F1B (2p halves). Down in small letters, up in capitals, 2 ranks::

    rank 0  f0 f1 f2 F0 B0 W0 F1 B1 W1 f3 b0 w0 F2 B2 W2 b1 w1 F3 B3 W3 b2 w2 b3 w3
    rank 1  .. f0 F0 f1 F1 B0 W0 f2 b0 w0 F2 B1 W1 f3 b1 w1 F3 B2 W2 b2 B3 b3 w2 W3 w3
"""

from __future__ import annotations

from collections import Counter

from lightning_par.layout.schedules.actions import Action, Kind
from lightning_par.layout.schedules.schedule import Schedule, Sizes


class _List:
    """A rank's list as it grows; each stage does each thing for one micro-batch after the other."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.done: Counter[tuple[int, Kind]] = Counter()

    def add(self, stage: int, *kinds: Kind) -> None:
        for kind in kinds:
            self.actions.append(Action(stage, kind, self.done[stage, kind]))
            self.done[stage, kind] += 1


def _order(sizes: Sizes, rank: int) -> list[Action]:
    """The handcrafted order for as many micro-batches as fill the V. See Note [Any number of micro-batches]."""
    ranks, _, microbatches = sizes
    total = max(microbatches, 2 * ranks - 1)
    down, up = rank, 2 * ranks - 1 - rank
    before, behind = rank, ranks - rank  # ranks before this one; it and those behind
    todo, (F, B, W) = _List(), (Kind.F, Kind.B, Kind.W)
    for _ in range(2 * behind - 1):
        todo.add(down, F)
    for _ in range(before):
        todo.add(up, F)
        todo.add(down, F)
    for _ in range(behind):
        todo.add(up, F, B, W)
    while todo.done[up, F] < total:
        if todo.done[down, F] < total:
            todo.add(down, F)
        todo.add(down, B, W)
        todo.add(up, F, B, W)
    for _ in range(before):
        todo.add(down, B)
        todo.add(up, B)
    for _ in range(behind):
        todo.add(down, B, W)
    for stage in (up, down):
        while todo.done[stage, W] < total:
            todo.add(stage, W)
    return todo.actions


ZBV = Schedule("zbv", _order, chunks=(2, 2), turns=True)
"""No bubble where F, B and W are equal and m is at least 2p-1."""
