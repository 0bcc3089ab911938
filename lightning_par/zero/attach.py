"""What parameters and an optimizer must be, and what becomes of it, when a rank gives it shards in place of parameters."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_par.layout import ShardSpec
from lightning_par.zero.elementwise import is_elementwise, needs_whole_model
from lightning_par.zero.groups import ReduceGroups
from lightning_par.zero.options import STAGES
from lightning_par.zero.plan import ParameterInfo


def require_fitting(optimizer: Optimizer, stage: int, groups: ReduceGroups, *, cut_by_tp: Sequence[str], cut_into_spans: bool) -> None:
    """Refuse an optimizer that computes with more than the layout leaves on a rank.

    Args:
        cut_by_tp: names of parameters of which tensor parallelism leaves a part here.
        cut_into_spans: some of its parameters are cut into flat spans over the data ranks.

    Raises:
        ValueError: what it needs, and what to use.
    """
    name, tp, pp = type(optimizer).__name__, groups.tp.size, groups.pp.size
    if needs_whole_model(optimizer) and STAGES[stage].shards_optimizer:
        raise ValueError(
            f"{name} computes with all parameters at once, but with zero={stage} a rank's optimizer has only a part of them: use zero=0"
        )
    if needs_whole_model(optimizer) and tp * pp > 1:
        raise ValueError(
            f"{name} computes with all parameters at once, but with tp={tp}, pp={pp} a rank has only a part of them: use tp=1 and pp=1"
        )
    if is_elementwise(optimizer):
        return
    if cut_by_tp:
        raise ValueError(
            f"{name} is not known to work element by element, but tp={tp} leaves a rank only a part of {cut_by_tp[0]}"
            f"{' and others' if cut_by_tp[1:] else ''}: use it with tp=1, or give it only parameters that tp does not cut"
        )
    if cut_into_spans:
        raise ValueError(
            f"zero={stage} cuts these parameters into flat spans, but {name} is not known to work element by element, so it needs them "
            "whole (matrices, or statistics over a tensor): use zero=1 or zero=2, which give each rank whole parameters"
        )


def refuse_new_groups(optimizer: Optimizer, groups: int) -> None:
    """Refuse param groups that were added since there were ``groups`` of them."""
    if len(optimizer.param_groups) != groups:
        raise RuntimeError(
            f"{type(optimizer).__name__} had {groups} param groups when training started and has {len(optimizer.param_groups)} now, but "
            "gradients are laid out when training starts: give configure_optimizers all groups from the start (with lr=0, or frozen until "
            "a second fit)"
        )


def refuse_common_memory(infos: Sequence[ParameterInfo]) -> None:
    """Refuse parameters that are one memory under two objects: moved into a bucket they would be two."""
    seen: dict[int, str] = {}
    for info in infos:
        with torch._C.DisableTorchFunctionSubclass():
            address = info.param.data_ptr() if info.param.numel() else 0
        if address and seen.setdefault(address, info.name) != info.name:
            raise ValueError(
                f"{seen[address]} and {info.name} are two parameters over one memory, which sharding would part: tie them by assigning the "
                "parameter itself, module.b.weight = module.a.weight, or use zero=0"
            )


def refuse_sparse(module: nn.Module, infos: Sequence[ParameterInfo]) -> None:
    """Refuse layers whose gradients are sparse, for which buckets have no place."""
    trained = {info.param for info in infos if info.param.requires_grad}
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse and layer.weight in trained:
            raise ValueError(f"{name or type(layer).__name__} has sparse=True, but gradients are averaged as dense ones: use sparse=False")


def cut_state(optimizer: Optimizer, shards: Mapping[nn.Parameter, Sequence[nn.Parameter]], specs: Mapping[nn.Parameter, ShardSpec]) -> None:
    """What the optimizer's state holds of whole parameters already (Adagrad starts with some) becomes that of its shards."""
    for param in [param for param in optimizer.state if param in shards]:
        state = optimizer.state.pop(param)
        for part in shards[param]:
            span = specs[part].span.slice()
            optimizer.state[part] = {
                key: value.reshape(-1)[span].to(part.dtype if value.is_floating_point() else value.dtype, copy=True).view(part.shape)
                if isinstance(value, Tensor) and value.shape == param.shape
                else copy.deepcopy(value)
                for key, value in state.items()
            }
