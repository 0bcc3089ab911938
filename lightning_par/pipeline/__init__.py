"""Level 3. Pipeline parallelism: schedules as data, and an engine that runs them on an unmodified forward."""

from lightning_par.pipeline.engine import Pipeline
from lightning_par.pipeline.errors import PipelineError
from lightning_par.pipeline.plan import forward_plan, training_plan
from lightning_par.pipeline.simulate import Costs, ScheduleError, Simulation, simulate
from lightning_par.pipeline.split import Placement, named_layers, place, spread
from lightning_par.pipeline.stage import StageExit

__all__ = [
    "Costs",
    "Pipeline",
    "PipelineError",
    "Placement",
    "ScheduleError",
    "Simulation",
    "StageExit",
    "forward_plan",
    "named_layers",
    "place",
    "simulate",
    "spread",
    "training_plan",
]
