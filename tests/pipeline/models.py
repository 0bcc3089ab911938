"""Models of the pipeline tests, in float64 and with the same weights on every rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_par.recipes.gpt import GPT, GPTConfig, Layer
from tests.pipeline.parity import VOCAB


class CheckpointedLayer(Layer):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return checkpoint(super().forward, x, cos, sin, use_reentrant=False)


def gpt(layers: int = 7, tie: bool = False, *, checkpointed: bool = False) -> nn.Module:
    torch.manual_seed(1)
    model = GPT(GPTConfig(vocab_size=VOCAB, hidden=24, layers=layers, heads=4, kv_heads=2, ffn=29, tie_embeddings=tie)).double()
    for layer in model.layers if checkpointed else ():
        layer.__class__ = CheckpointedLayer
    return model
