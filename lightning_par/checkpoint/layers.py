"""Names in the module for the layers of a pipeline of DeepSpeed, which are called by their place in a list.

Note [What a layer is]
~~~~~~~~~~~~~~~~~~~~~~
A ``PipelineModule`` is a list of layers, and ``3.up.weight`` is the parameter ``up.weight`` of the one at index 3. What that is in a module
is told by the user, or found by order::

    layer   in the checkpoint        in the state dict of the module       told: layers=[embed, layers.*, head]
    0       weight                   embed.weight                          embed
    1       norm.weight, up.weight   layers.0.norm.weight, ...up.weight    layers.*, with the first number
    2       norm.weight, up.weight   layers.1.norm.weight, ...up.weight    layers.*, with the second
    4       weight                   head.weight                           head

Found by order: layers come in the order of the module, and each has all that its part of the module has, by the same names. Keys of the
module that are another name of an earlier one (a tied head) may have no layer. Layers without parameters and buffers are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_par.checkpoint.errors import CheckpointError
from lightning_par.checkpoint.source import LAYERS, MODULE, Source

HOW = "lightning-par convert layers=[embed,layers.*,norm,head] (one name for each layer, `*` for as many as there are)"


def find_layers(source: Source, aliases: Mapping[str, str]) -> Source:
    """``source`` with the names of the module whose ``aliases`` (each key of its state dict and the first name for it) are given.

    Raises:
        CheckpointError: the module has other keys, or in another order.
    """
    if LAYERS not in source.meta.get(MODULE, {}):
        return source
    keys, places, at = list(aliases), {}, 0
    for layer, members in _members(source).items():
        while (place := _place(keys, at, members)) is None and at < len(keys) and aliases[keys[at]] != keys[at]:
            at += 1
        if place is None:
            what = f"the model goes on with {keys[at]}" if at < len(keys) else "the model has nothing more"
            raise CheckpointError(
                f"{source.path}: layer {layer} of the pipeline has {', '.join(members[:4])}{' ...' * (len(members) > 4)}, but {what}: "
                f"which layer is what cannot be found by order, so say it: {HOW}"
            )
        places[layer] = place
        at += len(members)
    return _placed(source, places)


def tell_layers(source: Source, layers: Sequence[str] | Mapping[str, str]) -> Source:
    """``source`` with the names that the user tells: one for each layer in order, or a mapping from what the checkpoint calls them.

    Raises:
        CheckpointError: there are no layers, or others than told.
    """
    if LAYERS not in source.meta.get(MODULE, {}):
        raise CheckpointError(f"layers={layers!r}: {source.path} is no checkpoint of a pipeline of DeepSpeed; leave layers out")
    found = list(_members(source))
    if isinstance(layers, Mapping):
        told = {str(layer): place for layer, place in layers.items()}
        if told.keys() != set(found):
            raise CheckpointError(f"layers={told}: the layers of {source.path} are {', '.join(found)}; name each of them")
        return _placed(source, told)
    stars = [place for place in layers if "*" in place]
    if len(stars) > 1 or any(place.count("*") > 1 for place in stars):
        raise CheckpointError(f"layers={list(layers)}: with `*` more than once it is ambiguous how many layers each stands for")
    count = len(found) - len(layers) + len(stars)
    names = [name for place in layers for name in ([place.replace("*", str(n)) for n in range(count)] if "*" in place else [place])]
    if len(names) != len(found):
        raise CheckpointError(f"layers={list(layers)}: {len(names)} names, but {source.path} has {len(found)} layers: {', '.join(found)}")
    return _placed(source, dict(zip(found, names, strict=True)))


def _members(source: Source) -> dict[str, list[str]]:
    """The keys in each layer, in order."""
    told = source.meta[MODULE]
    return {layer: [key.removeprefix(f"{layer}.") for key in told["aliases"] if key.startswith(f"{layer}.")] for layer in told[LAYERS]}


def _place(keys: Sequence[str], at: int, members: Sequence[str]) -> str | None:
    """What ``members`` are part of, if ``keys`` go on with them from ``at``."""
    if at >= len(keys) or not f".{keys[at]}".endswith(f".{members[0]}"):
        return None
    prefix = keys[at].removesuffix(members[0])
    return prefix.removesuffix(".") if [prefix + member for member in members] == list(keys[at : at + len(members)]) else None


def _placed(source: Source, places: Mapping[str, str]) -> Source:
    names = {
        f"{layer}.{member}": f"{places[layer]}.{member}" if places[layer] else member
        for layer, members in _members(source).items()
        for member in members
    }
    if len(set(names.values())) < len(names):
        raise CheckpointError(f"{source.path}: two layers cannot have one name: {', '.join(places.values())}")
    return source.renamed(lambda name: names.get(name, name))
