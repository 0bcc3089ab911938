"""What only another stage can compute: it spreads through whatever is computed from it, and is refused where it would count."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_par.pipeline import PipelineError, Unknown, require_known
from lightning_par.pipeline.torch_functions import tensors_in
from lightning_par.pipeline.unknown import Origin, UnknownObject, unknown, unknown_weight

CPU = torch.device("cpu")


def x(dtype: torch.dtype = torch.float32) -> Tensor:
    return unknown((2, 3), dtype, CPU, Origin("what embed returns", "Do it otherwise"))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@pytest.mark.parametrize(
    "compute",
    [
        lambda: x() + 1,
        lambda: 1 - x()[0],
        lambda: x().detach().data.T,
        lambda: x() > 0,
        lambda: x().argmax(-1),
        lambda: torch.zeros(9)[x(torch.long)],
        lambda: torch.where(x(torch.bool), 1.0, 0.0),
        lambda: torch.stack([torch.zeros(3), x()[0]]),
        lambda: sum(x()),
        lambda: x().split(1),
        lambda: x().topk(2),
        lambda: nn.Linear(3, 3)(x()),
        lambda: nn.BatchNorm1d(3)(x()),
        lambda: nn.LSTM(3, 3)(x())[0],
        lambda: nn.TransformerEncoderLayer(3, 1).eval()(x()),
        lambda: F.dropout(x(), 0.5),
        lambda: Doubled.apply(x()),
        lambda: torch.compile(torch.sin, backend="eager")(x()),
        lambda: torch.zeros(2, 3).add_(x()),
        lambda: torch.add(torch.ones(2, 3), x().detach(), out=torch.empty(2, 3)),
        lambda: torch.zeros(4, 3).scatter_(1, x(torch.long), 1.0),
        lambda: copy.deepcopy(x()),
        lambda: F.relu(x() + 1, inplace=True),
        lambda: torch.view_as_complex(x().T.contiguous().view(3, 2)),
        lambda: torch.linalg.eigvals(x() @ x().T),
        lambda: torch.normal(x(), x()),
        lambda: x().zero_().add_(x()),
        lambda: unknown_weight(torch.empty(2, 3), CPU, Origin("head.weight", "")).norm(),
    ],
)
def test_what_is_computed_from_it_is_unknown(compute: Callable[[], Any]) -> None:
    output = compute()
    assert all(isinstance(tensor, Unknown) for tensor in tensors_in(output))
    with pytest.raises(PipelineError, match=r"^the loss needs (what embed returns|head\.weight), which is on another pipeline stage\. "):
        require_known({"loss": output}, "the loss")


@pytest.mark.parametrize(
    "compute",
    [
        lambda: torch.zeros_like(x()),
        lambda: x().new_ones(2),
        lambda: torch.zeros(2, 3).type_as(x()).expand_as(x()),
        lambda: torch.zeros(2, 3).to(x()),
        lambda: torch.arange(x().shape[1], device=x().device, dtype=x().dtype),
        lambda: x().fill_(1.0),
        lambda: torch.empty(2, 3).copy_(x()).zero_() + len(x()),
    ],
)
def test_what_is_computed_from_its_shape_alone_is_known(compute: Callable[[], Tensor]) -> None:
    assert type(compute()) is Tensor


def test_a_tensor_is_unknown_from_when_it_is_written_to() -> None:
    whole = torch.zeros(4, 3)
    whole[1:3][0] = x()[0]
    assert isinstance(whole, Unknown)
    assert type(whole.zero_()) is Tensor


@pytest.mark.parametrize(
    "ask",
    [
        lambda: bool(x().isnan().all()),
        lambda: float(x().sum()),
        lambda: x().tolist(),
        lambda: x().numpy(),
        lambda: sorted(x()[0]),
        lambda: [1, 2, 3][x().argmax()],
        lambda: torch.tensor([x()[0, 0], 1.0]),
        lambda: torch.equal(x(), x()),
        lambda: x()[x() > 0],
        lambda: torch.zeros(2, 3)[x(torch.bool)],
        lambda: x().nonzero(),
        lambda: torch.where(x(torch.bool)),
        lambda: torch.repeat_interleave(torch.ones(2), x(torch.long)[:, 0]),
        lambda: F.one_hot(x(torch.long)),
        lambda: F.one_hot(x(torch.long), num_classes=-1),
    ],
)
def test_nobody_gets_a_number_of_it_nor_a_shape_that_depends_on_one(ask: Callable[[], Any]) -> None:
    with pytest.raises(PipelineError, match=r"a number, or .* needs what embed returns, .* Do it otherwise; or use pp=1"):
        ask()


def test_what_is_known_that_replaces_it_keeps_its_graph() -> None:
    weight = nn.Parameter(torch.ones(2, 3))
    tensor = x()
    tensor.register_hook(lambda grad: grad)
    tensor.copy_(weight * 2)
    assert type(tensor) is Tensor
    tensor.sum().backward()
    assert torch.equal(weight.grad, torch.full((2, 3), 2.0))


def test_it_is_not_pickled() -> None:
    with pytest.raises(PipelineError, match="pickles a tensor, and that needs what embed returns"):
        pickle.dumps(x())


def test_nobody_gets_a_gradient_of_it() -> None:
    known = torch.ones(2, 3, requires_grad=True)
    for ask in (lambda: x().sum().backward(), lambda: torch.autograd.grad((known * 2).sum(), [known, x()])):
        with pytest.raises(PipelineError, match="asks for a gradient, and that needs what embed returns"):
            ask()


def test_it_is_not_written_into_weights() -> None:
    weight = nn.Parameter(torch.ones(3))
    for write in (lambda: weight.copy_(x()[0]), lambda: weight[:1].mul_(x()[0, 0])):
        with pytest.raises(PipelineError, match="writes to a weight, and that needs what embed returns"), torch.no_grad():
            write()
    assert torch.equal(weight, torch.ones(3))


def test_random_numbers_are_drawn_as_by_a_real_tensor() -> None:
    drawn = []
    for tensor in (torch.ones(2, 3), x()):
        torch.manual_seed(0)
        F.dropout(tensor, 0.5)
        drawn.append(torch.rand(()))
    assert drawn[0] == drawn[1]


def test_it_may_be_printed() -> None:
    assert f"{x().mean():.3f}" == "what embed returns of shape (), torch.float32, on another pipeline stage"


@dataclass
class Output:
    loss: Tensor
    states: list[Tensor]


def test_it_is_found_in_whatever_a_step_returns() -> None:
    require_known([None, 1, "a", torch.ones(()), Output(torch.ones(()), [])], "this")
    for values in (x(), [(x(),)], {"a": {"b": x()}}, Output(torch.ones(()), [x()]), [Output(x(), [])]):
        with pytest.raises(PipelineError, match="this needs what embed returns"):
            require_known(values, "this")


@dataclass
class Loop:
    """Holds itself."""

    own: Any = None


def test_what_holds_itself_is_looked_through_once() -> None:
    loop = Loop()
    loop.own = [loop, 1]
    require_known(loop, "this")


def test_two_of_one_form_do_not_share_what_is_written_to_them() -> None:
    one, other = x(), x()
    one.zero_()
    other.fill_(7.0)
    assert torch.equal(one, torch.zeros(2, 3))


def test_whole_numbers_made_of_it_may_be_indices_and_probabilities_may_be_drawn_from() -> None:
    table = torch.ones(4, 3)
    for output in (table[(x() * 3).long()], F.embedding(x().to(torch.int32), table), torch.bernoulli(x()), torch.multinomial(x(), 2)):
        assert isinstance(output, Unknown)
    known = torch.tensor([[3, 4, 5]])
    assert isinstance(torch.broadcast_tensors(x(), known)[1], Unknown)
    assert known.tolist() == [[3, 4, 5]]


def test_what_comes_back_as_it_was_given_stays_known() -> None:
    known = torch.ones(2)
    torch.atleast_1d(known, x())
    assert type(known) is Tensor


class Whole(nn.Module):
    """A model with what a rank keeps."""

    in_step, device = True, CPU

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))
        self.register_buffer("mean", torch.zeros(2, 3))

    def look(self, name: str) -> None: ...

    def kept_with(self, tensor: Tensor) -> Tensor | None:
        own, memory = (self.weight, self.mean), tensor.untyped_storage().data_ptr()
        return next((one for one in own if one.untyped_storage().data_ptr() == memory), None)


def test_writes_by_other_names_find_weights_and_buffers() -> None:
    whole = Whole()
    given = unknown((2, 3), torch.float32, CPU, Origin("what embed returns", "Do it otherwise", whole))
    for name in ("data", "detach"):
        alias = whole.weight.data if name == "data" else whole.weight.detach()
        with pytest.raises(PipelineError, match="writes to a weight"):
            alias.mul_(given)
    assert torch.equal(whole.weight, torch.ones(2, 3))
    whole.mean.data.mul_(0.5).add_(given)
    assert isinstance(whole.mean, Unknown)
    assert type(whole.mean.zero_()) is Tensor
    with torch.inference_mode():
        whole.mean.detach()[0].copy_(given[0])
    assert isinstance(whole.mean, Unknown)


def test_in_inference_mode_a_part_of_a_tensor_is_not_written_to() -> None:
    with torch.inference_mode():
        whole = torch.zeros(2, 3)
        with pytest.raises(PipelineError, match=r"a part of a tensor in inference mode \(write x\[:, 0\] = y"):
            whole[:, 1:].copy_(x()[:, 1:])
        whole[:, 1:] = x()[:, 1:]
        assert isinstance(whole, Unknown)


def test_it_is_followed_through_other_names_of_functions() -> None:
    real = torch.zeros(2, 3)
    torch.ops.aten.add_.Tensor(real, x())
    assert isinstance(real, Unknown)
    real = torch.zeros(2, 3)
    real **= x()
    assert isinstance(real, Unknown)


def test_an_error_of_torch_says_what_it_was_computed_with() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.linalg.cholesky(x()[:, :2])
    assert "computed with what embed returns, of another pipeline stage" in "".join(caught.value.__notes__)


def test_what_is_no_tensor_spreads_as_well() -> None:
    thing = UnknownObject(Origin("what layers.0 returned", "Do it otherwise"))
    for value in (thing + 1, 2 * thing, thing.cache[0], thing(3), -thing):
        with pytest.raises(PipelineError, match=r"the loss needs what layers\.0 returned"):
            require_known([value], "the loss")
    for ask in (bool, int, float, len, list, lambda it: it < 3, lambda it: 3 in it):
        with pytest.raises(PipelineError, match=r"a value, and that needs what layers\.0 returned"):
            ask(thing)
    assert not hasattr(thing, "__array__")
    copy.deepcopy(thing)


def test_hooks_find_their_place_in_training() -> None:
    x().register_hook(lambda grad: grad)
    (x() * 2).retain_grad()
    changed = x()
    changed += 1
    changed[:, 0] = 2.0
    with torch.no_grad():
        assert not x().requires_grad
