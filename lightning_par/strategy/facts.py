"""What a user's module tells about itself, for the rules of the layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from lightning_par.layout import ModelFacts
from lightning_par.pipeline import named_layers

CONFIG_KEYS = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "heads"),
    "kv_heads": ("num_key_value_heads", "kv_heads"),
    "vocab": ("vocab_size",),
}
"""For each fact, the names under which a config (Hugging Face's words first) may hold it."""


def config_facts(config: Any) -> ModelFacts:
    """What a config object or mapping tells; nothing, if it is None."""
    values = {fact: next((v for v in (_get(config, key) for key in keys) if _is_count(v)), None) for fact, keys in CONFIG_KEYS.items()}
    return ModelFacts(**values)


def model_facts(module: nn.Module, data: object = None) -> ModelFacts:
    """The facts in the ``config`` of ``module`` and its submodules, the outermost first, and what its data tells.

    ``data``: a datamodule with a ``sequence_length``, or a dataloader, whose batches are those of one replica.
    """
    facts = ModelFacts()
    for submodule in module.modules():
        facts = facts | config_facts(getattr(submodule, "config", None))
    sequence = getattr(data, "sequence_length", None)
    batch = data.batch_size if isinstance(data, DataLoader) else None
    facts |= ModelFacts(sequence=sequence if _is_count(sequence) else None, batch=batch)
    return facts if named_layers(module) is None else replace(facts, layers=None)  # its own list, whatever a config in it counts


def _get(config: Any, key: str) -> Any:
    return config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
