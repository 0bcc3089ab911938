"""What Lightning's loop does around data parallelism: weight averaging, synchronized batch norms, logged norms."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_par import HybridParallelStrategy, full_gradient
from lightning_par.callbacks import GradientNorm
from tests.harness import WorldError, run_world
from tests.harness.models import TinyGPT, token_loader
from tests.harness.parity import assert_same, fit, fit_world

LOADER = partial(token_loader, 12, ignore=False)


class Averaged(TinyGPT):
    """TinyGPT, the weights of which are averaged over the steps."""

    def configure_callbacks(self) -> list[L.Callback]:
        return [EMAWeightAveraging(decay=0.5)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_averaged_weights_are_those_of_one_process(stage: int) -> None:
    reference = fit(Averaged, LOADER, validation=LOADER)
    assert_same(fit_world(Averaged, LOADER, {"dp": 2, "zero": stage}, 2, validation=LOADER), reference)


class Normed(L.LightningModule):
    """A perceptron with a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def rows(batch: int, num_replicas: int = 1, rank: int = 0) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(36, 5, dtype=torch.float64, generator=generator)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = DistributedSampler(data, num_replicas=num_replicas, rank=rank, shuffle=False)
    return DataLoader(data, batch_size=batch // num_replicas, sampler=sampler)


@pytest.mark.parametrize("layout", [{"dp": 2}, {"dp": 3, "zero": 1}, {"dp": 2, "zero": 3}], ids=["dp2", "dp3 zero1", "dp2 zero3"])
def test_synchronized_batch_norm_is_that_of_the_whole_batch(layout: dict[str, Any]) -> None:
    loader = partial(rows, 12)
    runs = fit_world(Normed, loader, layout, layout["dp"], sync_batchnorm=True)
    assert_same(runs, fit(Normed, loader))


class Watched(TinyGPT):
    def configure_callbacks(self) -> list[L.Callback]:
        return [GradientNorm()]

    def on_train_batch_end(self, *_: Any) -> None:
        metrics = self.trainer.callback_metrics
        assert metrics["grad_norm"] > 0.5, "before clipping"
        assert abs(metrics["grad_norm_clipped"].item() - 0.5) < 1e-6, "after clipping"


@pytest.mark.parametrize("layout", [{"dp": 2, "zero": 2}, {"pp": 2}], ids=["zero2", "pp2"])
def test_Z21_the_norm_is_logged_before_and_after_clipping(layout: dict[str, Any]) -> None:
    assert_same(fit_world(Watched, LOADER, layout, 2), fit(Watched, LOADER))


class ReadsGradients(TinyGPT):
    """In a hook: whole gradients, on all ranks or on one."""

    def __init__(self, *, ranks: tuple[int, ...] = (0, 1)) -> None:
        super().__init__(layers=2)
        self.ranks = ranks
        self.gradients: list[Tensor] = []

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.global_rank in self.ranks:
            self.gradients += [full_gradient(param).clone() for param in self.parameters()]


def _read(strategy: Any, devices: int, **options: Any) -> list[Tensor]:
    module = ReadsGradients(**options)
    fit(lambda: module, LOADER, strategy, devices=devices)
    return module.gradients


def _read_together() -> list[list[Tensor]]:
    return [_read(HybridParallelStrategy(dp=2, zero=stage), 2) for stage in (0, 1, 2, 3)]


def test_L14_gradients_that_all_ranks_read_in_a_hook_are_those_of_one_process() -> None:
    wanted = _read("auto", 1)
    for stages in run_world(_read_together, 2):
        for gradients in stages:
            torch.testing.assert_close(gradients, wanted, rtol=1e-10, atol=1e-10)


def _read_alone(stage: int) -> None:
    _read(HybridParallelStrategy(dp=2, zero=stage, timeout=timedelta(seconds=4)), 2, ranks=(0,))


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_L14_a_gradient_that_one_rank_reads_alone_is_an_error_on_all_and_no_hang(stage: int) -> None:
    with pytest.raises(WorldError) as error:
        run_world(_read_alone, 2, stage, grace=20)
    _, first, second = str(error.value).split("--- rank ")
    assert "in full_gradient" in first
    assert "RuntimeError" in first
    assert "RuntimeError" in second
    assert "no answer" not in str(error.value)
