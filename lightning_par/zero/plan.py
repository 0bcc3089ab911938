"""Which parameter lies where in which bucket, as plain data.

Note [One flat layout]
~~~~~~~~~~~~~~~~~~~~~~
Parameters of one kind lie back to back in flat buckets, in reverse order of registration (gradients come about in that order). A
bucket is padded so that every data rank's span of it is equally long. Gradients, and at stage 1 parameters, are views into it::

    bucket  | weight 3 | bias 2 |    weight 1    | pad |
    rank 0  |~~~~~~~~~~~~~~~~~~~|
    rank 1                      |~~~~~~~~~~~~~~~~~~~~~~|

Kinds are kept apart because their reductions differ: dtype, the pipeline stages that hold the weight (a tied one is summed over them),
and whether tensor-parallel ranks each hold only a part of its gradient. Tied weights come last, so that no stage waits for another
one before its own buckets are on their way, and alone, so that every stage that holds them cuts them into the same spans.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from lightning_par.layout import ShardSpec, Span


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


@dataclass(frozen=True)
class Slot:
    """A parameter's place in its bucket."""

    info: ParameterInfo
    span: Span


@dataclass(frozen=True)
class BucketPlan:
    """Slots back to back, and the padded size, a multiple of the number of data ranks. See Note [One flat layout]."""

    slots: tuple[Slot, ...]
    size: int
    dtype: torch.dtype
    stages: tuple[int, ...]
    partial: bool

    def owned(self, ranks: int, index: int) -> Span:
        """The span of the data rank at ``index``."""
        share = self.size // ranks
        return Span(index * share, (index + 1) * share)

    def __str__(self) -> str:
        slots = ", ".join(f"{slot.info.name}[{slot.span.start}:{slot.span.stop}]" for slot in self.slots)
        return f"{self.size} x {self.dtype}: {slots}"


def plan_buckets(infos: Iterable[ParameterInfo], ranks: int, bucket_bytes: int) -> list[BucketPlan]:
    """Lay trainable parameters out for ``ranks`` data ranks, starting a new bucket once one holds ``bucket_bytes``."""
    kinds: dict[tuple[torch.dtype, tuple[int, ...], bool], list[ParameterInfo]] = {}
    for info in reversed([info for info in infos if info.param.requires_grad]):
        stages = info.stages if len(info.stages) > 1 else ()
        kinds.setdefault((info.param.dtype, stages, info.partial), []).append(info)
    plans = []
    for (dtype, stages, partial), members in sorted(kinds.items(), key=lambda kind: (len(kind[0][1]), kind[0][1])):
        if stages:  # every stage must find the same order, whatever its own modules are
            members = sorted(members, key=lambda info: info.name)
        for chunk in _chunks(members, bucket_bytes // dtype.itemsize):
            plans.append(_pack(chunk, ranks, dtype, stages, partial))
    return plans


def _chunks(members: list[ParameterInfo], limit: int) -> Iterator[list[ParameterInfo]]:
    chunk: list[ParameterInfo] = []
    for info in members:
        chunk.append(info)
        if sum(member.param.numel() for member in chunk) >= limit:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _pack(members: list[ParameterInfo], ranks: int, dtype: torch.dtype, stages: tuple[int, ...], partial: bool) -> BucketPlan:
    slots, end = [], 0
    for info in members:
        slots.append(Slot(info, Span(end, end + info.param.numel())))
        end = slots[-1].span.stop
    return BucketPlan(tuple(slots), -(-end // ranks) * ranks, dtype, stages, partial)
