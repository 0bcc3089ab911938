"""Batch normalization over the batch of all data ranks, on any device.

torch's own SyncBatchNorm runs on accelerators only and over one process group of its own choosing; this one uses the group it is given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from lightning_par.comm import Group


class SyncBatchNorm(_BatchNorm):
    """A batch norm whose statistics in training are those of all ranks of ``group`` together, forward and backward.

    Made in place by ``synchronize_batch_norms``. All ranks of the group must call its forward, and its backward, together.
    """

    group: Group

    @override
    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"batch norm takes [batch, channels, ...], but got {tuple(input.shape)}")

    @override
    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not (self.training or self.running_mean is None) or self.group.size == 1:
            return super().forward(input)
        x = input if input.dtype == torch.float64 else input.float()
        dims = [dim for dim in range(x.dim()) if dim != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        sums = _AddOver.apply(torch.cat([x.sum(dims), x.new_tensor([x.numel() / x.shape[1]])]), self.group)
        count = sums[-1]
        mean = sums[:-1] / count
        centred = x - mean.view(shape)
        variance = _AddOver.apply(centred.square().sum(dims), self.group) / count
        self._track(mean.detach(), variance.detach(), count.detach())
        y = centred * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            y = y * self.weight.view(shape) + self.bias.view(shape)
        return y.to(input.dtype)

    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        if not self.training or not self.track_running_stats or self.running_mean is None:
            return
        self.num_batches_tracked.add_(1)
        momentum = 1.0 / self.num_batches_tracked if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_((variance * count / (count - 1)).to(self.running_var.dtype), momentum)


def synchronize_batch_norms(module: nn.Module, group: Group) -> None:
    """Turn every batch norm inside ``module`` into one over ``group``, in place: names, parameters and buffers stay."""
    for submodule in module.modules():
        if isinstance(submodule, _BatchNorm):
            submodule.__class__ = SyncBatchNorm
            submodule.group = group


class _AddOver(torch.autograd.Function):
    """All-reduce forward, all-reduce backward: every rank's loss depends on every rank's summand."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        result = tensor.clone()
        group.all_reduce(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        result = grad.clone(memory_format=torch.contiguous_format)
        ctx.group.all_reduce(result)
        return result, None
