"""What every variant trains: the decoder of ``lightning_par.recipes.gpt``, its batches, its optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_par.recipes.gpt import GPT, GPTConfig

OptimizerName = Literal["adamw", "sgd"]


@dataclass(frozen=True)
class Size:
    """A model and its global batch.

    Attributes:
        turn: optimizer steps a variant takes before the next one has its turn; more where a step is short.
        rounds: turns of each variant, unless told otherwise.
    """

    config: GPTConfig
    sequence: int = 128
    batch: int = 8  # sequences, over all ranks
    turn: int = 2
    rounds: int = 8


SIZES = {
    "tiny": Size(GPTConfig(vocab_size=256, hidden=64, layers=8, heads=4, ffn=128), sequence=32, turn=5, rounds=20),
    "base": Size(GPTConfig(vocab_size=8192, hidden=512, layers=8, heads=8, ffn=1408)),
}
"""tiny: 0.37 M parameters, a step of some 30 ms, so that the cost of Python shows. base: 34.1 M parameters, untied."""


class Decoder(GPT):
    """The recipe's decoder, asked for nothing but its loss."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # both [batch, sequence]
        return super().forward(tokens, shift_labels=targets).loss


def build_model(size: Size) -> Decoder:
    """The same weights on every rank and for every variant."""
    torch.manual_seed(0)
    return Decoder(size.config)


def global_batch(size: Size, step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a step, the same on every rank. Every second target follows from its token: there is something to learn."""
    generator = torch.Generator().manual_seed(1000 + step)
    vocab = size.config.vocab_size
    text = torch.randint(0, vocab, (size.batch, size.sequence + 1), generator=generator)
    text[:, 1::2] = (text[:, :-1:2] * 7 + 3) % vocab
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def build_optimizer(name: OptimizerName, params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """``fused`` for both: on a CPU it takes a third of the time of the default loop, which would flatter whoever shards."""
    if name == "sgd":
        return torch.optim.SGD(params, lr=0.5, fused=True)
    return torch.optim.AdamW(params, **ADAMW)


ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}
