"""A debug check: ranks that should hold equal values do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_par.comm import Group
from lightning_par.zero.groups import ReduceGroups

Named = tuple[str, Tensor]


def check_replicas(groups: ReduceGroups, whole: Sequence[Named], shards: Sequence[Named], over_tp: Sequence[Named]) -> None:
    """Compare one checksum a tensor, bit for bit. All ranks call.

    Args:
        whole: what all data ranks hold alike.
        shards: what only the ranks of ``groups.replicate`` hold alike.
        over_tp: what the ranks of ``groups.tp`` hold alike.

    Raises:
        RuntimeError: on every rank, naming every tensor and rank that differ from the first rank of their group.
    """
    faults = [
        *_differing(whole, groups.data),
        *_differing(shards, groups.replicate),
        *_differing(over_tp, groups.tp),
    ]
    for group in (groups.data, groups.tp, groups.pp):
        faults = [fault for theirs in group.gather_objects(faults) for fault in theirs]
    if faults:
        raise RuntimeError(f"replicas have drifted apart: {'; '.join(dict.fromkeys(faults))}")


def _differing(tensors: Sequence[Named], group: Group) -> list[str]:
    everyone = group.gather_objects(_checksums(tensors))
    return [
        f"{name} on rank {rank} is not that of rank {group.ranks[0]}"
        for rank, theirs in zip(group.ranks, everyone, strict=True)
        for name, mine, first in zip((name for name, _ in tensors), theirs, everyone[0], strict=True)
        if mine != first
    ]


def _checksums(tensors: Sequence[Named]) -> list[int]:
    """The sum of all bits, read as whole numbers."""
    whole_number = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [t.detach().contiguous().view(-1).view(whole_number[t.element_size()]).sum(dtype=torch.int64) for _, t in tensors]
    return torch.stack(sums).tolist() if sums else []
