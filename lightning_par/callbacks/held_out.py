"""The held-out loss at the start and at the end of a fit."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.callbacks import Callback
from typing_extensions import override


class HeldOutLoss(Callback):
    """Keeps `metric` as the sanity check found it (when it covers all of the held-out data) and as the last validation did."""

    def __init__(self, metric: str = "val_loss") -> None:
        self.metric = metric
        self.first: float | None = None
        self.last: float | None = None
        self.last_step: int | None = None

    @override
    def on_sanity_check_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.num_sanity_val_batches == trainer.num_val_batches:
            self.first = self._read(trainer)

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.last, self.last_step = self._read(trainer), trainer.global_step

    def _read(self, trainer: L.Trainer) -> float | None:
        value = trainer.callback_metrics.get(self.metric)
        return None if value is None else float(value)
