"""Losses of torch's, however they are told to add up or to average. No process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_par.numerics import LossWatch

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 2, 1, -100])


@pytest.mark.parametrize(
    ("make", "is_sum", "targets"),
    [
        (lambda: F.mse_loss(X, 2 * X), False, 12),
        (lambda: F.mse_loss(input=X, target=2 * X, reduction="sum"), True, 12),
        (lambda: F.mse_loss(X, 2 * X, None, None, "sum"), True, 12),
        (lambda: nn.GaussianNLLLoss(reduction="sum")(X, 2 * X, X.abs()), True, 12),
        (lambda: F.cross_entropy(X, Y), False, 3),
        (lambda: F.cross_entropy(X, Y, torch.tensor([1.0, 2.0, 4.0])), False, 7),
        (lambda: F.nll_loss(X, Y.clamp(min=0), None, None, 0, None, "sum"), True, 2),
        (lambda: F.cross_entropy(X, X.softmax(-1)), False, 12),
    ],
)
def test_what_a_loss_averages_over_is_seen(make: Callable[[], Tensor], is_sum: bool, targets: float) -> None:
    watch = LossWatch()
    watch.next_piece()
    with watch:
        value = make()
    ((seen,),) = watch.pieces
    assert (seen.is_sum, seen.targets.item(), seen.value.item()) == (is_sum, targets, value.item())


def test_a_loss_of_each_sample_is_none_of_these() -> None:
    watch = LossWatch()
    watch.next_piece()
    with watch:
        F.mse_loss(X, 2 * X, reduction="none").mean()
    assert not watch.has_seen
