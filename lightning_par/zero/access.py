"""Whole parameters, gradients and optimizer states, for those who ask by name.

All ranks must call these functions together, with the same arguments: each may be a collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
    return param.grad if bucket is None else bucket.whole_of(param, lambda shard: shard.grad)


def full_optimizer_state(param: nn.Parameter) -> dict[str, Tensor]:
    """The optimizer's state of ``param``: tensors of its shape whole, others (such as a step count) as they are."""
    bucket: Bucket | None = getattr(param, "zero", None)
    if bucket is None:
        raise ValueError("full_optimizer_state is for parameters whose states are sharded; this one is whole: read optimizer.state[param]")
    return bucket.whole_state(param)


def _buckets(module: nn.Module) -> list[Bucket]:
    return list(dict.fromkeys(param.zero for param in module.parameters() if getattr(param, "zero", None) is not None))
