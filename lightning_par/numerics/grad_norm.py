"""The gradient norm of the whole model, from the parts that the ranks hold.

Note [Every element once]
~~~~~~~~~~~~~~~~~~~~~~~~~
The norm of a p-norm is ``sum(|g|^p)^(1/p)`` over every element of every gradient *of the model*. A rank sums what it holds; the sums
are added over the ranks that hold different elements. An element that several of those ranks hold must be counted by one of them:

- a parameter replicated over tp: by tp index 0;
- a tied weight held by several pipeline stages: by the first of them;
- over data-parallel ranks gradients are equal (ZeRO 0: nothing is added over them) or disjoint (ZeRO 1 and up: they are added).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_par.comm import Group


class GradientShard(NamedTuple):
    """The part of a gradient that this rank updates, and whether this rank counts it in the norm."""

    grad: Tensor
    counted: bool


def total_norm(shards: Iterable[GradientShard], groups: Sequence[Group], device: torch.device, norm_type: float = 2.0) -> Tensor:
    """The norm of the whole gradient, a 0-dim tensor, the same on every rank. See Note [Every element once].

    Args:
        shards: what this rank holds; may be empty.
        groups: the sums are added over each of these in turn. All their ranks must call.
        norm_type: the p of the p-norm, ``math.inf`` included.
    """
    counted = [shard.grad for shard in shards if shard.counted and shard.grad.numel()]
    norms = torch.stack(torch._foreach_norm(counted, norm_type)) if counted else torch.zeros(1, device=device)
    norms = norms.double()
    if math.isinf(norm_type):
        total = norms.max().nan_to_num(nan=math.inf, posinf=math.inf)  # gloo's max loses a NaN
        for group in groups:
            group.all_reduce(total, "max")
        return total
    total = norms.pow(norm_type).sum()
    for group in groups:
        group.all_reduce(total)
    return total.pow(1.0 / norm_type)


def clip_by_norm(shards: Iterable[GradientShard], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients so that their norm, now ``norm``, is at most ``max_norm``; as ``torch.nn.utils.clip_grad_norm_``."""
    grads = [shard.grad for shard in shards]
    if grads:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for dtype in {grad.dtype for grad in grads}:
            torch._foreach_mul_([grad for grad in grads if grad.dtype == dtype], factor.to(dtype))


def clip_by_value(shards: Iterable[GradientShard], limit: float) -> None:
    """Clamp every element of every gradient to ``[-limit, limit]``."""
    grads = [shard.grad for shard in shards]
    if grads:
        torch._foreach_clamp_min_(grads, -limit)
        torch._foreach_clamp_max_(grads, limit)
