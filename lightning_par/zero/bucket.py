"""One bucket: the flat memory of a few parameters' gradients and values, and where each of them is."""

from __future__ import annotations

import time
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_par.comm import DONE, Group, Message, Work, exchange
from lightning_par.layout import Span
from lightning_par.zero.groups import ReduceGroups
from lightning_par.zero.guard import guard, unguard
from lightning_par.zero.master import HALF, HalfWeights, Master
from lightning_par.zero.options import Stage
from lightning_par.zero.plan import BucketPlan, Slot

SMALL = 2**14
"""Elements of a gradient that costs more to call for than to copy: such ones wait where autograd left them until their bucket is full."""


class State(Enum):
    """Of a bucket's gradients: IDLE -(arrive)-> COLLECTING -(launch)-> REDUCING -(collect)-> REDUCED -(publish)-> IDLE."""

    IDLE = auto()  # nothing came since the last publication
    COLLECTING = auto()  # backward writes into the whole gradients
    REDUCING = auto()  # they are on their way: nobody may touch them
    REDUCED = auto()  # this rank's span holds the result


@dataclass(frozen=True, eq=False)
class Shard:
    """What this rank's optimizer updates of one parameter, from stage 1 on."""

    slot: Slot
    span: Span  # within the parameter's block, flat
    place: Span  # within this rank's span of the bucket
    param: nn.Parameter


class Bucket:
    """Gradients, and from stage 1 on values, of a few parameters. See Note [One flat layout] and Note [The life of a gradient].

    What stays whole is the stage's business: ``stage.frees_gradients`` gives whole gradients back once they are reduced,
    ``stage.frees_values`` whole values between uses.
    """

    def __init__(
        self,
        plan: BucketPlan,
        groups: ReduceGroups,
        stage: Stage,
        reduce_dtype: torch.dtype | None = None,
        half: HalfWeights = HalfWeights(),  # noqa: B008 (frozen)
    ) -> None:
        self.plan, self.groups, self.stage = plan, groups, stage
        self.owned = plan.owned(groups.values.size, groups.values.index) if stage.shards_optimizer else Span(0, plan.size)
        self.is_cut = stage.shards_optimizer and groups.values.size == groups.shard.size
        self.device = plan.slots[0].info.param.device
        self.params = [slot.info.param for slot in plan.slots]
        self.half, self.is_half = half, plan.kind.dtype in HALF
        self.grad_dtype = torch.float32 if self.is_half else plan.kind.dtype  # in which gradients add up
        self.reduce_dtype = self.grad_dtype if reduce_dtype is None or self.grad_dtype.is_complex else reduce_dtype
        self._divide_by(1.0)
        self.state = State.IDLE
        self.arrived: set[int] = set()  # of which parameters gradients came in the pass that is to be reduced
        self._pass = -1  # which pass that is, as autograd numbers them
        # Of which parameters gradients are here and no longer in ``param.grad``:
        self.taken: set[int] = set()  # those of that pass, with what came before, scaled
        self.widened: set[int] = set()  # those of passes before it, not yet scaled, where ``param.grad`` cannot be a view
        self.used = [False] * len(plan.slots)  # since the last publication
        self.shards: list[Shard] = []
        self._flat = self._grads = torch.empty(0)
        self._views: Sequence[Tensor] = ()
        self._travelling: Tensor | None = None
        self._reduced: Tensor | None = None
        self._work: Work = DONE
        self._left: list[Group] = []  # over which ``_travelling`` is summed after that
        self._gathering: Work = DONE
        self._pins = 0
        if plan.kind.trained:
            self._make_gradients()
        if stage.shards_optimizer:
            self._take_values()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied parameter is a copy of values, held by no bucket."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    # --- gradients ---------------------------------------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Every parameter's gradient has come in during the backward pass that is to be reduced."""
        return len(self.arrived) == len(self.params)

    def arrive(self, index: int, *, last: bool) -> None:
        """Take in the gradient that autograd just left in a parameter's ``grad``.

        ``last``: it is to be reduced after this backward pass. Until then ``grad`` is a view of the bucket, for autograd to add to.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward(create_graph=True) leaves gradients with a graph of their own, which buckets cannot keep: get the gradients that "
                "the loss depends on from torch.autograd.grad(..., create_graph=True)"
            )
        if self.state is not State.COLLECTING:
            if self.state is not State.IDLE:
                self._refuse_second(index)
            self.begin()
        if last:
            if not self.arrived:
                self._pass = torch._C._current_graph_task_id()
            elif index in self.arrived and self._pass != torch._C._current_graph_task_id():
                self._refuse_second(index)
            self.arrived.add(index)
            if index in self._small:
                return  # they are taken in together
        param = self.params[index]
        view, grad = self._views[index], param.grad
        if last:
            self._take(index, grad)
            param.grad = None
        elif self.is_half:
            view.add_(grad) if index in self.widened else view.copy_(grad)
            self.widened.add(index)
            param.grad = None
        elif grad is not view:
            view.copy_(grad)
            param.grad = view

    def name_of(self, index: int) -> str:
        return self.plan.slots[index].info.name

    def _refuse_second(self, index: int) -> NoReturn:
        raise RuntimeError(
            f"{self.name_of(index)} got a second gradient before its first was reduced. In one backward pass reentrant "
            "activation checkpointing does this: use torch.utils.checkpoint with use_reentrant=False. In manual optimization call "
            "self.manual_backward(loss) in place of loss.backward(), in a loop without Lightning finish() after every backward. After a "
            "backward pass that an exception ended call zero_grad() first; if some of it was sent by then, the run cannot go on"
        )

    def _take_small(self) -> None:
        """Take in small gradients that came, all of them in two calls."""
        plain = [index for index in self._small if (grad := self.params[index].grad) is not None and grad is not self._views[index]]
        views, grads = [self._views[index] for index in plain], [self.params[index].grad for index in plain]
        if not plain:
            return
        torch._foreach_copy_(views, grads)
        if self.scale != 1.0:
            torch._foreach_mul_([self._grads] if len(plain) == len(self.params) else views, self.scale)
        for index in plain:
            self.params[index].grad = None
        self.taken.update(plain)

    def _take(self, index: int, grad: Tensor | None) -> None:
        """A gradient's share of the mean, in its place in the bucket; in float32 and up in one pass over memory."""
        view = self._views[index]
        if index in self.widened:
            self.widened.remove(index)
            view.mul_(self.scale)
            self.taken.add(index)
        if grad is None:
            return
        if index in self.taken:
            view.add_(grad, alpha=self.scale)
        elif grad is view:
            view.mul_(self.scale)
        elif self.is_half:
            view.copy_(grad).mul_(self.scale)
        else:
            torch.mul(grad, self.scale, out=view)
        self.taken.add(index)

    def rescale(self, loss_scale: float) -> None:
        """From now on losses are multiplied by this; gradients that came and are not yet reduced are what they would have been."""
        for index in range(len(self.params)) if self.state is State.COLLECTING else ():
            param, view = self.params[index], self._views[index]
            if index in self.widened or param.grad is view:
                view.mul_(loss_scale / self.loss_scale)
        self._divide_by(loss_scale)

    def forget(self, params: Collection[nn.Parameter]) -> None:
        """What came of their gradients, and is not yet sent, never came."""
        if self.state is State.COLLECTING:
            gone = {index for index, param in enumerate(self.params) if param in params}
            for known in (self.arrived, self.taken, self.widened):
                known -= gone

    def launch(self) -> None:
        """Start the sum over the data ranks, which makes a mean over replicas. Parameters without a gradient here add zero."""
        self.begin()
        self._take_small()
        for index, param in enumerate(self.params):
            if param.grad is not None or index in self.widened:  # of passes that were not the last, or put there by somebody
                self._take(index, param.grad)
                param.grad = None
            self.used[index] = index in self.taken
            if not self.used[index]:
                self._views[index].zero_()
        self._reduced = self._grads.new_empty(self.owned.size) if self.stage.frees_gradients else self._grads[self.owned.slice()]
        if not self.is_cut:
            self._flags.copy_(torch.tensor(self.used), non_blocking=True)
        whole = self._flat.to(self.reduce_dtype)  # itself, where it has that dtype
        if self.is_cut:
            casts = whole.dtype != self._reduced.dtype
            self._travelling = torch.empty_like(self._reduced, dtype=whole.dtype) if casts else self._reduced
            if casts and self.stage.frees_gradients:
                self._grads.untyped_storage().resize_(0)
            self._work = self.groups.shard.reduce_scatter(self._travelling, whole, async_op=True)
        else:
            self._travelling = whole
            self._work = self.groups.shard.all_reduce(self._travelling, async_op=True)
        self._left = [self.groups.replicate]
        self.state = State.REDUCING

    @property
    def frees(self) -> bool:
        """Memory comes free when the sum is there."""
        return self.stage.frees_gradients or self.reduce_dtype != self.grad_dtype

    def settle(self, patience: float | None = None) -> bool:
        """Go on with the sum over the data ranks; once it is there, give whole gradients back if the stage does.

        Args:
            patience: how many seconds to wait for other ranks at each turn; None: until they come.

        Returns:
            Whether the sum is there.
        """
        while self.state is State.REDUCING:
            if patience is not None and not _done_within(self._work, patience):
                return False
            self._work.wait()
            self._work = DONE
            if not self._left:
                if self.stage.frees_gradients:
                    self._grads.untyped_storage().resize_(0)
                return True
            self._work = self._left.pop().all_reduce(self._travelling, async_op=True)
        return True

    def collect(self) -> None:
        """Wait for the sum over the data ranks, and add what other axes have of it."""
        if self.state is not State.REDUCING:
            return
        self.settle()
        assert self._reduced is not None
        assert self._travelling is not None
        if self.plan.kind.partial:
            self.groups.tp.all_reduce(self._travelling)
        if self._travelling.dtype != self._reduced.dtype:
            (self._reduced if self.is_cut else self._flat).copy_(self._travelling)
        if self._late != 1.0:
            self._reduced.mul_(self._late)
        self._travelling = None
        if not self.plan.kind.stages:
            self._merge(self._reduced)
        self.state = State.REDUCED

    def used_anywhere(self) -> list[bool]:
        """For each slot: some data rank used it. Of a collected bucket whose gradients were summed whole."""
        return self.used if all(self.used) else self._flags.bool().tolist()

    @property
    def uses(self) -> Tensor:
        """The same, as the number of data ranks that did."""
        return self._flags.real

    def publish(self, used: list[bool]) -> None:
        """Hand the result out: at stage 0 to the parameters, else to the optimizer's shards.

        Args:
            used: for each slot, whether any data rank has a gradient for it.
        """
        self.collect()
        assert self._reduced is not None
        if self.plan.kind.stages:
            used = self._add_stages(self._reduced, used)
            self._merge(self._reduced)
        if self.stage.shards_optimizer:
            self._publish_shards(self._reduced, dict(zip(self.plan.slots, used, strict=True)))
        else:
            for param, view, is_used in zip(self.params, self._views, used, strict=True):
                param.grad = view if is_used else None
        self._reduced = None
        self.arrived.clear()
        self.taken.clear()
        self.state = State.IDLE

    def _publish_shards(self, reduced: Tensor, used: dict[Slot, bool]) -> None:
        for shard in self.shards:
            if shard.param.grad is not None or (used[shard.slot] and shard.param.requires_grad):
                shard.param.grad = reduced[shard.place.slice()].view(shard.param.shape)

    def _merge(self, reduced: Tensor) -> None:
        """A shard that still has a gradient (no zero_grad since the last backward) gets the new one on top, in the new one's memory.

        One that is switched off (a toggled optimizer's) gets nothing new.
        """
        for shard in self.shards:
            old = shard.param.grad
            if old is None and shard.param.requires_grad:
                continue
            new = reduced[shard.place.slice()]
            if not shard.param.requires_grad:
                new.zero_()
            if old is not None:
                new.add_(old.reshape(-1))
                shard.param.grad = new.view(shard.param.shape)

    @property
    def again(self) -> float:
        """What published gradients must be multiplied with before they take part in one more reduction, which leaves them as they are."""
        times = self.groups.data.size * max(1, len(self.plan.kind.stages)) * (self.groups.tp.size if self.plan.kind.partial else 1)
        return 1.0 / (self.scale * self._late * times)

    def _divide_by(self, loss_scale: float) -> None:
        """What is taken in is multiplied by ``scale``, its sum by ``_late``: small gradients travel scaled where they do so in float16."""
        late = self.reduce_dtype == torch.float16
        self.loss_scale = loss_scale
        self.scale = 1.0 / (self.groups.replicas * (1.0 if late else loss_scale))
        self._late = 1.0 / loss_scale if late else 1.0

    def begin(self) -> None:
        """Before whole gradients are written for the first time since the last publication."""
        if self.state is not State.IDLE:
            return
        self.state = State.COLLECTING
        if self.stage.frees_gradients:
            self._grads.untyped_storage().resize_(self._grads.nbytes)
            self._zero_padding()
        elif self.stage.shards_optimizer:  # published gradients lie in the memory that is written now
            for shard in self.shards:
                if shard.param.grad is not None:
                    shard.param.grad = shard.param.grad.clone()
        elif self.again != 1.0:
            for param in self.params:
                if param.grad is not None:
                    param.grad.mul_(self.again)

    def _make_gradients(self) -> None:
        """Whole gradients and a view of them for each slot. What is freed and taken again is the memory behind them.

        Where gradients are summed whole, a number for each slot travels behind them: how many ranks used its parameter.
        """
        flags = 0 if self.is_cut else len(self.plan.slots)
        self._flat = torch.empty(self.plan.size + flags, dtype=self.grad_dtype, device=self.device)
        self._grads, self._flags = self._flat.split([self.plan.size, flags])
        self._views = self._split(self._grads)
        self._small = set() if self.is_half else {index for index, view in enumerate(self._views) if view.numel() <= SMALL}
        ends = [0, *(slot.span.stop for slot in self.plan.slots)]
        starts = [*(slot.span.start for slot in self.plan.slots), self.plan.size]
        self._padding = [self._grads[end:start] for end, start in zip(ends, starts, strict=True) if start > end]
        self._zero_padding()
        if self.stage.frees_gradients:
            self._grads.untyped_storage().resize_(0)

    def _zero_padding(self) -> None:
        for gap in self._padding:
            gap.zero_()

    def _split(self, flat: Tensor) -> list[Tensor]:
        """A view for each slot, in the shape of its parameter."""
        return [flat[slot.span.slice()].view(slot.info.spec.block_shape) for slot in self.plan.slots]

    def _add_stages(self, result: Tensor, used: list[bool]) -> list[bool]:
        """Sum a tied weight's gradient over the stages that hold it, in stage order, so that their copies stay equal to the bit.

        Which slots are used travels along; the answer is whether any stage uses them.
        """
        pp = self.groups.pp
        mine = torch.cat([result, torch.tensor(used, dtype=result.dtype).to(result.device, non_blocking=True)]).to(self.reduce_dtype)
        parts = {stage: mine if stage == pp.index else torch.empty_like(mine) for stage in self.plan.kind.stages}
        others = [stage for stage in self.plan.kind.stages if stage != pp.index]
        exchange(pp, [Message(mine, stage) for stage in others], [Message(parts[stage], stage) for stage in others]).wait()
        total = torch.zeros_like(mine)
        for stage in self.plan.kind.stages:
            total.add_(parts[stage])
        result.copy_(total[: result.numel()])
        return used if all(used) else total[result.numel() :].bool().tolist()

    # --- values ------------------------------------------------------------------------------------------------------------------

    def _take_values(self) -> None:
        """Move the parameters' values into flat memory, make the parameters views of it, and cut out what this rank updates."""
        self.optimizer_of: dict[nn.Parameter, Optimizer] = {}
        self.values = torch.zeros(self.plan.size, dtype=self.plan.kind.dtype, device=self.device)
        self._value_views = self._split(self.values)
        for param, view in zip(self.params, self._value_views, strict=True):
            view.copy_(param.detach())
            param.data = view
            param.zero = self
        mine = self.values[self.owned.slice()]
        self.span = mine.clone() if self.stage.frees_values else mine
        self.master: Master | None = None
        if self.is_half and self.plan.kind.trained:
            self.master = Master(
                self.span, self.half, [self._key(slot) for slot in self.plan.slots if slot.span.intersect(self.owned).size]
            )
        self._whole = True
        self.shards = [shard for slot in self.plan.slots if (shard := self._cut(slot)) is not None]
        if self.master is not None:
            self.master.rest()
        if self.stage.frees_values:
            self.free()

    def _key(self, slot: Slot) -> tuple[Span, int, int]:
        part = slot.span.intersect(self.owned)
        return part.shift(-self.owned.start), part.start - slot.span.start, zlib.crc32(slot.info.name.encode())

    def _cut(self, slot: Slot) -> Shard | None:
        part = slot.span.intersect(self.owned)
        if not part.size:
            return None
        place, span = part.shift(-self.owned.start), part.shift(-slot.span.start)
        data = (self.span if self.master is None else self.master.values)[place.slice()]
        shape = slot.info.spec.block_shape if self.plan.kind.whole else data.shape
        return Shard(slot, span, place, nn.Parameter(data.view(shape), requires_grad=self.plan.kind.trained))

    @property
    def is_whole(self) -> bool:
        """All values are here (or on their way)."""
        return self._whole

    def pin(self) -> None:
        """Stage 3: keep whole values, for whoever asks, until ``unpin``. All sharding ranks call."""
        if not self._whole:
            self.gather()
        self._pins += 1
        self.open_values()

    def unpin(self) -> None:
        """They may go; see ``pin``."""
        self._pins -= 1

    def gather(self) -> None:
        """Start fetching what the other ranks' optimizers made of their spans; every touch until then waits. All sharding ranks call."""
        self.wait()
        if self.stage.frees_values and not self._whole:
            self.values.untyped_storage().resize_(self.values.numel() * self.values.element_size())
        self._whole = True
        self._gathering = self.groups.values.all_gather(self.values, self.span, async_op=True)
        if not self.stage.frees_values and self._gathering is not DONE:
            for param in self.params:
                guard(param)

    def wait(self) -> None:
        """The values are here."""
        self._gathering.wait()
        self._gathering = DONE

    def free(self) -> None:
        """Stage 3: give the whole values back, unless they are pinned."""
        if self._pins:
            return
        self.wait()
        self.values.untyped_storage().resize_(0)
        self._whole = False
        self.close_values()

    def let_go(self) -> None:
        """Parameters are nobody's any more; their values stay."""
        for param in self.params:
            if getattr(param, "zero", None) is self:
                del param.zero

    def open_values(self) -> None:
        """The values are here for whoever asks."""
        self.wait()
        for param in self.params:
            unguard(param)

    def keep_edits(self) -> None:
        """Stage 3: whole values were edited, equally on all ranks; this rank's span takes them over (and a master follows its span)."""
        self.span.copy_(self.values[self.owned.slice()])

    def before_step(self) -> None:
        """An optimizer is about to update this rank's shards."""
        if not self.stage.frees_values:
            self._take_back_values()
        if self.master is not None:
            self.master.before_step()

    def _take_back_values(self) -> None:
        """Somebody gave parameters other memory (``param.data = ...``): its values are the bucket's from now on."""
        for param, view in zip(self.params, self._value_views, strict=True):
            if param.data_ptr() != view.data_ptr() and view.numel():
                self.wait()
                view.copy_(param.detach())
                param.data = view

    def loaded(self) -> None:
        """What this rank keeps of its span was read from a checkpoint. All sharding ranks call."""
        self.wait()
        if self.master is not None:
            self.master.loaded()
        if not self.stage.frees_values:
            self.gather()

    def after_step(self) -> None:
        """It did; at stages 1 and 2 the other ranks' are fetched. All sharding ranks call."""
        self.wait()
        if self.master is not None:
            self.master.after_step()
        if not self.stage.frees_values:
            self.gather()

    def kept(self, shard: Shard) -> Tensor:
        """The values of a shard in the greatest precision that is kept of them, flat."""
        master = self.master
        return (self.span if master is None or not master.stays else master.values)[shard.place.slice()]

    def close_values(self) -> None:
        """Whoever asks for values is told that they are away, unless they are pinned."""
        for param in () if self._pins else self.params:
            guard(param)

    # --- for those who ask --------------------------------------------------------------------------------------------------------

    def touched(self, param: nn.Parameter) -> None:
        if not self.stage.frees_values:
            self.open_values()
            return
        name = next(slot.info.name for slot in self.plan.slots if slot.info.param is param)
        raise RuntimeError(
            f"{name} is sharded over {self.groups.shard.size} ranks (zero=3) and whole only inside the forward of its own module. "
            "Elsewhere read or edit it inside `with lightning_par.full_parameters(module):`, on every rank; or keep its module whole with "
            "ZeroOptions(ignored=...)"
        )


def _done_within(work: Work, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not work.is_done():
        if time.monotonic() >= end:
            return False
        time.sleep(1e-4)
    return True
