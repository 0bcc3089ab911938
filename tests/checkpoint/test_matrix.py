"""Saved under any layout and resumed under any other, in the middle of a shuffled epoch: the next steps are those of one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_par import DynamicLossScale, HybridParallelStrategy, ParallelPrecision
from lightning_par.recipes.gpt import GPT, GPTConfig
from tests.checkpoint.fits import SaveAt, moments
from tests.harness import run_world
from tests.harness.models import QUIET, TinyGPT, Tokens

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2},
    "dp3 zero1": {"dp": 3, "zero": 1},
    "dp2 zero2": {"dp": 2, "zero": 2},
    "dp2 zero3": {"dp": 2, "zero": 3},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "pp2 interleaved": {"pp": 2, "schedule": "interleaved_1f1b", "chunks": 2},
    "cp2": {"cp": 2},
    "dp2 tp2 zero1": {"dp": 2, "tp": 2, "zero": 1},
    "tp2 pp2": {"tp": 2, "pp": 2},
}
SCALED = ("dp3 zero1", "dp2 zero3", "tp2", "pp2", "cp2")
"""Of the smaller matrix, in half precision with a loss scale."""
TOLERANCE = 1e-9
DONE, STEPS, BATCH, ROWS = 2, 4, 6, 27
"""Steps before and after the save, rows of a batch over all replicas, and of an epoch: three of them are left over."""


class Uneven(TinyGPT):
    """Of five layers, 37 words and 29 inner features; at every second step the rate is another."""

    def __init__(self) -> None:
        super().__init__(layers=5)
        torch.manual_seed(1)
        self.model = GPT(GPTConfig(vocab_size=37, hidden=24, layers=5, heads=4, kv_heads=2, ffn=29))
        self.told: list[tuple[Any, ...]] = []
        self.losses: list[float] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())
        scale = getattr(self.trainer.precision_plugin, "scale", None)
        self.told.append((self.trainer.global_step, batch_idx, self.optimizers().param_groups[0]["lr"], scale))

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@dataclass
class End:
    """What a run has when it ends: by step the loss, and number, batch, rate and loss scale after it; tensors whole, on rank 0."""

    losses: list[float]
    told: list[tuple[Any, ...]]
    schedule: dict[str, Any]
    weights: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[str, Tensor] = field(default_factory=dict)


def _loader(replicas: int) -> DataLoader:
    data = Tokens(ROWS, 13, 37, ignore=False)
    return DataLoader(data, batch_size=BATCH // replicas, shuffle=True, generator=torch.Generator().manual_seed(5))


def _fit(strategy: Any, devices: int, steps: int, scaled: bool, *, save: Path | None = None, resume: Path | None = None) -> End:
    rule = DynamicLossScale(initial=2.0**24, backoff_factor=2.0**-12, growth_interval=2)  # far from where rounding would decide
    precision = {"plugins": [ParallelPrecision("16-mixed", loss_scale=rule)]} if scaled else {"precision": "64-true"}
    callbacks = [SaveAt(save, steps)] if save else []
    trainer = L.Trainer(
        devices=devices, strategy=strategy, max_steps=steps, gradient_clip_val=0.5, callbacks=callbacks, **QUIET, **precision
    )
    module = Uneven()
    replicas = strategy.distributed_sampler_kwargs["num_replicas"] if isinstance(strategy, HybridParallelStrategy) else 1
    trainer.fit(module, _loader(replicas), ckpt_path=resume)
    end = End(module.losses, module.told, dict(trainer.lr_scheduler_configs[0].scheduler.state_dict()))
    if isinstance(strategy, HybridParallelStrategy):
        end.weights, end.moments = strategy.full_state_dict() or {}, moments(trainer)
    else:
        state = trainer.optimizers[0].state
        end.weights = dict(module.state_dict())
        end.moments = {f"optimizer.0.{name}.{key}": v for name, p in module.named_parameters() for key, v in state[p].items()}
    return end


@cache
def _straight(scaled: bool) -> End:
    """One process, without a save: of plain Lightning where there is no scale."""
    return run_world(_fit_alone, 1)[0] if scaled else _fit("auto", 1, STEPS, False)


def _fit_alone() -> End:
    return _fit(HybridParallelStrategy(), 1, STEPS, True)


def _save(layout: dict[str, Any], scaled: bool, folder: Path) -> None:
    _fit(HybridParallelStrategy(zero_options={"min_unit_mb": 0}, **layout), _size(layout), DONE, scaled, save=folder)


def _resume_each(layout: dict[str, Any], scaled: bool, folders: list[Path]) -> list[End]:
    strategies = (HybridParallelStrategy(zero_options={"min_unit_mb": 0}, **layout) for _ in folders)
    return [_fit(strategy, _size(layout), STEPS, scaled, resume=folder) for strategy, folder in zip(strategies, folders, strict=True)]


def _size(layout: dict[str, Any]) -> int:
    return math.prod(layout.get(axis, 1) for axis in ("dp", "tp", "pp", "cp"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Path]:
    """The folder saved under a layout, once it is asked for."""
    folder = tmp_path_factory.mktemp("saved")

    @cache
    def path(name: str, scaled: bool = False) -> Path:
        target = folder / f"{name}{' scaled' * scaled}"
        run_world(_save, _size(LAYOUTS[name]), LAYOUTS[name], scaled, target, timeout=120)
        return target

    return path


def _assert_same_run(end: End, source: str, rank: int, straight: End, tolerance: float) -> None:
    where = f"saved under {source}, rank {rank}"
    assert end.losses == pytest.approx(straight.losses[DONE:], abs=tolerance), where
    assert [told[:2] for told in end.told] == [told[:2] for told in straight.told[DONE:]], where
    assert [told[2] for told in end.told] == pytest.approx([told[2] for told in straight.told[DONE:]], rel=1e-12), where
    assert [told[3] for told in end.told] == [told[3] for told in straight.told[DONE:]], where
    assert end.schedule == straight.schedule, where


def _assert_same(end: End, source: str, rank: int, straight: End) -> None:
    _assert_same_run(end, source, rank, straight, TOLERANCE)
    for mine, theirs in ((end.weights, straight.weights), (end.moments, straight.moments)) if rank == 0 else ():
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            say = lambda text, name=name: f"saved under {source}, {name}: {text}"  # noqa: E731
            torch.testing.assert_close(mine[name], value, rtol=TOLERANCE, atol=TOLERANCE, msg=say)


@pytest.mark.parametrize(("source", "target"), [("dp2 zero3", "tp2"), ("pp2 interleaved", "dp3 zero1")])
def test_K1_P21_a_run_goes_on_under_another_layout_as_in_one_process(source: str, target: str, saved: Callable[..., Path]) -> None:
    layout = LAYOUTS[target]
    for rank, (end,) in enumerate(run_world(_resume_each, _size(layout), layout, False, [saved(source)])):
        _assert_same(end, source, rank, _straight(False))


@pytest.mark.slow
@pytest.mark.parametrize("target", LAYOUTS)
def test_K1_K5_K10_P21_every_layout_goes_on_from_every_other_as_in_one_process(target: str, saved: Callable[..., Path]) -> None:
    """Weights, moments, schedule, rates, losses, counts of steps and batches."""
    layout, folders = LAYOUTS[target], [saved(source) for source in LAYOUTS]
    for rank, ends in enumerate(run_world(_resume_each, _size(layout), layout, False, folders, timeout=300)):
        for source, end in zip(LAYOUTS, ends, strict=True):
            _assert_same(end, source, rank, _straight(False))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("target", SCALED)
def test_A3_K1_a_loss_scale_goes_on_under_every_layout(target: str, saved: Callable[..., Path]) -> None:
    """It counts good steps from before the save; weights differ by the rounding of half precision."""
    scales = [told[3].scale for told in _straight(True).told]
    assert scales == [2.0**12, 2.0**12, 2.0**13, 2.0**13], "an overflow before the save, growth after it"
    layout, folders = LAYOUTS[target], [saved(source, True) for source in SCALED]
    for rank, ends in enumerate(run_world(_resume_each, _size(layout), layout, True, folders, timeout=300)):
        for source, end in zip(SCALED, ends, strict=True):
            _assert_same_run(end, source, rank, _straight(True), 2e-2)
            for mine, theirs in ((end.weights, _straight(True).weights), (end.moments, _straight(True).moments)) if rank == 0 else ():
                assert mine.keys() == theirs.keys()
                for name, value in theirs.items():  # an element whose gradient is next to nothing may move either way
                    assert (mine[name] - value).norm() <= 0.2 * value.norm(), f"saved under {source}, {name}"
