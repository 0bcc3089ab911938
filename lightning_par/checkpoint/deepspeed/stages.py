"""Pipelines of DeepSpeed: a file for each layer, and masters and optimizer state with each stage (runtime/pipe/module.py).

Note [Names in a pipeline]
~~~~~~~~~~~~~~~~~~~~~~~~~~
::

    layer_03-model_states.pt          the state dict of layer 3, in the dtype that computes; no file for layers that are mere functions
    mp_rank_01_model_states.pt        stage 1: names and shapes of what it trains, "3.weight", "tied_modules.embed.weight"
    zero_pp_rank_0_mp_rank_01_...     stage 1: its masters and states, over its data ranks

A tied layer lies in the file of its first place (and of further ones where it is used in the same way); each stage that has it trains it
under ``tied_modules.<key>``, to the same values, of which the first stage's are taken. Here it gets the name of its first place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_par.checkpoint.numbers import Groups, shapes_in, walk
from lightning_par.checkpoint.source import Entry

TIED = "tied_modules"
COPY = "#copy"
Layers = Mapping[int, Mapping[str, Tensor]]
"""The state dict of each layer that has one."""


def owners(layers: Layers, trained: Mapping[str, Entry]) -> dict[str, list[int]]:
    """The layers that each ``tied_modules.<key>`` is, first of all its own.

    Args:
        trained: masters, by the names of DeepSpeed.
    """
    ties: dict[str, dict[str, Entry]] = {}
    for name, entry in trained.items():
        if name.startswith(f"{TIED}."):
            key, _, member = name.removeprefix(f"{TIED}.").partition(".")
            ties.setdefault(key, {})[member] = entry
    free = {place: layer for place, layer in layers.items() if not any(f"{place}.{member}" in trained for member in layer)}
    fitting = {key: [place for place, layer in free.items() if _fits(members, layer)] for key, members in ties.items()}
    shared = {place for places in fitting.values() for place in places if sum(place in others for others in fitting.values()) > 1}
    for key, members in ties.items():  # layers of the same shapes: their values tell
        fitting[key] = [place for place in fitting[key] if place not in shared or _holds(members, layers[place])]
    return fitting


def _fits(members: Mapping[str, Entry], layer: Mapping[str, Tensor]) -> bool:
    return all(member in layer and layer[member].shape == entry.shape for member, entry in members.items())


def _holds(members: Mapping[str, Entry], layer: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(layer[member], entry.read().to(layer[member].dtype)) for member, entry in members.items())


def first_place(ties: Mapping[str, Sequence[int]]) -> Callable[[str], str]:
    """From the names of DeepSpeed to those of the list of layers."""

    def rename(name: str) -> str:
        kind, _, rest = name.partition(".")
        key, _, member = rest.partition(".")
        return f"{ties[key][0]}.{member}" if kind == TIED and ties.get(key) else name

    return rename


def merge(optimizers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Groups and scalars of the whole, of those of the stages: groups with the same options become one, in the order of the stages."""
    groups: dict[tuple[str, int], dict[str, Any]] = {}
    seen: set[str] = set()
    for optimizer in optimizers:
        met: list[str] = []
        for group in optimizer["groups"]:
            options = {key: value for key, value in group.items() if key != "params"}
            told = repr(sorted(options.items()))
            whole = groups.setdefault((told, met.count(told)), options | {"params": []})
            met.append(told)
            whole["params"] += [name for name in group["params"] if name not in seen]
            seen |= set(group["params"])
    scalars = {name: state for optimizer in reversed(optimizers) for name, state in optimizer["scalars"].items()}
    return {"groups": list(groups.values()), "scalars": scalars}


def orders(layers: Layers, buffers: Sequence[str], stages: Sequence[Groups]) -> list[list[list[str]]] | None:
    """Without ZeRO stages number their parameters: what each is, by its shape, see Note [What shapes tell] in ``checkpoint.numbers``.

    A stage has consecutive layers. A copy of an earlier, tied parameter comes first in its group.

    Returns:
        for each stage and group the names, COPY for a copy; None if it cannot be told, or in more than one way.
    """
    names = [(f"{place}.{key}", tuple(value.shape)) for place, layer in layers.items() for key, value in layer.items()]
    names = [(name, shape) for name, shape in names if name not in set(buffers)]
    at, found, left = 0, [], set()
    for groups in stages:
        earlier = {shape for _, shape in names[:at]}
        copies = [None, *(place for place, group in enumerate(groups) if group and group[0] in earlier)]
        rests = [[group[1:] if place == copy else group for place, group in enumerate(groups)] for copy in copies]
        ways = [
            (copy, way)
            for copy, rest in zip(copies, rests, strict=True)
            if (way := walk(rest, names[at:])) and not way.left & shapes_in(groups)
        ]
        if len(ways) != 1:
            return None
        ((copy, way),) = ways
        found.append([[COPY, *group] if place == copy else group for place, group in enumerate(way.found)])
        at += way.passed
        left |= way.left
    left |= {shape for _, shape in names[at:]}
    return None if left & set().union(*map(shapes_in, stages)) else found


def twins(layers: Layers) -> dict[int, int]:
    """Layers that are an earlier one once more (tied ones that are used alike), and which."""
    found: dict[int, int] = {}
    for place, layer in layers.items():
        alike = (first for first in layers if first < place and first not in found and _same(layers[first], layer))
        if (first := next(alike, None)) is not None:
            found[place] = first
    return found


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def without_copies(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    groups = [group | {"params": [name for name in group["params"] if name != COPY]} for group in optimizer["groups"]]
    return {"groups": groups, "scalars": {name: state for name, state in optimizer["scalars"].items() if name != COPY}}


def mapped_shapes(mappings: Sequence[Sequence[Mapping[str, Any]]], named: Mapping[str, Tensor]) -> list[dict[str, torch.Size]]:
    """``param_shapes`` of BF16_Optimizer without ZeRO, where DeepSpeed does not tell them: names in order of place, shapes of layers.

    Args:
        mappings: ``param_slice_mappings`` of each data rank.
    """
    groups: list[dict[str, int]] = [{} for _ in mappings[0]]
    for rank in mappings:
        for group, mapping in zip(groups, rank, strict=True):
            for name, fragment in sorted(mapping.items(), key=lambda item: item[1].start):
                group[name] = group.get(name, 0) + fragment.numel

    def shape(name: str, numel: int) -> torch.Size:
        if name in named:
            return named[name].shape
        member = name.split(".", 2)[2]  # of a tied module
        return next(value.shape for key, value in named.items() if key.partition(".")[2] == member and value.numel() == numel)

    return [{name: shape(name, numel) for name, numel in group.items()} for group in groups]
