"""Layers weighed by the time they take. Time is a number that modules move on themselves: no process, no real seconds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_par.pipeline import LayerCosts, PipelineError, place, weigh

CPU = torch.device("cpu")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, seconds: float) -> Tensor:
        ctx.clock, ctx.seconds = clock, seconds
        clock.now += seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.clock.now += 2 * ctx.seconds
        return grad, None, None


class Part(nn.Module):
    """Takes so long, and twice that backward."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.clock, self.seconds = clock, seconds

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(Slow.apply(self.linear(x), self.clock, self.seconds))


class Model(nn.Module):
    def __init__(self, clock: Clock, *seconds: float, checkpointed: bool = False) -> None:
        super().__init__()
        first, *own, last = seconds
        self.embed = Part(clock, first)
        self.layers = nn.ModuleList(Part(clock, s) for s in own)
        self.head = Part(clock, last)
        self.checkpointed, self.dropped = checkpointed, ()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for i, layer in enumerate(self.layers):
            if i not in self.dropped:
                x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.head(x).sum()


def _weigh(clock: Clock, model: Model, **options: Any) -> LayerCosts:
    return weigh(model, "layers", lambda: model(torch.randn(2, 3)), CPU, clock=clock, **options)


def test_every_layer_costs_its_forward_and_backward_and_so_does_what_stands_around() -> None:
    clock = Clock()
    model = Model(clock, 5, 1, 2, 3, 4)
    assert _weigh(clock, model) == LayerCosts((3, 6, 9), first=15, last=12)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [type(layer) for layer in model.layers] == [Part] * 3


def test_gradients_flow_through_what_is_frozen() -> None:
    clock = Clock()
    model = Model(clock, 5, 1, 2, 3, 4)
    model.layers.requires_grad_(False)
    assert _weigh(clock, model) == LayerCosts((3, 6, 9), first=15, last=12)


def test_evaluation_has_no_backward() -> None:
    clock = Clock()
    model = Model(clock, 5, 1, 2, 3, 4)

    @torch.no_grad()
    def step() -> None:
        model(torch.randn(2, 3))

    assert weigh(model, "layers", step, CPU, clock=clock) == LayerCosts((1, 2, 3), first=5, last=4)


def test_checkpointed_layers_cost_their_forward_twice() -> None:
    clock = Clock()
    assert _weigh(clock, Model(clock, 5, 1, 2, 3, 4, checkpointed=True)) == LayerCosts((4, 8, 12), first=15, last=12)
    clock = Clock()
    model = Model(clock, 5, 1, 2, 3, 4)
    for layer in model.layers:
        layer.forward = lambda x, run=layer.forward: checkpoint(run, x, use_reentrant=False)
    assert _weigh(clock, model) == LayerCosts((4, 8, 12), first=15, last=12)


def test_a_slow_moment_is_no_slow_layer() -> None:
    clock = Clock()
    model = Model(clock, 1, 1, 1, 1)
    calls = iter([0, 100, 0, 7])  # the first run warms up
    real = model.layers[0].forward

    def forward(x: Tensor) -> Tensor:
        clock.now += next(calls)
        return real(x)

    model.layers[0].forward = forward
    assert _weigh(clock, model) == LayerCosts((3, 3), first=3, last=3)


def test_a_layer_that_did_not_run_cannot_be_weighed() -> None:
    clock = Clock()
    model = Model(clock, 1, 1, 1, 1, 1)
    model.dropped = (1,)
    with pytest.raises(PipelineError, match=r"balance=profile: the step did not run layers\.1, .*balance by parameters"):
        _weigh(clock, model)


def test_ranks_agree_on_the_median() -> None:
    measured = [LayerCosts((1, 9), 2, 3), LayerCosts((2, 4), 50, 1), LayerCosts((60, 5), 1, 2)]
    assert LayerCosts.agreed(measured) == LayerCosts((2, 5), 2, 2)


def test_stages_are_cut_by_what_was_measured_embedding_and_head_counted() -> None:
    model = Model(Clock(), *[1.0] * 8)
    assert place(model, 2).sizes == (3, 3)
    assert place(model, 2, balance=LayerCosts((5, 1, 1, 1, 1, 1))).sizes == (1, 5)
    assert place(model, 2, balance=LayerCosts((1,) * 6, first=4)).sizes == (1, 5)
    assert place(model, 3, balance=LayerCosts((1,) * 6, last=3)).sizes == (2, 3, 1)
