"""The gradients of the whole model as one optimizer sees them: their norm, and clipping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_par.comm import Group, Later
from lightning_par.numerics import clip_by_norm, clip_by_value, overflowed, total_norm
from lightning_par.zero.data_parallel import DataParallel


@dataclass(frozen=True)
class ModelGradients:
    """Norm and clipping over every rank's part of the gradients. All ranks of the world must call each method, after backward.

    Args:
        data_parallel: holds this rank's part.
        groups: over which the parts of different ranks are added up; see ``numerics.grad_norm``.
        world: every rank.
        device: where the norm is computed on a rank that holds no gradient.
    """

    data_parallel: DataParallel
    groups: Sequence[Group]
    world: Group
    device: torch.device

    def norm(self, optimizer: Optimizer, norm_type: float = 2.0) -> Tensor:
        """The norm of all gradients of ``optimizer``'s parameters over the whole model, before any clipping; a 0-dim tensor."""
        return total_norm(self.data_parallel.gradients(optimizer), self.groups, self.device, norm_type)

    def clip_norm(self, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
        """Scale gradients down to a global norm of at most ``max_norm``; the norm they had.

        Raises:
            RuntimeError: the norm is infinite or NaN, on every rank, if ``error_if_nonfinite``; gradients are left as they are.
        """
        norm = self.norm(optimizer, norm_type)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"the {norm_type}-norm of the gradient is {norm.item()}, so it cannot be clipped; find the cause with "
                "torch.autograd.set_detect_anomaly(True), or clip with error_if_nonfinite=False"
            )
        clip_by_norm(self.data_parallel.gradients(optimizer), norm, max_norm)
        return norm

    def clip_value(self, optimizer: Optimizer, limit: float) -> None:
        """Clamp every element of the gradients to ``[-limit, limit]``."""
        clip_by_value(self.data_parallel.gradients(optimizer), limit)

    def overflowed(self, optimizer: Optimizer) -> Overflow:
        """Look for an infinity or NaN in ``optimizer``'s gradients on every rank."""
        held = [param for group in optimizer.param_groups for param in group["params"]]
        params = [param for param in held if param.grad is not None and param.grad.numel()]
        mine = overflowed([param.grad for param in params], self.device)
        anywhere = mine.max() if params else torch.zeros((), dtype=torch.float32, device=self.device)
        return Overflow(self, params, mine, Later(anywhere, self.world.all_reduce(anywhere, "max", async_op=True)))


@dataclass(frozen=True)
class Overflow:
    """What ``ModelGradients.overflowed`` found. ``anywhere`` reads as a 0-dim tensor that is not 0 if any rank found something."""

    gradients: ModelGradients
    params: list[Tensor]
    mine: Tensor
    anywhere: Later

    def names(self) -> list[str]:
        """The first parameter that has it, of each rank that has one. All ranks of the world call."""
        bad = [self.gradients.data_parallel.held(param)[0] for param, flag in zip(self.params, self.mine.tolist(), strict=True) if flag]
        world = self.gradients.world
        everyone = world.gather_objects(bad[:1])
        return [f"{name} on rank {rank}" for rank, names in zip(world.ranks, everyone, strict=True) for name in names]
