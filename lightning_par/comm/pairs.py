"""Communication as adjoint pairs: what the forward pass does to activations, the backward pass undoes to gradients.

=================  ==========================  ==========================
function           forward                     backward
=================  ==========================  ==========================
``copy_to``        nothing                     all-reduce
``reduce_from``    all-reduce                  nothing
``gather_from``    all-gather along a dim      keep my slice
``scatter_to``     keep my slice of a dim      all-gather along the dim
=================  ==========================  ==========================

Megatron-LM (arXiv 1909.08053, section 3) calls the first two f and g. Slices are those of ``layout.split``, so a dim need not divide
by the group's size. All ranks of the group must call, in the same order, in forward and in backward. No argument and no gradient
of autograd is changed in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_par.comm.group import Group
from lightning_par.layout import split


def copy_to(tensor: Tensor, group: Group) -> Tensor:
    """Nothing forward, all-reduce backward: a replicated activation enters a region where each rank adds its own part."""
    return _CopyTo.apply(tensor, group) if group.size > 1 else tensor


def reduce_from(tensor: Tensor, group: Group) -> Tensor:
    """All-reduce forward, nothing backward: partial results leave a sharded region as one replicated activation."""
    return _ReduceFrom.apply(tensor, group) if group.size > 1 else tensor


def gather_from(tensor: Tensor, group: Group, dim: int, total: int) -> Tensor:
    """All-gather ``dim`` to ``total`` elements forward, my slice backward (the gradient is replicated)."""
    return _GatherFrom.apply(tensor, group, dim, total) if group.size > 1 else tensor


def scatter_to(tensor: Tensor, group: Group, dim: int) -> Tensor:
    """My slice of ``dim`` forward, all-gather backward."""
    return _ScatterTo.apply(tensor, group, dim) if group.size > 1 else tensor


def _all_reduced(tensor: Tensor, group: Group) -> Tensor:
    result = tensor.clone(memory_format=torch.contiguous_format)
    group.all_reduce(result)
    return result


def _my_slice(tensor: Tensor, group: Group, dim: int) -> Tensor:
    mine = split(tensor.shape[dim], group.size)[group.index]
    return tensor.narrow(dim, mine.start, mine.size).contiguous()


def _gathered(tensor: Tensor, group: Group, dim: int, total: int) -> Tensor:
    """Pads to the biggest slice, gathers, and drops the padding."""
    spans = split(total, group.size)
    dim = dim % tensor.dim()
    moved = tensor.movedim(dim, 0)
    padded = moved.new_zeros(spans[0].size, *moved.shape[1:])
    padded[: moved.shape[0]] = moved
    whole = padded.new_empty(group.size, *padded.shape)
    group.all_gather(whole.view(-1), padded.view(-1))
    return torch.cat([part[: span.size] for part, span in zip(whole, spans, strict=True)]).movedim(0, dim)


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduced(grad, ctx.group), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        return _all_reduced(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, dim: int, total: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _gathered(tensor, group, dim, total)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _my_slice(grad, ctx.group, ctx.dim), None, None, None


class _ScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim, ctx.total = group, dim, tensor.shape[dim]
        return _my_slice(tensor, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(grad, ctx.group, ctx.dim, ctx.total), None, None
