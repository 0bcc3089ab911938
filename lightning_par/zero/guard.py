"""Parameters whose values may be away: a touch brings them, or says why they cannot be had.

Note [Guarded parameters]
~~~~~~~~~~~~~~~~~~~~~~~~~
At stages 1 and 2 the values that other ranks updated arrive while the next forward pass already runs; at stage 3 values are away most
of the time. Yet a parameter is an object that anybody may hold. So while its values are away its class is ``GuardedParameter``, which
torch asks before it computes anything with it, and whose bucket then answers: stages 1 and 2 wait for the values; stage 3 raises a
named error (bringing them there would be a communication that other ranks do not know of). As soon as values are there, the class is
``nn.Parameter`` again and costs nothing. Shape, dtype, device, gradient and the like are no touch.

``param.zero`` is the one handle that this package leaves on tensors: the bucket that holds the parameter's values.
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
        if func not in _HARMLESS = frozenset(
    {
        *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES),
        *(getattr(torch.Tensor, name).__set__ for name in ("requires_grad", "grad", "_grad")),
        *(getattr(torch.Tensor, name) for name in _METHODS),
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    }
)
"""What tells about a tensor without its values."""
