"""The native checkpoint: a folder written by all ranks together, complete only once it has its name.

Note [A complete folder]
~~~~~~~~~~~~~~~~~~~~~~~~
::

    last/
      .metadata, __0_0.distcp, __1_0.distcp, ...   torch.distributed.checkpoint: every tensor, as boxes of the whole
      meta.pt                                      everything else, in plain containers
      sums.json                                    size and CRC-32 of each of these files, so that damage is found and named

Ranks write into ``last.partial``. When all have told rank 0 what they have written, it sees that all of it is there, adds the index,
``meta.pt`` and ``sums.json``, and renames the folder to ``last``. So a folder under its own name is complete, and one called ``*.partial``
never is. If ``last`` exists, it is first renamed to ``last.replaced`` and deleted once the new one has its name: at every moment one of
them is complete, and reading falls back on ``last.replaced``. What is deleted is first renamed to a ``*.partial`` of its own. Loading
reads every file once more than it must, each rank its share of them, and stops before anything is loaded if one is not what was written.

Rank 0 holds ``last.partial`` from before the first file is written until the old checkpoint is deleted, as Note [Whose folder it is] in
``files`` tells; by then the folder is called ``last``. So ``last`` is in somebody's hands if either of the two is held, and nobody else
writes, renames or empties it then: see ``_alone``. A crash may leave ``*.partial`` and ``last.replaced``. The next save to the same parent
gives ``last.replaced`` its name back if nothing else has it, and deletes the rest, but for what is in somebody's hands.

Who reads a checkpoint while another takes its place may find files of both, or none. Its sums are its mark: if they are others afterwards,
that is what is told, whatever the reading came to (``unreplaced``).

Nothing in the folder depends on the layout: tensors are named and shaped as in the user's whole module.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import secrets
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from typing_extensions import override

from lightning_par.checkpoint.errors import CheckpointError
from lightning_par.checkpoint.files import Hold, held, is_held, load, sync_folder, write_through
from lightning_par.checkpoint.index import INDEX, IndexReader
from lightning_par.checkpoint.shard import LoadPlanner, SavePlanner, Shard
from lightning_par.checkpoint.source import require_fit
from lightning_par.comm import Group

META, SUMS, PARTIAL, REPLACED = "meta.pt", "sums.json", ".partial", ".replaced"
OURS = re.compile(r"(\.metadata|__(?P<rank>\d+)_\d+\.distcp|meta\.pt|sums\.json)(\.tmp)?")
"""The names of our files."""
DELETED = re.compile(r"\.[0-9a-f]{16}\.partial")
"""What folders are called while they are deleted."""
CHUNK = 2**20
Sums = dict[str, tuple[int, int]]
"""Size and CRC-32 of files, by name."""
T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """What a rank has written: its boxes, where they lie, and its files."""

    plan: SavePlan
    results: Sequence[WriteResult]
    sums: Sums


def save(folder: str | os.PathLike[str], tensors: Mapping[str, Shard], meta: Mapping[str, Any], world: Group) -> None:
    """Write ``tensors`` (each rank its parts) and ``meta`` (rank 0's). All ranks call. See Note [A complete folder].

    Raises:
        CheckpointError: on every rank, if any rank cannot write.
    """
    save_awaited(folder, lambda: tensors, meta, world)


def save_awaited(folder: str | os.PathLike[str], tensors: Callable[[], Mapping[str, Shard]], meta: Mapping[str, Any], world: Group) -> None:
    """The same of what ``tensors`` returns: what it raises on one rank is raised on every rank."""
    target = Path(folder)
    with ExitStack() as begun:
        _on_rank_0(target, world, lambda: begun.enter_context(_begun(target)))
        parts = _everywhere(target, world, lambda: _write(_partial(target), tensors(), world.index))
        _on_rank_0(target, world, lambda: _complete(target, parts, meta))


def remove(folder: str | os.PathLike[str]) -> None:
    """Delete a checkpoint, at once for those who look for it; a file or a link too. Files in it that are none of ours stay.

    One process calls.

    Raises:
        CheckpointError: another run is writing it.
    """
    target = Path(folder)
    if is_held(_partial(target), patience=None):
        raise CheckpointError(f"{target} is being written by another run: it is not deleted")
    for found in (_replaced(target), target):
        with suppress(FileNotFoundError):  # somebody else was faster
            _remove(found, target)


def _remove(found: Path, target: Path) -> None:
    if found.is_file():
        found.unlink()
    elif found.is_dir() and not found.is_symlink() and _is_whole(found) and _foreign(found):
        with _alone(target):
            for name in (META, *(file.name for file in found.iterdir() if OURS.fullmatch(file.name) and file.name not in (META, SUMS))):
                (found / name).unlink()  # its sums tell that the folder was ours, so that the next save may come there
    elif found.exists() or found.is_symlink():
        _discard(found)  # which makes nothing: on a full disk it could not


def recover(parent: Path) -> None:
    """Give checkpoints that a crash left under ``*.replaced`` their names back. Any process may call, several at once too."""
    for replaced in parent.glob(f"*{REPLACED}"):
        target = replaced.with_name(replaced.name.removesuffix(REPLACED))
        if not target.exists() and _is_whole(replaced):
            with suppress(OSError, CheckpointError), _alone(target):  # nothing may be changed here, or a run is at it
                _give_name_back(target)


def _give_name_back(target: Path) -> None:
    if not target.exists() and _is_whole(_replaced(target)):
        _replaced(target).rename(target)


def check(folder: str | os.PathLike[str], *, index: int = 0, ranks: int = 1, mark: bytes | None = None) -> None:
    """Read the files again and compare them with what was written: one in ``ranks`` of them, from ``index`` on. Sizes of all.

    Args:
        mark: of the checkpoint that is meant; whichever is there if it is left out.

    Raises:
        CheckpointError: files are missing, cut short or damaged; all of them are named. Or another took its place meanwhile.
    """
    with unreplaced(folder, mark) as source:
        if not (source / SUMS).is_file():
            raise CheckpointError(f"checkpoint {source} is damaged: {SUMS} is missing")
        with _damage_is_named(source):
            sums: Sums = {name: (int(size), int(crc)) for name, (size, crc) in json.loads((source / SUMS).read_text()).items()}
        faults = [f"{name} is not in {SUMS}" for name in (META, INDEX) if name not in sums]
        faults += [f"{SUMS} names {name!r}, which is no file of a checkpoint" for name in sums if not OURS.fullmatch(name)]
        with _damage_is_named(source):
            faults = faults or _faults(source, sums, index, ranks)
        if faults:
            raise CheckpointError(f"checkpoint {source} is damaged: {'; '.join(faults)}")
        with _damage_is_named(source):
            unknown = IndexReader(source).files - sums.keys()
        if unknown:
            raise CheckpointError(f"checkpoint {source} is damaged: {', '.join(sorted(unknown))} is in its index, but not in {SUMS}")


def _faults(source: Path, sums: Sums, index: int, ranks: int) -> list[str]:
    faults = []
    for place, (name, (size, crc)) in enumerate(sorted(sums.items())):
        file = source / name
        if not file.is_file():
            faults.append(f"{name} is missing{_writer(name)}")
        elif file.stat().st_size != size:
            faults.append(f"{name} has {file.stat().st_size:,} bytes, but {size:,} were written{_writer(name)}")
        elif place % ranks == index and _sum(file)[1] != crc:
            faults.append(f"{name} holds other bytes than were written{_writer(name)}")
    return faults


def _writer(name: str) -> str:
    """Whose file it is, where that can be told."""
    told = OURS.fullmatch(name)
    return f" (it is rank {told['rank']}'s)" if told is not None and told["rank"] is not None else ""


def _sum(file: Path) -> tuple[int, int]:
    crc, size = 0, 0
    with open(file, "rb") as opened:
        while part := opened.read(CHUNK):
            crc, size = zlib.crc32(part, crc), size + len(part)
    return size, crc


def is_native(folder: str | os.PathLike[str]) -> bool:
    """Whether this is a complete checkpoint of ours."""
    return _found(Path(folder)) is not None


def mark_of(folder: str | os.PathLike[str]) -> bytes:
    """What tells this checkpoint from one that takes its place; empty if there is none."""
    found = _found(Path(folder))
    with suppress(FileNotFoundError):
        return b"" if found is None else (found / SUMS).read_bytes()
    return b""


def require_mark(folder: str | os.PathLike[str], mark: bytes) -> None:
    """Raise a CheckpointError if another checkpoint has taken the place of that with this mark."""
    if mark_of(folder) == mark:
        return
    if _found(Path(folder)) is None:
        raise CheckpointError(f"checkpoint {folder} was deleted while it was read")
    raise _replaced_meanwhile(folder)


def _replaced_meanwhile(folder: str | os.PathLike[str]) -> CheckpointError:
    return CheckpointError(f"checkpoint {folder} was replaced by another while it was read: read it again")


@contextmanager
def unreplaced(folder: str | os.PathLike[str], mark: bytes | None = None) -> Iterator[Path]:
    """Where it lies complete. If another takes its place meanwhile, that is told, and not what else reading came to.

    Args:
        mark: of the checkpoint that is meant; whichever is there if it is left out.

    Raises:
        CheckpointError: there is none, or no longer that with this mark.
    """
    if mark is None:
        mark = mark_of(folder)
    elif _found(Path(folder)) is None:
        require_mark(folder, mark)
    source = complete_folder(folder)
    try:
        yield source
    except CheckpointError as error:
        require_mark(folder, mark)
        if complete_folder(folder) != source:  # just renamed, to be replaced
            raise _replaced_meanwhile(folder) from error
        raise
    require_mark(folder, mark)


def read_meta(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The plain part, on CPU. Any rank may call alone."""
    with unreplaced(folder) as source, _damage_is_named(source):
        return torch.load(source / META, map_location="cpu", weights_only=True)


def read_index(folder: str | os.PathLike[str]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Whole shape and dtype of every tensor in the checkpoint. Any rank may call alone."""
    with unreplaced(folder) as source:
        return _index_of(source, IndexReader(source))


def _index_of(source: Path, reader: dcp.FileSystemReader) -> dict[str, tuple[torch.Size, torch.dtype]]:
    with _damage_is_named(source):
        metadata = reader.read_metadata().state_dict_metadata
    return {name: (entry.size, entry.properties.dtype) for name, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}


def read_tensors(
    folder: str | os.PathLike[str], tensors: Mapping[str, Shard], reader: IndexReader | None = None, *, mark: bytes | None = None
) -> None:
    """Fill the data of ``tensors``, whatever layout wrote them. Ranks read on their own: any rank may call alone.

    Args:
        reader: of the folder, for those who call often.
        mark: of the checkpoint that is meant; whichever is there if it is left out.

    Raises:
        CheckpointError: a tensor is missing in the checkpoint, or has another shape there; all of them are named. Or another took its
            place meanwhile.
    """
    with unreplaced(folder, mark) as source:
        reader = IndexReader(source) if reader is None else reader.at(source)
        index = _index_of(source, reader)
        wanted = {name: shard for name, shard in tensors.items() if shard.spec.span.size}
        require_fit(source, {name: shape for name, (shape, _) in index.items()}, wanted)
        if wanted:
            with _damage_is_named(source), _no_word_of_single_processes():
                dcp.load(dict(wanted), storage_reader=reader, planner=LoadPlanner(), no_dist=True)


@contextmanager
def _damage_is_named(source: Path) -> Iterator[None]:
    """Whatever a reader says of a file that is cut short or gone, say of which checkpoint."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {source} cannot be read: {error}") from error
    except (Exception, CheckpointException) as error:
        causes = [failure[0] for failure in error.failures.values()] if isinstance(error, CheckpointException) else [error]
        told = "; ".join(f"{type(cause).__name__}: {cause}" for cause in causes)
        raise CheckpointError(f"checkpoint {source} is damaged or incomplete: {told}") from error


@contextmanager
def _begun(target: Path) -> Iterator[None]:
    """An empty ``*.partial`` to write to, ours as long as this lasts, and gone then unless it was renamed."""
    require_name(target)
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file: a checkpoint of ours is a folder; choose another path or delete the file")
    _require_ours(target, _was_ours)
    target.parent.mkdir(parents=True, exist_ok=True)
    _clean(target.parent)
    partial = _partial(target)
    with _alone(target) as hold:
        _require_ours(partial, _is_ours)
        _settle(target)
        _empty(partial)
        try:
            yield
        finally:
            if hold.is_called(partial):
                with suppress(OSError):
                    _empty(partial)
                    partial.rmdir()


def require_name(target: Path) -> None:
    """Raise a CheckpointError if no checkpoint of ours may have this name."""
    if target.name.endswith((PARTIAL, REPLACED)):
        raise CheckpointError(
            f"{target}: names that end with {PARTIAL} or {REPLACED} are those of folders that are being written or deleted, and are "
            "cleaned up; choose another name"
        )


def _require_ours(folder: Path, is_ours: Callable[[Path], bool]) -> None:
    try:
        strange = folder.is_dir() and not is_ours(folder)
    except FileNotFoundError:  # somebody has deleted it meanwhile
        return
    if strange:
        raise CheckpointError(f"{folder} holds files that are none of ours, and would be replaced: choose another path, or move it away")


@contextmanager
def _alone(target: Path, patience: float | None = None) -> Iterator[Hold]:
    """Nobody else writes, tidies up or replaces what has this name as long as this lasts. Its ``*.partial`` is there meanwhile, and held.

    Raises:
        CheckpointError: somebody else does. See Note [A complete folder].
    """
    with held(_partial(target), make=True, patience=patience) as hold:
        if hold is None or is_held(target, patience=patience):
            raise CheckpointError(f"{_partial(target)} is being written by another run: give each run a folder of its own")
        yield hold


def _empty(partial: Path) -> None:
    for found in partial.iterdir():
        if found.is_dir() and not found.is_symlink():
            shutil.rmtree(found)
        else:
            found.unlink()


def _clean(parent: Path) -> None:
    """Undo what a crash has left, but for what is in somebody's hands. See Note [A complete folder]."""
    for ending, is_ours in ((REPLACED, _was_ours), (PARTIAL, _is_ours)):
        for found in parent.glob(f"*{ending}"):
            target = found.with_name(found.name.removesuffix(ending))
            with suppress(OSError, CheckpointError):
                if is_ours(found):
                    _undo(target)


def _undo(target: Path) -> None:
    partial = _partial(target)
    with _alone(target, patience=0) as hold:
        _settle(target)
        if hold.sure and _is_ours(partial) and (any(partial.iterdir()) or DELETED.fullmatch(partial.name)):
            _delete(partial)


def _settle(target: Path) -> None:
    """Undo what a crash has left of the last save of ``target``, whose name is in our hands."""
    with suppress(OSError, CheckpointError):
        _give_name_back(target)
        if _is_whole(target) and _was_ours(_replaced(target)):
            _retire(_replaced(target), target)


def _retire(replaced: Path, target: Path) -> None:
    """Delete what ``target`` has replaced, but for files in it that are none of ours: they go on to ``target``, under a free name."""
    if not replaced.is_symlink():
        for file in _foreign(replaced):
            names = itertools.chain([file.name], (f"{file.name}.{number}" for number in itertools.count(1)))
            file.rename(next(place for name in names if not os.path.lexists(place := target / name)))
    _discard(replaced)


def _foreign(folder: Path) -> list[Path]:
    """What others have put there."""
    return [file for file in folder.iterdir() if not OURS.fullmatch(file.name)]


def _discard(folder: Path) -> None:
    """Delete it, so that no half of it ever has its name; of a link only the link.

    Raises:
        CheckpointError: it is in somebody else's hands.
    """
    if folder.is_symlink():
        folder.unlink()
        return
    with held(folder) as hold:
        if hold is None:
            raise CheckpointError(f"{folder} is being written by another run: it is not deleted")
        _delete(folder)


def _delete(folder: Path) -> None:
    """Delete what is in our hands, as ``_discard`` does."""
    deleted = folder.with_name(f".{secrets.token_hex(8)}{PARTIAL}")
    folder.rename(deleted)
    shutil.rmtree(deleted)


def _is_ours(folder: Path) -> bool:
    """A checkpoint, or what is left of one, or empty."""
    return folder.is_dir() and (_is_whole(folder) or not _foreign(folder))


def _was_ours(folder: Path) -> bool:
    """As ``_is_ours``, or files of others in a checkpoint that was deleted."""
    return _is_ours(folder) or (folder / SUMS).is_file()


def _partial(folder: Path) -> Path:
    return folder.with_name(folder.name + PARTIAL)


def _replaced(folder: Path) -> Path:
    return folder.with_name(folder.name + REPLACED)


def _write(partial: Path, tensors: Mapping[str, Shard], rank: int) -> Part:
    """Write this rank's files."""
    planner, writer, files = SavePlanner(), dcp.FileSystemWriter(partial), _SummingFiles()
    writer.fs = files
    planner.set_up_planner(dict(tensors), is_coordinator=rank == 0)
    writer.set_up_storage_writer(rank == 0)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plan = planner.finish_plan(writer.prepare_global_plan([plan] * (rank + 1))[rank])  # its files are called after its place
    results = writer.write_data(plan, planner).wait()
    return Part(plan, results, files.sums)


class _SummingFiles(FileSystem):
    """Knows the sums of files by what was to be written, whatever the disk makes of it."""

    def __init__(self) -> None:
        self.sums: Sums = {}

    @contextmanager
    @override
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as stream:
            summing = _SummingStream(stream)
            yield summing
            self.sums[Path(path).name] = summing.size, summing.crc


class _SummingStream(io.IOBase):
    def __init__(self, stream: io.IOBase) -> None:
        self._stream, self.size, self.crc = stream, 0, 0

    def write(self, data: bytes | memoryview) -> int:
        self.size, self.crc = self.size + memoryview(data).nbytes, zlib.crc32(data, self.crc)
        return self._stream.write(data)

    @override
    def tell(self) -> int:
        return self.size

    @override
    def fileno(self) -> int:
        return self._stream.fileno()

    @override
    def flush(self) -> None:
        if not self._stream.closed:
            self._stream.flush()

    @override
    def close(self) -> None:
        self._stream.close()
        super().close()


def _write_index(partial: Path, parts: Sequence[Part]) -> None:
    planner, writer = SavePlanner(), dcp.FileSystemWriter(partial)
    planner.set_up_planner({}, is_coordinator=True)
    writer.set_up_storage_writer(True)
    _, index = planner.create_global_plan([part.plan for part in parts])
    writer.finish(index, [list(part.results) for part in parts])


@contextmanager
def _no_word_of_single_processes() -> Iterator[None]:
    """torch warns that it takes a rank which works on its own for the only one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _complete(target: Path, parts: Sequence[Part], meta: Mapping[str, Any]) -> None:
    partial, replaced = _partial(target), _replaced(target)
    sums = {name: told for part in parts for name, told in part.sums.items()}
    unseen = [name for name, (size, _) in sums.items() if not (partial / name).is_file() or (partial / name).stat().st_size != size]
    if unseen:
        raise CheckpointError(
            f"{', '.join(name + _writer(name) for name in unseen)}: not in {partial} as rank 0 sees it; all ranks must write to storage "
            "that they share"
        )
    _write_index(partial, parts)
    write_through(partial / META, lambda file: torch.save(dict(meta), file))
    load(partial / META)  # what cannot be read must not take the place of what can
    sums |= {name: _sum(partial / name) for name in (META, INDEX)}
    write_through(partial / SUMS, lambda file: file.write(json.dumps(sums, indent=1).encode()))
    sync_folder(partial)
    with suppress(FileNotFoundError):
        target.rename(replaced)
    partial.rename(target)
    sync_folder(target.parent)
    if replaced.exists() or replaced.is_symlink():
        with suppress(OSError, CheckpointError):  # the checkpoint is complete; the next save tries again
            _retire(replaced, target)


def _found(folder: Path) -> Path | None:
    names = (folder, _replaced(folder)) * 2  # between two looks it may get its name
    return next((candidate for candidate in (*names, folder) if _is_whole(candidate)), None)


def _is_whole(folder: Path) -> bool:
    return (folder / META).is_file() and (folder / INDEX).is_file() and not folder.name.endswith(PARTIAL)


def complete_folder(folder: str | os.PathLike[str]) -> Path:
    """Where the checkpoint ``folder`` lies complete; a CheckpointError if nowhere."""
    found = _found(Path(folder))
    if found is None:
        raise CheckpointError(f"{folder} is not a complete checkpoint of lightning_par (a folder with {META} and .metadata)")
    return found


def _everywhere(target: Path, world: Group, action: Callable[[], T]) -> list[T]:
    """What ``action`` returns, from all ranks in order; if it fails on one, all raise."""
    result, error = None, None
    try:
        result = action()
    except Exception as exception:
        error = exception
    try:
        told = world.gather_objects((result, None if error is None else describe(error)))
    except RuntimeError as lost:
        raise CheckpointError(f"checkpoint {target} is not saved: another rank is gone, or slower than the timeout: {lost}") from (
            error or lost
        )
    failures = [(rank, text) for rank, (_, text) in enumerate(told) if text is not None]
    if failures:
        listed = "\n".join(f"  - rank {rank}: {text}" for rank, text in failures)
        raise CheckpointError(f"saving checkpoint {target} failed:\n{listed}") from error
    return [result for result, _ in told]


def _on_rank_0(target: Path, world: Group, action: Callable[[], object]) -> None:
    def act() -> None:
        if world.index == 0:
            action()

    _everywhere(target, world, act)


def describe(error: BaseException) -> str:
    """What it says; of errors that are not ours, also of what kind it is."""
    return f"{error}" if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
