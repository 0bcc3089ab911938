"""Run a module aside: to look at what it does, without leaving a trace in it."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_par.pipeline.boundary import has_gradient

Restore = Callable[[], None]


@contextmanager
def aside(module: nn.Module, *, tensors: bool = True, generators: bool = True) -> Iterator[None]:
    """Afterwards the attributes of the module and of all modules in it are what they were: modes, counters, lists, the state of metrics.

    Parameters and buffers are ``lent``. What lies in other objects of the user's is not known here.

    Args:
        tensors: whether tensors can be written to, and are copied for that.
        generators: whether generators of random numbers are put back.
    """
    with ExitStack() as stack:
        known: set[int] = set()
        for part in module.modules():
            for restore in _remember(part.__dict__, known, tensors, generators):
                stack.callback(restore)
        yield


@contextmanager
def lent(modules: Iterable[nn.Module], device: torch.device) -> Iterator[None]:
    """Inside, these modules (themselves, not those in them) have parameters and buffers on ``device``; buffers are copies in any case.

    On the meta device every parameter is one of its own, ties are cut, and all that can have a gradient need one: what is used can then be
    told from a graph, by the module through which it was.
    """
    with ExitStack() as stack:
        for module in modules:
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and parameter.device != device:
                    needs = has_gradient(parameter.dtype) if device.type == "meta" else parameter.requires_grad
                    setattr(module, name, nn.Parameter(parameter.detach().to(device), requires_grad=needs))
                    stack.callback(setattr, module, name, parameter)
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    module._buffers[name] = buffer.detach().to(device, copy=True)
                    stack.callback(module._buffers.__setitem__, name, buffer)
        yield


@contextmanager
def unchanged(things: Iterable[Any]) -> Iterator[None]:
    """Afterwards the attributes of these objects are what they were, and generators of random numbers among them where they were.

    What is changed within an attribute (a list that grows) stays so: data is not copied.
    """
    with ExitStack() as stack:
        for thing in things:
            attributes = getattr(thing, "__dict__", {})
            for value in (thing, *attributes.values()):
                if isinstance(value, GENERATORS):
                    stack.callback(_state_of(value))
            stack.callback(lambda attributes=attributes, before=dict(attributes): (attributes.clear(), attributes.update(before)))
        yield


GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def _state_of(generator: Any) -> Restore:
    """What puts a generator of random numbers back to where it is now."""
    if isinstance(generator, np.random.Generator):
        return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    return partial(generator.set_state, generator.get_state())


def _remember(value: Any, known: set[int], tensors: bool, generators: bool) -> Iterator[Restore]:
    """What puts a value, and all that lies in it, back to what it is now: containers, tensors and generators; anything else is as it is."""
    if id(value) in known or isinstance(value, nn.Module | nn.Parameter):
        return
    known.add(id(value))
    if isinstance(value, Tensor):
        if tensors:
            once = _once(value.detach())
            before = once.clone()
            yield lambda: once.copy_(before)
    elif isinstance(value, GENERATORS):
        if generators:
            yield _state_of(value)
    elif isinstance(value, dict):
        items = dict(value)
        yield lambda: (value.clear(), value.update(items))
    elif isinstance(value, list | deque | set):
        content = list(value)
        yield lambda: (value.clear(), value.update(content) if isinstance(value, set) else value.extend(content))
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple | deque) else ()
    for item in list(inner):
        yield from _remember(item, known, tensors, generators)


def _once(tensor: Tensor) -> Tensor:
    """Each of its numbers once, of those that lie in one place because they were expanded."""
    for dim in range(tensor.dim()) if tensor.layout is torch.strided else ():
        if tensor.stride(dim) == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
