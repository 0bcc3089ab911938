"""Unknown: a tensor that only another pipeline stage can compute.

Note [What is not known here]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Every stage runs the whole step, and some of it works on what other stages have: what modules before the layers return, outputs of early
layers, weights. In its place stands an ``Unknown`` of the right shape, dtype and device. The step may do with it what it likes: whatever is
computed from it is unknown as well, and so is a tensor into which it is written, until all of that is overwritten. Most of that is thrown
away, as it should be: the embedding's output goes into a first layer that runs elsewhere. But an unknown must not get back into what
counts, so it is refused, with the name of where it comes from, by

* a layer of the stage, as an argument or in what it returns,
* the loss, and whatever else the step returns,
* ``self.log``,
* who asks for a number (``if``, ``.item()``), or for a shape that depends on numbers (``x[x > 0]``).

It holds NaN (whole numbers: 0), on its own device, so that random numbers are drawn as by the real one. What torch copies without telling
(``torch.tensor(x)``) is NaN still.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_par.numerics import children
from lightning_par.pipeline.errors import PipelineError
from lightning_par.pipeline.torch_functions import NUMBERS, OVERWRITES, asked_for_numbers, shaped_by_numbers, tensors_in, written


@dataclass(frozen=True, slots=True)
class Origin:
    """What another stage has, and what to do instead of using it here."""

    name: str
    instead: str

    def refused(self, place: str) -> PipelineError:
        return PipelineError(f"{place} needs {self.name}, which is on another pipeline stage. {self.instead}; or use pp=1")


class Unknown(Tensor):
    """See Note [What is not known here]."""

    unknown_origin: Origin

    @classmethod
    @override
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        return _call(func, args, kwargs or {})

    @override
    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{self.unknown_origin.name} of shape {tuple(self.shape)}, {self.dtype}, on another pipeline stage"

    @override
    def __format__(self, format_spec: str) -> str:
        return repr(self)

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.detach().clone()


Blanks = dict[tuple[tuple[int, ...], torch.dtype], Tensor]
"""Memory that several unknown tensors of one step share."""


def unknown(shape: Sequence[int], dtype: torch.dtype, device: torch.device, origin: Origin, blanks: Blanks | None = None) -> Tensor:
    """One that may be worked on in place."""
    shape, blanks = tuple(shape), {} if blanks is None else blanks
    if (shape, dtype) not in blanks:
        value = torch.nan if dtype.is_floating_point or dtype.is_complex else 0
        blanks[shape, dtype] = torch.full(shape, value, dtype=dtype, device=device)
    return _mark(blanks[shape, dtype].detach(), origin)


def unknown_weight(weight: Tensor, device: torch.device, origin: Origin) -> Tensor:
    """In the place of a weight (or a buffer) that is elsewhere: it takes no memory, and nobody can write to it."""
    with torch.no_grad():
        hollow = _mark(unknown((), weight.dtype, device, origin).expand(weight.shape), origin)
    hollow._is_param = isinstance(weight, nn.Parameter)  # for isinstance(_, nn.Parameter)
    return hollow.requires_grad_(weight.requires_grad)


def require_known(values: Any, place: str) -> None:
    """Refuse what is unknown in ``values``, which ``place`` says are about to count.

    Raises:
        PipelineError: there is something; the message names it.
    """
    for leaf in _leaves(values):
        if isinstance(leaf, Unknown):
            raise leaf.unknown_origin.refused(place)


def _leaves(values: Any) -> Iterator[Any]:
    if isinstance(values, Tensor) or values is None:
        yield values
        return
    for leaf in tree_leaves(values):
        parts = None if isinstance(leaf, Tensor) else children(leaf)  # in dataclasses and mappings that pytree does not know
        if parts is None:
            yield leaf
        else:
            for part in parts.values():
                yield from _leaves(part)


@torch.compiler.disable
def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of torch some of whose arguments are unknown."""
    name = func.__name__
    with torch._C.DisableTorchFunctionSubclass():
        sources = _unknown_in(asked_for_numbers(name, args, kwargs))
        if sources and (name in NUMBERS or _unknown_in(shaped_by_numbers(name, args))):
            raise sources[0].unknown_origin.refused("the step asks for a number, or for a shape that depends on one, and that")
        targets = written(func, args, kwargs)
        targets += [target._base for target in targets if target._base is not None]
        if any(isinstance(target, nn.Parameter) or _is_hollow(target) for target in targets):
            raise _unknown_in((args, kwargs))[0].unknown_origin.refused("the step writes to a weight, and that")
        output = func(*args, **kwargs)
        if name in OVERWRITES and not _unknown_in((args[1:], kwargs)):
            args[0].__class__ = Tensor
        elif sources:
            for tensor in (*tensors_in(output), *targets):
                _mark(tensor, sources[0].unknown_origin)
    return output


def _unknown_in(values: Any) -> list[Unknown]:
    return [tensor for tensor in tensors_in(values) if isinstance(tensor, Unknown)]


def _is_hollow(tensor: Tensor) -> bool:
    """Whether one number stands for all of them. Its class is looked at first: others may have no memory that can be told."""
    return isinstance(tensor, Unknown) and tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size()


def _mark(tensor: Tensor, origin: Origin) -> Tensor:
    if type(tensor) is Tensor:
        tensor.__class__ = Unknown
    if isinstance(tensor, Unknown):
        tensor.unknown_origin = origin
    return tensor
