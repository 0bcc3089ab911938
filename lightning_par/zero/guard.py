"""Parameters whose values may be away: a touch brings them, or says why they cannot be had.

Note [Guarded parameters]
~~~~~~~~~~~~~~~~~~~~~~~~~
At stages 1 and 2 the values that other ranks updated arrive while the next forward pass already runs; at stage 3 values are away most
of the time. Yet a parameter is an object that anybody may hold. So while its values are away its class is ``GuardedParameter``, which
torch asks before it computes anything with it, and whose bucket then answers: stages 1 and 2 wait for the values; stage 3 raises a
named error (bringing them there would be a communication that other ranks do not know of). As soon as values are there, the class is
again what it was and costs nothing. Shape, dtype, device, gradient and the like are no touch.

``param.zero`` is the handle that this package leaves on tensors: the bucket that holds the parameter's values. On those of a class of their
own there is ``param.zero_class``, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn


class ValueHolder(Protocol):
    """Knows where the values of some parameters are."""

    def touched(self, param: nn.Parameter) -> None:
        """Make the values of ``param`` there, or raise."""


class GuardedParameter(nn.Parameter):
    """A parameter whose values are away. See Note [Guarded parameters]."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func not in _HARMLESS:
            for param in _guarded((args, tuple(kwargs.values()))):
                param.zero.touched(param)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        self.zero.touched(self)
        return nn.Parameter.__deepcopy__(self, memo)

    def __repr__(self) -> str:
        return f"Parameter of shape {tuple(self.shape)}, {self.dtype}, values away"


def guard(param: nn.Parameter) -> None:
    """From now on every touch of ``param`` asks ``param.zero`` first."""
    if type(param) not in (nn.Parameter, GuardedParameter):
        param.zero_class = type(param)
    param.__class__ = GuardedParameter


def unguard(param: nn.Parameter) -> None:
    """The values are there: ``param`` is what it was."""
    if type(param) is GuardedParameter:
        param.__class__ = param.__dict__.get("zero_class", nn.Parameter)


def _guarded(value: Any) -> list[GuardedParameter]:
    if isinstance(value, GuardedParameter):
        return [value]
    if isinstance(value, tuple | list):
        return [param for item in value for param in _guarded(item)]
    return []


_PROPERTIES = (
    *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "is_cpu", "is_cuda", "is_meta", "is_sparse"),
    *("requires_grad", "retains_grad", "grad", "_grad", "grad_fn", "is_leaf", "output_nr"),
    *("_post_accumulate_grad_hooks", "_backward_hooks"),
)
_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "is_floating_point", "is_complex", "is_contiguous"),
    *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "__len__"),
)

_HARMLESS = frozenset(
    {
        *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES),
        *(getattr(torch.Tensor, name).__set__ for name in ("requires_grad", "grad", "_grad")),
        *(getattr(torch.Tensor, name) for name in _METHODS),
        *(getattr(torch, name) for name in ("empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like")),
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    }
)
"""What tells about a tensor without its values."""
