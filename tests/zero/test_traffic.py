"""What goes over the wire in a step, counted: no stage sends more than its share, and never the whole model."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from lightning_par.comm.trace import Sent
from lightning_par.zero import ZeroOptions
from tests.harness import run_world
from tests.harness.models import mlp
from tests.zero.bare import adamw, data_parallel

BLOCKS = 4
PARAMETERS = 4 * BLOCKS + 4


class Stack(torch.nn.Module):
    """Equal layers, and something small around them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(5, 12)
        self.layers = torch.nn.ModuleList(mlp(12, 24, 12) for _ in range(BLOCKS))
        self.last = torch.nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for layer in self.layers:
            h = h + layer(h)
        return self.last(h)


def _step(stage: int, accumulate: int, replicate: int, options: ZeroOptions) -> tuple[int, int, list[list[Sent]]]:
    """Parameters; elements of the padded buckets; what each of three steps sent that is as wide as a parameter."""
    torch.set_default_dtype(torch.float64)
    module = Stack()
    optimizers = adamw(module)
    mesh, dp = data_parallel(module, optimizers, stage, replicate=replicate, options=options)
    steps = []
    for _ in range(3):
        with mesh.trace.recording() as sent:
            for micro in range(accumulate):
                with dp.no_sync() if micro < accumulate - 1 else nullcontext():
                    module(torch.randn(4, 5)).square().mean().backward()
                    dp.finish()
            optimizers[0].step()
            optimizers[0].zero_grad()
        steps.append([call for call in sent if call.itemsize == 8 and call.elements > 2 * mesh.world.size])
    return sum(p.numel() for p in module.parameters()), sum(bucket.plan.size for bucket in dp.buckets), steps


def _steps(cases: dict[str, tuple]) -> dict[str, tuple]:
    return {name: _step(*case) for name, case in cases.items()}


def _elements(calls: list[Sent]) -> int:
    return sum(call.elements for call in calls)


SMALL = ZeroOptions(min_unit_mb=0, bucket_mb=1e-3)
CASES = {f"stage{stage} k{k}": (stage, k, 1, SMALL) for stage in (0, 1, 2, 3) for k in (1, 3)}


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_step_sends_two_or_three_times_the_parameters(world: int) -> None:
    ranks = run_world(_steps, world, CASES)
    for results in ranks:
        for name, (parameters, padded, steps) in results.items():
            share = (world - 1) / world
            assert padded - parameters < 40, "padding is a few elements a bucket"
            for sent in map(_elements, steps):
                match name:
                    case "stage0 k1" | "stage0 k3":  # and which parameters were used
                        assert 0 <= sent - 2 * padded * share <= 2 * PARAMETERS, name
                    case "stage1 k1" | "stage1 k3" | "stage2 k1":
                        assert sent == pytest.approx(2 * padded * share, abs=20), name  # whole numbers of elements a bucket
                    case "stage2 k3":
                        assert sent == pytest.approx(4 * padded * share), "each backward reduces, since nobody keeps whole gradients"
                    case "stage3 k1":
                        unit = padded / BLOCKS
                        assert 3 * padded * share - unit <= sent <= 3 * padded * share, name
                    case "stage3 k3":
                        assert sent <= 9 * padded * share
    for name in CASES:
        for step in range(3):
            orders = [[(c.op, c.group, c.elements) for c in results[name][2][step]] for results in ranks]
            assert orders[1:] == orders[:-1], f"{name}: every rank sends the same in the same order"


def test_no_message_is_a_copy_of_the_model() -> None:
    for results in run_world(_steps, 2, CASES):
        for parameters, _, steps in results.values():
            assert max(call.elements for sent in steps for call in sent) < parameters / 3


def test_replicas_exchange_spans_only() -> None:
    cases = {f"stage{stage}": (stage, 1, 2, SMALL) for stage in (1, 2, 3)}
    for results in run_world(_steps, 4, cases):
        for name, (_, padded, steps) in results.items():
            for sent in steps:
                across = _elements([call for call in sent if call.group == "replicate"])
                assert across == pytest.approx(padded / 2, abs=20), name  # an all-reduce of half the elements between two
                assert _elements(sent) - across <= (3 if name == "stage3" else 2) * padded / 2 + 20


def _alone() -> None:
    torch.set_default_dtype(torch.float64)
    for stage in (0, 1, 2, 3):
        module = Stack()
        params = list(module.parameters())
        storages = [p.untyped_storage().data_ptr() for p in params]
        optimizers = adamw(module)
        mesh, dp = data_parallel(module, optimizers, stage)
        assert not dp.buckets
        assert [p.untyped_storage().data_ptr() for p in params] == storages
        hooked = [m for m in module.modules() if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks]
        assert not hooked
        assert not any(p._post_accumulate_grad_hooks or p._backward_hooks for p in params)
        assert {id(p) for group in optimizers[0].param_groups for p in group["params"]} == {id(p) for p in params}
        with mesh.trace.recording() as sent:
            module(torch.randn(4, 5)).square().mean().backward()
            grads = [p.grad for p in params]
            dp.finish()
            optimizers[0].step()
        assert all(p.grad is grad for p, grad in zip(params, grads, strict=True))
        assert not sent


def test_one_rank_has_no_hooks_no_buckets_and_no_copies() -> None:
    run_world(_alone, 1)
