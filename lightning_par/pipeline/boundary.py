"""Boundary: what a layer returned, as it crosses from one stage to the next.

A layer may return a tensor (most do, and it need not be taken apart), or any nesting of tuples, lists and dicts of tensors and plain
values. Its *form* is the same nesting with a ``TensorForm`` in place of each tensor: plain data that compares equal, pickles, and tells
the receiver what to allocate. The tensors travel in the order of the nesting. Gradients come back for the floating and complex ones,
always for all of them: whether a gradient exists must not depend on what one side happens to have frozen. Where autograd found none, zeros
are sent. What the step does not hand to the next layer stays where it is: an ``Unknown`` stands for it on later stages. The forms of all
layers so far go along, once for each, so that later stages can answer for any of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from lightning_par.pipeline.errors import PipelineError
from lightning_par.pipeline.torch_functions import map_tensors, tensors_in
from lightning_par.pipeline.unknown import Origin, UnknownObject, hollow, unknown


@dataclass(frozen=True, slots=True)
class TensorForm:
    """Shape and dtype of a tensor that is not here, and its strides where it lies in one piece of memory in another order."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...] | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> TensorForm:
        stride = None if tensor.is_contiguous() or not _is_dense(tensor) else tensor.stride()
        return cls(tuple(tensor.shape), tensor.dtype, stride)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"

    __repr__ = __str__

    def empty(self, device: torch.device) -> Tensor:
        if self.stride is None:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor takes each place of a piece of memory once."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def flat(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor, as it travels."""
    return tensor if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


@dataclass(frozen=True, slots=True)
class Withheld:
    """In the place of a tensor that stays on its stage."""

    form: TensorForm

    def __str__(self) -> str:
        return f"{self.form} (which stays there)"

    __repr__ = __str__


@dataclass(frozen=True, slots=True)
class Opaque:
    """In the place of what no stage can hand on."""

    kind: str

    def __repr__(self) -> str:
        return f"a {self.kind}"


PLAIN = (type(None), bool, int, float, str, Enum, torch.dtype, torch.device)


def has_gradient(dtype: torch.dtype) -> bool:
    """Whether numbers of this dtype can have a gradient: floating and complex ones."""
    return dtype.is_floating_point or dtype.is_complex


def is_plain(leaf: Any) -> bool:
    """Whether this can be handed on: a tensor or a plain value."""
    return isinstance(leaf, (Tensor, *PLAIN))


def form_of(output: Any) -> Any:
    """The form of a layer's output."""
    return _form(output) if isinstance(output, Tensor) else tree_map(_form, output)


def _form(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        if leaf.is_nested:
            raise PipelineError(
                "a layer returns a nested tensor, whose shape cannot be told to other pipeline stages. nn.TransformerEncoder makes them in "
                "evaluation: enable_nested_tensor=False"
            )
        return TensorForm.of(leaf)
    return leaf if isinstance(leaf, PLAIN) else Opaque(type(leaf).__name__)


def structure_of(form: Any) -> Any:
    """Of a form, what a step may go by on stages that do not get the output itself: not floats, and not how large tensors are."""
    return tree_map(lambda leaf: type(leaf).__name__ if isinstance(leaf, TensorForm | float) else leaf, form)


def require_handable(form: Any) -> None:
    """Refuse the form of an output that cannot be handed to the next stage."""
    for leaf in tree_leaves(form):
        if isinstance(leaf, Opaque):
            raise cannot_be_handed(leaf.kind, "the last layer of a stage")


def cannot_be_handed(kind: str, giver: str) -> PipelineError:
    return PipelineError(
        f"{giver} returns a {kind}, which cannot be handed to the next stage: layers may return tensors and plain values, in tuples, lists "
        "and dicts, and what torch.export.register_dataclass was told of (for transformers models, set config.use_cache=False)"
    )


def withhold(output: Any, form: Any, places: Collection[int]) -> tuple[Any, Any]:
    """The output and its form without the tensors in these places, counted along the nesting."""
    if not places:
        return output, form
    count, other = itertools.count(), itertools.count()
    sent = map_tensors(lambda tensor: None if next(count) in places else tensor, output)
    return sent, tree_map_only(TensorForm, lambda one: Withheld(one) if next(other) in places else one, form)


def tensor_forms(form: Any) -> list[TensorForm]:
    """What is sent forward."""
    if isinstance(form, TensorForm):
        return [form]
    return [leaf for leaf in tree_leaves(form) if isinstance(leaf, TensorForm)]


def gradient_forms(form: Any) -> list[TensorForm]:
    """What is sent backward, in the usual order of elements."""
    return [replace(leaf, stride=None) for leaf in tensor_forms(form) if has_gradient(leaf.dtype)]


def rebuild(form: Any, tensors: Iterable[Tensor], device: torch.device, origin: Origin) -> Any:
    """The layer's output again, with these tensors in it, and unknown ones where some were withheld."""
    left = iter(tensors)

    def part(leaf: Any) -> Any:
        if isinstance(leaf, Withheld):
            return hollow(leaf.form.shape, leaf.form.dtype, device, origin)
        return next(left) if isinstance(leaf, TensorForm) else leaf

    return part(form) if isinstance(form, TensorForm) else tree_map(part, form)


def stand_for(form: Any, device: torch.device, origin: Origin) -> Any:
    """A layer's output where nobody knows what it returned, but the form of that. Only the hidden state may be worked on in place."""
    places = itertools.count()

    def part(leaf: Any) -> Any:
        if isinstance(leaf, TensorForm):
            return (hollow if next(places) else unknown)(leaf.shape, leaf.dtype, device, origin)
        if isinstance(leaf, Withheld):
            return hollow(leaf.form.shape, leaf.form.dtype, device, origin)
        return UnknownObject(origin) if isinstance(leaf, Opaque | float) else leaf

    return part(form) if isinstance(form, TensorForm) else tree_map(part, form)


class UnjoinableError(Exception):
    """What two micro-batches have cannot be put together: nobody can tell where in it samples are."""


def join_tensors(first: Sequence[Tensor], second: Sequence[Tensor], sizes: tuple[int, int]) -> list[Tensor]:
    """What a layer would have returned for the samples of two micro-batches together, of these sizes.

    Samples are along the same dim of all tensors, of the first of which, the hidden state, nothing else has that length.

    Raises:
        UnjoinableError: nobody can tell.
    """
    pairs = list(zip(first, second, strict=True))
    dim = _dim_of_samples(pairs[0][0].shape, pairs[0][1].shape, sizes)
    if any(one.dim() < 2 or torch.equal(one, two) or dim != _dim_of_samples(one.shape, two.shape, sizes) for one, two in pairs):
        raise UnjoinableError
    return [torch.cat(pair, dim) for pair in pairs]


def join_forms(first: Any, second: Any, sizes: tuple[int, int]) -> Any:
    """The form of what ``join_tensors`` gives.

    Raises:
        UnjoinableError: nobody can tell.
    """
    leaves, spec = tree_flatten(first)
    others, other = tree_flatten(second)
    if spec != other:
        raise UnjoinableError
    return tree_unflatten([_join_form(one, two, sizes) for one, two in zip(leaves, others, strict=True)], spec)


def _join_form(first: Any, second: Any, sizes: tuple[int, int]) -> Any:
    if isinstance(first, Withheld) and isinstance(second, Withheld):
        return Withheld(_join_form(first.form, second.form, sizes))
    if isinstance(first, TensorForm) and isinstance(second, TensorForm):
        dim = _dim_of_samples(first.shape, second.shape, sizes)
        return TensorForm((*first.shape[:dim], sum(sizes), *first.shape[dim + 1 :]), first.dtype)
    if first != second or type(first) is int:  # it may count samples
        raise UnjoinableError
    return first


def _dim_of_samples(first: Sequence[int], second: Sequence[int], sizes: tuple[int, int]) -> int:
    if len(first) == len(second):
        pairs = list(zip(first, second, strict=True))
        dims = [dim for dim, pair in enumerate(pairs) if pair == sizes]
        if len(dims) == 1 and all(a == b for dim, (a, b) in enumerate(pairs) if dim != dims[0]):
            return dims[0]
    raise UnjoinableError


def messages_of(output: Any) -> list[Tensor]:
    """The tensors of a layer's output as they are sent: without their graph, in one piece of memory."""
    tensors = (tensor.detach().resolve_conj().resolve_neg() for tensor in tensors_in(output))
    return [tensor if _is_dense(tensor) else tensor.contiguous() for tensor in tensors]


class Inlet:
    """Where received tensors enter this stage's graph, and their gradients come out.

    ``tensors`` are the received ones, no leaves, so that a layer may work in place on them as on any other layer's output; ``entry`` is the
    leaf behind them.
    """

    def __init__(self, received: list[Tensor], *, grad: bool) -> None:
        smooth = [tensor for tensor in received if has_gradient(tensor.dtype)]
        self._forms = [form_of(tensor) for tensor in smooth]
        self._device = next((tensor.device for tensor in smooth), None)
        self._grads: tuple[Tensor, ...] | None = None
        self.entry = torch.empty(0, requires_grad=True)
        entered = iter(_Enter.apply(self.entry, self, tuple(smooth)) if grad and smooth else smooth)
        self.tensors = [next(entered) if has_gradient(tensor.dtype) else tensor for tensor in received]

    def take_gradients(self) -> list[Tensor]:
        """The gradients of the tensors that can have one, after backward, as they are sent; zeros where nothing depended on them."""
        if self._grads is None:
            return [torch.zeros(form.shape, dtype=form.dtype, device=self._device) for form in self._forms]
        grads, self._grads = self._grads, None
        return [grad.contiguous() for grad in grads]


class _Enter(torch.autograd.Function):
    """Puts tensors at the start of a graph; the gradients that arrive are left in the inlet."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, inlet: Inlet, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        ctx.inlet = inlet
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        ctx.inlet._grads = grads
        return None, None, None


def edges_of(output: Any) -> list[GradientEdge | None]:
    """Where gradients enter the graph of a stage's outputs, None where one needs no gradient. Holds the graph, not the output."""
    smooth = [tensor for tensor in tensors_in(output) if has_gradient(tensor.dtype)]
    return [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in smooth]
