"""Traces: which attributes of a layer, and of the modules in it, its forward has changed. What stands for the layer cannot tell those."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from lightning_par.pipeline.torch_functions import tensors_in

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


Contents = list[tuple[Any, Any]]
"""Containers and tensors, each with what tells whether it has changed."""


def contents(given: tuple[tuple[Any, ...], dict[str, Any]]) -> Contents:
    """What a layer is given, as (args, kwargs): lists, dicts and sets in it, and its tensors but for the first, the hidden state."""
    args, kwargs = given
    containers = [part for value in (*args, *kwargs.values()) for part in _containers(value)]
    tensors = [tensor for tensor in tensors_in(given)[1:] if not tensor.is_inference()]
    return [(thing, _content(thing)) for thing in (*containers, *tensors)]


def changed(before: Contents, output: Any) -> str | None:
    """The type of the first that has changed since then, and is not in the layer's output; None if there is none."""
    found = [thing for thing, content in before if not _same((thing, content), (thing, _content(thing)))]
    if not found:
        return None
    returned = {id(part) for part in (*_containers(output), *tensors_in(output))}
    return next((type(thing).__name__ for thing in found if id(thing) not in returned), None)


def _containers(value: Any) -> Iterator[Any]:
    if isinstance(value, list | dict | set | deque):
        yield value
    if isinstance(value, list | tuple | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _containers(part)


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
