"""The loss scale, and what it cost."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from typing_extensions import override


class LossScaleMonitor(Callback):
    """Logs `loss_scale`, `loss_scale_hysteresis` (overflows left before it shrinks) and `skipped_steps` (since the run began) each batch.

    Where losses are not scaled it logs nothing.
    """

    @override
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        state = getattr(trainer.precision_plugin, "scale", None)
        if state is not None:
            left = float(max(1, state.left))
            pl_module.log_dict({"loss_scale": state.scale, "loss_scale_hysteresis": left, "skipped_steps": float(state.skipped)})
