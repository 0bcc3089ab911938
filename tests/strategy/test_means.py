"""What is made of a mean, by its graph. No process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_par.numerics import LossWatch
from lightning_par.strategy.means import bent_by, require_straight

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
Y = torch.tensor([0, 2, 1, 1])


def seen(make: Callable[[], Tensor]) -> tuple[Tensor, LossWatch]:
    watch = LossWatch()
    watch.next_piece()
    with watch:
        return make(), watch


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: F.mse_loss(X, 2 * X.detach()).sqrt(), "sqrt"),
        (lambda: 1 + torch.exp(2 * F.cross_entropy(X, Y)), "exp"),
        (lambda: (F.cross_entropy(X, Y) - 0.1).abs() + 0.1, "abs"),
        (lambda: torch.stack([F.cross_entropy(X, Y), F.l1_loss(X, X.detach() + 1)]).pow(2).sum(), "pow"),
        (lambda: F.cross_entropy(X, Y) * F.l1_loss(X, X.detach() + 1), "mul"),
        (lambda: F.cross_entropy(X, Y) ** torch.tensor(2.0, requires_grad=True), "pow"),
        (lambda: X.sum() / F.cross_entropy(X, Y), "div"),
        (lambda: torch.stack([F.cross_entropy(X, Y), F.l1_loss(X, X.detach() + 1)]).max(), "max"),
        (lambda: F.cross_entropy(X, Y) / X.detach().sum() * X.sum(), None),
        (lambda: F.cross_entropy(X, Y), None),
        (lambda: torch.exp(-X.sum()) * F.cross_entropy(X, Y) + X.sum() / 2, None),
        (lambda: 0.5 * F.cross_entropy(X.exp(), Y) - F.mse_loss(X.sigmoid(), X.detach()).mean().view(1)[0], None),
        (lambda: X.square().mean().sqrt(), None),
    ],
)
def test_functions_of_a_mean_are_found_between_it_and_the_loss(make: Callable[[], Tensor], name: str | None) -> None:
    loss, watch = seen(make)
    assert bent_by(loss, watch.nodes) == name
    if name:
        with pytest.raises(ValueError, match=rf"loss is {name}\(\.\.\.\) of a mean.*microbatches=1"):
            require_straight(loss, watch.nodes)
