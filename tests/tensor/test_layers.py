"""Column- and row-parallel linear, vocabulary-parallel embedding: parity with one process, and what is sent."""

from __future__ import annotations

import copy
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_par.layout import split
from lightning_par.tensor import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, shard_module
from lightning_par.tensor.linear import column_parallel_linear
from tests.harness import run_world
from tests.tensor.models import MLP, GatheredMLP, tokens
from tests.tensor.parity import assert_parity, close, tp_mesh


def _mlp_parity(size: int, kind: type[MLP], ffn: int, bias: bool, optimizer: str) -> None:
    group = tp_mesh(size).tp
    x = torch.randn(3, 2, 10, dtype=torch.float64)
    mlp = kind(ffn=ffn, bias=bias).double()
    assert_parity(mlp, group, lambda m, step: (m(x + step) ** 2).mean(), optimizer=optimizer)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("kind", [MLP, GatheredMLP])
@pytest.mark.parametrize(("size", "ffn", "bias"), [(2, 37, True), (3, 37, True), (3, 4, False)])
def test_mlp_of_any_width_equals_one_process(size: int, kind: type[MLP], ffn: int, bias: bool, optimizer: str) -> None:
    run_world(_mlp_parity, size, size, kind, ffn, bias, optimizer)


def _checkpointed() -> None:
    group = tp_mesh(2).tp
    x = torch.randn(6, 10, dtype=torch.float64, requires_grad=True)
    assert_parity(MLP().double(), group, lambda m, step: (checkpoint(m, x + step, use_reentrant=False) ** 2).mean())


def test_activation_checkpointing_recomputes_the_sharded_layers() -> None:
    run_world(_checkpointed, 2)


def _what_an_mlp_sends() -> None:
    mesh = tp_mesh(2)
    x = torch.randn(6, 10, requires_grad=True)
    mlp, gathered = MLP(), GatheredMLP()
    for module in (mlp, gathered):
        shard_module(module, mesh.tp)
    with mesh.trace.recording() as sent:
        loss = mlp(x).sum()
        assert [(s.op, s.group, s.elements) for s in sent] == [("all_reduce", "tp", 6 * 10)]
        loss.backward()
    assert [s.op for s in sent] == ["all_reduce", "all_reduce"]
    with mesh.trace.recording() as sent:
        gathered(x).sum().backward()
    assert [s.op for s in sent] == ["all_gather", "all_reduce", "all_gather", "all_reduce"]
    with mesh.trace.recording() as sent, torch.no_grad():
        mlp(x.detach())
    assert len(sent) == 1
    with mesh.trace.recording() as sent:  # an input that needs no gradient is not reduced
        mlp(x.detach()).sum().backward()
    assert len(sent) == 1


def test_an_mlp_is_one_all_reduce_each_way() -> None:
    run_world(_what_an_mlp_sends, 2)


def _waits_last() -> None:
    group = tp_mesh(2).tp
    events = []

    class Spy:
        def __getattr__(self, name):
            return getattr(group, name)

        def all_reduce(self, tensor, *, async_op):
            assert async_op
            work = group.all_reduce(tensor, async_op=True)
            events.append("start")

            class Waited:
                def wait(self):
                    events.append("wait")
                    work.wait()

            return Waited()

    class SeesProducts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.mm.default:
                events.append("mm")
            return func(*args, **(kwargs or {}))

    x, weight = torch.randn(4, 6, requires_grad=True), torch.randn(5, 6, requires_grad=True)
    y = column_parallel_linear(x, weight, None, Spy())
    with SeesProducts():
        y.backward(torch.ones_like(y))
    assert events == ["mm", "start", "mm", "wait"], events


def test_the_input_gradient_travels_while_the_weight_gradient_is_computed() -> None:
    run_world(_waits_last, 2)


def _mixed_precision() -> None:
    group = tp_mesh(2).tp
    reference = MLP()
    sharded = copy.deepcopy(reference)
    shard_module(sharded, group)
    results = []
    for module in (reference, sharded):
        x = torch.linspace(-1, 1, 60).view(6, 10).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = module(x)
        assert y.dtype == torch.bfloat16
        (y.float() ** 2).mean().backward()
        assert x.grad.dtype == module.up.weight.grad.dtype == module.down.bias.grad.dtype == torch.float32
        results.append((y.float(), x.grad))
    for mine, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(mine, expected, rtol=0.05, atol=0.005)


def test_autocast_casts_as_a_plain_linear_does() -> None:
    run_world(_mixed_precision, 2)


def _embedding_parity(size: int, vocab: int, padding_idx: int | None, optimizer: str) -> None:
    group = tp_mesh(size).tp
    embedding = nn.Embedding(vocab, 5, padding_idx, dtype=torch.float64)
    weight = torch.randn(2, 7, 5, dtype=torch.float64)
    plan = {"": "embedding_rowwise"}
    sharded, _ = assert_parity(embedding, group, lambda m, step: (m(tokens(vocab, step)) * weight).sum(), plan=plan, optimizer=optimizer)
    assert sharded.weight.shape == (split(vocab, size)[group.index].size, 5)
    if group.index == 0:
        assert sharded.weight.shape[0] == -(-vocab // size)


@pytest.mark.parametrize(
    ("size", "vocab", "padding_idx", "optimizer"),
    [(2, 33, None, "adamw"), (2, 33, 20, "adamw"), (3, 13, 0, "sgd"), (3, 13, None, "adamw"), (4, 33, -1, "sgd")],
)
def test_T9_embedding_rows_are_split_without_padding_and_equal_one_process(
    size: int, vocab: int, padding_idx: int | None, optimizer: str
) -> None:
    run_world(_embedding_parity, size, size, vocab, padding_idx, optimizer)


def _ids_outside() -> None:
    group = tp_mesh(2).tp
    embedding = nn.Embedding(7, 3)
    shard_module(embedding, group, plan={"": "embedding_rowwise"})
    for bad in (7, -1):
        with pytest.raises(IndexError):
            embedding(torch.tensor([0, bad]))
    assert embedding(torch.tensor([[3, 4]])).shape == (1, 2, 3)


def test_an_id_outside_the_vocabulary_still_raises() -> None:
    run_world(_ids_outside, 2)


class Scaled(nn.Embedding):
    def forward(self, input):
        return super().forward(input) * 3


class Doubled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


class OwnModules(nn.Module):
    tp_plan: ClassVar = {"embed": "embedding_rowwise", "up": "colwise", "down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = Scaled(13, 6), Doubled(6, 9), nn.Linear(9, 6)

    def forward(self, ids):
        return self.down(F.relu(self.up(self.embed(ids))))


def _subclasses_stay() -> None:
    group = tp_mesh(2).tp
    module = OwnModules().double()
    sharded, _ = assert_parity(module, group, lambda m, step: (m(tokens(13, step)) ** 2).mean())
    assert {Scaled, VocabParallelEmbedding} <= set(type(sharded.embed).__mro__)
    assert {Doubled, ColumnParallelLinear} <= set(type(sharded.up).__mro__)
    assert type(sharded.down) is RowParallelLinear
    assert ("0:7 of 13 over tp", "7:13 of 13 over tp")[group.index] in repr(sharded.embed)


def test_a_users_own_subclass_keeps_its_forward() -> None:
    run_world(_subclasses_stay, 2)


def _same_object() -> None:
    group = tp_mesh(2).tp
    module = MLP()
    up, weight, calls = module.up, module.up.weight, []
    weight.mark = "kept"
    module.down.weight.requires_grad_(False)
    up.register_forward_hook(lambda *_: calls.append("hook"))
    full = weight.detach().clone()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    shard_module(module, group)
    assert module.up is up
    assert isinstance(up, nn.Linear)
    assert up.weight is weight
    assert weight.mark == "kept"
    assert torch.equal(weight, full[split(37, 2)[group.index].slice()])  # a slice of the full initial weights
    assert weight.untyped_storage().nbytes() == weight.nbytes  # the whole is free
    assert (up.in_features, up.out_features) == (10, 37)
    x = torch.linspace(-1, 1, 40).view(4, 10)
    module(x).sum().backward()
    assert calls == ["hook"]
    assert module.down.weight.grad is None
    before = weight.detach().clone()
    optimizer.step()  # made before the sharding, it still holds the same parameters
    close(weight, before - weight.grad, "weight")
    twin = copy.deepcopy(module)  # weight averaging does this
    close(twin(x), module(x), "copy")


def test_T16_shards_are_slices_of_the_full_weights_in_the_same_objects() -> None:
    run_world(_same_object, 2)
