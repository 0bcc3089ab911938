"""Norms and clipping over what the ranks hold equal those of one process, by every norm and at every stage."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from lightning_par.zero import ZeroOptions
from tests.harness import run_world
from tests.zero.bare import Case, Place, assert_parity, data_parallel, model_gradients, next_token, outcomes, rows, sgd, weights
from tests.zero.models import Awkward

STAGES = (0, 1, 2, 3)
NORMS = (1.0, 2.0, math.inf, 3.0)
LIMIT = 0.05

CLIPPED = {
    f"stage{stage} norm{norm_type}": Case(
        optimizers=sgd, stage=stage, clip=(norm_type, LIMIT), options=ZeroOptions(min_unit_mb=0, bucket_mb=5e-4)
    )
    for stage in STAGES
    for norm_type in NORMS
}
IGNORING = {
    f"stage{stage} ignoring": Case(
        optimizers=sgd, stage=stage, clip=(2.0, LIMIT), accumulate=2, options=ZeroOptions(min_unit_mb=0, ignored=("norm", "layers.1"))
    )
    for stage in (1, 2, 3)
}
ALL = CLIPPED | IGNORING
REPLICATED = {
    name: replace(case, replicate=2) for name, case in ALL.items() if case.stage and case.clip and case.clip[0] in (2.0, math.inf)
}


THREE = {name: case for name, case in ALL.items() if case.stage in (0, 1, 3) and case.clip[0] in (2.0, 3.0)}


@pytest.mark.parametrize("name", ALL)
def test_Z22_norms_and_clipping_equal_one_process(name: str) -> None:
    assert_parity(ALL[name], [rank[name] for rank in outcomes(ALL, 2)])


@pytest.mark.parametrize("name", THREE)
def test_Z22_on_three_ranks_too(name: str) -> None:
    assert_parity(THREE[name], [rank[name] for rank in outcomes(THREE, 3)])


@pytest.mark.parametrize("name", REPLICATED)
def test_Z23_replicas_and_ignored_parameters_are_counted_once(name: str) -> None:
    assert_parity(REPLICATED[name], [rank[name] for rank in outcomes(REPLICATED, 4)])


def _backward(stage: int):
    torch.set_default_dtype(torch.float64)
    module = Awkward()
    optimizer = sgd(module)[0]
    mesh, dp = data_parallel(module, [optimizer], stage)
    next_token(module, rows(0, 0).chunk(mesh.data.size)[mesh.data.index], Place(0, 0, mesh.data.index)).backward()
    dp.finish()
    return mesh, dp, module, optimizer, model_gradients(mesh, dp)


def _clip_every_way() -> None:
    for stage in STAGES:
        *_, optimizer, shared = _backward(stage)
        before = shared.norm(optimizer)
        told = shared.clip_norm(optimizer, LIMIT)
        assert torch.equal(told, before), "what is told is the norm before clipping"
        assert before > LIMIT
        torch.testing.assert_close(shared.norm(optimizer), torch.tensor(LIMIT), rtol=1e-4, atol=0)
        assert torch.equal(shared.clip_norm(optimizer, 1.0), shared.norm(optimizer)), "a small gradient stays as it is"
        limit = shared.norm(optimizer, math.inf).item() / 3
        shared.clip_value(optimizer, limit)
        assert shared.norm(optimizer, math.inf).item() == limit


def test_Z20_Z21_the_norm_before_clipping_is_told_and_the_one_after_is_the_limit() -> None:
    run_world(_clip_every_way, 2)


def _move_by_the_limit() -> None:
    torch.set_default_dtype(torch.float64)
    for stage in STAGES:
        module = Awkward()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        mesh, dp = data_parallel(module, [optimizer], stage)
        before = weights(module)
        next_token(module, rows(0, 0).chunk(mesh.data.size)[mesh.data.index], Place(0, 0, mesh.data.index)).backward()
        dp.finish()
        model_gradients(mesh, dp).clip_norm(optimizer, 1e-3)
        optimizer.step()
        after = weights(module)
        moved = torch.stack([(after[name] - before[name]).square().sum() for name in before]).sum().sqrt()
        torch.testing.assert_close(moved, torch.tensor(0.1 * 1e-3), rtol=1e-5, atol=0)


def test_Z20_the_length_of_an_sgd_step_is_rate_times_limit() -> None:
    run_world(_move_by_the_limit, 3)


def _poison(value: float) -> None:
    for stage in STAGES:
        mesh, dp, _, optimizer, shared = _backward(stage)
        if mesh.rank == 1:  # one element of what one rank holds
            held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None and p.grad.numel()]
            held[-1].grad.view(-1)[-1] = value
        if stage == 0:  # there every rank holds everything
            next(p for p in dp.infos if p.name == "norm.bias").param.grad[0] = value
        for norm_type in NORMS:
            assert not shared.norm(optimizer, norm_type).isfinite(), (stage, norm_type)
            before = [p.grad.clone() for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            with pytest.raises(RuntimeError, match="norm of the gradient is"):
                shared.clip_norm(optimizer, 1.0, norm_type, error_if_nonfinite=True)
            after = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_one_bad_element_on_one_rank_is_an_error_on_all(value: float) -> None:
    run_world(_poison, 2, value)
