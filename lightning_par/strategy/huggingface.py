"""The model of transformers in a module: what a checkpoint is told of it, so that it can become a folder. See ``checkpoint.hf``."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from lightning_par.checkpoint.hf import HUGGINGFACE, uncompiled

Changes = Mapping[str, Any]
"""Names of weights that a model has and a new one of its class and config has not (``has``), and the other way round (``lacks``)."""


def huggingface(module: nn.Module, changed: Changes | None = None) -> dict[str, Any]:
    """Where in ``module`` the model of transformers is that is in no other, and its config; or where all are.

    What only hands on the attributes of such a model, as what ``torch.compile`` returns does, is none.

    Args:
        changed: what ``changes`` found.
    """
    models = {path: part for path, part in module.named_modules() if hasattr(type(part), "save_pretrained") and _config(part) is not None}
    inner = {part for model in models.values() for part in model.modules() if part is not model}
    outer = {path: model for path, model in models.items() if model not in inner}
    if len(outer) > 1:
        return {HUGGINGFACE: {"several": list(outer)}}
    for path, model in outer.items():
        if not _is_itself(model):
            return {HUGGINGFACE: {"adapted": f"{path or 'it'} ({type(model).__name__})"}}
        told = json.loads(_config(model).to_json_string(use_diff=False)) | {"architectures": [type(model).__name__]}
        tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
        found = {"prefix": f"{path}." if path else "", "config": told, "tied": tied}
        return {HUGGINGFACE: found | ({"changed": dict(changed)} if changed else {})}
    return {}


def changes(module: nn.Module, names: Collection[str]) -> Changes | None:
    """How the model of transformers in the whole ``module``, whose weights have these names, differs from a new one; None if it does not.

    A model that its class does not make of the config alone is taken as it is, and so is a quantized one, whose class makes it otherwise.
    It takes as long as making the model without memory does.
    """
    told = huggingface(module).get(HUGGINGFACE, {})
    if "prefix" not in told or told["config"].get("quantization_config"):
        return None
    prefix = told["prefix"]
    model = module.get_submodule(prefix.removesuffix("."))
    try:
        with isolate_rng(), torch.device("meta"):
            made = type(model)(copy.deepcopy(_config(model)))
            plain_names, tied = {*made.state_dict()}, getattr(made, "all_tied_weights_keys", None) or {}
    except Exception:  # of anybody's class
        return None
    ours = {uncompiled(name.removeprefix(prefix)): None for name in names if name.startswith(prefix)}
    strange = [name for name in ours if name not in plain_names]
    lacking = sorted(plain_names - ours.keys() - {*tied})
    return {"has": strange, "lacks": lacking} if strange or lacking else None


def _is_itself(model: nn.Module) -> bool:
    """Whether it is a model of transformers with the weights of its class: none around it (PEFT's), and no adapters put into it."""
    return any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__) and not getattr(model, "_hf_peft_config_loaded", False)


def _config(module: nn.Module) -> Any:
    """That of a model of transformers."""
    config = getattr(module, "config", None)
    return config if hasattr(config, "to_json_string") else None
