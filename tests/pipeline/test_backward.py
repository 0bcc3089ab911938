"""A backward in two parts gives the gradients of one in one piece, for any graph. No process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from lightning_par.pipeline.backward import backward_inputs
from lightning_par.pipeline.boundary import Inlet, edges_of
from lightning_par.recipes.gpt import GPTConfig, Layer, rotary_angles

WIDTH = 6


def linear(bias: bool = True) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=bias)


class Stage(nn.Module):
    """The layers of a stage; a subclass says what they do."""

    waits = True
    """Whether all its gradients wait for part W (True), none (False), or some (None)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = linear(), linear(bias=False), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Any:
        return x + self.b(torch.tanh(self.a(self.norm(x))))


class Decoder(Stage):
    def __init__(self) -> None:
        super().__init__()
        config = GPTConfig(hidden=WIDTH, heads=1, ffn=5)
        self.layers = nn.ModuleList(Layer(config) for _ in range(3))
        del self.a, self.b, self.norm

    def forward(self, x: Tensor) -> Any:
        angles = rotary_angles(torch.arange(x.shape[1])[None], WIDTH, 1e4, x.dtype)
        for layer in self.layers:
            x = layer(x, *angles)
        return x


class BiasTwice(Stage):
    waits = None

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.a(x))


class WeightTwice(Stage):
    """The later use's gradient flows through the earlier one."""

    waits = None

    def forward(self, x: Tensor) -> Any:
        return self.b(self.norm(torch.tanh(self.b(x)))) + self.a(x)


class Bare(Stage):
    """Parameters that code uses directly, one of them nonlinearly and twice at one node."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))
        del self.b

    def forward(self, x: Tensor) -> Any:
        return torch.addcmul(self.norm(x), x.exp() / (1 + self.scale.square()), self.a(x), value=0.5) * self.shift


class SharedBranch(Stage):
    """Two branches of one parameter on one node."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Any:
        return super().forward(torch.lerp(x, self.extra * 2, self.extra))


class Parametrized(Stage):
    def __init__(self) -> None:
        super().__init__()
        weight_norm(self.a)


class Doubled(torch.autograd.Function):
    """A custom function with a weight: it computes both gradients always."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return 2 * x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        Doubled.calls += 1
        x, weight = ctx.saved_tensors
        return 2 * grad @ weight, 2 * grad.flatten(0, -2).t() @ x.flatten(0, -2)


class Custom(Stage):
    waits = None

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Any:
        return super().forward(Doubled.apply(x, self.weight))


class Checkpointed(Stage):
    waits = None

    def __init__(self) -> None:
        super().__init__()
        self.last = linear()
        self.runs = 0

    def block(self, x: Tensor) -> Tensor:
        self.runs += 1
        return super().forward(x)

    def forward(self, x: Tensor) -> Any:
        return self.last(checkpoint(self.block, x, use_reentrant=False))


class AllCheckpointed(Stage):
    waits = False

    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


class Packed(Stage):
    """Saved tensors that come from elsewhere, as offloading does it."""

    waits = None

    def forward(self, x: Tensor) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.numpy(), torch.from_numpy):
            x = self.b(x)
        return self.a(self.norm(x))


class Hooked(Stage):
    """Hooks on parameters and on what flows see each gradient once."""

    def __init__(self) -> None:
        super().__init__()
        self.a.weight.register_hook(lambda grad: 3 * grad)
        self.norm.bias.register_hook(lambda grad: 5 * grad)

    def forward(self, x: Tensor) -> Any:
        hidden = self.a(x)
        hidden.register_hook(lambda grad: 2 * grad)
        output = self.norm(hidden) + self.b(x)
        output.register_hook(lambda grad: grad + 1)
        return output


class HookedTwice(Hooked):
    waits = False

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.a(x))


class Frozen(Stage):
    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(False)
        self.norm.bias.requires_grad_(False)


class InPlace(Stage):
    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        y.mul_(self.norm(x))
        y[..., 0] = self.b(x)[..., 1]
        return y.add_(x)


class Several(Stage):
    """Several outputs, one without a gradient, one that does not see the input, one twice."""

    waits = None

    def forward(self, x: Tensor) -> Any:
        left, right = self.a(x).chunk(2, dim=-1)
        aside = self.b.weight.sum()
        return {"out": (left, right), "ids": torch.arange(3), "aside": aside, "again": left, "norm": self.norm(x)}


class Recurrent(Stage):
    waits = None

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.lstm(x)[0])


class Blind(Stage):
    """Does not see the input: all is done at once, and the input's gradient is zero."""

    waits = False

    def forward(self, x: Tensor) -> Any:
        return super().forward(torch.ones_like(x))


STAGES = Stage.__subclasses__() + Hooked.__subclasses__()


def build(kind: type[Stage]) -> Stage:
    torch.manual_seed(0)
    return kind().double()


def run(stage: Stage, way: Callable[..., Any]) -> tuple[Tensor, list[Tensor | None], Any]:
    """The gradients of input and parameters, and what ``way`` returned."""
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    inlet = Inlet([x], grad=True)
    output = stage(*inlet.tensors)
    leaves = [tensor for tensor in torch.utils._pytree.tree_leaves(output) if tensor.is_floating_point()]
    generator = torch.Generator().manual_seed(2)
    grads = [torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator) for tensor in leaves]
    returned = way(edges_of(output), grads, inlet.entry)
    return inlet.take_gradients()[0], [p.grad for p in stage.parameters()], returned


def whole(edges: Any, grads: Any, entry: Tensor) -> None:
    torch.autograd.backward(edges, grads)


@pytest.mark.parametrize("kind", STAGES, ids=lambda kind: kind.__name__)
def test_two_parts_give_the_gradients_of_one_piece(kind: type[Stage]) -> None:
    one, two = build(kind), build(kind)
    input_grad, grads, _ = run(one, whole)
    early: list[bool] = []

    def parts(edges: Any, grads: Any, entry: Tensor) -> None:
        rest = backward_inputs(edges, grads, entry)
        early.extend(p.grad is not None for p in two.parameters() if p.requires_grad)
        rest()

    for _ in range(2):  # the second adds to the first
        assert torch.equal(run(two, parts)[0], input_grad)
    for (name, parameter), grad in zip(two.named_parameters(), grads, strict=True):
        assert (parameter.grad is None) == (grad is None), name
        if grad is not None:
            torch.testing.assert_close(parameter.grad, 2 * grad, rtol=1e-13, atol=1e-13, msg=lambda text, n=name: f"{n}: {text}")
    first = early[: len(early) // 2]
    assert {any(first), all(first)} == ({True, False} if kind.waits is None else {not kind.waits})


def test_accumulate_hooks_run_once_for_each_gradient_when_it_is_complete() -> None:
    stage = build(Decoder)
    seen: list[Tensor] = []
    for parameter in stage.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p))
    _, _, rest = run(stage, backward_inputs)
    assert not seen
    rest()
    assert len(seen) == len({id(p) for p in seen}) == len(list(stage.parameters()))


def test_nothing_is_computed_twice() -> None:
    checkpointed = build(Checkpointed)
    _, _, rest = run(checkpointed, backward_inputs)
    rest()
    assert checkpointed.runs == 2, "the forward, and one recomputation"
    Doubled.calls = 0
    _, _, rest = run(build(Custom), backward_inputs)
    rest()
    assert Doubled.calls == 1


def test_weights_under_autocast_wait_too() -> None:
    def grads(way: Callable[..., Any]) -> list[Tensor]:
        stage = build(Stage).float()
        with torch.autocast("cpu", torch.bfloat16):
            inlet = Inlet([torch.ones(2, 3, WIDTH)], grad=True)
            output = stage(*inlet.tensors)
        rest = way(edges_of(output), [torch.ones_like(output)], inlet.entry)
        if rest is not None:
            assert all(p.grad is None for p in stage.parameters())
            rest()
        return [p.grad for p in stage.parameters()]

    for one, two in zip(grads(whole), grads(backward_inputs), strict=True):
        assert torch.equal(one, two)
