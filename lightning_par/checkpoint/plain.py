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

    Mappings and sequences of any other class (OmegaConf's, Lightning's) become dicts and lists, paths and enum members strings and values;
    so do keys. Sparse tensors of coordinates stay so. What cannot be told that way is left out and its path added to ``dropped``, and so
    is a sequence that would lack an item.
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
        return type(value)(kept) if type(value) in (Counter, OrderedDict) else kept
    if isinstance(value, Sequence | Set):
        items = [plain(item, dropped, f"{path}[{index}]") for index, item in enumerate(value)]
        if any(item is _DROPPED for item in items):
            return _DROPPED
        if type(value) is tuple:
            return tuple(items)
        return set(items) if type(value) is set and all(map(_is_hashable, items)) else items
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a numpy number
        return plain(value.item(), dropped, path)
    dropped.append(f"{path} ({type(value).__module__}.{type(value).__qualname__})")
    return _DROPPED


_DROPPED = object()


def _mapping(values: Mapping[Any, Any], dropped: list[str], path: str) -> dict[Any, Any]:
    kept: dict[Any, Any] = {}
    for key, value in values.items():
        place, lost = f"{path}.{key}".lstrip("."), []
        told = plain(key, lost)
        if lost or not _is_hashable(told) or told in kept:
            dropped.append(f"{place} (its key is a {type(key).__module__}.{type(key).__qualname__})")
        elif (item := plain(value, dropped, place)) is not _DROPPED:
            kept[told] = item
    return kept


def _is_hashable(key: Any) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True
