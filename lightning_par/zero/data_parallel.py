"""DataParallel: the gradient buckets of one rank, the hooks that fill them, and the optimizers that use them.

Note [The life of a gradient]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Autograd leaves a gradient in ``param.grad``; a hook moves it into its bucket and makes ``param.grad`` a view of that. Within
``no_sync`` that is all: later backwards add in place. Otherwise a bucket's sum over the data ranks starts as soon as it is complete *and
all buckets before it have started*, so every rank sends the same buckets in the same order, whatever it used. ``finish``, after the
backward pass, starts what is left (unused parameters count as zero), waits, divides by the number of replicas, and publishes:

- stage 0: ``param.grad`` holds the mean over replicas, on every rank;
- stage 1: the optimizer's own spans hold it in their ``grad``; ``param.grad`` is None.

A parameter has a gradient if it was used on any data rank, else none (as with DDP), so ranks never disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_par.comm import Group
from lightning_par.layout import ShardSpec
from lightning_par.numerics import GradientShard
from lightning_par.zero.bucket import Bucket, ReduceGroups
from lightning_par.zero.elementwise import require_elementwise
from lightning_par.zero.plan import ParameterInfo, plan_buckets

BUCKET_BYTES = 25 * 2**20


class DataParallel:
    """Averages gradients over the data ranks; at stage 1 each rank's optimizer holds and updates only its spans.

    Build it on every rank, with the same parameters on all data ranks, once parameters stand on their device.
    """

    def __init__(self, infos: Iterable[ParameterInfo], groups: ReduceGroups, *, stage: int, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.infos = tuple(infos)
        self.groups, self.stage = groups, stage
        plans = plan_buckets(self.infos, groups.data.size, bucket_bytes)
        self.buckets = [Bucket(plan, groups, sharded=stage >= 1) for plan in plans]
        self._held: dict[nn.Parameter, ShardSpec] = {info.param: info.spec for info in self.infos}
        self._info = {info.param: info for info in self.infos}
        self._sync, self._next, self._withheld = True, 0, []
        self._handles: list[RemovableHandle] = []
        for bucket in self.buckets:
            for index, slot in enumerate(bucket.plan.slots):
                self._handles.append(slot.info.param.register_post_accumulate_grad_hook(partial(self._arrived, bucket, index)))
            for shard in bucket.shards:
                self._held[shard.param] = shard.slot.info.spec.flat(shard.span)
                self._info[shard.param] = shard.slot.info

    # --- during the step ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only add to this rank's gradients; nothing is sent."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    @property
    def syncs(self) -> bool:
        """Outside ``no_sync``: gradients will be reduced."""
        return self._sync

    def finish(self) -> None:
        """Reduce what is not yet reduced and publish the gradients. Every rank of the world calls it after its backward pass."""
        if not self._sync:
            return
        for bucket in self.buckets[self._next :]:
            bucket.launch()
        self._next = 0
        used = self._used_anywhere()
        for bucket in self.buckets:
            bucket.settle([next(used) for _ in bucket.plan.slots])

    def clear(self) -> None:
        """Forget this rank's gradients."""
        for param in self._held:
            param.grad = None

    def withhold(self) -> None:
        """Hide this rank's gradients, so that a zero_grad that comes too late for them does not find them."""
        self._withheld = [(param, param.grad) for param in self._held if param.grad is not None]
        self.clear()

    def restore(self) -> None:
        """Bring back what ``withhold`` hid."""
        for param, grad in self._withheld:
            param.grad = grad
        self._withheld = []

    # --- optimizers --------------------------------------------------------------------------------------------------------------

    def attach(self, optimizer: Optimizer) -> None:
        """At stage 1 and up: put this rank's spans in place of the optimizer's parameters, in its own param groups.

        Raises:
            ValueError: the optimizer holds foreign tensors, does not work element by element, or has state already.
        """
        unknown = [tuple(param.shape) for group in optimizer.param_groups for param in group["params"] if param not in self._info]
        if unknown:
            raise ValueError(
                f"{type(optimizer).__name__} holds tensors of shapes {unknown} that are no parameters of the module (any more): build "
                "the optimizer in configure_optimizers, from self.parameters()"
            )
        if self.stage == 0:
            return
        require_elementwise(optimizer, self.stage)
        if optimizer.state:
            raise ValueError(f"{type(optimizer).__name__} has state already: return a new optimizer from configure_optimizers")
        spans: dict[nn.Parameter, list[nn.Parameter]] = {}
        for bucket in self.buckets:
            for slot in bucket.plan.slots:
                spans[slot.info.param] = []
            for shard in bucket.shards:
                spans[shard.slot.info.param].append(shard.param)
        for group in optimizer.param_groups:
            group["params"][:] = [span for param in group["params"] for span in spans.get(param, [param])]
        self._handles.append(optimizer.register_step_post_hook(lambda *_: self.gather_values()))

    def gather_values(self) -> None:
        """Make parameters whole after a step. Every data rank calls."""
        for bucket in self.buckets:
            bucket.gather_values()

    def held(self, param: nn.Parameter) -> tuple[str, ShardSpec]:
        """The name of a parameter that an optimizer of this rank holds, and which part of the whole it is."""
        return self._info[param].name, self._held[param]

    def info(self, param: nn.Parameter) -> ParameterInfo:
        """What is known of a parameter that an optimizer of this rank holds."""
        return self._info[param]

    def gradients(self, optimizer: Optimizer) -> list[GradientShard]:
        """The gradients that this rank's ``optimizer`` is about to use."""
        params = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
        return [GradientShard(param.grad, self._info[param].counted) for param in params]

    @property
    def disjoint(self) -> bool:
        """Data ranks hold different parts of the gradients, so that a sum over the model needs all of them."""
        return self.stage >= 1

    def close(self) -> None:
        """Take the hooks off again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # --- hooks -------------------------------------------------------------------------------------------------------------------

    def _arrived(self, bucket: Bucket, index: int, _: nn.Parameter) -> None:
        bucket.arrive(index, last=self._sync)
        if self._sync:
            while self._next < len(self.buckets) and self.buckets[self._next].complete:
                self.buckets[self._next].launch()
                self._next += 1

    def _used_anywhere(self) -> Iterator[bool]:
        """For each slot of each bucket, in order: some data rank used it. One small reduction; read back only where it matters."""
        used = [flag for bucket in self.buckets for flag in bucket.used()]
        flags = torch.tensor(used, dtype=torch.int32)
        data: Group = self.groups.data
        if self.buckets and data.size > 1:
            flags = flags.to(self.buckets[0].grads.device, non_blocking=True)
            data.all_reduce(flags, "max")
        return iter(used if all(used) else flags.bool().tolist())
