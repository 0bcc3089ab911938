"""Accumulation where an epoch does not divide: it counts and divides as Lightning does, and says so."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_par import HybridParallelStrategy
from lightning_par.checkpoint import read_meta
from tests.harness import run_world
from tests.harness.models import TinyGPT, token_loader
from tests.harness.parity import Run, assert_same, fit, fit_world

EPOCHS = 4
MODULE = partial(TinyGPT, layers=2, optimizer="sgd", lr=0.1)
THREE_BATCHES = partial(token_loader, 12, rows=36)


def _three_batches_divided_by_8() -> Run:
    """A plain loop: one step an epoch, over the sum of three gradients divided by eight. (Hooks get the divided loss.)"""
    run, module = Run(), MODULE().double()
    optimizer = module.configure_optimizers()
    for _ in range(EPOCHS):
        for batch in THREE_BATCHES():
            loss = module.model(**batch).loss
            (loss / 8).backward()
            run.losses.append(loss.item() / 8)
            run.logged.append(loss.item())
        run.norms.append(torch.nn.utils.get_total_norm([p.grad for p in module.parameters()]).item())
        optimizer.step()
        optimizer.zero_grad()
    run.weights = {name: value.detach() for name, value in module.state_dict().items()}
    return run


@pytest.mark.parametrize("layout", [{"dp": 2}, {"dp": 2, "zero": 2}, {"pp": 2}], ids=["dp2", "zero2", "pp2"])
def test_L4_accumulation_longer_than_the_epoch_steps_once_an_epoch_and_divides_as_lightning(layout: dict[str, Any]) -> None:
    options: dict[str, Any] = {"steps": -1, "max_epochs": EPOCHS, "accumulate_grad_batches": 8, "gradient_clip_val": None}
    wanted = _three_batches_divided_by_8()
    assert len(wanted.norms) == EPOCHS
    assert_same([fit(MODULE, THREE_BATCHES, **options)], wanted)
    assert_same(fit_world(MODULE, THREE_BATCHES, layout, 2, **options), wanted)


def _warnings(accumulate: int) -> list[str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(MODULE, THREE_BATCHES, HybridParallelStrategy(dp=2), devices=2, steps=1, accumulate_grad_batches=accumulate)
    return [str(warning.message) for warning in told if "accumulate_grad_batches" in str(warning.message)]


def test_L4_accumulation_longer_than_the_epoch_warns_with_both_numbers() -> None:
    told, nothing = run_world(_warnings, 2, 8)
    assert len(told) == 1
    assert told[0].startswith("accumulate_grad_batches=8, but an epoch has 3 batches")
    assert nothing == []
    assert run_world(_warnings, 2, 3) == [[], []]


class NotesSaves(TinyGPT):
    def __init__(self) -> None:
        super().__init__(layers=1)
        self.saved: list[int] = []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.saved.append(checkpoint["global_step"])


def _fit_with_leftovers(folder: Path) -> tuple[int, list[int]]:
    strategy = HybridParallelStrategy(dp=2, zero=1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=3, accumulate_grad_batches=3, callbacks=[keep], **quiet)
    module = NotesSaves()
    trainer.fit(module, token_loader(4, rows=28, **strategy.distributed_sampler_kwargs))
    assert trainer.num_training_batches == 7
    return trainer.global_step, module.saved


def test_L5_leftover_batches_make_a_step_and_checkpoints_are_named_in_order(tmp_path: Path) -> None:
    for steps, saved in run_world(_fit_with_leftovers, 2, tmp_path):
        assert steps == 9
        assert saved == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    named = {folder.name: read_meta(folder) for folder in tmp_path.iterdir()}
    assert {name: meta["global_step"] for name, meta in named.items()} == {f"step={step}.ckpt": step for step in range(1, 10)}
    assert [named[f"step={step}.ckpt"]["epoch"] for step in range(1, 10)] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
