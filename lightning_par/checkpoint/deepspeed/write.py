"""A ``Source`` written as DeepSpeed would have: ZeRO 1, 2 or 3, for any number of data ranks.

Note [What is written]
~~~~~~~~~~~~~~~~~~~~~~
Everything that the engine and its tools (zero_to_fp32, ds_to_universal) read, which is more than the engine alone needs: runtime/engine.py,
runtime/zero/stage_1_and_2.py, stage3.py, utils/zero_to_fp32.py, checkpoint/ds_to_universal.py. ``module`` holds the rounded masters, since
stages 1 and 2 do not compute them anew. The order of the parameters in a group is that of the optimizer, which the engine counts on.
What only we know goes into the client state, under ``lightning_par``. ``latest`` is written last.

Of a run with averages of weights, the engine gets the weights that are trained, which go with the moments. The averages lie in the first
model file, under ``lightning_par``; they are read again until DeepSpeed has trained on, of which they know nothing.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_par.checkpoint.deepspeed import names
from lightning_par.checkpoint.deepspeed.flat import Flat, Shapes, of_stage
from lightning_par.checkpoint.errors import CheckpointError
from lightning_par.checkpoint.files import Scratch, require_file_names, save
from lightning_par.checkpoint.source import LOSS_SCALE, MODEL, MODULE, OPTIMIZERS, Contents, Entry, Source, rng_of, states
from lightning_par.checkpoint.whole import AVERAGES, EXTRA

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SUB_GROUP = 1_000_000_000
"""DeepSpeed's default of ``zero_optimization.sub_group_size``."""


@dataclass(frozen=True)
class Target:
    """How the engine that is to load the checkpoint is configured.

    Attributes:
        stage: of ZeRO: 1, 2 or 3.
        ranks: data ranks. DeepSpeed loads at no other number of them.
        dtype: fp32, bf16 or fp16.
        sub_group_size: ``zero_optimization.sub_group_size``; stage 3 only.
    """

    stage: int = 2
    ranks: int = 1
    dtype: str = "fp32"
    sub_group_size: int = SUB_GROUP

    def __post_init__(self) -> None:
        faults = []
        if type(self.stage) is not int or self.stage not in (1, 2, 3):
            faults.append(f"stage={self.stage!r} must be 1, 2 or 3")
        faults += [
            f"{key}={value!r} must be a whole number of at least 1"
            for key, value in (("ranks", self.ranks), ("sub_group_size", self.sub_group_size))
            if type(value) is not int or value < 1
        ]
        if self.dtype not in DTYPES:
            faults.append(f"dtype={self.dtype!r} must be one of {', '.join(DTYPES)}")
        if faults:
            raise ValueError("; ".join(faults))


@dataclass(frozen=True)
class Trained:
    """The one optimizer of a checkpoint, as DeepSpeed can have it.

    Attributes:
        source: with the weights that are trained.
        averages: of them, by name; empty if there are none.
        groups: hyperparameters and names. Those without a trained parameter are among them at stage 3 only: below it engines have none.
        moments: the keys of state in the shape of the parameter.
        common: what else there is of state, which DeepSpeed has once for each group (step).
    """

    source: Source
    averages: dict[str, Entry]
    contents: Contents
    groups: tuple[dict[str, Any], ...]
    states: dict[str, dict[str, Entry]]
    moments: tuple[str, ...]
    common: tuple[dict[str, Any], ...]

    @classmethod
    def of(cls, source: Source, *, empty_groups: bool = False) -> Trained:
        """Refuse what DeepSpeed has no place for, all of it named."""
        averages = {entry.removeprefix(f"{MODEL}."): source.entries[entry] for entry in source.weights} if source.current else {}
        source = source.trained()
        contents, metas = Contents.of(source), source.meta.get(OPTIMIZERS, [])
        faults = [f"{len(metas)} optimizers: DeepSpeed has one"] if len(metas) > 1 else []
        if source.is_numbered:
            faults.append("parameters of the optimizer are numbered, not named")
        groups = tuple(group for group in contents.groups if group["params"] or empty_groups)
        if not any(group["params"] for group in groups) and not faults:
            faults.append("no optimizer, so nothing tells which parameters are trained")
        found = states(source, 0)
        moments: dict[str, None] = {}
        for name in (name for group in groups for name in group["params"]):
            entry = source.entries.get(f"{MODEL}.{name}")
            if entry is None:
                faults.append(f"{name} is in the optimizer, but has no value")
                continue
            if not math.prod(entry.shape):
                faults.append(f"{name} has no elements (shape {tuple(entry.shape)}), and has no place in DeepSpeed's flat parameters")
            for what, value in ({"its value": entry} | found.get(name, {})).items():
                if value.dtype == torch.float64:
                    faults.append(f"{name}: {what} is float64, but DeepSpeed trains in float32")
            moments |= dict.fromkeys(key for key, value in found.get(name, {}).items() if key != "step" and value.shape == entry.shape)
        for name in (name for group in groups for name in group["params"] if f"{MODEL}.{name}" in source.entries):
            weight = source.entries[f"{MODEL}.{name}"].shape
            faults += [
                f"{name}: its state {key} of optimizer 0 has shape {value.shape}, but DeepSpeed has a place only for state in the shape of "
                f"the parameter, {weight}, and for single numbers: optimizers such as Adafactor and LBFGS go to native and ckpt"
                for key, value in found.get(name, {}).items()
                if value.shape != weight and (key in moments or math.prod(value.shape) != 1)
            ]
        scalars = metas[0]["scalars"] if metas else {}
        common = tuple(_common(group["params"], found, moments, scalars, faults) for group in groups)
        if faults:
            raise CheckpointError(f"{source.path} cannot become a checkpoint of DeepSpeed:\n" + "\n".join(f"  - {f}" for f in faults))
        bare = [name for group in groups for name in group["params"] if moments and not set(moments) <= found.get(name, {}).keys()]
        if untold := sorted({*source.meta.get(MODULE, {}).get("aliases", {}).values()} - {*contents.aliases.values()}):
            warnings.warn(f"{', '.join(untold)}: not in {source.path}, so not in what is written either", stacklevel=2)
        if bare:
            warnings.warn(f"{', '.join(bare)}: no optimizer state, so zeros are written: DeepSpeed keeps one for all", stacklevel=2)
        return cls(source, averages, contents, groups, found, tuple(moments), common)

    @property
    def shapes(self) -> list[Shapes]:
        return [{name: self.shape(name) for name in group["params"]} for group in self.groups]

    def shape(self, name: str) -> torch.Size:
        return torch.Size(self.source.entries[f"{MODEL}.{name}"].shape)

    def weight(self, name: str) -> Tensor:
        return self.source.read(f"{MODEL}.{name}")

    def moment(self, key: str, name: str) -> Tensor:
        entry = self.states.get(name, {}).get(key)
        return torch.zeros(self.shape(name)) if entry is None else entry.read()

    def options(self, group: int) -> dict[str, Any]:
        return {key: value for key, value in self.groups[group].items() if key != "params"}

    def client(self, scratch: Scratch | None) -> dict[str, Any]:
        """Lightning's keys as the client state, and what only we know. ``scratch``: for the averages, which are left out without it."""
        hidden = {key: self.source.meta[key] for key in (OPTIMIZERS, MODULE, "layout", "deepspeed") if key in self.source.meta}
        client = {key: value for key, value in self.source.meta.items() if key not in hidden}
        if taken := sorted(client.keys() & names.ENGINE_KEYS):
            raise CheckpointError(f"{self.source.path} holds the keys {', '.join(taken)}, which are the engine's own in DeepSpeed's files")
        rng = {name: entry.read() for name, entry in rng_of(self.source)}
        averages = {name: scratch.keep(entry.read()) for name, entry in self.averages.items()} if scratch is not None else {}
        told = {"meta": hidden, "rng": rng, "global_steps": self.source.meta.get("global_step", 0)}
        return client | {EXTRA: told | ({AVERAGES: averages} if averages else {})}


def write_deepspeed(source: Source, folder: Path, target: Target) -> None:
    """``source`` as what ``engine.save_checkpoint(folder)`` writes under ``target``. In one process. See Note [What is written].

    Raises:
        CheckpointError: DeepSpeed has no place for something in it: several optimizers, float64, step counts that differ in a group.
    """
    trained = Trained.of(source, empty_groups=target.stage == 3)
    tag = f"global_step{source.meta.get('global_step', 0)}"
    require_file_names(source.path, "the tag", [tag])
    (folder / tag).mkdir(parents=True)
    groups, owners = _split(trained.shapes, target)
    flat, scratch = of_stage(target.stage, groups, target.ranks), Scratch(folder)
    for rank in range(target.ranks if target.stage == 3 else 1):
        save(model_state(trained, flat, target, scratch, rank), folder / tag / names.model_file(target.stage, rank))
    flats = _fill(trained, flat, scratch)
    for rank in range(target.ranks):
        parts = {key: [flats[key, rank, group] for group in range(len(groups))] for key in ("", *trained.moments)}
        shard = (_shard_3 if target.stage == 3 else _shard_1_2)(trained, flat, target, owners, rank, parts)
        common = {"ds_config": {}, "ds_version": names.VERSION}
        file = folder / tag / names.optimizer_file(rank, target.dtype)
        save({"optimizer_state_dict": shard} | common, file, names.pickle_module)
    (folder / "latest").write_text(tag)


def model_state(trained: Trained, flat: Flat, target: Target, scratch: Scratch, rank: int = 0) -> dict[str, Any]:
    """A model file (runtime/engine.py, ``_common_checkpoint_state``)."""
    contents, dtype, sharded = trained.contents, DTYPES[target.dtype], target.stage == 3
    params = [name for name in dict.fromkeys(contents.aliases.values()) if name not in contents.buffers]
    values = {name: torch.empty(0, dtype=dtype) if sharded else _rounded(trained.weight(name), dtype, scratch) for name in params}
    values |= {name: trained.weight(name) for name in contents.buffers}
    fragments = {name: _fragment(trained.weight(name), dtype, target.ranks, rank) if sharded else values[name] for name in contents.frozen}
    engine = {
        "module": {key: values[name] for key, name in contents.aliases.items()},
        "buffer_names": [key for key, name in contents.aliases.items() if name in contents.buffers],
        "optimizer": None,
        "param_shapes": [dict(shapes) for shapes in flat.groups],
        "frozen_param_shapes": {name: trained.shape(name) for name in contents.frozen},
        "frozen_param_fragments": fragments,
        "shared_params": {key: name for key, name in contents.aliases.items() if key != name and name not in contents.buffers},
        "lr_scheduler": next(iter(trained.source.meta.get("lr_schedulers") or ()), None),
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": _facts(trained.source).get("skipped_steps", 0),
        "global_steps": trained.source.meta.get("global_step", 0),
        "global_samples": _facts(trained.source).get("global_samples") or 0,
        "dp_world_size": target.ranks,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": {},
        "ds_version": names.VERSION,
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.4},
    }
    return trained.client(scratch if rank == 0 else None) | engine


def _rounded(value: Tensor, dtype: torch.dtype, scratch: Scratch) -> Tensor:
    return scratch.keep(value, dtype if value.is_floating_point() else value.dtype)


def _fragment(value: Tensor, dtype: torch.dtype, ranks: int, rank: int) -> Tensor:
    """One rank's part of a frozen parameter at stage 3, padded."""
    part = -(-value.numel() // ranks)
    mine = torch.zeros(part, dtype=dtype if value.is_floating_point() else value.dtype)
    cut = value.reshape(-1)[rank * part : (rank + 1) * part]
    mine[: cut.numel()] = cut
    return mine


def _split(shapes: list[Shapes], target: Target) -> tuple[list[Shapes], list[list[int]]]:
    """The groups of flat tensors, and those of each param group: itself, or at stage 3 its sub-groups (``_create_fp16_sub_groups``)."""
    if target.stage < 3:
        return shapes, [[group] for group in range(len(shapes))]
    parts: list[Shapes] = []
    owners = []
    for group in shapes:
        cut: list[dict[str, Any]] = []
        filled = 0
        for name, shape in group.items():
            if not cut or filled >= target.sub_group_size:
                cut.append({})
                filled = 0
            cut[-1][name] = shape
            filled += -(-math.prod(shape) // target.ranks)
        owners.append([len(parts) + place for place in range(len(cut))])
        parts += cut
    return parts, owners


def _fill(trained: Trained, flat: Flat, scratch: Scratch) -> dict[tuple[str, int, int], Tensor]:
    """The flat tensors by key ("" for masters), rank and group: a parameter at a time."""
    flats = {
        (key, rank, group): scratch.zeros((size,), torch.float32)
        for key in ("", *trained.moments)
        for rank in range(flat.ranks)
        for group, size in enumerate(flat.sizes)
    }
    for name in flat.pieces:
        for key in ("", *trained.moments):
            value = trained.moment(key, name) if key else trained.weight(name)
            flat.write(name, value, lambda rank, group, key=key: flats[key, rank, group])
    return flats


def _shard_1_2(
    trained: Trained, flat: Flat, target: Target, owners: list[list[int]], rank: int, parts: Mapping[str, list[Tensor]]
) -> dict[str, Any]:
    """An optimizer file below stage 3 (stage_1_and_2.py, ``state_dict``)."""
    groups = range(len(flat.groups))
    paddings = [flat.padding(rank, group) for group in groups]
    keeps = [flat.sizes[group] - paddings[group] for group in groups]
    state = {group: trained.common[group] | {key: parts[key][group] for key in trained.moments} for group in groups}
    return {
        **loss_scale(trained.source, target),
        "base_optimizer_state": _base(trained, owners, state),
        "single_partition_of_fp32_groups": [parts[""][group][: keeps[group]] for group in groups],
        "zero_stage": target.stage,
        "group_paddings": paddings,
        "param_alignment_paddings": [[0] * len(shapes) for shapes in flat.groups],
        "partition_count": [target.ranks] * len(groups),
        "ds_version": names.VERSION,
        "param_slice_mappings": [
            {name: names.Fragment(numel=span.size, start=span.start) for name, span in flat.on(rank, group)} for group in groups
        ],
    }


def _shard_3(
    trained: Trained, flat: Flat, target: Target, owners: list[list[int]], rank: int, parts: Mapping[str, list[Tensor]]
) -> dict[str, Any]:
    """An optimizer file of stage 3 (stage3.py, ``_rigid_state_dict``)."""
    owner = {part: group for group, mine in enumerate(owners) for part in mine}
    state = {part: _apart(trained.common[owner[part]]) | {key: parts[key][part] for key in trained.moments} for part in owner}
    return {
        "zero_stage": 3,
        **loss_scale(trained.source, target, always=True),
        "partition_count": target.ranks,
        "optimizer_state_dict": _base(trained, owners, state),
        "fp32_flat_groups": parts[""],
    }


def _apart(common: Mapping[str, Any]) -> dict[str, Any]:
    """A copy for one sub-group: what several have together would be counted up by each of them."""
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in common.items()}


def _base(trained: Trained, owners: list[list[int]], state: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    groups = [trained.options(group) | {"params": mine} for group, mine in enumerate(owners)]
    return {"state": {part: told for part, told in state.items() if told}, "param_groups": groups}


def loss_scale(source: Source, target: Target, *, always: bool = False) -> dict[str, Any]:
    """The scaler of the source if it has one. Otherwise the engine's own stays, or, where it needs one, DeepSpeed's defaults."""
    told, state = _facts(source).get("loss_scaler"), source.meta.get(LOSS_SCALE)
    if told is None and state:
        remembered = {"cur_iter": state["steps"], "last_overflow_iter": state["last_overflow"], "cur_hysteresis": max(state["left"], 1)}
        told = names.DEFAULT_SCALER | {"cur_scale": state["scale"]} | remembered
    if target.dtype != "fp16":
        told = {"cur_scale": 1.0, "dynamic": False}
    elif told is None or not told["dynamic"]:
        told = dict(names.DEFAULT_SCALER) if always else None
    if told is None:
        return {}
    kind = names.DynamicLossScaler if told["dynamic"] else names.LossScaler
    dtype = {"dtype": torch.float16} if told["dynamic"] else {}
    return {"loss_scaler": kind(**told, **dtype), "dynamic_loss_scale": told["dynamic"], "overflow": False}


def _facts(source: Source) -> Mapping[str, Any]:
    return source.meta.get("deepspeed", {})


def _common(
    members: list[str],
    found: Mapping[str, Mapping[str, Entry]],
    moments: Collection[str],
    scalars: Mapping[str, Mapping[str, Any]],
    faults: list[str],
) -> dict[str, Any]:
    """State of a group that DeepSpeed has once for all its parameters: step counts, and what is no tensor."""
    values: dict[str, dict[str, Any]] = {}
    for name in members:
        single = {key: entry for key, entry in found.get(name, {}).items() if key not in moments and math.prod(entry.shape) == 1}
        told = {key: entry.read().clone() for key, entry in single.items()} | scalars.get(name, {})
        for key, value in told.items():
            values.setdefault(key, {})[name] = value
    for key, by_name in values.items():
        if len({str(value.tolist() if isinstance(value, Tensor) else value) for value in by_name.values()}) > 1:
            told = ", ".join(
                f"{name}: {value:g}" if isinstance(value, Tensor | float) else f"{name}: {value}" for name, value in by_name.items()
            )
            faults.append(f"{key} differs within a group, but DeepSpeed has one for all its parameters ({told})")
    return {key: next(iter(by_name.values())) for key, by_name in values.items()}
