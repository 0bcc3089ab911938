"""What a piece of a batch weighs. See Note [The weight of a loss]."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_par.numerics import batch_size, loss_weight

IDS = torch.arange(10).reshape(2, 5)


@pytest.mark.parametrize(
    ("batch", "weight"),
    [
        ({"input_ids": IDS, "labels": IDS}, 8),  # the first of each row predicts nothing
        ({"input_ids": IDS, "labels": torch.where(IDS > 6, IDS, -100)}, 3),
        ({"input_ids": IDS, "labels": IDS, "shift_labels": torch.where(IDS > 7, IDS, -100)}, 2),
        ({"pixels": torch.zeros(4, 3, 8, 8), "labels": torch.tensor([1, -100, 2, 3])}, 3),
        ({"input_ids": IDS, "labels": torch.zeros(2)}, 2),  # regression: samples
        ({"input_ids": IDS}, 2),
        ((torch.zeros(7, 3), torch.zeros(7)), 7),
        (torch.zeros(3, 2), 3),
        ([torch.tensor(1.0), {"x": torch.zeros(5, 1)}], 5),
        (UserDict(input_ids=IDS, labels=IDS), 8),
    ],
)
def test_labels_count_if_there_are_any_else_samples(batch: Any, weight: float) -> None:
    assert loss_weight(batch).item() == weight


def test_N1_weighted_pieces_make_the_loss_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 6, 9, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 9, (4, 6), generator=generator)
    labels[0, :5] = -100

    def loss(rows: slice) -> torch.Tensor:
        return F.cross_entropy(logits[rows, :-1].flatten(0, 1), labels[rows, 1:].flatten())

    pieces = [slice(0, 1), slice(1, 4)]
    weights = torch.stack([loss_weight({"input_ids": labels[rows], "labels": labels[rows]}) for rows in pieces])
    joined = (torch.stack([loss(rows) for rows in pieces]) * weights).sum() / weights.sum()
    torch.testing.assert_close(joined, loss(slice(0, 4)))


@pytest.mark.parametrize("batch", [None, "text", {"note": "nothing"}, torch.tensor(1.0)])
def test_a_batch_without_samples_is_refused_with_a_way_out(batch: Any) -> None:
    with pytest.raises(ValueError, match=r"cannot tell the number of samples .* pp=1"):
        batch_size(batch)
