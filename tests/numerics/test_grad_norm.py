"""The norm of the model's gradient counts every element once, and clipping is torch's."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_par.comm import Mesh
from lightning_par.layout import ParallelLayout
from lightning_par.numerics import GradientShard, clip_by_norm, clip_by_value, total_norm
from tests.harness import run_world

CPU = torch.device("cpu")


def _gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((5, 3), (7,), (1,), (0, 8))]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_Z22_one_rank_has_torchs_norm(norm_type: float) -> None:
    norm = total_norm([GradientShard(grad, True) for grad in _gradients()], (), CPU, norm_type)
    torch.testing.assert_close(norm, torch.nn.utils.get_total_norm([g for g in _gradients() if g.numel()], norm_type))


def _spread(norm_type: float) -> torch.Tensor:
    """Rank 0 and 1 hold a part each of the first gradient; the second is replicated, and rank 0 counts it; a third rank holds nothing."""
    mesh = Mesh.build(ParallelLayout(dp=3))
    first, second, *_ = _gradients()
    held = {0: [(first[:2], True), (second, True)], 1: [(first[2:], True), (second, False)], 2: []}[mesh.rank]
    return total_norm([GradientShard(grad, counted) for grad, counted in held], (mesh.world,), CPU, norm_type)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_Z23_T12_replicated_gradients_count_once_and_empty_ranks_join(norm_type: float) -> None:
    wanted = torch.nn.utils.get_total_norm(_gradients()[:2], norm_type)
    for norm in run_world(_spread, 3, norm_type):
        torch.testing.assert_close(norm, wanted)


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e3])
def test_Z20_clipping_by_norm_is_torchs(max_norm: float) -> None:
    ours, theirs = _gradients(), [torch.nn.Parameter(torch.zeros_like(grad)) for grad in _gradients()]
    for param, grad in zip(theirs, _gradients(), strict=True):
        param.grad = grad
    shards = [GradientShard(grad, True) for grad in ours]
    clip_by_norm(shards, total_norm(shards, (), CPU), max_norm)
    torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    for grad, param in zip(ours, theirs, strict=True):
        torch.testing.assert_close(grad, param.grad)


def test_clipping_acts_on_every_dtype_and_on_gradients_that_others_count() -> None:
    grads = [torch.full((4,), 2.0), torch.full((4,), 2.0, dtype=torch.bfloat16)]
    clip_by_norm([GradientShard(grad, False) for grad in grads], torch.tensor(4.0, dtype=torch.float64), 2.0)
    for grad in grads:
        torch.testing.assert_close(grad.float(), torch.ones(4), atol=1e-5, rtol=1e-5)


def test_clipping_by_value_clamps_both_ends() -> None:
    grad = torch.tensor([-3.0, -0.1, 0.2, 5.0])
    clip_by_value([GradientShard(grad, True)], 0.5)
    assert grad.tolist() == pytest.approx([-0.5, -0.1, 0.2, 0.5])


def test_a_rank_without_gradients_has_norm_zero() -> None:
    assert total_norm([], (), CPU) == 0
    clip_by_norm([], torch.tensor(0.0), 1.0)
    clip_by_value([], 1.0)
