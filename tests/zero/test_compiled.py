"""``torch.compile`` at stage 3, whatever was compiled: values come and go around what runs as one graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.harness.parity import assert_same, fit, fit_world

BACKEND = {"backend": "aot_eager"}  # all but the code that is made in the end, for which a compiler would have to be there


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def model_in_place(net: nn.Module) -> nn.Module:
    net.compile(**BACKEND)
    return net


def model_wrapped(net: nn.Module) -> nn.Module:
    return torch.compile(net, **BACKEND)


def layers_in_place(net: Any) -> nn.Module:
    for layer in net.layers:
        layer.compile(**BACKEND)
    return net


def layers_wrapped(net: Any) -> nn.Module:
    net.layers = nn.ModuleList(torch.compile(layer, **BACKEND) for layer in net.layers)
    return net


def within_layers(net: Any) -> nn.Module:
    for layer in net.layers:
        layer.linear.compile(**BACKEND)
    return net


class Compiled(L.LightningModule):
    def __init__(self, how: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = how(Net())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def rows(num_replicas: int = 1, rank: int = 0) -> DataLoader:
    x = torch.randn(24, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, (x.sum(1) > 0).long())
    sampler = DistributedSampler(data, num_replicas=num_replicas, rank=rank, shuffle=False)
    return DataLoader(data, batch_size=8 // num_replicas, sampler=sampler)


QUICK = [layers_in_place, model_wrapped]
REST = [model_in_place, layers_wrapped, within_layers]


@pytest.mark.parametrize("units", [{"min_unit_mb": 0}, pytest.param({}, marks=pytest.mark.slow)], ids=["each layer a unit", "joined units"])
@pytest.mark.parametrize("how", [*QUICK, *(pytest.param(how, marks=pytest.mark.slow) for how in REST)])
def test_what_is_compiled_trains_as_in_one_process(how: Callable[[nn.Module], nn.Module], units: dict[str, Any]) -> None:
    module = partial(Compiled, how)
    runs = fit_world(module, rows, {"zero": 3, "zero_options": units}, 2, gradient_clip_val=None, timeout=120)
    assert_same(runs, fit(module, rows, gradient_clip_val=None))
