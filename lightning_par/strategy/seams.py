"""The only place that knows Lightning's private names. When Lightning moves, this file moves."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.io import torch_io
from lightning.fabric.utilities.data import _set_sampler_epoch, sized_len
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.distributed import (
    _all_gather_ddp_if_available,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
)
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.fabric.utilities.types import _Stateful
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.core import saving
from lightning.pytorch.loops.evaluation_loop import RestartStage
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.data import _update_dataloader, has_iterable_dataset
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, Sampler
from torchmetrics import Metric, MetricCollection
from typing_extensions import override

from lightning_par.checkpoint.native import recover
from lightning_par.comm import Group

__all__ = [
    "CheckedLauncher",
    "accumulation",
    "asked_precision",
    "backward_multiplier",
    "begin_epoch",
    "combination",
    "completed",
    "dataloaders",
    "ends_job",
    "fail_on_sigterm",
    "gather",
    "is_last_batch",
    "is_stateful",
    "is_validating",
    "join_world",
    "length",
    "logged_in",
    "logged_in_training",
    "logged_values_are_synced",
    "metric_states",
    "metrics",
    "no_word_of_lost_places",
    "note_sigterm",
    "order_of",
    "pass_over_validation",
    "predicts",
    "read_also",
    "restrict_metrics",
    "seed_workers",
    "set_batches",
    "set_epoch",
    "set_logged",
    "set_logged_rank",
    "set_metric_states",
    "set_metrics",
    "set_up_again",
    "takes_batches",
    "tell_dtype",
    "train_loaders",
    "transferred",
    "update_plateaus",
    "update_plateaus_later",
    "update_step_plateaus",
    "validate_next",
    "validates",
    "validation_stays",
    "wants_sampler",
    "with_sampler",
    "zeroes_gradients",
]


class CheckedLauncher(_SubprocessScriptLauncher):
    """Starts the other local ranks as copies of this script (unless torchrun or a cluster did), after checking that they can run."""

    def __init__(self, cluster: ClusterEnvironment, processes: int, nodes: int, check: Callable[[pl.Trainer, object], None]) -> None:
        super().__init__(cluster, processes, nodes)
        self._check = check

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        assert trainer is not None
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, pl.LightningDataModule | DataLoader)]
        self._check(trainer, given[0] if given else None)  # the Trainer itself does not know it yet
        if any(isinstance(value, str) and value == "last" for value in (*args, *kwargs.values())):
            _recover_last(trainer)
        return super().launch(function, *args, trainer=trainer, **kwargs)

    def end_others(self) -> None:
        """Stop the ranks that this process started; they would wait for it in a collective."""
        self.kill(signal.SIGTERM)


def _recover_last(trainer: pl.Trainer) -> None:
    """Before Lightning looks for ``ckpt_path="last"``: give a checkpoint its name back that a crash left under another."""
    for callback in trainer.checkpoint_callbacks:
        folder = callback._ModelCheckpoint__resolve_ckpt_dir(trainer) if isinstance(callback, ModelCheckpoint) else None
        if folder is not None:
            recover(Path(folder))


def ends_job(filepath: str | os.PathLike[str]) -> bool:
    """Whether this is the checkpoint after which Lightning gives the job back to SLURM."""
    return Path(filepath).name.startswith("hpc_ckpt_")


def predicts(module: pl.LightningModule | None) -> bool:
    """Whether the trainer of ``module`` is predicting."""
    trainer = getattr(module, "_trainer", None)
    return trainer is not None and trainer.state.fn == TrainerFn.PREDICTING


def wants_sampler(trainer: pl.Trainer, dataloader: object) -> bool:
    """The dataloader's samples are to be divided over replicas: it is none that divides itself, and the user did not say no."""
    return (
        isinstance(dataloader, DataLoader)
        and trainer._accelerator_connector.use_distributed_sampler
        and not isinstance(order_of(dataloader), DistributedSampler)
        and not has_iterable_dataset(dataloader)
    )


def order_of(dataloader: DataLoader) -> Any:
    """The sampler that orders its samples: a batch sampler of the user's has one of its own."""
    return getattr(dataloader.batch_sampler, "sampler", dataloader.sampler)


def with_sampler(dataloader: DataLoader, sampler: Sampler) -> DataLoader:
    """The same dataloader, custom batch samplers included, over another sampler."""
    return _update_dataloader(dataloader, sampler)


def seed_workers(dataloader: DataLoader, replica: int) -> None:
    """After ``seed_everything(workers=True)``: ranks of one replica load the same samples, so their workers share random numbers."""
    if int(os.environ.get("PL_SEED_WORKERS", 0)) and dataloader.worker_init_fn in (None, pl_worker_init_function):
        dataloader.worker_init_fn = partial(pl_worker_init_function, rank=replica)


def is_stateful(dataloader: object) -> bool:
    """Lightning saves and restores its state."""
    return isinstance(dataloader, _Stateful)


def length(dataloader: object) -> int | None:
    """In batches, if it has one."""
    return sized_len(dataloader)


def set_epoch(dataloader: object, epoch: int) -> None:
    """Tell its sampler, as Lightning does before an epoch."""
    _set_sampler_epoch(dataloader, epoch)


def takes_batches(trainer: pl.Trainer) -> bool:
    """Lightning fetches a batch for each training step; otherwise the step gets the iterator itself."""
    return not is_param_in_hook_signature(trainer.lightning_module.training_step, "dataloader_iter", explicit=True)


def train_loaders(trainer: pl.Trainer) -> CombinedLoader | None:
    """Those of the fit at hand."""
    return trainer.fit_loop._combined_loader


def set_up_again(trainer: pl.Trainer) -> None:
    """Let the fit at hand process its dataloaders, even if somebody asked for their length before a checkpoint was read."""
    if trainer.fit_loop._combined_loader is not None:
        trainer.fit_loop._combined_loader.reset()
        trainer.fit_loop._combined_loader = None


def combination(loaders: CombinedLoader) -> str:
    """The name of the way in which batches of several dataloaders are put together."""
    return loaders._mode


def set_batches(trainer: pl.Trainer, count: int) -> None:
    """A loop that was restored has given out so many batches of its epoch."""
    current = trainer.fit_loop.epoch_loop.batch_progress.current
    lag = current.processed - current.completed
    current.ready = current.started = current.processed = count
    current.completed = count - lag


def accumulation(trainer: pl.Trainer) -> int:
    """How many batches make an optimizer step in the epoch at hand, also if it began before a checkpoint."""
    for callback in trainer.callbacks:
        if isinstance(callback, GradientAccumulationScheduler):
            return callback.get_accumulate_grad_batches(trainer.current_epoch)
    return trainer.accumulate_grad_batches


def begin_epoch(trainer: pl.Trainer) -> None:
    """A loop that was restored begins an epoch."""
    trainer.fit_loop._restarting = False
    trainer.fit_loop.epoch_loop.restarting = False


def validates(trainer: pl.Trainer) -> bool:
    """Validation comes after the training batch at hand."""
    fit_loop = trainer.fit_loop
    return fit_loop._data_fetcher is not None and fit_loop.epoch_loop._should_check_val_fx(fit_loop._data_fetcher)


def is_validating(trainer: pl.Trainer) -> bool:
    """Of the validation at hand there is a batch left."""
    progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
    is_over = progress.is_last_batch and progress.current.completed == progress.current.ready
    return trainer.state.stage == RunningStage.VALIDATING and not is_over


def validation_stays(trainer: pl.Trainer) -> bool:
    """There are iterators that stay from one validation to the next."""
    loaders = trainer.fit_loop.epoch_loop.val_loop._combined_loader
    return loaders is not None and any(getattr(loader, "_iterator", None) is not None for loader in loaders.flattened)


def validate_next(trainer: pl.Trainer) -> None:
    """A loop that was restored begins with validation, if that comes there with the settings of now."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    loop._has_run = not validates(trainer)  # otherwise an epoch without a batch left would train one more
    loop.batch_progress.reset()
    loop._restart_stage = RestartStage.RESTARTED_MID_EVALUATION


def pass_over_validation(trainer: pl.Trainer) -> None:
    """A loop that was restored where validation is over makes no iterator for it, which would draw a random number."""
    trainer.fit_loop.epoch_loop.val_loop.increment_progress_to_evaluation_end = lambda: None  # type: ignore[method-assign]


def logged_in_training(trainer: pl.Trainer) -> list[str]:
    """Names of the metrics that training logs over an epoch."""
    metas = [result.meta for result in trainer.fit_loop.epoch_loop._results.values()]
    return sorted({name for meta in metas for name in (meta.name, meta.forked_name(on_step=False))})


def metrics(trainer: pl.Trainer, *, complete: bool) -> dict[str, Tensor]:
    """What callbacks can ask for; without training's, unless the epoch is ``complete``: all ranks call together, which may add up then."""
    if complete:
        return {name: value.detach().cpu() for name, value in trainer.callback_metrics.items()}
    partial = logged_in_training(trainer)
    return {name: value.detach().cpu() for name, value in trainer._logger_connector._callback_metrics.items() if name not in partial}


def set_metrics(trainer: pl.Trainer, metrics: dict[str, Tensor]) -> None:
    """Let callbacks ask for what was logged before a checkpoint."""
    trainer._logger_connector._callback_metrics.update(metrics)


def update_plateaus(trainer: pl.Trainer) -> None:
    """What Lightning does after ``on_train_epoch_end``, of the epoch before the one that begins: step each ReduceLROnPlateau."""
    epochs = trainer.fit_loop.epoch_progress.current
    epochs.completed -= 1
    trainer.fit_loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
    epochs.completed += 1


def update_step_plateaus(trainer: pl.Trainer, partial: list[str]) -> None:
    """What Lightning does after a training batch and its validation: step each ReduceLROnPlateau of interval "step". As for epochs."""
    if lost := [name for name in _monitored(trainer, "step") if name in partial]:
        _tell_lost(lost, "this step")
    else:
        trainer.fit_loop.epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=True)


def update_plateaus_later(trainer: pl.Trainer, partial: list[str]) -> None:
    """Step each ReduceLROnPlateau at the end of the epoch at hand as of any other, unless one goes by a metric that is ``partial``.

    Lightning leaves the epoch out in which it resumed, since it has saved no metrics.
    """
    if lost := [name for name in _monitored(trainer, "epoch") if name in partial]:
        _tell_lost(lost, "this epoch")
    else:
        trainer.fit_loop._restarting = False


def _monitored(trainer: pl.Trainer, interval: str) -> list[str]:
    configs = trainer.lr_scheduler_configs
    return [str(config.monitor) for config in configs if config.reduce_on_plateau and config.interval == interval]


def _tell_lost(metrics: list[str], where: str) -> None:
    rank_zero_warn(
        f"the checkpoint was saved in the middle of an epoch, and what training had logged in it is lost: ReduceLROnPlateau on "
        f"{', '.join(metrics)} leaves {where} out. Let it monitor what validation logs, or save at the end of an epoch"
    )


@contextmanager
def no_word_of_lost_places() -> Iterator[None]:
    """Lightning warns of dataloaders that begin anew; ours go on."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch ended")
        yield


def read_also(fits: Callable[[Any], bool], weights: Callable[..., dict[str, Any]], run: Callable[..., dict[str, Any]]) -> None:
    """A path that ``fits`` is read by ``weights(path, map_location)`` for ``load_from_checkpoint``, and by ``run`` for plain strategies."""

    def teach(place: ModuleType, read: Callable[..., dict[str, Any]]) -> None:
        before = place.pl_load

        def load(path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
            return read(path, map_location) if fits(path) else before(path, map_location=map_location, weights_only=weights_only)

        place.pl_load = load

    teach(saving, weights)
    teach(torch_io, run)


def gather(tensor: Tensor, group: Group, *, sync_grads: bool) -> Tensor:
    """[group size, ...]: every rank's tensor; the tensor itself where there is one rank."""
    return _all_gather_ddp_if_available(tensor, group=group.handle, sync_grads=sync_grads) if group.size > 1 else tensor


def restrict_metrics(module: torch.nn.Module, group: Group) -> None:
    """torchmetrics add up over the ranks of ``group`` only; the others hold the same numbers."""
    for metric in module.modules():
        if isinstance(metric, Metric):
            metric.process_group = group.handle
            if group.size == 1:
                metric.distributed_available_fn = lambda: False


def metric_states(module: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """By name, what the torchmetrics of a module have counted."""
    found = dict(module.named_modules())
    for collection in found.values():
        if isinstance(collection, MetricCollection):
            list(collection.items())  # one metric of several with the same state counts for them; here they get it
    return {name: _metric_state(metric) for name, metric in found.items() if isinstance(metric, Metric)}


def set_metric_states(module: torch.nn.Module, states: dict[str, dict[str, Any]]) -> list[str]:
    """Let metrics go on from ``states``; the names of those that have counted something and are not among them."""
    metrics = {name: metric for name, metric in module.named_modules() if isinstance(metric, Metric)}
    for name in metrics.keys() & states.keys():
        metrics[name]._computed = None
        for attribute, value in states[name].items():
            setattr(metrics[name], attribute, value)
    return [name for name, metric in metrics.items() if name not in states and metric._update_count]


def _metric_state(metric: Metric) -> dict[str, Any]:
    return {attribute: getattr(metric, attribute) for attribute in (*metric._defaults, "_update_count")}


def logged_in(trainer: pl.Trainer, hook: str) -> dict[str, dict[str, Tensor]]:
    """By name, the values that ``self.log`` has taken in a hook, but for those of rank 0 only."""
    return {key: _logged_state(metric) for key, metric in _logged_now(trainer) if metric.meta.fx.split(".")[0] == hook}


def set_logged(trainer: pl.Trainer, values: dict[str, dict[str, Tensor]]) -> None:
    """Take these for what was logged under their names."""
    for key, metric in _logged_now(trainer):
        if key in values:
            metric._computed = None
            for attribute, value in values[key].items():
                setattr(metric, attribute, value.to(metric.value.device))


def _logged_now(trainer: pl.Trainer) -> list[tuple[str, Any]]:
    results = trainer._results or {}
    return [(key, metric) for key, metric in results.items() if not metric.has_reset and not metric.meta.sync.rank_zero_only]


def _logged_state(metric: Any) -> dict[str, Tensor]:
    if not metric.is_tensor:
        return {}  # a torchmetric, which has a state of its own
    state = {attribute: getattr(metric, attribute) for attribute in (*metric._defaults, "_forward_cache")}
    return {attribute: value for attribute, value in state.items() if value is not None}


def dataloaders(trainer: pl.Trainer) -> Any:
    """What the run at hand would read now, from the hook that makes it if there is one; None if it reads nothing."""
    loops = {
        TrainerFn.FITTING: trainer.fit_loop,
        TrainerFn.VALIDATING: trainer.validate_loop,
        TrainerFn.TESTING: trainer.test_loop,
        TrainerFn.PREDICTING: trainer.predict_loop,
    }
    source = loops[trainer.state.fn]._data_source
    return _request_dataloader(source) if source.is_defined() else None


def transferred(batch: Any, module: pl.LightningModule) -> Any:
    """A batch as steps get it: converted, moved to the device, through the user's hooks."""
    trainer = module.trainer
    batch = module._on_before_batch_transfer(trainer.precision_plugin.convert_input(batch), dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def join_world(cluster: ClusterEnvironment, device: torch.device, timeout: timedelta) -> None:
    """Create the default process group, unless there is one. It is not bound to a device: NCCL would then split it to make the others."""
    _init_dist_connection(cluster, _get_default_process_group_backend_for_device(device), timeout=timeout)


def note_sigterm(trainer: pl.Trainer) -> None:
    """Let a SIGTERM end all ranks after the batch at hand.

    The next batch begins with Lightning asking rank 0 whether one came. Its own handler would also broadcast at once, between messages
    of the step that the signal interrupted, which the other ranks cannot take apart.
    """

    def note(signum: int, frame: object) -> None:
        if not trainer._signal_connector.received_sigterm and trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(signum)
        trainer._signal_connector.received_sigterm = True

    trainer._signal_connector._sigterm_notifier_fn = note


def fail_on_sigterm(exception: BaseException) -> None:
    """Lightning would end a run that a SIGTERM cut short with exit code 0."""
    if isinstance(exception, SIGTERMException) and exception.code is None:
        exception.code = 128 + signal.SIGTERM


def set_logged_rank(rank: int) -> None:
    """Which rank Lightning's rank-zero functions take this process for."""
    rank_zero_only.rank = rank


def zeroes_gradients(trainer: pl.Trainer, batch_idx: int) -> bool:
    """Lightning will call zero_grad in this batch's closure: it is the first of an accumulation window."""
    return batch_idx % trainer.accumulate_grad_batches == 0


def logged_values_are_synced() -> None:
    """Lightning recommends ``sync_dist=True`` for what is the same on every rank already."""
    warnings.filterwarnings("ignore", message=r"It is recommended to use `self\.log\(.*sync_dist=True", category=PossibleUserWarning)


def is_last_batch(trainer: pl.Trainer) -> bool:
    """Whether the training batch at hand ends this rank's epoch, as far as Lightning knows: not of batches that a step fetches itself."""
    return trainer.fit_loop.epoch_loop.batch_progress.is_last_batch


def backward_multiplier(trainer: pl.Trainer) -> float:
    """What Lightning multiplies ``training_step``'s loss by before it calls backward."""
    return 1.0 / trainer.accumulate_grad_batches


def asked_precision() -> object:
    """The ``precision`` that the Trainer under construction was given, None if there is none.

    Lightning makes bf16-mixed of 16-mixed on CPU before any plugin or strategy hears of it, so the Trainer's own frame is asked.
    """
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), pl.Trainer) and "precision" in frame.f_locals:
            return frame.f_locals["precision"]
        frame = frame.f_back
    return None


def completed(checkpoint: dict[str, Any], trainer: pl.Trainer) -> dict[str, Any]:
    """``checkpoint`` with what Lightning reads in each: of one that another program wrote, only the number of steps is known."""
    checkpoint.setdefault("pytorch-lightning_version", pl.__version__)
    if "loops" not in checkpoint and trainer.state.fn == TrainerFn.FITTING:
        steps = checkpoint.get("global_step", 0)
        loop = trainer.fit_loop.state_dict()
        automatic = trainer.lightning_module.automatic_optimization
        progress = (
            loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]
            if automatic
            else loop["epoch_loop.manual_optimization.optim_step_progress"]
        )
        progress["total"] = {"ready": steps, "completed": steps}
        checkpoint["loops"] = {"fit_loop": loop}
    return checkpoint


def pass_on_zero_grad(strategy: pl.strategies.Strategy) -> None:
    """What modules get from ``self.optimizers()`` inherits the ``zero_grad`` of the optimizer's class; it takes the optimizer's own."""
    for wrapper in strategy._lightning_optimizers:
        wrapper.zero_grad = wrapper.optimizer.zero_grad


def tell_dtype(module: pl.LightningModule, dtype: torch.dtype) -> None:
    """``dtype`` of the module, and of modules of Lightning in it, is this from now on, as after ``module.to(dtype)``."""
    _update_properties(module, dtype=dtype)
