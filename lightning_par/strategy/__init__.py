"""Level 6. The Strategy: where the axes meet the Trainer."""

from lightning_par.strategy.base import HybridParallelStrategy
from lightning_par.strategy.facts import config_facts, model_facts
from lightning_par.strategy.presets import (
    ContextParallelStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeROStrategy,
    register,
)

__all__ = [
    "ContextParallelStrategy",
    "HybridParallelStrategy",
    "PipelineParallelStrategy",
    "TensorParallelStrategy",
    "ZeROStrategy",
    "config_facts",
    "model_facts",
    "register",
]
