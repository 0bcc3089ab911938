"""What every causal language model of the recipes shares: the three steps, AdamW with decay groups, warmup and cosine."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

OptimizerFactory = Callable[[Iterable[dict[str, Any]]], torch.optim.Optimizer]


class CausalLMModule(L.LightningModule):
    """Trains `model`, any callable on a batch's keys that returns something with a `.loss`.

    `optimizer` takes parameter groups and returns the optimizer (in YAML: a `_partial_: true` node); the default is AdamW.
    The learning rate rises over `warmup_steps`, then follows a cosine down to `min_lr_ratio` of its peak at `decay_steps`
    (None = the last step of the trainer).
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: OptimizerFactory | None = None,
        warmup_steps: int = 0,
        decay_steps: int | None = None,
        min_lr_ratio: float = 0.1,
    ) -> None:
        super().__init__()
        self.model = model
        self.optimizer_factory = optimizer or functools.partial(torch.optim.AdamW, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
        self.warmup_steps = warmup_steps
        self.decay_steps = decay_steps
        self.min_lr_ratio = min_lr_ratio

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        out = self.model(**batch)
        self.log("train_loss", out.loss, prog_bar=True)
        return out.loss

    @override
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        out = self.model(**batch)
        self.log("val_loss", out.loss, prog_bar=True, sync_dist=True)
        return out.loss

    @override
    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        out = self.model(**batch)
        self.log("test_loss", out.loss, sync_dist=True)
        return out.loss

    @override
    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = self.optimizer_factory(decay_groups(self))
        decay_steps = self.decay_steps or self.trainer.estimated_stepping_batches
        shape = functools.partial(warmup_cosine, warmup_steps=self.warmup_steps, decay_steps=decay_steps, min_ratio=self.min_lr_ratio)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, shape), "interval": "step"}}


def decay_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Two parameter groups: matrices, which decay, and the rest (biases, norms), which do not. Frozen ones are left out."""
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2]},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def warmup_cosine(step: int, *, warmup_steps: int, decay_steps: float, min_ratio: float) -> float:
    """The factor on the learning rate at optimizer step `step`; an endless run (`decay_steps` infinite) stays at 1."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if math.isinf(decay_steps):
        return 1.0
    progress = (step - warmup_steps) / max(1.0, decay_steps - warmup_steps)
    return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
