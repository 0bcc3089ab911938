"""One axis at a time, and the names under which ``Trainer(strategy=...)`` knows all of it."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from lightning_par.strategy.base import HybridParallelStrategy


class ZeROStrategy(HybridParallelStrategy):
    """All ranks are data-parallel replicas; ``stage`` says what they share. See ``HybridParallelStrategy``."""

    def __init__(self, stage: int = 1, **options: Any) -> None:
        super().__init__(zero=stage, **options)


class TensorParallelStrategy(HybridParallelStrategy):
    """Groups of ``size`` ranks share each matrix. See ``HybridParallelStrategy``."""

    def __init__(self, size: int, **options: Any) -> None:
        super().__init__(tp=size, **options)


class PipelineParallelStrategy(HybridParallelStrategy):
    """Groups of ``size`` ranks share the layers. See ``HybridParallelStrategy``."""

    def __init__(self, size: int, **options: Any) -> None:
        super().__init__(pp=size, **options)


class ContextParallelStrategy(HybridParallelStrategy):
    """Groups of ``size`` ranks share each sequence. See ``HybridParallelStrategy``."""

    def __init__(self, size: int, **options: Any) -> None:
        super().__init__(cp=size, **options)


NAMES: dict[str, dict[str, Any]] = {
    "par": {},
    "par_ddp": {"zero": 0},
    "par_zero1": {"zero": 1},
    "par_tp2": {"tp": 2},
    "par_pp2": {"pp": 2},
    "par_cp2": {"cp": 2},
    "par_tp2_pp2": {"tp": 2, "pp": 2},
}
"""Registered names and the layout fields they stand for."""


def register() -> None:
    """Make ``Trainer(strategy="par_zero1")`` and the others work; done when the package is imported."""
    for name, fields in NAMES.items():
        if name not in StrategyRegistry:
            told = ", ".join(f"{key}={value}" for key, value in fields.items()) or "all ranks data-parallel"
            StrategyRegistry.register(name, HybridParallelStrategy, description=f"lightning_par: {told}", **fields)
