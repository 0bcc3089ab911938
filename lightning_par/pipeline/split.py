"""Splitting a module into stages: which layers, and which other modules, live where. Data first; ``cut`` then does it.

Note [What lives where]
~~~~~~~~~~~~~~~~~~~~~~~
The layer list is one ``nn.ModuleList`` or ``nn.Sequential``; its members, the layers, are spread over the stages. If the module does not
name it, it is the list of like blocks with the most parameters, or else the biggest Sequential. Walking down from the root to the list,
every module that is registered before the way down goes to the first stage, every one after it to the last: authors register modules in
the order in which they use them. Modules without parameters stay everywhere (dropout, rotary angles, losses). Parameters that hang
directly on a module along the way are nobody's in particular: every stage keeps them, and they are reported as tied, so that their
gradient is the sum over the stages, wherever they are used::

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

from torch import nn

from lightning_par.layout import Span
from lightning_par.pipeline.errors import PipelineError
from lightning_par.pipeline.stage import AfterLayers, BeforeLayers, LayerList, StageLayers

RIVAL = 0.5
"""A second layer list with this share of the first one's parameters makes the choice between them the user's."""


@dataclass(frozen=True)
class Placement:
    """Where everything lives.

    Attributes:
        layers: the layer list's name.
        members: the layers' names in it.
        spans: the layers of each stage.
        before: names of the modules on the first stage.
        after: names of the modules on the last stage.
    """

    layers: str
    members: tuple[str, ...]
    spans: tuple[Span, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]

    def stages_of(self, parameter: str) -> range:
        """The stages that hold the parameter of this name."""
        if _inside(parameter, self.layers):
            index = self.members.index(parameter.removeprefix(self.layers + ".").split(".")[0])
            return next(range(s, s + 1) for s, span in enumerate(self.spans) if span.start <= index < span.stop)
        if any(_inside(parameter, name) for name in self.before):
            return range(1)
        if any(_inside(parameter, name) for name in self.after):
            return range(len(self.spans) - 1, len(self.spans))
        return range(len(self.spans))

    def __str__(self) -> str:
        """A line per stage."""
        ends = [(self.members[span.start], self.members[span.stop - 1]) for span in self.spans]
        lines = [[f"{self.layers}.{first}" + (f"..{last}" if last != first else "")] for first, last in ends]
        lines[0] = [*self.before, *lines[0]]
        lines[-1] = [*lines[-1], *self.after]
        return "\n".join(f"stage {stage}: {', '.join(names)}" for stage, names in enumerate(lines))


def place(module: nn.Module, stages: int, layers: str | None = None, balance: str | Sequence[int] = "parameters") -> Placement:
    """Decide where everything lives. See Note [What lives where].

    Args:
        layers: the layer list's name, where it shall be another than the one found.
        balance: by what layers are spread (a key of ``COSTS``), or how many each stage gets.

    Raises:
        PipelineError: the module has no layer list, or one that cannot be spread so.
    """
    name = find_layers(module, layers)
    members = module.get_submodule(name)._modules
    blocks = list(members.values())
    if len(blocks) < stages:
        raise PipelineError(
            f"{name} has {len(blocks)} layers, too few for {stages} pipeline stages: lower pp (or chunks) to at most {len(blocks)}"
        )
    before, after = _around(module, name)
    if isinstance(balance, str):
        cost = COSTS[balance]
        first, last = (sum(cost(module.get_submodule(n)) for n in names) for names in (before, after))
        spans = spread([cost(block) for block in blocks], stages, first=first, last=last)
    else:
        if sum(balance) != len(blocks) or len(balance) != stages:
            raise PipelineError(
                f"balance={tuple(balance)} places {sum(balance)} layers on {len(balance)} stages, but {name} has {len(blocks)} layers for "
                f"{stages} stages: place each layer once"
            )
        spans = [Span(stop - size, stop) for size, stop in zip(balance, accumulate(balance), strict=True)]
    return Placement(name, tuple(members), tuple(spans), tuple(before), tuple(after))


def cut(module: nn.Module, placement: Placement, stages: Collection[int]) -> StageLayers:
    """Make the module that of a rank with these stages: replace the layer list, and put stand-ins for what lives elsewhere."""
    spans = {stage: placement.spans[stage] for stage in stages}
    layers = StageLayers(module.get_submodule(placement.layers), spans, stages=len(placement.spans), name=placement.layers)
    _replace(module, placement.layers, layers)
    if 0 not in spans:
        for name in placement.before:
            _replace(module, name, BeforeLayers(module.get_submodule(name)))
    if len(placement.spans) - 1 not in spans:
        for name in placement.after:
            _replace(module, name, AfterLayers(module.get_submodule(name), name))
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


def _around(module: nn.Module, layers: str) -> tuple[list[str], list[str]]:
    """Names of the modules with parameters that are registered before and after the way from the root to the layer list."""
    before: list[str] = []
    after: list[str] = []
    prefix = ""
    for step in layers.split("."):
        parent = module.get_submodule(prefix)
        names = list(parent._modules)
        way = names.index(step)
        before += _with_parameters(parent, prefix, names[:way])
        after = _with_parameters(parent, prefix, names[way + 1 :]) + after  # the deeper, the sooner after the layers
        prefix = _join(prefix, step)
    return before, after


def _with_parameters(parent: nn.Module, prefix: str, children: list[str]) -> list[str]:
    return [name for child in children for name in _callable_parts(parent._modules[child], _join(prefix, child))]


def _callable_parts(module: nn.Module | None, name: str) -> Iterator[str]:
    """The module itself, or the modules in it if it is a mere container; those without parameters are left out."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        for child, part in module._modules.items():
            yield from _callable_parts(part, _join(name, child))
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
