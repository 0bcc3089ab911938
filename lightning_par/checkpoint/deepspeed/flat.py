"""Where the elements of a parameter lie in the flat tensors of DeepSpeed's ranks, as plain data.

Note [Two rules]
~~~~~~~~~~~~~~~~
Stages 1 and 2 (runtime/zero/stage_1_and_2.py; BF16_Optimizer too): the parameters of a group one after the other, zeros up to a multiple
of 2 · ranks, cut into equal parts::

    group   | a             | b       | c      |0 0|
    rank 0  |~~~~~~~~~~~~~~~~~~~|
    rank 1                      |~~~~~~~~~~~~~~~~~~~|

Stage 3 (runtime/zero/partition_parameters.py): every parameter is cut for itself into parts of ceil(numel / ranks) elements, the last ones
padded with anything; a rank has its parts one after the other::

    rank 0  | a | b | c |          a, b, c: the first half each
    rank 1  | a | b?| c?|          ?: ends in padding
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_par.layout import Span

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of one parameter, in the flat tensor that ``rank`` has of ``group``."""

    rank: int
    group: int
    span: Span


@dataclass(frozen=True)
class Flat:
    """All pieces of each parameter, in order, and the length of each group's flat tensor on one rank (the same on all)."""

    ranks: int
    groups: tuple[Shapes, ...]
    pieces: dict[str, tuple[Piece, ...]]
    sizes: tuple[int, ...]

    def read(self, name: str, flats: Callable[[int, int], Tensor]) -> Tensor:
        """The whole parameter, from the flat tensors ``flats(rank, group)``."""
        pieces = self.pieces[name]
        parts = [flats(piece.rank, piece.group)[piece.span.slice()] for piece in pieces]
        return torch.cat(parts).view(tuple(self.groups[pieces[0].group][name]))

    def write(self, name: str, whole: Tensor, flats: Callable[[int, int], Tensor]) -> None:
        """The inverse."""
        elements, start = whole.reshape(-1), 0
        for piece in self.pieces[name]:
            flats(piece.rank, piece.group)[piece.span.slice()] = elements[start : start + piece.span.size]
            start += piece.span.size

    def on(self, rank: int, group: int) -> Iterator[tuple[str, Span]]:
        """The parameters in one flat tensor."""
        for name in self.groups[group]:
            for piece in self.pieces[name]:
                if piece.rank == rank:
                    yield name, piece.span

    def padding(self, rank: int, group: int) -> int:
        """Elements at the end of a flat tensor of stages 1 and 2 that belong to no parameter."""
        return self.sizes[group] - max((span.stop for _, span in self.on(rank, group)), default=0)


def contiguous(groups: Sequence[Shapes], ranks: int) -> Flat:
    """Stages 1 and 2. See Note [Two rules]."""
    pieces, sizes = {}, []
    for group, shapes in enumerate(groups):
        total = sum(map(math.prod, shapes.values()))
        size = -(-total // (2 * ranks)) * 2
        sizes.append(size)
        start = 0
        for name, shape in shapes.items():
            mine = Span(start, start + math.prod(shape))
            cuts = ((rank, mine.intersect(Span(rank * size, (rank + 1) * size))) for rank in range(ranks))
            pieces[name] = tuple(Piece(rank, group, part.shift(-rank * size)) for rank, part in cuts if part.size)
            start = mine.stop
    return Flat(ranks, tuple(groups), pieces, tuple(sizes))


def by_parameter(groups: Sequence[Shapes], ranks: int) -> Flat:
    """Stage 3. See Note [Two rules]."""
    pieces, sizes = {}, []
    for group, shapes in enumerate(groups):
        start = 0
        for name, shape in shapes.items():
            numel = math.prod(shape)
            part = -(-numel // ranks)
            cuts = ((rank, Span(rank * part, (rank + 1) * part).intersect(Span(0, numel))) for rank in range(ranks))
            pieces[name] = tuple(Piece(rank, group, cut.shift(start - rank * part)) for rank, cut in cuts if cut.size)
            start += part
        sizes.append(start)
    return Flat(ranks, tuple(groups), pieces, tuple(sizes))


def of_stage(stage: int, groups: Sequence[Shapes], ranks: int) -> Flat:
    return by_parameter(groups, ranks) if stage == 3 else contiguous(groups, ranks)
