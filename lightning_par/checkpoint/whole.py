"""Our own folders and Lightning's single files, as a ``Source`` of whole tensors, and written from one. In one process, without ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from typing_extensions import override

from lightning_par.checkpoint import native
from lightning_par.checkpoint.errors import CheckpointError
from lightning_par.checkpoint.files import Scratch, load, save
from lightning_par.checkpoint.index import IndexReader
from lightning_par.checkpoint.shard import Shard
from lightning_par.checkpoint.source import (
    CURRENT,
    CURRENT_STATE,
    EXTRA_STATES,
    MODEL,
    MODULE,
    NUMBERED,
    OPTIMIZERS,
    Contents,
    Entry,
    Source,
    is_extra,
    rng_of,
    state_entry,
    states,
)
from lightning_par.comm import Group
from lightning_par.comm.trace import Trace
from lightning_par.layout import ShardSpec

EXTRA = "lightning_par"
"""The key under which files of other formats carry what only we know: layout, generators, names of the optimizers' parameters."""
AVERAGES = "averages"
"""A key in that: averages of the weights, where a format has place for the weights that are trained alone."""


# ---- folders of ours


@dataclass(frozen=True)
class NativeSource(Source):
    """Ranks read from it only the boxes that they hold.

    Attributes:
        stored: what entries are called in the files, in the same order; None: it is in none of them.
    """

    stored: tuple[str | None, ...] = ()

    @override
    def fill(self, shards: Mapping[str, Shard]) -> None:
        stored = dict(zip(self.entries, self.stored, strict=True))
        given = {name: shard for name, shard in shards.items() if stored.get(name, name) is None}
        wanted = {stored.get(name, name): shard for name, shard in shards.items() if name not in given}
        native.read_tensors(self.path, wanted, mark=self.mark)
        super().fill(given)

    @override
    def with_weights(self, weights: Mapping[str, str | Tensor]) -> Source:
        stored, chosen = dict(zip(self.entries, self.stored, strict=True)), super().with_weights(weights)
        stored |= {f"{MODEL}.{name}": None if isinstance(w, Tensor) else stored[w] for name, w in weights.items()}
        return replace(chosen, stored=tuple(stored[name] for name in chosen.entries))

    @override
    def check(self, *, index: int = 0, ranks: int = 1) -> None:
        native.check(self.path, index=index, ranks=ranks, mark=self.mark)


def open_native(path: Path) -> Source:
    """A native folder, complete."""
    mark = native.mark_of(path)
    with native.unreplaced(path, mark) as place:
        reader, index, meta = IndexReader(place), native.read_index(path), native.read_meta(path)

    def entry(name: str, shape: torch.Size, dtype: torch.dtype) -> Entry:
        def read() -> Tensor:
            whole = Shard.whole(torch.empty(shape, dtype=dtype), writes=False)
            native.read_tensors(path, {name: whole}, reader, mark=mark)
            return whole.data

        return Entry(tuple(shape), dtype, read)

    entries = {name: entry(name, *told) for name, told in index.items()}
    return NativeSource(path, "native folder", meta, entries, {"layout": meta.get("layout")}, stored=tuple(index), mark=mark)


def write_native(source: Source, path: Path) -> None:
    """``source`` as a native folder, written by one process, a tensor at a time."""
    shards = {name: _Lazy.of(entry, Scratch(path.parent)) for name, entry in source.entries.items()}
    native.save(path, shards, source.meta, Group("world", trace=Trace()))


@dataclass(frozen=True)
class _Lazy(Shard):
    """A whole tensor that is read when it is written; torch holds on to it then until all are written, so it waits in a file."""

    entry: Entry | None = None
    scratch: Scratch | None = None

    @classmethod
    def of(cls, entry: Entry, scratch: Scratch) -> _Lazy:
        like = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        return cls(ShardSpec.whole(like), like, entry=entry, scratch=scratch)

    @override
    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert self.entry is not None
        assert self.scratch is not None
        return self.scratch.keep(self.entry.read())


# ---- single files of Lightning


def is_single(path: Path) -> bool:
    return path.is_file()


def open_single(path: Path) -> Source:
    """Lightning's ``.ckpt``, or a file of weights alone. Parameters of optimizers are numbered, unless we wrote it or torch named them.

    Raises:
        CheckpointError: the file is damaged, names what is no plain data, or is no checkpoint.
    """
    loaded = load(path)
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{path} holds a {type(loaded).__name__}, no checkpoint")
    weights = loaded.pop("state_dict") if "state_dict" in loaded else loaded
    extras = {key: weights.pop(key) for key in [*weights] if isinstance(key, str) and is_extra(key)}
    if not (weights and all(isinstance(value, Tensor) for value in weights.values())):
        raise CheckpointError(f"{path} is no checkpoint of Lightning: it has no state_dict of tensors")
    if odd := [f"{name} ({_oddity(value)})" for name, value in weights.items() if _oddity(value)]:
        raise CheckpointError(f"{path} holds weights of kinds that only torch.load reads: {', '.join(odd)}")
    meta = {"lr_schedulers": []} if weights is loaded else loaded
    extra = meta.pop(EXTRA, {})
    aliases = tied(weights) | {key: name for key, name in extra.get(MODULE, {}).get("aliases", {}).items() if key in weights}
    entries: dict[str, Entry] = {}
    for key, name in aliases.items():
        entries.setdefault(f"{MODEL}.{name}", Entry.of(weights[key]))
    current = meta.pop(CURRENT_STATE) if _is_current(meta) else {}
    extras |= {key: value for key, value in current.items() if is_extra(key)}
    entries |= {f"{CURRENT}.{aliases.get(key, key)}": Entry.of(value) for key, value in current.items() if not is_extra(key)}
    metas = []
    for index, optimizer in enumerate(meta.pop(OPTIMIZERS, [])):
        found, told = number(optimizer, index)
        entries |= found
        metas.append(told)
    entries |= {name: Entry.of(value) for name, value in extra.get("rng", {}).items()}
    told = extra.get(MODULE, {"aliases": aliases}) | ({EXTRA_STATES: extras} if extras else {})
    meta |= {OPTIMIZERS: metas, MODULE: told} | extra.get("meta", {})
    source = Source(path, "single file", meta, entries, files=(path,))
    return source.named(extra["names"]) if "names" in extra else source


def _is_current(meta: Mapping[str, Any]) -> bool:
    """Whether it has, under Lightning's key, the weights that were trained."""
    told = meta.get(CURRENT_STATE)
    values = [value for key, value in told.items() if not is_extra(key)] if isinstance(told, Mapping) else []
    return bool(values) and all(isinstance(value, Tensor) and not _oddity(value) for value in values)


def _oddity(value: Tensor) -> str:
    """Why its elements are not simply in memory; empty if they are."""
    if value.is_meta:
        return "meta"
    return (
        "quantized" if value.is_quantized else "nested" if value.is_nested else "" if value.layout is torch.strided else str(value.layout)
    )


def tied(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Each key and the first one with the same memory."""
    first: dict[Any, str] = {}
    return {
        name: name if not value.numel() else first.setdefault((value.data_ptr(), value.shape, value.stride()), name)
        for name, value in weights.items()
    }


def number(optimizer: Mapping[str, Any], index: int) -> tuple[dict[str, Entry], dict[str, Any]]:
    """The state dict of a torch optimizer as entries and meta, with numbers for names."""
    entries, scalars = {}, {}
    for place, state in optimizer["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                entries[state_entry(index, f"{NUMBERED}{place}", key)] = Entry.of(value)
            else:
                scalars.setdefault(f"{NUMBERED}{place}", {})[key] = value
    groups = [group | {"params": [f"{NUMBERED}{place}" for place in group["params"]]} for group in optimizer["param_groups"]]
    return entries, {"groups": groups, "scalars": scalars}


def write_single(source: Source, path: Path) -> None:
    """``source`` as a ``.ckpt`` that plain Lightning loads: weights, optimizers, schedulers, loops."""
    save(as_single(source, Scratch(path.parent).keep), path)


def as_single(source: Source, keep: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """What the file of ``write_single`` holds. ``keep``: where a tensor, once read, stays."""
    contents = Contents.of(source)
    weights = {name: keep(source.read(f"{MODEL}.{name}")) for name in dict.fromkeys(contents.aliases.values())}
    meta = dict(source.meta)
    optimizers = [_state_dict(source, index, told, keep) for index, told in enumerate(meta.pop(OPTIMIZERS, []))]
    told = dict(meta.pop(MODULE, {"aliases": contents.aliases}))
    extras = told.pop(EXTRA_STATES, {})
    extra = {
        MODULE: told,
        "names": [[name for group in told["groups"] for name in group["params"]] for told in source.meta.get(OPTIMIZERS, [])],
        "meta": {key: meta.pop(key) for key in ("layout",) if key in meta},
        "rng": {name: entry.read() for name, entry in rng_of(source)},
    }
    named = {key: weights[name] for key, name in contents.aliases.items()} | extras
    current = {entry.removeprefix(f"{CURRENT}."): keep(source.read(entry)) for entry in source.current}
    if current:
        meta[CURRENT_STATE] = {key: current[name] for key, name in contents.aliases.items() if name in current} | extras
    return meta | {"state_dict": named, OPTIMIZERS: optimizers, EXTRA: extra}


def _state_dict(source: Source, index: int, meta: Mapping[str, Any], keep: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    names = [name for group in meta["groups"] for name in group["params"]]
    places, found = {name: place for place, name in enumerate(names)}, states(source, index)
    state = {
        place: {key: keep(entry.read()) for key, entry in found.get(name, {}).items()} | meta["scalars"].get(name, {})
        for name, place in places.items()
        if name in found or name in meta["scalars"]
    }
    return {"state": state, "param_groups": [group | {"params": [places[name] for name in group["params"]]} for group in meta["groups"]]}
