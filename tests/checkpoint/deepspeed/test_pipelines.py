"""Pipelines of the real engine: read to the bit, by the names of one's module, and gone on with as it does itself."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_par import convert
from lightning_par.checkpoint import CheckpointError, open_checkpoint
from lightning_par.checkpoint.deepspeed import open_deepspeed
from lightning_par.checkpoint.layers import find_layers
from lightning_par.checkpoint.source import LAYERS, MODULE, OPTIMIZERS, Joining, Source
from tests.checkpoint.deepspeed import pipes
from tests.checkpoint.deepspeed.engine import SAVED, Outcome
from tests.checkpoint.deepspeed.test_engine import assert_equal
from tests.checkpoint.fits import world_size
from tests.harness import run_world

pytestmark = pytest.mark.slow

MORE = 5
Case = tuple[int, str, bool]  # stage, dtype, tied
QUICK: list[Case] = [(1, "fp32", True), (0, "fp32", True), (0, "fp32", False)]
HALF: list[Case] = [(1, "bf16", True), (1, "fp16", True), (0, "fp16", True), (0, "bf16", True)]
WIDE: list[Case] = [(1, "fp32", True), (1, "bf16", True), (0, "bf16", True)]
PLACES = {"0": "embed", "1": "layers.0", "3": "layers.1", "4": "layers.2", "5": "norm", "6": "head"}


def _folder(root: Path, case: Case) -> Path:
    stage, dtype, tied = case
    return root / f"{dtype}-{stage}-{tied}"


def _train(root: Path, cases: list[Case], ranks: int) -> list[Outcome]:
    return [pipes.run(c[0], c[1], SAVED + MORE, tied=c[2], save=_folder(root, c), data_ranks=ranks) for c in cases]


def _make(root: Path, cases: list[Case], ranks: int = 1) -> tuple[Path, dict[Case, list[Outcome]]]:
    by_rank = run_world(_train, 2 * ranks, root, cases, ranks, timeout=400)
    return root, {case: [outcomes[place] for outcomes in by_rank] for place, case in enumerate(cases)}


Made = tuple[Path, dict[Case, list[Outcome]]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return _make(tmp_path_factory.mktemp("pipeline"), QUICK)


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return _make(tmp_path_factory.mktemp("half"), HALF)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return _make(tmp_path_factory.mktemp("wide"), WIDE, 2)


def _ours(name: str) -> str:
    """The name in our module of what DeepSpeed calls ``name``."""
    layer, _, member = name.removeprefix("tied_modules.").partition(".")
    return f"{'embed' if layer == 'embed' else PLACES[layer]}.{member}"


def _whole(outcomes: list[Outcome], what: str) -> dict[str, Tensor]:
    """That of all stages, by our names."""
    return {_ours(name): value for outcome in reversed(outcomes) for name, value in getattr(outcome, what).items()}


def _source(made: Made, case: Case) -> Source:
    names = [*pipes.LAYERS, *([] if case[2] else ["head"])]
    return open_checkpoint(_folder(made[0], case), Joining(layers=names))


def _assert_reads(made: Made, case: Case) -> None:
    source, outcomes = _source(made, case), made[1][case]
    wanted, others = _whole(outcomes, "weights"), _whole(outcomes, "others")
    assert_equal({name: source.read(f"model.{name}") for name in wanted}, wanted)
    moments = _whole(outcomes, "moments")
    assert_equal({name: source.read(f"optimizer.0.{name}") for name in moments}, moments)
    for name in (name for name in others if name not in wanted):
        assert torch.equal(source.read(f"model.{name}"), others[name])
    assert {name for name in source.entries if name.startswith("model.")} == {f"model.{name}" for name in others}
    assert {name.rpartition(".")[0] for name in source.entries if name.startswith("optimizer.0.")} == {f"optimizer.0.{n}" for n in wanted}
    told = source.meta[MODULE]
    assert told["buffers"] == [f"layers.{place}.shift" for place in range(3)]
    assert told["frozen"] == [f"layers.{place}.fixed.weight" for place in range(3)]
    (optimizer,) = source.meta[OPTIMIZERS]
    decay, rest = optimizer["groups"]
    assert (decay["weight_decay"], decay["lr"], rest["weight_decay"], rest["lr"]) == (0.1, 1e-2, 0.0, 3e-2)
    assert decay["params"] == [n for n in told["aliases"] if n in wanted and wanted[n].dim() >= 2]
    assert rest["params"] == [n for n in told["aliases"] if n in wanted and wanted[n].dim() < 2]
    assert (source.meta["global_step"], source.meta["note"]) == (SAVED, "the user's own")


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_a_pipeline_is_read_to_the_bit(made: Made, case: Case) -> None:
    _assert_reads(made, case)


@pytest.mark.parametrize("case", HALF, ids=str)
def test_a_pipeline_in_half_precision_is_read_to_the_bit(half: Made, case: Case) -> None:
    _assert_reads(half, case)


@pytest.mark.parametrize("case", WIDE, ids=str)
def test_stages_over_several_data_ranks_are_read_to_the_bit(wide: Made, case: Case) -> None:
    _assert_reads(wide, case)


def test_layers_are_found_by_order(made: Made) -> None:
    case = QUICK[0]
    source = open_deepspeed(_folder(made[0], case))
    assert source.meta[MODULE][LAYERS] == ["0", "1", "3", "4", "5"]
    aliases = {name: "embed.weight" if name == "head.weight" else name for name in pipes.Module().state_dict()}
    found = find_layers(source, aliases)
    assert found.entries.keys() == _source(made, case).entries.keys()
    assert found.meta == _source(made, case).meta
    with pytest.raises(
        CheckpointError, match=r"layer 4 of the pipeline has shift, norm.weight, .*but the model goes on with norm.weight.*layers=\["
    ):
        find_layers(source, {name: name for name in aliases if not name.startswith("layers.2.")})


def _resume(root: Path, cases: list[Case], layout: dict[str, int], precision: str, ranks: int) -> list[dict[str, Any]]:
    return [pipes.resume(_folder(root, case), layout, precision, MORE, tied=case[2], ranks=ranks) for case in cases]


def _assert_goes_on(made: Made, cases: list[Case], layout: dict[str, int], precision: str, tolerance: float, ranks: int = 1) -> None:
    answers = run_world(_resume, world_size(layout), made[0], cases, layout, precision, ranks, timeout=120)
    for place, case in enumerate(cases):
        mine, outcomes = answers[0][place], made[1][case]
        assert mine["losses"] == pytest.approx(outcomes[0].losses[SAVED:], abs=tolerance)
        assert mine["steps"] == SAVED + MORE
        wanted = _whole(outcomes, "end")
        for name, value in wanted.items():
            torch.testing.assert_close(
                mine["weights"][name].float(), value, rtol=tolerance, atol=tolerance, msg=lambda t, n=name: f"{n}: {t}"
            )


def test_ours_goes_on_from_a_pipeline_as_it_does_itself(made: Made) -> None:
    _assert_goes_on(made, QUICK, {"pp": 2}, "32-true", 1e-5)


@pytest.mark.parametrize("layout", [{"dp": 1}, {"dp": 2, "zero": 3}, {"tp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_ours_goes_on_from_a_pipeline_under_another_layout(made: Made, layout: dict[str, int]) -> None:
    _assert_goes_on(made, QUICK, layout, "32-true", 1e-5)


@pytest.mark.parametrize("layout", [{"dp": 2, "pp": 2, "zero": 1}, {"dp": 1}], ids=str)
def test_ours_goes_on_from_a_pipeline_over_several_data_ranks(wide: Made, layout: dict[str, int]) -> None:
    _assert_goes_on(wide, [(1, "fp32", True)], layout, "32-true", 1e-5, ranks=2)


@pytest.mark.parametrize(("dtype", "precision"), [("bf16", "bf16-true"), ("fp16", "16-true")])
def test_ours_goes_on_from_a_pipeline_in_half_precision(half: Made, dtype: str, precision: str) -> None:
    _assert_goes_on(half, [(1, dtype, True)], {"pp": 2}, precision, 3e-2)


def test_a_pipeline_is_converted_by_the_names_of_layers_or_of_the_module(made: Made, tmp_path: Path) -> None:
    case = QUICK[0]
    folder, wanted = _folder(made[0], case), _source(made, case)
    report = convert(folder, tmp_path / "placed", "native", layers=pipes.LAYERS)
    assert report.source == "DeepSpeed, pipeline, ZeRO 1"
    placed = open_checkpoint(tmp_path / "placed")
    assert placed.entries.keys() == wanted.entries.keys()
    assert all(torch.equal(placed.read(name), wanted.read(name)) for name in wanted.entries)
    convert(folder, tmp_path / "layered", "native")
    convert(tmp_path / "layered", tmp_path / "later", "deepspeed", layers=dict(zip("01345", PLACES.values(), strict=False)))
    later = open_checkpoint(tmp_path / "later")
    assert all(torch.equal(later.read(name), wanted.read(name)) for name in wanted.entries)


def _load_layered(folder: Path) -> dict[str, Tensor]:
    return pipes.resume(folder, {"dp": 1}, "32-true", 0)["weights"]


def test_a_checkpoint_by_layers_is_still_found_by_order_once_it_is_ours(made: Made, tmp_path: Path) -> None:
    convert(_folder(made[0], QUICK[0]), tmp_path / "layered", "native")
    weights, wanted = run_world(_load_layered, 1, tmp_path / "layered")[0], _whole(made[1][QUICK[0]], "weights")
    assert_equal({name: weights[name] for name in wanted}, wanted)


def test_a_file_of_a_stage_or_layer_that_is_missing_is_named(made: Made, tmp_path: Path) -> None:
    shutil.copytree(_folder(made[0], QUICK[0]) / f"step{SAVED}", tmp_path / "tag")
    (tmp_path / "tag/layer_03-model_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"trains the layers 3 of a pipeline, but has no file of them"):
        open_deepspeed(tmp_path / "tag")
    (tmp_path / "tag/mp_rank_01_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"holds no file like mp_rank_01_model_states\.pt"):
        open_deepspeed(tmp_path / "tag")
