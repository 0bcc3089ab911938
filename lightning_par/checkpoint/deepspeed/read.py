"""DeepSpeed's ordinary checkpoints (ZeRO 0 to 3, BF16_Optimizer), opened as a ``Source``.

Note [Which values are taken]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A trained parameter is its float32 master; ``module`` holds it rounded. Where parameters lie in the flat tensors is told by
``param_shapes`` alone (``param_slice_mappings`` is wrong under ``round_robin_gradients``). Frozen parameters and buffers are those of
``module`` (stage 3: frozen ones lie in fragments, one in each rank's model file). Padding is cut off and never looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_par.checkpoint.deepspeed.flat import Flat, of_stage
from lightning_par.checkpoint.deepspeed.names import ENGINE_KEYS, MODEL_FILE, OPTIMIZER_FILE, STUBS, LossScaler, model_file, tag_folder
from lightning_par.checkpoint.errors import CheckpointError
from lightning_par.checkpoint.files import load
from lightning_par.checkpoint.source import LOSS_SCALE, MODEL, MODULE, NUMBERED, OPTIMIZER, OPTIMIZERS, Entry, Source
from lightning_par.checkpoint.whole import EXTRA, number, tied


def open_deepspeed(path: Path) -> Source:
    """What ``engine.save_checkpoint`` wrote, at any stage, precision and number of data ranks; ``path`` may be one tag of it.

    Without ZeRO the parameters of the optimizer are numbered, see ``Source.named``. Any process may call, none talks to another.

    Raises:
        CheckpointError: a file is missing, damaged, or names what is no plain data; or the checkpoint is of a kind that is not read
            (pipeline stages, tensor parallelism, ``elastic_checkpoint``, ``parameter_alignment``, offload to NVMe).
    """
    folder = tag_folder(path)
    models = load_models(folder)
    shards = [load(file, STUBS)["optimizer_state_dict"] for file in _ranks(folder, OPTIMIZER_FILE)]
    saved = _Sharded.of(folder, models, shards) if shards else _Plain(folder, models[0])
    trained = saved.weights()
    entries, told = module_entries(models, trained)
    states, optimizer = saved.optimizer()
    if not shards:
        del told["frozen"]  # the optimizer may hold them all
    entries |= {name: entry for name, entry in trained.items() if name.startswith(f"{MODEL}.{NUMBERED}")}
    meta = client_meta(models[0], told, [optimizer] if optimizer else [], saved.facts)
    return Source(path, f"DeepSpeed, ZeRO {saved.facts['stage']}", meta, entries | states, saved.facts)


def load_models(folder: Path) -> list[Mapping[str, Any]]:
    """The model files: one, or at stage 3 one for each data rank."""
    whole = folder / model_file(0)
    models = [load(file, STUBS) for file in ([whole] if whole.is_file() else _ranks(folder, MODEL_FILE))]
    if not models:
        raise CheckpointError(f"{folder} holds no file like {whole.name}: it is no checkpoint of DeepSpeed, or incomplete")
    _require_supported(folder, models[0])
    return models


def module_entries(models: Sequence[Mapping[str, Any]], trained: Mapping[str, Entry]) -> tuple[dict[str, Entry], dict[str, Any]]:
    """The entries of the module, in its order, with random generators if we wrote them, and what is to be told of it."""
    model = models[0]
    aliases = aliases_of(model)
    names = list(dict.fromkeys(aliases.values()))
    frozen = frozen_fragments(models)
    entries = {f"{MODEL}.{name}": trained.get(name) or frozen.get(name) or Entry.of(model["module"][name]) for name in names}
    entries |= {name: Entry.of(value) for name, value in _ours(model).get("rng", {}).items()}
    buffers = [name for name in names if name in set(model.get("buffer_names") or ())]
    frozen_names = [name for name in names if name not in trained and name not in buffers]
    return entries, {"aliases": aliases, "buffers": buffers, "frozen": frozen_names}


def frozen_fragments(models: Sequence[Mapping[str, Any]]) -> dict[str, Entry]:
    """Stage 3: frozen parameters, of which every rank's model file has a part."""
    model = models[0]
    shapes = {name: shape for name, shape in (model.get("frozen_param_shapes") or {}).items() if math.prod(shape)}
    names = [name for name in shapes if model["module"][name].numel() == 0]
    flat = of_stage(3, [{name: shapes[name]} for name in names], len(models))

    def fragment(rank: int, group: int) -> Tensor:
        return models[rank]["frozen_param_fragments"][names[group]].view(-1)

    return {
        name: Entry(tuple(shapes[name]), fragment(0, place).dtype, partial(flat.read, name, fragment)) for place, name in enumerate(names)
    }


def aliases_of(model: Mapping[str, Any]) -> dict[str, str]:
    """Each key of ``module`` and the first name of what it stands for. DeepSpeed tells it with ZeRO only."""
    shared = model.get("shared_params")
    return tied(model["module"]) if shared is None else {name: shared.get(name, name) for name in model["module"]}


def client_meta(
    model: Mapping[str, Any], told: Mapping[str, Any], optimizers: list[dict[str, Any]], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """The user's ``client_state`` (Lightning keeps its own there); what is not in it, from the engine's counters."""
    client = {key: value for key, value in model.items() if key not in ENGINE_KEYS}
    if EXTRA in client:
        if extra := _ours(model):
            return {key: value for key, value in client.items() if key != EXTRA} | extra["meta"]
        client = {key: value for key, value in client.items() if key not in _STALE}
    schedule = model.get("lr_scheduler")
    counters = {"epoch": 0, "global_step": model.get("global_steps", 0), "lr_schedulers": [schedule] if schedule else []}
    scaler = facts.get("loss_scaler")
    if scaler and scaler["dynamic"]:
        since = scaler["cur_iter"] - scaler["last_overflow_iter"] - 1
        counters[LOSS_SCALE] = {
            "scale": float(scaler["cur_scale"]),
            "good": max(since, 0) % scaler["scale_window"],
            "left": scaler["cur_hysteresis"],
            "last_overflow": scaler["last_overflow_iter"],
            "steps": scaler["cur_iter"],
            "skipped": model.get("skipped_steps", 0),
        }
    return counters | client | {OPTIMIZERS: optimizers, MODULE: dict(told), "deepspeed": dict(facts)}


_STALE = (EXTRA, "epoch", "global_step", "loops", "lr_schedulers", LOSS_SCALE)


def _ours(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """What we added when we wrote it, unless DeepSpeed has trained on since: programs hand the client state on from save to save."""
    extra = model.get(EXTRA, {})
    return extra if extra.get("global_steps") == model.get("global_steps") else {}


def scaler_facts(shard: Mapping[str, Any]) -> dict[str, Any] | None:
    scaler = shard.get("loss_scaler")
    return {key: value for key, value in vars(scaler).items() if key != "dtype"} if isinstance(scaler, LossScaler) else None


def _ranks(folder: Path, pattern: Any) -> list[Path]:
    """The files of one kind, by data rank; a gap is named."""
    found = {
        int(match["rank"] or 0): file for file in folder.iterdir() if (match := pattern.fullmatch(file.name)) and int(match["mp"]) == 0
    }
    if gaps := sorted(set(range(max(found, default=-1) + 1)) - found.keys()):
        example = next(iter(found.values())).name
        raise CheckpointError(f"{folder} is incomplete: the files of data ranks {gaps} are missing beside {example}")
    return [found[rank] for rank in sorted(found)]


def _require_supported(folder: Path, model: Mapping[str, Any]) -> None:
    if model.get("mp_world_size", 1) > 1 or model.get("module") is None or any(folder.glob("layer_*-model_*states.pt")):
        raise CheckpointError(
            f"{folder} was written by {model.get('mp_world_size', 1)} pipeline or tensor ranks of DeepSpeed, whose parts are not joined "
            "here: make a universal checkpoint of it with DeepSpeed's own ds_to_universal, and read that"
        )
    if any(folder.glob("offloaded_tensors")):
        raise CheckpointError(f"{folder} holds optimizer states offloaded to NVMe, which are not read here")


@dataclass(frozen=True)
class _Sharded:
    """With ZeRO: flat tensors over all ranks. See Note [Which values are taken]."""

    folder: Path
    models: Sequence[Mapping[str, Any]]
    shards: Sequence[Mapping[str, Any]]
    stage: int
    flat: Flat

    @classmethod
    def of(cls, folder: Path, models: Sequence[Mapping[str, Any]], shards: Sequence[Mapping[str, Any]]) -> _Sharded:
        first = shards[0]
        stage = int(first.get("zero_stage", 3 if "fp32_flat_groups" in first else 1))
        count = first["partition_count"]
        ranks = count if isinstance(count, int) else max(count, default=1)
        for what, files in (("optimizer", len(shards)), ("model", len(models) if stage == 3 else ranks)):
            if files != ranks:
                raise CheckpointError(f"{folder} is incomplete: {ranks} data ranks wrote it, but {files} {what} files are there")
        if any(padding for paddings in first.get("param_alignment_paddings", []) for padding in paddings):
            raise CheckpointError(f"{folder} was written with zero_optimization.parameter_alignment, which is not read here")
        saved = cls(folder, models, shards, stage, of_stage(stage, models[0]["param_shapes"], ranks))
        if not isinstance(saved._base(0), Mapping):
            raise CheckpointError(f"{folder} was written with elastic_checkpoint, which is not read here")
        saved._check_sizes()
        return saved

    @property
    def facts(self) -> dict[str, Any]:
        model, first = self.models[0], self.shards[0]
        dtypes = {value.dtype for name, value in model["module"].items() if name in self.flat.pieces}
        return {
            "stage": self.stage,
            "data_ranks": self.flat.ranks,
            "dtype": ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)),
            "ds_version": model.get("ds_version"),
            "skipped_steps": model.get("skipped_steps", 0),
            "global_samples": model.get("global_samples"),
            "loss_scaler": scaler_facts(first),
        }

    def weights(self) -> dict[str, Entry]:
        return {name: self._entry(name, torch.float32, self._masters) for name in self.flat.pieces}

    def optimizer(self) -> tuple[dict[str, Entry], dict[str, Any] | None]:
        """The entries of the state, and the groups with names."""
        base = self._base(0)
        groups = [
            group | {"params": [name for part in group["params"] for name in self.flat.groups[part]]} for group in base["param_groups"]
        ]
        entries: dict[str, Entry] = {}
        scalars: dict[str, dict[str, Any]] = {}
        for part, state in base["state"].items():
            for key, value in state.items():
                for name in self.flat.groups[part]:
                    if isinstance(value, Tensor) and value.dim() == 1 and value.numel() == self.flat.sizes[part]:
                        entries[f"{OPTIMIZER}.0.{name}.{key}"] = self._entry(name, value.dtype, partial(self._state, key))
                    elif isinstance(value, Tensor):
                        entries[f"{OPTIMIZER}.0.{name}.{key}"] = Entry.of(value)
                    else:
                        scalars.setdefault(name, {})[key] = value
        for group in groups:
            _give_steps(group, entries, scalars)
        return entries, {"groups": groups, "scalars": scalars}

    def _entry(self, name: str, dtype: torch.dtype, flats: Callable[[int, int], Tensor]) -> Entry:
        shape = self.flat.groups[self.flat.pieces[name][0].group][name]
        return Entry(tuple(shape), dtype, partial(self.flat.read, name, flats))

    def _masters(self, rank: int, group: int) -> Tensor:
        return self.shards[rank]["fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"][group]

    def _base(self, rank: int) -> Any:
        return self.shards[rank]["optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"]

    def _state(self, key: str, rank: int, group: int) -> Tensor:
        return self._base(rank)["state"][group][key]

    def _check_sizes(self) -> None:
        for rank in range(self.flat.ranks):
            for group, size in enumerate(self.flat.sizes):
                length = self._masters(rank, group).numel()
                stripped = size if self.stage == 3 else size - self.flat.padding(rank, group)
                if length not in (size, stripped):
                    raise CheckpointError(
                        f"{self.folder}: group {group} of rank {rank} has {length} elements, but its parameters fill {stripped} "
                        f"({size} with padding): the layout is unknown"
                    )


@dataclass(frozen=True)
class _Plain:
    """Stage 0: the optimizer's own state dict lies in the model file; with fp16 and bf16 together with the masters."""

    folder: Path
    model: Mapping[str, Any]

    @property
    def _state(self) -> Mapping[str, Any] | None:
        return self.model.get("optimizer")

    @property
    def facts(self) -> dict[str, Any]:
        keys = ("ds_version", "skipped_steps", "global_samples")
        return {"stage": 0, "data_ranks": self.model.get("dp_world_size", 1)} | {key: self.model.get(key) for key in keys}

    def weights(self) -> dict[str, Entry]:
        """Only FP16_UnfusedOptimizer's masters have a shape (runtime/fp16/unfused_optimizer.py); they are numbered like its parameters."""
        masters = [master for group in (self._state or {}).get("fp32_groups", []) for master in group]
        return {f"{MODEL}.{NUMBERED}{place}": Entry.of(master) for place, master in enumerate(masters)}

    def optimizer(self) -> tuple[dict[str, Entry], dict[str, Any] | None]:
        state = self._state
        if state is None:
            return {}, None
        if "fp32_groups_flat" in state:
            raise CheckpointError(
                f"{self.folder} was written at stage 0 by FP16_Optimizer, whose flat masters do not say which parameter lies where: save "
                "it with ZeRO stage 1, which holds the same"
            )
        return number(state.get("optimizer_state_dict", state), 0)


def _give_steps(group: dict[str, Any], entries: dict[str, Entry], scalars: Mapping[str, Mapping[str, Any]]) -> None:
    """FusedAdam counts steps in the group, torch's optimizers in the state of each parameter."""
    step = group.pop("step", None)
    for name in group["params"] if step is not None else ():
        if f"{OPTIMIZER}.0.{name}.step" not in entries and "step" not in scalars.get(name, {}):
            entries[f"{OPTIMIZER}.0.{name}.step"] = Entry.of(torch.tensor(float(step)))
