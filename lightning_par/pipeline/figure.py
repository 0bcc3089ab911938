"""A simulated plan as a picture: time to the right, a row per rank, a box for each forward, backward and weight part."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from lightning_par.layout import Kind
from lightning_par.pipeline.errors import PipelineError
from lightning_par.pipeline.simulate import Simulation

FORMATS = (".svg", ".png")
COLORS = {Kind.F: "#4c78a8", Kind.B: "#54a24b", Kind.W: "#f2a33a"}
NAMES = {Kind.F: "forward", Kind.B: "backward", Kind.W: "gradients of weights"}
INSTALL = "pip install 'lightning-par[plots]'"


def refusal(path: str | Path) -> str | None:
    """Why no picture can be written there, and the way out; None where it can."""
    path = Path(path)
    if path.suffix not in FORMATS:
        return f"{path}: the picture is written as {' or '.join(FORMATS)}; end the name so"
    if not path.parent.is_dir():
        return f"{path}: there is no folder {path.parent}"
    if find_spec("matplotlib") is None:
        return f"{path}: pictures need matplotlib, which is not installed: {INSTALL}"
    return None


def save_figure(simulation: Simulation, path: str | Path, title: str) -> None:
    """Write the picture; its format is that of the name. A rank's peak of activations and messages stand beside its row.

    matplotlib is imported here and nowhere else: training never needs it.

    Raises:
        PipelineError: see ``refusal``.
    """
    if reason := refusal(path):
        raise PipelineError(reason)
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks, chunks = (
        len(simulation.timeline),
        1 + max(ran.action.stage for row in simulation.timeline for ran in row) // len(simulation.timeline),
    )
    boxes = max(len(row) for row in simulation.timeline)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure = Figure(figsize=(min(4 + 0.28 * boxes, 60), 1.6 + 0.5 * ranks), layout="constrained")
        axes = figure.add_subplot()
        for rank, row in enumerate(simulation.timeline):
            for ran in row:
                shade = 1 - 0.55 * (ran.action.stage // ranks) / max(chunks - 1, 1)
                length = ran.end - ran.start
                axes.barh(rank, length, left=ran.start, height=0.9, color=COLORS[ran.action.kind], alpha=shade, edgecolor="white")
                axes.text(ran.start + length / 2, rank, str(ran.action.microbatch), ha="center", va="center", fontsize=7)
        facts = zip(simulation.peak_live, simulation.messages, strict=True)
        axes.set_yticks(range(ranks), [f"rank {rank}: peak live {peak}, sends {sends}" for rank, (peak, sends) in enumerate(facts)])
        axes.invert_yaxis()
        axes.set_xlim(0, simulation.makespan)
        axes.set_xlabel("time; shades are the stages of a rank, numbers are micro-batches")
        axes.set_title(f"{title}: bubble {simulation.bubble:.3f}")
        kinds = {ran.action.kind for row in simulation.timeline for ran in row}
        handles = [Patch(color=color, label=NAMES[kind]) for kind, color in COLORS.items() if kind in kinds]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
        figure.savefig(path, dpi=150, metadata={"Date": None} if Path(path).suffix == ".svg" else None)
