"""shard_module: apply a plan in place, and say what each rank holds now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_par.comm import Group
from lightning_par.layout import ShardSpec, split
from lightning_par.tensor.checks import violations
from lightning_par.tensor.in_place import Sharding, convert
from lightning_par.tensor.plan import PlanError, parameter_owners, resolve_plan, with_ties
from lightning_par.tensor.styles import STYLES


@dataclass(frozen=True)
class TensorShards:
    """What a rank holds of a module that is sharded over tp; plain data, for the other levels.

    Attributes:
        plan: from module names to words, as applied.
        specs: for every parameter, by its first name in ``named_parameters()``, the part that is here; whole if it is not cut.
        partial: names of whole parameters whose gradient is, on each rank, one term of a sum over tp.
    """

    plan: dict[str, str]
    specs: dict[str, ShardSpec]
    partial: frozenset[str]


def shard_module(module: nn.Module, group: Group, *, plan: Mapping[str, str] | None = None) -> TensorShards:
    """Shard ``module`` over ``group`` by ``plan``, in place. All ranks of the group must call, each with the same full weights.

    Modules keep their identity, name and hooks; parameters keep theirs too (only their data shrinks), so ties, references of an
    optimizer, ``requires_grad``, dtype and device stay. Nothing is changed if an error is raised.

    Args:
        plan: patterns to words, relative to ``module``; None = the plans found in it, see ``resolve_plan``.

    Raises:
        PlanError: with every reason why the plan cannot be applied, or ranks whose weights differ.
    """
    resolved = with_ties(module, resolve_plan(module, plan))
    if reasons := violations(module, resolved, group.size) or _different_weights(module, group):
        raise PlanError(reasons)
    shards = plan_shards(module, resolved, group.size, group.index)
    sharding = {name: _sharding(module.get_submodule(name), word, group) for name, word in resolved.items() if STYLES[word].parallel}
    for name, parameter in module.named_parameters():
        if not shards.specs[name].is_whole:
            _keep_part(parameter, shards.specs[name])
    for name, handle in sharding.items():
        style = STYLES[resolved[name]]
        convert(module.get_submodule(name), style.base, style.parallel, handle)
    return shards


def plan_shards(module: nn.Module, plan: Mapping[str, str], size: int, index: int) -> TensorShards:
    """What the rank at ``index`` of ``size`` will hold of the still whole ``module`` under a resolved plan. No communication."""
    specs, partial = {}, set()
    parameters = dict(module.named_parameters())
    for name, owners in parameter_owners(module).items():
        specs[name] = ShardSpec.whole(parameters[name])
        owner, key = owners[0]  # the others agree: checked
        style = STYLES[plan.get(owner, "replicate")]
        if key in style.cut:
            dim = style.cut[key]
            specs[name] = specs[name].narrow(dim, (split(parameters[name].shape[dim], size)[index],))
        elif style.partial:
            partial.add(name)
    return TensorShards(dict(plan), specs, frozenset(partial))


def _sharding(module: nn.Module, word: str, group: Group) -> Sharding:
    return Sharding(group, total=module.weight.shape[STYLES[word].cut["weight"]])


def _keep_part(parameter: nn.Parameter, spec: ShardSpec) -> None:
    """Shrink a parameter to its block, in memory of its own: the whole is freed with its last user."""
    parameter.grad = None
    parameter.data = _block(parameter.data, spec)


def _block(whole: Tensor, spec: ShardSpec) -> Tensor:
    for dim, spans in enumerate(spec.dims):
        if sum(span.size for span in spans) < spec.shape[dim]:
            whole = torch.cat([whole.narrow(dim, span.start, span.size) for span in spans], dim)
    return whole


def _different_weights(module: nn.Module, group: Group) -> list[str]:
    """The parameters that are not the same on every rank, as far as their sums tell."""
    mine = {name: _fingerprint(parameter) for name, parameter in module.named_parameters()}
    everyone = group.gather_objects(mine)
    names = dict.fromkeys(name for prints in everyone for name in prints)
    return [
        f"{name}: differs from rank to rank ({' / '.join(str(prints.get(name, 'missing')) for prints in everyone)}); "
        "seed every rank alike, or load the same weights"
        for name in names
        if len({prints.get(name) for prints in everyone}) > 1
    ]


def _fingerprint(parameter: Tensor) -> str:
    total = "on meta" if parameter.is_meta else f"sum {parameter.detach().sum(dtype=torch.float64).item():.17g}"
    return f"{tuple(parameter.shape)}, {total}"
