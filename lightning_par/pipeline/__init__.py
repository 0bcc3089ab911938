"""Level 3. Pipeline parallelism: schedules as data, and an engine that runs them on an unmodified forward."""

from lightning_par.pipeline.aside import aside, unchanged
from lightning_par.pipeline.backward import children_first
from lightning_par.pipeline.draw import draw
from lightning_par.pipeline.engine import Pipeline
from lightning_par.pipeline.errors import PipelineError
from lightning_par.pipeline.figure import refusal as picture_refusal
from lightning_par.pipeline.figure import save_figure
from lightning_par.pipeline.plan import forward_plan, training_plan
from lightning_par.pipeline.simulate import Costs, ScheduleError, Simulation, peak_held, simulate
from lightning_par.pipeline.split import Placement, find_layers, named_layers, place, spread
from lightning_par.pipeline.stage import Arrived, StageExit
from lightning_par.pipeline.unknown import Unknown, require_known
from lightning_par.pipeline.uses import NumbersError, Uses, dry_run
from lightning_par.pipeline.weigh import LayerCosts, weigh

__all__ = [
    "Arrived",
    "Costs",
    "LayerCosts",
    "NumbersError",
    "Pipeline",
    "PipelineError",
    "Placement",
    "ScheduleError",
    "Simulation",
    "StageExit",
    "Unknown",
    "Uses",
    "aside",
    "children_first",
    "draw",
    "dry_run",
    "find_layers",
    "forward_plan",
    "named_layers",
    "peak_held",
    "picture_refusal",
    "place",
    "require_known",
    "save_figure",
    "simulate",
    "spread",
    "training_plan",
    "unchanged",
    "weigh",
]
