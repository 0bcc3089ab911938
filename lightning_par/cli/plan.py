"""`lightning-par plan pipeline`: a pipeline's schedule, simulated and drawn, before anything runs."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from math import gcd, inf, lcm
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lightning_par.layout import SCHEDULES, LayoutError, ParallelLayout
from lightning_par.pipeline import Costs, Simulation, draw, picture_refusal, save_figure, simulate, training_plan

USAGE = f"""\
usage: lightning-par plan pipeline [key=value ...]

  pp=4            ranks of the pipeline
  schedule=1f1b   {", ".join(SCHEDULES)}; the beginning of a name is enough where it is one name's
  chunks=1        stages on each rank
  microbatches=8  pieces of a batch; pp · chunks where it is not given
  forward=1       time of a stage's forward of one micro-batch, in any unit
  backward=2      time of its backward, both parts
  weights=1       the part of it that is the gradients of weights, which zb_h1 and zbv do later; half of it where it is not given
  latency=0       time of a message
  out=grid.svg    write the picture too, as .svg or .png
"""

CELLS = 2000
"""More than a terminal's grid is read with."""


@dataclass(frozen=True)
class Options:
    """The keys of the command."""

    pp: int = 4
    schedule: str = "1f1b"
    chunks: int = 1
    microbatches: int | None = None
    forward: float = 1.0
    backward: float = 2.0
    weights: float | None = None
    latency: float = 0.0
    out: str | None = None

    @property
    def costs(self) -> Costs:
        weights = self.backward / 2 if self.weights is None else self.weights
        return Costs(self.forward, self.backward - weights, weights, self.latency)

    @property
    def title(self) -> str:
        return f"{self.schedule} pp={self.pp} chunks={self.chunks} microbatches={self.microbatches}"


def run() -> None:
    """The command `plan`, with what is to be planned and its overrides in `sys.argv`."""
    what, *words = sys.argv[1:] or ["--help"]
    if {"-h", "--help"} & {what, *words}:
        print(USAGE, end="")
        return
    if what != "pipeline":
        sys.exit(f"lightning-par plan: {what!r} cannot be planned; there is: pipeline\n{USAGE}")
    options, wrong = read(words)
    if wrong:
        sys.exit("lightning-par plan pipeline:\n" + "\n".join(f"  - {reason}" for reason in wrong) + f"\n{USAGE}")
    simulation = simulate(training_plan(options.schedule, options.pp, options.chunks, options.microbatches), options.costs)
    print(report(options, simulation, shutil.get_terminal_size((sys.maxsize, 24)).columns))
    if options.out is not None:
        save_figure(simulation, options.out, options.title)
        print(f"\nwritten to {options.out}")


def read(words: list[str]) -> tuple[Options, list[str]]:
    """The options, and everything that is wrong with them."""
    known = [field.name for field in fields(Options)]
    wrong = [f"{word!r}: write key=value" for word in words if "=" not in word]
    given: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if equals and key not in known:
            wrong.append(f"{key!r} is no key: choose among {', '.join(known)}")
        elif key in given:
            wrong.append(f"{word}: {key} is given twice")
        elif equals:
            given[key] = _value(word, key, value)
    options = replace(Options(), **given)
    options = replace(options, schedule=_full_name(str(options.schedule)))
    layout = {name: getattr(options, name) for name in ("pp", "schedule", "chunks", "microbatches")}
    try:
        chosen = ParallelLayout(**layout)
    except LayoutError as error:
        wrong += error.violations
    else:
        options = replace(options, microbatches=chosen.microbatches or chosen.pp * chosen.chunks)
    return options, wrong + _cost_violations(options) + _out_violations(options)


def report(options: Options, simulation: Simulation, columns: int) -> str:
    """The grid and the numbers, no line longer than that if it can be."""
    ideal = simulation.makespan / (1 + simulation.bubble)
    rows = [["rank", "stages", "idle", "peak live", "of its micro-batch", "messages sent"]]
    for rank, timeline in enumerate(simulation.timeline):
        stages = SCHEDULES[options.schedule].stages_of(rank, options.pp, options.chunks)
        idle = 1 - sum(ran.end - ran.start for ran in timeline) / simulation.makespan
        peak = simulation.peak_live[rank]
        share = f"{peak / options.chunks:g}"
        rows.append([str(rank), ", ".join(map(str, stages)), f"{idle:.1%}", str(peak), share, str(simulation.messages[rank])])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    costs = options.costs
    return "\n".join(
        [
            f"{options.title}, forward {costs.forward:g}, backward {costs.inputs + costs.weights:g} "
            f"(gradients of weights {costs.weights:g}), latency {costs.latency:g}",
            "",
            _grid(simulation, costs, columns),
            "",
            f"step {simulation.makespan:g} · ideal {ideal:g} · bubble {simulation.bubble:.3f} of ideal · "
            f"idle {1 - ideal / simulation.makespan:.1%} of the step",
            "",
            *("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows),
            "",
            "peak live: most (stage, micro-batch) pairs whose activations a rank holds at once, and how many micro-batches of all its",
            "stages that is",
        ]
    )


def _grid(simulation: Simulation, costs: Costs, columns: int) -> str:
    parts = [Fraction(str(cost)) for cost in vars(costs).values() if cost]
    scale = lcm(*(part.denominator for part in parts))
    unit = Fraction(gcd(*(int(part * scale) for part in parts)), scale)
    if simulation.makespan / unit > CELLS:
        return f"(the times have {float(unit):g} in common, too fine for a grid of {CELLS} columns: give rounder ones, or out=grid.svg)"
    letters = "f forward · b backward · w gradients of weights, with the micro-batch; capitals: every other stage of a rank"
    return f"{draw(simulation, float(unit), columns)}\n\n{letters}; a column is {float(unit):g}"


def _value(word: str, key: str, value: str) -> Any:
    """As Hydra would take it; what it cannot read stays a string."""
    try:
        return value if key == "out" else OmegaConf.to_container(OmegaConf.from_dotlist([word]))[key]
    except (YAMLError, OmegaConfBaseException):
        return value


def _full_name(schedule: str) -> str:
    """The one schedule whose name begins so; the word itself where there is none, or several."""
    found = [name for name in SCHEDULES if name.startswith(schedule)]
    return found[0] if len(found) == 1 else schedule


def _cost_violations(options: Options) -> list[str]:
    costs = {"forward": options.forward, "backward": options.backward, "latency": options.latency}
    if options.weights is not None:
        costs["weights"] = options.weights
    found = [f"{key}={cost!r}: a time is a number that is not negative" for key, cost in costs.items() if not _is_time(cost)]
    found += [f"{key}=0: must take some time" for key in ("forward", "backward") if costs[key] == 0]
    if not found and costs.get("weights", 0) > options.backward:
        found.append(f"weights={options.weights:g} is a part of backward={options.backward:g}: give at most that")
    return found


def _is_time(cost: object) -> bool:
    return isinstance(cost, int | float) and not isinstance(cost, bool) and 0 <= cost < inf


def _out_violations(options: Options) -> list[str]:
    reason = None if options.out is None else picture_refusal(options.out)
    return [] if reason is None else [f"out={reason}"]
