"""The newest state of a run, under one name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint, WeightAveraging
from typing_extensions import override


class SaveLast(Checkpoint):
    """Saves to `path` when the fit ends, and every `every_n_steps` optimizer steps before that."""

    def __init__(self, path: str | Path, every_n_steps: int | None = None) -> None:
        self.path = Path(path)
        self.every_n_steps = every_n_steps
        self._saved_step: int | None = None

    @override
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.every_n_steps and trainer.global_step % self.every_n_steps == 0:
            self._save(trainer)

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Callbacks that average weights put the averages in the place of those that are trained as the fit ends."""
        if trainer.fit_loop.done and any(isinstance(callback, WeightAveraging) for callback in trainer.callbacks):
            self._save(trainer)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._save(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        if self._saved_step != trainer.global_step and not trainer.fast_dev_run:
            self._saved_step = trainer.global_step
            trainer.save_checkpoint(self.path, weights_only=False)
