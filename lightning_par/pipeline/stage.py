"""The layer list of a rank: its own layers, and a stand-in for every module that lives elsewhere.

Note [The unmodified forward]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Every rank runs the user's whole ``training_step`` for every micro-batch and stage; what it does not hold answers for itself. While a
stage with layers ``first .. last`` is active, calling

=======================================  =================================================================================
a module before the layers               gives NaN of the right shape, dtype and device on all but stage 0
layer ``i < first - 1``                  gives NaN, too, of the shape and dtype of what follows
layer ``first - 1``                      gives what it returned on the previous stage
layer ``first .. last``                  runs it
any layer after ``last``                 raises ``StageExit`` with what layer ``last`` returned
a module after the layers                runs it; only the last stage gets there
=======================================  =================================================================================

So the loop sees every layer at its own place, whether it iterates, enumerates, slices or indexes. ``StageExit`` is a BaseException:
``except Exception`` in user code does not catch it. Its call is outside the last layer's own, so that activation checkpointing of that
layer is complete by then.

This is right if everything a layer reads is the previous layer's output, or is computed by each rank for itself (masks, positions,
rotary angles), and if a layer's output goes nowhere but into the next layer. The rest is wrong, and is met like this:

======================================================  ==================================================================
the loop changes the hidden state between the layers    refused where a stage ends: the call after its last layer must be given
(``x = x + layer(x)``)                                  every tensor which that layer returned
the loop keeps what a layer returns besides the         refused: within a stage, too, every tensor but the first (the hidden
hidden state (``x, aux = layer(x); total += aux``)      state) must be given to the next layer: others know what the last layer of
                                                        a stage returned, but of no other. If a dry run has seen that nobody uses it,
                                                        it stays on its stage, and who uses it after all, in another step, is told
a module's output goes to every layer, or past them     right where a dry run has seen it (the module is then on every stage that
(``layer(x, embedding)``)                               uses it), also of masks and indices that the step makes of it; else the
                                                        stand-ins' NaN reaches the loss, and whole numbers of a module are refused
a layer leaves something on an attribute, the step      refused where a dry run has seen it, or a stage comes upon a part, a weight or
calls a part of one, or uses a weight of it             such an attribute of a layer that it has not
the loop hands an output on, unchanged, and uses it a   refused where a dry run has seen it, unless no stage begins in between;
second time (``total += probe(x)``)                     else the NaN of earlier layers reaches the loss
======================================================  ==================================================================

A loss that is NaN for such a reason is refused. A sum over layers is right as part of the hidden state: ``x, total = layer(x, total)``.
What cannot be seen is a loop that changes an output in place, or, where the step cannot run dry, makes a mask or an index of what only
other stages compute: no number is greater than NaN.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from inspect import ismethod
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only
from typing_extensions import override

from lightning_par.layout import Span
from lightning_par.numerics import pass_by
from lightning_par.pipeline.boundary import NotSent, Withheld, form_of, has_gradient, is_plain, tensors_of
from lightning_par.pipeline.errors import PipelineError
from lightning_par.pipeline.segments import Extra
from lightning_par.pipeline.shown import HOW_TO_CARRY, Elsewhere, Shown, not_here, seen_from_afar
from lightning_par.pipeline.traces import Trace, marks, traces

KNOWN = 1000
"""Calls that a stand-in remembers: plain values that never come again (a count of steps) must not fill memory."""


class StageExit(BaseException):
    """Unwinds the user's step when its stage is done; ``output`` is what the stage's last layer returned."""

    def __init__(self, output: Any) -> None:
        super().__init__("a pipeline stage is done")
        self.output = output


class StandIn(nn.Module):
    """Stands where a module was. Attributes are those of the module; its parameters are not found here."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._hide(_stands_for=module)

    def _hide(self, **attributes: Any) -> None:
        """Set attributes without registering them as submodules, parameters or buffers."""
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if "_stands_for" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._stands_for, name)

    @override
    def extra_repr(self) -> str:
        return f"for {type(self._stands_for).__name__}"


class BeforeLayers(StandIn):
    """A module of the first stage, on another rank: shapes come from a copy on the meta device. See Note [The unmodified forward].

    Its parameters are answered with NaN as well, and its methods and the modules in it as it is itself. A call of it takes one number
    from the step's stream of random numbers, as a call of the module does where it is (see ``numerics.Apart``). What was computed once on
    the meta device is known for the next call with the same forms and plain values, unless it draws random numbers: they go on.
    """

    def __init__(self, module: nn.Module, in_step: Callable[[], bool] = lambda: False) -> None:
        example = next(p for p in module.parameters())
        dtype = example.dtype if example.is_floating_point() else torch.get_default_dtype()
        self._begin(on_meta(module), torch.full((), torch.nan, dtype=dtype, device=example.device), {}, in_step)

    def _begin(
        self, module: nn.Module, nan: Tensor, known: dict[Hashable, Any], in_step: Callable[[], bool], *, is_part: bool = False
    ) -> None:
        super().__init__(module)
        self._hide(_nan=nan, _known=known, _in_step=in_step, _is_part=is_part, training=module.training)

    @override
    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if isinstance(value, nn.Module) and not isinstance(value, nn.ModuleList | nn.ModuleDict):
            part = BeforeLayers.__new__(BeforeLayers)
            part._begin(value, self._nan, self._known, self._in_step, is_part=True)
            return part
        if isinstance(value, Tensor) and has_gradient(value.dtype):
            return self._unknown(value)
        return partial(self._answer, value) if ismethod(value) and value.__self__ is self._stands_for else value

    @override
    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Those of the module while a step runs; at other times none, since what a rank trains is what it holds."""
        everything = self._stands_for.named_parameters(*args, **kwargs) if self._in_step() else ()
        return ((name, self._unknown(parameter)) for name, parameter in everything)

    def _unknown(self, like: Tensor) -> Tensor:
        return self._nan.to(like.dtype).expand(like.shape)

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
            args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
            with torch.no_grad():
                output = call(*args, **kwargs)
            if key is not None and _is_plain(tree_leaves(output)) and torch.equal(drawn, torch.get_rng_state()):
                if len(self._known) >= KNOWN:
                    self._known.clear()
                self._known[key] = output
        return tree_map_only(Tensor, self._filled, output)

    def _key(self, call: Callable[..., Any], given: Any) -> Hashable | None:
        """Calls with the same one have outputs of the same form; None where that cannot be told."""
        leaves, spec = tree_flatten(given)
        if not _is_plain(leaves):
            return None
        forms = tuple((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves)
        kind = self._nan.device.type
        return call, forms, str(spec), torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.get_default_dtype()

    def _filled(self, meta: Tensor) -> Tensor:
        """NaN, with memory of its own: the model may work in place on it."""
        if not has_gradient(meta.dtype):
            raise PipelineError(
                f"{type(self._stands_for).__name__} lives on the first pipeline stage, and returns a tensor of {meta.dtype}: other stages "
                "cannot know it, nor mark it as unknown. In the forward of a module that is called before the layers it is computed on "
                "every stage, if a dry run of the step has seen it: leave the module out of pipeline_before and pipeline_after, and keep "
                "what needs the numbers of tensors (.item(), if) out of the step; or compute it in the data pipeline"
            )
        return torch.full(meta.shape, torch.nan, dtype=meta.dtype, device=self._nan.device)

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BeforeLayers:
        """Follow ``to``, ``half`` and the like: the device and dtype that outputs will have."""
        self._hide(_nan=fn(self._nan))
        self._known.clear()
        self._stands_for._apply(lambda tensor: tensor.to(self._nan.dtype) if tensor.is_floating_point() else tensor)
        return self

    @override
    def train(self, mode: bool = True) -> BeforeLayers:
        self._known.clear()
        self._stands_for.train(mode)
        return super().train(mode)


class AfterLayers(StandIn):
    """A module of the last stage, on another rank: never reached."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(on_meta(module))
        self._hide(_name=name)

    @override
    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        return seen_from_afar(value, f"{self._name}.{name}", _anything)

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise PipelineError(
            f"{self._name} lives on the last pipeline stage, but another stage has come to it. On every other stage the step must end "
            "inside the layer list. If the model calls this module before the layers, say so on the model, pipeline_before = "
            f"[{self._name!r}], or register it before them; if not, did it run them all?"
        )


def _anything(name: str) -> None:
    """Any attribute may be read."""


class _OtherLayer(Elsewhere):
    """A layer that is not of the active stage."""

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._answer(self._index, (args, kwargs))


class _OwnLayer(Shown):
    """A layer of the active stage: what it is given is checked, its output kept."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._index, self._stands_for, args, kwargs)


@dataclass
class _Pass:
    """One stage running one micro-batch."""

    span: Span
    received: Any
    reached: Callable[[], None]
    exits: bool  # whether a stage follows
    watches: bool  # whether to look for attributes that layers change
    ran: int = -1  # the layer of this stage that ran last
    output: Any = None  # what it returned
    passed: set[int] = field(default_factory=set)  # layers of earlier stages that were called

    @cached_property
    def passed_by(self) -> Any:
        """What layers before the last of an earlier stage answer: nobody here knows what they returned."""
        return tree_map_only(Tensor, _as_unknown, self.received)

    @property
    def is_done(self) -> bool:
        return self.ran == self.span.stop - 1


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
        spare: tensors that layers return and nobody uses: they stay where they are, and who uses one elsewhere after all is told.
    """

    def __init__(
        self,
        layers: LayerList,
        spans: Mapping[int, Span],
        *,
        stages: int,
        name: str,
        traces: Iterable[Trace] = (),
        spare: Iterable[Extra] = (),
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
            _OtherLayer(layer, f"{name}.{key}", self._look, _index=i, _answer=self._outside)
            for i, (key, layer) in enumerate(zip(self._keys, copies, strict=True))
        )
        self._own: dict[int, _OwnLayer] = {}  # made as they are first seen
        self._now: _Pass | None = None
        self._traces, self._spare = set(traces), frozenset(spare)
        self._watched: set[tuple[int, bool, bool]] = set()  # stages and modes in which layers were watched for more

    @contextmanager
    def active(self, stage: int, received: Any, reached: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Inside, the list presents ``stage`` to the model, with ``received`` as what the layer before it returned.

        ``reached`` is called when the model has come past the layers of earlier stages.
        """
        if self._now is not None:
            raise PipelineError("a pipeline step was started inside another")
        kind = stage, self.training, torch.is_grad_enabled()
        self._now = _Pass(self._spans[stage], received, reached, exits=stage < self._stages - 1, watches=kind not in self._watched)
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
    def received(self) -> list[Tensor]:
        """The tensors that the active stage was given."""
        return [] if self._now is None else tensors_of(self._now.received)

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
    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Of the layers of this rank, which within a step would pass for all of them."""
        if self._stages > 1:
            self._look(f"{self._name}.parameters()")
        return super().named_parameters(*args, **kwargs)

    @override
    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Whoever goes through all parameters of a module around the layers comes by here, and is told at the end of them."""
        yield from super().named_modules(*args, **kwargs)
        if self._stages > 1 and self._now is not None and _is_after_parameters(sys._getframe(1)):
            self._look(f"{self._name}.parameters()")

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

    def _look(self, name: str) -> None:
        """An attribute of a layer of another stage is read."""
        if self._now is None:
            return
        if name.endswith("parameters()"):
            raise not_here(name)
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
        if now.exits:
            self._check_extras(index, (args, kwargs))
        before = marks(layer) if now.watches and self._stages > 1 else None
        output = layer(*args, **kwargs)
        if before is not None:
            self._traces |= traces(layer, before)
        now.ran, now.output = index, output
        return output

    def _outside(self, index: int, given: Any) -> Any:
        """The answer of a layer that is not of the active stage."""
        now = self._now
        if now is None:
            raise PipelineError(f"{self._name}.{index} is on another pipeline rank: layers run only within the trainer's steps")
        if index < now.span.start:
            self._check_passing(now, index)
            if index < now.span.start - 1:
                return now.passed_by
            now.reached()
            return now.received
        if not now.is_done:
            raise PipelineError(
                f"the model calls {self._name}.{index} before {self._name}.{now.span.stop - 1}: layers must run in order, all of them"
            )
        self._check_chain(now, given)
        raise StageExit(self._without_spare(now))

    def _check_passing(self, now: _Pass, index: int) -> None:
        if index in now.passed:
            raise PipelineError(f"the step runs {self._name} twice for one micro-batch; a pipeline can hand over only one pass")
        now.passed.add(index)
        if not torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_of(now.received)):
            raise PipelineError(
                f"{self._name} runs without gradients inside a training step: checkpoint activations with use_reentrant=False, and freeze "
                "layers with requires_grad_(False) instead of torch.no_grad()"
            )

    def _check_chain(self, now: _Pass, given: Any) -> None:
        """Where a stage ends, nothing but its last layer's own output may go on, and all of it. See Note [The unmodified forward]."""
        form_of(now.output)  # refuses what no stage can hand on
        if not tensors_of(now.output) or 0 in _missing(now.output, given):
            raise PipelineError(
                f"{self._name}.{now.span.stop} is not given what {self._name}.{now.span.stop - 1} returned: the model changes the hidden "
                "state between its layers, which a pipeline cannot follow. Do it inside the layers: a residual sum belongs to the layer"
            )
        self._check_extras(now.span.stop, given)

    def _check_extras(self, index: int, given: Any) -> None:
        """What the layer before returned besides the hidden state is given to this one. See Note [The unmodified forward]."""
        now = self._now
        assert now is not None
        if now.ran != index - 1 or isinstance(now.output, Tensor):
            return
        if missing := [place for place in _missing(now.output, given) if place > 0 and place not in self._spare_of(now)]:
            tensors = ", ".join(f"{place} {form_of(tensors_of(now.output)[place])}" for place in missing)
            raise PipelineError(
                f"{self._name}.{index} is not given all that {self._name}.{index - 1} returned: of its tensors, number {tensors} (the "
                "hidden state is 0) goes elsewhere, and the other stages would not know of it. If it is needed (an auxiliary loss), carry "
                "it through the layers with the hidden state (x, total = layer(x, total)), or compute it from what the last stage sees; if "
                "not, do not return it; or use pp=1"
            )

    def _spare_of(self, now: _Pass) -> set[int]:
        """The places of tensors in the layer's output that nobody uses."""
        count = len(tensors_of(now.output))
        return {place for place in range(count) if (now.ran, place, count) in self._spare}

    def _without_spare(self, now: _Pass) -> Any:
        """What the next stage gets."""
        spare, places = self._spare_of(now), itertools.count()
        layer = f"{self._name}.{self._keys[now.ran]}"
        return tree_map_only(Tensor, lambda tensor: Withheld(layer, form_of(tensor)) if next(places) in spare else tensor, now.output)


def on_meta(module: nn.Module) -> nn.Module:
    """A copy of the module with its parameters and buffers on the meta device; the module itself is left alone."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    return copy.deepcopy(module, memo)


def _as_unknown(tensor: Tensor) -> Tensor:
    known = isinstance(tensor, NotSent) or not has_gradient(tensor.dtype)
    return tensor if known else torch.full(tensor.shape, torch.nan, dtype=tensor.dtype, device=tensor.device)


def _is_after_parameters(frame: FrameType) -> bool:
    """Whether modules are asked for, in this frame, by ``parameters`` of a module further up."""
    while frame.f_code is nn.Module.named_modules.__code__:
        frame = frame.f_back
    return frame.f_code is nn.Module._named_members.__code__ and frame.f_back.f_code is nn.Module.named_parameters.__code__


def _is_plain(leaves: Sequence[Any]) -> bool:
    return all(is_plain(leaf) for leaf in leaves)


def _missing(output: Any, given: Any) -> list[int]:
    """The places of the tensors of ``output`` that are not among ``given``, (args, kwargs), themselves."""
    args, _ = given
    if args and args[0] is output:
        return []
    arrived = {id(leaf) for leaf in tree_leaves(given)}
    return [place for place, tensor in enumerate(tensors_of(output)) if id(tensor) not in arrived]
