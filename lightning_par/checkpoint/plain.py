"""Plain containers, so that ``torch.load(weights_only=True)`` suffices for everything we write."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence, Set
from pathlib import PurePath
from typing import Any

import torch


def plain(value: Any, dropped: list[str], path: str = "") -> Any:
    """``value`` as dicts, lists, tuples, numbers, strings and tensors.

    Mappings and sequences of any class (OmegaConf's, Lightning's) become dicts and lists, paths and enum members strings and values; so do
    keys. What cannot be told that way is left out and its path added to ``dropped``.
    """
    if value is None or type(value) in (bool, int, float, complex, str, bytes) or isinstance(value, torch.dtype | torch.device):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().as_subclass(torch.Tensor)
    if isinstance(value, enum.Enum):
        return plain(value.value, dropped, path)
    if isinstance(value, PurePath):
        return str(value)
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return _mapping(value, dropped, path)
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(_kept(value, dropped, path))
    if isinstance(value, Sequence | Set):
        return _kept(value, dropped, path)
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


def _kept(values: Any, dropped: list[str], path: str) -> list[Any]:
    items = [plain(item, dropped, f"{path}[{index}]") for index, item in enumerate(values)]
    return [item for item in items if item is not _DROPPED]
