"""What Lightning's loop does around data parallelism: weight averaging, synchronized batch norms, logged norms."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_par.callbacks import GradientNorm
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
