"""What a rank holds, walked as tensors, against the formula of Rajbhandari et al. (arXiv 1910.02054), section 5, within 2 %.

With Ψ parameters, N ranks and Adam's two moments, in elements:

=====  ==================  =============  ==================  =======================================================
stage  parameters          gradients      optimizer           in flight, at the high-water mark
=====  ==================  =============  ==================  =======================================================
0      Ψ                   Ψ              2Ψ                  -
1      Ψ                   Ψ              2Ψ / N              -
2      Ψ                   Ψ / N          2Ψ / N              whole gradients of the bucket that fills and of those
                                                              that are on their way (three)
3      Ψ / N               Ψ / N          2Ψ / N              the same, and whole values of two units
=====  ==================  =============  ==================  =======================================================

Counted are the distinct storages of parameters, gradients, optimizer state and flat buffers. What a collective needs while it runs (on
gloo the slices that a reduce-scatter receives, as much as the bucket) and activations are not counted. The weights are larger than what
``bucket.SMALL`` calls small: gradients that are wait for their bucket where autograd left them, so at most a bucket of them more is held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_par.zero import DataParallel, ZeroOptions
from lightning_par.zero.bucket import Bucket
from tests.harness import run_world
from tests.harness.models import mlp
from tests.zero.bare import data_parallel

LAYERS, WIDTH = 12, 96
LAYER = WIDTH * 2 * WIDTH + 2 * WIDTH + 2 * WIDTH * WIDTH + WIDTH  # elements


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(mlp(WIDTH, 2 * WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def held(module: nn.Module, optimizer: Optimizer, dp: DataParallel) -> int:
    """Elements in the distinct storages that this rank holds as state."""
    tensors: list[Tensor | None] = []
    shards = [param for group in optimizer.param_groups for param in group["params"]]
    for param in (*module.parameters(), *shards):
        with torch._C.DisableTorchFunctionSubclass():  # values may be away: then their storage is empty
            tensors += [param.detach(), param.grad]
    tensors += [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    for bucket in dp.buckets:
        tensors += [getattr(bucket, name, None) for name in ("values", "span", "_grads", "_reduced")]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() // t.element_size() for t in tensors if t is not None}
    return sum(storages.values())


@contextmanager
def watched(measure: Callable[[], int]) -> Iterator[list[int]]:
    """The greatest measurement just after every moment in which a bucket may take or give memory."""
    most = [0]

    def after(name: str) -> Callable:
        original = getattr(Bucket, name)

        def method(self: Bucket, *args: object, **kwargs: object) -> object:
            result = original(self, *args, **kwargs)
            most[0] = max(most[0], measure())
            return result

        return mock.patch.object(Bucket, name, method)

    with after("begin"), after("launch"), after("collect"), after("publish"), after("gather"), after("free"):
        yield most


def _measure(stage: int, accumulate: int) -> dict[str, int]:
    module = Stack()
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    options = ZeroOptions(min_unit_mb=0, bucket_mb=LAYER * 4 / 2**20)  # a layer each
    _, dp = data_parallel(module, [optimizer], stage, options=options)
    assert len(dp.buckets) == LAYERS
    told = {}
    for step in range(3):
        with (
            watched(lambda: held(module, optimizer, dp)) as most,
            watched(lambda: sum(b.is_whole for b in dp.buckets) if stage == 3 else 0) as whole,
        ):
            for micro in range(accumulate):
                with dp.no_sync() if micro < accumulate - 1 else nullcontext():
                    module(torch.randn(2, WIDTH)).square().mean().backward()
                    dp.finish()
            optimizer.step()
            told["after the step"] = held(module, optimizer, dp)
            optimizer.zero_grad()
        if step:  # the moments are there
            told |= {"at most": most[0], "whole units": whole[0]}
    dp.settle_values()
    told["after zero_grad"] = held(module, optimizer, dp)
    return told


def _measure_all(stages: tuple[int, ...]) -> dict[tuple[int, int], dict[str, int]]:
    return {(stage, accumulate): _measure(stage, accumulate) for stage in stages for accumulate in (1, 3)}


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_state_is_what_the_formula_says(world: int) -> None:
    psi, n = LAYERS * LAYER, world
    parameters = {0: psi, 1: psi, 2: psi, 3: psi / n}
    gradients = {0: psi, 1: psi, 2: psi / n, 3: psi / n}
    moments = {0: 2 * psi, 1: 2 * psi / n, 2: 2 * psi / n, 3: 2 * psi / n}
    in_flight = {0: 0, 1: 0, 2: 3 * LAYER, 3: 5 * LAYER}
    for told in run_world(_measure_all, world, (0, 1, 2, 3)):
        for (stage, accumulate), got in told.items():
            where = f"stage {stage}, accumulation {accumulate}"
            kept = {0: psi, 1: psi, 2: 0, 3: 0}[stage]  # stages 0 and 1 keep the memory of whole gradients for the next backward
            state = parameters[stage] + moments[stage]
            assert got["after the step"] == pytest.approx(state + gradients[stage], rel=0.02), where
            assert got["after zero_grad"] == pytest.approx(state + kept, rel=0.02), where
            again = LAYER / n * 4 if stage > 1 and accumulate > 1 else 0  # spans that are being added to
            assert got["whole units"] == (2 if stage == 3 else 0), where
            assert got["at most"] <= 1.02 * (state + gradients[stage] + in_flight[stage] + again), where
