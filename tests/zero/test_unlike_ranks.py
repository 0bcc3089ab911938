"""Ranks that are not alike in what they use must not wait for one another, and what nobody uses must not hold up the rest."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_par.zero import DataParallel, ZeroOptions
from lightning_par.zero.bucket import Bucket
from tests.harness import run_world
from tests.zero.bare import Case, Place, assert_parity, data_parallel, outcomes, sgd
from tests.zero.models import VOCAB, WIDTH

EACH = ZeroOptions(min_unit_mb=0, bucket_mb=1e-9)  # a bucket for each parameter


class _Meet(torch.autograd.Function):
    """All ranks meet in backward, as in SyncBatchNorm's or ring attention's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if dist.is_initialized():
            dist.all_reduce(torch.zeros(1))
        return grad


class _Layer(nn.Module):
    def __init__(self, *, meets: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.meets = meets

    def forward(self, h: Tensor, *, gained: bool) -> Tensor:
        h = h + torch.tanh(self.inner(h)) * (self.gain if gained else 1.0)
        return _Meet.apply(h) if self.meets else h


class Deep(nn.Module):
    """Eight layers; what is used of the last one differs."""

    def __init__(self, *, meets: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(_Layer(meets=meets) for _ in range(8))

    def forward(self, ids: Tensor, *, gained: bool) -> Tensor:
        h = self.embed(ids)
        for layer in self.layers:
            h = layer(h, gained=gained or layer is not self.layers[-1])
        return h


def gained_on_rank_0(module: nn.Module, ids: Tensor, place: Place) -> Tensor:
    return module(ids, gained=place.index == 0).square().mean()


CASES = {
    f"stage{stage}{' meeting' * meets}": Case(partial(Deep, meets=meets), sgd, gained_on_rank_0, stage=stage, options=EACH)
    for stage in (0, 1, 2, 3)
    for meets in (False, True)
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name[5] in "12" else ()) for name in CASES])
def test_Z8_a_parameter_that_one_rank_does_not_use_holds_nobody_up(name: str) -> None:
    assert_parity(CASES[name], [rank[name] for rank in outcomes(CASES, 2)])


def _launched_in_backward(stage: int) -> list[int]:
    """By step, how many of nine buckets started before ``finish``. From the third step on what was unused is used."""
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
    module.pooler = nn.Linear(WIDTH, WIDTH)  # registered last, so its bucket is the first
    options = ZeroOptions(min_unit_mb=0, bucket_mb=(WIDTH * WIDTH + WIDTH) * 4 / 2**20)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1)]
    _, dp = data_parallel(module, optimizers, stage, options=options)
    return [_count(dp, module, pooled=step >= 2) for step in range(4)]


def _count(dp: DataParallel, module: nn.Sequential, *, pooled: bool) -> int:
    launch = Bucket.launch
    with mock.patch.object(Bucket, "launch", autospec=True, side_effect=launch) as launched:
        h = module[:8](torch.ones(2, WIDTH))
        (module.pooler(h) if pooled else h).sum().backward()
        started = launched.call_count
    dp.finish()
    return started


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_layer_that_nobody_uses_holds_up_its_own_bucket_only(stage: int) -> None:
    assert run_world(_launched_in_backward, 2, stage) == [[0, 8, 9, 9]] * 2
