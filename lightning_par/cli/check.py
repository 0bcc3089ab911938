"""Whether a config's layout can run, asked in the parent before any rank is started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from lightning_par.layout import LayoutError, ModelFacts, ParallelLayout

_NAMES = {  # of a fact, in the recipes' words and in those of Hugging Face configs
    "layers": ("layers", "num_hidden_layers", "n_layer"),
    "heads": ("heads", "num_attention_heads", "n_head"),
    "kv_heads": ("kv_heads", "num_key_value_heads"),
    "vocab": ("vocab_size",),
}


def check_layout(config: DictConfig) -> ParallelLayout:
    """The layout with `dp` as a number, or a LayoutError with everything that is wrong with it."""
    layout = ParallelLayout(**config.parallel)
    world = local_world_size(config.trainer) * config.trainer.num_nodes
    facts = ModelFacts(**_model_facts(config.model), sequence=config.data.get("sequence_length"))
    if violations := [*layout.violations(world, facts), *_batch_violations(layout, world, config.data.get("batch_size"))]:
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


def _model_facts(model: DictConfig) -> dict[str, int]:
    """What the model's node says of the sizes that a layout cuts; a size it does not name is left out."""
    sizes = model.get("config", model.get("model"))
    if isinstance(sizes, str):
        from lightning_par.recipes.hf import hf_config

        sizes = hf_config(sizes).to_dict()
    if not isinstance(sizes, Mapping | DictConfig):
        return {}
    found = {fact: next((sizes[name] for name in names if sizes.get(name) is not None), None) for fact, names in _NAMES.items()}
    return {fact: value for fact, value in found.items() if value is not None}


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
