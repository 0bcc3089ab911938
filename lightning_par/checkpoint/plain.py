"""Plain containers, so that ``torch.load(weights_only=True)`` suffices for everything we write."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence, Set
from pathlib import PurePath
from typing import Any

import torch


def plain(value: Any, dropped: list[str], path: str = "") -> Any:
    """``value`` as dicts, lists, tuples, numbers, strings and tensors.

    Mappings and sequences of any class (OmegaConf's, Lightning's) become dicts and lists, paths and enum members strings and values.
    What cannot be told that way is left out and its path added to ``dropped``.
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
        items = {key: plain(item, dropped, f"{path}.{key}".lstrip(".")) for key, item in value.items()}
        return {key: item for key, item in items.items() if item is not _DROPPED}
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(_kept(value, dropped, path))
    if isinstance(value, Sequence | Set):
        return _kept(value, dropped, path)
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a numpy number
        return plain(value.item(), dropped, path)
    dropped.append(f"{path} ({type(value).__module__}.{type(value).__qualname__})")
    return _DROPPED


_DROPPED = object()


def _kept(values: Any, dropped: list[str], path: str) -> list[Any]:
    items = [plain(item, dropped, f"{path}[{index}]") for index, item in enumerate(values)]
    return [item for item in items if item is not _DROPPED]
