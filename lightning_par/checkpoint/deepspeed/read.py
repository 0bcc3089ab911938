"""DeepSpeed's ordinary checkpoints (ZeRO 0 to 3, BF16_Optimizer), opened as a ``Source``.

Note [Which values are taken]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A trained parameter is its float32 master; ``module`` holds it rounded. Where parameters lie in the flat tensors is told by
``param_shapes`` alone (``param_slice_mappings`` is wrong under ``round_robin_gradients``). Frozen parameters and buffers are those of
``module`` (stage 3: frozen ones lie in fragments, one in each rank's model file). Padding is cut off and never looked at.

What a converted checkpoint told of the run, averages of weights among it, is forgotten once DeepSpeed has trained on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_par.checkpoint import numbers
from lightning_par.checkpoint.deepspeed import stages
from lightning_par.checkpoint.deepspeed.flat import Flat, of_stage
from lightning_par.checkpoint.deepspeed.join import join
from lightning_par.checkpoint.deepspeed.names import (
    ENGINE_KEYS,
    LAYER_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    STUBS,
    LossScaler,
    model_file,
    tag_folder,
)
from lightning_par.checkpoint.errors import CheckpointError
from lightning_par.checkpoint.files import load
from lightning_par.checkpoint.layers import tell_layers
from lightning_par.checkpoint.source import (
    AVERAGING_STATE,
    CURRENT,
    CURRENT_STATE,
    DATA,
    LAYERS,
    LOSS_SCALE,
    MODEL,
    MODULE,
    NUMBERED,
    OPTIMIZER,
    OPTIMIZERS,
    UNTOLD,
    Entry,
    Joining,
    Source,
    is_number,
    parameter_of,
    state_entry,
)
from lightning_par.checkpoint.whole import AVERAGES, EXTRA, number, tied


def open_deepspeed(path: Path, joining: Joining | None = None) -> Source:
    """What ``engine.save_checkpoint`` wrote, at any stage, precision and number of ranks; ``path`` may be one tag of it.

    Without ZeRO the parameters of the optimizer are numbered, see ``Source.named``. Parameters of a pipeline are named by layer, see Note
    [What a layer is] in ``checkpoint.layers``. Any process may call, none talks to another.

    Args:
        joining: what the files of pipeline and tensor ranks do not tell.

    Raises:
        CheckpointError: a file is missing, damaged, or names what is no plain data; or the checkpoint is of a kind that is not read
            (tensor ranks without a plan, ``elastic_checkpoint``, ``parameter_alignment``, offload to NVMe).
    """
    joining = joining or Joining()
    folder = tag_folder(path)
    first = load_models(folder)[0]
    ranks = int(first.get("mp_world_size", 1))
    parts = [
        (load_models(folder, rank), [load(file, STUBS)["optimizer_state_dict"] for file in _ranks(folder, OPTIMIZER_FILE, rank)])
        for rank in range(ranks)
    ]
    layers = _layer_files(folder)
    if layers:
        if ranks % len(layers):
            raise CheckpointError(f"{folder} is incomplete: layers of {len(layers)} tensor ranks, but {ranks} model ranks wrote it")
        sources = [_pipeline(path, folder, parts[place :: len(layers)], files) for place, files in enumerate(layers)]
    elif first.get("module") is None:
        raise CheckpointError(
            f"{folder} is incomplete: a pipeline of DeepSpeed wrote it, but no file like layer_00-model_states.pt is there"
        )
    else:
        sources = [_whole(path, folder, models, shards) for models, shards in parts]
    if joining.layers is not None:
        sources = [tell_layers(source, joining.layers) for source in sources]
    files = tuple(sorted(folder.glob("*_states.pt")))
    if len(sources) == 1 and joining.tp_plan is not None:
        raise CheckpointError(f"tp_plan: {folder} holds whole parameters; a plan joins those that several tensor ranks wrote")
    if len(sources) == 1:
        return replace(sources[0], files=files)
    if any(source.is_numbered for source in sources):
        raise CheckpointError(
            f"{folder} was written by {len(sources)} tensor ranks without ZeRO, which number the parameters of their optimizers, so that "
            "their state cannot be joined: save with ZeRO stage 1, which holds the same"
        )
    whole = join(sources, joining.tp_plan, first.get("universal_checkpoint_info") or {})
    return replace(whole, facts=whole.facts | {"tensor_ranks": len(sources)}, files=files)


def load_models(folder: Path, rank: int = 0) -> list[Mapping[str, Any]]:
    """The model files of one model-parallel ``rank``: one, or at stage 3 one for each data rank."""
    whole = folder / model_file(0, model_rank=rank)
    models = [load(file, STUBS) for file in ([whole] if whole.is_file() else _ranks(folder, MODEL_FILE, rank))]
    if not models:
        raise CheckpointError(f"{folder} holds no file like {whole.name}: it is no checkpoint of DeepSpeed, or incomplete")
    if any(folder.glob("offloaded_tensors")):
        raise CheckpointError(f"{folder} holds optimizer states offloaded to NVMe, which are not read here")
    return models


def _layer_files(folder: Path) -> list[dict[int, Path]]:
    """The files of a pipeline's layers, in order, for each tensor rank."""
    found: dict[int, dict[int, Path]] = {}
    for file in sorted(folder.glob("layer_*")):
        if match := LAYER_FILE.fullmatch(file.name):
            found.setdefault(int(match["tensor"] or 0), {})[int(match["layer"])] = file
    if any(files.keys() != found[0].keys() for files in found.values()) or sorted(found) != list(range(len(found))):
        raise CheckpointError(f"{folder} is incomplete: not every tensor rank has a file of every layer")
    return [dict(sorted(found[rank].items())) for rank in range(len(found))]


def _whole(path: Path, folder: Path, models: Sequence[Mapping[str, Any]], shards: Sequence[Mapping[str, Any]]) -> Source:
    """What one model-parallel rank has, if there is no pipeline."""
    saved = _saved(folder, models, shards)
    trained = saved.weights()
    entries, told = module_entries(models, trained)
    states, optimizer = saved.optimizer()
    if not shards:
        del told["frozen"]  # the optimizer may hold them all
    entries |= {name: entry for name, entry in trained.items() if _is_numbered(name)}
    meta = client_meta(models[0], told, [optimizer] if optimizer else [], saved.facts)
    return Source(path, f"DeepSpeed, ZeRO {saved.facts['stage']}", meta, entries | states, saved.facts)


def _saved(folder: Path, models: Sequence[Mapping[str, Any]], shards: Sequence[Mapping[str, Any]]) -> _Sharded | _Plain:
    if not shards:
        return _Plain(folder, models[0])
    if models[0].get("param_shapes") is None:  # a pipeline in bf16 without ZeRO
        shapes = stages.mapped_shapes([shard["param_slice_mappings"] for shard in shards], models[0]["module"])
        models = [models[0] | {"param_shapes": shapes}]
    return _Sharded.of(folder, models, shards)


# ---- pipelines


@dataclass(frozen=True)
class _Stage:
    """Masters by name, entries of the optimizer's state, and its groups."""

    weights: dict[str, Entry]
    states: dict[str, Entry]
    optimizer: dict[str, Any] | None

    @classmethod
    def of(cls, source: Source) -> _Stage:
        weights = {parameter_of(name): entry for name, entry in source.entries.items() if name.startswith(f"{MODEL}.")}
        states = {name: entry for name, entry in source.entries.items() if name.startswith(f"{OPTIMIZER}.")}
        weights.pop(stages.COPY, None)
        return cls(
            weights,
            {name: entry for name, entry in states.items() if parameter_of(name) != stages.COPY},
            next((stages.without_copies(meta) for meta in source.meta[OPTIMIZERS]), None),
        )


def _pipeline(path: Path, folder: Path, parts: Sequence[tuple[list[Any], list[Any]]], files: Mapping[int, Path]) -> Source:
    """What the stages of a pipeline have, each with its model files and optimizer files. See Note [Names in a pipeline] in ``stages``."""
    layers = {place: load(file, STUBS) for place, file in files.items()}
    named = {f"{place}.{key}": value for place, layer in layers.items() for key, value in layer.items()}
    buffers = [name for models, _ in parts for name in models[0].get("buffer_names") or ()]
    saved = [_saved(folder, [models[0] | {"module": named}], shards) for models, shards in parts]
    stated, ties = _stages(path, layers, buffers, saved)
    trained = {name: entry for stage in reversed(stated) for name, entry in stage.weights.items()}  # of copies, the first stage's
    ties |= stages.owners(layers, trained)
    rename = stages.first_place(ties)
    lost = {name: torch.empty(0) for name in trained if rename(name) not in named}  # tied layers that only masters tell of
    if missing := sorted({name.partition(".")[0] for name in lost if not name.startswith(stages.TIED)}):
        raise CheckpointError(f"{folder} is incomplete: it trains the layers {', '.join(missing)} of a pipeline, but has no file of them")
    shared = {rename(key): rename(name) for models, _ in parts for key, name in (models[0].get("shared_params") or {}).items()}
    again = {f"{place}.{key}": f"{places[0]}.{key}" for places in ties.values() for place in places[1:] for key in layers[place]}
    model = parts[0][0][0] | {"module": named | lost, "shared_params": shared | again, "buffer_names": [rename(name) for name in buffers]}
    entries, told = module_entries([model], {rename(name): entry for name, entry in trained.items()})
    entries |= {name: entry for stage in reversed(stated) for name, entry in stage.states.items()}
    optimizer = stages.merge([stage.optimizer for stage in stated if stage.optimizer is not None])
    members = {rename(name) for group in optimizer["groups"] for name in group["params"]}
    told["frozen"] = [name for name in told["frozen"] if name not in members]
    if not members or UNTOLD in members:
        del told["frozen"]  # nobody knows
    facts = saved[0].facts | {"pipeline_stages": len(parts)}
    meta = client_meta(model, told, [optimizer] if members else [], facts)
    source = Source(path, f"DeepSpeed, pipeline, ZeRO {facts['stage']}", meta, entries, facts).renamed(rename)
    called = [*map(str, layers), *dict.fromkeys(".".join(name.split(".")[:2]) for name in lost)]
    called = [layer for layer in called if any(key.startswith(f"{layer}.") for key in told["aliases"])]
    return replace(source, meta=source.meta | {MODULE: source.meta[MODULE] | {LAYERS: called}})


def _stages(
    path: Path, layers: stages.Layers, buffers: Sequence[str], saved: Sequence[_Sharded | _Plain]
) -> tuple[list[_Stage], dict[str, list[int]]]:
    """Each stage with names, where the files have numbers (without ZeRO) those that shapes tell; and ties that were found by the way."""
    if all(isinstance(part, _Sharded) for part in saved):
        return [_Stage(part.weights(), *part.optimizer()) for part in saved], {}
    states = [(part.weights(), *part.optimizer()) for part in saved]
    sources = [Source(path, "", {OPTIMIZERS: [told] if told else []}, weights | entries) for weights, entries, told in states]
    if not any(source.is_numbered for source in sources):
        return [_Stage({}, {}, None) for _ in saved], {}
    shapes = [numbers.shapes(source, 0) for source in sources]
    for twins in ({}, stages.twins(layers)):
        orders = stages.orders({place: layer for place, layer in layers.items() if place not in twins}, buffers, shapes)
        if orders is not None:
            flat = [[name for group in order for name in group] for order in orders]
            named = [_Stage.of(source.named([names])) for source, names in zip(sources, flat, strict=True)]
            return named, {str(first): [first, *(place for place in twins if twins[place] == first)] for first in set(twins.values())}
    return [_Stage({}, {}, {"groups": [{"params": [UNTOLD]}], "scalars": {}}) for _ in saved], {}


# ---- what all have


def module_entries(models: Sequence[Mapping[str, Any]], trained: Mapping[str, Entry]) -> tuple[dict[str, Entry], dict[str, Any]]:
    """The entries of the module, in its order, with random generators if we wrote them, and what is to be told of it."""
    model = models[0]
    aliases = aliases_of(model)
    names = list(dict.fromkeys((*aliases.values(), *(name for name in trained if not _is_numbered(name)))))
    frozen, keys = frozen_fragments(models), _keys(aliases)
    values = {name: trained.get(name) or frozen.get(name) or Entry.of(model["module"][keys[name]]) for name in names}
    averages = _averages(model)
    entries = {f"{MODEL}.{name}": value for name, value in (averages or values).items()}
    entries |= {f"{CURRENT}.{name}": value for name, value in values.items()} if averages else {}
    entries |= {name: Entry.of(value) for name, value in _ours(model).get("rng", {}).items()}
    told = {aliases.get(key, key) for key in model.get("buffer_names") or ()}
    buffers = [name for name in names if name in told]
    frozen_names = [name for name in names if name not in trained and name not in buffers]
    return entries, {"aliases": aliases, "buffers": buffers, "frozen": frozen_names}


def _is_numbered(name: str) -> bool:
    """Whether it is an entry, of ``_Plain.weights``, and no name."""
    kind, _, rest = name.partition(".")
    return kind == MODEL and is_number(rest)


def frozen_fragments(models: Sequence[Mapping[str, Any]]) -> dict[str, Entry]:
    """Stage 3: frozen parameters, of which every rank's model file has a part."""
    model = models[0]
    shapes = {name: shape for name, shape in (model.get("frozen_param_shapes") or {}).items() if math.prod(shape)}
    keys = _keys(aliases_of(model))
    names = [name for name in shapes if name not in keys or model["module"][keys[name]].numel() == 0]
    flat = of_stage(3, [{name: shapes[name]} for name in names], len(models))

    def fragment(rank: int, group: int) -> Tensor:
        return models[rank]["frozen_param_fragments"][names[group]].view(-1)

    return {
        name: Entry(tuple(shapes[name]), fragment(0, place).dtype, partial(flat.read, name, fragment)) for place, name in enumerate(names)
    }


def aliases_of(model: Mapping[str, Any]) -> dict[str, str]:
    """Each key of ``module`` and the first name of what it stands for.

    DeepSpeed tells it of tied parameters, with ZeRO only; what hooks of the module have renamed, we tell.
    """
    shared = model.get("shared_params")
    if shared is None:
        return tied(model["module"])
    told = model.get(EXTRA, {}).get("meta", {}).get(MODULE, {}).get("aliases", {})
    names = {key: name for key, name in told.items() if told.get(name) != name} | shared
    return {key: names.get(key, key) for key in model["module"]}


def _keys(aliases: Mapping[str, str]) -> dict[str, str]:
    """For each first name the first key that stands for it."""
    return {name: key for key, name in reversed(aliases.items())}


def client_meta(
    model: Mapping[str, Any], told: Mapping[str, Any], optimizers: list[dict[str, Any]], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """The user's ``client_state`` (Lightning keeps its own there); what is not in it, from the engine's counters."""
    client = {key: value for key, value in model.items() if key not in ENGINE_KEYS}
    if not _averages(model):
        client = _without_averaging(client)
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


_STALE = (EXTRA, "epoch", "global_step", "loops", "lr_schedulers", LOSS_SCALE, DATA)


def _averages(model: Mapping[str, Any]) -> dict[str, Entry]:
    """Of parameters and buffers, if we wrote them and they are those of the weights."""
    return {name: Entry.of(value) for name, value in _ours(model).get(AVERAGES, {}).items()}


def _without_averaging(client: Mapping[str, Any]) -> dict[str, Any]:
    """Without what Lightning's callback remembers of averages that are not there."""
    kept = {key: value for key, value in client.items() if key not in (CURRENT_STATE, AVERAGING_STATE)}
    if isinstance(callbacks := kept.get("callbacks"), Mapping):
        kept["callbacks"] = {name: told for name, told in callbacks.items() if not _is_averaging(told)}
    return kept


def _is_averaging(told: Any) -> bool:
    return isinstance(told, Mapping) and told.keys() == {"latest_update_step"}


def _ours(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """What we added when we wrote it, unless DeepSpeed has trained on since: programs hand the client state on from save to save."""
    extra = model.get(EXTRA, {})
    return extra if extra.get("global_steps") == model.get("global_steps") else {}


def scaler_facts(shard: Mapping[str, Any]) -> dict[str, Any] | None:
    scaler = shard.get("loss_scaler")
    return {key: value for key, value in vars(scaler).items() if key != "dtype"} if isinstance(scaler, LossScaler) else None


def _ranks(folder: Path, pattern: Any, model_rank: int) -> list[Path]:
    """The files of one kind and model-parallel rank, by data rank; a gap is named."""
    matches = ((file, pattern.fullmatch(file.name)) for file in folder.iterdir())
    found = {int(match["rank"] or 0): file for file, match in matches if match and int(match["mp"]) == model_rank}
    if gaps := sorted(set(range(max(found, default=-1) + 1)) - found.keys()):
        example = next(iter(found.values())).name
        raise CheckpointError(f"{folder} is incomplete: the files of data ranks {gaps} are missing beside {example}")
    return [found[rank] for rank in sorted(found)]


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
                        entries[state_entry(0, name, key)] = self._entry(name, value.dtype, partial(self._state, key))
                    elif isinstance(value, Tensor):
                        entries[state_entry(0, name, key)] = Entry.of(value)
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
        if state_entry(0, name, "step") not in entries and "step" not in scalars.get(name, {}):
            entries[state_entry(0, name, "step")] = Entry.of(torch.tensor(float(step)))
