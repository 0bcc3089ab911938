"""Files of several tensor-parallel ranks: joined by a plan to the bit, or refused by name."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_par import convert
from lightning_par.checkpoint import CheckpointError, open_checkpoint
from lightning_par.checkpoint.deepspeed import write_deepspeed
from lightning_par.checkpoint.deepspeed.join import Cut
from lightning_par.checkpoint.deepspeed.write import Target
from lightning_par.checkpoint.files import load, save
from lightning_par.checkpoint.source import Entry, Joining, Source, parameter_of
from lightning_par.comm import Group
from lightning_par.comm.trace import Trace
from lightning_par.tensor import shard_module
from tests.checkpoint.deepspeed import pipes
from tests.checkpoint.deepspeed.engine import SAVED, Outcome, config
from tests.checkpoint.deepspeed.test_engine import assert_equal
from tests.checkpoint.fits import world_size
from tests.checkpoint.synthetic import ALIASES, assert_same, synthetic
from tests.harness import run_world

PLAN: dict[str, Any] = {"embed": "embedding_rowwise", "up": "colwise", "deep.weight": {"dim": 0, "parts": 3}}
CUTS = {"embed.weight": Cut(0), "up.weight": Cut(0), "up.bias": Cut(0), "deep.weight": Cut(0, (1, 1, 1))}
SIZES = {"embed.weight": [6, 5], "up.weight": [4, 3], "up.bias": [4, 3], "deep.weight": [3, 3]}


def fused() -> Source:
    """Its ``deep.weight`` is three matrices in one, as a fused query, key and value."""
    return synthetic(shapes={"deep.weight": (6, 2)})


def _part(whole: Tensor, name: str, rank: int) -> Tensor:
    """Written down apart from the code under test."""
    if name == "deep.weight":
        return torch.cat([matrix[rank : rank + 1] for matrix in whole.split(2)])
    return whole.split(SIZES[name])[rank] if name in SIZES else whole


def write_two_ranks(source: Source, folder: Path, target: Target, **info: Any) -> None:
    """As two tensor ranks of DeepSpeed would have: the files of one model rank differ from those of another in name and sizes only."""
    for rank in (0, 1):
        entries = {}
        for entry, value in source.entries.items():
            name, whole = parameter_of(entry), value.read()
            entries[entry] = Entry.of((whole if entry.endswith(".step") else _part(whole, name, rank)).clone())
        meta = {key: value for key, value in source.meta.items() if key not in ("layout", "loops")}
        write_deepspeed(replace(source, entries=entries, meta=meta), folder / f"{rank}", target)
        for file in (folder / f"{rank}/global_step4").iterdir():
            if file.name.endswith("model_states.pt"):
                told = {key: value for key, value in load(file).items() if key != "lightning_par"}
                save(told | {"mp_world_size": 2, "universal_checkpoint_info": info}, file.with_suffix(".new"))
                file.with_suffix(".new").replace(file)
            to = folder / "tag" / file.name.replace("mp_rank_00", f"mp_rank_{rank:02d}")
            to.parent.mkdir(exist_ok=True)
            file.rename(to)


@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (2, 1), (3, 3)])
def test_parts_are_joined_by_the_plan_to_the_bit(stage: int, ranks: int, tmp_path: Path) -> None:
    source = fused()
    write_two_ranks(source, tmp_path, Target(stage, ranks))
    got = open_checkpoint(tmp_path / "tag", Joining(tp_plan=PLAN))
    wanted = {name: entry for name, entry in source.entries.items() if not name.startswith("rng.")}
    assert_same(replace(got, meta={}), replace(source, meta={}, entries=wanted))
    convert(tmp_path / "tag", tmp_path / "out", "native", tp_plan=PLAN)
    again = open_checkpoint(tmp_path / "out")
    assert_equal({name: again.read(name) for name in wanted}, {name: entry.read() for name, entry in wanted.items()})
    assert again.meta["lightning_par_module"]["aliases"] == source.meta["lightning_par_module"]["aliases"]


def test_patterns_of_deepspeed_in_the_files_are_taken_where_no_plan_is_given(tmp_path: Path) -> None:
    source = fused()
    source.meta["lightning_par_module"]["aliases"] = {key: name for key, name in ALIASES.items() if name != "deep.weight"}
    source.meta["optimizer_states"][0]["groups"][0]["params"].remove("deep.weight")
    source = replace(source, entries={name: entry for name, entry in source.entries.items() if "deep" not in name})
    patterns = {"tp_replicated_parameter_patterns": ["gain", "fixed", "shift"], "parameter_with_row_parallelism_patterns": [r"nothing\..*"]}
    write_two_ranks(source, tmp_path, Target(2, 1), **patterns)
    got = open_checkpoint(tmp_path / "tag")
    assert torch.equal(got.read("model.up.weight"), source.read("model.up.weight"))
    assert torch.equal(got.read("optimizer.0.embed.weight.exp_avg"), source.read("optimizer.0.embed.weight.exp_avg"))
    assert torch.equal(got.read("model.shift"), source.read("model.shift"))


def test_without_a_plan_they_are_refused_with_the_way_out(tmp_path: Path) -> None:
    write_two_ranks(fused(), tmp_path, Target(2, 1))
    with pytest.raises(CheckpointError, match=r"written by 2 tensor ranks of DeepSpeed.*lightning-par convert 'tp_plan="):
        open_checkpoint(tmp_path / "tag")


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"up": "column"}, r"tp_plan 'up': unknown word 'column': known are colwise"),
        ({"down": "colwise"}, r"tp_plan 'down' matches no module"),
        ({"down.weight": 0}, r"tp_plan 'down.weight' matches no parameter"),
        ({"up": "rowwise"}, r"model.up.weight \(4, 5\) cannot have been cut along dim 1: the others differ"),
        ({"up.weight": 7}, r"model.up.weight \(4, 5\) has no dim 7"),
        ({"deep.weight": {"dim": 0, "parts": 2}}, r"model.deep.weight \(3, 2\) cannot hold parts of \[1, 1\] along dim 0"),
        ({"deep.weight": {"axis": 0}}, r"must be a word, a dim, or a mapping with dim and parts"),
        ({"up": "colwise", "up.weight": 1}, r"up.weight: cut in one way by 'up', in another by 'up.weight'"),
        ({"up": "colwise"}, r"model.embed.weight \(6, 5\) is not the same on all ranks, and no pattern says how it was cut"),
    ],
    ids=str,
)
def test_a_plan_that_cannot_be_is_refused(plan: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_two_ranks(fused(), tmp_path, Target(2, 1))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / "tag", Joining(tp_plan=plan))


def test_what_should_be_the_same_and_is_not_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    write_two_ranks(fused(), tmp_path, Target(2, 1))
    plan = {name: how for name, how in PLAN.items() if name != "deep.weight"}
    with pytest.raises(CheckpointError, match=r"model\.deep\.weight differs from rank to rank, and no pattern says how it was cut"):
        convert(tmp_path / "tag", tmp_path / "out", "native", tp_plan=plan)
    assert not (tmp_path / "out").exists()


def test_files_of_a_tensor_rank_that_are_missing_are_named(tmp_path: Path) -> None:
    write_two_ranks(fused(), tmp_path, Target(2, 2))
    (tmp_path / "tag/zero_pp_rank_0_mp_rank_01_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"data ranks \[0\] are missing beside zero_pp_rank_1_mp_rank_01"):
        open_checkpoint(tmp_path / "tag", Joining(tp_plan=PLAN))
    (tmp_path / "tag/mp_rank_01_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"holds no file like mp_rank_01"):
        open_checkpoint(tmp_path / "tag", Joining(tp_plan=PLAN))


@pytest.mark.parametrize(("sizes", "parts"), [([4, 2, 2], (4, 2, 2)), ([6, 6], (1, 1)), ([5], (1,))])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_matrices_in_one_parameter_are_joined_each_for_itself(sizes: list[int], parts: tuple[int, ...], dim: int) -> None:
    shape = [3, 4]
    shape[dim] = sum(sizes)
    whole = torch.randn(shape)
    halves = [matrix.tensor_split(2, dim) for matrix in whole.split(sizes, dim)]
    ranks = [torch.cat([half[rank] for half in halves], dim) for rank in (0, 1)]
    assert Cut(dim, parts).shape([tuple(rank.shape) for rank in ranks]) == tuple(whole.shape)
    assert torch.equal(Cut(dim, parts).join(ranks), whole)


# ---- the real engine, with a grid of our own


class Grid:
    """What DeepSpeed asks of an ``mpu``: tensor ranks beside each other, data ranks apart."""

    def __init__(self, tensor: int) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self.places = {"model": (rank % tensor, tensor), "data": (rank // tensor, world // tensor)}
        self.ranks: dict[str, list[int]] = {}
        self.groups = {}
        for kind, all_ranks in (
            ("model", [list(range(start, start + tensor)) for start in range(0, world, tensor)]),
            ("data", [list(range(start, world, tensor)) for start in range(tensor)]),
        ):
            for ranks in all_ranks:
                group = dist.new_group(ranks)
                if rank in ranks:
                    self.groups[kind], self.ranks[kind] = group, ranks

    def get_model_parallel_rank(self) -> int:
        return self.places["model"][0]

    def get_model_parallel_world_size(self) -> int:
        return self.places["model"][1]

    def get_model_parallel_group(self) -> Any:
        return self.groups["model"]

    def get_data_parallel_rank(self) -> int:
        return self.places["data"][0]

    def get_data_parallel_world_size(self) -> int:
        return self.places["data"][1]

    def get_data_parallel_group(self) -> Any:
        return self.groups["data"]


MORE = 5


def _train(root: Path, cases: list[tuple[int, str]]) -> list[Outcome]:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import deepspeed.comm.torch

    deepspeed.comm.torch.build_shm_op = lambda: None
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    grid = Grid(2)
    tp = Group("tp", tuple(grid.ranks["model"]), grid.get_model_parallel_rank(), grid.get_model_parallel_group(), Trace())
    outcomes = []
    for stage, dtype in cases:
        module = pipes.Net()
        specs = shard_module(module, tp).specs
        for name, param in module.named_parameters():
            param.model_parallel = not specs[name].is_whole  # as Megatron tells DeepSpeed what counts for a norm on every rank
        whole = {"sub_group_size": 10**9}  # DeepSpeed waits for ever where tensor ranks have another number of sub-groups
        settings = config(stage, dtype, gradient_clipping=0.0, zero_optimization=whole)
        engine, *_ = deepspeed.initialize(model=module, optimizer=pipes.optimizer(module), config=settings, mpu=grid)
        outcome = Outcome()
        for step in range(SAVED + MORE):
            loss = engine(pipes.rows(step, 0, grid.get_data_parallel_rank()))
            engine.backward(loss)
            engine.step()
            outcome.losses.append(loss.item())
            if step + 1 == SAVED:
                engine.save_checkpoint(str(root / f"{dtype}-{stage}"), tag=f"step{SAVED}")
                outcome.weights = _masters(module)
        outcome.end = _masters(module)
        engine.destroy()
        outcomes.append(outcome)
    return outcomes


def _masters(module: nn.Module) -> dict[str, Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param

    return {name: safe_get_full_fp32_param(param).clone() for name, param in module.named_parameters() if param.requires_grad}


def _resume(root: Path, cases: list[tuple[int, str]], layout: dict[str, int], ranks: int) -> list[dict[str, Any]]:
    """Of our native copies; the engine's data ranks have their rows in a micro-batch each."""
    pipes.MICRO = 1
    return [pipes.resume(root / "native" / f"{dtype}-{stage}", layout, "32-true", MORE, ranks=ranks) for stage, dtype in cases]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_ours_goes_on_from_tensor_ranks_as_they_do_themselves(ranks: int, tmp_path: Path) -> None:
    cases = [(1, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16")] if ranks == 1 else [(1, "fp32"), (3, "fp32")]
    by_rank = run_world(_train, 2 * ranks, tmp_path, cases, timeout=400)
    sizes = {"embed": 0, "layers.*.up": 0, "layers.*.fixed": 1}
    for place, (stage, dtype) in enumerate(cases):
        folder = tmp_path / f"{dtype}-{stage}"
        convert(
            folder,
            tmp_path / "native" / folder.name,
            "native",
            tp_plan={key: how for key, how in pipes.Net.tp_plan.items() if key != "head"},
        )
        source = open_checkpoint(tmp_path / "native" / folder.name)
        for name, first in by_rank[0][place].weights.items():
            dim = next((dim for pattern, dim in sizes.items() if pattern.rpartition(".")[2] in name.split(".")), None)
            whole = first if dim is None else torch.cat([first, by_rank[1][place].weights[name]], dim)
            assert torch.equal(source.read(f"model.{name}"), whole), name
    exact = [case for case in cases if case[1] == "fp32"]
    for layout in ({"tp": 2}, {"dp": 2, "zero": 1}, {"tp": 2, "pp": 2}):
        for mine, case in zip(run_world(_resume, world_size(layout), tmp_path, exact, layout, ranks, timeout=120)[0], exact, strict=True):
            theirs = [by_rank[rank][cases.index(case)] for rank in range(0, 2 * ranks, 2)]
            losses = [sum(losses) / ranks for losses in zip(*(outcome.losses[SAVED:] for outcome in theirs), strict=True)]
            assert mine["losses"] == pytest.approx(losses, abs=1e-5)
