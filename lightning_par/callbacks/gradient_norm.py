"""The norm of the gradient, before and after clipping."""

from __future__ import annotations

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch.optim import Optimizer
from typing_extensions import override

from lightning_par.strategy import HybridParallelStrategy


class GradientNorm(Callback):
    """Logs `grad_norm`, the norm of the whole model's gradient before clipping, and, where Trainer clips by norm, `grad_norm_clipped`.

    Under any layout it is the norm that one process would see. It costs one pass over the gradients and one small reduction a step.
    """

    def __init__(self, norm_type: float = 2.0) -> None:
        self.norm_type = norm_type

    @override
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        if isinstance(trainer.strategy, HybridParallelStrategy):
            norm = trainer.strategy.grad_norm(optimizer, self.norm_type)
        else:
            grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(grads, self.norm_type)
        pl_module.log("grad_norm", norm)
        limit, by_norm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm in (None, "norm")
        if limit and by_norm and self.norm_type == 2.0:
            pl_module.log("grad_norm_clipped", norm.clamp(max=float(limit)))
