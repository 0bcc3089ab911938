"""A run that was saved and resumed is the run that was not, bit for bit; another layout goes on from the same weights and moments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_par import HybridParallelStrategy
from lightning_par.checkpoint import read_index, read_meta
from tests.checkpoint.fits import LAYOUTS, QUIET, STEPS, Net, State, assert_equal, ending, fit_world, world_size
from tests.harness import run_world
from tests.harness.models import token_loader

by_layout = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in ("dp2", "tp2 pp2") else ()) for name in LAYOUTS]
)


def _assert_same_end(resumed: list[State], straight: list[State]) -> None:
    for mine, theirs in zip(resumed, straight, strict=True):
        half = len(theirs.losses) // 2
        assert mine.losses == theirs.losses[half:]
        assert mine.rates == theirs.rates[half:]
        assert mine.draw == theirs.draw
        assert mine.steps == theirs.steps
    assert_equal(resumed[0].weights, straight[0].weights)
    assert_equal(resumed[0].moments, straight[0].moments)


@by_layout
def test_P21_K8_K11_straight_equals_saved_and_resumed_bit_for_bit(name: str, tmp_path: Path) -> None:
    layout, folder = LAYOUTS[name], tmp_path / "last"
    straight = fit_world(layout, 2 * STEPS)
    fit_world(layout, STEPS, save=folder)
    _assert_same_end(fit_world(layout, 2 * STEPS, resume=folder), straight)


def test_resume_under_accumulation(tmp_path: Path) -> None:
    layout, folder, options = LAYOUTS["dp2 zero1"], tmp_path / "last", {"accumulate_grad_batches": 2, "rows": 24}
    straight = fit_world(layout, 2 * STEPS, **options)
    fit_world(layout, STEPS, save=folder, **options)
    _assert_same_end(fit_world(layout, 2 * STEPS, resume=folder, **options), straight)


def _load_and_save(layout: dict[str, int], source: Path, target: Path) -> State:
    strategy = HybridParallelStrategy(zero_options={"min_unit_mb": 0}, **layout)
    trainer = L.Trainer(devices=world_size(layout), strategy=strategy, max_steps=STEPS, **QUIET)
    module = Net()
    trainer.fit(module, token_loader(4, rows=12), ckpt_path=source)
    trainer.save_checkpoint(target)
    return ending(trainer, module)


@pytest.mark.slow
def test_K1_another_layout_goes_on_from_the_same_weights_and_moments(tmp_path: Path) -> None:
    """Saved at dp2 zero1, loaded and saved again at tp2, then pp2, then on one rank: nothing changes on the way."""
    saved = fit_world({"dp": 2, "zero": 1}, STEPS, save=tmp_path / "0")[0]
    for place, layout in enumerate([{"tp": 2}, {"pp": 2}, {"dp": 1}, {"dp": 3, "zero": 1}, {"cp": 2, "zero": 1}, {"dp": 2, "zero": 1}]):
        loaded = run_world(_load_and_save, world_size(layout), layout, tmp_path / f"{place}", tmp_path / f"{place + 1}")[0]
        assert loaded.steps == STEPS
        assert_equal(loaded.weights, saved.weights)
        assert_equal(loaded.moments, saved.moments)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"tp": 2}, id="tp2"),
        pytest.param({"pp": 2}, id="pp2", marks=pytest.mark.slow),
        pytest.param({"dp": 1}, id="one rank", marks=pytest.mark.slow),
    ],
)
def test_K1_steps_under_another_layout_are_those_of_the_first(layout: dict[str, int], tmp_path: Path) -> None:
    options: dict[str, Any] = {"dropout": 0.0, "precision": "64-true"}
    straight = fit_world({"dp": 2, "zero": 1}, 2 * STEPS, **options)[0]
    fit_world({"dp": 2, "zero": 1}, STEPS, save=tmp_path / "last", **options)
    resumed = fit_world(layout, 2 * STEPS, resume=tmp_path / "last", **options)[0]
    assert resumed.rates == straight.rates[STEPS:]
    assert resumed.losses == pytest.approx(straight.losses[STEPS:], abs=1e-10)
    for name, value in straight.weights.items():
        torch.testing.assert_close(resumed.weights[name], value, rtol=1e-10, atol=1e-10)


def test_K20_everything_but_tensors_loads_with_weights_only(tmp_path: Path) -> None:
    fit_world({"tp": 2}, STEPS, save=tmp_path / "last")
    meta = torch.load(tmp_path / "last" / "meta.pt", weights_only=True)
    assert meta["global_step"] == STEPS
    assert meta["layout"]["tp"] == 2
    assert meta["lr_schedulers"][0]["last_epoch"] == STEPS
    assert read_meta(tmp_path / "last").keys() == meta.keys()


def test_the_folder_knows_nothing_of_the_layout(tmp_path: Path) -> None:
    indices = []
    for name in ("dp2 zero1", "tp2", "pp2"):
        fit_world(LAYOUTS[name], 1, save=tmp_path / name)
        indices.append({key: told for key, told in read_index(tmp_path / name).items() if not key.startswith("rng.")})
    assert indices[0] == indices[1] == indices[2]
