"""What a layout cannot do with a module and a Trainer, said before any process starts."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning, ModelPruning, ModelSummary, StochasticWeightAveraging
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from lightning_par.layout import ParallelLayout
from lightning_par.pipeline import PipelineError, place
from lightning_par.strategy.weight_averaging import averages
from lightning_par.tensor import PlanError, resolve_plan


def module_violations(layout: ParallelLayout, module: pl.LightningModule) -> list[str]:
    """What tp and pp would say of the module once ranks run."""
    found = []
    try:
        if layout.tp > 1:
            resolve_plan(module)
    except PlanError as error:
        found.append(f"tp={layout.tp}: {error}")
    try:
        if layout.pp > 1:
            measured = layout.balance == "profile"  # and not yet: any cut tells whether there can be one
            place(module, layout.pp * layout.chunks, balance="parameters" if measured else layout.balance)
    except PipelineError as error:
        found.append(f"pp={layout.pp}: {error}")
    routed = [type(part).__name__ for part in module.modules() if getattr(getattr(part, "config", None), "output_router_logits", False)]
    if layout.pp > 1 and routed:
        found.append(
            f"pp={layout.pp}: {routed[0]} has config.output_router_logits=True, and with it a loss over what transformers collects from "
            "the routers of all layers, of which a pipeline stage has a part: set it to False, which does without that loss, or use pp=1"
        )
    return found


def loop_violations(layout: ParallelLayout, ranks: int, module: pl.LightningModule, trainer: pl.Trainer) -> list[str]:
    """What of training, its callbacks and the module's kind does not go with the layout on so many ranks."""
    found = []
    replicas = ranks // (layout.tp * layout.pp * layout.cp)
    for axis, degree in (("pp", layout.pp), ("cp", layout.cp)):
        if degree > 1 and not module.automatic_optimization:
            found.append(
                f"manual optimization with {axis}={degree}: the step runs on parts of a batch, which only automatic optimization puts "
                f"together; set automatic_optimization=True, or {axis}=1"
            )
    if averages(trainer.callbacks) and layout.tp * layout.pp > 1:
        found.append(
            f"a WeightAveraging callback with tp={layout.tp}, pp={layout.pp}: it keeps a copy of the whole module, which no rank has then; "
            "use data, ZeRO or context parallelism with it"
        )
    swa = any(isinstance(callback, StochasticWeightAveraging) for callback in trainer.callbacks)
    if swa and (layout.tp * layout.pp > 1 or layout.zero == 3):
        found.append(
            f"the StochasticWeightAveraging callback with tp={layout.tp}, pp={layout.pp}, zero={layout.zero}: it works on a copy of the "
            "whole module; use data or context parallelism with zero at most 2, or a WeightAveraging callback, which takes zero=3 too"
        )
    found += [told for callback in trainer.callbacks if (told := _callback_violation(layout, callback))]
    norms = [name for name, submodule in module.named_modules() if isinstance(submodule, _BatchNorm)]
    if norms and (layout.pp > 1 or layout.cp > 1):
        found.append(
            f"{norms[0]} is a batch norm: with pp={layout.pp}, cp={layout.cp} it would see parts of a batch, and its statistics would be "
            "others than those of one process; use a norm over features, or pp=1 and cp=1"
        )
    is_run_once = layout.pp == 1 or (layout.microbatches == 1 and layout.chunks == 1)
    tracking = [
        name for name, submodule in module.named_modules() if isinstance(submodule, _InstanceNorm) and submodule.track_running_stats
    ]
    if tracking and (not is_run_once or layout.cp > 1):
        found.append(
            f"{tracking[0]} is an instance norm with track_running_stats=True: with pp={layout.pp}, cp={layout.cp} it would update its "
            "statistics with every part of a batch; set track_running_stats=False, or microbatches=1 and cp=1"
        )
    spectral = [name for name, submodule in module.named_modules() if _has_spectral_norm(submodule)]
    if spectral and not is_run_once:
        found.append(
            f"{spectral[0]} has a spectral_norm: with pp={layout.pp} it would update its estimate of a weight's norm with every "
            "micro-batch, not once a batch; set microbatches=1 and chunks=1, or pp=1"
        )
    placed = f"with dp={replicas}, pp={layout.pp}, cp={layout.cp}"
    frequent = [name for name, submodule in module.named_modules() if getattr(submodule, "scale_grad_by_freq", False)]
    if frequent and (replicas > 1 or layout.cp > 1 or (layout.pp > 1 and layout.microbatches != 1)):
        found.append(
            f"{frequent[0]} is an embedding with scale_grad_by_freq=True: {placed} it would count how often a token is there in every "
            "part of a batch, not in the whole; set scale_grad_by_freq=False, or dp=1, microbatches=1 and cp=1"
        )
    embeddings = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    bounded = [(name, part) for name, part in embeddings if part.max_norm is not None]
    named = [id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False)]
    is_tied = any(named.count(id(part.weight)) > 1 for _, part in bounded)
    if bounded and (replicas > 1 or layout.cp > 1 or (layout.pp > 1 and is_tied)):
        found.append(
            f"{bounded[0][0]} is an embedding with max_norm={bounded[0][1].max_norm}: {placed} each rank that has it would scale down "
            "the rows of its own tokens only; set max_norm=None, or dp=1 and cp=1 (and pp=1 if its weight is tied)"
        )
    if layout.pp > 1 and module.example_input_array is not None and (runs := _runs_example(trainer)):
        found.append(
            f"example_input_array with pp={layout.pp}: {runs} would run the model on it, but layers of other stages run only within "
            "steps; pass Trainer(enable_model_summary=False) and no log_graph, or set example_input_array=None"
        )
    return found


def _callback_violation(layout: ParallelLayout, callback: pl.Callback) -> str:
    """Of callbacks that put other parameters in the place of those that are trained; nothing: ''."""
    name = type(callback).__name__
    if isinstance(callback, ModelPruning):
        return (
            f"the {name} callback: it replaces parameters in the middle of training, of which neither the optimizer's shards nor a "
            "checkpoint know; prune the module before the fit (torch.nn.utils.prune), or train it with a strategy of Lightning's own"
        )
    if isinstance(callback, BackboneFinetuning):
        return (
            f"the {name} callback: it gives the optimizer new param groups in the middle of training, but gradients are laid out when it "
            "starts; unfreeze the backbone before a second fit, or give configure_optimizers all groups from the start"
        )
    if isinstance(callback, BaseFinetuning) and (layout.zero or layout.pp > 1):
        return (
            f"the {name} callback with zero={layout.zero}, pp={layout.pp}: a BaseFinetuning looks the optimizer's parameters up in the "
            "whole module, but a rank's optimizer holds shards, or those of one stage; use zero=0 and pp=1, or change what is trained "
            "before a second fit"
        )
    return ""


def _has_spectral_norm(module: nn.Module) -> bool:
    """That of ``parametrizations``, or the older one."""
    return isinstance(module, _SpectralNorm) or any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values())


def _runs_example(trainer: pl.Trainer) -> str:
    """What would run the model's example input before training; nothing: ''."""
    if any(isinstance(callback, ModelSummary) and callback._max_depth for callback in trainer.callbacks):
        return "the model summary"
    return next((f"{type(logger).__name__}(log_graph=True)" for logger in trainer.loggers if getattr(logger, "_log_graph", False)), "")
