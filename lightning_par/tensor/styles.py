"""The words of a plan, and what each does to a module. They are Hugging Face's, with their meaning (transformers 5).

What a plan does not name is replicated: each rank holds it whole, computes the same and has the same gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from lightning_par.tensor.embedding import VocabParallelEmbedding
from lightning_par.tensor.linear import (
    ColumnParallelLinear,
    GatheredColumnParallelLinear,
    RowParallelLinear,
    SplitInputRowParallelLinear,
)


@dataclass(frozen=True)
class Style:
    """What one word does.

    Attributes:
        base: the kind of module it is for.
        parallel: what such a module becomes; None if it stays as it is.
        cut: for each parameter that is cut, along which dim; the others stay whole.
        partial: whether the whole parameters' gradients are only one term of a sum over the ranks.
    """

    base: type[nn.Module]
    parallel: type[nn.Module] | None = None
    cut: Mapping[str, int] = field(default_factory=dict)
    partial: bool = False


STYLES: Mapping[str, Style] = {
    "colwise": Style(nn.Linear, ColumnParallelLinear, {"weight": 0, "bias": 0}),
    "colwise_gather_output": Style(nn.Linear, GatheredColumnParallelLinear, {"weight": 0, "bias": 0}),
    "rowwise": Style(nn.Linear, RowParallelLinear, {"weight": 1}),
    "rowwise_split_input": Style(nn.Linear, SplitInputRowParallelLinear, {"weight": 1}),
    "embedding_rowwise": Style(nn.Embedding, VocabParallelEmbedding, {"weight": 0}),
    "replicated_with_grad_allreduce": Style(nn.Module, partial=True),
    "replicate": Style(nn.Module),
}

ALIASES: Mapping[str, str] = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}
"""Older spellings."""
