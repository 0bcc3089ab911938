"""A simulated plan as a grid of text: time to the right, a line per rank, ``f``, ``b`` and ``w`` with the micro-batch, by chunk."""

from __future__ import annotations

from math import ceil

from lightning_par.pipeline.simulate import Simulation


def draw(simulation: Simulation, unit: float = 1.0, columns: int | None = None) -> str:
    """One cell is ``unit`` of time, of which all times should be multiples. Forwards print as ``f0``, backwards as ``b0``, their weight
    parts as ``w0``. Lines longer than ``columns`` characters are broken, all at the same time, into blocks.

    With several stages a rank, later chunks are told apart by capital letters at odd places: ``f0`` chunk 0, ``F0`` chunk 1.
    """
    width = 2 + max(len(str(ran.action.microbatch)) for timeline in simulation.timeline for ran in timeline)
    grid = [_cells(simulation, rank, unit, width) for rank in range(len(simulation.timeline))]
    heads = [f"rank {rank:<3}" for rank in range(len(grid))]
    block = len(grid[0]) if columns is None else max(1, (columns - len(heads[-1])) // width)
    blocks = [
        "\n".join(head + "".join(cells[start : start + block]).rstrip() for head, cells in zip(heads, grid, strict=True))
        for start in range(0, len(grid[0]), block)
    ]
    return "\n\n".join(blocks)


def _cells(simulation: Simulation, rank: int, unit: float, width: int) -> list[str]:
    ranks = len(simulation.timeline)
    cells = ["." * width] * ceil(round(simulation.makespan / unit, 6))
    for ran in simulation.timeline[rank]:
        letter = ran.action.kind.value.lower()
        label = (letter.upper() if ran.action.stage // ranks % 2 else letter) + str(ran.action.microbatch)
        first, end = round(ran.start / unit), round(ran.end / unit)
        for cell in range(first, end):
            cells[cell] = label.ljust(width) if cell == first else "-" * (width - 1) + " "
    return cells
