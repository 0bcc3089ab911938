"""The native checkpoint: a folder written by all ranks together, complete only once it has its name.

Note [A complete folder]
~~~~~~~~~~~~~~~~~~~~~~~~
::

    last/
      .metadata, __0_0.distcp, __1_0.distcp, ...   torch.distributed.checkpoint: every tensor, as boxes of the whole
      meta.pt                                      everything else, in plain containers
      sums.json                                    size and CRC-32 of each of these files, so that damage is found and named

Ranks write into ``last.partial``; when all have written, rank 0 adds ``meta.pt`` and ``sums.json`` and renames the folder to ``last``.
So a folder under its own name is complete, and one called ``*.partial`` never is. If ``last`` exists, it is first renamed to
``last.replaced`` and deleted once the new one has its name: at every moment one of them is complete, and reading falls back on
``last.replaced``. Loading reads every file once more than it must, each rank its share of them, and stops before anything is loaded if one
is not what was written.

Nothing in the folder depends on the layout: tensors are named and shaped as in the user's whole module.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_par.checkpoint.errors import CheckpointError
from lightning_par.checkpoint.files import write_through
from lightning_par.checkpoint.shard import LoadPlanner, SavePlanner, Shard
from lightning_par.checkpoint.source import require_fit
from lightning_par.comm import Group

META, INDEX, SUMS, PARTIAL, REPLACED = "meta.pt", ".metadata", "sums.json", ".partial", ".replaced"
CHUNK = 2**20
Sums = dict[str, tuple[int, int]]
"""Size and CRC-32 of files, by name."""


def save(folder: str | os.PathLike[str], tensors: Mapping[str, Shard], meta: Mapping[str, Any], world: Group) -> None:
    """Write ``tensors`` (each rank its parts) and ``meta`` (rank 0's). All ranks call. See Note [A complete folder].

    Raises:
        CheckpointError: on every rank, if any rank cannot write.
    """
    target = Path(folder)
    partial = target.with_name(target.name + PARTIAL)
    _on_rank_0(world, lambda: _begin(target, partial))
    mine: Sums = {}
    _everywhere(world, lambda: mine.update(_write(partial, tensors, world)))
    sums = {name: told for rank in world.gather_objects(mine) for name, told in rank.items()}
    _on_rank_0(world, lambda: _complete(target, partial, meta, sums))


def check(folder: str | os.PathLike[str], *, index: int = 0, ranks: int = 1) -> None:
    """Read the files again and compare them with what was written: one in ``ranks`` of them, from ``index`` on. Sizes of all.

    Raises:
        CheckpointError: files are missing, cut short or damaged; all of them are named.
    """
    source = complete_folder(folder)
    if not (source / SUMS).is_file():  # written before there were sums
        return
    with _damage_is_named(source):
        sums: Sums = {name: tuple(told) for name, told in json.loads((source / SUMS).read_text()).items()}
    faults = []
    for place, (name, (size, crc)) in enumerate(sorted(sums.items())):
        file = source / name
        if not file.is_file():
            faults.append(f"{name} is missing")
        elif file.stat().st_size != size:
            faults.append(f"{name} has {file.stat().st_size:,} bytes, but {size:,} were written")
        elif place % ranks == index and _sum(file)[1] != crc:
            faults.append(f"{name} holds other bytes than were written")
    if faults:
        raise CheckpointError(f"checkpoint {source} is damaged: {'; '.join(faults)}")


def _sum(file: Path) -> tuple[int, int]:
    crc, size = 0, 0
    with open(file, "rb") as opened:
        while part := opened.read(CHUNK):
            crc, size = zlib.crc32(part, crc), size + len(part)
    return size, crc


def is_native(folder: str | os.PathLike[str]) -> bool:
    """Whether this is a complete checkpoint of ours."""
    return _found(Path(folder)) is not None


def read_meta(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The plain part, on CPU. Any rank may call alone."""
    source = complete_folder(folder)
    with _damage_is_named(source):
        return torch.load(source / META, map_location="cpu", weights_only=True)


def read_index(folder: str | os.PathLike[str]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Whole shape and dtype of every tensor in the checkpoint. Any rank may call alone."""
    source = complete_folder(folder)
    with _damage_is_named(source):
        metadata = dcp.FileSystemReader(source).read_metadata().state_dict_metadata
    return {name: (entry.size, entry.properties.dtype) for name, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}


def read_tensors(folder: str | os.PathLike[str], tensors: Mapping[str, Shard], reader: dcp.FileSystemReader | None = None) -> None:
    """Fill the data of ``tensors``, whatever layout wrote them. Ranks read on their own: any rank may call alone.

    Args:
        reader: of the folder, for those who call often.

    Raises:
        CheckpointError: a tensor is missing in the checkpoint, or has another shape there; all of them are named.
    """
    source, index = complete_folder(folder), read_index(folder)
    wanted = {name: shard for name, shard in tensors.items() if shard.spec.span.size}
    require_fit(source, {name: shape for name, (shape, _) in index.items()}, wanted)
    if wanted:
        with _damage_is_named(source), _no_word_of_single_processes():
            dcp.load(dict(wanted), storage_reader=reader or dcp.FileSystemReader(source), planner=LoadPlanner(), no_dist=True)


@contextmanager
def _damage_is_named(source: Path) -> Iterator[None]:
    """Whatever a reader says of a file that is cut short or gone, say of which checkpoint."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        causes = [failure[0] for failure in error.failures.values()] if isinstance(error, CheckpointException) else [error]
        told = "; ".join(f"{type(cause).__name__}: {cause}" for cause in causes)
        raise CheckpointError(f"checkpoint {source} is damaged or incomplete: {told}") from error


def _begin(target: Path, partial: Path) -> None:
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file: a checkpoint of ours is a folder; choose another path or delete the file")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _write(partial: Path, tensors: Mapping[str, Shard], world: Group) -> Sums:
    """Write this rank's files; what they are to be known by."""
    alone = world.size == 1
    try:
        with _no_word_of_single_processes():
            dcp.save(dict(tensors), checkpoint_id=partial, planner=SavePlanner(), process_group=world.handle, no_dist=alone)
    except CheckpointException as error:  # every rank has it, with the errors of all
        mine = error.failures.get(world.index)
        raise CheckpointError("another rank could not write" if mine is None else f"{type(mine[0]).__name__}: {mine[0]}") from error
    return {file.name: _sum(file) for file in partial.glob(f"__{world.index}_*")}


@contextmanager
def _no_word_of_single_processes() -> Iterator[None]:
    """torch warns that it takes a rank which works on its own for the only one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _complete(target: Path, partial: Path, meta: Mapping[str, Any], sums: Sums) -> None:
    write_through(partial / META, lambda file: torch.save(dict(meta), file))
    sums = sums | {name: _sum(partial / name) for name in (META, INDEX)}
    write_through(partial / SUMS, lambda file: file.write(json.dumps(sums, indent=1).encode()))
    replaced = target.with_name(target.name + REPLACED)
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        target.rename(replaced)
    partial.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)


def _found(folder: Path) -> Path | None:
    for candidate in (folder, folder.with_name(folder.name + REPLACED)):
        if (candidate / META).is_file() and (candidate / INDEX).is_file() and not candidate.name.endswith(PARTIAL):
            return candidate
    return None


def complete_folder(folder: str | os.PathLike[str]) -> Path:
    """Where the checkpoint ``folder`` lies complete; a CheckpointError if nowhere."""
    found = _found(Path(folder))
    if found is None:
        raise CheckpointError(f"{folder} is not a complete checkpoint of lightning_par (a folder with {META} and .metadata)")
    return found


def _everywhere(world: Group, action: Any) -> None:
    """Run ``action`` on every rank; if it fails on one, all raise."""
    error = None
    try:
        action()
    except Exception as exception:
        error = exception
    failures = [(rank, text) for rank, text in enumerate(world.gather_objects(None if error is None else f"{error}")) if text is not None]
    if failures:
        listed = "\n".join(f"  - rank {rank}: {text}" for rank, text in failures)
        raise CheckpointError(f"saving the checkpoint failed:\n{listed}") from error


def _on_rank_0(world: Group, action: Any) -> None:
    _everywhere(world, action if world.index == 0 else lambda: None)
