"""A small decoder: RMSNorm, rotary positions, SwiGLU, grouped-query attention.

Shape letters: B batch, T tokens, D hidden, H query heads, K key/value heads, E one head's width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_par.recipes.causal import CausalLMModule, OptimizerFactory

IGNORED_LABEL = -100


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    vocab_size: int = 256
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int | None = None
    """None = as many as `heads`"""
    ffn: int | None = None
    """None = 8/3 of `hidden`, rounded up to a multiple of 16"""
    dropout: float = 0.0
    tie_embeddings: bool = False
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    init_std: float = 0.02

    def __post_init__(self) -> None:
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.ffn is None:
            object.__setattr__(self, "ffn", 16 * math.ceil(self.hidden / 6))
        if self.hidden % (2 * self.heads):
            raise ValueError(
                f"hidden={self.hidden} with heads={self.heads}: a head must be an even number of features wide (rotary positions "
                f"turn pairs); make hidden a multiple of {2 * self.heads}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}: each key head serves equally many queries")

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


class CausalLMOutput(NamedTuple):
    loss: Tensor | None
    logits: Tensor  # [B, T, V]


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim, self.dropout = config.head_dim, config.dropout
        self.q_proj = nn.Linear(config.hidden, config.heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden, config.kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden, config.kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.heads * config.head_dim, config.hidden, bias=False)

    def forward(self, x_BTD: Tensor, cos_BTE: Tensor, sin_BTE: Tensor) -> Tensor:
        q_BHTE, k_BKTE, v_BKTE = (
            project(x_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        y_BHTE = F.scaled_dot_product_attention(
            rotate(q_BHTE, cos_BTE, sin_BTE),
            rotate(k_BKTE, cos_BTE, sin_BTE),
            v_BKTE,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            enable_gqa=q_BHTE.shape[1] != k_BKTE.shape[1],
        )
        return self.o_proj(y_BHTE.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down_proj = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.ffn = SwiGLU(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), cos, sin))
        return x + self.dropout(self.ffn(self.ffn_norm(x)))


class GPT(nn.Module):
    """`labels` are the inputs again (the model shifts them); `shift_labels` are shifted already, and win. -100 is ignored."""

    tp_plan: ClassVar[dict[str, str]] = {
        "embed": "embedding_rowwise",
        "layers.*.attention.q_proj": "colwise",
        "layers.*.attention.k_proj": "colwise",
        "layers.*.attention.v_proj": "colwise",
        "layers.*.attention.o_proj": "rowwise",
        "layers.*.ffn.gate_proj": "colwise",
        "layers.*.ffn.up_proj": "colwise",
        "layers.*.ffn.down_proj": "rowwise",
        "head": "colwise_gather_output",
    }
    """How the weights may be split over devices, in the words of Hugging Face; nothing in this module reads it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden, config.vocab_size, bias=False)
        self._init_weights()

    def _init_weights(self) -> None:
        into_residual = self.config.init_std / math.sqrt(2 * self.config.layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=into_residual if name.endswith(("o_proj", "down_proj")) else self.config.init_std)
        if self.config.tie_embeddings:
            self.head.weight = self.embed.weight

    def forward(
        self,
        input_ids: Tensor,  # [B, T]
        labels: Tensor | None = None,  # [B, T]
        position_ids: Tensor | None = None,  # [B, T] or [1, T]
        shift_labels: Tensor | None = None,  # [B, T]
    ) -> CausalLMOutput:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        x = self.dropout(self.embed(input_ids))
        cos, sin = rotary_angles(position_ids, self.config.head_dim, self.config.rope_theta, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.head(self.norm(x))
        if shift_labels is None and labels is not None:
            shift_labels = F.pad(labels, (0, 1), value=IGNORED_LABEL)[:, 1:]
        return CausalLMOutput(None if shift_labels is None else next_token_loss(logits, shift_labels), logits)


def rotary_angles(position_ids: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, [B, T, E]: computed in float32 or better, returned in `dtype`."""
    exact = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, head_dim, 2, device=position_ids.device, dtype=exact) / head_dim
    angles = position_ids.unsqueeze(-1).to(exact) * theta**-exponents
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x_BHTE: Tensor, cos_BTE: Tensor, sin_BTE: Tensor) -> Tensor:
    """Turn each pair (i, i + E/2) of features by its position's angle (RoFormer, section 3.2; in Llama's order of pairs)."""
    cos, sin = cos_BTE.unsqueeze(1).to(x_BHTE.dtype), sin_BTE.unsqueeze(1).to(x_BHTE.dtype)
    low, high = x_BHTE.chunk(2, dim=-1)
    return x_BHTE * cos + torch.cat((-high, low), dim=-1) * sin


def next_token_loss(logits: Tensor, shift_labels: Tensor) -> Tensor:
    """Mean cross entropy in nats over the labels that are not -100, computed in float32 or better."""
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(exact.flatten(0, 1), shift_labels.flatten(), ignore_index=IGNORED_LABEL)


class GPTModule(CausalLMModule):
    """`config`: a GPTConfig or a mapping of its fields. Further options as in CausalLMModule."""

    def __init__(
        self,
        config: GPTConfig | Mapping[str, Any] | None = None,
        *,
        optimizer: OptimizerFactory | None = None,
        warmup_steps: int = 0,
        decay_steps: int | None = None,
        min_lr_ratio: float = 0.1,
    ) -> None:
        config = config if isinstance(config, GPTConfig) else GPTConfig(**(config or {}))
        schedule = {"warmup_steps": warmup_steps, "decay_steps": decay_steps, "min_lr_ratio": min_lr_ratio}
        super().__init__(GPT(config), optimizer=optimizer, **schedule)
        self.save_hyperparameters({"config": dataclasses.asdict(config), **schedule})
