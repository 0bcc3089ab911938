"""Which parameter lies where in which bucket, as plain data.

Note [One flat layout]
~~~~~~~~~~~~~~~~~~~~~~
Parameters of one kind lie back to back in flat buckets, in reverse order of registration (gradients come about in that order). A
bucket is padded so that every sharding rank's span of it is equally long. Gradients, and from stage 1 on values, are views into it::

    bucket  | weight 3 | bias 2 |    weight 1    | pad |
    rank 0  |~~~~~~~~~~~~~~~~~~~|
    rank 1                      |~~~~~~~~~~~~~~~~~~~~~~|

Optimizers that need whole parameters get them: there no parameter crosses from one span into the next, and spans are as long as the
fullest::

    bucket  |    weight 1    | pad | weight 3 | bias 2 |
    rank 0  |~~~~~~~~~~~~~~~~~~~~~~|
    rank 1                         |~~~~~~~~~~~~~~~~~~~|

Kinds are kept apart because they are treated differently: dtype; unit (stage 3); whether the optimizer needs whole parameters; whether they
are trained (frozen ones have buckets at stage 3 only); the pipeline stages that hold the weight (a tied one is summed over them);
whether tensor-parallel ranks each hold only a part of its gradient. Tied weights come last, so that no stage waits for another
one before its own buckets are on their way, and alone, so that every stage that holds them cuts them into the same spans.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from lightning_par.layout import ShardSpec, Span

LEAST_BUCKET = 2**20
"""Bytes below which cutting a model into several buckets costs more than it hides."""


@dataclass(frozen=True)
class ParameterInfo:
    """A parameter of this rank and what the other levels know of it.

    Attributes:
        name: its name in the user's unsplit module (the first, if tied).
        param: this rank's block of it.
        spec: which block of the whole that is.
        stages: the pipeline indices that hold it, more than one for a weight tied across stages.
        partial: its gradient must be summed over tp (it is replicated, but each tp rank sees only a part of its use).
        counted: this rank counts it in the gradient norm.
    """

    name: str
    param: nn.Parameter
    spec: ShardSpec
    stages: tuple[int, ...] = ()
    partial: bool = False
    counted: bool = True


class Kind(NamedTuple):
    """What the members of a bucket have in common; see Note [One flat layout]. Tied weights sort last."""

    stages: tuple[int, ...]
    unit: int
    whole: bool
    trained: bool
    partial: bool
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Slot:
    """A parameter's place in its bucket."""

    info: ParameterInfo
    span: Span


@dataclass(frozen=True, eq=False)
class BucketPlan:
    """Slots in order of their span, and the padded size, a multiple of the number of sharding ranks. See Note [One flat layout]."""

    kind: Kind
    slots: tuple[Slot, ...]
    size: int

    def owned(self, ranks: int, index: int) -> Span:
        """The span of the sharding rank at ``index``."""
        share = self.size // ranks
        return Span(index * share, (index + 1) * share)

    def __str__(self) -> str:
        slots = ", ".join(f"{slot.info.name}[{slot.span.start}:{slot.span.stop}]" for slot in self.slots)
        return f"{self.size} x {self.kind.dtype}: {slots}"


def plan_buckets(
    infos: Iterable[ParameterInfo],
    ranks: int,
    bucket_bytes: int,
    *,
    units: Mapping[nn.Parameter, int] | None = None,
    whole: frozenset[nn.Parameter] = frozenset(),
) -> list[BucketPlan]:
    """Lay parameters out for ``ranks`` sharding ranks, starting a new bucket once one holds ``bucket_bytes`` of gradients.

    Args:
        units: stage 3: the unit of each parameter; a unit is laid out together, frozen parameters included, the last unit first.
        whole: parameters whose optimizer needs them whole.
    """
    kinds: dict[Kind, list[ParameterInfo]] = {}
    for info in reversed(list(infos)):
        param = info.param
        if param.requires_grad or units is not None:
            stages = info.stages if len(info.stages) > 1 else ()
            unit = -units[param] if units is not None else 0
            kind = Kind(stages, unit, param in whole, param.requires_grad, info.partial, param.dtype)
            kinds.setdefault(kind, []).append(info)
    plans = []
    for kind, members in sorted(kinds.items(), key=lambda item: (len(item[0].stages), *item[0][:-1])):
        if kind.stages:  # every stage must find the same order, whatever its own modules are
            members = sorted(members, key=lambda info: info.name)
        itemsize = max(kind.dtype.itemsize, 4)  # of gradients
        limit = _small_enough(members, bucket_bytes // itemsize, itemsize) if ranks == 1 else bucket_bytes // itemsize
        for chunk in _chunks(members, limit) if units is None else [members]:
            plans.append(_pack_whole(chunk, ranks, kind) if kind.whole else _pack(chunk, ranks, kind))
    return plans


def _small_enough(members: list[ParameterInfo], limit: int, itemsize: int) -> int:
    """Where there is too little for four buckets, smaller ones (of a MiB at least), since the last cannot hide behind backward.

    Not where gradients are cut: there more messages cost more than that.
    """
    return min(limit, max(sum(info.param.numel() for info in members) // 4, LEAST_BUCKET // itemsize))


def _chunks(members: list[ParameterInfo], limit: int) -> Iterator[list[ParameterInfo]]:
    chunk: list[ParameterInfo] = []
    elements = 0
    for info in members:
        chunk.append(info)
        elements += info.param.numel()
        if elements >= limit:
            yield chunk
            chunk, elements = [], 0
    if chunk:
        yield chunk


def _pack(members: list[ParameterInfo], ranks: int, kind: Kind) -> BucketPlan:
    slots, end = [], 0
    for info in members:
        slots.append(Slot(info, Span(end, end + info.param.numel())))
        end = slots[-1].span.stop
    return BucketPlan(kind, tuple(slots), -(-end // ranks) * ranks)


def _pack_whole(members: list[ParameterInfo], ranks: int, kind: Kind) -> BucketPlan:
    """Biggest first, each to the rank that has least so far."""
    loads: list[list[ParameterInfo]] = [[] for _ in range(ranks)]
    filled = [0] * ranks
    for info in sorted(members, key=lambda info: -info.param.numel()):
        rank = min(range(ranks), key=filled.__getitem__)
        loads[rank].append(info)
        filled[rank] += info.param.numel()
    share, slots = max(filled), []
    for rank, load in enumerate(loads):
        end = rank * share
        for info in load:
            slots.append(Slot(info, Span(end, end + info.param.numel())))
            end = slots[-1].span.stop
    return BucketPlan(kind, tuple(slots), share * ranks)
