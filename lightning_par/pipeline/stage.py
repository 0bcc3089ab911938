"""The layer list of a rank: its own layers, and a stand-in for every module that lives elsewhere.

Note [The unmodified forward]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Every rank runs the user's whole ``training_step`` for every micro-batch and stage; what it does not hold answers for itself. While a
stage with layers ``first .. last`` is active, calling

=======================================  =================================================================================
a module before the layers               gives what is unknown, of the right form, on all but stage 0
layer ``i < first - 1``                  gives what is unknown, of the form that it returned on its stage
layer ``first - 1``                      gives what it returned on the previous stage
layer ``first .. last``                  runs it
any layer after ``last``                 raises ``StageExit`` with what layer ``last`` returned
a module after the layers                runs it; only the last stage gets there
=======================================  =================================================================================

So the loop sees every layer at its own place, whether it iterates, enumerates, slices or indexes. ``StageExit`` is a BaseException:
``except Exception`` in user code does not catch it. Its call is outside the last layer's own, so that activation checkpointing of that
layer is complete by then.

This is right if what counts is computed from the previous stage's last output, and from what each rank computes for itself (masks,
positions, rotary angles; what the loop does with that output before the next layer). All else comes from what is unknown, and is refused by
name where it would count: see Note [What is not known here]. Much of it a dry run has seen (see Note [What a dry run sees]): then the
module is on every stage that uses it, or the model is refused before anything runs.

Of a layer's output, tensors that the loop hands to the next layer as they are go on; the hidden state, which comes first, always does.
Others stay on their stage, and are unknown elsewhere (attention weights, auxiliary losses), unless the loop has made something new of the
output: then the next stage does so again, and may need all of them. It also does again whatever else the loop does between the two (hooks,
changes of containers), which on this stage is done to another name of the output, and goes nowhere. Only what is changed in place would be
changed twice, and is refused. So is what a layer writes into what it is given, and what it leaves on an attribute, if a stage comes upon
it where the layer did not run.

A sum over layers is right as part of the hidden state: ``x, total = layer(x, total)``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import ismethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_flatten, tree_leaves
from typing_extensions import override

from lightning_par.layout import Span
from lightning_par.numerics import pass_by
from lightning_par.pipeline.backward import children_first, is_leaf
from lightning_par.pipeline.boundary import (
    UnjoinableError,
    form_of,
    is_plain,
    join_forms,
    join_tensors,
    rebuild,
    require_handable,
    stand_for,
    withhold,
)
from lightning_par.pipeline.errors import PipelineError
from lightning_par.pipeline.shown import HOW_TO_CARRY, INSTEAD_OF_WEIGHTS, Elsewhere, Shown, seen_from_afar
from lightning_par.pipeline.torch_functions import map_tensors, tensors_in
from lightning_par.pipeline.traces import Trace, changed, contents, marks, traces
from lightning_par.pipeline.unknown import Home, Origin, require_known, unknown, unknown_weight

KNOWN = 1000
"""Calls that a stand-in remembers: plain values that never come again (a count of steps) must not fill memory."""


class StageExit(BaseException):
    """Unwinds the user's step when its stage is done.

    Attributes:
        output: what the stage's last layer returned, as it is sent.
        forms: of what each layer so far returned, by its place; that of the last one as it is sent.
    """

    def __init__(self, output: Any, forms: dict[int, Any]) -> None:
        super().__init__("a pipeline stage is done")
        self.output, self.forms = output, forms


class StandIn(nn.Module):
    """Stands where a module was. Attributes are those of the module; its parameters are found here by steps only."""

    def __init__(self, module: nn.Module, name: str, home: Home, instead: str) -> None:
        """``instead``: what to do instead of using it, or its weights."""
        super().__init__()
        self._hide(_stands_for=module, _name=name, _home=home, _instead=instead)

    def _hide(self, **attributes: Any) -> None:
        """Set attributes without registering them as submodules, parameters or buffers."""
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    @override
    def named_modules(self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True) -> Iterator[Any]:
        """Within a step, as if the module were here."""
        if not self._home.in_step:
            return super().named_modules(memo, prefix, remove_duplicate)
        return Elsewhere(self._stands_for, self._name, self._home, self._instead).named_modules(memo, prefix, remove_duplicate)

    def __getattr__(self, name: str) -> Any:
        if "_stands_for" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._stands_for, name)

    @override
    def extra_repr(self) -> str:
        return f"for {type(self._stands_for).__name__}"


class BeforeLayers(StandIn):
    """A module of the first stage, on another rank: forms come from a copy on the meta device. See Note [The unmodified forward].

    Its parameters are unknown as well, and its methods and the modules in it answer as it does itself. A call of it takes one number
    from the step's stream of random numbers, as a call of the module does where it is (see ``numerics.Apart``). What was computed once on
    the meta device is known for the next call with the same forms and plain values, unless it draws random numbers: they go on.

    Args:
        name: what it is called in the model.
        home: the rank's layers.
    """

    def __init__(self, module: nn.Module, name: str, home: Home) -> None:
        example = next(p for p in module.parameters())
        dtype = example.dtype if example.is_floating_point() else torch.get_default_dtype()
        self._begin(on_meta(module), name, home, torch.zeros((), dtype=dtype, device=example.device), {})

    def _begin(
        self, module: nn.Module, name: str, home: Home, example: Tensor, known: dict[Hashable, Any], *, is_part: bool = False
    ) -> None:
        instead = (
            "Pass it through the layers' outputs. If it is the model's end that needs it, say so on the model: pipeline_after = "
            f"[{name!r}] if it is used there only, pipeline_before and pipeline_after if at both ends. A dry run of the step sees all that "
            "by itself: keep what needs the numbers of tensors (.item(), if) out of the step"
        )
        super().__init__(module, name, home, instead)
        self._hide(_example=example, _known=known, _is_part=is_part, training=module.training)

    @override
    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if isinstance(value, nn.Module) and not isinstance(value, nn.ModuleList | nn.ModuleDict):
            part = BeforeLayers.__new__(BeforeLayers)
            part._begin(value, f"{self._name}.{name}", self._home, self._example, self._known, is_part=True)
            return part
        if isinstance(value, Tensor):
            return unknown_weight(value, self._example.device, Origin(f"{self._name}.{name}", self._instead, self._home))
        return partial(self._answer, value) if ismethod(value) and value.__self__ is self._stands_for else value

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_part:
            pass_by()
        return self._answer(self._stands_for, *args, **kwargs)

    def _answer(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        key = self._key(call, (args, kwargs))
        output = self._known.get(key) if key is not None else None
        if output is None:
            drawn = torch.get_rng_state()
            output = self._without_numbers(call, *map_tensors(lambda tensor: tensor.to("meta"), (args, kwargs)))
            if key is not None and _is_plain(tree_leaves(output)) and torch.equal(drawn, torch.get_rng_state()):
                if len(self._known) >= KNOWN:
                    self._known.clear()
                self._known[key] = output
        return map_tensors(self._unknown, output)

    def _without_numbers(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call returns on the meta device, constants it makes on the CPU or there."""
        before, drawn = contents(((None, *args), kwargs)), torch.get_rng_state()
        try:
            with torch.no_grad():
                try:
                    output = call(*args, **kwargs)
                except RuntimeError:
                    torch.set_rng_state(drawn)
                    with torch.device("meta"):
                        output = call(*args, **kwargs)
        except Exception as error:
            raise PipelineError(
                f"{self._name} stands before the layers, on the first pipeline stage; others run it without numbers, to know what it "
                f"returns, which it cannot do ({type(error).__name__}: {error}). Keep what needs numbers out of it; or let a dry run of "
                "the step see that, and leave it out of pipeline_before: then it stands everywhere; or use pp=1"
            ) from error
        if kind := changed(before, None):
            raise PipelineError(
                f"{self._name}, which stands on the first pipeline stage, writes into a {kind} that it is given: other stages would not "
                "have what it wrote. Let it return it; or use pp=1"
            )
        return output

    def _key(self, call: Callable[..., Any], given: Any) -> Hashable | None:
        """Calls with the same one have outputs of the same form; None where that cannot be told."""
        leaves, spec = tree_flatten(given)
        if not _is_plain(leaves):
            return None
        forms = tuple((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves)
        kind = self._example.device.type
        return call, forms, str(spec), torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.get_default_dtype()

    def _unknown(self, meta: Tensor) -> Tensor:
        return unknown(meta.shape, meta.dtype, self._example.device, Origin(f"what {self._name} returns", self._instead, self._home))

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BeforeLayers:
        """Follow ``to``, ``half`` and the like: the device and dtype that outputs will have."""
        self._hide(_example=fn(self._example))
        self._known.clear()
        self._stands_for._apply(lambda tensor: tensor.to(self._example.dtype) if tensor.is_floating_point() else tensor)
        return self

    @override
    def train(self, mode: bool = True) -> BeforeLayers:
        self._known.clear()
        self._stands_for.train(mode)
        return super().train(mode)


class AfterLayers(StandIn):
    """A module of the last stage, on another rank: never reached."""

    def __init__(self, module: nn.Module, name: str, home: Home) -> None:
        instead = f"If it is used before the layers, too, say so on the model: pipeline_before and pipeline_after = [{name!r}]"
        super().__init__(on_meta(module), name, home, instead)

    @override
    def __getattr__(self, name: str) -> Any:
        return seen_from_afar(super().__getattr__(name), f"{self._name}.{name}", self._home, self._instead)

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise PipelineError(
            f"{self._name} lives on the last pipeline stage, but another stage has come to it. On every other stage the step must end "
            "inside the layer list. If the model calls this module before the layers, say so on the model, pipeline_before = "
            f"[{self._name!r}], or register it before them; if not, did it run them all?"
        )


class _OtherLayer(Elsewhere):
    """A layer that is not of the active stage."""

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._answer(self._index, (args, kwargs))


class _OwnLayer(Shown):
    """A layer of the active stage: what it is given is checked, its output kept."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._index, self._stands_for, args, kwargs)


@dataclass(frozen=True)
class Arrived:
    """What the stage before has sent: tensors, and the forms of what all layers until then returned."""

    tensors: Sequence[Tensor] = ()
    forms: Mapping[int, Any] = field(default_factory=dict)

    def copy(self) -> Arrived:
        """The same numbers, whatever is made of these."""
        return Arrived([tensor.detach().clone() for tensor in self.tensors], self.forms)

    def joined(self, other: Arrived, sizes: tuple[int, int]) -> Arrived | None:
        """What would have arrived for two micro-batches of these sizes at once; None if nobody can tell."""
        try:
            return Arrived(
                join_tensors(self.tensors, other.tensors, sizes),
                {layer: join_forms(form, other.forms[layer], sizes) for layer, form in self.forms.items()},
            )
        except (UnjoinableError, KeyError):
            return None


@dataclass
class _Pass:
    """One stage running one micro-batch."""

    span: Span
    arrived: Arrived
    reached: Callable[[], None]
    exits: bool  # whether a stage follows
    watches: bool  # whether to look for attributes that layers change
    eagerly: ExitStack  # until the stage's own layers come: functions that were compiled meet what is unknown, and run as they are written
    forms: dict[int, Any]  # of what layers returned so far
    ran: int = -1  # the layer of this stage that ran last
    sends: Any = None  # what the last one returned
    handed: Any = None  # the same as the step has it, which may hook it, and change the containers
    versions: list[int] = field(default_factory=list)  # how often its tensors had been changed in place by then
    passed: set[int] = field(default_factory=set)  # layers of earlier stages that were called
    given: Any = None  # what it was given
    ends: dict[Node, int] = field(default_factory=dict)  # where the graphs of its layers' outputs end, by layer

    @property
    def is_done(self) -> bool:
        return self.ran == self.span.stop - 1


def left_behind(layer: str, place: str) -> PipelineError:
    return PipelineError(
        f"{layer} is used {place} by another way than the output of its call, but that is on another pipeline stage: what it computed and "
        "left on an attribute or in a hook (router logits, an auxiliary loss), a part of it called by itself, or its weights. So "
        f"{HOW_TO_CARRY}; a penalty on weights is the optimizer's weight_decay; or use pp=1"
    )


LayerList = nn.ModuleList | nn.Sequential


class StageLayers(nn.ModuleList):
    """The layer list of one rank. Holds the layers of its stages under their global names, and is as long as the whole list.

    Args:
        layers: all layers of the model; those of other ranks are let go (but for a copy on the meta device). If it is a Sequential, this
            can be called like one.
        spans: the layers of each stage of this rank, by stage.
        stages: how many stages there are in all.
        name: what the list is called in the model, for messages.
        traces: attributes that layers are known to change as they run.
        seen: whether dry runs have shown what layers leave behind; else it is looked for in the first graph of a loss.
        device: where they will run; without it, where their parameters are.
    """

    def __init__(
        self,
        layers: LayerList,
        spans: Mapping[int, Span],
        *,
        stages: int,
        name: str,
        traces: Iterable[Trace] = (),
        seen: bool = True,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        local = {i for span in spans.values() for i in range(span.start, span.stop)}
        self._keys = tuple(layers._modules)
        for i in sorted(local):
            self.add_module(self._keys[i], layers[i])
        copies = [layer if i in local else on_meta(layer) for i, layer in enumerate(layers)]
        self._spans, self._stages, self._name = dict(spans), stages, name
        self._kind = nn.Sequential if isinstance(layers, nn.Sequential) else nn.ModuleList
        self._others = tuple(
            _OtherLayer(layer, f"{name}.{key}", self, _index=i, _answer=self._outside)
            for i, (key, layer) in enumerate(zip(self._keys, copies, strict=True))
        )
        self._own: dict[int, _OwnLayer] = {}  # made as they are first seen
        self._now: _Pass | None = None
        self._traces, self._seen, self._device = set(traces), seen, device
        self._whole: list[nn.Module] = []  # no part of this
        self._watched: set[tuple[int, bool, bool]] = set()  # stages and modes in which layers were watched for more

    @contextmanager
    def active(self, stage: int, arrived: Arrived = Arrived(), reached: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Inside, the list presents ``stage`` to the model.

        ``reached`` is called when the model has come past the layers of earlier stages.
        """
        if self._now is not None:
            raise PipelineError("a pipeline step was started inside another")
        kind = stage, self.training, torch.is_grad_enabled()
        exits, watches = stage < self._stages - 1, kind not in self._watched
        with ExitStack() as eagerly:
            if stage > 0:
                eagerly.enter_context(torch.compiler.set_stance("force_eager"))
            self._now = _Pass(self._spans[stage], arrived, reached, exits, watches, eagerly, dict(arrived.forms))
            try:
                yield
            finally:
                self._now = None
                self._watched.add(kind)

    @property
    def in_step(self) -> bool:
        """Whether a stage is active."""
        return self._now is not None

    @property
    def device(self) -> torch.device:
        """Where this rank's layers run."""
        where = (parameter.device for part in self._modules.values() for parameter in part.parameters())
        return self._device or next(where, torch.device("cpu"))

    def belong_to(self, module: nn.Module) -> StageLayers:
        """These are the layers of this module."""
        self._whole = [module]
        return self

    def kept_with(self, tensor: Tensor) -> Tensor | None:
        """The parameter or buffer of the module that has its numbers in the same memory as this tensor."""
        memory = tensor.untyped_storage().data_ptr()
        own = (one for part in self._whole for one in (*part.parameters(), *part.buffers()))
        return next((one for one in own if one.layout is torch.strided and one.untyped_storage().data_ptr() == memory), None)

    @override
    def __len__(self) -> int:
        return len(self._others)

    @override
    def __iter__(self) -> Iterator[nn.Module]:
        return (self._at(i) for i in range(len(self)))

    @override
    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Within a step, all layers, as the loop sees them."""
        return super().named_children() if self._now is None else iter([(key, self._at(i)) for i, key in enumerate(self._keys)])

    @override
    def named_modules(self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True) -> Iterator[Any]:
        """Within a step, those of all layers: the weights of others are unknown."""
        if self._now is None:
            yield from super().named_modules(memo, prefix, remove_duplicate)
            return
        memo = set() if memo is None else memo
        yield prefix, self
        for name, part in self.named_children():
            yield from part.named_modules(memo, f"{prefix}.{name}" if prefix else name, remove_duplicate)

    @override
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if self._now is not None and self._stages > 1:
            raise Origin(self._name, INSTEAD_OF_WEIGHTS).refused("the state_dict() that the step asks for")
        return super().state_dict(*args, **kwargs)

    @override
    def train(self, mode: bool = True) -> StageLayers:
        for layer in self._others:
            layer.train(mode)
        return super().train(mode)

    @override
    def __getitem__(self, index: int | slice) -> nn.Module:
        places = range(len(self))[index]
        if isinstance(places, int):
            return self._at(places)
        several = [self._at(i) for i in places]
        return nn.Sequential(*several) if self._kind is nn.Sequential else nn.ModuleList(several)

    @override
    def forward(self, input: Any) -> Any:
        if self._kind is not nn.Sequential:
            return super().forward(input)  # refuses, as that of any ModuleList
        for layer in self:
            input = layer(input)
        return input

    def _at(self, index: int) -> nn.Module:
        """What the model sees at this place: with no stage active, every layer of this rank."""
        if self._now is None:
            return self._modules.get(self._keys[index], self._others[index])
        span = self._now.span
        if not span.start <= index < span.stop:
            return self._others[index]
        layer = self._modules[self._keys[index]]
        own = self._own.get(index)
        if own is None or own._stands_for is not layer:  # else somebody has put another layer there
            own = self._own[index] = _OwnLayer(layer, _index=index, _run=self._run)
        return own

    def look(self, name: str) -> None:
        """An attribute of a module of another stage is read."""
        if self._now is None or not name.startswith(self._name + "."):
            return
        key, _, path = name.removeprefix(self._name + ".").partition(".")
        if (type(self._others[self._keys.index(key)]._stands_for).__qualname__, path) in self._traces:
            raise PipelineError(
                f"{name} is read, which {self._name}.{key} sets as it runs, but that is on another pipeline stage. If it is needed (an "
                f"auxiliary loss), {HOW_TO_CARRY}; or use pp=1"
            )

    def _run(self, index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A layer of the active stage."""
        now = self._now
        if now is None:  # activation checkpointing runs it again
            return layer(*args, **kwargs)
        name = f"{self._name}.{self._keys[index]}"
        require_known((args, kwargs), f"{name}, a layer of this stage,")
        before = marks(layer) if now.watches and self._stages > 1 else None
        given = contents((args, kwargs)) if self._stages > 1 else None
        output = layer(*args, **kwargs)
        require_known(output, f"what {name} returns")
        if before is not None:
            self._traces |= traces(layer, before)
        if given is not None and (kind := changed(given, output)):
            raise _writes_into(name, kind)
        now.ran = index
        if not self._seen and now.watches and now.span.start > 0 and not now.exits:
            now.ends.update((tensor.grad_fn, index) for tensor in tensors_in(output) if tensor.grad_fn is not None)
        if not now.exits:
            return output
        now.forms[index] = form_of(output)
        return self._keep(now, output, (args, kwargs)) if now.is_done else output

    def _outside(self, index: int, given: Any) -> Any:
        """The answer of a layer that is not of the active stage."""
        now = self._now
        if now is None:
            raise PipelineError(
                f"{self._name}.{index} is on another pipeline rank: layers run only within the trainer's steps. If this is activation "
                "checkpointing, checkpoint each layer by itself, not several at once"
            )
        if index < now.span.start:
            self._check_passing(now, index)
            if index not in now.arrived.forms:
                raise PipelineError(
                    f"the step calls {self._name}.{self._keys[index]} here, but did not where that layer is, on another pipeline stage: "
                    "which layers run must follow from the batch, or from what is drawn before the first of them"
                )
            form, device, origin = now.arrived.forms[index], self.device, self._returned_by(index)
            if index < now.span.start - 1:
                return stand_for(form, device, origin)
            now.reached()
            now.eagerly.close()
            return rebuild(form, now.arrived.tensors, device, origin)
        if not now.is_done:
            raise PipelineError(
                f"the model calls {self._name}.{index} before {self._name}.{now.span.stop - 1}: layers must run in order, all of them"
            )
        raise self._exit(now, given)

    def _check_passing(self, now: _Pass, index: int) -> None:
        if index in now.passed:
            raise PipelineError(f"the step runs {self._name} twice for one micro-batch; a pipeline can hand over only one pass")
        now.passed.add(index)
        if not torch.is_grad_enabled() and any(tensor.requires_grad for tensor in now.arrived.tensors):
            raise PipelineError(
                f"{self._name} runs without gradients inside a training step: checkpoint activations with use_reentrant=False, and freeze "
                "layers with requires_grad_(False) instead of torch.no_grad()"
            )

    def _keep(self, now: _Pass, output: Any, given: Any) -> Any:
        """Keep what the last layer returned; the step gets it under another name, since the next stage does again what the step does to it.

        In inference mode nobody counts changes in place: it gets a copy.
        """
        tensors = tensors_in(output)
        is_counted = not any(tensor.is_inference() for tensor in tensors)
        now.sends, now.given = output, given
        now.handed = map_tensors(_alias if is_counted else Tensor.clone, output)
        now.versions = [tensor._version for tensor in tensors] if is_counted else []
        return now.handed

    def _exit(self, now: _Pass, given: Any) -> StageExit:
        """The stage is done: what goes on of what its last layer returned. See Note [The unmodified forward]."""
        name, tensors = f"{self._name}.{self._keys[now.ran]}", tensors_in(now.sends)
        require_handable(now.forms[now.ran])
        if not tensors:
            raise PipelineError(f"{name}, the last layer of a stage, returns no tensor: there is nothing to hand to the next stage")
        if any(tensor._version != version for tensor, version in zip(tensors, now.versions, strict=False)):
            raise PipelineError(
                f"the step changes in place what {name} returned. The next stage begins with that, and would change it once more: make a "
                "new tensor, x = x + y, or do it in the layer"
            )
        output, form = withhold(now.sends, now.forms[now.ran], _kept_back(now.handed, given, now.given))
        return StageExit(output, now.forms | {now.ran: form})

    def check_loss(self, loss: Tensor, module: nn.Module) -> None:
        """Refuse a loss of ``module`` into which layers of this, the last stage got by another way than their outputs.

        Called within the step; the first step of a run has to do, and only if no dry run has seen it.

        Raises:
            PipelineError: there is such a layer: those of other stages may have left something, too, of which nobody knows here.
        """
        now = self._now
        assert now is not None
        if not now.ends or loss.grad_fn is None:
            return
        last = {node for node, index in now.ends.items() if index == now.span.stop - 1}
        reached = list(children_first([loss.grad_fn], without=last))
        early = now.ends | {tensor.grad_fn: now.span.start - 1 for tensor in now.arrived.tensors if tensor.grad_fn is not None}
        if around := [early[node] for node in reached if node in early]:
            raise PipelineError(
                f"what {self._name}.{self._keys[around[0]]} returned gets into the loss past the layers behind it: the step has kept it, "
                "or a layer has made something of it and left that on an attribute, in a list or hook (router logits, an auxiliary loss). "
                "No dry run has seen whether layers of other stages do so, too, of which nothing is known here. So "
                f"{HOW_TO_CARRY}; or use pp=1"
            )
        leaves = {node.variable for node in reached if is_leaf(node)}
        others = {weight for name, weight in module.named_parameters(remove_duplicate=False) if not name.startswith(self._name + ".")}
        for index in range(now.span.start, now.span.stop):
            layer = self._modules[self._keys[index]]
            if leaves & set(layer.parameters()) - others:
                raise left_behind(f"{self._name}.{self._keys[index]}", "after the layers")

    def _returned_by(self, index: int) -> Origin:
        return Origin(f"what {self._name}.{self._keys[index]} returned", HOW_TO_CARRY[0].upper() + HOW_TO_CARRY[1:], self)


def on_meta(module: nn.Module) -> nn.Module:
    """A copy of the module with its parameters and buffers on the meta device; the module itself is left alone."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    return copy.deepcopy(module, memo)


def _is_plain(leaves: Sequence[Any]) -> bool:
    return all(is_plain(leaf) for leaf in leaves)


def _kept_back(handed: Any, given: Any, before: Any) -> list[int]:
    """The places of the tensors of a layer's output that the next layer does not need, by what that is ``given`` (args, kwargs).

    If there is anything new in it, other than what the layer itself was given ``before``, the step has made it of the output.
    """
    args, _ = given
    output = tensors_in(handed)
    if len(output) == 1 or (args and args[0] is handed):
        return []
    arrived = {id(tensor) for tensor in tensors_in(given)}
    if id(output[0]) not in arrived or arrived - {id(tensor) for tensor in (*output, *tensors_in(before))}:
        return []
    return [place for place, tensor in enumerate(output) if id(tensor) not in arrived]


def _alias(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)


def _writes_into(name: str, kind: str) -> PipelineError:
    return PipelineError(
        f"{name} writes into a {kind} that the step gives it and that it does not return: other pipeline stages would not have what it "
        "wrote. Let layers return it, and take what the layer before returned, x, kept = layer(x, kept); or use pp=1"
    )
