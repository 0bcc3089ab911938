"""The files alone, without DeepSpeed: every target keeps every bit, and what cannot be kept, or trusted, is named."""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_par.checkpoint import CheckpointError, files
from lightning_par.checkpoint.conversion import Silent, compare
from lightning_par.checkpoint.deepspeed import (
    is_deepspeed,
    is_universal,
    names,
    open_deepspeed,
    open_universal,
    write_deepspeed,
    write_universal,
)
from lightning_par.checkpoint.deepspeed.flat import by_parameter, contiguous
from lightning_par.checkpoint.deepspeed.write import Target
from lightning_par.checkpoint.files import Scratch, load, put_in_place, save
from lightning_par.checkpoint.source import Entry
from lightning_par.checkpoint.whole import open_native, open_single, write_native
from tests.checkpoint.synthetic import SHAPES, assert_same, synthetic

sizes = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@pytest.mark.parametrize("rule", [contiguous, by_parameter])
@given(groups=st.lists(sizes, min_size=1, max_size=3), ranks=st.integers(1, 9))
def test_every_element_lies_in_one_place(rule: Any, groups: list[list[int]], ranks: int) -> None:
    shapes = [{f"{group}.{place}": (numel,) for place, numel in enumerate(sizes)} for group, sizes in enumerate(groups)]
    flat = rule(shapes, ranks)
    files = {(rank, group): torch.full((size,), -1.0) for rank in range(ranks) for group, size in enumerate(flat.sizes)}
    values, start = {}, 0
    for name, (numel,) in ((name, shape) for group in shapes for name, shape in group.items()):
        values[name], start = torch.arange(start, start + numel, dtype=torch.float32), start + numel
        flat.write(name, values[name], lambda rank, group: files[rank, group])
    assert sum((file >= 0).sum().item() for file in files.values()) == start
    for name, value in values.items():
        assert torch.equal(flat.read(name, lambda rank, group: files[rank, group]), value)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_K4_nothing_is_lost_at_any_stage_and_number_of_ranks(stage: int, ranks: int, tmp_path: Path) -> None:
    source = synthetic()
    write_deepspeed(source, tmp_path / "out", Target(stage, ranks, sub_group_size=20))
    assert is_deepspeed(tmp_path / "out")
    assert_same(open_deepspeed(tmp_path / "out"), source)
    assert_same(open_deepspeed(tmp_path / "out" / "global_step4"), source)


def test_sub_groups_count_their_steps_apart(tmp_path: Path) -> None:
    write_deepspeed(synthetic(), tmp_path / "out", Target(3, 2, sub_group_size=20))
    file = tmp_path / "out/global_step4/zero_pp_rank_0_mp_rank_00_optim_states.pt"
    state = load(file, names.STUBS)["optimizer_state_dict"]["optimizer_state_dict"]["state"]
    steps = [told["step"] for told in state.values()]
    assert list(state) == [0, 1, 2]
    for step in steps:
        step += 1
    assert [step.item() for step in steps] == [5.0] * 3


def test_nothing_is_lost_in_a_universal_checkpoint(tmp_path: Path) -> None:
    source = synthetic()
    write_universal(source, tmp_path / "out", Target())
    assert is_universal(tmp_path / "out")
    assert is_universal(tmp_path / "out" / "universal")
    assert not is_deepspeed(tmp_path / "out" / "universal")
    assert_same(open_universal(tmp_path / "out"), source)


def test_half_precision_rounds_what_computes_and_keeps_the_masters(tmp_path: Path) -> None:
    source = synthetic()
    write_deepspeed(source, tmp_path / "out", Target(2, 2, "bf16"))
    assert (tmp_path / "out/global_step4/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").is_file()
    read, module = open_deepspeed(tmp_path / "out"), load(tmp_path / "out/global_step4/mp_rank_00_model_states.pt")["module"]
    for name in SHAPES:
        assert torch.equal(read.read(f"model.{name}"), source.read(f"model.{name}"))
        assert torch.equal(module[name], source.read(f"model.{name}").bfloat16())
    assert read.entries["model.fixed"].dtype == torch.bfloat16
    assert torch.equal(read.read("model.shift"), source.read("model.shift"))


def test_a_file_of_a_rank_that_is_missing_is_named(tmp_path: Path) -> None:
    for stage in (1, 3):
        write_deepspeed(synthetic(), tmp_path / f"{stage}", Target(stage, 3))
    (tmp_path / "1/global_step4/zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"data ranks \[1\] are missing beside zero_pp_rank_"):
        open_deepspeed(tmp_path / "1")
    (tmp_path / "3/global_step4/zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="3 data ranks wrote it, but 2 optimizer files are there"):
        open_deepspeed(tmp_path / "3")
    (tmp_path / "3/latest").write_text("global_step5")
    with pytest.raises(CheckpointError, match=r"latest names the folder 'global_step5', which is not there"):
        open_deepspeed(tmp_path / "3")


def test_a_file_that_is_cut_short_is_named(tmp_path: Path) -> None:
    write_deepspeed(synthetic(), tmp_path / "out", Target(2, 2))
    file = tmp_path / "out/global_step4/zero_pp_rank_1_mp_rank_00_optim_states.pt"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=r"zero_pp_rank_1_mp_rank_00_optim_states\.pt is damaged"):
        open_deepspeed(tmp_path / "out")


def test_K7_a_moment_that_is_missing_is_named(tmp_path: Path) -> None:
    write_universal(synthetic(), tmp_path / "out", Target())
    (tmp_path / "out/universal/zero/up.weight/fp32.pt").unlink()
    with pytest.raises(CheckpointError, match=r"up\.weight/fp32\.pt is missing"):
        open_universal(tmp_path / "out")


class _Code:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["model", "optimizer", "stage 3", "layer", "universal", "moment", "single", "native"])
def test_a_pickle_that_would_run_code_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    evil = tmp_path / "it ran"
    write_deepspeed(synthetic(), tmp_path / "out", Target(2, 1))
    write_deepspeed(synthetic(), tmp_path / "three", Target(3, 2))
    write_deepspeed(synthetic(), tmp_path / "pipeline", Target(1, 1))
    write_universal(synthetic(), tmp_path / "universal", Target())
    write_native(synthetic(), tmp_path / "last")
    file, opens = {
        "stage 3": (
            tmp_path / "three/global_step4/zero_pp_rank_1_mp_rank_00_model_states.pt",
            lambda: open_deepspeed(tmp_path / "three"),
        ),
        "layer": (tmp_path / "pipeline/global_step4/layer_00-model_states.pt", lambda: open_deepspeed(tmp_path / "pipeline")),
        "moment": (
            tmp_path / "universal/universal/zero/up.weight/exp_avg.pt",
            lambda: open_universal(tmp_path / "universal").read("optimizer.0.up.weight.exp_avg"),
        ),
        "native": (tmp_path / "last/meta.pt", lambda: open_native(tmp_path / "last")),
        "model": (tmp_path / "out/global_step4/mp_rank_00_model_states.pt", lambda: open_deepspeed(tmp_path / "out")),
        "optimizer": (tmp_path / "out/global_step4/zero_pp_rank_0_mp_rank_00_optim_states.pt", lambda: open_deepspeed(tmp_path / "out")),
        "universal": (tmp_path / "universal/universal/zero/optimizer_state.pt", lambda: open_universal(tmp_path / "universal")),
        "single": (tmp_path / "last.ckpt", lambda: open_single(tmp_path / "last.ckpt")),
    }[kind]
    for write in (torch.save, lambda value, path: path.write_bytes(pickle.dumps(value, 2))):
        write({"state_dict": _Code(evil)}, file)
        with pytest.raises(CheckpointError, match=r"mkdir" if kind == "native" else r"mkdir.*refused"):
            opens()
    assert not evil.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": {"up.weight": 3.0}}, "step differs within a group.*embed.weight: 4, up.weight: 3"),
        ({"optimizer_states": [{"groups": [], "scalars": {}}] * 2}, "2 optimizers: DeepSpeed has one"),
        ({"optimizer_states": []}, "nothing tells which parameters are trained"),
        ({"module": 1}, "the keys module, which are the engine's own"),
        ({"scale": torch.ones((), dtype=torch.float64)[None]}, "its value is float64"),
        ({"shapes": {"gain": (3, 0)}}, r"gain has no elements \(shape \(3, 0\)\)"),
    ],
)
def test_what_deepspeed_has_no_place_for_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        write_deepspeed(synthetic(**change), tmp_path / "out", Target())


def test_other_optimizers_keep_their_state(tmp_path: Path) -> None:
    source = synthetic()
    kept = {name: entry for name, entry in source.entries.items() if not name.endswith(("exp_avg_sq", "step"))}
    source.entries.clear()
    source.entries.update({name.replace("exp_avg", "momentum_buffer"): entry for name, entry in kept.items()})
    write_deepspeed(source, tmp_path / "out", Target(3, 2))
    assert_same(open_deepspeed(tmp_path / "out"), source)


def test_a_group_without_a_trained_parameter_is_one_at_stage_3(tmp_path: Path) -> None:
    """As engines have it, which count groups; below stage 3 they cannot run with one."""
    source = synthetic()
    groups = source.meta["optimizer_states"][0]["groups"]
    groups.insert(1, {**groups[0], "params": [], "lr": 0.5})
    write_deepspeed(source, tmp_path / "three", Target(3, 2, sub_group_size=8))
    file = next((tmp_path / "three").rglob("*rank_0*optim_states.pt"))
    state = torch.load(file, weights_only=False)["optimizer_state_dict"]
    first, empty, last = (group["params"] for group in state["optimizer_state_dict"]["param_groups"])
    assert [*first, *empty, *last] == [*range(len(state["fp32_flat_groups"]))]
    assert empty == []
    assert_same(open_deepspeed(tmp_path / "three"), source)
    write_deepspeed(source, tmp_path / "two", Target(2, 2))
    file = next((tmp_path / "two").rglob("*rank_0*optim_states.pt"))
    assert len(torch.load(file, weights_only=False)["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]) == 2


def test_a_target_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stage=0 must be 1, 2 or 3; ranks=0 must .*; dtype='fp8' must be one of fp32, bf16, fp16"):
        Target(0, 0, "fp8")
    for wrong in (0, -1, 2.5, True, "abc", None):
        with pytest.raises(ValueError, match=r"sub_group_size=.* must be a whole number of at least 1"):
            Target(sub_group_size=wrong)


def test_nothing_is_overwritten_and_nothing_is_left_of_what_fails(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match="there is there already"), put_in_place(tmp_path / "there"):
        pass
    with pytest.raises(OSError, match="full"), put_in_place(tmp_path / "new") as path:  # noqa: PT012
        path.mkdir()
        save({"a": torch.ones(3)}, path / "a.pt")
        raise OSError("full")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_of_two_that_write_one_path_the_first_to_end_has_it(kind: str, tmp_path: Path) -> None:
    def write(path: Path, text: str) -> None:
        if kind == "folder":
            path.mkdir()
            path = path / "file"
        path.write_text(text)

    target = tmp_path / "x"
    with pytest.raises(CheckpointError, match="x has come to be while"), put_in_place(target) as late:  # noqa: PT012
        write(late, "late")
        with put_in_place(target) as early:
            write(early, "early")
    assert (target / "file" if kind == "folder" else target).read_text() == "early"
    write(tmp_path / "after the look", "late")
    exists, looks = Path.exists, iter([False])
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError, match="x has come to be while"):  # noqa: PT012
        patch.setattr(Path, "exists", lambda path: next(looks, exists(path)))
        files._move(tmp_path / "after the look", target)
    assert (target / "file" if kind == "folder" else target).read_text() == "early"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["after the look", "x"]


def test_what_a_killed_process_left_is_deleted_by_the_next(tmp_path: Path) -> None:
    for name in (f".{'0f' * 8}.unfinished", ".mine.unfinished"):
        (tmp_path / name / "x").mkdir(parents=True)
    with put_in_place(tmp_path / "a") as first, put_in_place(tmp_path / "b") as second:
        first.write_text("a")
        second.write_text("b")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mine.unfinished", "a", "b"]


def test_scratch_leaves_no_file(tmp_path: Path) -> None:
    kept = [Scratch(tmp_path).keep(torch.arange(5, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16, torch.int64)]
    assert not list(tmp_path.iterdir())
    assert all(value.tolist() == [0, 1, 2, 3, 4] for value in kept)
    assert math.prod(Scratch(tmp_path).zeros((0, 3), torch.float32).shape) == 0


def test_steps_that_are_counted_in_the_group_come_back_by_parameter(tmp_path: Path) -> None:
    """DeepSpeed's FusedAdam keeps them there."""
    write_deepspeed(synthetic(), tmp_path / "out", Target(2, 1))
    file = tmp_path / "out/global_step4/zero_pp_rank_0_mp_rank_00_optim_states.pt"
    told = load(file, names.STUBS)
    base = told["optimizer_state_dict"]["base_optimizer_state"]
    for place, group in enumerate(base["param_groups"]):
        group["step"] = int(base["state"][place].pop("step"))
    save(told, file.with_name("new"), names.pickle_module)
    file.with_name("new").replace(file)
    source = open_deepspeed(tmp_path / "out")
    for name in SHAPES:
        assert torch.equal(source.read(f"optimizer.0.{name}.step"), torch.tensor(4.0))


def test_what_is_not_read_is_named(tmp_path: Path) -> None:
    write_deepspeed(synthetic(), tmp_path / "out", Target(2, 1))
    file = tmp_path / "out/global_step4/mp_rank_00_model_states.pt"
    told = load(file)
    save(told | {"mp_world_size": 2}, file.with_name("new"))
    file.with_name("new").replace(file)
    with pytest.raises(
        CheckpointError, match=r"holds no file like mp_rank_01_model_states\.pt: it is no checkpoint of DeepSpeed, or incomplete"
    ):
        open_deepspeed(tmp_path / "out")
    save(told | {"module": None}, file.with_name("new"))
    file.with_name("new").replace(file)
    with pytest.raises(CheckpointError, match=r"a pipeline of DeepSpeed wrote it, but no file like layer_00-model_states\.pt is there"):
        open_deepspeed(tmp_path / "out")
    told["param_shapes"][0]["more"] = torch.Size([100])
    save(told, file.with_name("new"))
    file.with_name("new").replace(file)
    with pytest.raises(CheckpointError, match=r"group 0 of rank 0 has 102 elements, but its parameters fill 202 .*: the layout is unknown"):
        open_deepspeed(tmp_path / "out")


@pytest.mark.parametrize("stage", [1, 3])
def test_what_our_loss_scale_remembers_goes_there_and_back(stage: int, tmp_path: Path) -> None:
    remembered = {"scale": 512.0, "good": 2, "left": 2, "last_overflow": 1, "steps": 4, "skipped": 1}
    write_deepspeed(synthetic(ParallelPrecision=remembered), tmp_path / "out", Target(stage, 2, "fp16"))
    source = open_deepspeed(tmp_path / "out")
    scaler = source.facts["loss_scaler"]
    wanted = {"cur_scale": 512.0, "dynamic": True, "cur_iter": 4, "last_overflow_iter": 1, "cur_hysteresis": 2}
    assert {key: scaler[key] for key in wanted} == wanted
    assert source.meta["ParallelPrecision"] == remembered


def test_weights_of_half_precision_without_masters_are_widened(tmp_path: Path) -> None:
    source = synthetic()
    for name in SHAPES:
        source.entries[f"model.{name}"] = Entry.of(source.read(f"model.{name}").bfloat16())
    write_deepspeed(source, tmp_path / "out", Target(2, 2, "bf16"))
    got = open_deepspeed(tmp_path / "out")
    for name in SHAPES:
        assert torch.equal(got.read(f"model.{name}"), source.read(f"model.{name}").float())
    assert compare(source, got, Silent()) == ["model.fixed"]


def test_what_only_we_know_does_not_outlive_a_training_by_deepspeed(tmp_path: Path) -> None:
    """Programs get the client state when they load and give it back when they save."""
    write_deepspeed(synthetic(), tmp_path / "out", Target(2, 1))
    file = tmp_path / "out/global_step4/mp_rank_00_model_states.pt"
    save(load(file) | {"global_steps": 9}, file.with_name("new"))
    file.with_name("new").replace(file)
    source = open_deepspeed(tmp_path / "out")
    assert (source.meta["global_step"], source.meta["epoch"], source.meta["lr_schedulers"]) == (9, 0, [{"last_epoch": 4}])
    assert not {"loops", "layout"} & source.meta.keys()
    assert not any(name.startswith("rng.") for name in source.entries)
    assert [group["params"] for group in source.meta["optimizer_states"][0]["groups"]] == [
        ["deep.weight", "embed.weight", "up.weight"],
        ["up.bias", "gain"],
    ]
