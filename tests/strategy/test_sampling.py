"""Replicas together see what one process would see, in its order, whatever the user's dataloader is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from lightning_par import HybridParallelStrategy
from tests.harness import run_world
from tests.harness.models import QUIET

ROWS = 14


class Numbers(Dataset):
    def __init__(self, rows: int = ROWS) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

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


def own_batches_shuffled(size: int) -> DataLoader:
    order = RandomSampler(Numbers(), generator=torch.Generator().manual_seed(1))
    return DataLoader(Numbers(), batch_sampler=Pairs(order, size, drop_last=False))


def _fit(loader: Any, size: int, strategy: Any, devices: int, module: Any = Seen, **options: Any) -> dict[str, list[list[int]]]:
    L.seed_everything(3, verbose=False)
    module = module()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_epochs=2, num_sanity_val_steps=0, **quiet, **options)
    trainer.fit(module, loader(size), plain(size))
    return module.batches


def _fit_rank(loader: Any, size: int, layout: dict[str, int], devices: int, options: dict[str, Any]) -> dict[str, list[list[int]]]:
    return _fit(loader, size, HybridParallelStrategy(**layout), devices, **options)


@pytest.mark.parametrize("loader", [plain, shuffled, own_batches, own_batches_shuffled])
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"dp": 2}, id="dp2"),
        pytest.param({"tp": 2}, id="tp2"),
        pytest.param({"dp": 1}, id="one rank"),
        pytest.param({"dp": 2, "tp": 2}, id="dp2 tp2", marks=pytest.mark.slow),
    ],
)
def test_T18_L7_replicas_together_see_the_batches_of_one_process(loader: Any, layout: dict[str, int]) -> None:
    replicas, size = layout.get("dp", 1), math.prod(layout.values())
    alone = _fit(loader, 4, "auto", 1)
    ranks = run_world(_fit_rank, size, loader, 4 // replicas, layout, size, {})
    for stage in ("train", "val"):
        for place, batch in enumerate(alone[stage]):
            assert all(len(rank[stage]) == len(alone[stage]) for rank in ranks)
            seen = [rank[stage][place] for rank in ranks[:: size // replicas]]
            assert sorted(itertools.chain(*seen)) == sorted(batch), (stage, place)
    if replicas == 1:
        assert all(rank == alone for rank in ranks)
    assert all(rank == ranks[place - place % (size // replicas)] for place, rank in enumerate(ranks)), "ranks of one replica share batches"


def test_L7_a_user_who_divides_samples_alone_is_left_alone() -> None:
    ranks = run_world(_fit_rank, 2, plain, 4, {"dp": 2}, 2, {"use_distributed_sampler": False})
    alone = _fit(plain, 4, "auto", 1)
    assert ranks[0]["train"] == ranks[1]["train"] == alone["train"]


class SeenTogether(Seen):
    """Batches of several dataloaders at once: keeps the samples of each."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = list(batch.values()) if isinstance(batch, dict) else batch
        self.batches["train"].append([part.flatten().int().tolist() for part in parts])
        return sum(self.down(self.up(part)).mean() for part in parts)


def as_dict(size: int) -> Any:
    return {"long": plain(size), "short": DataLoader(Numbers(8), batch_size=size)}


def as_list(size: int) -> Any:
    return list(as_dict(size).values())


def min_size(size: int) -> Any:
    return CombinedLoader(as_dict(size), "min_size")


def max_size_cycle(size: int) -> Any:
    return CombinedLoader(as_list(size), "max_size_cycle")


@pytest.mark.parametrize(
    ("loader", "seen"),
    [(as_dict, [14, 8]), (as_list, [14, 8]), (max_size_cycle, [14, 8]), (min_size, [8, 8])],
    ids=["dict", "list", "max_size_cycle", "min_size"],
)
def test_L6_each_of_several_dataloaders_is_divided_over_the_replicas(loader: Any, seen: list[int]) -> None:
    """Of 14 and of 8 samples; ``seen``: how many come."""
    alone = _fit(loader, 4, "auto", 1, SeenTogether)["train"]
    first, second = (rank["train"] for rank in run_world(_fit_rank, 2, loader, 2, {"dp": 2}, 2, {"module": SeenTogether}))
    assert len(first) == len(second) == len(alone)
    for place, number in enumerate(seen):
        for one, other, both in zip(first, second, alone, strict=True):
            assert sorted(one[place] + other[place]) == sorted(both[place])
        ids = [{sample for batch in replica for sample in batch[place]} for replica in (first, second)]
        assert ids[0].isdisjoint(ids[1])
        assert ids[0] | ids[1] == set(range(number))


class Ones(IterableDataset):
    """Has no length."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(torch.ones(self.rows, 1))


class Notes(L.LightningModule):
    """What it did, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(2))
        self.did: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self(batch))

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.did.append(f"train {batch_idx}")

    def on_validation_batch_start(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.did.append("validate")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit_on_unequally_many(layout: dict[str, int], sized: bool) -> tuple[list[str], str]:
    strategy = HybridParallelStrategy(**layout)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    every_2 = {"val_check_interval": 2, "accumulate_grad_batches": 2, "num_sanity_val_steps": 0, "use_distributed_sampler": False}
    trainer = L.Trainer(accelerator="cpu", devices=math.prod(layout.values()), strategy=strategy, max_epochs=2, **every_2, **quiet)
    rows = 5 + 2 * strategy.distributed_sampler_kwargs["rank"]
    module = Notes()
    with pytest.raises(RuntimeError) as error:
        trainer.fit(module, DataLoader(torch.ones(rows, 1) if sized else Ones(rows)), DataLoader(torch.ones(1, 1)))
    return module.did, str(error.value)


@pytest.mark.parametrize(
    ("layout", "sized"),
    [({"dp": 2}, True), ({"dp": 2}, False), ({"dp": 2, "pp": 2}, True)],
    ids=["dp2", "dp2 without length", "dp2 pp2"],
)
def test_L2_no_rank_validates_while_another_that_has_more_batches_trains(layout: dict[str, int], sized: bool) -> None:
    """5 batches on one replica, 7 on the other: when the first has come to its end, both are told."""
    for did, told in run_world(_fit_on_unequally_many, math.prod(layout.values()), layout, sized):
        assert did == ["train 0", "train 1", "validate", "train 2", "train 3", "validate", "train 4"]
        assert told.startswith("this is the epoch's last training batch on 1 of 2 data ranks, but others have more")


class Recorder(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen.append(batch.flatten().tolist())
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _epochs(strategy: Any, rows: int, workers: int) -> list[list[float]]:
    """The batches of three epochs, shuffled by a generator of the dataloader's own."""
    generator = torch.Generator().manual_seed(1)
    data = torch.arange(float(rows)).view(rows, 1)
    loader = DataLoader(data, batch_size=4, shuffle=True, generator=generator, num_workers=workers)
    module = Recorder()
    L.Trainer(strategy=strategy, devices=1, max_epochs=3, **QUIET).fit(module, loader)
    return module.seen


@pytest.fixture
def _own_process() -> Iterator[None]:
    """The test fits where it runs, since ranks that the harness starts cannot have workers."""
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_own_process")
@pytest.mark.parametrize(("rows", "workers"), [(8, 0), (10, 0), (8, 1)])
def test_a_generator_of_ones_own_shuffles_every_epoch_as_under_plain_lightning(rows: int, workers: int) -> None:
    assert _epochs(HybridParallelStrategy(), rows, workers) == _epochs("auto", rows, workers)
