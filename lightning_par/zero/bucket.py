"""One bucket: its flat memory and what state its gradients are in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor, nn

from lightning_par.comm import DONE, Group, Message, Work, exchange
from lightning_par.layout import Span
from lightning_par.zero.plan import BucketPlan, Slot


@dataclass(frozen=True)
class ReduceGroups:
    """Where gradients travel.

    Attributes:
        data: ranks that saw different samples or tokens; gradients are summed over them and divided by ``replicas``.
        replicas: data-parallel replicas; context shards of one replica are pieces of one loss, so they only add.
        pp: over which weights tied across stages are summed.
        tp: over which partial gradients of replicated parameters are summed.
    """

    data: Group
    replicas: int
    pp: Group
    tp: Group


class State(Enum):
    """Of a bucket's gradients: COLLECTING -(launch)-> REDUCING -(settle)-> COLLECTING."""

    COLLECTING = auto()  # backward writes into it
    REDUCING = auto()  # on its way: nobody may touch it


@dataclass(frozen=True)
class Shard:
    """The part of a parameter that this rank's optimizer updates at stage 1 and up: a view into the flat parameters."""

    slot: Slot
    span: Span  # within the parameter's block, flat
    param: nn.Parameter
    grad: Tensor  # its place in the flat gradients


class Bucket:
    """Flat gradients of a few parameters, and at stage 1 and up their flat values. See Note [One flat layout]."""

    def __init__(self, plan: BucketPlan, groups: ReduceGroups, *, sharded: bool) -> None:
        self.plan, self.groups, self.sharded = plan, groups, sharded
        self.owned = plan.owned(groups.data.size, groups.data.index)
        device = plan.slots[0].info.param.device
        self.grads = torch.zeros(plan.size, dtype=plan.dtype, device=device)
        self.views = [self.grads[slot.span.slice()].view(slot.info.param.shape) for slot in plan.slots]
        self.state = State.COLLECTING
        self.arrived: set[int] = set()
        self._untouched = True  # by any backward since the last reduction
        self.values = self._flatten_values(device) if sharded else None
        self.shards = self._cut_shards() if sharded else []
        self._work: Work = DONE
        self._carried: Tensor | None = None

    @property
    def complete(self) -> bool:
        """Every parameter's gradient has come in during the backward pass that is to be reduced."""
        return len(self.arrived) == len(self.plan.slots)

    def used(self) -> list[bool]:
        """For each slot: this rank has a gradient for it."""
        return [slot.info.param.grad is not None for slot in self.plan.slots]

    def arrive(self, index: int, *, last: bool) -> None:
        """Take in the gradient that autograd just left in a parameter's ``grad``: copied here the first time, added here after that.

        ``last``: it is to be reduced after this backward pass.
        """
        param, view = self.plan.slots[index].info.param, self.views[index]
        if self.state is State.REDUCING:
            raise RuntimeError(
                f"{self.plan.slots[index].info.name} got a second gradient in one backward pass, after its first was sent. Reentrant "
                "activation checkpointing does this: use torch.utils.checkpoint with use_reentrant=False"
            )
        if self._untouched:
            self._carry()
            self._untouched = False
        if last:
            self.arrived.add(index)
        if param.grad is not view:
            view.copy_(param.grad)
            param.grad = view

    def launch(self) -> None:
        """Start the sum over the data ranks. Parameters without a gradient here add zero."""
        for index, used in enumerate(self.used()):
            if not used:
                self.views[index].zero_()
        if self.sharded:
            self._work = self.groups.data.reduce_scatter(self.grads[self.owned.slice()], self.grads, async_op=True)
        else:
            self._work = self.groups.data.all_reduce(self.grads, async_op=True)
        self.state = State.REDUCING

    def settle(self, used: list[bool]) -> None:
        """Wait for the sum, make it the mean over replicas, add what other axes hold, and hand the result out.

        Args:
            used: for each slot, whether any data rank has a gradient for it.
        """
        self._work.wait()
        self._work = DONE
        result = self.grads[self.owned.slice()] if self.sharded else self.grads
        if self.groups.replicas > 1:
            result.mul_(1.0 / self.groups.replicas)
        if self.plan.partial:
            self.groups.tp.all_reduce(result)
        if self.plan.stages:
            used = self._add_stages(result, used)
        if self._carried is not None:
            result.add_(self._carried)
        self._carried = None
        self._publish(used)
        self.arrived.clear()
        self._untouched = True
        self.state = State.COLLECTING

    def gather_values(self) -> None:
        """Fetch what the other ranks' optimizers made of their spans."""
        if self.values is not None:
            self.groups.data.all_gather(self.values, self.values[self.owned.slice()])

    def _publish(self, used_anywhere: list[bool]) -> None:
        used = dict(zip(self.plan.slots, used_anywhere, strict=True))
        if self.sharded:
            for slot in self.plan.slots:
                slot.info.param.grad = None
            for shard in self.shards:
                shard.param.grad = shard.grad if used[shard.slot] or shard.param.grad is not None else None
        else:
            for slot, view in zip(self.plan.slots, self.views, strict=True):
                slot.info.param.grad = view if used[slot] else None

    def _carry(self) -> None:
        """A second backward before zero_grad adds to the first: set what was reduced aside before it is written over."""
        if any(shard.param.grad is not None for shard in self.shards):
            self._carried = self.grads[self.owned.slice()].clone()

    def _add_stages(self, result: Tensor, used: list[bool]) -> list[bool]:
        """Sum a tied weight's gradient over the stages that hold it, in stage order, so that their copies stay equal to the bit.

        Which slots are used travels along; the answer is whether any stage uses them.
        """
        pp = self.groups.pp
        mine = torch.cat([result, torch.tensor(used, dtype=result.dtype).to(result.device, non_blocking=True)])
        parts = {stage: mine if stage == pp.index else torch.empty_like(mine) for stage in self.plan.stages}
        others = [stage for stage in self.plan.stages if stage != pp.index]
        exchange(pp, [Message(mine, stage) for stage in others], [Message(parts[stage], stage) for stage in others]).wait()
        total = torch.zeros_like(mine)
        for stage in self.plan.stages:
            total.add_(parts[stage])
        result.copy_(total[: result.numel()])
        return used if all(used) else total[result.numel() :].bool().tolist()

    def _flatten_values(self, device: torch.device) -> Tensor:
        """Move the parameters' values into one flat tensor and make the parameters views of it."""
        values = torch.zeros(self.plan.size, dtype=self.plan.dtype, device=device)
        for slot in self.plan.slots:
            view = values[slot.span.slice()].view(slot.info.param.shape)
            view.copy_(slot.info.param.detach())
            slot.info.param.data = view
        return values

    def _cut_shards(self) -> list[Shard]:
        assert self.values is not None
        shards = []
        for slot in self.plan.slots:
            mine = slot.span.intersect(self.owned)
            if mine.size:
                param = nn.Parameter(self.values[mine.slice()])
                shards.append(Shard(slot, mine.shift(-slot.span.start), param, self.grads[mine.slice()]))
        return shards
