"""Shown: a module as the model sees it, with something else in place of its call.

What stands for a module must be the module in all else that a step may do with it: ``isinstance``, attributes read, set and deleted, loops
over its parts, methods. Only ``type(layer) is Block`` tells the difference. Of a module that lives on another rank there is a copy on the
meta device to answer (``Elsewhere``): it tells plain attributes, keeps those that the step sets, and refuses by name what needs a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from inspect import ismethod
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_par.pipeline.errors import PipelineError


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

    Args:
        module: a copy on the meta device, or the module itself where another stage of this rank holds it.
        name: what it is called in the model.
        look: is told the name of every attribute that is read (``layers.3.parameters()``, too), and may refuse.
    """

    def __init__(self, module: nn.Module, name: str, look: Callable[[str], None], **own: Any) -> None:
        super().__init__(module, _name=name, _look=look, **own)

    @override
    def __getattr__(self, name: str) -> Any:
        if "_stands_for" in self.__dict__:
            self._look(f"{self._name}.{name}")
        return seen_from_afar(super().__getattr__(name), f"{self._name}.{name}", self._look)

    @override
    def __iter__(self) -> Iterator[Any]:
        parts = {id(part): key for key, part in self._stands_for.named_children()}
        return (seen_from_afar(part, f"{self._name}.{parts.get(id(part), '')}", self._look) for part in super().__iter__())

    @override
    def __getitem__(self, key: Any) -> Any:
        return seen_from_afar(super().__getitem__(key), f"{self._name}.{key}", self._look)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise PipelineError(
            f"the step calls {self._name} by itself, but it is part of a module on another pipeline stage, and only the call of the whole "
            f"can be answered here: {HOW_TO_CARRY}"
        )

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self.named_parameters())

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """None: what a rank trains is what it holds."""
        self._look(f"{self._name}.parameters()")
        return iter(())

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}


def seen_from_afar(value: Any, name: str, look: Callable[[str], None]) -> Any:
    """An attribute, called ``name``, of a module that lives elsewhere."""
    if isinstance(value, nn.Module):
        return Elsewhere(value, name, look)
    if isinstance(value, nn.Parameter):
        return Absent.of(value, name) if value.is_meta else value
    if ismethod(value) and isinstance(value.__self__, nn.Module) and not hasattr(nn.Module, value.__name__):
        return partial(_called, value, name)
    return value


def _called(method: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
    """The answer of a method, if that needs no number."""
    try:
        output = method(*args, **kwargs)
        fine = not any(isinstance(leaf, Tensor) for leaf in tree_leaves(output))
    except RuntimeError as error:
        raise not_here(name) from error
    if not fine:
        raise not_here(name)
    return output


class Absent(Tensor):
    """A tensor that is elsewhere: it tells its shape, dtype and the like, and refuses to compute."""

    @classmethod
    def of(cls, tensor: Tensor, name: str) -> Self:
        absent = tensor.detach().as_subclass(cls).requires_grad_(tensor.requires_grad)
        absent.absent_name, absent._is_param = name, isinstance(tensor, nn.Parameter)  # the latter for isinstance(_, nn.Parameter)
        return absent

    @staticmethod
    def refusal(name: str) -> PipelineError:
        return not_here(name)

    @classmethod
    @override
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        absent = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Absent))
        raise absent.refusal(absent.absent_name)

    @override
    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{self.absent_name} of shape {tuple(self.shape)}, {self.dtype}, on another pipeline stage"


_PROPERTIES = (
    *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "is_leaf", "requires_grad", "grad_fn", "output_nr"),
    *("is_cpu", "is_cuda", "is_meta", "is_mps", "is_xpu", "is_mkldnn", "is_nested", "is_quantized", "is_sparse", "is_sparse_csr"),
)
_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "is_floating_point", "is_complex", "is_contiguous"),
    *("requires_grad_", "__len__"),
)

_HARMLESS = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
        *(getattr(Tensor, name).__set__ for name in ("requires_grad", "grad")),
        *(getattr(Tensor, name) for name in _METHODS),
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    }
)
"""What tells about a tensor without its values."""


def not_here(name: str) -> PipelineError:
    return PipelineError(
        f"{name} is on another pipeline stage, so its value is not known here. In a step, let the module use it in its own forward: "
        f"{HOW_TO_CARRY}; a penalty on weights is the optimizer's weight_decay. Between steps, trainer.strategy.full_state_dict(), called "
        "on every rank, gives all weights. Or use pp=1"
    )


HOW_TO_CARRY = "call layers whole, x = layer(x), and carry what else is needed through them, x, total = layer(x, total)"
