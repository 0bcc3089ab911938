"""Pipelines under the Trainer: zero-bubble schedules beside ZeRO and other axes, a Sequential classifier; all as one process in float64."""

from __future__ import annotations

import math
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_par import DynamicLossScale, HybridParallelStrategy, ParallelPrecision
from lightning_par.layout import ModelFacts
from lightning_par.strategy.facts import model_facts
from tests.checkpoint import fits
from tests.harness import run_world
from tests.harness.models import TinyGPT, mlp, token_loader
from tests.harness.parity import Run, assert_same, fit, fit_world

ZB_H1 = {"pp": 2, "schedule": "zb_h1", "microbatches": 5}
ZBV = {"pp": 2, "schedule": "zbv", "chunks": 2, "microbatches": 5}
LOADER = partial(token_loader, 12)


@cache
def _reference(tie: bool, **options: Any) -> Run:
    return fit(partial(TinyGPT, tie=tie), LOADER, validation=LOADER, **options)


def _compare(layout: dict[str, Any], tie: bool, **options: Any) -> None:
    world = math.prod(layout.get(axis, 1) for axis in ("dp", "tp", "pp", "cp"))
    runs = fit_world(partial(TinyGPT, tie=tie), LOADER, layout, world, validation=LOADER, **options)
    assert_same(runs, _reference(tie, **options))


class Perceptron(L.LightningModule):
    """Two Sequentials of like size, so that the module must say which is spread; batches are tuples."""

    pipeline_layers = "body"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.body = mlp(5, 9, 9), mlp(9, 9, 9, 9, 9, 9)
        self.head = nn.Linear(9, 3)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, target = batch
        loss = nn.functional.cross_entropy(self.head(self.body(self.stem(x))), target)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, target = batch
        self.log("val_loss", nn.functional.cross_entropy(self.head(self.body(self.stem(x))), target))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def samples(num_replicas: int = 1, rank: int = 0) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(24, 5, generator=generator), torch.randint(0, 3, (24,), generator=generator))
    sampler = DistributedSampler(data, num_replicas=num_replicas, rank=rank, shuffle=False)
    return DataLoader(data, batch_size=12 // num_replicas, sampler=sampler)


@pytest.mark.parametrize("layout", [{"pp": 3, "microbatches": 5}, ZBV])
def test_a_sequential_classifier_that_names_its_layers(layout: dict[str, Any]) -> None:
    runs = fit_world(Perceptron, samples, layout, layout["pp"], validation=samples, gradient_clip_val=None)
    assert_same(runs, fit(Perceptron, samples, validation=samples, gradient_clip_val=None))


def test_what_a_config_counts_is_no_rule_for_a_named_list() -> None:
    module = Perceptron()
    module.stem.config = {"num_hidden_layers": 1, "num_attention_heads": 2}
    assert model_facts(module) == ModelFacts(heads=2)


def _slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


QUICK = [(ZB_H1, 0, True), (ZBV, 1, True), (ZBV, 2, False), (ZB_H1, 3, True)]
REST = [case for case in product((ZB_H1, ZBV), range(4), (False, True)) if case not in QUICK]


@pytest.mark.parametrize(("layout", "zero", "tie"), [*QUICK, *(_slow(*case) for case in REST)])
def test_P18_weight_gradients_that_come_late_are_reduced_at_every_stage_of_zero(layout: dict[str, Any], zero: int, tie: bool) -> None:
    _compare(layout | {"dp": 2, "zero": zero}, tie)


@pytest.mark.parametrize("layout", [ZB_H1 | {"tp": 2}, _slow(ZBV | {"cp": 2})])
def test_the_other_axes_beside_a_zero_bubble_schedule(layout: dict[str, Any]) -> None:
    _compare(layout, False)


@pytest.mark.parametrize("layout", [{"pp": 2, "balance": "flops"}, {"pp": 2, "chunks": 2, "schedule": "zbv", "balance": [1, 3, 1, 2]}])
def test_P1_layers_spread_in_another_way(layout: dict[str, Any]) -> None:
    _compare(layout, True)


@pytest.mark.parametrize("layout", [ZB_H1, _slow(ZBV | {"pp": 3})])
def test_L12_accumulated_batches_add_up(layout: dict[str, Any]) -> None:
    _compare(layout, False, accumulate_grad_batches=2)


class Overflowing(TinyGPT):
    """One gradient of one pipeline stage is infinite, in the second step."""

    def __init__(self, stage: int) -> None:
        super().__init__(layers=4)
        self.stage, self.losses = stage, []

    def on_after_backward(self) -> None:
        if len(self.losses) == 1 and self.trainer.strategy.mesh.pp.index == self.stage:
            next(p for p in self.parameters() if p.grad is not None).grad.view(-1)[0] = torch.inf

    def on_train_batch_end(self, outputs: dict[str, Tensor], *_: Any) -> None:
        self.losses.append(outputs["loss"].item())


def _overflow(layout: dict[str, Any], stage: int) -> tuple[Any, list[float]]:
    precision = ParallelPrecision("16-mixed", loss_scale=DynamicLossScale(initial=1024.0))
    strategy = HybridParallelStrategy(**layout)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(devices=2, accelerator="cpu", strategy=strategy, plugins=[precision], max_steps=3, **quiet)
    module = Overflowing(stage)
    trainer.fit(module, LOADER(rows=12))  # the same batch again and again
    return trainer.precision_plugin.scale, module.losses


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("layout", [{"pp": 2}, ZB_H1])
def test_P17_an_overflow_on_one_stage_skips_the_step_on_all(layout: dict[str, Any], stage: int) -> None:
    (scale, losses), other = run_world(_overflow, 2, layout, stage)
    assert other == (scale, losses)
    assert (scale.scale, scale.skipped) == (512.0, 1)
    assert losses[2] == losses[1] < losses[0], "the first step was taken, the second was not"


@pytest.mark.slow
def test_P21_a_run_with_late_weight_gradients_resumes_bit_for_bit(tmp_path: Path) -> None:
    layout, folder = {"pp": 2, "schedule": "zb_h1", "microbatches": 3, "balance": [2, 1]}, tmp_path / "last"
    straight = fits.fit_world(layout, 6)
    fits.fit_world(layout, 3, save=folder)
    for resumed, whole in zip(fits.fit_world(layout, 6, resume=folder), straight, strict=True):
        assert resumed.losses == whole.losses[3:]
        assert resumed.draw == whole.draw, "random numbers go on: the layout is known to be the same"
        if whole.weights:
            fits.assert_equal(resumed.weights, whole.weights)
