"""One run, one folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class ClaimFolder(Callback):
    """Refuses an output folder that holds a run already, before anything in it is touched.

    Making Hydra's own subfolder is the claim: of two jobs that start at the same moment, one makes it.
    """

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        _claim(Path(config.hydra.run.dir), config.hydra.output_subdir, "hydra.run.dir")

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        _claim(Path(config.hydra.sweep.dir), config.hydra.output_subdir, "hydra.sweep.dir")


def _claim(folder: Path, subfolder: str | None, key: str) -> None:
    try:
        (folder / (subfolder or ".hydra")).mkdir(parents=True)
    except FileExistsError:
        sys.exit(f"{key}={folder} holds a run already; give another folder (to go on from its checkpoint: ckpt_path={folder}/last)")
