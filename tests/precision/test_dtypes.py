"""A11: for each precision, the dtype of everything is as the table in ParallelPrecision says, under every layout."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_par import HybridParallelStrategy, ParallelPrecision
from lightning_par.checkpoint import read_index
from tests.harness import run_world
from tests.harness.models import TinyGPT, token_loader

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
TABLE = {  # weights, compute, gradients, optimizer state
    "32-true": (F32, F32, F32, F32),
    "64-true": (F64, F64, F64, F64),
    "bf16-mixed": (F32, BF16, F32, F32),
}
LAYOUTS: dict[str, dict[str, int]] = {"dp2": {"dp": 2}, "dp2 zero1": {"dp": 2, "zero": 1}, "tp2": {"tp": 2}, "pp2": {"pp": 2}}


class Watch(TinyGPT):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        layer = next(module for name, module in self.named_modules() if name.endswith("q_proj"))
        handle = layer.register_forward_hook(lambda module, args, output: self.seen.add(output.dtype))
        try:
            return super().training_step(batch, batch_idx)
        finally:
            handle.remove()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        self.gradients = {p.grad.dtype for p in held if p.grad is not None}


def _fit(precision: str, layout: dict[str, int], folder: Any) -> dict[str, set[torch.dtype]]:
    trainer = L.Trainer(devices=2, strategy=HybridParallelStrategy(**layout), precision=precision, max_steps=1, **QUIET)
    assert type(trainer.strategy.precision_plugin) is ParallelPrecision
    assert trainer.precision == precision
    module = Watch(layers=2)
    module.seen = set()
    trainer.fit(module, token_loader(4))
    trainer.save_checkpoint(folder)
    state = trainer.optimizers[0].state.values()
    return {
        "weights": {p.dtype for p in module.parameters()},
        "compute": module.seen,
        "gradients": module.gradients,
        "optimizer": {value.dtype for entry in state for value in entry.values() if value.dim()},
        "checkpoint": {dtype for name, (_, dtype) in read_index(folder).items() if name.startswith("model.")},
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", TABLE)
def test_A11_dtypes_are_as_documented(precision: str, layout: str, tmp_path: Any) -> None:
    weights, compute, gradients, optimizer = TABLE[precision]
    for seen in run_world(_fit, 2, precision, LAYOUTS[layout], tmp_path / "last"):
        assert seen == {
            "weights": {weights}, "compute": {compute}, "gradients": {gradients}, "optimizer": {optimizer}, "checkpoint": {weights},
        }  # fmt: skip


@pytest.mark.parametrize("precision", ["8-true", "transformer-engine", "int8"])
def test_an_unsupported_precision_is_refused_with_the_choices(precision: str) -> None:
    with pytest.raises(ValueError, match=r"choose one of .*bf16-mixed"):
        ParallelPrecision(precision)


@pytest.mark.parametrize("precision", ["16-true", "bf16-true"])
def test_a_trainer_with_a_precision_that_we_do_not_have_says_so(precision: str) -> None:
    with pytest.raises(ValueError, match=rf"precision='{precision}' is not supported here: choose one of .*bf16-mixed"):
        L.Trainer(devices=1, strategy=HybridParallelStrategy(), precision=precision, **QUIET)


def test_the_plugin_may_be_given_itself() -> None:
    plugin = ParallelPrecision("bf16-mixed")
    trainer = L.Trainer(devices=1, strategy=HybridParallelStrategy(), plugins=[plugin], **QUIET)
    assert trainer.strategy.precision_plugin is plugin


def _losses(precision: str, layout: dict[str, int]) -> float:
    trainer = L.Trainer(devices=2, strategy=HybridParallelStrategy(**layout), precision=precision, max_steps=2, **QUIET)
    place = trainer.strategy.distributed_sampler_kwargs
    trainer.fit(TinyGPT(layers=2), token_loader(4, **place))
    return trainer.callback_metrics["train_loss"].item()


@pytest.mark.parametrize("layout", ["dp2 zero1", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dp2", "tp2", "pp2"))])
def test_G2_bf16_mixed_trains_close_to_float32(layout: str) -> None:
    (exact, _), (mixed, _) = (run_world(_losses, 2, precision, LAYOUTS[layout]) for precision in ("32-true", "bf16-mixed"))
    assert mixed != exact
    assert mixed == pytest.approx(exact, rel=0.01)
