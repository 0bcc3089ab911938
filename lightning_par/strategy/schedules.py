"""LR schedulers where steps may be skipped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer


@contextmanager
def wait_for_steps(module: pl.LightningModule, steps: Mapping[Optimizer, tuple[int, int]]) -> Iterator[None]:
    """Inside the block a scheduler does not move if all steps that its optimizer has tried since it was last asked to were skipped.

    Args:
        steps: of each optimizer: how many steps were tried, and how many of them taken.
    """
    real, seen = module.lr_scheduler_step, {}

    def step(scheduler: Any, metric: Any) -> None:
        tried, taken = steps.get(scheduler.optimizer, (0, 0))
        before = seen.get(scheduler, (0, 0))
        seen[scheduler] = (tried, taken)
        if tried == before[0] or taken > before[1]:
            real(scheduler, metric)

    module.__dict__["lr_scheduler_step"] = step
    try:
        yield
    finally:
        del module.__dict__["lr_scheduler_step"]
