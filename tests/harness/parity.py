"""The main assertion of this project: a run under a layout equals the run of one process with plain Lightning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_par import HybridParallelStrategy
from tests.harness.world import run_world


@dataclass
class Run:
    """What is compared: by step, the loss, the logged loss and the norm before clipping; then all weights, whole."""

    losses: list[float] = field(default_factory=list)
    logged: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    validation: float | None = None
    weights: dict[str, Tensor] = field(default_factory=dict)


class _Recorder(L.Callback):
    def __init__(self, run: Run) -> None:
        self.run = run

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        strategy = trainer.strategy
        if isinstance(strategy, HybridParallelStrategy):
            norm = strategy.grad_norm(optimizer)
        else:
            grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(grads)
        self.run.norms.append(norm.item())

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.run.losses.append(outputs["loss"].item())
        self.run.logged.append(trainer.callback_metrics["train_loss"].item())


def fit(
    module: Callable[[], L.LightningModule], loader: Callable[..., Any], strategy: Any = "auto", *, devices: int = 1, **options: Any
) -> Run:
    """Train in this process; the Run of this rank (weights on rank 0 only). ``loader`` takes num_replicas and rank."""
    run, steps, validate = Run(), options.pop("steps", 3), options.pop("validation", None)
    settings: dict[str, Any] = {
        "precision": "64-true",
        "max_steps": steps,
        "gradient_clip_val": 0.5,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    trainer = L.Trainer(devices=devices, strategy=strategy, callbacks=[_Recorder(run)], **(settings | options))
    built = module()
    place = trainer.strategy.distributed_sampler_kwargs if isinstance(trainer.strategy, HybridParallelStrategy) else {}
    trainer.fit(built, loader(**place), validate(**place) if validate else None)
    if validate:
        run.validation = trainer.callback_metrics["val_loss"].item()
    if isinstance(trainer.strategy, HybridParallelStrategy):
        run.weights = trainer.strategy.full_state_dict() or {}
    else:
        run.weights = {name: value.detach().clone() for name, value in built.state_dict().items()}
    return run


def _fit_rank(
    module: Callable[[], L.LightningModule], loader: Callable[..., Any], layout: dict[str, Any], devices: int, options: dict[str, Any]
) -> Run:
    strategy = HybridParallelStrategy(**({"zero_options": {"min_unit_mb": 0}} | layout))
    return fit(module, loader, strategy, devices=devices, **options)


def fit_world(
    module: Callable[[], L.LightningModule],
    loader: Callable[..., Any],
    layout: dict[str, Any],
    size: int,
    *,
    timeout: float = 120.0,
    **options: Any,
) -> list[Run]:
    """Train on ``size`` ranks under ``layout``; every rank's Run."""
    return run_world(_fit_rank, size, module, loader, layout, size, options, timeout=timeout)


def assert_same(runs: list[Run], reference: Run, tolerance: float = 1e-10) -> None:
    """Every rank's numbers and the gathered weights are those of one process."""
    close = {"rtol": tolerance, "atol": tolerance}
    for rank, run in enumerate(runs):
        for what in ("losses", "norms"):
            got, want = torch.tensor(getattr(run, what), dtype=torch.float64), torch.tensor(getattr(reference, what), dtype=torch.float64)
            torch.testing.assert_close(got, want, **close, msg=lambda text, rank=rank, what=what: f"rank {rank} {what}: {text}")
        torch.testing.assert_close(torch.tensor(run.logged), torch.tensor(reference.logged), rtol=1e-6, atol=1e-6)
        if reference.validation is not None:
            assert run.validation is not None, f"rank {rank} has no validation loss"
            assert abs(run.validation - reference.validation) < 1e-6, (rank, run.validation, reference.validation)
    weights = runs[0].weights
    assert list(weights) == list(reference.weights)
    for name, value in reference.weights.items():
        torch.testing.assert_close(weights[name], value, **close, msg=lambda text, name=name: f"{name}: {text}")
