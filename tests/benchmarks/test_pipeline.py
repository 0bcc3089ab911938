"""What the pipeline benchmark compares: its settings, without a process."""

from __future__ import annotations

import pytest
import torch

from benchmarks.pipeline import TORCH, Bench, SleepingModel
from lightning_par.layout import SCHEDULES

BENCH = Bench(ranks=4, microbatches=8, elements=3, nap=0.5)


def test_every_schedule_takes_as_long_without_its_bubble() -> None:
    """8 micro-batches of 3 naps each, and what the published formulas add to them."""
    bubbles = {name: BENCH.simulated(name) - 8 * 3 * BENCH.nap for name in SCHEDULES}
    assert bubbles == pytest.approx({"gpipe": 4.5, "1f1b": 4.5, "interleaved_1f1b": 2.25, "zb_h1": 1.5, "zbv": 0.75})
    assert set(TORCH) < set(SCHEDULES)


def test_sleeping_layers_have_real_gradients() -> None:
    model = SleepingModel(2, 0.0)
    model(torch.ones(5)).sum().backward()
    assert [layer.weight.grad.item() for layer in model.layers] == [5.0, 5.0]
    assert [len(BENCH.layers(name).layers) for name in ("1f1b", "zbv")] == [4, 8]
