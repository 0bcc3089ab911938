"""The engine: runs a rank's list of actions, one method each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_par.comm import Group, Lanes, Work
from lightning_par.layout import Action, Kind, Schedule
from lightning_par.numerics import MicrobatchStreams
from lightning_par.pipeline.backward import Rest, backward_inputs, nothing
from lightning_par.pipeline.boundary import (
    Inlet,
    TensorForm,
    edges_of,
    flat,
    gradient_forms,
    messages_of,
    structure_of,
    tensor_forms,
)
from lightning_par.pipeline.errors import PipelineError
from lightning_par.pipeline.inbox import Inbox
from lightning_par.pipeline.lower import receive_of, send_of_free
from lightning_par.pipeline.plan import forward_plan, schedule_of, training_plan
from lightning_par.pipeline.split import Balance, Placement, cut, place
from lightning_par.pipeline.stage import Arrived, StageExit, StageLayers
from lightning_par.pipeline.sums import backward_summing, is_large
from lightning_par.pipeline.unknown import require_known
from lightning_par.pipeline.uses import Uses


def _has_no_hooks(param: nn.Parameter) -> bool:
    return not param._post_accumulate_grad_hooks


@dataclass
class Pipeline:
    """One rank's part of a pipelined module, and the way to run it.

    Attributes:
        names: every parameter of this rank, by the first name it had in the whole module.
        tied: parameters that several pipeline ranks hold, by that first name: the indices of those ranks. The gradient of each is the
            sum of theirs (one that has none counts as zero), which the caller must form.
        placement: where everything lives.
        device: where messages arrive; None where the parameters are.
    """

    module: nn.Module
    layers: StageLayers
    lanes: Lanes
    schedule: Schedule
    chunks: int
    placement: Placement
    names: dict[str, str]
    tied: dict[str, tuple[int, ...]]
    device: torch.device | None = None
    _forms: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def split(
        cls,
        module: nn.Module,
        group: Group,
        schedule: str,
        chunks: int = 1,
        layers: str | None = None,
        balance: Balance = "parameters",
        uses: Uses | None = None,
        device: torch.device | None = None,
    ) -> Pipeline:
        """Cut ``module``, in place, down to this rank's stages.

        All ranks of ``group`` must call, with the same whole module. Parameters of other stages are gone from it afterwards;
        those that stay keep their names. ``layers``, ``balance`` and ``uses`` are as in ``split.place``.
        ``device`` is where the part will run; without it, a stage that has no parameters takes the CPU.
        """
        training_plan(schedule, group.size, chunks, 1)  # refuses an unknown schedule before anything is changed
        order, stages = schedule_of(schedule), group.size * chunks
        rank_of = [order.rank_of(stage, group.size) for stage in range(stages)]
        placement = place(module, stages, layers, balance, uses)
        first_names = {id(p): name for name, p in module.named_parameters()}
        everything = [(name, first_names[id(p)]) for name, p in module.named_parameters(remove_duplicate=False)]
        holders: dict[str, set[int]] = {first: set() for _, first in everything}
        for name, first in everything:
            holders[first].update(rank_of[stage] for stage in placement.stages_of(name))
        pairs = {pair for a, b in pairwise(rank_of) if a != b for pair in ((a, b), (b, a))}
        stage_layers = cut(module, placement, order.stages_of(group.index, group.size, chunks), uses, device)
        return cls(
            module=module,
            layers=stage_layers,
            lanes=Lanes.open(group, pairs),
            schedule=order,
            chunks=chunks,
            placement=placement,
            names={name: first_names[id(p)] for name, p in module.named_parameters()},
            tied={first: tuple(sorted(ranks)) for first, ranks in holders.items() if len(ranks) > 1},
            device=device,
        )

    @property
    def ranks(self) -> int:
        return self.lanes.group.size

    @property
    def index(self) -> int:
        return self.lanes.group.index

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage, where losses are."""
        return self.index == self.rank_of(len(self.placement.spans) - 1)

    def rank_of(self, stage: int) -> int:
        """The pipeline rank on which a stage stands."""
        return self.schedule.rank_of(stage, self.ranks)

    def forward_backward(
        self,
        forward: Callable[[int], Tensor],
        signatures: Sequence[Hashable],
        *,
        split: bool = True,
        quiet: Callable[[nn.Parameter], bool] = _has_no_hooks,
        keep: Collection[int] = (),
    ) -> list[Arrived]:
        """Run one training step over ``len(signatures)`` micro-batches; gradients add to what the parameters have.

        All ranks of the group must call. ``forward(m)`` runs the user's step on micro-batch m and returns its loss, weighted and scaled; on
        ranks without the last stage it will not return. It is called once for each stage of this rank. ``signatures[m]`` stands for the
        shapes and dtypes of the micro-batch's input, equally on all ranks. What the step raises comes out unchanged. Random numbers are
        drawn as ``MicrobatchStreams`` says.

        ``split``: schedules that do backward in two parts do. Where a parameter's value is not there outside its module's forward and
        backward (ZeRO 3) that cannot be; their first part does all of it then.

        ``quiet``: whether anybody may add to a parameter's ``grad``, whom no hook need hear of. See Note [Sums of products].

        ``keep``: of which micro-batches to return what arrived at the last stage, for ``finish``; other ranks return nothing.
        """
        plan = training_plan(self.schedule.name, self.ranks, self.chunks, len(signatures))
        split = split and any(action.kind is Kind.W for action in plan[self.index])
        with torch.enable_grad():
            return _Step(self, forward, signatures, grad=True, split=split, quiet=quiet, keep=keep).run(plan[self.index])

    def forward_only(
        self, forward: Callable[[int], object], signatures: Sequence[Hashable], *, keep: Collection[int] = ()
    ) -> list[Arrived]:
        """Run the stages forward over micro-batches without gradients; as ``forward_backward``, but ``forward`` may return anything."""
        plan = forward_plan(self.schedule.name, self.ranks, self.chunks, len(signatures))
        with torch.no_grad():
            return _Step(self, forward, signatures, grad=False, keep=keep).run(plan[self.index])

    def finish(self, step: Callable[[], T], arrived: Arrived) -> T:
        """Run the user's step once more on the last stage, which this rank has, from what arrived there. Nothing is sent or kept."""
        last = len(self.placement.spans) - 1
        tensors = Inlet(list(arrived.copy().tensors), grad=torch.is_grad_enabled()).tensors
        with self.layers.active(last, Arrived(tensors, arrived.forms)):
            return step()


T = TypeVar("T")

Forms = Mapping[int, Any]
"""Of what layers returned, by their places in the list."""

Place = tuple[int, int]
"""A stage and a micro-batch."""


class _Step:
    """One pass of a rank over its list. Everything it holds belongs to this step, and goes with it."""

    def __init__(
        self,
        pipeline: Pipeline,
        forward: Callable[[int], object],
        signatures: Sequence[Hashable],
        *,
        grad: bool,
        split: bool = False,
        quiet: Callable[[nn.Parameter], bool] = _has_no_hooks,
        keep: Collection[int] = (),
    ) -> None:
        self.kept: dict[int, Arrived | None] = dict.fromkeys(keep)  # of the last stage, by micro-batch
        self.pipeline, self.forward, self.signatures, self.grad, self.split = pipeline, forward, signatures, grad, split
        self.quiet, self.large = quiet, [weight for weight in pipeline.module.parameters() if is_large(weight)]
        self.lanes, self.forms = pipeline.lanes, pipeline._forms
        self.last_stage = len(pipeline.placement.spans) - 1
        self.device = pipeline.device or next((p.device for p in pipeline.module.parameters()), torch.device("cpu"))
        self.streams = MicrobatchStreams(len(signatures), self.device)
        self.inbox = Inbox(self.lanes, self.device, self._forms_of, self._learn)
        self.inlets: dict[Place, Inlet] = {}  # where inputs came in, until their gradients are taken
        self.graphs: dict[Place, list[GradientEdge | None]] = {}  # where gradients of an output enter, until backward
        self.seeds: dict[int, Tensor] = {}  # by micro-batch, the gradient of its loss: 1
        self.rests: dict[Place, Rest] = {}  # what is left of a backward
        self.hasty: dict[Action, Rest] = {}  # sends for which the stage before idles, and what can be done after them
        self.outgoing: dict[Action, list[Tensor]] = {}  # by the receive that takes it
        self.headers: dict[Action, Any] = {}  # forms to send ahead of it
        self.sent: dict[Action, list[Work]] = {}
        self.methods: dict[Kind, Callable[[Action], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.W: self._backward_rest,
            Kind.SEND_F: self._send,
            Kind.SEND_B: self._send,
            Kind.RECV_F: self._receive,
            Kind.RECV_B: self._receive,
            Kind.FREE_F: self._free,
            Kind.FREE_B: self._free,
        }

    def run(self, actions: Sequence[Action]) -> list[Arrived]:
        last_forward = max(place for place, action in enumerate(actions) if action.kind is Kind.F)
        self.hasty = {action: nothing for action in actions[last_forward:] if action.kind is Kind.SEND_B and not self.split}
        with self.streams:
            for action in actions:
                self.methods[action.kind](action)
        left = [
            key
            for held in (self.inlets, self.graphs, self.seeds, self.rests, self.hasty, self.outgoing, self.headers, self.sent)
            for key in held
        ]
        assert not left, f"the step left something behind: {left}"
        assert self.inbox.is_empty, "the step left messages unread"
        return [arrived for arrived in self.kept.values() if arrived is not None]

    def _forward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        inlet = self._enter(action) if stage > 0 else None
        done, result = self._run_stage(action, inlet)
        if done is None:
            self._keep_loss(action, result)
        else:
            self._keep_output(action, *done)
        if self.grad and inlet is not None:
            inlet.tensors.clear()
            self.inlets[stage, microbatch] = inlet

    def _backward(self, action: Action) -> None:
        place = action.stage, action.microbatch
        is_last = action.stage == self.last_stage
        grads = [self.seeds.pop(action.microbatch)] if is_last else self._collect(action._replace(kind=Kind.RECV_B))
        pairs = [(edge, grad) for edge, grad in zip(self.graphs.pop(place), grads, strict=True) if edge is not None]
        outputs, grads = [edge for edge, _ in pairs], [grad for _, grad in pairs]
        inlet = self.inlets.pop(place, None)
        if self.split:
            self.rests[place] = backward_inputs(outputs, grads, None if inlet is None else inlet.entry)
        else:
            send = action._replace(kind=Kind.SEND_B)
            large = [weight for weight in self.large if weight.grad is not None and self.quiet(weight)]
            rest = backward_summing(outputs, grads, large, wait=send in self.hasty)
            if send in self.hasty:
                self.hasty[send] = rest
        if inlet is not None:
            self.outgoing[receive_of(action._replace(kind=Kind.SEND_B))] = inlet.take_gradients()

    def _backward_rest(self, action: Action) -> None:
        if self.split:
            self.rests.pop((action.stage, action.microbatch))()

    def _send(self, action: Action) -> None:
        """Start to send what was computed, and then do what was left for later."""
        receive = receive_of(action)
        peer = self._rank(receive.stage)
        header = [self.lanes.send_object(self.headers.pop(receive), peer, self.device)] if receive in self.headers else []
        self.sent[action] = [*header, self.lanes.send([flat(tensor) for tensor in self.outgoing.pop(receive)], peer)]
        self.hasty.pop(action, nothing)()

    def _receive(self, action: Action) -> None:
        self.inbox.expect(action, self._source(action))

    def _free(self, action: Action) -> None:
        for work in self.sent.pop(send_of_free(action)):
            work.wait()

    def _enter(self, action: Action) -> Inlet:
        return Inlet(self._collect(action._replace(kind=Kind.RECV_F)), grad=self.grad)

    def _run_stage(self, action: Action, inlet: Inlet | None) -> tuple[tuple[Any, Forms] | None, Any]:
        """What is to be handed on, and the forms of what layers returned; on the last stage, None and what the user's step returns."""
        stage, arrived = action.stage, Arrived()
        if inlet is not None:
            arrived = Arrived(inlet.tensors, self.forms[self._key(stage - 1, action.microbatch)])
            if stage == self.last_stage and action.microbatch in self.kept:
                self.kept[action.microbatch] = arrived.copy()
        self.streams.begin(action.microbatch)
        with self.pipeline.layers.active(stage, arrived, partial(self.streams.reach, action.microbatch, stage)):
            try:
                result = self.forward(action.microbatch)
                if stage == self.last_stage:
                    self._check_result(result)
            except StageExit as stop:
                return (stop.output, stop.forms), None
        if stage < self.last_stage:
            raise PipelineError(
                f"the step came to its end on stage {stage} of {self.last_stage + 1}, which must end inside "
                f"{self.pipeline.placement.layers}: either it did not run the layers, or a bare `except:` in it caught the exit of the "
                "stage (catch Exception instead)"
            )
        return None, result

    def _check_result(self, result: Any) -> None:
        require_known(result, "the loss" if self.grad else "what the step returns")
        if self.grad and isinstance(result, Tensor):
            self.pipeline.layers.check_loss(result, self.pipeline.module)

    def _keep_output(self, action: Action, output: Any, forms: Forms) -> None:
        """Make ready what the next stage needs, and the way back for its gradient."""
        receive = receive_of(action._replace(kind=Kind.SEND_F))
        key = self._key(action.stage, action.microbatch)
        is_new = key not in self.forms
        if self.forms.setdefault(key, forms) != forms:
            self._require_same(action, forms, self.forms[key])
        if is_new and self._rank(receive.stage) != self.pipeline.index:
            self.headers[receive] = forms
        self.outgoing[receive] = messages_of(output)
        if self.grad:
            self.graphs[action.stage, action.microbatch] = edges_of(output)

    def _require_same(self, action: Action, now: Forms, before: Forms) -> None:
        """What later stages know, by the forms of one micro-batch, is right for this one."""
        last = max(now)
        for layer in sorted(now.keys() & before.keys()):
            told, known = (forms[layer] if layer == last else structure_of(forms[layer]) for forms in (now, before))
            if told != known:
                raise PipelineError(
                    f"on stage {action.stage}, layer {layer} of {self.pipeline.placement.layers} returned {told} where it returned {known} "
                    f"before, for a micro-batch of the same shapes ({self.signatures[action.microbatch]}): shapes, and what layers return "
                    "besides tensors, may depend on the shapes of the batch only"
                )

    def _keep_loss(self, action: Action, loss: Any) -> None:
        self.forms.setdefault(self._key(action.stage, action.microbatch), {})
        if not self.grad:
            return
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise PipelineError(
                f"the step of micro-batch {action.microbatch} must return its loss, a tensor of one element; it returned {loss!r}"
            )
        self.graphs[action.stage, action.microbatch] = [get_gradient_edge(loss)]
        self.seeds[action.microbatch] = torch.ones_like(loss)

    def _collect(self, receive: Action) -> list[Tensor]:
        """The tensors of a receive; from this rank's own hands where both stages live here."""
        source = self._source(receive)
        return self.outgoing.pop(receive) if source == self.pipeline.index else self.inbox.take(receive, source)

    def _forms_of(self, receive: Action) -> list[TensorForm] | None:
        forward = receive.kind is Kind.RECV_F
        forms = self.forms.get(self._key(receive.stage - 1 if forward else receive.stage, receive.microbatch))
        if forms is None:
            return None
        form = forms[max(forms)]
        return tensor_forms(form) if forward else gradient_forms(form)

    def _learn(self, receive: Action, form: object) -> None:
        self.forms[self._key(receive.stage - 1, receive.microbatch)] = form

    def _key(self, stage: int, microbatch: int) -> Hashable:
        """The output of a stage has one form for each of these."""
        return stage, self.grad, self.signatures[microbatch]

    def _rank(self, stage: int) -> int:
        return self.pipeline.rank_of(stage)

    def _source(self, receive: Action) -> int:
        return self._rank(receive.stage + (-1 if receive.kind is Kind.RECV_F else 1))
