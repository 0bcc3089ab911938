"""Whether a config's layout can run, asked in the parent before any rank is started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf

from lightning_par.layout import LayoutError, ModelFacts, ParallelLayout
from lightning_par.strategy import config_facts
from lightning_par.zero import ZeroOptions

SWITCHES = {"async_save": False, "restore_optimizer": True}
"""Of the strategy, beside the fields of the layout, and their defaults."""


def check_strategy(config: DictConfig) -> None:
    """A strategy of Lightning's knows nothing of the group `parallel`.

    Raises:
        LayoutError: both are chosen.
    """
    defaults = {field: getattr(ParallelLayout, field, value) for field, value in config.parallel.items()} | SWITCHES
    chosen = {field: value for field, value in config.parallel.items() if value != defaults[field]}
    if chosen:
        told = ", ".join(f"parallel.{field}={value}" for field, value in chosen.items())
        raise LayoutError(
            [f"trainer.strategy={config.trainer.strategy} replaces the whole group parallel, but {told} is set: leave one of them out"]
        )


def check_layout(config: DictConfig) -> ParallelLayout:
    """The layout with `dp` as a number, or a LayoutError with everything that is wrong with it."""
    layout = ParallelLayout(**{field: value for field, value in config.parallel.items() if field not in ("zero_options", *SWITCHES)})
    world = local_world_size(config.trainer) * config.trainer.num_nodes
    facts = _model_facts(config.model) | ModelFacts(sequence=config.data.get("sequence_length"))
    violations = layout.violations(world, facts) + _batch_violations(layout, world, config.data.get("batch_size"))
    if violations := violations + _option_violations(config.parallel) + _precision_violations(config.get("precision")):
        raise LayoutError(violations)
    return layout.resolve(world)


def _batch_violations(layout: ParallelLayout, world: int, batch: int | None) -> list[str]:
    """The rules on the global batch, once the number of replicas is known."""
    replicas, rest = divmod(world, layout.model_ranks)
    if batch is None or rest or not replicas:
        return []
    if batch % replicas:
        return [f"data.batch_size={batch} does not split evenly over dp={replicas} replicas: make it a multiple of {replicas}"]
    facts = ModelFacts(batch=batch // replicas)
    return [found for found in layout.violations(world, facts) if found not in layout.violations(world)]


def _option_violations(parallel: DictConfig) -> list[str]:
    found = []
    try:
        ZeroOptions.of(parallel.get("zero_options") or {})
    except (TypeError, ValueError) as error:
        found.append(f"parallel.zero_options: {error}")
    switches = {field: parallel.get(field, default) for field, default in SWITCHES.items()}
    return found + [f"parallel.{field}={value}: give true or false" for field, value in switches.items() if not isinstance(value, bool)]


def _precision_violations(precision: DictConfig | None) -> list[str]:
    try:
        instantiate(precision, _convert_="all")
    except InstantiationException as error:
        return [f"precision: {error.__cause__ or error}"]
    return []


def _model_facts(model: DictConfig) -> ModelFacts:
    """What the model's node says of the sizes that a layout cuts."""
    sizes = model.get("config", model.get("model"))
    if isinstance(sizes, str):
        from lightning_par.recipes.hf import hf_config

        return config_facts(hf_config(sizes))
    return config_facts(OmegaConf.to_container(sizes, resolve=True) if isinstance(sizes, DictConfig) else None)


def local_world_size(trainer: DictConfig) -> int:
    """Ranks on one node: `trainer.devices` as a number, a list of devices, or 'auto' (-1): every GPU, or one CPU rank."""
    devices: Any = trainer.devices
    if isinstance(devices, ListConfig):
        return len(devices)
    if devices in ("auto", -1, "-1"):
        import torch

        gpus = torch.cuda.device_count() if trainer.accelerator in ("auto", "gpu", "cuda") else 0
        return max(1, gpus)
    try:
        return int(devices)
    except ValueError:
        given = OmegaConf.to_container(trainer, resolve=True)["devices"]
        raise LayoutError([f"trainer.devices={given!r}: give a number of ranks, a list of devices, or auto"]) from None


def check_world(trainer: DictConfig, environment: Mapping[str, str] = os.environ) -> None:
    """Ranks that were started from outside must be as many as the config says."""
    started, wanted = int(environment["WORLD_SIZE"]), local_world_size(trainer) * trainer.num_nodes
    if started != wanted:
        raise LayoutError(
            [
                f"WORLD_SIZE={started} ranks were started, but trainer.devices={trainer.devices} x trainer.num_nodes="
                f"{trainer.num_nodes} asks for {wanted}: make them equal"
            ]
        )
