"""Whole parameters, gradients and optimizer states, for those who ask by name.

All ranks must call these functions together, with the same arguments: each may be a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_par.zero.bucket import Bucket


@contextmanager
def full_parameters(module: nn.Module, *, modify: bool = False) -> Iterator[None]:
    """Inside the block the parameters of ``module`` are whole on every rank, at any ZeRO stage.

    Args:
        modify: keep what was edited inside, which must be the same on all ranks. At stages 0 to 2 edits are always kept.
    """
    buckets = [bucket for bucket in _buckets(module) if bucket.stage.frees_values]
    opened = {bucket for bucket in buckets if not bucket.is_whole}
    for bucket in buckets:
        bucket.pin()
    try:
        yield
        for bucket in buckets if modify else ():
            bucket.keep_edits()
    finally:
        for bucket in buckets:
            bucket.unpin()
            if bucket in opened:
                bucket.free()
            elif not modify:  # it was whole before, and may have been edited
                bucket.gather()
                bucket.open_values()


def full_gradient(param: nn.Parameter) -> Tensor | None:
    """The gradient of ``param`` after backward (the mean over replicas), in the parameter's own shape; None if it has none.

    ``param`` is the module's parameter, not an optimizer's shard.
    """
    bucket: Bucket | None = getattr(param, "zero", None)
    return param.grad if bucket is None else _whole_of(bucket, param, lambda shard: shard.grad)


def full_optimizer_state(param: nn.Parameter) -> dict[str, Tensor]:
    """The optimizer's state of ``param``: tensors of its shape whole, others (such as a step count) as they are."""
    bucket: Bucket | None = getattr(param, "zero", None)
    if bucket is None:
        raise ValueError("full_optimizer_state is for parameters whose states are sharded; this one is whole: read optimizer.state[param]")
    return _whole_state(bucket, param)


def _buckets(module: nn.Module) -> list[Bucket]:
    return list(dict.fromkeys(param.zero for param in module.parameters() if getattr(param, "zero", None) is not None))


def _whole_of(bucket: Bucket, param: nn.Parameter, part: Callable[[nn.Parameter], Tensor | None]) -> Tensor | None:
    """Put together what ``part`` says of every rank's shard of ``param``; None where no rank has it. All sharding ranks call."""
    slot = next(slot for slot in bucket.plan.slots if slot.info.param is param)
    mine = [(shard, value) for shard in bucket.shards if shard.slot is slot and (value := part(shard.param)) is not None]
    dtypes = [dtype for dtype in bucket.groups.values.gather_objects(mine[0][1].dtype if mine else None) if dtype is not None]
    if not dtypes:
        return None
    span = torch.zeros(bucket.owned.size, dtype=dtypes[0], device=bucket.device)
    for shard, value in mine:
        span[shard.place.slice()] = value.reshape(-1)
    whole = span.new_empty(bucket.plan.size)
    bucket.groups.values.all_gather(whole, span)
    return whole[slot.span.slice()].view(slot.info.spec.block_shape).clone()


def _whole_state(bucket: Bucket, param: nn.Parameter) -> dict[str, Tensor]:
    """The optimizer's state of ``param`` over all ranks' shards. All sharding ranks call."""
    mine = [shard.param for shard in bucket.shards if shard.slot.info.param is param]
    states = {part: bucket.optimizer_of[part].state.get(part, {}) for part in mine if part in bucket.optimizer_of}
    kinds: dict[str, bool] = {}
    for part, state in states.items():
        kinds |= {key: isinstance(value, Tensor) and value.shape == part.shape for key, value in state.items()}
    everyone = bucket.groups.values.gather_objects((kinds, {k: v for s in states.values() for k, v in s.items() if not kinds[k]}))
    whole: dict[str, Tensor] = {}
    for key, is_cut in sorted({key: is_cut for theirs, _ in everyone for key, is_cut in theirs.items()}.items()):
        if is_cut:
            whole[key] = _whole_of(bucket, param, lambda part, key=key: states.get(part, {}).get(key))
        else:
            whole[key] = next(values[key] for _, values in everyone if key in values)
    return whole
