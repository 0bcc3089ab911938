"""What a step draws is the same on every stage; what layers draw is not; and what others draw stays as it was."""

from __future__ import annotations

import random
from itertools import chain
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_par import HybridParallelStrategy
from tests.harness import run_world
from tests.harness.models import QUIET

LAYOUTS = {
    "1f1b": {"pp": 2},
    "interleaved": {"pp": 2, "chunks": 2, "schedule": "interleaved_1f1b"},
    "zbv": {"pp": 2, "chunks": 2, "schedule": "zbv"},
    "gpipe": {"pp": 2, "schedule": "gpipe"},
}


class Layer(nn.Module):
    """Draws a mask of its own; ``masks`` are those it drew."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.inner, self.dropout = nn.Linear(6, 6), dropout
        self.masks: list[Tensor] = []

    @override
    def forward(self, x: Tensor) -> Tensor:
        kept = nn.functional.dropout(torch.ones(64), self.dropout)
        self.masks.append(kept)
        return x + self.inner(x).tanh() * kept[:6]


class Denoiser(L.LightningModule):
    """Noise is drawn before the layers and compared with after them. ``drawn``: by batch and first element of the micro-batch."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(4))
        self.head = nn.Linear(6, 6)
        self.drawn: dict[tuple[int, float], list[tuple[float, ...]]] = {}
        self.losses: list[float] = []

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        noise, level = torch.randn_like(batch), random.random()
        mask = torch.from_numpy(np.random.rand(*batch.shape)) < 0.5
        place = batch_idx, batch[0, 0].item()
        self.drawn.setdefault(place, []).append((noise.sum().item(), level, mask.sum().item()))
        x = torch.where(mask, level * noise, batch)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(self.head(x), noise)

    @override
    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].item())

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(layout: dict[str, Any], dropout: float) -> dict[str, Any]:
    L.seed_everything(5, verbose=False)
    module = Denoiser(dropout)
    data = torch.randn(21, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    strategy = HybridParallelStrategy(microbatches=3, **layout)
    trainer = L.Trainer(strategy=strategy, devices=layout["pp"], precision="64-true", max_epochs=1, **QUIET)
    if trainer.global_rank == 1:
        torch.randn(3)  # a rank that has drawn on its own before does not change the streams
    trainer.fit(module, DataLoader(data, batch_size=7))
    masks = {name: child.masks for name, child in module.named_modules() if isinstance(child, Layer)}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    return {"drawn": module.drawn, "losses": module.losses, "masks": masks, "states": states}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_stage_draws_the_noise_of_a_micro_batch_alike(layout: dict[str, Any]) -> None:
    first, second = run_world(_fit, 2, layout, 0.5)
    assert first["drawn"].keys() == second["drawn"].keys()
    assert len(first["drawn"]) == 9
    for place, draws in first["drawn"].items():
        everywhere = [*draws, *second["drawn"][place]]
        assert len(everywhere) == 2 * layout.get("chunks", 1)
        assert len(set(everywhere)) == 1, place
    assert len({draws[0] for draws in first["drawn"].values()}) == 9, "micro-batches draw differently"
    masks = list(chain(*first["masks"].values(), *second["masks"].values()))
    assert len({tuple(mask.tolist()) for mask in masks}) == len(masks) == 4 * 9, "no two layers, stages or micro-batches share a mask"
    assert torch.equal(first["states"][0], second["states"][0])
    assert first["states"][1:] == second["states"][1:]


@pytest.mark.slow
def test_the_loss_of_noise_drawn_in_the_step_does_not_depend_on_the_stages() -> None:
    runs = {name: run_world(_fit, 2, layout, 0.0)[0]["losses"] for name, layout in LAYOUTS.items()}
    runs["four ranks"] = run_world(_fit, 4, {"pp": 4}, 0.0)[0]["losses"]
    for losses in runs.values():
        assert len(losses) == 3
        assert losses == pytest.approx(runs["1f1b"], rel=0, abs=1e-12)


def _orders(layout: dict[str, Any]) -> list[float]:
    """The first element of every batch, over three shuffled epochs."""
    L.seed_everything(5, verbose=False)
    module = Recorder()
    trainer = L.Trainer(strategy=HybridParallelStrategy(**layout), devices=layout.get("pp", 1), max_epochs=3, **QUIET)
    trainer.fit(module, DataLoader(torch.arange(48.0).view(8, 6), batch_size=4, shuffle=True))
    return module.seen


class Recorder(Denoiser):
    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.seen: list[float] = []

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()

    @override
    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.append(batch[0, 0].item())


class Embedding(nn.Module):
    """Stands on the first stage, and draws there."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.inner(x), 0.5)


class Embedded(Denoiser):
    """Noise is drawn after a module has drawn that is not on every stage; and ranks draw unequally between steps."""

    pipeline_before = ("embedding",)

    def __init__(self) -> None:
        super().__init__(dropout=0.5)
        self.embedding = Embedding()
        self.trained: dict[tuple[int, float], list[float]] = {}
        self.predicted: list[float] = []

    def _step(self, batch: Tensor, draws: list[float]) -> tuple[Tensor, Tensor]:
        x = self.embedding(batch)
        noise = torch.randn_like(batch)
        draws.append(noise.sum().item())
        for layer in self.layers:
            x = layer(x)
        return noise, nn.functional.mse_loss(self.head(x), noise)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self._step(batch, self.trained.setdefault((batch_idx, batch[0, 0].item()), []))[1]

    @override
    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self._step(batch, self.predicted)[0]

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in self.parameters():  # of another number on every stage
            if parameter.grad is not None:
                parameter.grad.add_(torch.randn_like(parameter.grad), alpha=1e-3)


def _embedded(layout: dict[str, Any]) -> tuple[dict[Any, Any], list[float], list[Tensor]]:
    L.seed_everything(5, verbose=False)
    module = Embedded()
    data = torch.randn(14, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    strategy = HybridParallelStrategy(microbatches=3, **layout)
    trainer = L.Trainer(strategy=strategy, devices=2, precision="64-true", max_epochs=1, **QUIET)
    trainer.fit(module, DataLoader(data, batch_size=7))
    predicted = [output for _ in range(2) for output in trainer.predict(module, DataLoader(data, batch_size=7))]
    return module.trained, module.predicted, predicted


@pytest.mark.parametrize("layout", [LAYOUTS["1f1b"], pytest.param(LAYOUTS["zbv"], marks=pytest.mark.slow)], ids=["1f1b", "zbv"])
def test_what_modules_of_one_stage_or_hooks_of_a_rank_draw_does_not_part_the_stages(layout: dict[str, Any]) -> None:
    first, second = run_world(_embedded, 2, layout)
    assert len(first[0]) == 2 * 3
    for place, draws in first[0].items():
        assert len({*draws, *second[0][place]}) == 1, place
    assert {*first[1]} == {*second[1]}
    for mine, others in zip(first[2], second[2], strict=True):
        assert torch.equal(mine, others)
    assert len({output.sum().item() for output in first[2]}) == 4, "no two batches or predictions draw the same"


@pytest.mark.parametrize("layout", [{"pp": 2}, {"pp": 2, "chunks": 2, "schedule": "interleaved_1f1b"}], ids=["pp2", "interleaved"])
def test_shuffled_samples_come_in_the_order_of_one_process_in_every_epoch(layout: dict[str, Any]) -> None:
    assert run_world(_orders, 2, layout) == run_world(_orders, 1, {}) * 2
