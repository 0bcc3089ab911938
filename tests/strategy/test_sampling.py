"""Replicas together see what one process would see, in its order, whatever the user's dataloader is."""

from __future__ import annotations

import itertools
import math
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

from lightning_par import HybridParallelStrategy
from tests.harness import run_world

ROWS = 14


class Numbers(Dataset):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


class Seen(L.LightningModule):
    """Keeps the samples of every batch."""

    tp_plan: ClassVar[dict[str, str]] = {"up": "colwise", "down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(1, 2), torch.nn.Linear(2, 1)
        self.batches: dict[str, list[list[int]]] = {"train": [], "val": []}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.batches["train"].append(batch.flatten().int().tolist())
        return self.down(self.up(batch)).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.batches["val"].append(batch.flatten().int().tolist())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def plain(size: int) -> DataLoader:
    return DataLoader(Numbers(), batch_size=size)


def shuffled(size: int) -> DataLoader:
    return DataLoader(Numbers(), batch_size=size, shuffle=True)


class Pairs(BatchSampler):
    """A user's own batch sampler."""


def own_batches(size: int) -> DataLoader:
    return DataLoader(Numbers(), batch_sampler=Pairs(SequentialSampler(Numbers()), size, drop_last=False))


def _fit(loader: Any, size: int, strategy: Any, devices: int, **options: Any) -> dict[str, list[list[int]]]:
    L.seed_everything(3, verbose=False)
    module = Seen()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_epochs=2, num_sanity_val_steps=0, **quiet, **options)
    trainer.fit(module, loader(size), plain(size))
    return module.batches


def _fit_rank(loader: Any, size: int, layout: dict[str, int], devices: int, options: dict[str, Any]) -> dict[str, list[list[int]]]:
    return _fit(loader, size, HybridParallelStrategy(**layout), devices, **options)


@pytest.mark.parametrize("loader", [plain, shuffled, own_batches])
@pytest.mark.parametrize("layout", [{"dp": 2}, {"tp": 2}, {"dp": 1}], ids=["dp2", "tp2", "one rank"])
def test_T18_L7_replicas_together_see_the_batches_of_one_process(loader: Any, layout: dict[str, int]) -> None:
    replicas, size = layout.get("dp", 1), math.prod(layout.values())
    alone = _fit(loader, 4, "auto", 1)
    ranks = run_world(_fit_rank, size, loader, 4 // replicas, layout, size, {})
    for stage in ("train", "val"):
        for place, batch in enumerate(alone[stage]):
            assert all(len(rank[stage]) == len(alone[stage]) for rank in ranks)
            seen = [rank[stage][place] for rank in ranks[:replicas]]
            assert sorted(itertools.chain(*seen)) == sorted(batch), (stage, place)
    if replicas == 1:
        assert all(rank == alone for rank in ranks), "ranks of one replica share batches"


def test_L7_a_user_who_divides_samples_alone_is_left_alone() -> None:
    ranks = run_world(_fit_rank, 2, plain, 4, {"dp": 2}, 2, {"use_distributed_sampler": False})
    alone = _fit(plain, 4, "auto", 1)
    assert ranks[0]["train"] == ranks[1]["train"] == alone["train"]
