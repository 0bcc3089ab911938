"""A simulated plan as a grid of text: time to the right, a line per rank, ``f``, ``b`` and ``w`` with the micro-batch, by chunk."""

from __future__ import annotations

from lightning_par.pipeline.simulate import Simulation


def draw(simulation: Simulation, width: int = 3) -> str:
    """Costs must be whole numbers; one cell is one unit of time, ``width`` characters wide. Forwards print as ``f0``, backwards as
    ``b0``, their weight parts as ``w0``.

    With several stages a rank, later chunks are told apart by capital letters at odd places: ``f0`` chunk 0, ``F0`` chunk 1.
    """
    ranks = len(simulation.timeline)
    lines = []
    for rank, timeline in enumerate(simulation.timeline):
        cells = ["." * width] * round(simulation.makespan)
        for ran in timeline:
            letter = ran.action.kind.value.lower()
            label = (letter.upper() if ran.action.stage // ranks % 2 else letter) + str(ran.action.microbatch)
            for t in range(round(ran.start), round(ran.end)):
                cells[t] = label.ljust(width) if t == round(ran.start) else "-" * (width - 1) + " "
        lines.append(f"rank {rank:<3}" + "".join(cells).rstrip())
    return "\n".join(lines)
