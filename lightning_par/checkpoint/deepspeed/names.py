"""What DeepSpeed calls its files and classes (runtime/engine.py, checkpoint/constants.py)."""

from __future__ import annotations

import pickle
import re
import types
from pathlib import Path
from typing import Any

from lightning_par.checkpoint.errors import CheckpointError

MODEL_FILE = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt")
LAYER_FILE = re.compile(r"layer_(?P<layer>\d+)(?:-model_(?P<tensor>\d+))?-model_states\.pt")
OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_?optim_states\.pt")
# fmt: off
ENGINE_KEYS = frozenset([
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params",
    "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps", "global_steps", "global_samples",
    "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version", "universal_checkpoint_info",
    "autotp_config", "autoep_layers",
])
# fmt: on
"""Top-level keys of a model file that are the engine's; all others are the user's ``client_state``."""
VERSION = "0.19.8"
"""The version whose format is written."""

DEFAULT_SCALER = {
    "cur_scale": 65536.0,
    "dynamic": True,
    "cur_iter": 0,
    "last_overflow_iter": -1,
    "scale_factor": 2.0,
    "scale_window": 1000,
    "min_scale": 1.0,
    "delayed_shift": 2,
    "cur_hysteresis": 2,
    "consecutive_hysteresis": False,
    "raise_error_at_min_scale": True,
}
"""A DynamicLossScaler with the defaults of DeepSpeed's configuration (runtime/fp16/loss_scaler.py, runtime/constants.py)."""


def model_file(stage: int, rank: int = 0, *, model_rank: int = 0) -> str:
    """Of a model-parallel rank: below stage 3 there is one, at stage 3 one a data rank."""
    return f"{f'zero_pp_rank_{rank}_' if stage == 3 else ''}mp_rank_{model_rank:02d}_model_states.pt"


def optimizer_file(rank: int, dtype: str) -> str:
    """``dtype``: fp32, fp16 or bf16. "pp_rank" is the data rank."""
    return f"{'bf16_' if dtype == 'bf16' else ''}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def is_deepspeed(path: Path) -> bool:
    """Whether ``path`` is what ``engine.save_checkpoint`` wrote, or one tag of it."""
    return path.is_dir() and not is_universal(path) and ((path / "latest").is_file() or _has_model(path))


def is_universal(path: Path) -> bool:
    """Whether ``path`` is a universal checkpoint, or the folder with the file ``latest_universal`` that names one."""
    return (path / "latest_universal").is_file() or ((path / "zero").is_dir() and _has_model(path))


def tag_folder(path: Path, latest: str = "latest") -> Path:
    """The folder with the files: ``path`` itself, or the one whose tag stands in ``latest``.

    Raises:
        CheckpointError: it is not there (DeepSpeed writes ``latest`` before all ranks have written).
    """
    if not (path / latest).is_file():
        return path
    folder = path / (path / latest).read_text().strip()
    if folder.parent != path or folder.name == ".." or not folder.is_dir():
        raise CheckpointError(f"{path / latest} names the folder {folder.name!r}, which is not there")
    return folder


def _has_model(folder: Path) -> bool:
    return any(MODEL_FILE.fullmatch(file.name) for file in folder.glob("*_model_states.pt"))


# ---- the classes whose instances DeepSpeed pickles


class LossScaler:
    """Any loss scaler, with the attributes that the file has."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class DynamicLossScaler(LossScaler):
    """One that changes."""


class Fragment(LossScaler):
    """``fragment_address``: start and numel of a parameter's part in a rank's partition."""


class Stage(int):
    """``ZeroStageEnum``."""


class SubparamShape(LossScaler):
    """Of universal checkpoints."""


STUBS: dict[str, type] = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": LossScaler,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": DynamicLossScaler,
    "deepspeed.utils.tensor_fragment.fragment_address": Fragment,
    "deepspeed.runtime.bf16_optimizer.fragment_address": Fragment,
    "deepspeed.runtime.zero.config.ZeroStageEnum": Stage,
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape": SubparamShape,
}
_WRITTEN = {stub: name for name, stub in reversed(STUBS.items())}


class _Pickler(pickle._Pickler):  # the one in Python: its ``save_global`` can be replaced
    """Writes the stubs under DeepSpeed's names."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if obj not in _WRITTEN:
            super().save_global(obj, name)
            return
        module, _, called = _WRITTEN[obj].rpartition(".")
        self.write(pickle.GLOBAL + f"{module}\n{called}\n".encode())
        self.memoize(obj)


pickle_module = types.SimpleNamespace(Pickler=_Pickler, __name__="pickle")
"""For ``torch.save``."""
