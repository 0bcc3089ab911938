"""What arrived for two micro-batches, put together as if for both at once. No process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_par.pipeline import Arrived
from lightning_par.pipeline.boundary import TensorForm, form_of


def arrived(*tensors: Tensor, extra: object = None) -> Arrived:
    form = (*map(form_of, tensors), extra)
    return Arrived(tensors, {0: form_of(tensors[0]), 1: form})


@pytest.mark.parametrize("shape", [lambda n: (n, 7, 8), lambda n: (7, n, 8)])
@pytest.mark.parametrize("sizes", [(3, 2), (1, 1), (3, 3)])
def test_samples_are_along_one_dim(shape: object, sizes: tuple[int, int]) -> None:
    first, second = (torch.randn(shape(size)) for size in sizes)
    joined = arrived(first, 2 * first).joined(arrived(second, 2 * second), sizes)
    both = torch.randn(shape(sum(sizes)))
    assert [tensor.shape for tensor in joined.tensors] == [both.shape, both.shape]
    assert joined.forms == arrived(both, both).forms
    assert {value.item() for value in joined.tensors[0].flatten()} == {value.item() for value in (*first.flatten(), *second.flatten())}


@pytest.mark.parametrize(
    ("first", "second", "sizes"),
    [
        (arrived(torch.randn(3, 3)), arrived(torch.randn(3, 3)), (3, 3)),
        (arrived(torch.randn(21, 8)), arrived(torch.randn(14, 8)), (3, 2)),
        (arrived(torch.randn(3, 7)), arrived(torch.randn(2, 6)), (3, 2)),
        (arrived(torch.randn(1, 7), torch.randn(1)), arrived(torch.randn(1, 7), torch.randn(1)), (1, 1)),
        (arrived(torch.randn(4, 7), torch.ones(4, 2)), arrived(torch.randn(4, 7), torch.ones(4, 2)), (4, 4)),
        (arrived(torch.randn(3, 7), torch.randn(7, 3)), arrived(torch.randn(2, 7), torch.randn(7, 2)), (3, 2)),
        (arrived(torch.randn(4, 7), extra=4), arrived(torch.randn(4, 7), extra=4), (4, 4)),
        (arrived(torch.randn(3, 7), extra="a"), arrived(torch.randn(2, 7), extra="b"), (3, 2)),
    ],
    ids=["two dims", "rows of samples", "other lengths", "one number", "equal tables", "other dim", "counts", "other values"],
)
def test_what_could_be_anything_is_not_put_together(first: Arrived, second: Arrived, sizes: tuple[int, int]) -> None:
    assert first.joined(second, sizes) is None


def test_forms_of_what_stays_are_joined() -> None:
    form = arrived(torch.randn(3, 7)).joined(arrived(torch.randn(2, 7)), (3, 2)).forms[0]
    assert form == TensorForm((5, 7), torch.float32)
