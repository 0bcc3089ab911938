"""``load_from_checkpoint`` of modules and data modules, and Trainers without a strategy of ours, read folders too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_par.checkpoint import EXTRA_STATES, MODEL, MODULE, OPTIMIZERS, as_single, is_native, open_checkpoint
from lightning_par.checkpoint.files import without_scheme
from lightning_par.checkpoint.source import Contents
from lightning_par.strategy import seams


def teach_lightning() -> None:
    """From now on."""
    seams.read_also(_is_folder, read_whole, read_run)


def _is_folder(path: Any) -> bool:
    return isinstance(path, str | os.PathLike) and (Path(without_scheme(path)).is_dir() or is_native(without_scheme(path)))


def read_whole(path: str | os.PathLike[str], map_location: Any = None) -> dict[str, Any]:
    """What Lightning's single file would hold, but for the state of optimizers: weights whole, under all names of the module.

    Args:
        map_location: a device for the weights, None or anything else: on CPU.

    Raises:
        CheckpointError: there is no complete checkpoint of a format that we read, or it is damaged.
    """
    source = open_checkpoint(path)
    source.check()
    names = [name.removeprefix(f"{MODEL}.") for name in source.weights]
    device = torch.device(map_location) if isinstance(map_location, str | torch.device | int) else torch.device("cpu")
    weights = {name: source.read(f"{MODEL}.{name}").to(device) for name in names}
    extras = source.meta.get(MODULE, {}).get(EXTRA_STATES, {})
    plain = {key: value for key, value in source.meta.items() if key not in (OPTIMIZERS, MODULE)}
    state_dict = {key: weights[first] for key, first in Contents.of(source).aliases.items()} | extras
    return {"pytorch-lightning_version": pl.__version__} | plain | {"state_dict": state_dict}


def read_run(path: str | os.PathLike[str], map_location: Any = None) -> dict[str, Any]:
    """What Lightning's single file would hold, on CPU: each process reads all of it.

    Raises:
        CheckpointError: as ``read_whole``.
    """
    source = open_checkpoint(path)
    source.check()
    checkpoint = {"pytorch-lightning_version": pl.__version__} | as_single(source, lambda tensor: tensor)
    if not source.meta.get(OPTIMIZERS):
        del checkpoint[OPTIMIZERS]  # Lightning tells so where it needs one
    return checkpoint
