"""Weights & Biases: one run a job, whatever the number of ranks, with the whole config from its first moment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import wandb
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from typing_extensions import override


class WandbTracker(WandbLogger):
    """Lightning's WandbLogger, with three differences.

    `config` goes to `wandb.init`, so that a run kept offline holds it too; `experiment` on other ranks than 0 takes any use without
    effect (attributes and items of attributes too); `close` ends the run, so that the next job of a process gets its own.
    """

    def __init__(
        self,
        *,
        project: str,
        save_dir: str | Path,
        mode: str = "offline",
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        Path(save_dir).mkdir(parents=True, exist_ok=True)
        super().__init__(name=name, save_dir=save_dir, project=project, mode=mode, config=dict(config or {}), **kwargs)

    @property
    @override
    def experiment(self) -> Any:
        return super().experiment if rank_zero_only.rank == 0 else NoExperiment()

    def close(self) -> None:
        if wandb.run is not None:
            wandb.finish()


class NoExperiment:
    """Takes every attribute, call, item and assignment, and does nothing."""

    def __getattr__(self, name: str) -> NoExperiment:
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> NoExperiment:
        return self

    def __getitem__(self, key: Any) -> NoExperiment:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return False
