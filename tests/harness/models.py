"""Tiny modules and data of awkward sizes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from lightning_par.recipes.gpt import GPT, GPTConfig

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Settings of a Trainer that leaves nothing behind."""


class Tokens(Dataset):
    """Rows of random token ids, as a causal language model wants them; some labels are ignored.

    Each six rows in a row ignore equally many, so that two or three replicas average over equally many labels (replicas are averaged
    plainly, as DDP does) while micro-batches do not.
    """

    def __init__(self, rows: int, length: int, vocab: int, *, ignore: bool = True) -> None:
        generator = torch.Generator().manual_seed(7)
        self.ids = torch.randint(0, vocab, (rows, length), generator=generator)
        self.labels = self.ids.clone()
        if ignore:
            for row in range(rows):
                self.labels[row, : 1 + row // 6 % 5] = -100

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


class TinyGPT(L.LightningModule):
    """The GPT recipe as a user would train it: nothing here knows of any parallelism."""

    def __init__(self, *, layers: int = 7, tie: bool = False, optimizer: str = "adamw", lr: float = 1e-2) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.optimizer, self.lr = optimizer, lr
        config = GPTConfig(vocab_size=37, hidden=24, layers=layers, heads=4, kv_heads=2, ffn=29, tie_embeddings=tie)
        self.model = GPT(config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        out = self.model(**batch)
        self.log("train_loss", out.loss)
        return out.loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        decay = [p for p in self.parameters() if p.dim() >= 2]
        rest = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        if self.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=self.lr)
        return torch.optim.AdamW(groups, lr=self.lr)


def token_loader(
    batch: int, *, rows: int = 24, length: int = 13, vocab: int = 37, ignore: bool = True, num_replicas: int = 1, rank: int = 0
) -> DataLoader:
    """Global batches of ``batch`` rows in dataset order, or one replica's part of them."""
    data = Tokens(rows, length, vocab, ignore=ignore)
    sampler = DistributedSampler(data, num_replicas=num_replicas, rank=rank, shuffle=False)
    return DataLoader(data, batch_size=batch // num_replicas, sampler=sampler)


def mlp(*sizes: int, bias: bool = True) -> nn.Sequential:
    layers: list[Any] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs, bias=bias), nn.Tanh()]
    return nn.Sequential(*layers[:-1])
