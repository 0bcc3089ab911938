"""Train what a config describes, on this rank."""

from __future__ import annotations

import logging
from typing import Any

import lightning as L
from hydra.utils import instantiate
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, OmegaConf

from lightning_par.callbacks import HeldOutLoss
from lightning_par.cli.summary import closing_summary

log = logging.getLogger(__name__)


def train(config: DictConfig) -> tuple[dict[str, float], dict[str, Any]]:
    """Fit the model of a resolved config; every rank calls this.

    Returns the last metrics by name, and the objects that were built: module, datamodule, trainer.
    """
    L.seed_everything(config.seed, workers=True, verbose=False)
    module: L.LightningModule = instantiate(config.model, _convert_="all")
    datamodule: L.LightningDataModule = instantiate(config.data, _convert_="all")
    callbacks: list[Callback] = [instantiate(node, _convert_="all") for node in config.callbacks.values() if node is not None]
    loggers = build_loggers(config)
    trainer = build_trainer(config, callbacks, loggers)
    try:
        trainer.fit(module, datamodule=datamodule, ckpt_path=config.ckpt_path, weights_only=True)
        metrics = dict(trainer.callback_metrics)
        _validate_if_stale(trainer, module, datamodule)
        metrics |= trainer.callback_metrics
    finally:
        for logger in loggers:
            if hasattr(logger, "close"):
                logger.close()
    if trainer.is_global_zero:
        print(closing_summary(config, trainer), flush=True)
    return {name: float(value) for name, value in metrics.items()}, {"module": module, "datamodule": datamodule, "trainer": trainer}


def build_loggers(config: DictConfig) -> list[Logger]:
    """The loggers of `config.logger`; one whose node has the key `config` is given the whole config of the run."""
    whole = OmegaConf.to_container(config, resolve=True)
    makers = [(instantiate(node, _partial_=True, _convert_="all"), "config" in node) for node in config.logger.values()]
    return [make(config=whole) if takes_config else make() for make, takes_config in makers]


def build_trainer(config: DictConfig, callbacks: list[Callback], loggers: list[Logger]) -> L.Trainer:
    """The Trainer of a config; a strategy of Lightning's own gets the plugin that Lightning makes for the precision's name."""
    options: dict[str, Any] = {"strategy": config.trainer.strategy, "precision": config.precision.precision}
    if config.trainer.strategy is None:
        from lightning_par import HybridParallelStrategy

        strategy = HybridParallelStrategy(**OmegaConf.to_container(config.parallel, resolve=True))
        options = {"strategy": strategy, "plugins": [instantiate(config.precision, _convert_="all")]}
    make = instantiate(config.trainer, _partial_=True, _convert_="all")
    return make(callbacks=callbacks, logger=loggers, **options)


def _validate_if_stale(trainer: L.Trainer, module: L.LightningModule, datamodule: L.LightningDataModule) -> None:
    """Bring the held-out loss up to the last step, where the last validation lies before it."""
    watchers = [callback for callback in trainer.callbacks if isinstance(callback, HeldOutLoss)]
    if trainer.enable_validation and any(watcher.last_step != trainer.global_step for watcher in watchers):
        trainer.validate(module, datamodule=datamodule, verbose=False, weights_only=True)
