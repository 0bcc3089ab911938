"""Folders of Hugging Face transformers: ``config.json`` and safetensors files, in the names of the HF model.

A safetensors file is the length of its header (8 bytes, little-endian), the header (JSON: of each tensor dtype, shape, and where its bytes
begin and end) and the bytes (safetensors' README, "Format"). It is written here a tensor at a time, without the library. Files of more than
``SHARD`` bytes are cut into several, which ``model.safetensors.index.json`` lists (transformers, ``PreTrainedModel.save_pretrained``).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from lightning_par.checkpoint.deepspeed.write import DTYPES, Target
from lightning_par.checkpoint.errors import CheckpointError
from lightning_par.checkpoint.files import require_file_names, write_through
from lightning_par.checkpoint.source import MODEL, MODULE, OPTIMIZERS, Entry, Source

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
HUGGINGFACE = "huggingface"
"""In what is told of the module: prefix (where in it the HF model is), config, and tied (by a key that transformers ties to another, that
other); or several: where in it HF models are, if there is not one around all others; or adapted: what has one in it, if its weights
have other names than those of transformers."""
SHARD = 5 * 10**9
NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
}
"""What safetensors calls dtypes. Its float8 is not read: such weights are multiples of scales that lie beside them."""


def is_hf(path: Path) -> bool:
    """Whether ``path`` is a folder of a transformers model with safetensors."""
    return (path / CONFIG).is_file() and ((path / SINGLE).is_file() or (path / INDEX).is_file())


def open_hf(path: Path) -> Source:
    """The weights; there is nothing else in such a folder.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    try:
        config = json.loads((path / CONFIG).read_text())
        files = sorted(set(json.loads((path / INDEX).read_text())["weight_map"].values())) if (path / INDEX).is_file() else [SINGLE]
        require_file_names(path / INDEX, "the file", files)
        entries = {f"{MODEL}.{name}": entry for file in files for name, entry in _tensors(path / file).items()}
        facts = {"model_type": config.get("model_type")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise CheckpointError(f"{path} is damaged or incomplete: {type(error).__name__}: {error}") from error
    names = [name.removeprefix(f"{MODEL}.") for name in entries]
    told = {"aliases": {name: name for name in names}, "buffers": [], HUGGINGFACE: {"prefix": "", "config": config}}
    meta = {MODULE: told, OPTIMIZERS: [], "lr_schedulers": []}
    return Source(path, "Hugging Face", meta, entries, facts)


def uncompiled(name: str) -> str:
    """The name of a weight before ``torch.compile`` put something around the modules that it is in."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def hf_part(source: Source) -> Source:
    """The model of transformers that is in a LightningModule, alone and under its own names.

    A weight with several names in it has one in the folder where transformers ties them by itself, and otherwise all of them.

    Raises:
        CheckpointError: nothing tells that there is one, there are several, weights of it are missing, or it is another than its class
            makes of its config.
    """
    module = source.meta.get(MODULE, {})
    if HUGGINGFACE not in module:
        raise CheckpointError(
            f"{source.path} does not tell of a model of Hugging Face transformers: its module had none, or another program wrote it"
        )
    told = module[HUGGINGFACE]
    if "several" in told:
        raise CheckpointError(
            f"{source.path} holds several models of transformers, {', '.join(told['several'])}, and a folder is one: convert it with "
            "format=ckpt, load the weights of each into its model, and call save_pretrained"
        )
    if "adapted" in told:
        raise CheckpointError(
            f"{source.path}: {told['adapted']} has other weights than a model of transformers, as with adapters, and a folder has those of "
            "such a model: merge adapters into the model before it is saved, or convert it with format=ckpt"
        )
    prefix, tied = told["prefix"], told.get("tied", {})
    stored = [name.removeprefix(f"{MODEL}.") for name in source.weights]
    firsts = module["aliases"] | {name: name for name in stored if name not in module["aliases"].values()}
    names: dict[tuple[str, str], str] = {}
    for key, first in firsts.items():
        if key.startswith(prefix):
            name = uncompiled(key.removeprefix(prefix))
            names.setdefault((first, tied.get(name, name)), name)
    if lost := [name for (first, _), name in names.items() if first not in stored] or ([] if names else ["everything"]):
        raise CheckpointError(f"{source.path} lacks of the model of transformers: {', '.join(lost)}")
    if "changed" in told:
        kind, made = ", ".join(told["config"].get("architectures") or ()), told["changed"]
        what = " and ".join(f"{verb} {_listed(made[verb])}" for verb in ("has", "lacks") if made[verb])
        raise CheckpointError(
            f"{source.path}: {prefix.removesuffix('.') or 'it'} ({kind}) {what}, unlike a model of its class and config, which is what "
            "from_pretrained makes and would fill up at random: undo what changed the model, such as adapters, before it is saved, or "
            "convert it with format=ckpt"
        )
    entries = {f"{MODEL}.{name}": source.entries[f"{MODEL}.{first}"] for (first, _), name in names.items()}
    return replace(source, entries=entries, meta={MODULE: {HUGGINGFACE: told | {"prefix": ""}}})


def write_hf(source: Source, folder: Path, target: Target) -> None:
    """What ``hf_part`` gave, rounded to ``target.dtype``, as a folder that ``from_pretrained`` loads.

    Raises:
        CheckpointError: such a folder has no place for tensors of a dtype; all of them are named.
    """
    dtype = DTYPES[target.dtype]
    entries = {name.removeprefix(f"{MODEL}."): entry for name, entry in source.entries.items()}
    if odd := [f"{name} ({_called(entry.dtype)})" for name, entry in entries.items() if _stored(entry, dtype) not in NAMES]:
        raise CheckpointError(
            f"{source.path} cannot become a folder of transformers, which has no place for {', '.join(odd)}: only for floating-point "
            "numbers, whole numbers and booleans. Convert it with format=ckpt"
        )
    folder.mkdir()
    files = _cut({name: (entry.shape, _stored(entry, dtype)) for name, entry in entries.items()})
    titles = [SINGLE] if len(files) == 1 else [f"model-{place + 1:05d}-of-{len(files):05d}.safetensors" for place in range(len(files))]
    for title, members in zip(titles, files, strict=True):
        _write(folder / title, members, entries)
    if len(files) > 1:
        total = sum(_bytes(*what) for members in files for what in members.values())
        weight_map = {name: title for title, members in zip(titles, files, strict=True) for name in members}
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))
    config = source.meta[MODULE][HUGGINGFACE]["config"] | {"dtype": _called(dtype)}
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _listed(names: Sequence[str]) -> str:
    """The first of them: layers repeat what the first ones tell."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _stored(entry: Entry, dtype: torch.dtype) -> torch.dtype:
    return dtype if entry.dtype.is_floating_point else entry.dtype


def _called(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _cut(tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> list[dict[str, tuple[tuple[int, ...], torch.dtype]]]:
    """Into files of at most ``SHARD`` bytes, but at least one tensor."""
    files: list[dict[str, Any]] = [{}]
    filled = 0
    for name, what in tensors.items():
        if files[-1] and filled + _bytes(*what) > SHARD:
            files.append({})
            filled = 0
        files[-1][name] = what
        filled += _bytes(*what)
    return files


def _write(file: Path, members: Mapping[str, tuple[tuple[int, ...], torch.dtype]], entries: Mapping[str, Entry]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in members.items():
        begin, end = end, end + _bytes(shape, dtype)
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    def write(opened: IO[bytes]) -> None:
        opened.write(struct.pack("<Q", len(text)) + text)
        for name, (_, dtype) in members.items():
            opened.write(entries[name].read().to(dtype).contiguous().reshape(-1).view(torch.uint8).numpy())

    write_through(file, write)


def _tensors(file: Path) -> dict[str, Entry]:
    size = file.stat().st_size
    with open(file, "rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        start = 8 + length
        header = json.loads(opened.read(length)) if start <= size else None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} is damaged: it does not begin with the header of a safetensors file")
    header.pop("__metadata__", None)
    dtypes = {name: dtype for dtype, name in NAMES.items()}
    found = {}
    for name, told in header.items():
        begin, end = told["data_offsets"]
        if told["dtype"] not in dtypes:
            raise CheckpointError(f"{file}: {name} has the dtype {told['dtype']}, which is not read: only {', '.join(dtypes)}")
        shape, dtype = tuple(told["shape"]), dtypes[told["dtype"]]
        if end - begin != _bytes(shape, dtype) or begin < 0 or start + end > size:
            raise CheckpointError(f"{file} is damaged: {name} does not fit in it")
        found[name] = Entry(shape, dtype, partial(_read, file, start + begin, shape, dtype))
    return found


def _read(file: Path, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    data = np.fromfile(file, np.uint8, _bytes(shape, dtype), offset=start)
    return torch.from_numpy(data).view(dtype).view(shape)
