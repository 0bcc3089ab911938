"""Shown: a module as the model sees it, with something else in place of its call.

What stands for a module must be the module in all else that a step may do with it: ``isinstance``, attributes read, set and deleted, loops
over its parts, methods. Only ``type(layer) is Block`` tells the difference. Of a module that lives on another rank there is a copy on the
meta device to answer (``Elsewhere``): it tells plain attributes, keeps those that the step sets, and its weights are ``Unknown``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from inspect import ismethod
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from lightning_par.pipeline.errors import PipelineError
from lightning_par.pipeline.torch_functions import map_tensors
from lightning_par.pipeline.unknown import Home, Origin, unknown, unknown_weight


class Shown:
    """The module itself in all but its call, ``__call__`` of those who inherit."""

    def __init__(self, module: nn.Module, **own: Any) -> None:
        self.__dict__.update(own, _stands_for=module)

    @property
    def __class__(self) -> type[nn.Module]:
        return type(self._stands_for)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if "_stands_for" not in self.__dict__:  # a copy that is not there yet
            raise AttributeError(name)
        return getattr(self._stands_for, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._stands_for, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._stands_for, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._stands_for)

    def __getitem__(self, key: Any) -> Any:
        return self._stands_for[key]

    def __len__(self) -> int:
        return len(self._stands_for)

    def __bool__(self) -> bool:
        return bool(self._stands_for)

    def __contains__(self, item: Any) -> bool:
        return item in self._stands_for

    def __dir__(self) -> list[str]:
        return dir(self._stands_for)

    def __repr__(self) -> str:
        return repr(self._stands_for)


class Elsewhere(Shown):
    """A module of another stage, or a part of one: what ``_stands_for`` is for has no values here.

    Its weights are unknown. Outside a step it has none: what a rank trains is what it holds.

    Args:
        module: a copy on the meta device, or the module itself where another stage of this rank holds it.
        name: what it is called in the model.
        instead: what to do instead of using its weights.
    """

    def __init__(self, module: nn.Module, name: str, home: Home, instead: str | None = None, **own: Any) -> None:
        super().__init__(module, _name=name, _home=home, _instead=instead or INSTEAD_OF_WEIGHTS, **own)

    @override
    def __getattr__(self, name: str) -> Any:
        if "_stands_for" in self.__dict__:
            self._home.look(f"{self._name}.{name}")
        return self._seen(name, super().__getattr__(name))

    @override
    def __iter__(self) -> Iterator[Any]:
        parts = {id(part): key for key, part in self._stands_for.named_children()}
        return (self._seen(parts.get(id(part), ""), part) for part in super().__iter__())

    @override
    def __getitem__(self, key: Any) -> Any:
        return self._seen(key, super().__getitem__(key))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise PipelineError(
            f"the step calls {self._name} by itself, but it is part of a module on another pipeline stage, and only the call of the whole "
            f"can be answered here: {HOW_TO_CARRY}"
        )

    def _seen(self, name: object, value: Any) -> Any:
        return seen_from_afar(value, f"{self._name}.{name}", self._home, self._instead)

    @property
    def _modules(self) -> dict[str, Any]:
        return {name: self._seen(name, part) for name, part in self._stands_for._modules.items()}

    @property
    def _parameters(self) -> dict[str, Any]:
        return {name: self._seen(name, weight) for name, weight in self._stands_for._parameters.items()} if self._home.in_step else {}

    @property
    def _buffers(self) -> dict[str, Any]:
        return {name: self._seen(name, buffer) for name, buffer in self._stands_for._buffers.items()} if self._home.in_step else {}

    modules, named_modules = nn.Module.modules, nn.Module.named_modules
    children, named_children = nn.Module.children, nn.Module.named_children
    parameters, named_parameters = nn.Module.parameters, nn.Module.named_parameters
    buffers, named_buffers = nn.Module.buffers, nn.Module.named_buffers
    _named_members = nn.Module._named_members

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if self._home.in_step:
            raise Origin(self._name, self._instead).refused("the state_dict() that the step asks for")
        return {}


def seen_from_afar(value: Any, name: str, home: Home, instead: str) -> Any:
    """An attribute, called ``name``, of a module that lives elsewhere."""
    if isinstance(value, nn.Module):
        return Elsewhere(value, name, home, instead)
    if isinstance(value, Tensor):
        return unknown_weight(value, home.device, Origin(name, instead, home)) if value.is_meta else value
    if ismethod(value) and isinstance(value.__self__, nn.Module) and not hasattr(nn.Module, value.__name__):
        return partial(_called, value, Origin(name, instead, home))
    return value


def _called(method: Callable[..., Any], origin: Origin, *args: Any, **kwargs: Any) -> Any:
    """The answer of a method, if that needs no number."""
    try:
        output = method(*args, **kwargs)
    except RuntimeError as error:
        raise origin.refused("the step's call of a method") from error
    return map_tensors(lambda tensor: unknown(tensor.shape, tensor.dtype, origin.home.device, origin), output)


HOW_TO_CARRY = "call layers whole, x = layer(x), and carry what else is needed through them, x, total = layer(x, total)"

INSTEAD_OF_WEIGHTS = (
    f"Let the module use it in its own forward: {HOW_TO_CARRY}; a penalty on weights is the optimizer's weight_decay. Between steps, "
    "trainer.strategy.full_state_dict(), called on every rank, gives all weights"
)
