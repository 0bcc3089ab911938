"""Parallel training strategies for PyTorch Lightning: any mix of data, ZeRO, tensor, pipeline and context parallelism, same numbers."""

from lightning_par.checkpoint import Target as DeepSpeedTarget
from lightning_par.checkpoint import convert
from lightning_par.layout import LayoutError, ParallelLayout
from lightning_par.numerics import DynamicLossScale, StaticLossScale
from lightning_par.precision import ParallelPrecision
from lightning_par.strategy import (
    ContextParallelStrategy,
    HybridParallelStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeROStrategy,
    register,
)
from lightning_par.strategy.folders import teach_lightning
from lightning_par.zero import ZeroOptions, full_gradient, full_optimizer_state, full_parameters

__version__ = "0.1.0"

__all__ = [
    "ContextParallelStrategy",
    "DeepSpeedTarget",
    "DynamicLossScale",
    "HybridParallelStrategy",
    "LayoutError",
    "ParallelLayout",
    "ParallelPrecision",
    "PipelineParallelStrategy",
    "StaticLossScale",
    "TensorParallelStrategy",
    "ZeROStrategy",
    "ZeroOptions",
    "convert",
    "full_gradient",
    "full_optimizer_state",
    "full_parameters",
]

register()
teach_lightning()
