"""Plain containers, so that ``torch.load(weights_only=True)`` suffices for everything we write."""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence, Set
from pathlib import PurePath
from typing import Any

import torch


def plain(value: Any, dropped: list[str], path: str = "") -> Any:
    """``value`` as dicts, lists, tuples, sets, numbers, strings and tensors.

    Mappings and sequences of any other class become dicts, lists, tuples and sets, which ``dropped`` tells by their paths, but for those
    of OmegaConf and Lightning; paths and enum members become strings and values; so do keys. Sparse tensors of coordinates stay so. What
    cannot be told that way is left out and its path added to ``dropped``, and so is a sequence that would lack an item.
    """
    if value is None or type(value) in (bool, int, float, complex, str, bytes) or isinstance(value, torch.dtype | torch.device):
        return value
    if type(value) is bytearray:
        return bytearray(value)
    if isinstance(value, torch.Tensor):
        if value.is_meta or value.is_nested or value.layout not in (torch.strided, torch.sparse_coo):
            dropped.append(f"{path} (a tensor that is {'meta' if value.is_meta else 'nested' if value.is_nested else value.layout})")
            return _DROPPED
        told = value.detach().cpu()
        return told if type(told) is torch.Tensor else told.as_subclass(torch.Tensor)
    if isinstance(value, enum.Enum):
        return plain(value.value, dropped, path)
    if isinstance(value, PurePath):
        return str(value)
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        kept = _mapping(value, dropped, path)
        return type(value)(kept) if type(value) in (Counter, OrderedDict) else _instead(value, kept, dropped, path)
    if isinstance(value, Sequence | Set):
        items = [plain(item, dropped, f"{path}[{index}]") for index, item in enumerate(value)]
        if any(item is _DROPPED for item in items):
            return _DROPPED
        if type(value) is torch.Size:
            return torch.Size(items)
        if isinstance(value, tuple):
            return _instead(value, tuple(items), dropped, path)
        is_set = isinstance(value, set | frozenset) and all(map(_is_hashable, items))
        return _instead(value, set(items) if is_set else items, dropped, path)
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a numpy number
        return plain(value.item(), dropped, path)
    dropped.append(f"{path} ({type(value).__module__}.{type(value).__qualname__})")
    return _DROPPED


_DROPPED = object()
_OF_OPTIONS = ("lightning", "omegaconf", "pytorch_lightning")
"""Whose containers are but dicts and lists for options."""


def _instead(value: Any, kept: Any, dropped: list[str], path: str) -> Any:
    """``kept``, in place of ``value``: named, if that is a container of another class."""
    kind = type(value)
    if kind is not type(kept) and kind.__module__.partition(".")[0] not in _OF_OPTIONS:
        dropped.append(f"{path} ({kind.__module__}.{kind.__qualname__}, which comes back as a {type(kept).__name__})")
    return kept


def _mapping(values: Mapping[Any, Any], dropped: list[str], path: str) -> dict[Any, Any]:
    kept: dict[Any, Any] = {}
    for key, value in values.items():
        place, lost = f"{path}.{key}".lstrip("."), []
        told = plain(key, lost, place)
        if told is _DROPPED or not _is_hashable(told) or told in kept:
            dropped.append(f"{place} (its key is a {type(key).__module__}.{type(key).__qualname__})")
        elif (item := plain(value, dropped, place)) is not _DROPPED:
            kept[told] = item
            dropped += lost
    return kept


def _is_hashable(key: Any) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True
