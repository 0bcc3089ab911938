"""What replicas must agree on: weights, buffers, and that every one of them comes."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout

from lightning_par.comm import Mesh
from lightning_par.layout import ParallelLayout
from lightning_par.zero import BufferSync, ZeroOptions
from tests.harness import WorldError, run_world
from tests.zero.bare import Case, Place, adamw, assert_parity, data_parallel, next_token, outcomes, rows
from tests.zero.models import Awkward, listed_heads
from tests.zero.test_parity import apart


def _drift() -> dict[str, str]:
    torch.set_default_dtype(torch.float64)
    told = {}
    for stage, replicate in ((0, 1), (1, 1), (2, 1), (3, 2), (0, 2)):
        module = Awkward()
        optimizers = adamw(module)
        mesh, dp = data_parallel(
            module, optimizers, stage, replicate=replicate if stage else 1, options=ZeroOptions(min_unit_mb=0, bucket_mb=5e-4)
        )
        for _ in range(2):
            next_token(module, rows(0, 0).chunk(mesh.data.size)[mesh.data.index], Place(0, 0, 0)).backward()
            dp.finish()
            optimizers[0].step()
            optimizers[0].zero_grad()
        dp.check_replicas()
        next_token(module, rows(0, 0), Place(0, 0, 0)).backward()
        dp.finish()
        last = [p for group in optimizers[0].param_groups for p in group["params"] if p.grad is not None and p.numel()][-1]
        if mesh.rank == 3:
            last.grad.view(-1)[-1] += 1e-7
        optimizers[0].step()
        if stage in (1, 2):  # there everybody gets this rank's values: drift needs an edit
            dp.settle_values()
            with torch.no_grad():
                module.norm.bias[1] += 1e-12 * (mesh.rank == 3)
        with pytest.raises(RuntimeError) as caught:
            dp.check_replicas()
        told[f"stage{stage} replicate{replicate}"] = str(caught.value)
    return told


def test_D4_drift_is_found_and_told_by_parameter_and_rank() -> None:
    ranks = run_world(_drift, 4)
    assert ranks[1:] == ranks[:-1], "every rank raises the same"
    for case, text in ranks[0].items():
        assert text.startswith("replicas have drifted apart: "), case
        assert text.count("on rank 3 is not that of rank") == 1, (case, text)
    assert "norm.bias on rank 3 is not that of rank 0" in ranks[0]["stage1 replicate1"]
    assert "on rank 3 is not that of rank 1" in ranks[0]["stage3 replicate2"], "the other holder of the same shard"


class Tracking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(5)
        self.register_buffer("coarse", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("flags", torch.zeros(2, dtype=torch.bool))


def _broadcast() -> dict[str, torch.Tensor]:
    torch.manual_seed(torch.distributed.get_rank())
    module = Tracking()
    mesh = Mesh.build(ParallelLayout().resolve(3))
    places = [(module.bn, name) for name, _ in module.bn.named_buffers()] + [(module, "coarse"), (module, "flags")]
    sync = BufferSync(places, mesh.data)
    module.coarse = torch.zeros(3, dtype=torch.bfloat16)  # a new tensor in its place is found
    module.bn(torch.randn(8, 5))
    with torch.no_grad():
        module.coarse.add_(mesh.rank + 1)
        module.flags.fill_(mesh.rank == 0)
    mine = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with mesh.trace.recording() as sent:
        sync.broadcast()
    assert [call.op for call in sent] == ["broadcast"] * 4, "one message a dtype"
    after = dict(module.named_buffers())
    assert mesh.rank != 0 or all(torch.equal(after[name], mine[name]) for name in mine), "rank 0's stay"
    assert all(after[name].dtype == mine[name].dtype for name in mine)
    return {name: buffer.clone() for name, buffer in after.items()}


def test_Z16_buffers_become_those_of_rank_0() -> None:
    first, *others = run_world(_broadcast, 3)
    for theirs in others:
        assert all(torch.equal(first[name], theirs[name]) for name in first)


def _different_layers() -> str:
    torch.set_default_dtype(torch.float64)
    module = listed_heads()
    optimizers = adamw(module)
    mesh, dp = data_parallel(module, optimizers, 3)
    apart(module, rows(0, 0).chunk(2)[mesh.rank], Place(0, 0, mesh.rank)).backward()
    dp.finish()
    with pytest.raises(RuntimeError) as caught:
        dp.require_alike()
    return str(caught.value)


def test_Z9_ranks_that_use_different_layers_at_stage_3_are_told() -> None:
    for text in run_world(_different_layers, 2):
        assert "all ranks must use the same layers" in text
        assert "rank 0 fetched the rest, layers.0, layers.1, listed.0" in text
        assert "rank 1 fetched the rest, layers.0, layers.1, listed.1" in text
        assert "ZeroOptions(ignored=...)" in text


def test_Z9_they_may_once_those_layers_are_no_units() -> None:
    for options in (ZeroOptions(min_unit_mb=0, ignored=("listed",)), ZeroOptions(min_unit_mb=0, units=("Layer",))):
        cases = {"apart": Case(listed_heads, loss=apart, stage=3, options=options)}
        assert_parity(cases["apart"], [rank["apart"] for rank in outcomes(cases, 2)])


def _one_stays_away(stage: int, how: str) -> None:
    torch.set_default_dtype(torch.float64)
    module = Awkward()
    mesh, dp = data_parallel(module, adamw(module), stage)
    _set_pg_timeout(timedelta(seconds=2), dist.group.WORLD)
    if stage < 3:
        loss = next_token(module, rows(0, 0), Place(0, 0, 0))
    if mesh.rank == 3:
        match how:
            case "raises":
                raise ValueError("no more data")
            case "dies":
                os._exit(1)
            case "sleeps":
                time.sleep(8)
                raise ValueError("slept too long")
    if stage == 3:
        loss = next_token(module, rows(0, 0), Place(0, 0, 0))
    loss.backward()
    dp.finish()


@pytest.mark.parametrize(
    ("stage", "how"), [(0, "raises"), (1, "dies"), (2, "raises"), (3, "dies"), pytest.param(1, "sleeps", marks=pytest.mark.slow)]
)
def test_L11_a_rank_that_does_not_come_to_backward_is_an_error_not_silence(stage: int, how: str) -> None:
    start = time.monotonic()
    with pytest.raises(WorldError) as caught:
        run_world(_one_stays_away, 4, stage, how, timeout=20, grace=5)
    assert time.monotonic() - start < 18
    text = str(caught.value)
    blocks = {int(block[0]): block for block in text.split("--- rank ")[1:]}
    assert set(blocks) == {0, 1, 2, 3}, "no rank goes on as if nothing had happened"
    told = {"raises": "no more data", "dies": "exit code 1", "sleeps": "slept too long"}[how]
    assert told in blocks[3] or how == "sleeps"
    assert all("no answer" not in blocks[rank] for rank in (0, 1, 2)), "each waiting rank is told on its own"
