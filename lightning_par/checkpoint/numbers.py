"""Which parameter is which, where an optimizer's state has numbers instead of names: told by shapes, as far as they do.

Note [What shapes tell]
~~~~~~~~~~~~~~~~~~~~~~~
An optimizer numbers its parameters group by group. If each group has them in the order of the module, as from a filter over
``named_parameters()``, then a walk along the module gives each parameter to the group whose next state has its shape::

    module          a [4, 3]    a.bias [4]    frozen [7]    b [2, 4]    b.bias [2]
    group 0         [4, 3]                                  [2, 4]
    group 1                     [4]                                     [2]

It is refused where two groups fit, or where a parameter that was left out (frozen, a buffer) has the shape of one that was not, so that the
walk may have gone wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_par.checkpoint.source import MODEL, NUMBERED, OPTIMIZER, OPTIMIZERS, Source, parameter_of

Shape = tuple[int, ...]
Groups = Sequence[Sequence[Shape | None]]
"""Shapes of an optimizer's parameters, by group; None where there is no state."""
Named = Sequence[tuple[str, Shape]]


@dataclass(frozen=True)
class Walk:
    """The names in each group, in order; how many of the module's names were passed; and what of them is in no group."""

    found: list[list[str]]
    passed: int
    left: frozenset[Shape]


def walk(groups: Groups, names: Named) -> Walk | None:
    """Along ``names`` until all parameters of ``groups`` are found; None if they are not. See Note [What shapes tell]."""
    found: list[list[str]] = [[] for _ in groups]
    passed, left = 0, set()
    for name, shape in names:
        if sum(map(len, found)) == sum(map(len, groups)):
            break
        fitting = [place for place, group in enumerate(groups) if len(found[place]) < len(group) and group[len(found[place])] == shape]
        if len(fitting) > 1:
            return None
        passed += 1
        if fitting:
            found[fitting[0]].append(name)
        else:
            left.add(shape)
    return Walk(found, passed, frozenset(left)) if [*map(len, found)] == [*map(len, groups)] else None


def by_shapes(groups: Groups, names: Named) -> list[list[str]] | None:
    """The names in each group; None if shapes do not tell."""
    way = walk(groups, names)
    if way is None:
        return None
    left = way.left | {shape for _, shape in names[way.passed :]}
    return None if left & shapes_in(groups) else way.found


def shapes_in(groups: Groups) -> set[Shape]:
    return {shape for group in groups for shape in group if shape is not None}


def shapes(source: Source, index: int) -> Groups:
    """Of the numbered parameters of optimizer ``index``."""
    prefixes, found = (f"{OPTIMIZER}.{index}.", f"{MODEL}.{NUMBERED}"), {}
    for entry, value in source.entries.items():
        if entry.startswith(prefixes) and not entry.endswith(".step"):
            found[parameter_of(entry)] = value.shape
    return [[found.get(number) for number in group["params"]] for group in source.meta[OPTIMIZERS][index]["groups"]]
