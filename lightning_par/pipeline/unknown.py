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

Below the mark there are ordinary numbers, so that random ones are drawn as by the real tensor: NaN, and 0 for whole numbers, which may be
indices. They show themselves where torch makes a tensor without telling (``torch.vmap``, TorchScript, ``torch.tensor(x)``): as NaN, but
whole numbers would look like any others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from lightning_par.numerics import children
from lightning_par.pipeline.errors import PipelineError
from lightning_par.pipeline.torch_functions import (
    CHECKED,
    GRADIENTS,
    NUMBERS,
    OVERWRITES,
    asked_for_numbers,
    name_of,
    shaped_by_numbers,
    tensors_in,
    written,
)


class Home(Protocol):
    """The layer list of a rank."""

    @property
    def in_step(self) -> bool:
        """Whether a stage is active."""

    @property
    def device(self) -> torch.device:
        """Where the rank computes."""

    def look(self, name: str) -> None:
        """Is told the name of an attribute of a module of another stage that is read, and may refuse."""

    def kept_with(self, tensor: Tensor) -> Tensor | None:
        """The parameter or buffer of the model that has its numbers in the same memory as this tensor."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What another stage has, and what to do instead of using it here."""

    name: str
    instead: str
    home: Home | None = None

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

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self.unknown_origin.refused("the step pickles a tensor, and that")


class UnknownObject:
    """In the place of what is no tensor. What is computed from it is unknown as well."""

    def __init__(self, origin: Origin) -> None:
        self.unknown_origin = origin

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def _same(self, *_: Any, **__: Any) -> UnknownObject:
        return self

    def _refuse(self, *_: Any) -> Any:
        raise self.unknown_origin.refused("the step asks for a value, and that")

    __call__ = __getitem__ = __neg__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _same
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _same
    __bool__ = __int__ = __float__ = __index__ = __len__ = __iter__ = __contains__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __hash__ = object.__hash__


def unknown(shape: Sequence[int], dtype: torch.dtype, device: torch.device, origin: Origin) -> Tensor:
    """One that may be worked on in place. In training it has a graph, as the real one would: hooks find their place."""
    smooth = dtype.is_floating_point or dtype.is_complex
    tensor = torch.full(tuple(shape), torch.nan if smooth else 0, dtype=dtype, device=device)
    if smooth and torch.is_grad_enabled() and not tensor.is_inference():
        (tensor,) = _Rooted.apply(torch.empty(0, requires_grad=True), (tensor,))
    return _mark(tensor, origin)


class _Rooted(torch.autograd.Function):
    """Puts tensors at the start of a graph that nobody needs."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensors: tuple[Tensor]) -> tuple[Tensor]:
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


def hollow(shape: Sequence[int], dtype: torch.dtype, device: torch.device, origin: Origin) -> Tensor:
    """One that takes no memory, and to which nobody can write."""
    with torch.no_grad():
        return _mark(unknown((), dtype, device, origin).expand(tuple(shape)), origin)


def unknown_weight(weight: Tensor, device: torch.device, origin: Origin) -> Tensor:
    """In the place of a weight (or a buffer) that is elsewhere."""
    stand = hollow(weight.shape, weight.dtype, device, origin)
    stand._is_param = isinstance(weight, nn.Parameter)  # for isinstance(_, nn.Parameter)
    return stand.requires_grad_(weight.requires_grad)


def require_known(values: Any, place: str) -> None:
    """Refuse what is unknown in ``values``, which ``place`` says are about to count.

    Raises:
        PipelineError: there is something; the message names it.
    """
    if _is_plainly_known(values):
        return
    for leaf in _leaves(values, set()):
        if isinstance(leaf, Unknown | UnknownObject):
            raise leaf.unknown_origin.refused(place)


def _is_plainly_known(values: Any) -> bool:
    """The quick answer for what layers are usually given; False where it has to be looked for."""
    kind = type(values)
    if kind is tuple or kind is list:
        return all(map(_is_plainly_known, values))
    if kind is dict:
        return all(map(_is_plainly_known, values.values()))
    return kind is Tensor or kind in _PLAIN


_PLAIN = (type(None), bool, int, float, str)


def _leaves(values: Any, seen: set[int]) -> Iterator[Any]:
    for leaf in tree_leaves(values):
        parts = None if isinstance(leaf, Tensor) else children(leaf)  # in dataclasses and mappings that pytree does not know
        if parts is None:
            yield leaf
        elif id(leaf) not in seen:
            seen.add(id(leaf))
            for part in parts.values():
                yield from _leaves(part, seen)


@torch.compiler.disable
def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of torch some of whose arguments are unknown."""
    name = name_of(func)
    with torch._C.DisableTorchFunctionSubclass():
        if name == "__get__":  # an attribute: of most of them there is nothing to mark
            output = func(*args)
            return _mark(output, args[0].unknown_origin) if isinstance(output, Tensor) else output
        sources = _unknown_in(asked_for_numbers(name, args, kwargs))
        targets = written(func, args, kwargs)
        if sources and (name in NUMBERS or _unknown_in(shaped_by_numbers(name, args, kwargs))):
            raise sources[0].unknown_origin.refused("the step asks for a number, or for a shape that depends on one, and that")
        if sources and name in GRADIENTS:
            raise sources[0].unknown_origin.refused("the step asks for a gradient, and that")
        targets += [kept for target in targets for kept in _kept_with(target, _unknown_in((args, kwargs))[0].unknown_origin)]
        if name in CHECKED:
            args, kwargs = tree_map_only(Unknown, lambda tensor: torch.full_like(tensor.as_subclass(Tensor), 0.5), (args, kwargs))
        output = _tried(func, args, kwargs, sources)
        if name in OVERWRITES and not _unknown_in((args[1:], kwargs)):
            args[0].__class__ = Tensor
        elif sources:
            given = {id(tensor) for tensor in tensors_in((args, kwargs))}
            made = [tensor for tensor in tensors_in(output) if id(tensor) not in given]
            for tensor in (*made, *targets):
                _mark(tensor, sources[0].unknown_origin)
            _zero_whole_numbers(made, tensors_in((args, kwargs)))
    return output


def _tried(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], sources: Sequence[Unknown]) -> Any:
    try:
        return func(*args, **kwargs)
    except Exception as error:
        if sources:
            error.add_note(
                f"(this was computed with {sources[0].unknown_origin.name}, of another pipeline stage, in place of which is NaN)"
            )
        raise


def _kept_with(target: Tensor, origin: Origin) -> list[Tensor]:
    """What else has its numbers where a function writes.

    Raises:
        PipelineError: that is a weight, or cannot be told.
    """
    if isinstance(target, Unknown):
        if isinstance(target, nn.Parameter) or _is_hollow(target):
            raise origin.refused("the step writes to a weight, and that")
        return []
    kept = [tensor for tensor in (target._base, origin.home and origin.home.kept_with(target)) if tensor is not None]
    if any(isinstance(tensor, nn.Parameter) for tensor in (target, *kept)):
        raise origin.refused("the step writes to a weight, and that")
    if not kept and target.is_inference() and _is_part(target):
        raise origin.refused("the step writes to a part of a tensor in inference mode (write x[:, 0] = y, or a new tensor), and that")
    return kept


def _unknown_in(values: Any) -> list[Unknown]:
    return [tensor for tensor in tensors_in(values) if isinstance(tensor, Unknown)]


def _is_hollow(tensor: Unknown) -> bool:
    return tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size()


def _is_part(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()


@torch.no_grad()
def _zero_whole_numbers(made: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """They may become indices; of NaN they are none. What lies in given memory has its numbers from there."""
    for tensor in made:
        if not tensor.is_floating_point() and not tensor.is_complex() and tensor.layout is torch.strided and not _is_hollow(tensor):
            memory = tensor.untyped_storage().data_ptr()
            if all(other.layout is not torch.strided or other.untyped_storage().data_ptr() != memory for other in given):
                tensor.zero_()


def _mark(tensor: Tensor, origin: Origin) -> Tensor:
    if type(tensor) is Tensor:
        tensor.__class__ = Unknown
    if isinstance(tensor, Unknown):
        tensor.unknown_origin = origin
    return tensor
