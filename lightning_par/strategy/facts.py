"""What a user's module tells about itself, for the rules of the layout."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_par.layout import ModelFacts

CONFIG_KEYS = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "heads"),
    "kv_heads": ("num_key_value_heads", "kv_heads"),
    "vocab": ("vocab_size",),
}
"""For each fact, the names under which a config (Hugging Face's words first) may hold it."""


def model_facts(module: nn.Module, data: object = None) -> ModelFacts:
    """The facts in the ``config`` of ``module`` or of the first submodule that has one, and the sequence length of a datamodule."""
    found: dict[str, int] = {}
    for submodule in module.modules():
        config = getattr(submodule, "config", None)
        for fact, keys in CONFIG_KEYS.items():
            value = next((v for v in (_get(config, key) for key in keys) if _is_count(v)), None)
            if value is not None:
                found.setdefault(fact, value)
    sequence = getattr(data, "sequence_length", None)
    return ModelFacts(**found, sequence=sequence if _is_count(sequence) else None)


def _get(config: Any, key: str) -> Any:
    return config.get(key) if isinstance(config, dict) else getattr(config, key, None)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
