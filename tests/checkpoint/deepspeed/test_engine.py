"""Against the real engine: its checkpoints read to the bit, ours loaded by it, and trained on as if nothing had happened."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_par.checkpoint.deepspeed import open_deepspeed, open_universal, write_deepspeed, write_universal
from lightning_par.checkpoint.deepspeed.write import Target
from lightning_par.checkpoint.source import MODULE, OPTIMIZERS, Source
from lightning_par.checkpoint.whole import open_native, write_native
from tests.checkpoint.deepspeed import engine, ours
from tests.checkpoint.deepspeed.engine import ORDER, SAVED, Outcome
from tests.harness import run_world

pytestmark = pytest.mark.slow

MORE = 2
STAGES = [(1, "fp32"), (2, "fp32"), (3, "fp32")]
HALF = [(stage, dtype) for dtype in ("bf16", "fp16") for stage in (1, 2, 3)]
UNIVERSAL = {"checkpoint": {"load_universal": True}}


@dataclass
class Made:
    """Runs of the engine on two ranks, what they saved, and what the engine made of it once it had gone through us."""

    root: Path
    straight: dict[tuple[int, str], list[Outcome]]
    resumed: dict[tuple[int, str], list[Outcome]]
    tools: dict[int, dict[str, Tensor]]

    def source(self, stage: int, dtype: str) -> Source:
        return open_deepspeed(self.root / "theirs" / f"{dtype}-{stage}")


def _train(root: Path, cases: list[tuple[int, str]]) -> list[Outcome]:
    return [engine.run(stage, dtype, SAVED + MORE, save=root / "theirs" / f"{dtype}-{stage}") for stage, dtype in cases]


def _resume(root: Path, cases: list[tuple[int, str]]) -> list[Outcome]:
    return [engine.run(stage, dtype, MORE, first=SAVED, load=root / "ours" / f"{dtype}-{stage}") for stage, dtype in cases]


def _resume_universal(root: Path) -> Outcome:
    return engine.run(1, "fp32", MORE, first=SAVED, load=root / "universal", **UNIVERSAL)


def _fp32(root: Path, cases: list[tuple[int, str]]) -> dict[int, dict[str, Tensor]]:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    found = {stage: get_fp32_state_dict_from_zero_checkpoint(str(root / "ours" / f"{dtype}-{stage}")) for stage, dtype in cases}
    return {stage: {name: value.clone() for name, value in weights.items()} for stage, weights in found.items()}


def _ours(root: Path, cases: list[tuple[int, str]]) -> tuple[list[Outcome], Outcome | None, dict[int, dict[str, Tensor]]]:
    """One world for everything that needs DeepSpeed: importing it is what takes long."""
    resumed = _resume(root, cases)
    universal = _resume_universal(root) if (root / "universal").exists() else None
    return resumed, universal, _fp32(root, cases) if torch.distributed.get_rank() == 0 else {}


def _make(root: Path, cases: list[tuple[int, str]]) -> Made:
    """Train, save, DeepSpeed -> native -> DeepSpeed, load, go on."""
    by_rank = run_world(_train, 2, root, cases, timeout=300)
    straight = {case: [outcomes[place] for outcomes in by_rank] for place, case in enumerate(cases)}
    sharded = [case for case in cases if case[0]]
    for stage, dtype in sharded:
        folder = root / "native" / f"{dtype}-{stage}"
        write_native(open_deepspeed(root / "theirs" / f"{dtype}-{stage}"), folder)
        write_deepspeed(open_native(folder), root / "ours" / f"{dtype}-{stage}", Target(stage, 2, dtype, sub_group_size=60))
    if (1, "fp32") in cases:
        write_universal(open_native(root / "native" / "fp32-1"), root / "universal", Target())
    answers = run_world(_ours, 2, root, sharded, timeout=300)
    resumed = {case: [outcomes[place] for outcomes, _, _ in answers] for place, case in enumerate(sharded)}
    resumed |= {(-1, "fp32"): [universal for _, universal, _ in answers if universal is not None]}
    return Made(root, straight, resumed, answers[0][2])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return _make(tmp_path_factory.mktemp("engine"), [(0, "fp32"), *STAGES])


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return _make(tmp_path_factory.mktemp("half"), [(0, "bf16"), *HALF])


def assert_equal(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


def _assert_reads(made: Made, stage: int, dtype: str) -> None:
    source, wanted = made.source(stage, dtype), made.straight[stage, dtype][0]
    assert_equal({name: source.read(f"model.{name}") for name in wanted.weights}, wanted.weights)
    assert_equal({name: source.read(f"optimizer.0.{name}") for name in wanted.moments}, wanted.moments)
    assert {float(source.read(f"optimizer.0.{name}.step")) for name in wanted.weights} == {float(SAVED)}
    for name in ("shift", "seen"):
        assert torch.equal(source.read(f"model.{name}"), wanted.others[name])
    fixed = engine.Awkward().fixed.weight
    assert torch.equal(source.read("model.fixed.weight"), fixed.to({"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype)))
    assert source.meta[MODULE]["aliases"]["head.weight"] == "embed.weight"
    assert source.meta[MODULE]["buffers"] == ["shift", "seen"]
    assert source.meta[MODULE]["frozen"] == ["fixed.weight", "fixed.bias"]
    decay, rest = source.meta[OPTIMIZERS][0]["groups"]
    assert (decay["weight_decay"], decay["lr"], rest["weight_decay"], rest["lr"]) == (0.1, 1e-2, 0.0, 3e-2)
    assert [*decay["params"], *rest["params"]] == [name for name in ORDER if not name.startswith("fixed")]
    assert (source.meta["global_step"], source.meta["note"]) == (SAVED, "the user's own")


def _assert_resumes(made: Made, stage: int, dtype: str) -> None:
    for straight, resumed in zip(made.straight[stage, dtype], made.resumed[stage, dtype], strict=True):
        assert_equal(resumed.weights, straight.weights)
        assert_equal(resumed.moments, straight.moments)
        assert_equal(resumed.others, straight.others)
        assert resumed.losses == straight.losses[SAVED:]
        assert resumed.scale == straight.scale
        assert_equal(resumed.end, straight.end)


by_stage = pytest.mark.parametrize(("stage", "dtype"), STAGES, ids=lambda value: str(value))
by_half = pytest.mark.parametrize(("stage", "dtype"), HALF, ids=lambda value: str(value))


@by_stage
def test_its_checkpoint_is_read_to_the_bit(made: Made, stage: int, dtype: str) -> None:
    _assert_reads(made, stage, dtype)


@by_stage
def test_ours_is_loaded_by_it_and_trained_on_to_the_bit(made: Made, stage: int, dtype: str) -> None:
    _assert_resumes(made, stage, dtype)


@by_stage
def test_its_zero_to_fp32_gives_our_weights_frozen_and_tied_ones_too(made: Made, stage: int, dtype: str) -> None:
    source = made.source(stage, dtype)
    aliases = source.meta[MODULE]["aliases"]
    got = made.tools[stage]
    assert got.keys() == aliases.keys()
    for key, name in aliases.items():
        assert torch.equal(got[key], source.read(f"model.{name}").to(got[key].dtype)), key


def test_without_zero_the_order_of_the_optimizer_is_all_that_must_be_told(made: Made) -> None:
    plain, sharded = made.source(0, "fp32"), made.source(1, "fp32")
    assert plain.is_numbered
    named = plain.named([ORDER])
    for name in sharded.entries:
        torch.testing.assert_close(named.read(name), sharded.read(name), rtol=1e-5, atol=1e-6)  # gradients are added up in another order


def test_a_universal_checkpoint_of_ours_is_loaded_by_it_and_trained_on_to_the_bit(made: Made) -> None:
    for straight, resumed in zip(made.straight[1, "fp32"], made.resumed[-1, "fp32"], strict=True):
        assert_equal(resumed.weights, straight.weights)
        assert_equal(resumed.moments, straight.moments)
        assert resumed.losses == straight.losses[SAVED:]
        assert_equal(resumed.end, straight.end)


def _resume_in_ours(root: Path, cases: list[tuple[int, str]], layouts: list[dict[str, int]], precision: str) -> list[Any]:
    folders = [root / "theirs" / f"{dtype}-{stage}" for stage, dtype in cases]
    return [ours.resume(folder, layout, precision, MORE) for folder, layout in zip(folders, layouts, strict=True)]


def _mean_losses(outcomes: list[Outcome]) -> list[float]:
    """Over the ranks, as ours has them on each."""
    return [sum(losses) / len(losses) for losses in zip(*(outcome.losses[SAVED:] for outcome in outcomes), strict=True)]


def test_ours_goes_on_from_its_checkpoint_as_it_does_itself(made: Made) -> None:
    cases = [(0, "fp32"), *STAGES]
    answers = run_world(_resume_in_ours, 2, made.root, cases, [{"dp": 2, "zero": stage} for stage, _ in cases], "32-true")
    for place, (stage, dtype) in enumerate(cases):
        for mine in (rank[place] for rank in answers):
            assert mine["losses"] == pytest.approx(_mean_losses(made.straight[stage, dtype]), abs=1e-6)
            assert mine["steps"] == SAVED + MORE
        tolerance = 1e-6 if stage == 3 else 0.0  # DeepSpeed's stage 3 divides gradients by the number of ranks at another moment
        for name, value in made.straight[stage, dtype][0].end.items():
            torch.testing.assert_close(answers[0][place]["weights"][name], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layout", [{"dp": 1}, {"dp": 4, "zero": 3}], ids=str)
def test_ours_goes_on_at_another_number_of_ranks(made: Made, layout: dict[str, int]) -> None:
    cases = [(1, "fp32"), (3, "fp32")]
    answers = run_world(_resume_in_ours, layout["dp"], made.root, cases, [layout, layout], "32-true")
    for place, case in enumerate(cases):
        for name, value in made.straight[case][0].end.items():
            torch.testing.assert_close(answers[0][place]["weights"][name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "precision"), [("bf16", "bf16-true"), ("fp16", "16-true")])
def test_ours_goes_on_from_its_half_precision_with_its_masters_and_scale(half: Made, dtype: str, precision: str) -> None:
    cases = [(stage, dtype) for stage in (1, 2, 3)]
    answers = run_world(_resume_in_ours, 2, half.root, cases, [{"dp": 2, "zero": stage} for stage, _ in cases], precision)
    for place, case in enumerate(cases):
        mine, theirs = answers[0][place], half.straight[case][0]
        assert mine["losses"] == pytest.approx(_mean_losses(half.straight[case]), abs=2e-2)
        assert mine["scale"] == (theirs.scale or 1.0)
        for name, value in theirs.end.items():
            torch.testing.assert_close(mine["weights"][name].float(), value, rtol=2e-2, atol=2e-2)


@by_half
def test_its_checkpoint_in_half_precision_is_read_to_the_bit(half: Made, stage: int, dtype: str) -> None:
    _assert_reads(half, stage, dtype)
    scaler = half.source(stage, dtype).facts["loss_scaler"]
    assert (scaler or {}).get("cur_scale", 1.0) == (half.straight[stage, dtype][0].scale or 1.0)


@by_half
def test_ours_in_half_precision_is_loaded_by_it_and_trained_on_to_the_bit(half: Made, stage: int, dtype: str) -> None:
    _assert_resumes(half, stage, dtype)


def test_half_precision_without_zero_gives_its_masters_once_the_order_is_told(half: Made) -> None:
    plain, sharded = half.source(0, "bf16").named([ORDER], ["fixed.weight", "fixed.bias"]), half.source(1, "bf16")
    for name in half.straight[1, "bf16"][0].weights:
        assert plain.entries[f"model.{name}"].dtype == torch.float32
        torch.testing.assert_close(plain.read(f"model.{name}"), sharded.read(f"model.{name}"), rtol=0, atol=0.05)


def _load_only(root: Path) -> list[Outcome]:
    ranks = torch.distributed.get_world_size()
    return [engine.run(stage, dtype, 0, load=root / f"{ranks}-{stage}") for stage, dtype in STAGES]


@pytest.mark.parametrize("ranks", [1, 3])
def test_K1_any_stage_at_any_number_of_ranks_is_loaded_by_it(made: Made, ranks: int, tmp_path: Path) -> None:
    for stage, dtype in STAGES:
        write_deepspeed(made.source(3 - stage or 3, dtype), tmp_path / f"{ranks}-{stage}", Target(stage, ranks, sub_group_size=60))
    for outcomes in run_world(_load_only, ranks, tmp_path, timeout=200):
        for (stage, dtype), outcome in zip(STAGES, outcomes, strict=True):
            wanted = made.straight[3 - stage or 3, dtype][0]
            assert_equal(outcome.weights, wanted.weights)
            assert_equal(outcome.moments, wanted.moments)


@by_stage
def test_ds_to_universal_takes_ours_and_we_read_what_it_makes(made: Made, stage: int, dtype: str, tmp_path: Path) -> None:
    ours = made.root / "ours" / f"{dtype}-{stage}"
    arguments = ["--input_folder", str(ours / f"global_step{SAVED}"), "--output_folder", str(tmp_path / "universal")]
    arguments += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *arguments]
    subprocess.run(command, check=True, capture_output=True, timeout=200, env=os.environ | {"DS_ACCELERATOR": "cpu"})
    got, wanted = open_universal(tmp_path), open_deepspeed(ours)
    assert got.entries.keys() == wanted.entries.keys()
    for name in wanted.entries:
        torch.testing.assert_close(got.read(name), wanted.read(name), rtol=0, atol=0)


def _round_robin(folder: Path) -> Outcome:
    return engine.run(2, "fp32", SAVED, save=folder, zero_optimization={"round_robin_gradients": True})


def test_round_robin_gradients_are_read_to_the_bit(tmp_path: Path) -> None:
    outcome = run_world(_round_robin, 2, tmp_path, timeout=200)[0]
    source = open_deepspeed(tmp_path)
    for name in ORDER:  # not DeepSpeed's own masters: it takes them from where they would be without round robin
        assert torch.equal(source.read(f"model.{name}"), outcome.others[name]), name
    (first, _) = source.meta[OPTIMIZERS][0]["groups"]
    assert first["params"] == ["down.weight", "embed.weight", "up.weight"]
