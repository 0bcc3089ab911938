"""RankGrid: from a rank to its place along every axis, and back."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_par.layout.parallel_layout import ParallelLayout

AXES = ("pp", "replicate", "shard", "cp", "tp")
"""The mesh axes from slowest to fastest: tp neighbours are neighbouring ranks, so they share a node. dp is replicate · shard."""


@dataclass(frozen=True)
class RankGrid:
    """The ranks of a resolved layout as a grid over AXES, in row-major order."""

    layout: ParallelLayout

    @property
    def shape(self) -> tuple[int, ...]:
        layout = self.layout
        return (layout.pp, layout.replicate, layout.dp // layout.replicate, layout.cp, layout.tp)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The index of ``rank`` along each axis, and along dp."""
        if not 0 <= rank < math.prod(self.shape):
            raise ValueError(f"rank {rank} is outside the grid of {math.prod(self.shape)} ranks")
        index = {}
        for axis, degree in zip(reversed(AXES), reversed(self.shape), strict=True):
            rank, index[axis] = divmod(rank, degree)
        return {axis: index[axis] for axis in AXES} | {"dp": index["replicate"] * self.layout.dp // self.layout.replicate + index["shard"]}

    def rank(self, *, dp: int = 0, **index: int) -> int:
        """The rank at these indices; axes not named are at index 0."""
        index["replicate"], index["shard"] = divmod(dp, self.layout.dp // self.layout.replicate)
        rank = 0
        for axis, degree in zip(AXES, self.shape, strict=True):
            rank = rank * degree + index.get(axis, 0)
        return rank

    def peers(self, rank: int, *axes: str) -> list[int]:
        """The ranks that differ from ``rank`` only along ``axes`` (dp among them), in rank order (``rank`` itself included)."""
        if "dp" in axes:
            axes += ("replicate", "shard")
        fixed = {axis: i for axis, i in self.coordinates(rank).items() if axis in AXES and axis not in axes}
        everyone = range(math.prod(self.shape))
        return [r for r in everyone if all(self.coordinates(r)[axis] == i for axis, i in fixed.items())]

    def table(self) -> str:
        """The layout as a small text table: a line per pipeline stage, a cell per replica and context shard, its tp ranks inside."""
        columns = [(d, c) for d in range(self.layout.dp) for c in range(self.layout.cp)]
        head = ["", *(f"dp {d}" + (f" cp {c}" if self.layout.cp > 1 else "") for d, c in columns)]
        rows = [head]
        for stage in range(self.layout.pp):
            cells = [" ".join(str(self.rank(pp=stage, dp=d, cp=c, tp=t)) for t in range(self.layout.tp)) for d, c in columns]
            rows.append([f"pp {stage}", *cells])
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join(lines)
