"""What users do with parameters, gradients and outputs that is not in the textbook: the numbers of one process, or a named error."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_par.zero import ZeroOptions
from lightning_par.zero.guard import GuardedParameter
from tests.harness import run_world
from tests.zero.bare import data_parallel, weights

SIZE = 130  # of a matrix whose gradient is not a small one


class Pair(nn.Module):
    """A small and a large parameter, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Parameter(torch.ones(SIZE))
        self.large = nn.Parameter(torch.eye(SIZE))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self) -> Tensor:
        return (self.large @ self.small).sum()


class Broken(RuntimeError):
    pass


class _Break(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        raise Broken


def _refused(stage: int, misuse: Callable[..., None]) -> str:
    module = Pair()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    _, dp = data_parallel(module, [optimizer], stage, scaled=True)
    dp.optimizer = optimizer
    with pytest.raises(RuntimeError) as caught:
        misuse(module, dp)
    return str(caught.value)


def twice(module: nn.Module, dp: object) -> None:
    module().backward()
    module().backward()


def stepped_too_early(module: nn.Module, dp: object) -> None:
    module().backward()
    dp.optimizer.step()


def again_after_an_exception(module: nn.Module, dp: object) -> None:
    broken = _Break.apply(module.unused).sum()  # what comes first goes backward last
    with suppress(Broken):
        (module() + broken).backward()
    module().backward()


def with_a_graph(module: nn.Module, dp: object) -> None:
    module().backward(create_graph=True)


def rescaled_too_early(module: nn.Module, dp: object) -> None:
    module().backward()
    dp.loss_scale = 4.0


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(
    ("misuse", "told"),
    [
        (twice, "second gradient before its first was reduced"),
        (again_after_an_exception, "second gradient before its first was reduced"),
        (with_a_graph, "create_graph=True"),
        (rescaled_too_early, "between backward passes"),
        (stepped_too_early, "not averaged over the ranks yet"),
    ],
)
def test_what_would_give_wrong_gradients_is_refused(stage: int, misuse: Callable[..., None], told: str) -> None:
    assert told in run_world(_refused, 1, stage, misuse)[0]


def _gradients_asked_for() -> tuple[list[float], list[float]]:
    module = Pair()
    _, dp = data_parallel(module, [torch.optim.SGD(module.parameters(), lr=0.1)], 0, scaled=True)
    dp.loss_scale = 8.0
    (8.0 * module()).backward()
    dp.finish()
    before = [module.small.grad.sum().item(), module.large.grad.sum().item()]
    torch.autograd.grad(module(), [module.small, module.large])
    return before, [module.small.grad.sum().item(), module.large.grad.sum().item()]


def test_gradients_that_are_only_asked_for_leave_published_ones_alone() -> None:
    before, after = run_world(_gradients_asked_for, 1)[0]
    assert before == after == [SIZE, SIZE * SIZE]


Meddle = Callable[[nn.Module, torch.optim.Optimizer, int], None]


def _trained(make: Callable[[], nn.Module], stage: int | None, loss: Callable[[nn.Module], Tensor], meddle: Meddle) -> dict[str, Tensor]:
    """Three steps of SGD, each after ``meddle(module, optimizer, step)``; ``stage=None``: in one process."""
    module = make()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    dp = None if stage is None else data_parallel(module, [optimizer], stage)[1]
    for step in range(3):
        meddle(module, optimizer, step)
        loss(module).backward()
        if dp is not None:
            dp.finish()
        optimizer.step()
        optimizer.zero_grad()
    return weights(module)


def _assert_as_in_one_process(
    stage: int, meddle: Meddle, make: Callable[[], nn.Module] = Pair, loss: Callable[[nn.Module], Tensor] = Pair.__call__
) -> None:
    want = _trained(make, None, loss, meddle)
    for rank in run_world(_trained, 2, make, stage, loss, meddle):
        for name, value in want.items():
            torch.testing.assert_close(rank[name], value, msg=lambda text, name=name: f"{name}: {text}")


def _fail_in_backward(module: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    broken = _Break.apply(module.unused).sum()
    with suppress(Broken):
        (7 * module() + broken).backward()
    optimizer.zero_grad()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_zero_grad_makes_good_for_a_backward_that_an_exception_ended(stage: int) -> None:
    _assert_as_in_one_process(stage, _fail_in_backward)


class Twins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight.data = self.a.weight.data


def _set_up(make: Callable[[], nn.Module], stage: int) -> str:
    module, told = make(), ""
    try:
        data_parallel(module, [torch.optim.SGD(module.parameters(), lr=0.1)], stage)
    except ValueError as error:
        told = str(error)
    torch.distributed.barrier()
    return told


def test_parameters_over_one_memory_are_refused_where_they_are_sharded() -> None:
    assert "a.weight and b.weight" in run_world(_set_up, 2, Twins, 1)[0]
    assert not run_world(_set_up, 2, Twins, 0)[0]


def _sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 3, sparse=True))


def test_sparse_gradients_are_refused() -> None:
    assert "sparse=False" in run_world(_set_up, 2, _sparse, 0)[0]


def _give_other_memory(module: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 1:
        module.small.data = module.small.data * 2


@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_that_were_given_other_memory_train_on(stage: int) -> None:
    _assert_as_in_one_process(stage, _give_other_memory)


@dataclass
class Output:
    h: Tensor


class Dataclass(nn.Module):
    """Returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, h: Tensor) -> Output:
        return Output(self.linear(h).tanh())


class Detached(nn.Module):
    """Its backward needs values after all its gradients have come."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, h: Tensor) -> Output:
        return Output((h @ self.weight.detach() + h.detach() @ self.weight).tanh())


@dataclass(slots=True, frozen=True)
class Rows:
    rows: Tensor


class Table(nn.Module):
    """Gives away a view of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 4))

    def forward(self, rows: int, *, packed: bool) -> Tensor | Rows:
        return Rows(self.table[:rows]) if packed else self.table[:rows]


class Positioned(nn.Module):
    """Later layers multiply with what an earlier module returned of its own."""

    def __init__(self, *, packed: bool) -> None:
        super().__init__()
        self.table, self.packed = Table(), packed
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, h: Tensor) -> Tensor:
        table = self.table(h.shape[0], packed=self.packed)
        table = table.rows if self.packed else table
        for layer in self.layers:
            h = layer(h).tanh() * table
        return h


class Chain(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(4))

    def forward(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h).h
        return h


class Shared(nn.Module):
    """One weight in all layers: each use of a layer is one of the rest of the model too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(4))
        for layer in self.layers:
            layer[0].weight = self.layers[0][0].weight

    def forward(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h).tanh()
        return h


class Nested(nn.Module):
    """Containers in a container; and a part of a layer is called without the layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())]) for _ in range(3))
        self.deep = nn.ModuleDict({"deeper": nn.ModuleDict({"net": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))})})

    def forward(self, h: Tensor) -> Tensor:
        net = self.deep["deeper"]["net"]
        h = net[1](h)
        for first, second in self.layers:
            h = second(first(h).tanh()) + net[0](h)
        return net(h) + checkpoint(net[1], h, use_reentrant=False)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a dataclass": lambda: Chain(Dataclass),
    "a detached weight": lambda: Chain(Detached),
    "a view of a parameter": lambda: Positioned(packed=False),
    "a view of a parameter in a dataclass": lambda: Positioned(packed=True),
    "a weight in all layers": Shared,
    "containers in a container": Nested,
}


def _train(name: str, prefetch: int | None) -> dict[str, Tensor]:
    """Three steps, on every rank over the same rows; ``prefetch=None``: in one process."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    module = MODELS[name]()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    finish = None
    if prefetch is not None:
        options = ZeroOptions(min_unit_mb=0, prefetch=prefetch, units=("Sequential",) if name == "a weight in all layers" else ())
        finish = data_parallel(module, [optimizer], 3, options=options)[1].finish
    for batch in torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(1)):
        module(batch).square().mean().backward()
        if finish is not None:
            finish()
        optimizer.step()
        optimizer.zero_grad()
    return weights(module)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_backward_finds_the_values_of_units_that_it_needs(name: str, prefetch: int) -> None:
    before = torch.get_default_dtype()
    try:
        want = _train(name, None)
    finally:
        torch.set_default_dtype(before)
    for rank in run_world(_train, 2, name, prefetch):
        for key, value in want.items():
            torch.testing.assert_close(rank[key], value, rtol=0, atol=1e-10, msg=lambda text, key=key: f"{key}: {text}")


class Marked(nn.Parameter):
    pass


def _classes() -> list[str]:
    module = Pair()
    module.small = Marked(torch.ones(SIZE))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    _, dp = data_parallel(module, [optimizer], 1)
    module().backward()
    dp.finish()
    optimizer.step()
    dp.settle_values()
    return [type(param).__name__ for param in (module.small, module.large)]


def test_parameters_keep_their_class() -> None:
    assert run_world(_classes, 2) == [["Marked", "Parameter"]] * 2


def _script() -> nn.Module:
    torch.manual_seed(0)
    return torch.jit.script(nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, 3)))


def _of_ones(module: nn.Module) -> Tensor:
    loss = module(torch.ones(2, SIZE)).square().mean()
    assert not any(isinstance(param, GuardedParameter) for param in module.parameters()), "it would read values before they are there"
    return loss


@pytest.mark.parametrize("stage", [1, 2])
def test_scripted_modules_wait_for_values_that_they_read_without_asking(stage: int) -> None:
    _assert_as_in_one_process(stage, _nothing, _script, _of_ones)


def _nothing(*_: object) -> None:
    """Does not meddle."""


def _additions() -> None:
    for stage in (0, 1, 2):
        _add(stage)


def _add(stage: int) -> None:
    torch.manual_seed(0)
    module = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    _, dp = data_parallel(module, [optimizer], stage)

    def told() -> list[bool]:
        return [dp.may_add(param) for param in (module.weight, module.bias)]

    def backward() -> None:
        module(torch.ones(2, 5)).sum().backward()

    assert told() == [False, False]
    with dp.hold():
        backward()
        assert told() == [True, True], "whole gradients are being added up"
        handle = module.weight.register_post_accumulate_grad_hook(lambda param: None)
        assert told() == [False, True], "a hook of somebody else wants to know"
        handle.remove()
    dp.finish()
    assert told() == [False, False], "gradients were published"


def test_gradients_may_be_added_to_by_others_while_they_are_collected() -> None:
    run_world(_additions, 2)
