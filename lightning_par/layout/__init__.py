"""Level 0. Integers and dataclasses: which rank stands where, which rank holds what."""

from lightning_par.layout.grid import AXES, RankGrid
from lightning_par.layout.parallel_layout import LayoutError, ModelFacts, ParallelLayout
from lightning_par.layout.schedules import SCHEDULES, Action, Kind, Schedule
from lightning_par.layout.shard_spec import Box, ShardSpec
from lightning_par.layout.span import Span, split

__all__ = [
    "AXES",
    "SCHEDULES",
    "Action",
    "Box",
    "Kind",
    "LayoutError",
    "ModelFacts",
    "ParallelLayout",
    "RankGrid",
    "Schedule",
    "ShardSpec",
    "Span",
    "split",
]
