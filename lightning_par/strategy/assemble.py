"""Turn a whole module into this rank's part of it.

Note [The order of the axes]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Every rank starts from the same whole module, so that the weights at step 0 do not depend on the layout:

0. for pp, the order in which modules are used is seen (it needs whole modules, and no weights);
1. rank 0's weights go to all ranks;
2. tp cuts matrices in place (it needs whole weights and whole ties);
3. cp prepares attention (it changes no weight);
4. pp drops the layers of other stages (last, since tp's plan names modules that may then be gone), having weighed them if asked to;
5. once the part stands on its device, ZeRO lays its parameters out in flat buckets (in ``strategy.base``, with the optimizers).

What each rank then holds is written down by ShardSpecs under the names that the whole module had.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from lightning_par.checkpoint import CheckpointError, is_extra
from lightning_par.checkpoint.source import is_number
from lightning_par.comm import Mesh
from lightning_par.context import prepare
from lightning_par.layout import ShardSpec
from lightning_par.pipeline import Pipeline, Uses
from lightning_par.strategy.huggingface import Changes, changes
from lightning_par.strategy.rehearsal import Rehearsal
from lightning_par.tensor import shard_module
from lightning_par.zero import GuardedParameter, ParameterInfo


@dataclass(frozen=True)
class Assembled:
    """This rank's part of a module, and what it is a part of.

    Attributes:
        module: the user's module, cut in place.
        parameters: what this rank holds of each parameter, by the first name it had in the whole module.
        order: the first names of all parameters of the whole module, in its order.
        aliases: every name in the whole module's ``state_dict`` and the first name of what it stands for, in order. Hooks of the module
            may give it other names there: the first is always one that the module itself has. Behind them, under their own names, those
            of ``left_out``.
        buffers: every name in the whole module of its persistent buffers, and their first names.
        left_out: parameters and persistent buffers of the whole module that no name in its ``state_dict`` stands for: a module may leave
            them out there, or tell them in parts. They are saved, and are not missed.
        changed: how a model of transformers in the whole module differs from what its class makes of its config; None if it does not.
        untold: keys of the whole module's ``state_dict`` that are neither, nor of ``get_extra_state``: no checkpoint holds them.
        pipeline: the engine, when pp > 1.
    """

    module: nn.Module
    mesh: Mesh
    parameters: tuple[ParameterInfo, ...]
    order: tuple[str, ...]
    aliases: dict[str, str]
    buffers: dict[str, str]
    left_out: tuple[str, ...]
    changed: Changes | None
    untold: tuple[str, ...]
    pipeline: Pipeline | None


def assemble(module: nn.Module, mesh: Mesh, device: torch.device, rehearsal: Rehearsal | None = None) -> Assembled:
    """Cut ``module`` in place. Every rank calls, with the whole module. See Note [The order of the axes].

    Args:
        rehearsal: runs the step of the whole module, which tells a pipeline what is used where, and what layers cost.

    Raises:
        RuntimeError: the module is no longer whole.
        CheckpointError: no checkpoint could hold a parameter or buffer under the name that it has.
    """
    layout = mesh.layout
    require_uncut(module)
    if layout.tp > 1 or layout.pp > 1:
        setattr(module, _CUT, f"tp={layout.tp} pp={layout.pp}")
    state = _state(module)
    aliases, buffers, left_out = _aliases(module, state)
    if numbers := [name for name in dict.fromkeys((*aliases, *aliases.values())) if is_number(name)]:
        raise CheckpointError(
            f"the module calls parameters or buffers {', '.join(numbers)}: checkpoints of other programs number the parameters of "
            "optimizers like that, so call them otherwise"
        )
    untold = tuple(key for key in state if key not in aliases and not is_extra(key))
    changed = changes(module, aliases)
    uses = rehearsal.uses() if rehearsal is not None else None
    _broadcast(module, mesh, device)
    specs = {name: ShardSpec.whole(param) for name, param in module.named_parameters()}
    order, whole = tuple(specs), _count(module)
    partial: set[str] = set()
    if layout.tp > 1:
        shards = shard_module(module, mesh.tp)
        specs, partial = shards.specs, shards.partial
    if layout.cp > 1:
        prepare(module)
    pipeline = _pipeline(module, mesh, device, rehearsal, uses) if layout.pp > 1 else None
    stages = pipeline.tied if pipeline else {}
    names = pipeline.names if pipeline else {name: name for name, _ in module.named_parameters()}
    infos = []
    for local, param in module.named_parameters():
        name = names[local]
        whole_on_tp = specs[name].is_whole
        counted = (mesh.tp.index == 0 or not whole_on_tp) and stages.get(name, (mesh.pp.index,))[0] == mesh.pp.index
        infos.append(ParameterInfo(name, param, specs[name], stages.get(name, ()), name in partial, counted))
    if layout.tp * layout.pp > 1:
        rank_zero_info(f"of the model's {whole:,} parameters rank 0 holds {_count(module):,}, which a summary shows")
    return Assembled(module, mesh, tuple(infos), order, aliases, buffers, left_out, changed, untold, pipeline)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _pipeline(module: nn.Module, mesh: Mesh, device: torch.device, rehearsal: Rehearsal | None, uses: Uses | None) -> Pipeline:
    layout = mesh.layout
    if layout.balance != "profile":
        return Pipeline.split(module, mesh.pp, layout.schedule, layout.chunks, balance=layout.balance, uses=uses, device=device)
    assert rehearsal is not None, "layers are weighed by running the step"
    costs = rehearsal.costs()
    pipeline = Pipeline.split(module, mesh.pp, layout.schedule, layout.chunks, balance=costs, uses=uses, device=device)
    sizes, took = pipeline.placement.sizes, ", ".join(f"{1e3 * seconds:.3g}" for seconds in (costs.first, *costs.layers, costs.last))
    rank_zero_info(f"balance=profile: {sizes} layers on the stages, as balance={sizes} would (ms before, in and after the layers: {took})")
    return pipeline


def require_uncut(module: nn.Module) -> None:
    """Refuse a module that another strategy has cut.

    Raises:
        RuntimeError: it has.
    """
    if any(isinstance(param, GuardedParameter) for param in module.parameters()):
        raise RuntimeError(
            f"the weights of {type(module).__name__} are still sharded by an earlier fit with zero=3. Go on with the Trainer that did it "
            "(it may fit, validate and test in any order), or build a new module and give it the weights by ckpt_path"
        )
    if cut := getattr(module, _CUT, None):
        raise RuntimeError(
            f"{type(module).__name__} was cut for {cut} by another strategy, so most of its weights are not here. Go on with the Trainer "
            "that did (it may fit, validate and test in any order), or build a new module and give it the weights by ckpt_path"
        )


_CUT = "_lightning_par_cut"


def _state(module: nn.Module) -> dict[str, Any]:
    """The state dict, with the parameters and buffers themselves where its module gives them."""
    try:
        return module.state_dict(keep_vars=True)
    except TypeError:  # one of the user's own
        return module.state_dict()


def _aliases(module: nn.Module, state: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str], tuple[str, ...]]:
    """``Assembled.aliases``, ``buffers`` and ``left_out``, from the state dict.

    Hooks may give a weight a name there that another has in the module. So a key stands for what its value is, if it is the parameter or
    buffer itself; otherwise for what has that name.
    """
    first = {id(param): name for name, param in module.named_parameters()}
    buffers = dict(module.named_buffers(remove_duplicate=False))
    tensors = dict(module.named_parameters(remove_duplicate=False)) | buffers
    for key in state:
        if key in tensors:
            first.setdefault(id(tensors[key]), key)
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), name)
    named = {key: value if id(value) in first else tensors.get(key, value) for key, value in state.items()}
    aliases = {key: first[id(tensor)] for key, tensor in named.items() if id(tensor) in first}
    told, kept = {*aliases.values()}, (*module.parameters(), *_persistent_buffers(module))
    left_out = tuple(dict.fromkeys(name for tensor in kept if (name := first[id(tensor)]) not in told))
    told |= {*left_out}
    kept_buffers = {name: first[id(buffer)] for name, buffer in buffers.items() if first[id(buffer)] in told}
    return aliases | {name: name for name in left_out if name not in aliases}, kept_buffers, left_out


def _persistent_buffers(module: nn.Module) -> list[Tensor]:
    parts = ((part, part._non_persistent_buffers_set) for part in module.modules())
    return [buffer for part, passing in parts for name, buffer in part.named_buffers(recurse=False) if name not in passing]


def _broadcast(module: nn.Module, mesh: Mesh, device: torch.device) -> None:
    """Rank 0's parameters and buffers on every rank; through the communication device, wherever the module stands now."""
    for tensor in (*module.parameters(), *module.buffers()):
        staged = tensor.detach().to(device).contiguous()
        mesh.world.broadcast(staged)
        if staged.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(staged)
