"""Tiny modules with plans, at sizes that do not divide. Letters: V vocabulary, D hidden, E one head's width."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    tp_plan: ClassVar = {"up": "colwise", "down": "rowwise"}

    def __init__(self, width: int = 10, ffn: int = 37, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, ffn, bias), nn.Linear(ffn, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class GatheredMLP(MLP):
    """What lies between sees the whole activation (it mixes the features)."""

    tp_plan: ClassVar = {"up": "colwise_gather_output", "down": "rowwise_split_input"}

    def __init__(self, width: int = 10, ffn: int = 37, bias: bool = True) -> None:
        super().__init__(width, ffn, bias)
        self.norm = nn.LayerNorm(ffn)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)).flip(-1))


class Attention(nn.Module):
    """Grouped-query attention with biases and, if asked, a norm that every head shares."""

    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int, qk_norm: bool) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(width, heads * head_dim)
        self.k_proj, self.v_proj = nn.Linear(width, kv_heads * head_dim), nn.Linear(width, kv_heads * head_dim)
        self.o_proj = nn.Linear(heads * head_dim, width)
        self.q_norm, self.k_norm = (nn.LayerNorm(head_dim) if qk_norm else nn.Identity() for _ in range(2))

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (proj(x_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class TinyLM(nn.Module):
    """Embedding, one attention, one MLP, norms, head."""

    def __init__(
        self,
        vocab: int = 33,
        *,
        width: int = 10,
        heads: int = 12,
        kv_heads: int = 6,
        head_dim: int = 4,
        qk_norm: bool = False,
        tied: bool = False,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width, padding_idx)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.attention = Attention(width, heads, kv_heads, head_dim, qk_norm)
        self.mlp = MLP(width)
        self.head = nn.Linear(width, vocab)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids_BT: Tensor) -> Tensor:
        x = self.embed(ids_BT)
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return self.head(self.norm3(x))

    def loss(self, ids_BT: Tensor) -> Tensor:
        return F.cross_entropy(self(ids_BT)[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten())


ATTENTION_PLAN = {
    "attention.q_proj": "colwise",
    "attention.k_proj": "colwise",
    "attention.v_proj": "colwise",
    "attention.o_proj": "rowwise",
}
QK_NORM_PLAN = {"attention.q_norm": "replicated_with_grad_allreduce", "attention.k_norm": "replicated_with_grad_allreduce"}
MLP_PLAN = {"mlp.up": "colwise", "mlp.down": "rowwise"}
LM_PLAN = {"embed": "embedding_rowwise", **ATTENTION_PLAN, **MLP_PLAN, "head": "colwise_gather_output"}


def tokens(vocab: int, step: int = 0, batch: int = 2, length: int = 7) -> Tensor:
    return torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(step))
