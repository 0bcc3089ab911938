"""ShardSpec: which part of a whole tensor a rank holds.

Note [Boxes of a shard]
~~~~~~~~~~~~~~~~~~~~~~~
Tensor parallelism cuts a tensor into a *block*: per dim one span of the whole, or several (a fused QKV weight gives each
rank a part of Q, a part of K and a part of V, back to back). ZeRO then keeps a flat *span* of that block, in row-major order.
Checkpoint formats speak of boxes (offsets and sizes in the whole tensor), so a shard must be told as boxes::

    whole [4, 6], block rows 2:4, span 4:11 of the block's 12 elements:

        . . . . . .
        . . . . . .
        . . . . A A        boxes  A: offsets (2, 4) sizes (1, 2)
        B B B B B .               B: offsets (3, 0) sizes (1, 5)

A span of an n-dim block is at most 2n - 1 boxes of the block (a ragged head, full rows, a ragged tail, per dim); each is cut
again where it crosses from one span of the whole to the next. Each box is a strided view of the rank's flat data: no copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from lightning_par.layout.span import Span


@dataclass(frozen=True, slots=True)
class Box:
    """One rectangular part of the whole tensor, and where it lies in the rank's flat data."""

    offsets: tuple[int, ...]  # in the whole tensor, one per dim
    sizes: tuple[int, ...]
    start: int  # of the first element, in the rank's flat data
    strides: tuple[int, ...]  # in the rank's flat data

    def view(self, flat: Tensor) -> Tensor:
        """This box of ``flat`` (contiguous, ``ShardSpec.span.size`` elements) as a view with shape ``sizes``."""
        return flat.as_strided(self.sizes, self.strides, flat.storage_offset() + self.start)


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """A rank's part of one tensor: the whole shape, the spans it takes of each dim, and its flat span of that block."""

    shape: tuple[int, ...]
    dims: tuple[tuple[Span, ...], ...]
    span: Span
    dtype: torch.dtype

    @classmethod
    def whole(cls, tensor: Tensor) -> ShardSpec:
        """The spec of a rank that holds all of ``tensor``."""
        dims = tuple((Span(0, size),) for size in tensor.shape)
        return cls(tuple(tensor.shape), dims, Span(0, tensor.numel()), tensor.dtype)

    @property
    def block_shape(self) -> tuple[int, ...]:
        """The shape of the block that tensor parallelism leaves on this rank, before the flat span is taken."""
        return tuple(sum(span.size for span in spans) for spans in self.dims)

    @property
    def is_whole(self) -> bool:
        return self.block_shape == self.shape and self.span.size == math.prod(self.shape)

    def narrow(self, dim: int, spans: tuple[Span, ...]) -> ShardSpec:
        """The spec of the rank that keeps only ``spans`` (in the whole's indices) of a dim which was whole so far."""
        if self.dims[dim] != (Span(0, self.shape[dim]),) or self.span.size != math.prod(self.block_shape):
            raise ValueError(f"dim {dim} of {self} is cut already")
        dims = (*self.dims[:dim], spans, *self.dims[dim + 1 :])
        numel = math.prod(sum(span.size for span in spans_of_dim) for spans_of_dim in dims)
        return ShardSpec(self.shape, dims, Span(0, numel), self.dtype)

    def flat(self, span: Span) -> ShardSpec:
        """The spec of the rank that keeps only the flat ``span`` of this block."""
        return ShardSpec(self.shape, self.dims, span, self.dtype)

    def like(self, dtype: torch.dtype) -> ShardSpec:
        """The same part of a tensor of another dtype (an optimizer state of this parameter)."""
        return ShardSpec(self.shape, self.dims, self.span, dtype)

    def boxes(self) -> list[Box]:
        """This shard as boxes of the whole tensor; of a tensor without elements one empty box. See Note [Boxes of a shard]."""
        block = self.block_shape
        strides = _row_major(block)
        if 0 in self.shape:
            return [Box((0,) * len(self.shape), self.shape, 0, strides)]
        return [
            Box(whole, sizes, sum(o * s for o, s in zip(local, strides, strict=True)) - self.span.start, strides)
            for offsets, extent in _flat_boxes(block, self.span)
            for whole, local, sizes in self._cut(offsets, extent)
        ]

    def _cut(self, offsets: tuple[int, ...], extent: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
        """Cut a box of the block where a dim crosses from one of its spans to the next: (whole offsets, block offsets, sizes)."""
        per_dim = []
        for offset, size, spans in zip(offsets, extent, self.dims, strict=True):
            pieces, begin = [], 0
            for span in spans:
                part = Span(offset, offset + size).intersect(Span(begin, begin + span.size))
                if part.size:
                    pieces.append((span.start + part.start - begin, part.start, part.size))
                begin += span.size
            per_dim.append(pieces)
        for combination in product(*per_dim):
            yield tuple(tuple(piece[i] for piece in combination) for i in range(3))


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _flat_boxes(shape: tuple[int, ...], span: Span) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The boxes (offsets, sizes) that cover the flat ``span`` of a row-major block of ``shape``, in order."""
    if span.size == 0:
        return []
    if not shape:
        return [((), ())]
    row = math.prod(shape[1:])
    first, last = span.start // row, (span.stop - 1) // row
    full = Span(-(-span.start // row), span.stop // row)
    if full.size <= 0 and first == last:
        return _in_row(shape, first, span)
    boxes = []
    if full.start != first:
        boxes += _in_row(shape, first, Span(span.start, full.start * row))
    if full.size > 0:
        boxes.append(((full.start, *(0 for _ in shape[1:])), (full.size, *shape[1:])))
    if full.stop == last:
        boxes += _in_row(shape, last, Span(full.stop * row, span.stop))
    return boxes


def _in_row(shape: tuple[int, ...], index: int, span: Span) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    row = math.prod(shape[1:])
    inner = _flat_boxes(shape[1:], span.shift(-index * row))
    return [((index, *offsets), (1, *sizes)) for offsets, sizes in inner]
