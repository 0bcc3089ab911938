"""Manual optimization with two optimizers through the Trainer equals one process."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_par import HybridParallelStrategy
from tests.harness import run_world
from tests.harness.models import mlp


class Duel(L.LightningModule):
    """A small GAN with a scheduler for each of its optimizers.

    Args:
        zero_grad: when and through whom gradients are forgotten: "before" or "after" a step by the optimizer, or by the "module"; or
            "between" a backward pass that is not reduced and the one that counts.
    """

    def __init__(self, zero_grad: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.automatic_optimization = False
        self.zero_grad_by = zero_grad
        self.generator, self.critic = mlp(3, 7, 5), mlp(5, 7, 1)
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        noise, real = batch
        first, second = self.optimizers()
        for optimizer, network in ((first, self.generator), (second, self.critic)):
            self.toggle_optimizer(optimizer)
            fake = self.critic(self.generator(noise))
            loss = nn.functional.softplus(-fake).mean()
            if optimizer is second:
                loss = nn.functional.softplus(fake).mean() + nn.functional.softplus(-self.critic(real)).mean()
            if self.zero_grad_by == "before":
                optimizer.zero_grad()
            elif self.zero_grad_by == "module":
                network.zero_grad()
            if self.zero_grad_by == "between":
                with getattr(self.trainer.strategy, "block_backward_sync", nullcontext)():
                    self.manual_backward(3 * loss, retain_graph=True)
                optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            if self.zero_grad_by in ("after", "between"):
                optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizers = [
            torch.optim.Adam(self.generator.parameters(), lr=0.05),
            torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9),
        ]
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7) for optimizer in optimizers]


def fit(zero_grad: str, strategy: Any = "auto", devices: int = 1, precision: str = "64-true") -> dict[str, Tensor]:
    generator, dtype = torch.Generator().manual_seed(0), torch.float64 if precision == "64-true" else torch.float32
    noise, real = (torch.randn(24, width, dtype=dtype, generator=generator) for width in (3, 5))
    data = TensorDataset(noise, real)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        precision=precision,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    parallel = isinstance(trainer.strategy, HybridParallelStrategy)
    place = trainer.strategy.distributed_sampler_kwargs if parallel else {"num_replicas": 1, "rank": 0}
    loader = DataLoader(data, batch_size=6 // place["num_replicas"], sampler=DistributedSampler(data, shuffle=False, **place))
    module = Duel(zero_grad)
    trainer.fit(module, loader)
    for optimizer, start in zip(trainer.optimizers, (0.05, 0.1), strict=True):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(start * 0.7**4), "schedulers drive the live groups"
    if parallel:
        return trainer.strategy.full_state_dict() or {}
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


@cache
def reference(zero_grad: str) -> dict[str, Tensor]:
    return fit(zero_grad)


def _fit_all(zero_grads: tuple[str, ...], devices: int) -> dict[tuple[int, str], dict[str, Tensor]]:
    return {
        (stage, zero_grad): fit(zero_grad, HybridParallelStrategy(dp=devices, zero=stage), devices)
        for stage in (0, 1, 2, 3)
        for zero_grad in zero_grads
    }


def test_two_optimizers_in_manual_optimization_at_every_stage() -> None:
    ways = ("before", "after", "module", "between")
    told = run_world(_fit_all, 2, ways, 2, timeout=120)[0]
    for (stage, way), weights in told.items():
        assert list(weights) == list(reference(way))
        for name, value in reference(way).items():
            where = f"stage {stage}, zero_grad {way}, {name}"
            torch.testing.assert_close(weights[name], value, rtol=1e-10, atol=1e-10, msg=lambda t, where=where: f"{where}: {t}")


def _fit_in_half(devices: int) -> list[dict[str, Tensor]]:
    return [fit("before", HybridParallelStrategy(dp=devices, zero=stage), devices, "16-true") for stage in (0, 1, 2, 3)]


def test_two_optimizers_in_half_precision_where_a_rank_may_hold_nothing_of_one() -> None:
    first, *others = run_world(_fit_in_half, 2, 2, timeout=120)[0]
    for stage, weights in enumerate(others, start=1):
        for name, value in first.items():
            torch.testing.assert_close(weights[name], value, rtol=2e-3, atol=2e-3, msg=lambda t, w=f"stage {stage}, {name}": f"{w}: {t}")
