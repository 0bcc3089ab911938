"""What is the mean of its parts, by numbers. No process."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_par.strategy.trial import Outcome, tolerance

DOUBLE, SINGLE, HALF = (torch.finfo(kind).eps for kind in (torch.float64, torch.float32, torch.bfloat16))


@pytest.mark.parametrize(
    ("numbers", "precision", "is_combined"),
    [
        ((1.0, 2.0, 1.5, 1.5, 1.5), DOUBLE, True),
        ((1.0, 2.0, 1.5, 1.5001, 1.5001), DOUBLE, False),
        ((1.0, 2.0, 1.5, 1.5001, 1.5001), SINGLE, True),
        ((1.0, 2.0, 1.5, 1.51, 1.51), SINGLE, False),
        ((1.0, 2.0, 1.5, 1.51, 1.51), HALF, True),
        ((1.0, 2.0, 1.5, 3.0, 3.0), HALF, False),
        ((1.0, 2.0, 1.5, 1.5, 1.6), SINGLE, None),
        ((1.0, 2.0, 1.5, 1.502, 1.5015), SINGLE, True),
        ((math.nan, 2.0, math.nan, 1.5, 1.5), SINGLE, None),
        ((math.inf, 2.0, math.inf, math.inf, math.inf), SINGLE, None),
        ((0.0, 0.0, 0.0, 0.0, 0.0), SINGLE, True),
        ((1e-9, 2e-9, 1.5e-9, -3e-9, -3e-9), SINGLE, True),
    ],
)
def test_a_number_is_compared_as_closely_as_it_is_precise(numbers: tuple[float, ...], precision: float, is_combined: bool | None) -> None:
    assert Outcome("", *numbers).is_combined(precision) is is_combined


def test_less_precise_numbers_may_differ_more() -> None:
    assert tolerance(DOUBLE) < tolerance(SINGLE) < tolerance(HALF) < 0.1
