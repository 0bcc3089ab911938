"""Boundary: what a layer returned, as it crosses from one stage to the next.

A layer may return a tensor (most do, and it need not be taken apart), or any nesting of tuples, lists and dicts of tensors and plain
values. Its *form* is the same nesting with a ``TensorForm`` in place of each tensor: plain data that compares equal, pickles, and tells
the receiver what to allocate. The tensors travel in the order of the nesting. Gradients come back for the floating and complex ones,
always for all of them: whether a gradient exists must not depend on what one side happens to have frozen. Where autograd found none, zeros
are sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from lightning_par.pipeline.errors import PipelineError
from lightning_par.pipeline.shown import Absent


@dataclass(frozen=True, slots=True)
class TensorForm:
    """Shape and dtype of a tensor that is not here."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class Withheld:
    """In the place of a tensor that stays on its stage: ``layer`` returned it, and a dry run has seen nobody use it."""

    layer: str
    form: TensorForm


PLAIN = (Withheld, type(None), bool, int, float, str, torch.dtype, torch.device)


def has_gradient(dtype: torch.dtype) -> bool:
    """Whether numbers of this dtype can have a gradient: floating and complex ones."""
    return dtype.is_floating_point or dtype.is_complex


def is_plain(leaf: Any) -> bool:
    """Whether this may be in a layer's output: a tensor or a plain value."""
    return isinstance(leaf, (Tensor, *PLAIN))


def form_of(output: Any) -> Any:
    """The form of a layer's output. Values that are neither tensors nor plain are refused."""
    if isinstance(output, Tensor):
        return TensorForm(tuple(output.shape), output.dtype)
    for leaf in tree_leaves(output):
        if not is_plain(leaf):
            raise cannot_be_handed(type(leaf).__name__, "the last layer of a stage")
    return tree_map_only(Tensor, _form, output)


def _form(tensor: Tensor) -> TensorForm | Withheld:
    form = TensorForm(tuple(tensor.shape), tensor.dtype)
    return Withheld(tensor.absent_name, form) if isinstance(tensor, NotSent) else form


def cannot_be_handed(kind: str, giver: str) -> PipelineError:
    return PipelineError(
        f"{giver} returns a {kind}, which cannot be handed to the next stage: layers may return tensors and plain values, in tuples, lists "
        "and dicts, and what torch.export.register_dataclass was told of (for transformers models, set config.use_cache=False)"
    )


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors of a layer's output, in order; of what a stage received, those that were sent."""
    if isinstance(output, Tensor):
        return [output]
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and not isinstance(leaf, NotSent)]


def tensor_forms(form: Any) -> list[TensorForm]:
    """What is sent forward."""
    if isinstance(form, TensorForm):
        return [form]
    return [leaf for leaf in tree_leaves(form) if isinstance(leaf, TensorForm)]


def gradient_forms(form: Any) -> list[TensorForm]:
    """What is sent backward."""
    return [leaf for leaf in tensor_forms(form) if has_gradient(leaf.dtype)]


def rebuild(form: Any, tensors: Iterable[Tensor]) -> Any:
    """The layer's output again, with these tensors in it."""
    left = iter(tensors)
    if isinstance(form, TensorForm):
        return next(left)
    whole = tree_map_only(TensorForm, lambda _: next(left), form)
    return tree_map_only(Withheld, lambda gone: NotSent.of(gone.form.empty(torch.device("meta")), gone.layer), whole)


class NotSent(Absent):
    """What a stage sees in the place of a tensor that was withheld: it may be kept and handed on, and whoever computes with it is told."""

    @staticmethod
    @override
    def refusal(name: str) -> PipelineError:
        return PipelineError(
            f"what {name} returned besides the hidden state is used, which a dry run of the step had not seen: it stayed on its pipeline "
            "stage. Carry it through the layers with the hidden state, x, total = layer(x, total), or use it in every step, in training "
            "and in validation, so that it is seen; or use pp=1"
        )


def messages_of(output: Any) -> list[Tensor]:
    """The tensors of a layer's output as they are sent: without their graph, contiguous."""
    return [tensor.detach().contiguous() for tensor in tensors_of(output)]


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
    smooth = [tensor for tensor in tensors_of(output) if has_gradient(tensor.dtype)]
    return [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in smooth]
