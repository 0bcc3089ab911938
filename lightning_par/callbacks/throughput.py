"""Tokens a second of the whole job."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from typing_extensions import override


class Throughput(Callback):
    """Logs `tokens_per_s`, over all data-parallel replicas and since the last log, and keeps the mean over the fit.

    Tokens are the elements of `batch[key]`; batches that have no such tensor are not counted. Time counts from the end of the first step,
    so that start-up stays out of it; validation is left out too.
    """

    def __init__(self, key: str = "input_ids") -> None:
        self.key = key
        self.mean: float | None = None

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._replicas = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
        self._tokens, self._seconds, self._since = 0, 0.0, None
        self._logged = (0, 0.0)

    @override
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = time.perf_counter()
        tokens = batch.get(self.key) if isinstance(batch, Mapping) else None
        if self._since is not None and isinstance(tokens, Tensor):
            self._tokens += tokens.numel() * self._replicas
            self._seconds += now - self._since
            self.mean = self._tokens / self._seconds
        self._since = now
        if trainer.loggers and trainer.global_step % trainer.log_every_n_steps == 0:
            self._log(trainer)

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._since = time.perf_counter()

    def _log(self, trainer: L.Trainer) -> None:
        tokens, seconds = self._tokens - self._logged[0], self._seconds - self._logged[1]
        if seconds > 0:
            for logger in trainer.loggers:
                logger.log_metrics({"tokens_per_s": tokens / seconds}, step=trainer.global_step)
        self._logged = (self._tokens, self._seconds)
