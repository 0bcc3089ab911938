"""Traces: which attributes of a layer, and of the modules in it, its forward has changed. What stands for the layer cannot tell those."""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import Tensor, nn

Marks = dict[str, tuple[Any, Any]]
"""By path within the layer, the value of an attribute, and what tells whether that itself has changed."""

Trace = tuple[str, str]
"""The class of a layer, and the path of an attribute within it."""


def marks(layer: nn.Module) -> Marks:
    """What the attributes and buffers of a layer are now."""
    return {
        f"{prefix}.{name}".lstrip("."): (value, _content(value))
        for prefix, part in layer.named_modules()
        for name, value in (*vars(part).items(), *part._buffers.items())
        if name not in _REGISTRIES
    }


def traces(layer: nn.Module, before: Marks) -> set[Trace]:
    """What has changed since then."""
    now = marks(layer)
    kind = type(layer).__qualname__
    return {(kind, path) for path, mark in now.items() if path not in before or not _same(before[path], mark)}


_REGISTRIES = frozenset(vars(nn.Module()))
"""What every module has: its parameters, buffers, modules and hooks, and its mode."""


def _content(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value._version
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, list | set | deque) else None


def _same(before: tuple[Any, Any], now: tuple[Any, Any]) -> bool:
    if before[0] is not now[0] or not isinstance(now[1], list):
        return before[0] is now[0] and before[1] == now[1]
    return len(before[1]) == len(now[1]) and all(a is b for a, b in zip(before[1], now[1], strict=True))
