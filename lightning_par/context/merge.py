"""Merge of attention over parts of the keys, by log-sum-exp.

Shape letters: B batch, H query heads, T query tokens, F width of a value head.

Note [Merging by log-sum-exp]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Attention over keys A and keys B are averages of values with softmax weights, each with its own denominator; with
l = log(denominator), the average over both is

    out = (exp(l_A) out_A + exp(l_B) out_B) / (exp(l_A) + exp(l_B)),    l = log(exp(l_A) + exp(l_B)).

Exponents are taken relative to the greater of the two, so nothing overflows. Keys that a query does not see at all have l = -inf and
out = 0, and weigh nothing; a query that has seen no key yet stays at l = -inf, out = 0 rather than become nan. Sums are kept in float32 at
least: rounded to 16 bits after every block, errors would grow with the number of ranks. (FlashAttention, arXiv 2205.14135, section 3.1.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_par.layout import Span


def exact(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partial results of ``dtype`` are summed: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True, slots=True)
class Attended:
    """Attention of some queries over the keys seen so far."""

    out: Tensor  # [B, H, T, F], float32 or float64
    lse: Tensor  # [B, H, T], likewise

    @classmethod
    def nothing(cls, q_BHTE: Tensor, value_width: int) -> Attended:
        """Before any key was seen."""
        shape, dtype = q_BHTE.shape[:-1], exact(q_BHTE.dtype)
        out_BHTF = torch.zeros(*shape, value_width, dtype=dtype, device=q_BHTE.device)
        return cls(out_BHTF, torch.full(shape, -torch.inf, dtype=dtype, device=q_BHTE.device))

    def add(self, out_BHTF: Tensor, lse_BHT: Tensor, queries: Span) -> None:
        """Take in the attention of ``queries`` over further keys, in place. See Note [Merging by log-sum-exp]."""
        so_far, lse = (tensor.narrow(2, queries.start, queries.size) for tensor in (self.out, self.lse))
        lse_BHT = lse_BHT.to(lse.dtype)
        peak = torch.maximum(lse, lse_BHT).clamp(min=torch.finfo(lse.dtype).min)
        old, new = (lse - peak).exp(), (lse_BHT - peak).exp()
        both = old + new
        safe = both.clamp(min=torch.finfo(lse.dtype).tiny)
        so_far.mul_((old / safe).unsqueeze(-1)).add_(out_BHTF * (new / safe).unsqueeze(-1))
        lse.copy_(peak + both.log())
