"""The engine's model and data under our strategy, going on from the engine's checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy
from tests.checkpoint.deepspeed.engine import SAVED, Awkward, optimizer
from tests.checkpoint.fits import QUIET


class Module(Awkward, L.LightningModule):
    """``Awkward``, with the names that it has under the engine."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        with torch.no_grad():  # nothing may survive of it
            for tensor in (*self.parameters(), self.shift):
                tensor.add_(1.0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer(self)


def batches(first: int, steps: int, ranks: int) -> list[Tensor]:
    """Rows of the global batches of the engine's ``ranks`` ranks, in the order in which as many replicas draw them."""
    rows = []
    for step in range(first, first + steps):
        drawn = [torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(100 * step + rank)) for rank in range(ranks)]
        rows += [drawn[rank][row] for row in range(2) for rank in range(ranks)]
    return rows


def resume(folder: Path, layout: dict[str, int], precision: str, steps: int, ranks: int = 2) -> dict[str, Any]:
    """Go on for ``steps`` steps; what this rank has then. ``ranks``: of the engine, whose batches these are."""
    strategy = HybridParallelStrategy(**layout)
    settings = QUIET | {"max_steps": SAVED + steps, "precision": precision}
    trainer = L.Trainer(devices=layout.get("dp", 1), strategy=strategy, **settings)
    module = Module()
    loader = DataLoader(batches(SAVED, steps, ranks), batch_size=2 * ranks // layout.get("dp", 1), shuffle=False)
    trainer.fit(module, loader, ckpt_path=folder)
    weights = strategy.full_state_dict()
    return {"losses": module.losses, "weights": weights, "steps": trainer.global_step, "scale": strategy.precision_plugin.loss_scale}
