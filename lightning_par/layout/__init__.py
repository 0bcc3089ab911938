"""Level 0. Integers and dataclasses: which rank stands where, which rank holds what."""

from lightning_par.layout.grid import AXES, RankGrid
from lightning_par.layout.parallel_layout import LayoutError, ModelFacts, ParallelLayout
from lightning_par.layout.shard_spec import Box, ShardSpec
from lightning_par.layout.span import Span, split

__all__ = ["AXES", "Box", "LayoutError", "ModelFacts", "ParallelLayout", "RankGrid", "ShardSpec", "Span", "split"]
