"""In which order a module's parts are used, seen in a dry run: on the meta device, where nothing is computed and nothing takes memory.

Note [What a dry run sees]
~~~~~~~~~~~~~~~~~~~~~~~~~~
All parameters that can have a gradient need one there, and the graph of each segment (see ``segments``) tells which of them it was computed
from. The graph ends where gradients do. So what the modules beside the layers return is looked at as well, the outermost ones that can be
called: a floating tensor without a graph (of an encoder under ``no_grad``) is given one, from the module's parameters and what the module
was given; whole numbers (tokens, labels) cannot have one, so that a module which returns them before the layers must be everywhere. What
the step itself makes of a module's output without a graph (a mask, an index, what it detaches) is followed by ``origins``: such a module is
used wherever that is. A module also counts as used where it is called, since there it must answer. Numbers that come from the batch and
from constants alone are ``known`` to whoever asks for them; constants that were made outside come in by ``entering``.

What a layer returned begins a graph; if that is found in a later segment than the next one, the output has been used a second time, a
skip connection past layers. It is right as long as no stage begins within it. A parameter of a layer, or what its input became, in the
segment of another one has come there past the layer's output: the layer left it behind on an attribute or in a hook, a part of it was
called by itself, or the step works with its weights. That is right as long as both are on one stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_par.numerics.samples import children, with_children
from lightning_par.pipeline.aside import aside, lent
from lightning_par.pipeline.boundary import has_gradient
from lightning_par.pipeline.origins import Leaves, Origins, leaves_of
from lightning_par.pipeline.segments import Segments
from lightning_par.pipeline.torch_functions import map_tensors, tensors_in
from lightning_par.pipeline.traces import Trace, marks, traces


@dataclass(frozen=True)
class Uses:
    """Parameters by where they are used: before the layers, inside (or between) them, after them.

    A name is that of the module through which one was used: of a tie, each module uses its own. ``skips`` are pairs of a layer and a later
    one (as many as there are layers: what comes after them) that uses its output, too. ``left`` are such pairs (-1: what comes before the
    layers) where a layer, a weight of it, or what it computed is used, but for its output. ``opaque`` are layers that return something
    besides tensors and plain values, and its type. ``traces`` are attributes that a layer changes as it runs. ``unseen`` are steps that
    could not be run dry: all else says nothing of them.
    """

    before: frozenset[str] = frozenset()
    inside: frozenset[str] = frozenset()
    after: frozenset[str] = frozenset()
    skips: frozenset[tuple[int, int]] = frozenset()
    left: frozenset[tuple[int, int]] = frozenset()
    opaque: frozenset[tuple[int, str]] = frozenset()
    traces: frozenset[Trace] = frozenset()
    unseen: frozenset[str] = frozenset()

    @property
    def is_complete(self) -> bool:
        """Whether all steps could be run dry."""
        return not self.unseen

    def __or__(self, other: Uses) -> Uses:
        """What several steps do."""
        return Uses(**{field.name: getattr(self, field.name) | getattr(other, field.name) for field in fields(self)})

    def of(self, parameters: Collection[str]) -> frozenset[str]:
        """Where any of these is used."""
        return frozenset(place for place in ("before", "inside", "after") if getattr(self, place) & set(parameters))


class NumbersError(RuntimeError):
    """The step wants numbers, which a dry run has not; ``uses`` is all that is known: the modules of which it wants them."""

    def __init__(self, uses: Uses) -> None:
        super().__init__("the step wants numbers of what is computed before the layers")
        self.uses = uses


def dry_run(module: nn.Module, layers: str, step: Callable[[Any], Any], batch: Any) -> Uses:
    """Run the user's step on a batch without its numbers, and see. Raises what the step raises. See Note [What a dry run sees].

    Args:
        step: takes a batch and returns what comes of it: its loss, or whatever matters.

    Raises:
        NumbersError: the step has failed, and before that, and before the layers, it wanted a number.
    """
    meta = torch.device("meta")
    count = len(module.get_submodule(layers))
    before, inside, after = found = set[Tensor](), set[Tensor](), set[Tensor]()
    skips, left, changed = set[tuple[int, int]](), set[tuple[int, int]](), set[Trace]()

    def close(segment: int, ends: list[Tensor], entry: Tensor | None) -> None:
        use(segment, leaves_of(ends), entry)
        use(segment, origins.of(ends), entry)

    def use(segment: int, leaves: Leaves, entry: Tensor | None) -> None:
        found[min(segment, 1) if segment <= count else 2].update(leaves)
        skips.update((segments.behind[leaf], segment - 1) for leaf in leaves & segments.behind.keys() if leaf is not entry)
        left.update((origin[leaf], segment - 1) for origin in (owners, segments.within) for leaf in leaves & origin.keys())

    def look(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        own = set(part.parameters())
        (before if not segments.ran else inside if len(segments.ran) < count else after).update(own)
        sources = [*own, *tensors_in((args, kwargs))]
        loose = [tensor for tensor in tensors_in(output) if not tensor.requires_grad]
        if len(segments.ran) < count and not all(has_gradient(tensor.dtype) for tensor in loose):
            inside.update(own)
        return map_tensors(lambda tensor: _tied(tensor, sources), output) if loose else output

    @contextmanager
    def watched(layer: nn.Module) -> Iterator[None]:
        before = marks(layer)
        yield
        changed.update(traces(layer, before))

    segments = Segments(module, layers, close, watched, lambda tensor: origins.see([tensor]))
    asked: set[Tensor] = set()
    origins = Origins(
        lambda leaves: use(segments.at, leaves, segments.entry),
        lambda leaves: asked.update(leaves) if segments.at == 0 else None,
        lambda: frozenset(before),
    )
    with aside(module, tensors=False), lent(list(module.modules()), meta), ExitStack() as hooks:
        for part in _beside(module, layers):
            hooks.callback(part.register_forward_hook(look, with_kwargs=True).remove)
        names = {param: name for name, param in module.named_parameters()}
        owners = _owners(module, layers)
        batch = _mapped(batch, origins.known.onto_meta)
        origins.see([*module.parameters(), *module.buffers(), *_tensors_of(batch)])
        try:
            with segments.cut(), torch.compiler.set_stance("force_eager"), meta, origins:  # nothing may be compiled past these
                values = step(batch)
        except Exception as error:
            if not (wanted := asked & names.keys() - owners.keys()):
                raise
            raise NumbersError(Uses(inside=frozenset(names[leaf] for leaf in wanted))) from error
        use(count + 1, origins.of(values), None)
        segments.end(values)
    return Uses(
        *(frozenset(names[leaf] for leaf in leaves if leaf in names) for leaves in found),
        skips=frozenset(skips),
        left=frozenset((layer, user) for layer, user in left if layer != user),
        opaque=frozenset((layer, type(leaf).__name__) for layer, leaf in segments.opaque.items()),
        traces=frozenset(changed),
    )


def _owners(module: nn.Module, layers: str) -> dict[Tensor, int]:
    """The layer of each parameter that belongs to one layer alone."""
    owners: dict[Tensor, set[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        inside = name.startswith(layers + ".")
        owners.setdefault(param, set()).add(name.removeprefix(layers + ".").split(".")[0] if inside else "")
    places = {name: i for i, name in enumerate(module.get_submodule(layers)._modules)}
    return {param: places[next(iter(names))] for param, names in owners.items() if len(names) == 1 and "" not in names}


def _beside(module: nn.Module, layers: str) -> Iterator[nn.Module]:
    """The modules with parameters beside the way down to the list, the outermost that can be called."""
    step, _, rest = layers.partition(".")
    for name, child in module.named_children():
        if name == step and rest:
            yield from _beside(child, rest)
        elif name != step:
            yield from _callable(child)


def _callable(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        for child in module.children():
            yield from _callable(child)
    elif next(module.parameters(), None) is not None:
        yield module


def _tensors_of(batch: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _mapped(batch, lambda tensor: found.append(tensor) or tensor)
    return found


def _mapped(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A batch with its tensors changed, also those in dataclasses and mappings that pytree does not know."""

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        parts = children(leaf)
        return with_children(leaf, {key: _mapped(part, change) for key, part in parts.items()}) if parts else leaf

    return tree_map(changed, batch)


@torch.enable_grad()
def _tied(tensor: Tensor, sources: Iterable[Tensor]) -> Tensor:
    """A tensor without a graph, with one from these."""
    if tensor.requires_grad or not has_gradient(tensor.dtype):
        return tensor
    for source in sources:
        if source.requires_grad:
            tensor = tensor + source.sum().to(tensor.dtype)
    return tensor
