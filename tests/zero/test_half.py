"""Half-precision weights: float32 masters, gradients that add up in float32, what travels in which dtype, and rounding."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_par.comm import Mesh
from lightning_par.layout import ParallelLayout, ShardSpec
from lightning_par.zero import DataParallel, HalfWeights, ParameterInfo, ReduceGroups, ZeroOptions, full_gradient, full_parameters
from lightning_par.zero.master import round_stochastically
from tests.harness import run_world
from tests.harness.models import mlp
from tests.zero.bare import Case, assert_parity, outcomes, sgd

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
STAGES = (0, 1, 2, 3)
STEPS = 3


class Net(nn.Module):
    """Layers of half precision around a norm that is not."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([mlp(5, 7, 5).to(dtype), mlp(5, 3, 5).to(dtype)])
        self.norm = nn.LayerNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.norm(x.float())


def batch(step: int, micro: int, rank: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank)).to(dtype)


def prepared(
    module: nn.Module, optimizer: torch.optim.Optimizer, stage: int, options: ZeroOptions | None = None, **others: Any
) -> tuple[Mesh, DataParallel]:
    mesh = Mesh.build(ParallelLayout(zero=stage).resolve(torch.distributed.get_world_size()))
    infos = [ParameterInfo(name, param, ShardSpec.whole(param)) for name, param in module.named_parameters()]
    options = options or ZeroOptions(min_unit_mb=0, bucket_mb=1e-4)
    dp = DataParallel(module, infos, ReduceGroups.of(mesh), stage=stage, options=options, optimizers=[optimizer], **others)
    dp.attach(optimizer)
    return mesh, dp


def masters(dp: DataParallel) -> dict[str, Tensor]:
    """The exact values that this rank keeps of each half-precision parameter."""
    parts = {info.name: dp.sharded_value(info.param) for info in dp.infos}
    return {name: part[1].clone() for name, part in parts.items() if part is not None and part[1].numel()}


def _train(stage: int, dtype: torch.dtype, accumulate: int, scale: float) -> dict[str, Any]:
    module = Net(dtype)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    mesh, dp = prepared(module, optimizer, stage, scaled=scale != 1.0)
    for step in range(STEPS):
        dp.loss_scale = scale ** (1 + step)  # it may change at any time
        for micro in range(accumulate):
            with dp.no_sync() if micro < accumulate - 1 else nullcontext():
                loss = module(batch(step, micro, mesh.rank, dtype)).square().mean() / accumulate
                (loss * dp.loss_scale).backward()
                dp.finish()
        grads = {name: full_gradient(param) for name, param in module.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    with full_parameters(module):
        weights = {name: param.detach().clone() for name, param in module.named_parameters()}
    states = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    return {"weights": weights, "grads": grads, "masters": masters(dp), "moments": {value.dtype for value in states}}


def _alone(world: int, dtype: torch.dtype, accumulate: int, scale: float) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """The same by hand: weights, the last gradients, masters."""
    module = Net(dtype)
    exact = {name: nn.Parameter(param.detach().float()) for name, param in module.named_parameters()}
    optimizer = torch.optim.AdamW(exact.values(), lr=1e-3)
    for step in range(STEPS):
        factor, total = scale ** (1 + step), {name: torch.zeros_like(param) for name, param in exact.items()}
        for micro in range(accumulate):
            for rank in range(world):
                loss = module(batch(step, micro, rank, dtype)).square().mean() / accumulate
                grads = torch.autograd.grad(loss * factor, list(module.parameters()))
                for mean, grad in zip(total.values(), grads, strict=True):
                    mean.add_(grad.float() / factor / world)
        for name, param in exact.items():
            param.grad = total[name]
        optimizer.step()
        with torch.no_grad():
            for name, param in module.named_parameters():
                param.copy_(exact[name])
    return {n: p.detach() for n, p in module.named_parameters()}, total, {n: p.detach() for n, p in exact.items()}


def _train_all(cases: list[tuple]) -> list[dict[str, Any]]:
    return [_train(*case) for case in cases]


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(("world", "accumulate", "scale"), [(1, 2, 1.0), (2, 1, 1.0), (2, 3, 8.0), (3, 2, 4.0)])
def test_A10_training_with_masters_is_that_of_float32_weights_which_are_rounded_for_use(
    dtype: torch.dtype, world: int, accumulate: int, scale: float
) -> None:
    weights, grads, exact = _alone(world, dtype, accumulate, scale)
    ranks = run_world(_train_all, world, [(stage, dtype, accumulate, scale) for stage in STAGES])
    close = {"rtol": 1e-5, "atol": 1e-6}
    for stage in STAGES:
        for got in (results[stage] for results in ranks):
            for name, value in weights.items():
                ulp = torch.finfo(value.dtype).eps
                torch.testing.assert_close(got["weights"][name], value, rtol=ulp, atol=1e-6, msg=f"stage {stage} {name}")
                torch.testing.assert_close(got["grads"][name], grads[name], **close)
                assert got["grads"][name].dtype == F32
            assert got["moments"] == {F32}
            assert set(got["masters"]) <= set(exact)
        for name, value in exact.items():
            if value.dtype == F32 and name.startswith("norm"):
                continue
            parts = [results[stage]["masters"].get(name) for results in ranks]
            whole = torch.cat([part for part in parts if part is not None][: 1 if stage == 0 else None])
            torch.testing.assert_close(whole, value.view(-1), **close)


def _wire(stage: int, reduce_dtype: str | None) -> set[int]:
    module = Net(BF16)
    module.norm.to(BF16)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    mesh, dp = prepared(module, optimizer, stage, ZeroOptions(min_unit_mb=0, reduce_dtype=reduce_dtype))
    with mesh.trace.recording() as sent:
        nn.functional.layer_norm(module.layers[0](batch(0, 0, mesh.rank, BF16)), (5,)).square().mean().backward()
        dp.finish()
    return {call.itemsize for call in sent if call.op in ("all_reduce", "reduce_scatter") and call.elements > 30}


def _wires() -> dict[tuple[int, str | None], set[int]]:
    return {(stage, dtype): _wire(stage, dtype) for stage in STAGES for dtype in (None, "bfloat16")}


def test_Z25_gradients_travel_in_float32_unless_told_otherwise() -> None:
    for told in run_world(_wires, 2):
        for (stage, dtype), sizes in told.items():
            assert sizes == {4 if dtype is None else 2}, f"stage {stage}"


def _every_axis(dtype: str | None) -> set[int]:
    """A replicated parameter of which each tp rank sees a part, and one tied over two pipeline stages."""
    layout = ParallelLayout(tp=2, pp=2, zero=1)
    mesh = Mesh.build(layout.resolve(8))
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).to(BF16)
    infos = [
        ParameterInfo(name, param, ShardSpec.whole(param), stages=(0, 1) if name.startswith("1") else (), partial=name.startswith("0"))
        for name, param in module.named_parameters()
    ]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    dp = DataParallel(module, infos, ReduceGroups.of(mesh), stage=1, options=ZeroOptions(reduce_dtype=dtype), optimizers=[optimizer])
    dp.attach(optimizer)
    with mesh.trace.recording() as sent:
        module(torch.ones(2, 6, dtype=BF16)).sum().backward()
        dp.finish()
    groups = {call.group for call in sent if call.elements > 12}
    assert groups == {"shard·cp", "tp", "pp"}, groups
    return {call.itemsize for call in sent if call.elements > 12}


@pytest.mark.slow
def test_Z25_so_do_those_that_are_summed_over_tp_and_pp() -> None:
    for dtype, size in ((None, 4), ("float32", 4), ("bfloat16", 2)):
        assert run_world(_every_axis, 8, dtype) == [{size}] * 8


REDUCED = {
    f"stage{stage} {dtype}": Case(optimizers=sgd, stage=stage, accumulate=2, options=ZeroOptions(min_unit_mb=0, reduce_dtype=dtype))
    for stage in STAGES
    for dtype in ("float32", torch.bfloat16)
}


@pytest.mark.parametrize("name", REDUCED)
def test_a_reduce_dtype_costs_its_rounding_and_no_more(name: str) -> None:
    tolerance = 1e-5 if "float32" in name else 0.05
    results = [rank[name] for rank in outcomes(REDUCED, 2)]
    assert_parity(REDUCED[name], results, tolerance)
    with pytest.raises(AssertionError):
        assert_parity(REDUCED[name], results, 1e-10)


def test_units_that_are_joined_change_nothing() -> None:
    cases = {f"k{k}": Case(stage=3, accumulate=k, options=ZeroOptions(min_unit_mb=size)) for k, size in ((1, 1.0), (2, 5e-4))}
    for name, case in cases.items():
        assert_parity(case, [rank[name] for rank in outcomes(cases, 2)])


class One(nn.Module):
    """A layer of weights of 1.0, all of whose gradients are 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16, bias=False)])
        nn.init.ones_(self.layers[0].weight)
        self.to(BF16)

    def forward(self) -> Tensor:
        return self.layers[0](torch.ones(1, 16, dtype=BF16)).sum()


def _hundred_updates(half: HalfWeights, stage: int) -> Tensor:
    module = One()
    optimizer = torch.optim.SGD(module.parameters(), lr=6e-4)
    mesh, dp = prepared(module, optimizer, stage, half=half)
    for _ in range(100):
        module().backward()
        dp.finish()
        optimizer.step()
        optimizer.zero_grad()
    with full_parameters(module):
        weights = module.layers[0].weight.detach().clone()
    assert mesh.data.gather_objects(weights.float().tolist()) == [weights.float().tolist()] * mesh.data.size, "equal on all ranks"
    return weights.float()


def _updates() -> dict[tuple[str, int], Tensor]:
    kinds = {"master": HalfWeights(), "pure": HalfWeights(masters=False), "stochastic": HalfWeights(False, True)}
    return {(name, stage): _hundred_updates(half, stage) for name, half in kinds.items() for stage in STAGES}


@pytest.mark.slow
def test_A10_small_updates_add_up_in_a_master_and_by_chance_but_not_in_bfloat16() -> None:
    for told in run_world(_updates, 2):
        for (name, stage), weights in told.items():
            where = f"{name}, stage {stage}"
            if name == "pure":
                assert weights.eq(1.0).all(), where
            elif name == "master":
                torch.testing.assert_close(weights, torch.full_like(weights, 0.94), atol=4e-3, rtol=0, msg=where)
            else:
                assert weights.mean().item() == pytest.approx(0.94, abs=4e-3), where
                assert weights.unique().numel() > 1, where


def test_stochastic_rounding_keeps_the_mean_and_what_is_exact() -> None:
    exact = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(BF16).float()
    assert torch.equal(round_stochastically(exact, 0, 1).float(), exact)
    between = torch.full((200_000,), 1.0 + 2**-7 * 0.3)
    rounded = round_stochastically(between, 0, 1).float()
    assert set(rounded.unique().tolist()) == {1.0, 1.0 + 2**-7}
    assert rounded.mean().item() == pytest.approx(between[0].item(), abs=5e-5)
    special = torch.tensor([float("inf"), float("-inf"), float("nan"), 3.38e38, 0.0])
    assert torch.equal(round_stochastically(special, 0, 1).isfinite(), torch.tensor([False, False, False, True, True]))


def test_stochastic_rounding_draws_anew_each_step_and_for_each_place_alike_wherever_it_lies() -> None:
    values = torch.full((4096,), 1.0 + 2**-8)
    whole, again = (round_stochastically(values, 0, seed) for seed in (7, 8))
    assert torch.equal(whole[1000:1500], round_stochastically(values[1000:1500], 1000, 7))
    assert 0.45 < (whole != again).float().mean() < 0.55
    up = (whole > 1).float()
    assert abs((up[1:] * up[:-1]).mean() - up.mean() ** 2) < 0.03, "neighbours are independent"


def _edit() -> None:
    for stage in STAGES:
        module = Net(BF16)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        mesh, dp = prepared(module, optimizer, stage)
        module(batch(0, 0, mesh.rank, BF16)).square().mean().backward()
        dp.finish()
        optimizer.step()
        before = masters(dp)
        weight = module.layers[0][0].weight
        with full_parameters(module, modify=True), torch.no_grad():
            weight[0, 0] = 5.0
        dp.take_edits()
        after = masters(dp)
        changed = mesh.data.gather_objects(sum((after[name] != before[name]).sum().item() for name in before))
        assert sum(changed) == (2 if stage == 0 else 1), f"stage {stage}: {changed}"
        optimizer.step()
        with full_parameters(module):
            assert weight[0, 0] == 5.0, f"stage {stage}"
        if stage < 3:
            dp.settle_values()
            with torch.no_grad():
                weight[0, 0] = 6.0
            optimizer.step()
            dp.settle_values()
            assert weight[0, 0] == 6.0, "an edit in place counts too"


def test_an_edit_reaches_the_master_and_leaves_the_others_exact() -> None:
    run_world(_edit, 2)


def _swap() -> None:
    """As an averaging callback does around a validation."""
    module = Net(BF16)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    mesh, dp = prepared(module, optimizer, 3)
    module(batch(0, 0, mesh.rank, BF16)).square().mean().backward()
    dp.finish()
    optimizer.step()
    before = masters(dp)
    with full_parameters(module, modify=True), torch.no_grad():
        kept = [param.clone() for param in module.parameters()]
        for param in module.parameters():
            param.mul_(0.5)
    with full_parameters(module):
        assert torch.equal(module.layers[0][0].weight, kept[0] * 0.5)
    with full_parameters(module, modify=True), torch.no_grad():
        for param, value in zip(module.parameters(), kept, strict=True):
            param.copy_(value)
    dp.take_edits()
    assert all(torch.equal(value, before[name]) for name, value in masters(dp).items())


def test_weights_that_are_swapped_out_and_in_again_leave_masters_exact() -> None:
    run_world(_swap, 2)


def _load() -> None:
    for half in (HalfWeights(), HalfWeights(masters=False), HalfWeights(False, True)):
        for stage in STAGES:
            module = Net(BF16)
            _, dp = prepared(module, torch.optim.SGD(module.parameters(), lr=1e-3), stage, half=half)
            for info in dp.infos:
                part = dp.sharded_value(info.param)
                (info.param.detach() if part is None else part[1]).fill_(3.0)
            dp.loaded()
            with full_parameters(module):
                assert all(param.eq(3.0).all() for param in module.parameters()), f"{half}, stage {stage}"


def test_values_that_were_loaded_are_there_with_masters_and_without() -> None:
    run_world(_load, 2)


class Heads(nn.Module):
    """Layers of which a rank may use some; those of ``listed`` may be kept whole."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.listed = nn.ModuleList(nn.Linear(5, 5).to(dtype) for _ in range(4))
        self.last = nn.Linear(5, 5)

    def forward(self, x: Tensor, leave_out: bool) -> Tensor:
        for layer in list(self.listed)[1 if leave_out else 0 :]:
            x = layer(x)
        return self.last(x.float())


def _unequal(stage: int, replicate: int, ignored: tuple[str, ...]) -> list[Tensor]:
    module = Heads(BF16 if ignored else F32)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    mesh = Mesh.build(ParallelLayout(zero=stage, replicate=replicate).resolve(torch.distributed.get_world_size()))
    infos = [ParameterInfo(name, param, ShardSpec.whole(param)) for name, param in module.named_parameters()]
    options = ZeroOptions(min_unit_mb=0, bucket_mb=1e-5, ignored=ignored)
    dp = DataParallel(module, infos, ReduceGroups.of(mesh), stage=stage, options=options, optimizers=[optimizer])
    dp.attach(optimizer)
    for step in range(3):
        x = batch(step, 0, mesh.rank, BF16 if ignored else F32)
        module(x, leave_out=(mesh.rank == 1)).square().mean().backward()
        dp.finish()
        optimizer.step()
        optimizer.zero_grad()
    with full_parameters(module):
        return [param.detach().float().clone() for param in module.parameters()]


@pytest.mark.parametrize(("stage", "replicate"), [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2)])
def test_Z8_ranks_that_use_different_parameters_neither_hang_nor_drift(stage: int, replicate: int) -> None:
    ignored = ("listed",) if replicate == 1 else ()
    ranks = run_world(_unequal, 2 * replicate, stage, replicate, ignored, timeout=40)
    for others in ranks[1:]:
        assert all(torch.equal(mine, first) for mine, first in zip(others, ranks[0], strict=True))


def _in_backward(dtype: torch.dtype, stage: int) -> tuple[int, int]:
    """Reductions that start before backward ends, and buckets."""
    module = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).to(dtype)
    mesh, dp = prepared(module, torch.optim.SGD(module.parameters(), lr=0.1), stage)
    with mesh.trace.recording() as sent:
        module(torch.ones(2, 6, dtype=dtype)).sum().backward()
        during = len([call for call in sent if call.elements > 10])
        dp.finish()
    return during, len(dp.reduced)


def _all_in_backward() -> None:
    for stage in (0, 1, 2):
        for dtype in (F32, BF16):
            during, buckets = _in_backward(dtype, stage)
            assert during == buckets > 1, f"stage {stage}, {dtype}"


def test_every_bucket_starts_during_backward_in_half_precision_too() -> None:
    run_world(_all_in_backward, 2)


def _optimizers() -> None:
    for stage in STAGES:
        module = Net(BF16)
        mesh, dp = prepared(module, torch.optim.Adagrad(module.layers.parameters(), lr=1e-3), stage)
        apart = torch.optim.SGD(module.norm.parameters(), lr=1e-3)
        dp.attach(apart)  # at stage 0 none of its parameters is sharded
        (adagrad,) = [optimizer for optimizer in dp._group_counts if optimizer is not apart]
        module(batch(0, 0, mesh.rank, BF16)).square().mean().backward()
        dp.finish()
        adagrad.step()
        apart.step()
        assert {state["sum"].dtype for state in adagrad.state.values()} <= {F32}, f"stage {stage}"
        assert mesh.data.gather_objects(len(adagrad.state))[0] > 0


def test_states_that_an_optimizer_starts_with_are_float32_and_optimizers_may_hold_nothing_sharded() -> None:
    run_world(_optimizers, 2)


def _drifted() -> None:
    for stage in (0, 1, 2):
        module = Net(BF16)
        mesh, dp = prepared(module, torch.optim.SGD(module.parameters(), lr=1e-3), stage)
        dp.check_replicas()
        with torch.no_grad():
            module.layers[0][0].weight[0, 0] += mesh.rank
        with pytest.raises(RuntimeError, match=r"layers\.0\.0\.weight on rank 1"):
            dp.check_replicas()


def test_replicas_of_half_precision_weights_that_drift_are_found() -> None:
    run_world(_drifted, 2)


def _tiny_gradient(reduce_dtype: str | None) -> float:
    module = nn.Sequential(nn.Linear(2, 2, bias=False))
    options = ZeroOptions(min_unit_mb=0, reduce_dtype=reduce_dtype)
    _, dp = prepared(module, torch.optim.SGD(module.parameters(), lr=1.0), 1, options, scaled=True)
    dp.loss_scale = 65536.0
    (module(torch.full((1, 2), 1e-8)).sum() * dp.loss_scale).backward()
    dp.finish()
    return full_gradient(module[0].weight)[0, 0].item()


def test_gradients_that_travel_in_float16_travel_scaled() -> None:
    for told in run_world(_tiny_gradient, 2, "float16"):
        assert told == pytest.approx(1e-8, rel=1e-2)


def _forgets() -> None:
    for stage in (0, 1):
        module = Net(BF16)
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
        mesh, dp = prepared(module, optimizer, stage)
        grads = []
        for dirty in (False, True):
            if dirty:
                with dp.no_sync():
                    module(batch(9, 0, mesh.rank, BF16)).square().mean().backward()
                    dp.finish()
                (module if stage else optimizer).zero_grad()
            module(batch(0, 0, mesh.rank, BF16)).square().mean().backward()
            dp.finish()
            grads.append(full_gradient(module.layers[0][0].weight).clone())
            optimizer.zero_grad()
        assert torch.equal(*grads)


def test_zero_grad_in_the_middle_of_an_accumulation_forgets_what_came() -> None:
    run_world(_forgets, 2)


def test_a_master_keeps_what_rounding_would_lose_so_both_together_are_refused() -> None:
    with pytest.raises(ValueError, match="stochastic_rounding=True needs masters=False"):
        replace(HalfWeights(), stochastic_rounding=True)
