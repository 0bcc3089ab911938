"""What a run says last: where everything is, how fast it was, what it learned."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import lightning as L
from lightning.pytorch.callbacks import Callback
from omegaconf import DictConfig

from lightning_par.callbacks import HeldOutLoss, SaveLast, Throughput
from lightning_par.cli.check import check_layout
from lightning_par.layout import RankGrid

C = TypeVar("C", bound=Callback)


def closing_summary(config: DictConfig, trainer: L.Trainer) -> str:
    rows = [*_places(Path(config.paths.run), trainer), *_results(trainer)]
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:<{width}}  {value}" for name, value in rows]
    if config.trainer.strategy is None:
        lines += ["", RankGrid(check_layout(config)).table()]
    return "\n".join(["", f"Trained to step {trainer.global_step}.", *lines])


def _places(run: Path, trainer: L.Trainer) -> list[tuple[str, str]]:
    """The files of the run that are there, with the name under which a reader looks for them."""
    save = _one(trainer, SaveLast)
    candidates = [
        ("run folder", [run]),
        ("checkpoint", [save.path] if save else []),
        ("metrics (CSV)", sorted(run.glob("csv/metrics.csv"))),
        ("W&B", sorted(run.glob("wandb/*run-*"))),
    ]
    return [(name, str(path)) for name, paths in candidates for path in paths if path.exists()]


def _results(trainer: L.Trainer) -> list[tuple[str, str]]:
    rows = []
    throughput, held_out = _one(trainer, Throughput), _one(trainer, HeldOutLoss)
    if throughput and throughput.mean:
        rows.append(("tokens/s", f"{throughput.mean:,.0f}"))
    if held_out and held_out.last is not None:
        start = "" if held_out.first is None else f"{held_out.first:.4f} before the first step, "
        rows.append(("held-out loss", f"{start}{held_out.last:.4f} now"))
    return rows


def _one(trainer: L.Trainer, kind: type[C]) -> C | None:
    return next((callback for callback in trainer.callbacks if isinstance(callback, kind)), None)
