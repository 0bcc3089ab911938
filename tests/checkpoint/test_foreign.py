"""``ckpt_path`` with the formats of others: Lightning's single file, DeepSpeed, universal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_par import DeepSpeedTarget, HybridParallelStrategy, convert
from lightning_par.checkpoint import CheckpointError, open_checkpoint
from tests.checkpoint.fits import LAYOUTS, QUIET, STEPS, Net, State, assert_equal, ending, fit, fit_world, world_size
from tests.harness import WorldError, run_world
from tests.harness.models import token_loader

TARGETS: dict[str, tuple[str, DeepSpeedTarget | None]] = {
    "single file": ("ckpt", None),
    "zero1 for 3": ("deepspeed", DeepSpeedTarget(1, 3)),
    "zero3 for 2": ("deepspeed", DeepSpeedTarget(3, 2, sub_group_size=400)),
    "universal": ("universal", None),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[State], Path]:
    """A run that was saved half way, and the same run straight on."""
    folder, layout = tmp_path_factory.mktemp("saved") / "last", LAYOUTS["dp2 zero1"]
    fit_world(layout, STEPS, save=folder)
    return fit_world(layout, 2 * STEPS), folder


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name.startswith(("zero1", "uni")) else ()) for name in TARGETS]
)
def test_K25_a_run_goes_on_from_any_format_as_if_nothing_had_happened(name: str, saved: tuple[list[State], Path], tmp_path: Path) -> None:
    straight, folder = saved
    convert(folder, tmp_path / "other", TARGETS[name][0], target=TARGETS[name][1])
    resumed = fit_world(LAYOUTS["dp2 zero1"], 2 * STEPS, resume=tmp_path / "other")
    for mine, theirs in zip(resumed, straight, strict=True):
        assert mine.losses == theirs.losses[STEPS:]
        assert mine.rates == theirs.rates[STEPS:]
        assert (mine.draw, mine.steps) == (theirs.draw, theirs.steps)
    assert_equal(resumed[0].weights, straight[0].weights)
    assert_equal(resumed[0].moments, straight[0].moments)


def _plain(steps: int, *, resume: Any = None, save: Any = None) -> State:
    """One process of plain Lightning."""
    module = Net(dropout=0.0)
    trainer = L.Trainer(devices=1, max_steps=steps, **QUIET)
    trainer.fit(module, token_loader(4, rows=12), ckpt_path=resume, weights_only=True)
    if save:
        trainer.save_checkpoint(save)
    return State({name: value.clone() for name, value in module.state_dict().items()}, losses=module.losses, rates=module.rates)


def _load(layout: dict[str, int], source: Path) -> State:
    strategy = HybridParallelStrategy(zero_options={"min_unit_mb": 0}, **layout)
    trainer = L.Trainer(devices=world_size(layout), strategy=strategy, max_steps=STEPS, **QUIET)
    module = Net()
    trainer.fit(module, token_loader(4, rows=12, **strategy.distributed_sampler_kwargs), ckpt_path=source)
    return ending(trainer, module)


@pytest.mark.parametrize("layout", [{"dp": 2, "zero": 3}, {"tp": 2}, {"pp": 2}], ids=str)
def test_K24_a_file_of_plain_lightning_loads_under_any_layout_moments_included(layout: dict[str, int], tmp_path: Path) -> None:
    saved = _plain(STEPS, save=tmp_path / "plain.ckpt")
    loaded = run_world(_load, 2, layout, tmp_path / "plain.ckpt")[0]
    assert loaded.steps == STEPS
    assert_equal(loaded.weights, saved.weights)
    decay = [name for name, value in saved.weights.items() if value.dim() >= 2]
    order = decay + [name for name, value in saved.weights.items() if value.dim() < 2]
    wanted = open_checkpoint(tmp_path / "plain.ckpt").named([order])
    for name, value in loaded.moments.items():
        torch.testing.assert_close(value, wanted.read(name), rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


def test_plain_lightning_goes_on_from_a_single_file_of_ours(tmp_path: Path) -> None:
    straight = _plain(2 * STEPS)
    fit_world({"dp": 1}, STEPS, save=tmp_path / "last", dropout=0.0)
    convert(tmp_path / "last", tmp_path / "last.ckpt", "ckpt")
    resumed = _plain(2 * STEPS, resume=tmp_path / "last.ckpt")
    assert resumed.losses == pytest.approx(straight.losses[STEPS:], abs=1e-6)
    assert resumed.rates == straight.rates[STEPS:]
    for name, value in straight.weights.items():
        torch.testing.assert_close(resumed.weights[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_plain_lightning_goes_on_from_a_folder_of_ours_and_validates_any(tmp_path: Path) -> None:
    straight = _plain(2 * STEPS)
    fit_world({"dp": 2, "zero": 2}, STEPS, save=tmp_path / "last", dropout=0.0)
    resumed = _plain(2 * STEPS, resume=tmp_path / "last")
    assert resumed.losses == pytest.approx(straight.losses[STEPS:], abs=1e-6)
    for name, value in straight.weights.items():
        torch.testing.assert_close(resumed.weights[name], value, rtol=1e-5, atol=1e-6)
    convert(tmp_path / "last", tmp_path / "universal", "universal")
    losses = [
        L.Trainer(devices=1, **QUIET).validate(Net(dropout=0.0), token_loader(4, rows=12), ckpt_path=path, verbose=False)[0]["val_loss"]
        for path in (tmp_path / "last", tmp_path / "universal")
    ]
    assert losses[0] == losses[1]
    convert(tmp_path / "last", tmp_path / "weights", optimizer=False)
    with pytest.raises(KeyError, match="contains only the model"):
        _plain(2 * STEPS, resume=tmp_path / "weights")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="empty is no checkpoint"):
        _plain(2 * STEPS, resume=tmp_path / "empty")


class NoOptimizer(Net):
    def configure_optimizers(self) -> None:
        raise AssertionError("prediction must not ask for an optimizer")

    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.model(batch["input_ids"]).logits


def _validate(paths: list[Path]) -> list[tuple[float, torch.Tensor]]:
    told = []
    for path in paths:
        trainer = L.Trainer(devices=1, strategy=HybridParallelStrategy(dp=1), **QUIET)
        module = NoOptimizer(dropout=0.0)
        loss = trainer.validate(module, token_loader(4, rows=12), ckpt_path=path, verbose=False)[0]["val_loss"]
        told.append((loss, trainer.predict(module, token_loader(4, rows=4), ckpt_path=path)[0]))
    return told


def test_K26_weights_of_any_format_load_without_an_optimizer(saved: tuple[list[State], Path], tmp_path: Path) -> None:
    paths = [saved[1]]
    for name, (format, target) in TARGETS.items():
        convert(saved[1], tmp_path / name, format, target=target)
        paths.append(tmp_path / name)
    (loss, logits), *others = run_world(_validate, 1, paths)[0]
    for path, (told, predicted) in zip(paths[1:], others, strict=True):
        assert told == loss, path
        assert torch.equal(predicted, logits), path


def _resume_with_one_optimizer_more(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="holds 0 optimizers, but configure_optimizers made 1"):
        fit({"dp": 1}, 2 * STEPS, resume=folder)


def test_weights_alone_do_not_pass_for_a_run(saved: tuple[list[State], Path], tmp_path: Path) -> None:
    convert(saved[1], tmp_path / "weights.ckpt", "ckpt", optimizer=False)
    run_world(_resume_with_one_optimizer_more, 1, tmp_path / "weights.ckpt")


def test_K7_a_moment_that_a_folder_lacks_is_named(saved: tuple[list[State], Path], tmp_path: Path) -> None:
    convert(saved[1], tmp_path / "universal", "universal")
    name = "model.layers.1.attention.q_proj.weight"
    (tmp_path / "universal/universal/zero" / name / "exp_avg_sq.pt").unlink()
    with pytest.raises(WorldError, match=rf"{name}.*exp_avg_sq"):
        fit_world({"dp": 1}, 2 * STEPS, resume=tmp_path / "universal")
