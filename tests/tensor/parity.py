"""A sharded module against the same module in one process, on each rank: losses, gradients and weights of three steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from lightning_par.comm import Group, Mesh
from lightning_par.layout import ParallelLayout, ShardSpec
from lightning_par.tensor import TensorShards, shard_module

Optimize = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimize] = {
    "sgd": lambda module: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda module: torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1),
}


def tp_mesh(size: int) -> Mesh:
    return Mesh.build(ParallelLayout(tp=size).resolve(size))


def whole(part: Tensor, spec: ShardSpec, group: Group) -> Tensor:
    """The tensor of which every rank holds a part. All ranks must call."""
    if spec.is_whole:
        return part
    assert part.shape == spec.block_shape
    result = part.new_zeros(spec.shape)
    for box in spec.boxes():
        place = tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))
        result[place] = box.view(part.contiguous().view(-1))
    group.all_reduce(result)
    return result


def assert_parity(
    module: nn.Module,
    group: Group,
    loss: Callable[[nn.Module, int], Tensor],
    *,
    plan: Mapping[str, str] | None = None,
    optimizer: str = "adamw",
    steps: int = 3,
    tolerance: float = 1e-10,
) -> tuple[nn.Module, TensorShards]:
    """Shard a copy of ``module`` and train both; ``loss(module, step)``. Every rank compares with its own reference."""
    reference, sharded = module, copy.deepcopy(module)
    shards = shard_module(sharded, group, plan=plan)
    assert list(shards.specs) == [name for name, _ in reference.named_parameters()]
    optimizers = [OPTIMIZERS[optimizer](m) for m in (reference, sharded)]
    for step in range(steps):
        losses = []
        for m in (reference, sharded):
            m.zero_grad()
            losses.append(loss(m, step))
            losses[-1].backward()
        close(losses[1], losses[0], f"loss of step {step}", tolerance)
        for name, param in sharded.named_parameters():
            if name in shards.partial and param.grad is not None:
                group.all_reduce(param.grad)
        assert_same(sharded, reference, shards, group, "grad", tolerance)
        for opt in optimizers:
            opt.step()
        assert_same(sharded, reference, shards, group, "data", tolerance)
    return sharded, shards


def assert_same(sharded: nn.Module, reference: nn.Module, shards: TensorShards, group: Group, what: str, tolerance: float) -> None:
    """Every parameter's ``what`` (``grad`` or ``data``), gathered, against the reference."""
    for (name, mine), (_, theirs) in zip(sharded.named_parameters(), reference.named_parameters(), strict=True):
        expected = getattr(theirs, what)
        if expected is None:
            assert getattr(mine, what) is None, name
        else:
            close(whole(getattr(mine, what), shards.specs[name], group), expected, f"{what} of {name}", tolerance)


def close(value: Tensor, expected: Tensor, what: str, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(value, expected, rtol=0, atol=tolerance, msg=lambda text: f"{what}: {text}")
