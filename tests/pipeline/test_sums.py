"""Gradients that products add up are those that autograd adds up, for any graph; hooks of users see all of theirs. No process."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_par.pipeline.sums import backward_summing
from tests.pipeline.test_backward import STAGES, WIDTH, Frozen, Packed, Stage, WeightTwice, build, run, whole


def summed(stage: Stage, weights: Collection[Tensor] | None = None, *, wait: bool = False) -> set[str]:
    """Run the stage, with backward by sums of products; the names of parameters that autograd did not add to."""
    by_autograd: set[Tensor] = set()
    handles = [param.register_post_accumulate_grad_hook(by_autograd.add) for param in stage.parameters() if param.requires_grad]
    there = [param for param in stage.parameters() if param.grad is not None] if weights is None else weights
    run(stage, lambda edges, grads, entry: backward_summing(*_given(edges, grads), there, wait=wait)())
    for handle in handles:
        handle.remove()
    return {name for name, param in stage.named_parameters() if param.grad is not None and param not in by_autograd}


def _given(edges: Any, grads: Any) -> tuple[list[Any], list[Any]]:
    pairs = [(edge, grad) for edge, grad in zip(edges, grads, strict=True) if edge is not None]
    return [edge for edge, _ in pairs], [grad for _, grad in pairs]


class Conv1D(Stage):
    """Weights that are not transposed (GPT-2's), with a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.rand(*shape)) for shape in [(WIDTH, WIDTH), (WIDTH,)])

    def forward(self, x: Tensor) -> Any:
        return super().forward(torch.addmm(self.bias, x.flatten(0, 1), self.weight, beta=0.5, alpha=3).view(x.shape))


class NoWayOn(Stage):
    """A product whose first factor has no gradient: autograd would not come to it for what lies below."""

    def forward(self, x: Tensor) -> Any:
        return self.b(torch.ones_like(x)) + self.a(x)


class UsedOtherwise(Stage):
    """Weights with another use beside a product, one of them through the same transpose, one as a first factor; and one in an output."""

    def forward(self, x: Tensor) -> Any:
        transposed = self.b.weight.t()
        return super().forward(x @ transposed + transposed.sum() + (self.a.weight @ x[0, 0])), self.norm.weight * 1


class Reentrant(Stage):
    def forward(self, x: Tensor) -> Any:
        return self.a(checkpoint(super().forward, x, use_reentrant=True))


class CutOff(Stage):
    """A custom function that has no gradient for the product before it."""

    def forward(self, x: Tensor) -> Any:
        return _NoGradient.apply(self.b(x)) + self.a(x)


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


class Looked(Stage):
    """A table looked up twice, tied to a product, some of its rows never; and one with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH)
        self.padded = nn.Embedding(5, WIDTH, padding_idx=-2)

    def forward(self, x: Tensor) -> Any:
        ids = (x[..., 0].detach().abs() * 7).long() % 5
        return super().forward((x + self.table(ids) + self.table(ids[0]) + self.padded(ids)) @ self.table.weight.t() @ self.table.weight)


class LookedOtherwise(Stage):
    """Tables whose gradients are others than the sum of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = nn.Embedding(5, WIDTH, scale_grad_by_freq=True)
        self.turned, self.shared = nn.Parameter(torch.rand(WIDTH, 5)), nn.Embedding(5, WIDTH)

    def forward(self, x: Tensor) -> Any:
        ids = (x[..., 0].detach().abs() * 7).long() % 5
        tables = self.counted(ids) + torch.nn.functional.embedding(ids, self.turned.t()) + self.shared(ids) * self.shared.weight.sum()
        return super().forward(x + tables)


class HookOnTranspose(Stage):
    def forward(self, x: Tensor) -> Any:
        transposed = self.b.weight.t()
        transposed.register_hook(lambda grad: 2 * grad)
        return super().forward(x @ transposed)


class HooksOnNodes(Stage):
    """What old ``register_backward_hook`` does, on a product, on a transpose and on a weight's own node; and before a product."""

    def forward(self, x: Tensor) -> Any:
        flat, transposed = x.flatten(0, 1), self.b.weight.t()
        transposed.grad_fn.register_hook(lambda inputs, outputs: (2 * inputs[0],))
        product = self.a(flat @ transposed)
        product.grad_fn.register_hook(lambda inputs, outputs: tuple(3 * grad for grad in inputs))
        before = self.norm(product @ self.last.weight.t())
        before.register_hook(lambda grad: 5 * grad)
        self.calls.append(self.other.weight.expand_as(self.other.weight).grad_fn.next_functions[0][0])
        self.calls[-1].register_hook(lambda *_: self.seen.append(1))
        return self.other(before)

    def __init__(self) -> None:
        super().__init__()
        self.last, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.calls, self.seen = [], []


class OneWeightTwoNodes(Stage):
    """Memory of another kind in between: autograd makes a second node for the weight."""

    def forward(self, x: Tensor) -> Any:
        x, weight, grad = x @ self.b.weight, self.b.weight, self.b.weight.grad
        values, weight.grad = weight.data, None
        weight.data = values.float()
        weight.data, weight.grad = values, grad
        return super().forward(x)


class Variable(Stage):
    """A custom function with an attribute that nodes of parameters have."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(_WithVariable.apply(x))


class _WithVariable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.variable = {}
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class ReturnedTwice(Stage):
    """A product and an embedding that are outputs themselves, and twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH)

    def forward(self, x: Tensor) -> Any:
        product, rows = self.a(x.flatten(0, 1)), self.table((x[..., 0].detach().abs() * 7).long() % 5)
        return product, rows, product, rows, self.b(x)


class WeightReturned(Stage):
    """A weight that is an output itself, beside its product."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.b.weight


class Sparse(Stage):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x + self.table((x[..., 0].detach().abs() * 7).long() % 5))


class RetainedTranspose(Stage):
    """Whose user looks at the gradient of a transpose."""

    def forward(self, x: Tensor) -> Any:
        self.transposed = self.b.weight.t()
        self.transposed.retain_grad()
        return super().forward(x @ self.transposed)


class FrozenAfterwards(Stage):
    """From the second pass on a weight needs no gradient any more when backward begins: autograd adds none."""

    passes = 0

    def forward(self, x: Tensor) -> Any:
        self.passes += 1
        self.b.requires_grad_(True)
        y = super().forward(x)
        self.b.requires_grad_(self.passes == 1)
        return y


class CutOffSometimes(Stage):
    """From the second pass on a custom function has no gradient for the product before it."""

    passes = 0

    def forward(self, x: Tensor) -> Any:
        self.passes += 1
        y = self.b(x)
        return (_NoGradient.apply(y) if self.passes > 1 else y) + self.a(x)


OWN = [kind for kind in Stage.__subclasses__() if kind.__module__ == __name__]
KINDS = [*STAGES, *OWN]


@pytest.mark.parametrize("wait", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_sums_are_those_of_autograd(kind: type[Stage], wait: bool) -> None:
    one, two = build(kind), build(kind)
    for _ in range(2):
        input_grad, grads, _ = run(one, whole)
    run(two, whole)
    summed(two, wait=wait)
    for (name, parameter), grad in zip(two.named_parameters(), grads, strict=True):
        assert (parameter.grad is None) == (grad is None), name
        if grad is not None:
            torch.testing.assert_close(parameter.grad, grad, rtol=1e-13, atol=1e-13, msg=lambda text, n=name: f"{n}: {text}")
    inputs = run(two, lambda edges, grads, entry: backward_summing(*_given(edges, grads), list(two.parameters()), wait=wait))
    assert torch.equal(inputs[0], input_grad), "there before the sums"


def test_sums_that_wait_are_made_when_they_are_asked_for_and_hold_nothing_after() -> None:
    stage, rests = build(Stage), []
    run(stage, whole)
    before = [parameter.grad.clone() for parameter in (stage.a.weight, stage.b.weight)]
    weights = [stage.a.weight, stage.b.weight]
    run(stage, lambda edges, grads, entry: rests.append(backward_summing(*_given(edges, grads), weights, wait=True)))
    assert all(torch.equal(weight.grad, old) for weight, old in zip(weights, before, strict=True))
    (rest,) = rests
    rest()
    torch.testing.assert_close(stage.a.weight.grad, 2 * before[0], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(stage.b.weight.grad, 2 * before[1], rtol=1e-13, atol=1e-13)
    rest()
    torch.testing.assert_close(stage.a.weight.grad, 2 * before[0], rtol=1e-13, atol=1e-13, msg="nothing is left")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Stage, {"a.weight", "b.weight"}),
        (WeightTwice, {"a.weight", "b.weight"}),
        (Conv1D, {"weight", "a.weight", "b.weight"}),
        (NoWayOn, {"a.weight"}),
        (UsedOtherwise, set()),
        (Packed, {"a.weight"}),
        (Frozen, {"b.weight"}),
        (Reentrant, set()),
        (Looked, {"a.weight", "b.weight", "table.weight", "padded.weight"}),
        (LookedOtherwise, {"a.weight", "b.weight"}),
        (HookOnTranspose, {"a.weight"}),
        (HooksOnNodes, {"last.weight"}),
        (OneWeightTwoNodes, {"a.weight"}),
        (Variable, {"a.weight", "b.weight"}),
        (ReturnedTwice, {"a.weight", "b.weight", "table.weight"}),
        (WeightReturned, {"a.weight"}),
        (Sparse, {"a.weight", "b.weight"}),
        (RetainedTranspose, {"a.weight"}),
        (CutOffSometimes, {"a.weight", "b.weight"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_products_add_to(kind: type[Stage], expected: set[str]) -> None:
    stage = build(kind)
    assert summed(stage) == set(), "there was no gradient to add to"
    assert summed(stage) == expected


def test_only_the_given_weights_are_added_to() -> None:
    stage = build(Stage)
    run(stage, whole)
    assert summed(stage, [stage.a.weight]) == {"a.weight"}


def test_hooks_on_nodes_run_once_a_pass() -> None:
    stage = build(HooksOnNodes)
    for _ in range(3):
        summed(stage)
    assert len(stage.seen) == 1 + 2 + 3, "each pass has put one more there"


def test_hooks_of_parameters_see_every_gradient() -> None:
    stage, seen = build(Stage), []
    stage.a.weight.register_hook(lambda grad: seen.append(grad) or 2 * grad)
    run(stage, whole)
    assert summed(stage) == {"b.weight"}
    assert len(seen) == 2


def test_gradients_of_another_dtype_are_left_to_autograd() -> None:
    stage = build(Stage).float()
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            output = stage(torch.ones(2, 3, WIDTH, requires_grad=True))
        edges = [torch.autograd.graph.get_gradient_edge(output)]
        backward_summing(edges, [torch.ones_like(output)], [param for param in stage.parameters() if param.grad is not None])
    once = build(Stage).float()
    with torch.autocast("cpu", torch.bfloat16):
        (2 * once(torch.ones(2, 3, WIDTH)).sum()).backward()
    for got, wanted in zip(stage.parameters(), once.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-2, atol=1e-2)


def test_a_gradient_that_was_taken_away_meanwhile_begins_anew() -> None:
    weights: list[Tensor] = []

    def take(grad: Tensor) -> None:
        for weight in weights:
            weight.grad = None

    class Taking(Stage):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            y.register_hook(take)
            return y

    stage = build(Taking)
    _, once, _ = run(stage, whole)
    once = [grad.clone() for grad in once]
    weights += [stage.a.weight, stage.b.weight]
    summed(stage)
    for got, wanted in zip(weights, (once[0], once[2]), strict=True):
        torch.testing.assert_close(got.grad, wanted, rtol=1e-13, atol=1e-13)


def test_a_graph_that_was_used_up_says_so() -> None:
    stage = build(Stage)
    run(stage, whole)
    output = stage(torch.ones(2, 3, WIDTH, dtype=torch.float64, requires_grad=True))
    edges, grads = [torch.autograd.graph.get_gradient_edge(output)], [torch.ones_like(output)]
    backward_summing(edges, grads, [])
    with pytest.raises(RuntimeError, match="second time"):
        backward_summing(edges, grads, list(stage.parameters()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("stream", [False, True], ids=["default stream", "another stream"])
def test_sums_on_a_gpu(stream: bool) -> None:
    """The hook runs where the node runs, after what its forward ran after."""
    one, two = (nn.Sequential(nn.Embedding(4096, 2048), nn.Linear(2048, 2048), nn.GELU(), nn.Linear(2048, 2048)) for _ in range(2))
    two.load_state_dict(one.state_dict())
    one, two = one.cuda(), two.cuda()
    xs = [torch.randint(4096, (512,), device="cuda") for _ in range(4)]
    sum(one(x).square().sum() for x in xs).backward()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream() if stream else torch.cuda.current_stream()):
        for x in xs:
            loss = two(x).square().sum()
            weights = [param for param in two.parameters() if param.grad is not None]
            backward_summing([torch.autograd.graph.get_gradient_edge(loss)], [torch.ones_like(loss)], weights)
    torch.cuda.synchronize()
    for got, wanted in zip(two.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-3, atol=1e-3 * float(wanted.grad.abs().max()))
