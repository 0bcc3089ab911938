"""Runs for tests of checkpoints: dropout on, a schedule, parameter groups, and everything that must be restored brought back whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_par import HybridParallelStrategy
from lightning_par.checkpoint import collect
from lightning_par.recipes.gpt import GPT, GPTConfig
from lightning_par.strategy import state
from tests.harness import models, run_world
from tests.harness.models import TinyGPT, token_loader

STEPS = 3  # an epoch
LAYOUTS: dict[str, dict[str, int]] = {
    "dp2": {"dp": 2},
    "dp2 zero1": {"dp": 2, "zero": 1},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "cp2": {"cp": 2},
    "tp2 pp2": {"tp": 2, "pp": 2},
}
QUIET = models.QUIET | {"gradient_clip_val": 0.5}


class Net(TinyGPT):
    def __init__(self, *, layers: int = 3, dropout: float = 0.1, tie: bool = False, **options: Any) -> None:
        super().__init__(layers=layers, **options)
        torch.manual_seed(1)
        config = {"vocab_size": 37, "hidden": 24, "heads": 4, "kv_heads": 2, "ffn": 29}
        self.model = GPT(GPTConfig(**config, layers=layers, dropout=dropout, tie_embeddings=tie))
        self.rates: list[float] = []
        self.losses: list[float] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())
        self.rates.append(self.optimizers().param_groups[1]["lr"])

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class SaveAt(L.Callback):
    """Saves to ``folder`` after optimizer step ``step``."""

    def __init__(self, folder: Any, step: int) -> None:
        self.folder, self.step, self.done = folder, step, False

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step and not self.done:
            self.done = True
            trainer.save_checkpoint(self.folder)


@dataclass
class State:
    """Everything a run has when it ends; tensors whole, on rank 0."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[str, Tensor] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    steps: int = 0
    draw: float = 0.0  # this rank's next random number


def world_size(layout: dict[str, int]) -> int:
    return layout.get("dp", 1) * layout.get("tp", 1) * layout.get("pp", 1) * layout.get("cp", 1)


def fit(
    layout: dict[str, int], steps: int, *, resume: Any = None, save: Any = None, dropout: float = 0.1, rows: int = 12, **options: Any
) -> State:
    """Train this rank to ``steps`` optimizer steps, from the checkpoint ``resume`` if given, and save to ``save`` after the last one."""
    strategy = HybridParallelStrategy(zero_options={"min_unit_mb": 0}, **layout)
    callbacks = [SaveAt(save, steps)] if save else []
    trainer = L.Trainer(devices=world_size(layout), strategy=strategy, max_steps=steps, callbacks=callbacks, **(QUIET | options))
    module = Net(dropout=0.0 if "cp" in layout else dropout)  # attention has no dropout under cp yet
    loader = token_loader(4, rows=rows, **strategy.distributed_sampler_kwargs)
    trainer.fit(module, loader, ckpt_path=resume)
    return ending(trainer, module)


def moments(trainer: L.Trainer) -> dict[str, Tensor]:
    """The tensors of the optimizer's state, whole, on rank 0. All ranks call."""
    strategy = trainer.strategy
    shards = state.optimizer_shards(trainer.optimizers[0], 0, strategy.data_parallel, strategy.mesh)
    return collect(shards, strategy.mesh.world, strategy.root_device) or {}


def ending(trainer: L.Trainer, module: Net) -> State:
    (optimizer,), (schedule,) = trainer.optimizers, (config.scheduler for config in trainer.lr_scheduler_configs)
    assert schedule.optimizer.param_groups[0] is optimizer.param_groups[0], "the schedule moves the live rates"
    assert schedule.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
    return State(
        weights=trainer.strategy.full_state_dict() or {},
        moments=moments(trainer),
        rates=module.rates,
        losses=module.losses,
        steps=trainer.global_step,
        draw=torch.rand(()).item(),
    )


def fit_world(layout: dict[str, int], steps: int, **options: Any) -> list[State]:
    return run_world(partial(fit, **options), world_size(layout), layout, steps)


def assert_equal(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """To the bit."""
    assert got.keys() == wanted.keys()
    assert got
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")
