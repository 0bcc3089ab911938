"""Universal checkpoints: a folder for each parameter (checkpoint/ds_to_universal.py, checkpoint/universal_checkpoint.py).

::

    latest_universal                     the name of the folder below
    universal/mp_rank_00_model_states.pt a model file, for the names, frozen parameters, buffers and counters
    universal/zero/optimizer_state.pt    param groups, loss scaler
    universal/zero/<name>/fp32.pt        {"param": the master, "cat_dim": 0}; from stage 3 the elements alone, without shape
                         /exp_avg.pt ... the same for each key of state; step.pt is the number alone

DeepSpeed looks for the model file under the name that the loading engine would give it, and takes the step of stage 3 from another
place; what is written here has both, so that an engine of any stage and any number of ranks loads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_par.checkpoint.deepspeed import names
from lightning_par.checkpoint.deepspeed.flat import of_stage
from lightning_par.checkpoint.deepspeed.read import client_meta, load_models, module_entries, scaler_facts
from lightning_par.checkpoint.deepspeed.write import Target, Trained, loss_scale, model_state
from lightning_par.checkpoint.errors import CheckpointError
from lightning_par.checkpoint.files import Scratch, load, require_file_names, save
from lightning_par.checkpoint.source import Entry, Source, state_entry
from lightning_par.checkpoint.whole import AVERAGES, EXTRA

FOLDER, LATEST, STATE = "universal", "latest_universal", "optimizer_state.pt"


def open_universal(path: Path) -> Source:
    """What ``ds_to_universal`` wrote, from any stage; ``path`` may be the folder with ``latest_universal``, or the one it names.

    Raises:
        CheckpointError: a file is missing, damaged, or names what is no plain data; or a parameter was cut over tensor-parallel ranks in
            a way that only the engine can undo.
    """
    folder = names.tag_folder(path, LATEST)
    models = load_models(folder)
    if models[0].get("mp_world_size", 1) > 1:
        raise CheckpointError(
            f"{folder} was made of files of {models[0]['mp_world_size']} pipeline or tensor ranks, and does not hold what is not trained: "
            "read the checkpoint that it was made of"
        )
    state = load(_there(folder / "zero" / STATE), names.STUBS)
    shapes = [(name, tuple(shape)) for group in models[0]["param_shapes"] for name, shape in group.items()]
    require_file_names(folder, "the parameter", [name for name, _ in shapes])
    keys = {file.stem for name, _ in shapes for file in (folder / "zero" / name).glob("*.pt")}  # each parameter has all of them
    trained = {name: _entry(folder, name, "fp32", shape) for name, shape in shapes}
    entries = {
        state_entry(0, name, key): _entry(folder, name, key, shape) for name, shape in shapes for key in sorted(keys - {"fp32", "step"})
    }
    for name, _ in shapes if "step" in keys else ():
        step = load(_there(folder / "zero" / name / "step.pt"), names.STUBS)
        entries[state_entry(0, name, "step")] = Entry.of(step if isinstance(step, Tensor) else torch.tensor(float(step)))
    common = state.get("optimizer_state_dict", {}).get("state", {})
    groups = []
    for group in state["param_groups"]:
        members = [name for part in group["params"] for name in models[0]["param_shapes"][part]]
        step = group.pop("step", None) if "step" in group else common.get(group["params"][0], common.get(0, {})).get("step")
        for name in members:
            if step is not None:
                entries.setdefault(state_entry(0, name, "step"), Entry.of(torch.as_tensor(step, dtype=torch.float32)))
        groups.append(group | {"params": members})
    module, told = module_entries(models, trained)
    facts = {key: models[0].get(key) for key in ("ds_version", "skipped_steps", "global_samples")} | {"loss_scaler": scaler_facts(state)}
    meta = client_meta(models[0], told, [{"groups": groups, "scalars": {}}], facts)
    return Source(path, "DeepSpeed, universal", meta, module | entries, facts, tuple(sorted(folder.rglob("*.pt"))))


def _there(file: Path) -> Path:
    if not file.is_file():
        raise CheckpointError(f"{file} is missing: this is no complete universal checkpoint")
    return file


def _entry(folder: Path, name: str, key: str, shape: tuple[int, ...]) -> Entry:
    return Entry(shape, torch.float32, partial(_read, _there(folder / "zero" / name / f"{key}.pt"), shape))


def _read(file: Path, shape: tuple[int, ...]) -> Tensor:
    told = load(file, names.STUBS)
    tensor = told["param"] if isinstance(told, Mapping) else told
    if tensor.numel() != torch.Size(shape).numel():
        raise CheckpointError(f"{file} holds {tuple(tensor.shape)}, but the model file says {shape}")
    return tensor.view(shape)


def write_universal(source: Source, folder: Path, target: Target) -> None:
    """``source`` as a universal checkpoint that an engine of any ZeRO stage loads; of ``target`` only ``dtype`` matters.

    Raises:
        CheckpointError: as for ``write_deepspeed``, or a name cannot be that of a folder.
    """
    trained, place = Trained.of(source), folder / FOLDER
    members = [name for shapes in trained.shapes for name in shapes]
    require_file_names(source.path, "the parameter", members)
    require_file_names(source.path, "the optimizer's state", trained.moments)
    if taken := [*({STATE} & {*members}), *({"fp32"} & {*trained.moments})]:
        raise CheckpointError(f"{source.path}: {', '.join(taken)} is the name of another file in universal checkpoints")
    (place / "zero").mkdir(parents=True)
    whole = Target(2, 1, target.dtype)
    flat = of_stage(2, trained.shapes, 1)
    model = model_state(trained, flat, whole, Scratch(folder))
    save(model, place / names.model_file(2))
    model[EXTRA].pop(AVERAGES, None)
    save(model, place / names.model_file(3))
    for group, shapes in enumerate(flat.groups):
        for name in shapes:
            part = place / "zero" / name
            part.mkdir()
            save(_told(trained.weight(name)), part / "fp32.pt")
            for key in trained.moments:
                save(_told(trained.moment(key, name)), part / f"{key}.pt")
            if "step" in trained.common[group]:
                save(trained.common[group]["step"], part / "step.pt")
    groups = [trained.options(group) | {"params": [group]} for group in range(len(flat.groups))]
    common = dict(enumerate(trained.common))
    state = {
        **loss_scale(source, whole, always=True),
        "zero_stage": 2,
        "partition_count": [1] * len(groups),
        "ds_version": names.VERSION,
        "param_groups": groups,
        "optimizer_state_dict": {"state": common, "param_groups": groups},
    }
    save(state, place / "zero" / STATE, names.pickle_module)
    (folder / LATEST).write_text(FOLDER)


def _told(value: Tensor) -> dict[str, Any]:
    """As float32, with nothing else of the storage it may lie in."""
    return {"param": value.to(torch.float32, copy=True), "cat_dim": 0}
