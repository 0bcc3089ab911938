"""Groups, the mesh and the differentiable pairs on real ranks."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from lightning_par.comm import Mesh, Message, copy_to, exchange, gather_from, reduce_from, scatter_to
from lightning_par.layout import ParallelLayout, split
from tests.harness import WorldError, run_world


def _collectives() -> None:
    mesh = Mesh.build(ParallelLayout().resolve(3))
    group, rank = mesh.data, mesh.rank
    whole = torch.arange(6.0) + rank
    group.all_reduce(whole)
    assert torch.equal(whole, 3 * torch.arange(6.0) + 3)
    mine = torch.empty(2)
    with mesh.trace.recording() as sent:
        group.reduce_scatter(mine, torch.arange(6.0) + rank)
        gathered = torch.empty(6)
        group.all_gather(gathered, mine, async_op=True).wait()
    assert torch.equal(gathered, 3 * torch.arange(6.0) + 3)
    assert [(s.op, s.elements) for s in sent] == [("reduce_scatter", 4), ("all_gather", 4)]
    flat = torch.arange(6.0) + rank  # in place: my slice is where the sum goes
    group.reduce_scatter(flat.view(3, -1)[rank], flat)
    assert torch.equal(flat[2 * rank : 2 * rank + 2], (3 * torch.arange(6.0) + 3)[2 * rank : 2 * rank + 2])
    group.all_gather(flat, flat.view(3, -1)[rank])
    assert torch.equal(flat, 3 * torch.arange(6.0) + 3)


def test_collectives_sum_and_gather_in_rank_order() -> None:
    run_world(_collectives, 3)


DTYPES = ("bool", "int16", "uint16", "uint32", "uint64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "bfloat16", "int64")


def _copies() -> None:
    mesh = Mesh.build(ParallelLayout().resolve(2))
    group, rank = mesh.data, mesh.rank
    for dtype in (getattr(torch, name) for name in DTYPES):
        ours, theirs = (torch.tensor([rank, 1.0]).to(dtype) for rank in (rank, 1 - rank))
        received, whole, sent = torch.zeros(2).to(dtype), torch.zeros(4).to(dtype), ours.clone()
        group.all_gather(whole, ours)
        exchange(group, [Message(ours, 1 - rank)], [Message(received, 1 - rank)]).wait()
        group.broadcast(sent, 1)
        scalar = ours[0].clone()
        group.broadcast(scalar, 1)
        first, last = (ours, theirs) if rank == 0 else (theirs, ours)
        for found, expected in ((whole[:2], first), (whole[2:], last), (received, theirs), (sent, last), (scalar, last[0])):
            assert found.dtype == dtype
            assert found.tolist() == expected.tolist(), dtype


def test_tensors_of_any_dtype_are_sent_as_they_are() -> None:
    run_world(_copies, 2)


def _mean_of_ones() -> None:
    group = Mesh.build(ParallelLayout().resolve(2)).data
    for reduce in ("all_reduce", "reduce_scatter"):
        ones = torch.ones(4)
        if reduce == "all_reduce":
            group.all_reduce(ones)
        else:
            out = torch.empty(2)
            group.reduce_scatter(out, ones)
            ones = out
        assert torch.equal(ones / group.size, torch.ones_like(ones))


def test_G1_a_mean_of_ones_is_one() -> None:
    run_world(_mean_of_ones, 2)


def _axes() -> dict[str, tuple[int, ...]]:
    mesh = Mesh.build(ParallelLayout(dp=2, tp=2, pp=2).resolve(8))
    for name in ("pp", "dp", "tp", "data", "model", "world"):
        group = getattr(mesh, name)
        total = torch.tensor(float(mesh.rank))
        group.all_reduce(total)
        assert total == sum(group.ranks)
    return {name: getattr(mesh, name).ranks for name in ("pp", "dp", "cp", "tp", "data", "model")}


def test_mesh_orders_axes_from_pp_to_tp() -> None:
    rank3 = run_world(_axes, 8)[3]
    assert rank3 == {"pp": (3, 7), "dp": (1, 3), "cp": (3,), "tp": (2, 3), "data": (1, 3), "model": (2, 3, 6, 7)}


def _pairs(total: int) -> None:
    group = Mesh.build(ParallelLayout(tp=3).resolve(3)).tp
    torch.manual_seed(0)
    x_TD, w_TD = torch.randn(4, total, dtype=torch.float64), torch.randn(4, total, dtype=torch.float64)
    span = split(total, 3)[group.index]
    whole = x_TD.clone().requires_grad_()
    mine = scatter_to(whole, group, 1)
    assert torch.equal(mine, x_TD[:, span.slice()])
    (gather_from(mine * 2, group, 1, total) * w_TD).sum().backward()
    assert torch.equal(whole.grad, 2 * w_TD)
    entered = x_TD.clone().requires_grad_()
    partial = (copy_to(entered, group)[:, span.slice()] * w_TD[:, span.slice()]).sum(1)
    reduce_from(partial, group).sum().backward()
    assert torch.allclose(entered.grad, w_TD)


@pytest.mark.parametrize("total", [6, 7, 2])
def test_pairs_are_adjoint_at_sizes_that_do_not_divide(total: int) -> None:
    run_world(_pairs, 3, total)


def _interleaved() -> None:
    mesh = Mesh.build(ParallelLayout(zero=3).resolve(2))
    mine, whole, part = torch.full((2,), float(mesh.rank)), torch.empty(4), torch.empty(3)
    gather = partial(mesh.values.all_gather, whole, mine, async_op=True)
    reduce = partial(mesh.shard.reduce_scatter, part, torch.arange(6.0), async_op=True)
    steps = [gather, reduce]
    for work in [step() for step in (steps if mesh.rank == 0 else reversed(steps))]:
        work.wait()
    assert whole.tolist() == [0, 0, 1, 1]
    assert part.tolist() == ([0, 2, 4] if mesh.rank == 0 else [6, 8, 10])


def test_gathers_and_reductions_may_interleave_differently_on_each_rank() -> None:
    run_world(_interleaved, 2)


def _ring() -> None:
    group = Mesh.build(ParallelLayout(pp=3).resolve(3)).pp
    got = torch.empty(2)
    right, left = (group.index + 1) % 3, (group.index - 1) % 3
    exchange(group, [Message(torch.full((2,), float(group.index)), right)], [Message(got, left)]).wait()
    assert got.tolist() == [left, left]


def test_exchange_sends_round_a_ring() -> None:
    run_world(_ring, 3)


def _one_raises() -> None:
    group = Mesh.build(ParallelLayout().resolve(2)).data
    if group.index == 1:
        raise ValueError("rank one is tired")
    group.all_reduce(torch.ones(1))


def test_a_failing_rank_is_reported_with_the_stack_of_the_waiting_one() -> None:
    with pytest.raises(WorldError, match=r"(?s)rank 0.*all_reduce.*rank 1.*rank one is tired"):
        run_world(_one_raises, 2, grace=0.5)
