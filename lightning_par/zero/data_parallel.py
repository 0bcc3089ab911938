"""DataParallel: the buckets of one rank, the hooks that fill them, and the optimizers that use them.

Note [The life of a gradient]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Autograd leaves a gradient in ``param.grad``; a hook moves it into its bucket and makes ``param.grad`` a view of that. Within
``no_sync`` that is all (stages 0 and 1): later backwards add in place. Otherwise a bucket's sum over the data ranks starts as soon as it
is complete *and all buckets before it have started*, so every rank sends the same buckets in the same order, whatever it used. (Buckets
that some rank could not complete in the last pass come last in the next, so that no others wait for ``finish`` behind them.)
``finish``, after the backward pass, starts what is left (unused parameters count as zero), waits, and publishes the mean over replicas:

=====  =====================================  =================================  ==========================================
stage  whole gradients                        the result is published in         values
=====  =====================================  =================================  ==========================================
0      kept, ``param.grad`` is a view         ``param.grad``                     whole
1      kept, for the next backward            ``grad`` of the optimizer's spans  whole; gathered after a step, while the next
                                                                                 forward already runs
2      freed as soon as a bucket is reduced,  same; spans add up over            same
       so every backward pass reduces         accumulated backward passes
3      same, a unit is a bucket               same                               gathered for each use, then freed
=====  =====================================  =================================  ==========================================

From stage 2 on whole gradients take memory until they are reduced, so a rank that is ahead waits, in its backward pass, for its oldest
reduction; but not for long, since the others may be unable to start theirs before ``finish``, and need this rank to get there.

A parameter has a gradient if it was used on any data rank, else none (as with DDP), so ranks never disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_par.comm import DONE, Group, Later, Work
from lightning_par.layout import ShardSpec, Span
from lightning_par.numerics import GradientShard
from lightning_par.zero.attach import cut_state, refuse_common_memory, refuse_new_groups, refuse_sparse, require_fitting
from lightning_par.zero.bucket import Bucket, State
from lightning_par.zero.elementwise import is_elementwise
from lightning_par.zero.groups import ReduceGroups
from lightning_par.zero.master import HALF, HalfWeights
from lightning_par.zero.options import STAGES, Stage, ZeroOptions
from lightning_par.zero.plan import BucketPlan, ParameterInfo, plan_buckets
from lightning_par.zero.replicas import check_replicas
from lightning_par.zero.units import REST, Residency, assign, find_units, install
from lightning_par.zero.zero_grad import ZeroGrad

IN_FLIGHT = 2
"""Reductions that may be under way, where they hold memory, before the oldest is waited for."""
PATIENCE = 1.0
"""Seconds for which it is, once in a pass."""


class DataParallel:
    """Averages gradients over the data ranks, and shards what the stage shards.

    Build it on every rank, with the same parameters on all data ranks, once parameters stand on their device; then ``attach`` the
    optimizers.

    Args:
        module: what ``infos`` are the parameters of; stage 3 hooks its submodules.
        infos: this rank's parameters.
        optimizers: that will be attached (they decide which parameters must stay whole).
        half: how parameters of half precision are updated.
        scaled: ``loss_scale`` will be set.

    Raises:
        ValueError: options name what the module has not.
    """

    def __init__(
        self,
        module: nn.Module,
        infos: Iterable[ParameterInfo],
        groups: ReduceGroups,
        *,
        stage: int,
        options: ZeroOptions | None = None,
        optimizers: Sequence[Optimizer] = (),
        half: HalfWeights = HalfWeights(),  # noqa: B008 (frozen)
        scaled: bool = False,
    ) -> None:
        self.infos, self.groups, self.stage, self.options = tuple(infos), groups, stage, options or ZeroOptions()
        self.kept, self.half, self.scaled = STAGES[stage], half, scaled
        self._loss_scale = 1.0
        self._group_counts: dict[Optimizer, int] = {}
        self._info = {info.param: info for info in self.infos}
        self._spec: dict[nn.Parameter, ShardSpec] = {info.param: info.spec for info in self.infos}
        self._sync, self._hold, self._next, self._settled, self._patience = True, False, 0, 0, PATIENCE
        self._uses: list[tuple[list[Bucket], Later]] = []  # by how many ranks each of their parameters was used in the last pass
        self._last_pass: tuple[list[int], Later] | None = None  # units gathered in it, and whether all ranks gathered them
        self._withheld: list[tuple[nn.Parameter, Tensor]] | None = None
        self._flags: Work = DONE
        self._handles: list[RemovableHandle | ZeroGrad] = []
        self._optimizer_hooks: list[RemovableHandle | ZeroGrad] = []
        self.buckets = self._lay_out(module, optimizers)
        self._bucket_of = {param: bucket for bucket in self.buckets if bucket.stage.shards_optimizer for param in bucket.params}
        self.reduced = [bucket for bucket in self.buckets if bucket.plan.kind.trained]
        self._launches = list(self.reduced)  # in the order in which they start
        self._cut = [bucket for bucket in self.reduced if bucket.is_cut]
        self._summed_whole = [bucket for bucket in self.reduced if not bucket.is_cut]
        self.residency = self._install_units(module) if self.kept.frees_values else None
        self._shards: dict[nn.Parameter, list[nn.Parameter]] = {}
        self._arrivals: dict[nn.Parameter, tuple[Bucket, int]] = {}  # the hook of each that tells of its gradient
        self._sums: list[Node] = []  # autograd's that add to ``param.grad``; nobody else keeps them
        for bucket in self.buckets:
            if bucket.plan.kind.trained:
                again = not bucket.stage.shards_optimizer and (scaled or bucket.again != 1.0)
                for index, param in enumerate(bucket.params):
                    if again:  # before autograd adds to what was published
                        self._sums.append(get_gradient_edge(param).node)
                        self._handles.append(self._sums[-1].register_prehook(lambda _grads, bucket=bucket: bucket.begin()))
                    handle = param.register_post_accumulate_grad_hook(partial(self._arrived, bucket, index))
                    self._handles.append(handle)
                    self._arrivals[param] = bucket, handle.id
            self._register_shards(bucket)
        self._unsharded = {info.param for info in self.infos} - self._shards.keys()
        alone = [bucket for bucket in self.buckets if bucket.groups.values.size == 1]
        self._unsharded |= {shard.param for bucket in alone for shard in bucket.shards}
        bucketed = {param for bucket in self.reduced for param in bucket.params}
        for m in module.modules():
            if not bucketed.isdisjoint(m.parameters()):
                self._handles.append(ZeroGrad(m, partial(self._shards_in, m), lambda m=m: self._forget(m.parameters())))
        self._scripted = any(isinstance(m, torch.jit.ScriptModule) for m in module.modules())  # which read values without asking
        self._frozen = [info for info in self.infos if info.param not in bucketed and not info.param.requires_grad]

    def _lay_out(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> list[Bucket]:
        needing_whole = [optimizer for optimizer in optimizers if not is_elementwise(optimizer)]
        whole_ones = {p for optimizer in needing_whole for group in optimizer.param_groups for p in group["params"]}
        whole = frozenset() if self.kept.frees_values else frozenset(whole_ones)
        self._units = find_units(module, self.options.units, self.options.min_unit_bytes) if self.kept.frees_values else {}
        self._unit_names = _names(module, self._units)
        self._owner = assign(module, self._units) if self.kept.frees_values else None
        ignored = self._ignored(module)
        members = [info for info in self.infos if info.param not in ignored and self._needs_bucket(info)]
        if self.kept.shards_optimizer:
            refuse_common_memory(members)
        refuse_sparse(module, members)
        ranks = self.groups.shard.size if self.kept.shards_optimizer else 1
        plans = plan_buckets(members, ranks, self.options.bucket_bytes, units=self._owner, whole=whole)
        buckets = [self._bucket(plan, self.kept) for plan in plans]
        apart = [info for info in self.infos if info.param in ignored and self._needs_bucket(info)]
        plans = plan_buckets(apart, 1, self.options.bucket_bytes, whole=frozenset(whole_ones))
        return buckets + [self._bucket(plan, STAGES[0]) for plan in plans]

    def _bucket(self, plan: BucketPlan, stage: Stage) -> Bucket:
        """Half-precision parameters that stay whole are updated through masters too, by every rank."""
        groups = self.groups
        if plan.kind.dtype in HALF and not stage.shards_optimizer:
            stage, groups = STAGES[1], replace(groups, values=Group("values"))
        return Bucket(plan, groups, stage, self.options.reduce_dtype, self.half)

    def _needs_bucket(self, info: ParameterInfo) -> bool:
        """Nobody shares the gradient of a parameter on a single data rank: it may stay where autograd puts it, if it is as it should be."""
        alone = self.groups.shard.size * self.groups.replicate.size == 1
        return not alone or len(info.stages) > 1 or info.partial or self.scaled or info.param.dtype in HALF

    def _ignored(self, module: nn.Module) -> set[nn.Parameter]:
        known = dict(module.named_modules())
        if unknown := [name for name in self.options.ignored if name not in known]:
            raise ValueError(f"ZeroOptions(ignored=...) names {', '.join(unknown)}, but the module has no submodule of that name")
        return {param for name in self.options.ignored for param in known[name].parameters()}

    def _install_units(self, module: nn.Module) -> Residency | None:
        assert self._owner is not None
        by_unit: dict[int, list[Bucket]] = {}
        for bucket in self.buckets:
            if bucket.stage.frees_values:
                by_unit.setdefault(-bucket.plan.kind.unit, []).append(bucket)
        if not by_unit:
            return None
        residency = Residency(by_unit, self.options.prefetch)
        self._handles += install(module, self._units, self._owner, residency)
        return residency

    def _register_shards(self, bucket: Bucket) -> None:
        if not bucket.stage.shards_optimizer:
            return
        for param in bucket.params:
            self._shards[param] = []
        for shard in bucket.shards:
            info = shard.slot.info
            self._shards[info.param].append(shard.param)
            self._spec[shard.param] = info.spec.flat(shard.span)
            self._info[shard.param] = info

    def _shards_in(self, module: nn.Module) -> Iterator[nn.Parameter]:
        return (part for param in module.parameters() for part in self._shards.get(param, ()))

    # --- during the step ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside are followed by more before the optimizer's step; stages 0 and 1 send nothing."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Backward passes inside only add to this rank's whole gradients, at any stage; the next ``finish`` reduces them."""
        before, self._hold = self._hold, True
        try:
            yield
        finally:
            self._hold = before

    def may_add(self, param: nn.Parameter) -> bool:
        """Whether, within ``hold``, a gradient may be added to ``param.grad`` as it is now, of which nobody need be told."""
        bucket, own = self._arrivals.get(param, (None, None))
        return (bucket is None or bucket.state is State.COLLECTING) and {own}.issuperset(param._post_accumulate_grad_hooks or ())

    def finish(self) -> None:
        """Reduce what is not yet reduced and publish the gradients. Every rank of the world calls it after its backward pass."""
        self._refuse_unfrozen()
        self.settle_values()
        if self._reduces:
            self._order_launches()
            for bucket in self._launches[self._next :]:
                bucket.launch()
            flags = self._start_flags()
            for bucket in self._launches:  # all of them before anybody waits for flags: a replica may wait for this rank's span
                bucket.settle()
            for bucket in self.reduced:
                bucket.collect()
            self._publish(flags)
            self._next, self._settled, self._patience = 0, 0, PATIENCE
        self.end_pass(backward=True)

    def end_pass(self, *, backward: bool = False) -> None:
        """A pass over the module is over: stage 3 frees what is still whole. All ranks call.

        Raises:
            RuntimeError: at stage 3, on every rank, if ranks used different layers in the pass before.
        """
        if self.residency is None:
            return
        gathered = self.residency.end_pass(backward=backward)
        self.require_alike()
        check = hash(tuple(gathered)) & 0xFFFFFFFF
        ends = torch.tensor([check, -check]).to(self.buckets[0].device, non_blocking=True)
        self._last_pass = gathered, Later(ends, self.groups.shard.all_reduce(ends, "max", async_op=True))

    def require_alike(self) -> None:
        """Stage 3: ranks that gathered different units got each other's values. Found out when a pass is over, told before the next is.

        Ranks that gathered unequally many wait for each other until the timeout instead.

        Raises:
            RuntimeError: on every rank.
        """
        if self._last_pass is None:
            return
        (gathered, ends), self._last_pass = self._last_pass, None
        if ends.read().sum().item():
            used = self.groups.shard.gather_objects([self._unit_names[unit] for unit in gathered])
            first = next(index for index, theirs in enumerate(used) if theirs != used[0])
            raise RuntimeError(
                f"at zero=3 all ranks must use the same layers in the same order, but rank {self.groups.shard.ranks[0]} fetched "
                f"{', '.join(used[0])} and rank {self.groups.shard.ranks[first]} fetched {', '.join(used[first])}. Keep those that "
                "differ whole with ZeroOptions(ignored=...), name the classes of the others in ZeroOptions(units=...), or use zero=2"
            )

    def clear(self) -> None:
        """Forget this rank's gradients."""
        for param in self._spec:
            param.grad = None
        self._forget(self._spec)

    def _forget(self, params: Iterable[nn.Parameter]) -> None:
        """They were cleared, and so is what buckets have of them: of a pass that an exception ended, say."""
        if self._withheld is None and any(bucket.state is State.COLLECTING for bucket in self.reduced):
            forgotten = set(params)
            for bucket in self.reduced:
                bucket.forget(forgotten)

    def withhold(self) -> None:
        """Hide this rank's gradients, so that a zero_grad that comes too late for them does not find them."""
        self._withheld = [(param, param.grad) for param in self._spec if param.grad is not None]
        for param, _ in self._withheld:
            param.grad = None

    def restore(self) -> None:
        """Bring back what ``withhold`` hid."""
        for param, grad in self._withheld or ():
            param.grad = grad
        self._withheld = None

    # --- optimizers --------------------------------------------------------------------------------------------------------------

    def attach(self, optimizer: Optimizer) -> None:
        """From stage 1 on: put this rank's shards in place of the optimizer's parameters, in its own param groups.

        Raises:
            ValueError: the optimizer holds foreign tensors, or needs more than the stage leaves on a rank, or was not announced.
        """
        unknown = [tuple(param.shape) for group in optimizer.param_groups for param in group["params"] if param not in self._info]
        if unknown:
            raise ValueError(
                f"{type(optimizer).__name__} holds tensors of shapes {unknown} that are no parameters of the module (any more): build "
                "the optimizer in configure_optimizers, from self.parameters()"
            )
        self._require_fitting(optimizer)
        self._group_counts[optimizer] = groups = len(optimizer.param_groups)
        self._optimizer_hooks.append(optimizer.register_step_pre_hook(lambda optimizer, *_: refuse_new_groups(optimizer, groups)))
        held = {param for group in optimizer.param_groups for param in group["params"]}
        reduced = [bucket for bucket in self.reduced if not held.isdisjoint(bucket.params)]
        self._optimizer_hooks.append(optimizer.register_step_pre_hook(lambda *_: _require_finished(reduced)))
        if not self._shards:
            if reduced:
                self._optimizer_hooks.append(ZeroGrad(optimizer, list, lambda: self._forget(held)))
            return
        for group in optimizer.param_groups:
            group["params"][:] = [part for param in group["params"] for part in self._shards.get(param, [param])]
        cut_state(optimizer, self._shards, self._spec)
        whole = [param for param in held if param in self._shards]
        self._optimizer_hooks.append(ZeroGrad(optimizer, lambda: whole, lambda: self._forget(held)))
        for bucket in self.buckets:
            if bucket.stage.shards_optimizer:
                bucket.optimizer_of |= {shard.param: optimizer for shard in bucket.shards if shard.slot.info.param in held}
        sharded = [bucket for bucket in reversed(self.buckets) if bucket.stage.shards_optimizer]  # in the order of the forward pass
        updated = [bucket for bucket in sharded if any(param in held for param in bucket.params)]
        self._optimizer_hooks.append(optimizer.register_step_pre_hook(lambda *_: _each_before_step(updated)))
        self._optimizer_hooks.append(optimizer.register_step_post_hook(lambda *_: self._stepped(updated)))

    def _require_fitting(self, optimizer: Optimizer) -> None:
        held = {param for group in optimizer.param_groups for param in group["params"]}
        spans = any(not bucket.plan.kind.whole for bucket in self.buckets if bucket.stage.shards_optimizer and held & set(bucket.params))
        parts = [self._info[param].name for param in held if not self._info[param].spec.is_whole]
        require_fitting(optimizer, self.stage, self.groups, cut_by_tp=sorted(parts), cut_into_spans=spans)

    def _stepped(self, updated: list[Bucket]) -> None:
        """Shards changed: whole values are fetched anew, now (stages 1 and 2) or when they are used."""
        for bucket in updated:
            bucket.after_step()
        if self._scripted:
            self.settle_values()
        if self.residency is not None:
            self.residency.drop()

    def loaded(self) -> None:
        """What ``sharded_value`` gave was read from a checkpoint. All ranks call."""
        for bucket in self.buckets:
            if bucket.stage.shards_optimizer:
                bucket.loaded()
        if self.residency is not None:
            self.residency.drop()

    def take_edits(self) -> None:
        """Where half-precision values were edited since the last step, masters follow, as they would before the next one."""
        for bucket in self.buckets:
            if bucket.stage.shards_optimizer and bucket.master is not None and bucket.master.stays:
                bucket.master.before_step()

    def take_over(self, earlier: DataParallel) -> None:
        """Go on with the exact values that ``earlier`` kept of the same parameters under the same options. All ranks call."""
        earlier.take_edits()
        for info in self.infos:
            ours, theirs = self.sharded_value(info.param), earlier.sharded_value(info.param)
            if ours is not None and theirs is not None and ours[0] == theirs[0]:
                ours[1].copy_(theirs[1])
        self.loaded()

    @property
    def rounding_steps(self) -> int:
        """Steps that stochastic rounding has seen: what it depends on besides names and places."""
        return max(
            (bucket.master.steps for bucket in self.reduced if bucket.stage.shards_optimizer and bucket.master is not None), default=0
        )

    @rounding_steps.setter
    def rounding_steps(self, steps: int) -> None:
        for bucket in self.reduced:
            if bucket.stage.shards_optimizer and bucket.master is not None:
                bucket.master.steps = steps

    @property
    def _gathered(self) -> list[Bucket]:
        """Buckets whose values are fetched after a step (stages 1 and 2); in reverse they are in the order of the forward pass."""
        return [bucket for bucket in self.buckets if bucket.stage.shards_optimizer and not bucket.stage.frees_values]

    @property
    def loss_scale(self) -> float:
        """By what the losses of the coming backward passes are multiplied: gradients are divided by it as they are taken in.

        So whatever is published is a gradient of the loss itself, and the scale may change between any two backward passes.
        """
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        if scale == self._loss_scale:
            return
        assert self.scaled, "DataParallel(scaled=True) is for losses that are scaled"
        if any(bucket.arrived for bucket in self.reduced):
            raise RuntimeError("the loss scale can change between backward passes only: call finish() after backward, then set it")
        for bucket in self.reduced:
            bucket.rescale(scale)
        self._loss_scale = scale

    def settle_values(self) -> None:
        """Wait for values that are on their way (stages 1 and 2)."""
        for bucket in self._gathered:
            bucket.open_values()

    def held(self, param: nn.Parameter) -> tuple[str, ShardSpec]:
        """The name of a parameter that an optimizer of this rank holds, and which part of the whole it is."""
        return self._info[param].name, self._spec[param]

    def info(self, param: nn.Parameter) -> ParameterInfo:
        """What is known of a parameter that an optimizer of this rank holds."""
        return self._info[param]

    def gradients(self, optimizer: Optimizer) -> list[GradientShard]:
        """The gradients that this rank's ``optimizer`` is about to use."""
        if optimizer in self._group_counts:
            refuse_new_groups(optimizer, self._group_counts[optimizer])
        params = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
        return [GradientShard(param.grad, self._counts(param)) for param in params]

    def _counts(self, param: nn.Parameter) -> bool:
        """Of all ranks over which ``ModelGradients`` sums, this one counts the gradient of ``param``."""
        return self._info[param].counted and (param not in self._unsharded or not self.disjoint or self.groups.shard.index == 0)

    def writes_value(self, param: nn.Parameter) -> bool:
        """Of all ranks that hold this part of a parameter's values, this one saves it."""
        bucket = self._bucket_of.get(param)
        alike = self.groups.data if bucket is None or bucket.groups.values.size == 1 else self.groups.replicate
        return self._info[param].counted and alike.index == 0

    def writes(self, param: nn.Parameter) -> bool:
        """Of all ranks whose optimizers hold this part of a parameter, this one saves it."""
        if not self.disjoint:
            return self._info[param].counted and self.groups.data.index == 0
        return self._counts(param) and self.groups.replicate.index == 0

    def check_replicas(self) -> None:
        """Make sure that ranks which should hold the same weights do, to the bit. All ranks call, outside a step.

        Raises:
            RuntimeError: on every rank, naming the parameters and ranks that differ.
        """
        whole: list[tuple[str, Tensor]] = []
        shards: list[tuple[str, Tensor]] = []
        over_tp: list[tuple[str, Tensor]] = []
        for info in self.infos:
            part, bucket = self.sharded_value(info.param), self._bucket_of.get(info.param)
            values = [] if bucket is not None and bucket.stage.frees_values else [(info.name, info.param)]
            whole += values
            if part is not None:
                kept = (f"the master of {info.name}" if values else info.name, part[1])
                (whole if bucket.groups.values.size == 1 < self.groups.shard.size else shards).append(kept)
                values.append(kept)
            over_tp += values if info.spec.is_whole else []
        check_replicas(self.groups, whole, shards, over_tp)

    @property
    def disjoint(self) -> bool:
        """Sharding ranks hold different parts of the gradients, so that a sum over the model needs all of them."""
        return self.kept.shards_optimizer

    def release(self) -> None:
        """Let optimizers go; others may be attached. At stages 1 and 2 values are whole afterwards."""
        self.settle_values()
        for hook in self._optimizer_hooks:
            hook.remove()
        self._group_counts.clear()
        self._optimizer_hooks.clear()
        self.clear()

    def close(self) -> None:
        """``release``, and take the hooks off the module. Values are left as they are. All ranks call."""
        self.require_alike()
        self.release()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for bucket in self.buckets:
            bucket.let_go()

    def sharded_value(self, param: nn.Parameter) -> tuple[ShardSpec, Tensor] | None:
        """The part of a parameter's values that this rank keeps where not all of them are whole and exact, flat.

        That is at stage 3 (empty if another rank has it), and of half-precision weights with masters. None: the parameter itself is it.
        """
        bucket = self._bucket_of.get(param)  # after ``close`` too
        if bucket is None or not (bucket.stage.frees_values or (bucket.master is not None and bucket.master.stays)):
            return None
        for shard in bucket.shards:
            if shard.slot.info.param is param:
                kept = bucket.kept(shard)
                return self._spec[shard.param].like(kept.dtype), kept
        nothing = bucket.span[:0] if bucket.master is None or not bucket.master.stays else bucket.master.values[:0]
        return self._spec[param].flat(Span(0, 0)).like(nothing.dtype), nothing

    # --- hooks -------------------------------------------------------------------------------------------------------------------

    @property
    def _reduces(self) -> bool:
        """Whether ``finish`` reduces: stages that free whole gradients do after every backward pass."""
        return self._sync or self.kept.frees_gradients

    def _arrived(self, bucket: Bucket, index: int, _: nn.Parameter) -> None:
        last = self._reduces and not self._hold
        bucket.arrive(index, last=last)
        if last and self._uses:
            self._order_launches()
        while last and self._next < len(self._launches) and self._launches[self._next].complete:
            self._launches[self._next].launch()
            self._next += 1
            self._settle_oldest()

    def _order_launches(self) -> None:
        """A pass begins. All data ranks come to the same order, from what they were told of the last one."""
        uses, self._uses = self._uses, []
        missed = {
            bucket
            for buckets, told in uses
            for bucket, times in zip(buckets, told.read().split([len(bucket.params) for bucket in buckets]), strict=True)
            if times.min() < self.groups.data.size
        }
        if uses:
            self._launches = sorted(self.reduced, key=lambda bucket: bucket in missed)

    def _settle_oldest(self) -> None:
        """Let few reductions hold memory, without waiting for long. See Note [The life of a gradient]."""
        while self._next - self._settled > IN_FLIGHT:
            bucket = self._launches[self._settled]
            if bucket.frees:
                if not bucket.settle(self._patience):
                    self._patience = 0.0
                    return
                if not bucket.plan.kind.partial:  # a sum over tp must come where it comes on all its ranks
                    bucket.collect()
            self._settled += 1

    def _publish(self, flags: Tensor) -> None:
        used = self._used_anywhere(flags)
        for bucket in self.reduced:
            bucket.publish([next(used) for _ in bucket.params] if bucket.is_cut else bucket.used_anywhere())
        if len(self.reduced) > 1:
            self._uses = [(self._cut, Later(flags, self._flags))] if self._cut else []
            if self._summed_whole:
                self._uses.append((self._summed_whole, Later(torch.cat([bucket.uses for bucket in self._summed_whole]))))

    def _start_flags(self) -> Tensor:
        """Find out how many data ranks used each parameter of buckets that are cut: one small reduction."""
        flags = torch.tensor([flag for bucket in self._cut for flag in bucket.used], dtype=torch.int32)
        if flags.numel():
            flags = flags.to(self.reduced[0].device, non_blocking=True)
            self._flags.wait()
            self._flags = self.groups.data.all_reduce(flags, async_op=True)
        return flags

    def _used_anywhere(self, flags: Tensor) -> Iterator[bool]:
        """The answer for each parameter of each such bucket, in order; read back only where this rank did not use all itself."""
        used = [flag for bucket in self._cut for flag in bucket.used]
        if all(used):
            return iter(used)
        self._flags.wait()
        return iter(flags.bool().tolist())

    def _refuse_unfrozen(self) -> None:
        unfrozen = [info.name for info in self._frozen if info.param.grad is not None]
        if unfrozen and not (self.groups.data.size == 1):
            raise RuntimeError(
                f"{', '.join(unfrozen)} got a gradient, but was frozen when training was set up, so its gradient is not averaged: unfreeze "
                "parameters before trainer.fit (below zero=3 a second fit is fine)"
            )


def _require_finished(buckets: list[Bucket]) -> None:
    for bucket in buckets:
        if bucket.arrived:
            raise RuntimeError(
                f"the optimizer steps, but the gradient of {bucket.name_of(min(bucket.arrived))} is not averaged over the ranks yet: in "
                "manual optimization call self.manual_backward(loss) in place of loss.backward(), in a loop without Lightning finish() "
                "after backward"
            )


def _each_before_step(buckets: list[Bucket]) -> None:
    for bucket in buckets:
        bucket.before_step()


def _names(module: nn.Module, units: dict[nn.Module, int]) -> dict[int, str]:
    """By which units are called in messages."""
    members: dict[int, list[str]] = {}
    for name, submodule in module.named_modules():
        if submodule in units:
            members.setdefault(units[submodule], []).append(name)
    return {REST: "the rest"} | {n: names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}" for n, names in members.items()}
