"""Splitting a module into stages: which layers, and which other modules, live where. Data first; ``cut`` then does it.

Note [What lives where]
~~~~~~~~~~~~~~~~~~~~~~~
The layer list is one ``nn.ModuleList`` or ``nn.Sequential``; its members, the layers, are spread over the stages. If the module does not
name it, it is the list of like blocks with the most parameters, or else the biggest Sequential. Every other module goes to the first stage
if it is used before the layers, to the last if after; to both ends if both; one that is used inside the layers stays everywhere. Where
that is not known from a dry run (see ``uses``), order of registration tells: walking down from the root to the list, modules that are
registered before the way down are taken to be used before. The module's attributes ``pipeline_before`` and ``pipeline_after``, lists of
names within it, say otherwise (both: at both ends). Modules without parameters stay everywhere (dropout, rotary angles, losses).
Parameters that hang directly on a module along the way are nobody's in particular: every stage keeps them. Whatever several stages keep
is reported as tied, so that its gradient is the sum over them, wherever it is used::

    LightningModule          model  <- the way down
      model: GPT             embed  before  -> first stage
                             drop   no parameters -> everywhere
                             layers the list
                             norm   after   -> last stage
                             head   after   -> last stage; its weight may be embed's: tied

A module says which list to take with an attribute ``pipeline_layers``, the list's name within it. That is the way out for models of any
other shape, too: write them as a list of stages or layers, each of which takes what the one before returned (a tensor, or any nesting of
tensors), iterate over it, and name it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import nn
from torch._dynamo import OptimizedModule

from lightning_par.layout import Span
from lightning_par.numerics import Apart
from lightning_par.pipeline.boundary import cannot_be_handed
from lightning_par.pipeline.errors import PipelineError
from lightning_par.pipeline.stage import AfterLayers, BeforeLayers, LayerList, StageLayers, left_behind
from lightning_par.pipeline.uses import Uses
from lightning_par.pipeline.weigh import LayerCosts

RIVAL = 0.5
"""A second layer list with this share of the first one's parameters makes the choice between them the user's."""


@dataclass(frozen=True)
class Placement:
    """Where everything lives.

    Attributes:
        layers: the layer list's name.
        members: the layers' names in it.
        spans: the layers of each stage, along the model.
        before: names of the modules on the first stage.
        after: names of the modules on the last stage; some may be on both.

    Raises:
        PipelineError: a layer stands on no stage, or on several, or a stage has none.
    """

    layers: str
    members: tuple[str, ...]
    spans: tuple[Span, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]

    def __post_init__(self) -> None:
        """Each layer stands on exactly one stage, and each stage has one."""
        stages = [[s for s, span in enumerate(self.spans) if span.start <= i < span.stop] for i in range(len(self.members))]
        wrong = [f"{self.layers}.{name} on {found or 'none'}" for name, found in zip(self.members, stages, strict=True) if len(found) != 1]
        wrong += [f"nothing on {s}" for s in range(len(self.spans)) if [s] not in stages]
        wrong += [f"{self.layers}.{self.members[i]} behind a later stage" for i in range(1, len(stages)) if stages[i] < stages[i - 1]]
        if wrong:
            raise PipelineError(f"each layer must stand on exactly one stage, in the model's order; but there is {', '.join(wrong)}")

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many layers each stage has, along the model."""
        return tuple(span.size for span in self.spans)

    def stages_of(self, parameter: str) -> Sequence[int]:
        """The stages that hold the parameter of this name."""
        if _inside(parameter, self.layers):
            index = self.members.index(parameter.removeprefix(self.layers + ".").split(".")[0])
            return [s for s, span in enumerate(self.spans) if span.start <= index < span.stop]
        ends = {0: self.before, len(self.spans) - 1: self.after}
        found = [stage for stage, names in ends.items() if any(_inside(parameter, name) for name in names)]
        return found or range(len(self.spans))

    def __str__(self) -> str:
        """A line per stage."""
        ends = [(self.members[span.start], self.members[span.stop - 1]) for span in self.spans]
        lines = [[f"{self.layers}.{first}" + (f"..{last}" if last != first else "")] for first, last in ends]
        lines[0] = [*self.before, *lines[0]]
        lines[-1] = [*lines[-1], *self.after]
        return "\n".join(f"stage {stage}: {', '.join(names)}" for stage, names in enumerate(lines))


Balance = str | Sequence[int] | LayerCosts
"""By what layers are spread (a key of ``COSTS``, or what was measured), or how many each stage gets."""


def place(
    module: nn.Module, stages: int, layers: str | None = None, balance: Balance = "parameters", uses: Uses | None = None
) -> Placement:
    """Decide where everything lives. See Note [What lives where].

    Args:
        layers: the layer list's name, where it shall be another than the one found.
        uses: what a dry run has seen.

    Raises:
        PipelineError: the module has no layer list, one that cannot be spread so or does more than run its layers, or a skip connection
            from one stage past the next.
    """
    name = find_layers(module, layers)
    _check_list(module.get_submodule(name), name)
    _check_compiled(module, name)
    members = module.get_submodule(name)._modules
    blocks = list(members.values())
    if len(blocks) < stages:
        raise PipelineError(
            f"{name} has {len(blocks)} layers, too few for {stages} pipeline stages: lower pp (or chunks) to at most {len(blocks)}"
        )
    before, after = _around(module, name, uses or Uses())
    if isinstance(balance, str):
        cost = COSTS[balance]
        first, last = (sum(cost(module.get_submodule(n)) for n in names) for names in (before, after))
        balance = LayerCosts(tuple(cost(block) for block in blocks), first, last)
    if isinstance(balance, LayerCosts):
        spans = spread(balance.layers, stages, first=balance.first, last=balance.last)
    else:
        if sum(balance) != len(blocks) or len(balance) != stages:
            raise PipelineError(
                f"balance={tuple(balance)} places {sum(balance)} layers on {len(balance)} stages, but {name} has {len(blocks)} layers for "
                f"{stages} stages: place each layer once"
            )
        spans = [Span(stop - size, stop) for size, stop in zip(balance, accumulate(balance), strict=True)]
    placement = Placement(name, tuple(members), tuple(spans), tuple(before), tuple(after))
    _check_between(placement, uses or Uses())
    return placement


def _check_compiled(module: nn.Module, layers: str) -> None:
    """No graph may run from one stage into another."""
    path = layers.split(".")
    for depth in range(len(path)):
        part = module.get_submodule(".".join(path[:depth]))
        has_graph = part._compiled_call_impl is not None or hasattr(vars(part).get("forward"), "_torchdynamo_orig_callable")
        if has_graph or isinstance(part, OptimizedModule):
            raise PipelineError(
                f"{'.'.join(path[:depth]) or type(module).__name__} was compiled as a whole (torch.compile), with {layers} in it, which a "
                f"pipeline spreads over its stages: compile each layer instead, for layer in {layers}: layer.compile(); or use pp=1"
            )


def _check_list(layers: nn.Module, name: str) -> None:
    """Each stage runs some members of the list, and the list is never called as a whole: it must be no more than the chain of them."""
    stock = nn.Sequential if isinstance(layers, nn.Sequential) else nn.ModuleList
    own = [part for part in _OF_A_LIST if part in vars(layers) or getattr(type(layers), part) is not getattr(stock, part)]
    own += [kind.strip("_").replace("_", " ") for kind in _HOOKS if getattr(layers, kind)]
    if own:
        raise PipelineError(
            f"{name} is a {type(layers).__name__} with {', '.join(own)} of its own, which no stage would run: a stage has only some of "
            "the layers. Do it in the forward of the module that holds the list (for layer in self.layers: x = layer(x)) or in a layer, "
            f"with a plain nn.{stock.__name__}; or name another list, pipeline_layers = 'model.blocks' on your module; or use pp=1"
        )


_OF_A_LIST = ("forward", "__call__", "__iter__", "__getitem__", "__len__")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _check_between(placement: Placement, uses: Uses) -> None:
    """What a dry run saw of what Note [The unmodified forward] refuses: nothing skips a stage, nothing is left behind."""
    names = [f"{placement.layers}.{name}" for name in placement.members]
    opaque = dict(uses.opaque)
    for span in placement.spans[:-1]:
        if (last := span.stop - 1) in opaque:
            raise cannot_be_handed(opaque[last], names[last])
    stage_of = {i: stage for stage, span in enumerate(placement.spans) for i in range(span.start, span.stop)}
    stage_of |= {-1: 0, len(names): len(placement.spans) - 1}
    for layer, user in sorted(uses.left):
        if stage_of[layer] != stage_of[user]:
            place = f"at {names[user]}" if 0 <= user < len(names) else "after the layers" if user > 0 else "before the layers"
            raise left_behind(names[layer], place)
    for giver, user in sorted(uses.skips):
        for span in placement.spans[1:]:
            if giver + 1 < span.start <= user:
                place = f"at {names[user]}" if user < len(names) else "after the layers"
                raise PipelineError(
                    f"the output of {names[giver]} is used again {place}, but a pipeline stage begins between them, at "
                    f"{names[span.start]}: it knows only what {names[span.start - 1]} returned. Carry it through the layers with the "
                    "hidden state (x, kept = layer(x, kept)), choose by balance=(...) stages that begin elsewhere, or use pp=1"
                )


def cut(
    module: nn.Module, placement: Placement, stages: Collection[int], uses: Uses | None = None, device: torch.device | None = None
) -> StageLayers:
    """Make the module that of a rank with these stages: replace the layer list, and put stand-ins for what lives elsewhere."""
    spans = {stage: placement.spans[stage] for stage in stages}
    name, uses = placement.layers, uses or Uses(unseen=frozenset({"any step"}))
    layers = StageLayers(
        module.get_submodule(name),
        spans,
        stages=len(placement.spans),
        name=name,
        traces=uses.traces,
        seen=uses.is_complete,
        device=device,
    ).belong_to(module)
    _replace(module, placement.layers, layers)
    here = [*(placement.before if 0 in spans else ()), *(placement.after if len(placement.spans) - 1 in spans else ())]
    for name in dict.fromkeys([*placement.before, *placement.after]):
        part = module.get_submodule(name)
        if name in here:
            if name in placement.before:
                Apart(part)
        else:
            _replace(module, name, BeforeLayers(part, name, layers) if name in placement.before else AfterLayers(part, name, layers))
    return layers


def find_layers(module: nn.Module, name: str | None = None) -> str:
    """The name of the layer list: the given one, the one that the module names, or the one found. See Note [What lives where].

    Raises:
        PipelineError: there is none, or no telling which.
    """
    lists = {n: child for n, child in module.named_modules() if n and isinstance(child, LayerList) and len(child) > 0}
    outermost = {n: child for n, child in lists.items() if not any(_inside(n, other) for other in lists)}
    known = "; ".join(f"{n} ({len(child)} layers, {_size(child):,} parameters)" for n, child in outermost.items()) or "none"
    kind = type(module).__name__
    if (name := name or named_layers(module)) is not None:
        if name not in lists:
            raise PipelineError(f"{name!r} is not an nn.ModuleList or nn.Sequential of {kind}; there are: {known}")
        return name
    alike = [n for n, child in lists.items() if len(child) > 1 and len({type(block) for block in child}) == 1 and _size(child)]
    mixed = [n for n, child in lists.items() if isinstance(child, nn.Sequential) and _size(child)]
    found = alike or mixed
    if not found:
        raise PipelineError(
            f"{kind} has no nn.ModuleList of like blocks and no nn.Sequential to spread over pipeline stages; lists in it: {known}. "
            f"{_WAY_OUT}, or keep pp=1"
        )
    best = max(found, key=lambda n: _size(lists[n]))
    rivals = [n for n in found if _size(lists[n]) >= RIVAL * _size(lists[best]) and not _inside(n, best) and not _inside(best, n)]
    if len(rivals) > 1:
        raise PipelineError(f"several layer lists of {kind} could be spread over pipeline stages: {known}. {_WAY_OUT}")
    return best


_WAY_OUT = (
    "Name the one to take on your module, pipeline_layers = 'model.blocks'; if its layers need more than the one before returned, or all "
    "lists shall be spread, write the model as one list of stages, each taking what the one before returned, iterate over it, and name it"
)


def named_layers(module: nn.Module) -> str | None:
    """The list that the module, or the first in it to do so, names with ``pipeline_layers``; None if none does."""
    for prefix, child in module.named_modules():
        if (name := getattr(child, "pipeline_layers", None)) is not None:
            return _join(prefix, name)
    return None


def spread(costs: Sequence[float], stages: int, *, first: float = 0.0, last: float = 0.0) -> list[Span]:
    """Cut layers into stages, each at least one, so that the dearest stage is as cheap as can be.

    ``first`` and ``last`` are what the first and last stage carry besides. Among equals, the sum of squares decides, then the
    cut with fewer layers on early stages, which hold the most activations.
    """
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)

    def price(stage: int, start: int, stop: int) -> float:
        return total[stop] - total[start] + (first if stage == 0 else 0) + (last if stage == stages - 1 else 0)

    # best[stop]: (dearest stage, sum of squares, starts) of the first stages, which hold the layers before ``stop``
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(stages):
        reached: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for stop in range(stage + 1, len(costs) - (stages - 1 - stage) + 1):
            options = ((start, *best[start], price(stage, start, stop)) for start in range(stop) if start in best)
            reached[stop] = min(
                (max(dearest, cost), squares + cost**2, (*starts, start)) for start, dearest, squares, starts, cost in options
            )
        best = reached
    starts = best[len(costs)][2]
    return [Span(start, stop) for start, stop in zip(starts, (*starts[1:], len(costs)), strict=True)]


def _around(module: nn.Module, layers: str, uses: Uses) -> tuple[list[str], list[str]]:
    """Names of the modules with parameters that are used before and after the layers. See Note [What lives where]."""
    named = _named_sides(module, layers)
    sides: dict[str, list[str]] = {"before": [], "after": []}
    for name, registered in _registered(module, layers, named):
        used = uses.of([f"{name}.{parameter}" for parameter, _ in module.get_submodule(name).named_parameters(remove_duplicate=False)])
        chosen = next((told for whole, told in named.items() if name == whole or _inside(name, whole)), None)
        for side in chosen or ((used or {registered}) if "inside" not in used else ()):
            sides[side].append(name)
    return sides["before"], sides["after"]


def _registered(module: nn.Module, layers: str, named: Collection[str]) -> Iterator[tuple[str, str]]:
    """The modules with parameters outside the list, with the side of it on which they are registered; named ones for themselves."""
    behind: list[tuple[str, str]] = []
    prefix = ""
    for step in layers.split("."):
        parent = module.get_submodule(prefix)
        names = list(parent._modules)
        way = names.index(step)
        for side, children in (("before", names[:way]), ("after", names[way + 1 :])):
            parts = [(name, side) for child in children for name in _callable_parts(parent._modules[child], _join(prefix, child), named)]
            if side == "before":
                yield from parts
            else:
                behind = parts + behind  # the deeper, the sooner after the layers
        prefix = _join(prefix, step)
    yield from behind


def _named_sides(module: nn.Module, layers: str) -> dict[str, list[str]]:
    """What ``pipeline_before`` and ``pipeline_after``, anywhere in the module, say: the sides on which modules are used."""
    sides: dict[str, list[str]] = {}
    parts = dict(module.named_modules(remove_duplicate=False))
    for prefix, part in parts.items():
        for side in ("before", "after"):
            told = getattr(part, f"pipeline_{side}", ())
            for name in (told,) if isinstance(told, str) else told:
                whole = _join(prefix, name)
                if not name or whole not in parts or whole == layers or _inside(whole, layers) or _inside(layers, whole):
                    raise PipelineError(
                        f"pipeline_{side} of {type(part).__name__} names {name!r}, which is no module of it outside and beside {layers}; "
                        f"there are: {', '.join(n for n, _ in _registered(module, layers, ()))}"
                    )
                sides.setdefault(whole, []).append(side)
    return sides


def _callable_parts(module: nn.Module | None, name: str, named: Collection[str]) -> Iterator[str]:
    """The module itself, or the modules in it if it is a mere container or some are named; those without parameters are left out."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict) or any(_inside(other, name) for other in named):
        for child, part in module._modules.items():
            yield from _callable_parts(part, _join(name, child), named)
    elif module is not None and not isinstance(module, nn.ParameterList | nn.ParameterDict) and _size(module):
        yield name


def _replace(module: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(module.get_submodule(parent), child, new)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _multiplications(module: nn.Module) -> int:
    """Multiplications for one token or position: every weight of two dims or more counts, but a lookup table's. A tied head counts."""
    parts = [part for part in module.modules() if not isinstance(part, nn.Embedding)]
    return sum(weight.numel() for part in parts for weight in part.parameters(recurse=False) if weight.dim() > 1)


COSTS: dict[str, Callable[[nn.Module], int]] = {"parameters": _size, "flops": _multiplications}
"""What a module costs its stage, by the names that a layout has for it."""


def _inside(name: str, module: str) -> bool:
    return name.startswith(module + ".")


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
