"""Zigzag: how a sequence is cut over the ranks of a context-parallel group, and which parts of it attend to which.

Note [Zigzag without padding]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The sequence is cut into 2 · size pieces and rank i holds pieces i and 2 · size - 1 - i, one early and one late, back to back. Under
causal attention every rank then has the same work at every step of the ring; with pieces in plain order the last rank would have
size times the work of the first. For three ranks, queries of rank 1 (pieces 1 and 4) against the keys of each rank::

                  keys of rank 0    keys of rank 1    keys of rank 2
                  piece 0 piece 5   piece 1 piece 4   piece 2 piece 3
        piece 1     all     .       causal    .         .       .
        piece 4     all     .         all   causal     all     all

So each block is one rectangle, or a causal square on the diagonal.

Pieces differ by at most one token (``layout.split``) and may be empty, so every length of at least ``size`` tokens works, and no padding
token exists that attention, positions or the loss would have to know of. The tokens of a rank stay in the order of their positions.

The balanced order is due to Striped Attention (arXiv 2311.09431) and the zigzag variant of it used for Llama 3 (arXiv 2407.21783,
section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_par.layout import Span, split


@dataclass(frozen=True, slots=True)
class Tile:
    """A rectangle of attention within one block: which of my queries attend to which of the block's keys, in local indices.

    A causal tile is a square on the diagonal: query t sees keys 0 to t.
    """

    queries: Span
    keys: Span
    causal: bool = False


@dataclass(frozen=True, slots=True)
class Zigzag:
    """The cut of ``total`` tokens over ``size`` ranks. See Note [Zigzag without padding]."""

    total: int
    size: int

    def pieces(self, index: int) -> tuple[Span, Span]:
        """The two pieces of the sequence that the rank at ``index`` holds."""
        spans = split(self.total, 2 * self.size)
        return spans[index], spans[2 * self.size - 1 - index]

    def tokens(self, index: int) -> int:
        """How many tokens the rank at ``index`` holds."""
        return sum(piece.size for piece in self.pieces(index))

    def indices(self, index: int) -> Tensor:
        """The global positions of the tokens of the rank at ``index``, [tokens], ascending."""
        return torch.cat([torch.arange(*piece) for piece in self.pieces(index)])

    def cut(self, tensor: Tensor, dim: int, index: int) -> Tensor:
        """The part of ``tensor`` (whole along ``dim``) that the rank at ``index`` holds; a contiguous copy."""
        return torch.cat([tensor.narrow(dim, piece.start, piece.size) for piece in self.pieces(index)], dim)

    def join(self, shards: Sequence[Tensor], dim: int) -> Tensor:
        """The inverse of ``cut``: the whole tensor from every rank's shard, given in index order."""
        sizes = [[piece.size for piece in self.pieces(index)] for index in range(self.size)]
        early, late = zip(*(shard.split(size, dim) for shard, size in zip(shards, sizes, strict=True)), strict=True)
        return torch.cat([*early, *reversed(late)], dim)

    def tiles(self, mine: int, theirs: int, *, causal: bool) -> list[Tile]:
        """What the queries of rank ``mine`` compute against the keys of rank ``theirs``: one tile, or none if it would be empty."""
        queries, keys = Span(0, self.tokens(mine)), Span(0, self.tokens(theirs))
        if causal and theirs < mine:
            keys = Span(0, self.pieces(theirs)[0].size)
        elif causal and theirs > mine:
            queries = Span(self.pieces(mine)[0].size, queries.stop)
        tile = Tile(queries, keys, causal and mine == theirs)
        return [tile] if queries.size and keys.size else []
