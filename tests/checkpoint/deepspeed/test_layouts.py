"""The real engine against every kind of layout of ours: five more steps on either side are those that the other would have made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_par import DeepSpeedTarget, HybridParallelStrategy, convert
from lightning_par.checkpoint import open_checkpoint
from lightning_par.checkpoint.conversion import Silent, compare
from tests.checkpoint.deepspeed import engine, pipes
from tests.checkpoint.deepspeed.engine import SAVED, Outcome, Task
from tests.checkpoint.deepspeed.ours import batches
from tests.checkpoint.deepspeed.test_engine import UNIVERSAL
from tests.checkpoint.fits import QUIET, SaveAt, world_size
from tests.harness import run_world

MORE = 5
PRECISIONS = {"fp32": "32-true", "bf16": "bf16-true", "fp16": "16-true"}
CASES = [(stage, dtype) for dtype in PRECISIONS for stage in (1, 2, 3)]
LAYOUTS: dict[str, dict[str, int]] = {
    "dp1": {"dp": 1},
    "dp2 zero1": {"dp": 2, "zero": 1},
    "dp4 zero3": {"dp": 4, "zero": 3},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "tp2 pp2": {"tp": 2, "pp": 2},
    "dp2 tp2 zero1": {"dp": 2, "tp": 2, "zero": 1},
}
CLOSE = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 2e-2}
"""How far apart losses and weights may be after five steps: what rounding of the dtype and the order of sums make of it."""
TASK = Task(pipes.Net, pipes.optimizer)
RANKS = 2  # of the engine

pytestmark = pytest.mark.slow


def _ours(layout: dict[str, int], precision: str, *, first: int = 0, load: Path | None = None, save: Path | None = None) -> dict[str, Any]:
    """Train this rank from step ``first`` to the end, over the batches of the engine's ranks."""
    strategy = HybridParallelStrategy(zero_options={"min_unit_mb": 0}, **layout)
    callbacks = [SaveAt(save, SAVED)] if save else []
    settings = QUIET | {"max_steps": SAVED + MORE, "precision": precision, "gradient_clip_val": 0.5}
    trainer = L.Trainer(devices=world_size(layout), strategy=strategy, callbacks=callbacks, **settings)
    module = pipes.Module() if load is None else pipes.shifted()
    loader = DataLoader(batches(first, SAVED + MORE - first, RANKS), batch_size=2 * RANKS // layout.get("dp", 1), shuffle=False)
    trainer.fit(module, loader, ckpt_path=load)
    return {"losses": module.losses, "weights": strategy.full_state_dict(), "scale": strategy.precision_plugin.loss_scale}


def _mean(outcomes: list[Outcome]) -> list[float]:
    return [sum(losses) / len(losses) for losses in zip(*(outcome.losses for outcome in outcomes), strict=True)]


def _assert_close(got: dict[str, Tensor], wanted: dict[str, Tensor], dtype: str) -> None:
    for name, value in wanted.items():
        close = {"rtol": CLOSE[dtype], "atol": CLOSE[dtype]}
        torch.testing.assert_close(got[name].float(), value.float(), **close, msg=lambda text, name=name: f"{name}: {text}")


def _same(one: Any, other: Any) -> bool:
    """Plain data with tensors in it."""
    if isinstance(one, Tensor):
        return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(_same, one, other))
    return one == other


# ---- (a) its checkpoints, gone on with by us


@dataclass
class Made:
    root: Path
    straight: dict[tuple[int, str], list[Outcome]]

    def folder(self, case: tuple[int, str]) -> Path:
        return self.root / f"{case[1]}-{case[0]}"


def _train(root: Path) -> list[Outcome]:
    return [engine.run(stage, dtype, SAVED + MORE, save=root / f"{dtype}-{stage}", task=TASK) for stage, dtype in CASES]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("theirs")
    by_rank = run_world(_train, RANKS, root, timeout=500)
    return Made(root, {case: [outcomes[place] for outcomes in by_rank] for place, case in enumerate(CASES)})


def _go_on(folders: list[tuple[Path, str]], layout: dict[str, int]) -> list[dict[str, Any]]:
    return [_ours(layout, PRECISIONS[dtype], first=SAVED, load=folder) for folder, dtype in folders]


@pytest.mark.parametrize("name", LAYOUTS)
def test_ours_goes_on_from_any_stage_and_precision_under_any_layout(theirs: Made, name: str) -> None:
    layout = LAYOUTS[name]
    answers = run_world(_go_on, world_size(layout), [(theirs.folder(case), case[1]) for case in CASES], layout, timeout=300)
    for place, (stage, dtype) in enumerate(CASES):
        mine, straight = answers[0][place], theirs.straight[stage, dtype]
        assert mine["losses"] == pytest.approx(_mean(straight)[SAVED:], abs=CLOSE[dtype]), (stage, dtype)
        _assert_close(mine["weights"], straight[0].end, dtype)
        if dtype == "fp16":
            assert mine["scale"] > 1.0


# ---- (b), (c), (d) our checkpoints, gone on with by it


WRITTEN = ["dp2 zero1", "tp2", "pp2", "tp2 pp2"]


def _begin(root: Path, layout: dict[str, int], dtypes: list[str]) -> list[dict[str, Any]]:
    return [_ours(layout, PRECISIONS[dtype], save=root / f"ours-{dtype}") for dtype in dtypes]


def _resume(root: Path, cases: list[tuple[int, str]]) -> tuple[list[Outcome], Outcome, dict[int, dict[str, Tensor]]]:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    outcomes = [engine.run(stage, dtype, MORE, first=SAVED, load=root / f"{dtype}-{stage}", task=TASK) for stage, dtype in cases]
    universal = engine.run(2, "fp32", MORE, first=SAVED, load=root / "universal", task=TASK, **UNIVERSAL)
    whole: dict[int, dict[str, Tensor]] = {}
    if torch.distributed.get_rank() == 0:
        for stage, dtype in (case for case in cases if case[1] == "fp32"):
            found = get_fp32_state_dict_from_zero_checkpoint(str(root / f"{dtype}-{stage}"))
            whole[stage] = {name: value.clone() for name, value in found.items()}
    return outcomes, universal, whole


@pytest.mark.parametrize("name", WRITTEN)
def test_the_engine_goes_on_from_what_any_layout_of_ours_has_saved(name: str, tmp_path: Path) -> None:
    layout, dtypes = LAYOUTS[name], list(PRECISIONS) if name == "tp2 pp2" else ["fp32"]
    straight = dict(zip(dtypes, run_world(_begin, world_size(layout), tmp_path, layout, dtypes, timeout=200)[0], strict=True))
    cases = [(stage, dtype) for dtype in dtypes for stage in (1, 2, 3)]
    for stage, dtype in cases:
        native, out = tmp_path / f"ours-{dtype}", tmp_path / f"{dtype}-{stage}"
        convert(native, out, "deepspeed", target=DeepSpeedTarget(stage, RANKS, dtype, sub_group_size=60))
    convert(tmp_path / "ours-fp32", tmp_path / "universal", "universal")
    source = open_checkpoint(tmp_path / "ours-fp32")
    for between in ("fp32-1", "fp32-2", "fp32-3", "universal"):
        convert(tmp_path / between, tmp_path / f"{between} back", "native")
        back = open_checkpoint(tmp_path / f"{between} back")
        assert compare(source, back, Silent()) == []
        assert _same(back.meta, source.meta), between
    by_rank = run_world(_resume, RANKS, tmp_path, cases, timeout=400)
    for place, (_, dtype) in enumerate(cases):
        outcomes, mine = [rank[0][place] for rank in by_rank], straight[dtype]
        assert _mean(outcomes) == pytest.approx(mine["losses"][SAVED:], abs=CLOSE[dtype])
        _assert_close(outcomes[0].end, {name: mine["weights"][name] for name in outcomes[0].end}, dtype)
    assert _mean([rank[1] for rank in by_rank]) == pytest.approx(straight["fp32"]["losses"][SAVED:], abs=CLOSE["fp32"])
    aliases = source.meta["lightning_par_module"]["aliases"]
    for stage, whole in by_rank[0][2].items():
        assert whole.keys() == aliases.keys(), stage
        assert all(torch.equal(whole[key], source.read(f"model.{name}")) for key, name in aliases.items()), stage
