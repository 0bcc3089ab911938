"""Whole tensors on rank 0, from the parts that all ranks hold."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_par.checkpoint.shard import Shard
from lightning_par.comm import Group, Message, exchange
from lightning_par.layout import ShardSpec


def collect(shards: Mapping[str, Shard], world: Group, device: torch.device) -> dict[str, Tensor] | None:
    """Every tensor whole, on CPU, on rank 0; None elsewhere. All ranks call.

    Parts travel to rank 0 one tensor at a time, so that its device needs room for one.
    """
    mine = {name: shard.spec for name, shard in shards.items() if shard.writes and shard.spec.span.size}
    held = world.gather_objects(mine)
    shapes = world.gather_objects({name: (shard.spec.shape, shard.spec.dtype) for name, shard in shards.items()})
    whole: dict[str, Tensor] = {}
    for name, (shape, dtype) in {name: entry for rank in shapes for name, entry in rank.items()}.items():
        parts = {rank: specs[name] for rank, specs in enumerate(held) if name in specs}
        if world.index == 0:
            whole[name] = _receive(name, parts, shards, torch.empty(shape, dtype=dtype), world, device)
        elif world.index in parts:
            data = shards[name].data.detach().reshape(-1).to(device).contiguous()
            exchange(world, [Message(data, 0)], []).wait()
    return whole if world.index == 0 else None


def _receive(
    name: str, parts: Mapping[int, ShardSpec], shards: Mapping[str, Shard], whole: Tensor, world: Group, device: torch.device
) -> Tensor:
    for rank, spec in parts.items():
        if rank == 0:
            flat = shards[name].data.detach().reshape(-1).cpu()
        else:
            received = torch.empty(spec.span.size, dtype=spec.dtype, device=device)
            exchange(world, [], [Message(received, rank)]).wait()
            flat = received.cpu()
        for box in spec.boxes():
            where = tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))
            whole[where] = box.view(flat)
    return whole
