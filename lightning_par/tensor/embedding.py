"""Vocabulary-parallel embedding (Megatron-LM, arXiv 1909.08053, section 3).

Each rank holds some rows. A token whose row is elsewhere gives zero here; the sum over the ranks is the whole lookup. All ranks of the
group must call, with the same ids.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_par.comm import reduce_from
from lightning_par.layout import Span
from lightning_par.tensor.in_place import Sharding


class VocabParallelEmbedding(nn.Embedding):
    """Ids [...] -> [..., D] from weight [V/tp, D]. Forward: all-reduce; backward: nothing (rows get their gradient where they are)."""

    sharding: Sharding

    @override
    def forward(self, input: Tensor) -> Tensor:
        rows = self.sharding.span
        elsewhere = _held_elsewhere(input, rows, self.sharding.total)
        local = (input - rows.start).masked_fill(elsewhere, 0)
        vectors = F.embedding(local, self.weight, _local_index(self.padding_idx, rows))
        return reduce_from(vectors.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.sharding.group)

    @override
    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rows {self.sharding}"


def _held_elsewhere(ids: Tensor, rows: Span, total: int) -> Tensor:
    """Where an id is another rank's. An id outside the vocabulary is nobody's: it stays, and fails the lookup as it does anywhere."""
    return ((ids >= 0) & (ids < rows.start)) | ((ids >= rows.stop) & (ids < total))


def _local_index(row: int | None, rows: Span) -> int | None:
    return row - rows.start if row is not None and rows.start <= row < rows.stop else None
