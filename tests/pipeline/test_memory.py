"""What a rank holds, in bytes, is what the simulator says: every storage that a step makes is counted, from its birth to its end."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_par.layout import SCHEDULES
from lightning_par.pipeline import Pipeline, peak_held, training_plan
from lightning_par.pipeline.backward import backward, backward_inputs
from lightning_par.pipeline.boundary import Inlet, edges_of
from tests.harness import run_world
from tests.pipeline.parity import pp_group

ROWS, WIDTH, DEPTH = 256, 4, 70
SIZE = ROWS * WIDTH * 8
"""Bytes of an activation: much, beside the weights; a stage has so many that those on their way between stages hardly count."""


class Meter(TorchDispatchMode):
    """Bytes of the storages that come to be inside the block: now, and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (key := tensor.untyped_storage()._cdata) not in self.alive | given:
                self._born(tensor.untyped_storage(), key)
        return result

    def _born(self, storage: torch.UntypedStorage, key: int) -> None:
        self.alive.add(key)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, storage.nbytes())

    def _gone(self, key: int, size: int) -> None:
        self.alive.discard(key)
        self.now -= size


class Block(nn.Module):
    """Holds 2 DEPTH + 1 activations, its input included. For its weights it needs as many of them as it has layers, and gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight).exp()
        return x


class Model(nn.Module):
    def __init__(self, stages: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(stages))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def _peak(size: int, schedule: str, chunks: int, microbatches: int) -> float:
    """In activations."""
    model = Model(size * chunks).double()
    pipeline = Pipeline.split(model, pp_group(size), schedule, chunks)
    pieces = torch.randn(microbatches, ROWS, WIDTH, dtype=torch.float64).unbind()
    gc.disable()

    def step(count: int) -> None:
        pipeline.forward_backward(lambda m: model(pieces[m]), ["same"] * count)

    step(1)  # from here on weights have gradients, which are none of a step's activations
    with Meter() as meter:
        step(microbatches)
    return meter.peak / SIZE


def _cases(microbatches: int, *marks: Any) -> list[Any]:
    return [pytest.param(name, 2 if name in ("interleaved_1f1b", "zbv") else 1, microbatches, marks=marks) for name in SCHEDULES]


@pytest.mark.parametrize(("schedule", "chunks", "microbatches"), _cases(4) + _cases(2, pytest.mark.slow) + _cases(9, pytest.mark.slow))
def test_the_peak_of_activations_is_the_simulators_within_five_percent(schedule: str, chunks: int, microbatches: int) -> None:
    size = 3
    stages = size * chunks
    held, waiting = [2.0 * DEPTH + 1] * stages, [2.0 * DEPTH] * stages
    waiting[0] = 0.0  # the first stage has no input: all its backward is done at once
    expected = peak_held(training_plan(schedule, size, chunks, microbatches), held, waiting)
    assert run_world(_peak, size, size, schedule, chunks, microbatches) == pytest.approx(expected, rel=0.05)


def _stage(way: Callable[..., Any]) -> tuple[Meter, Any]:
    block = Block().double()
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    meter = Meter()
    with meter:
        inlet = Inlet([x], grad=True)
        output = block(*inlet.tensors)
        inlet.tensors.clear()
        edges = edges_of(output)
        del output
        assert meter.now / SIZE == pytest.approx(2 * DEPTH, rel=0.02)
        rest = way(edges, [torch.ones_like(x)], inlet.entry)
    return meter, rest


def test_the_first_part_of_a_backward_keeps_only_what_the_second_needs() -> None:
    """What tanh saved goes, node by node, as gradients for the second part come: there is never more than before."""
    meter, rest = _stage(backward_inputs)
    assert meter.now / SIZE == pytest.approx(2 * DEPTH, rel=0.02)
    assert meter.peak / SIZE == pytest.approx(2 * DEPTH, rel=0.05)
    with meter:
        rest()
    del rest
    gc.collect()
    assert meter.now < DEPTH * SIZE / 50


def test_a_backward_in_one_piece_keeps_nothing() -> None:
    meter, _ = _stage(lambda edges, grads, entry: backward(edges, grads))
    assert meter.now / SIZE < 0.05 * DEPTH
