"""What this rank holds of the model's and the optimizers' state, under names and shapes that no layout changes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_par.checkpoint import MODEL, MODULE, OPTIMIZERS, RNG, CheckpointError, Shard, Source, find_layers, plain
from lightning_par.checkpoint.hf import HUGGINGFACE, uncompiled
from lightning_par.checkpoint.source import LOSS_SCALE, UNTOLD, state_entry, states, told_state
from lightning_par.comm import Mesh
from lightning_par.layout import ShardSpec
from lightning_par.numerics import SEEDS
from lightning_par.pipeline import Unknown
from lightning_par.strategy.assemble import Assembled
from lightning_par.strategy.huggingface import huggingface
from lightning_par.zero import DataParallel

OF_MOMENTS = ("beta2_decay", "betas", "etas", "lambd", "momentum", "rho")
"""Hyperparameters by which torch's optimizers make moments, or none if it is 0 (Adagrad has none of them)."""
OF_STATE: dict[type[Optimizer], tuple[tuple[str, ...], ...]] = {
    torch.optim.ASGD: (("eta", "mu", "ax"),),
    torch.optim.Adadelta: (("square_avg", "acc_delta"),),
    torch.optim.Adafactor: (("variance",), ("row_var", "col_var")),
    torch.optim.Adagrad: (("sum",),),
    torch.optim.Adam: (("exp_avg", "exp_avg_sq"),),
    torch.optim.AdamW: (("exp_avg", "exp_avg_sq"),),
    torch.optim.Adamax: (("exp_avg", "exp_inf"),),
    torch.optim.NAdam: (("exp_avg", "exp_avg_sq", "mu_product"),),
    torch.optim.RAdam: (("exp_avg", "exp_avg_sq"),),
    torch.optim.RMSprop: (("square_avg",),),
    torch.optim.Rprop: (("prev", "step_size"),),
    torch.optim.SparseAdam: (("exp_avg", "exp_avg_sq"),),
}
"""What torch's optimizers look for in the state of a parameter that has one: all of one of these. (SGD and Muon do without.)"""
ANEW = "To go on from its weights with optimizers that begin anew, give the strategy restore_optimizer=False"
Orders = list[list[list[str]]]
"""The names of the parameters that each optimizer was given, group by group, in its order."""


def module_shards(assembled: Assembled, data_parallel: DataParallel | None) -> dict[str, Shard]:
    """This rank's parameters and persistent buffers, by their first name in the whole module.

    Where parameters are whole over the data ranks, data rank 0 writes; where they are sharded (ZeRO 3), each rank its part.
    """
    mesh = assembled.mesh
    shards = {}
    if data_parallel is not None:
        data_parallel.take_edits()
    for info in assembled.parameters:
        part = data_parallel.sharded_value(info.param) if data_parallel is not None else None
        if part is None:
            shards[info.name] = Shard.of(info.spec, info.param, writes=info.counted and mesh.data.index == 0)
        else:
            shards[info.name] = Shard(*part, data_parallel.writes_value(info.param))
    for name, buffer in persistent_buffers(assembled).items():
        numbers = buffer.as_subclass(Tensor) if isinstance(buffer, Unknown) else buffer
        shards[name] = Shard.whole(numbers, writes=mesh.data.index == 0 and mesh.tp.index == 0)  # but see ``with_one_writer``
    return shards


def persistent_buffers(assembled: Assembled) -> dict[str, Tensor]:
    """The buffers of this rank's part that the state dict of the whole module had."""
    return {name: getattr(owner, key) for name, (owner, key) in buffer_places(assembled).items()}


def extra_places(assembled: Assembled) -> dict[str, nn.Module]:
    """The modules of this rank's part that have a ``get_extra_state``, by its key in the state dict."""
    modules = dict(assembled.module.named_modules(remove_duplicate=False))
    stateful = {path: module for path, module in modules.items() if type(module).get_extra_state is not nn.Module.get_extra_state}
    return {f"{path}._extra_state".lstrip("."): module for path, module in stateful.items()}


def buffer_places(assembled: Assembled) -> dict[str, tuple[nn.Module, str]]:
    """Where they are, by first name: the module and its attribute (the tensor there may be replaced at any time)."""
    places = {}
    for name, _ in assembled.module.named_buffers():
        if (first := assembled.buffers.get(name)) is not None:  # which may be on another pipeline stage
            path, _, key = name.rpartition(".")
            places.setdefault(first, (assembled.module.get_submodule(path), key))
    return places


def stray_buffers(assembled: Assembled) -> list[str]:
    """Persistent buffers that became tensors of their own after the start, so that no checkpoint has a name for them, and why.

    What was one tensor at the start may have its first name on another pipeline stage: there nothing can be told. Moved to a device,
    one tensor becomes several of one value.
    """
    found, here = [], dict(assembled.module.named_buffers(remove_duplicate=False))
    for name, buffer in here.items():
        path, _, key = name.rpartition(".")
        first = assembled.buffers.get(name)
        if key in assembled.module.get_submodule(path)._non_persistent_buffers_set:
            continue
        if first is None:
            found.append(f"{MODEL}.{name} (a buffer that was registered or first filled after the start)")
        elif not _is_same(here.get(first, buffer), buffer):
            found.append(f"{MODEL}.{name} (a buffer that was one with {first} at the start)")
    return found


def spread_buffers(assembled: Assembled) -> None:
    """Buffers under all their names take the value of the first, which was loaded."""
    loaded = persistent_buffers(assembled)
    for name, buffer in assembled.module.named_buffers(remove_duplicate=False):
        source = loaded.get(assembled.buffers.get(name, name))
        if source is not None and source is not buffer and source.shape == buffer.shape:
            buffer.copy_(source)


def _is_same(first: Tensor, second: Tensor) -> bool:
    alike = first.shape == second.shape and first.dtype == second.dtype and first.device == second.device
    return first is second or (alike and torch.equal(first.as_subclass(Tensor), second.as_subclass(Tensor)))


def optimizer_shards(optimizer: Optimizer, index: int, data_parallel: DataParallel, mesh: Mesh) -> dict[str, Shard]:
    """Every tensor in the state of this rank's ``optimizer``: those shaped like their parameter as its part, others (steps) whole."""
    shards = {}
    for param, state in optimizer.state.items():
        name, spec = data_parallel.held(param)
        owns = data_parallel.writes(param)
        for key, value in state.items():
            if not isinstance(value, Tensor):
                continue
            entry = state_entry(index, name, key)
            if value.shape == param.shape and value.dim():
                shards[entry] = Shard.of(spec.like(value.dtype), value, writes=owns)
            else:
                shards[entry] = Shard.whole(value, writes=owns and spec.span.start == 0 and _is_first_block(spec))
    return shards


def optimizer_meta(optimizer: Optimizer, data_parallel: DataParallel) -> dict[str, Any]:
    """The param groups, with names in place of this rank's parameters, and state that is no tensor."""
    return {
        "groups": [
            {"params": [data_parallel.held(param)[0] for param in group["params"]]} | {k: v for k, v in group.items() if k != "params"}
            for group in optimizer.param_groups
        ],
        "scalars": {
            data_parallel.held(param)[0]: {key: value for key, value in state.items() if not isinstance(value, Tensor)}
            for param, state in optimizer.state.items()
        },
    }


def merge_optimizer_meta(everyone: Sequence[Mapping[str, Any]], order: Sequence[Sequence[str]]) -> dict[str, Any]:
    """That of the whole model, from every rank's ``optimizer_meta``, with the parameters of each group in their ``order``."""
    groups = max((rank["groups"] for rank in everyone), key=len)
    merged = [group | {"params": list(names)} for group, names in zip(groups, order, strict=True)]
    return {"groups": merged, "scalars": {name: state for rank in everyone for name, state in rank["scalars"].items() if state}}


def orders(optimizers: Sequence[Optimizer], assembled: Assembled) -> Orders:
    """Of this rank, before its shards take the place of parameters."""
    names = {info.param: info.name for info in assembled.parameters}
    return [[[names[param] for param in group["params"] if param in names] for group in optimizer.param_groups] for optimizer in optimizers]


def merge_orders(everyone: Sequence[Orders], module: Sequence[str]) -> tuple[Orders, bool]:
    """Of the whole model, from every rank's, and whether it is certain.

    Stages of a pipeline tell only their part. Where each of them keeps to the order of the module (``Assembled.order``), so does the whole;
    otherwise stages follow each other, which is a guess. A stage may lack groups at the end that have nothing in it.
    """
    place = {name: number for number, name in enumerate(module)}
    certain, merged = True, []
    for optimizers in zip(*everyone, strict=True):
        merged.append([])
        for groups in zip_longest(*optimizers, fillvalue=[]):
            names = dict.fromkeys(name for group in groups for name in group)
            keeps = all(list(group) == sorted(group, key=place.__getitem__) for group in groups)
            certain &= keeps or all(list(group) == list(names) for group in groups)
            merged[-1].append(sorted(names, key=place.__getitem__) if keeps else list(names))
    return merged, certain


@dataclass(frozen=True)
class Told:
    """What a rank tells all others of its part, so that each knows the whole.

    Attributes:
        pp: the pipeline rank.
        buffers, frozen: the names of its persistent buffers, and of its parameters that are not trained.
        unsound: buffers that hold NaN, or what is unknown on this stage of a pipeline.
        orders: see ``orders``.
        optimizers: the ``optimizer_meta`` of each optimizer, where a checkpoint is saved.
        extras: what ``get_extra_state`` of its modules returned, as plain data, by its key in the state dict.
        dropped: what of its state no checkpoint holds, and why.
    """

    pp: int
    buffers: list[str]
    frozen: list[str]
    unsound: list[str]
    orders: Orders
    optimizers: list[dict[str, Any]]
    extras: dict[str, Any]
    dropped: list[str]

    @classmethod
    def of(cls, assembled: Assembled, orders: Orders, optimizers: list[dict[str, Any]], *, extras: bool) -> Told:
        """``extras``: whether modules are asked for their extra state, and for what cannot be saved."""
        frozen = [info.name for info in assembled.parameters if not info.param.requires_grad]
        asked = {key: module.get_extra_state() for key, module in extra_places(assembled).items()} if extras else {}
        dropped = stray_buffers(assembled) if extras else []
        buffers, pp = persistent_buffers(assembled), assembled.mesh.pp
        unsound = [name for name, buffer in buffers.items() if pp.size > 1 and _is_unsound(buffer)]
        return cls(pp.index, list(buffers), frozen, unsound, orders, optimizers, plain(asked, dropped, MODEL), dropped)


def _is_unsound(buffer: Tensor) -> bool:
    return isinstance(buffer, Unknown) or (buffer.is_floating_point() and bool(buffer.isnan().any()))


def with_one_writer(shards: Mapping[str, Shard], assembled: Assembled, everyone: Sequence[Told]) -> dict[str, Shard]:
    """``module_shards`` where of all pipeline ranks that hold a buffer one saves it: that of the last stage, which runs the whole step.

    Unless it is unsound there, since a step has written to it before the layers: then another, from the first on.
    """
    pipeline = assembled.pipeline
    if pipeline is None:
        return dict(shards)
    last = pipeline.rank_of(len(pipeline.placement.spans) - 1)
    order = sorted({told.pp: told for told in everyone}.values(), key=lambda told: (told.pp != last, told.pp))
    one: dict[str, Shard] = {}
    for name, shard in shards.items():
        holders = [told for told in order if name in told.buffers]
        writer = next((told for told in holders if name not in told.unsound), holders[0] if holders else None)
        one[name] = shard if writer is None else replace(shard, writes=shard.writes and writer.pp == assembled.mesh.pp.index)
    return one


def module_meta(assembled: Assembled, everyone: Sequence[Told]) -> dict[str, Any]:
    """What a checkpoint of another format must be told of the module: see Note [One form for all formats] in ``checkpoint.source``."""
    names = list(dict.fromkeys((*assembled.aliases.values(), *assembled.left_out)))
    buffers = {name for told in everyone for name in told.buffers}
    frozen = {name for told in everyone for name in told.frozen}
    return {
        "aliases": dict(assembled.aliases),
        "buffers": [name for name in names if name in buffers],
        "frozen": [name for name in names if name in frozen],
    } | huggingface(assembled.module, assembled.changed)


def in_module(source: Source, assembled: Assembled) -> Source:
    """A folder of transformers names the weights as the HF model does, which is a part of the module; a pipeline of DeepSpeed by layers.

    Raises:
        CheckpointError: the module has several HF models, or one with weights of another's.
    """
    source = by_keys(find_layers(source, assembled.aliases), assembled)
    mine = huggingface(assembled.module).get(HUGGINGFACE, {})
    if source.meta.get(MODULE, {}).get(HUGGINGFACE, {}).get("prefix") != "":
        return source
    if "several" in mine:
        raise CheckpointError(
            f"{source.path} holds one model of transformers, but the module has several, {', '.join(mine['several'])}: load it where the "
            "module is made, with from_pretrained"
        )
    if "adapted" in mine:
        raise CheckpointError(
            f"{source.path} holds a model of transformers, but {mine['adapted']} has other weights than such a model, as with adapters: "
            "load it where the module is made, with from_pretrained"
        )
    prefix = mine.get("prefix", "")
    names = {uncompiled(key.removeprefix(prefix)): key for key in assembled.aliases if key.startswith(prefix)}
    return source.renamed(lambda name: names.get(name, prefix + name))


def by_keys(source: Source, assembled: Assembled) -> Source:
    """A checkpoint that names weights by the keys of the state dict, as other programs do, with the module's own names for them.

    That is done only where hooks of the module shift names, so that a key is the name of another weight. See ``assemble._aliases``.

    Raises:
        CheckpointError: some of its names are the module's own, and no keys.
    """
    ours, theirs = assembled.aliases, source.meta.get(MODULE, {}).get("aliases", {})
    firsts = {*ours.values()}
    if not any(key != first and key in firsts and theirs.get(key) == key for key, first in ours.items()):
        return source
    names = {theirs[key]: first for key, first in ours.items() if key in theirs}
    told = [name.removeprefix(f"{MODEL}.") for name in source.weights]
    if strays := [name for name in told if name not in names and name in names.values()]:
        raise CheckpointError(
            f"checkpoint {source.path} holds {', '.join(strays)}, and under such names the model's state_dict has other weights or none: "
            "whether it means those of the module or of the state_dict cannot be told"
        )
    source = source.renamed(lambda name: names.get(name, name))
    aliases = {key: names.get(first, first) for key, first in theirs.items()}
    return replace(source, meta=source.meta | {MODULE: source.meta[MODULE] | {"aliases": aliases}})


def empty_optimizer_state(
    optimizer: Optimizer, index: int, data_parallel: DataParallel, stored: Mapping[str, tuple[torch.Size, torch.dtype]]
) -> dict[str, Shard]:
    """Give the state of this rank's ``optimizer`` the tensors that a checkpoint holds for its parameters, to be filled."""
    optimizer.state.clear()
    shards: dict[str, Shard] = {}
    by_name: dict[str, dict[str, tuple[torch.Size, torch.dtype]]] = {}
    for entry, told in stored.items():
        if (place := told_state(entry)) is not None and place[0] == index:
            by_name.setdefault(place[1], {})[place[2]] = told
    for group in optimizer.param_groups:
        for param in group["params"]:
            name, spec = data_parallel.held(param)
            for key, (shape, dtype) in by_name.get(name, {}).items():
                if tuple(shape) == spec.shape and key != "step":
                    if dtype.is_floating_point and f"{MODEL}.{name}" in stored:
                        dtype = _state_dtype(dtype, stored[f"{MODEL}.{name}"][1], param.dtype)
                    value = torch.empty_like(param, dtype=dtype, requires_grad=False)
                    shards[state_entry(index, name, key)] = Shard.of(spec.like(dtype), value)
                else:
                    value = torch.empty(shape, dtype=dtype, device=_state_device(key, param, group))
                    shards[state_entry(index, name, key)] = Shard.whole(value, writes=False)
                optimizer.state[param][key] = value
    return shards


def _state_dtype(saved: torch.dtype, weight: torch.dtype, now: torch.dtype) -> torch.dtype:
    """Of a moment: as it was, unless the run has another precision than that in which the ``weight`` was saved."""
    if weight == now:
        return saved
    return now if saved == weight else torch.promote_types(saved, now)


def lacking(source: Source, index: int, meta: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """What the state of optimizer ``index`` should have and has not.

    Returns:
        Tensors that other parameters of their group, of as many dims, have; and parameters without any state while others of their group
        have one, or should, as those have that were never used.
    """
    found, tensors, unused = states(source, index), [], []
    frozen, begun = source.meta.get(MODULE, {}).get("frozen", ()), _steps(source) > 0
    for group in meta["groups"]:
        stateful = [name for name in group["params"] if name in found]
        expected = stateful or (begun and _leaves_state(group))
        unused += [name for name in group["params"] if expected and name not in found and name not in frozen]
        keys: dict[int, set[str]] = {}
        for name in stateful:
            keys.setdefault(_dims(source, name), set()).update(found[name])
        tensors += [state_entry(index, name, key) for name in stateful for key in sorted(keys[_dims(source, name)] - found[name].keys())]
    return tensors, unused


def require_states(source: Source) -> None:
    """Raise a CheckpointError if steps were taken that leave moments, and no optimizer has any."""
    metas, frozen = source.meta[OPTIMIZERS], source.meta.get(MODULE, {}).get("frozen", ())
    keys = {key for index in range(len(metas)) for entries in states(source, index).values() for key in entries}
    keys |= {key for meta in metas for scalars in meta["scalars"].values() for key in scalars}
    trained = [group for meta in metas for group in meta["groups"] if not set(group["params"]) <= set(frozen)]
    if _steps(source) > 0 and not keys - {"step"} and any(map(_leaves_state, trained)):
        raise CheckpointError(
            f"checkpoint {source.path} was saved after {source.meta['global_step']} steps, but has no state of any optimizer. {ANEW}"
        )


def _steps(source: Source) -> int:
    """Steps that changed weights, as far as the checkpoint tells."""
    return source.meta.get("global_step", 0) - source.meta.get(LOSS_SCALE, {}).get("skipped", 0)


def _leaves_state(group: Mapping[str, Any]) -> bool:
    """Whether the optimizer remembers moments of these parameters once it has stepped them."""
    return any(group.get(key) for key in OF_MOMENTS)


def _dims(source: Source, name: str) -> int:
    weight = source.entries.get(f"{MODEL}.{name}")
    return -1 if weight is None else len(weight.shape)


def apply_optimizer_meta(optimizer: Optimizer, meta: Mapping[str, Any], data_parallel: DataParallel) -> None:
    """Set the hyperparameters of the param groups (in place: schedulers hold them) and state that is no tensor.

    Raises:
        CheckpointError: the checkpoint has fewer or more groups, none that holds a parameter that is trained, or those of an optimizer of
            another kind.
    """
    if len(optimizer.param_groups) != len(meta["groups"]) and not any(UNTOLD in group["params"] for group in meta["groups"]):
        raise CheckpointError(
            f"the checkpoint has {len(meta['groups'])} param groups, but configure_optimizers made {len(optimizer.param_groups)}. {ANEW}"
        )
    saved = [key for key in OF_MOMENTS if any(group.get(key) for group in meta["groups"])]
    if saved and not any(key in group for key in saved for group in (optimizer.defaults, *optimizer.param_groups)):
        raise CheckpointError(
            f"the checkpoint has the state of an optimizer with {', '.join(saved)}, and {type(optimizer).__name__} has no such "
            f"hyperparameter: the moments are none that it could go on from. {ANEW}"
        )
    known = {name for group in meta["groups"] for name in group["params"]}
    trained = [data_parallel.held(param)[0] for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    if unknown := [name for name in trained if name not in known]:
        raise CheckpointError(
            f"the checkpoint has no optimizer group for {', '.join(unknown)}: was the optimizer built from other parameters? {ANEW}"
        )
    for place, group in enumerate(optimizer.param_groups):
        names = [data_parallel.held(param)[0] for param in group["params"]]
        source = next((saved for saved in meta["groups"] if set(names) & set(saved["params"])), None)
        if source is None and place < len(meta["groups"]):
            source = meta["groups"][place]  # this rank holds no part of the group, but its schedulers and loggers read it
        if source is not None:
            group.update({key: value for key, value in source.items() if key != "params"})
        for param in group["params"]:
            optimizer.state[param].update(meta["scalars"].get(data_parallel.held(param)[0], {}))
            if not optimizer.state[param]:
                del optimizer.state[param]
    if lacks := _lacks(optimizer):
        raise CheckpointError(
            f"the checkpoint has the state of another optimizer: without {', '.join(lacks)} {type(optimizer).__name__} cannot go on. {ANEW}"
        )


def _lacks(optimizer: Optimizer) -> list[str]:
    """What the state that was loaded for some parameter should have and has not, so that a step would fail."""
    needed, begins_with_state = OF_STATE.get(type(optimizer), ()), isinstance(optimizer, torch.optim.Adagrad)
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        state = optimizer.state.get(param, {})
        if (state or (begins_with_state and param.requires_grad)) and needed and not any(state.keys() >= set(keys) for keys in needed):
            return [key for key in needed[0] if key not in state]
    return []


def generators() -> dict[str, Tensor]:
    """The states of this process's random generators, as tensors."""
    _, keys, position, has_gauss, cached = np.random.get_state()
    version, words, gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "streams": SEEDS.get_state(),
        "numpy": torch.from_numpy(np.concatenate((keys, (position, has_gauss))).astype(np.int64)),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "python": torch.from_numpy(np.array((version, *words), dtype=np.int64)),
        "python_gauss": torch.tensor([float("nan") if gauss is None else gauss], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_generators(states: Mapping[str, Tensor]) -> None:
    """Let this process's random generators go on from what ``generators`` gave, here or elsewhere."""
    torch.set_rng_state(states["torch"])
    if "streams" in states:
        SEEDS.set_state(states["streams"])
    *keys, position, has_gauss = states["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, states["numpy_gauss"].item()))
    version, *words = states["python"].tolist()
    gauss = states["python_gauss"].item()
    random.setstate((version, tuple(words), None if gauss != gauss else gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


@contextmanager
def generators_kept() -> Iterator[None]:
    """What is drawn inside the block is not missing after it."""
    before = generators()
    try:
        yield
    finally:
        set_generators(before)


def rng_shards(rank: int) -> dict[str, Shard]:
    """The states of the random generators that rank ``rank`` saves, or loads."""
    return {f"{RNG}.{rank}.{name}": Shard.whole(state, writes=True) for name, state in generators().items()}


def share_rng(mesh: Mesh) -> None:
    """Let ranks that hold parts of one replica go on from the state of the first of them. All ranks call.

    Tensor-parallel ranks compute replicated activations twice, dropout included; pipeline stages draw as ``MicrobatchStreams`` says.
    """
    for group in (mesh.tp, mesh.pp):
        torch.set_rng_state(group.broadcast_object(torch.get_rng_state()))
        SEEDS.set_state(group.broadcast_object(SEEDS.get_state()))
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(group.broadcast_object(torch.cuda.get_rng_state()))


def restore_rng(shards: Mapping[str, Shard], rank: int) -> None:
    """Set this rank's random generators from what ``rng_shards`` described and a checkpoint filled."""
    set_generators({name.removeprefix(f"{RNG}.{rank}."): shard.data for name, shard in shards.items()})


def _state_device(key: str, param: Tensor, group: Mapping[str, Any]) -> torch.device:
    """torch's optimizers count steps on the host, unless they are fused or captured in a graph."""
    on_host = key == "step" and not (group.get("fused") or group.get("capturable"))
    return torch.device("cpu") if on_host else param.device


def _is_first_block(spec: ShardSpec) -> bool:
    """Of all blocks of the whole that ranks hold, this is the one with the first element."""
    return all(not spans or spans[0].start == 0 for spans in spec.dims)
