"""Files of ``torch.save``: read without running what is in them, written without holding them in memory, and put in place whole.

Note [What is refused]
~~~~~~~~~~~~~~~~~~~~~~
A pickle may name any function of any module and have it called. ``torch.load(weights_only=True)`` calls none but those that make tensors
and plain containers; classes that a format needs are stood in for by ours, under the name that the file has for them (``stubs``). Any
other name is refused and told.

Note [Memory]
~~~~~~~~~~~~~
Tensors of a file are mapped, so that they take memory when they are read, and give it back when it is needed elsewhere. Tensors that are
to be written together are first put one by one into files without a name (``Scratch``), which costs disk space instead of memory.

Note [Whose folder it is]
~~~~~~~~~~~~~~~~~~~~~~~~~
Whoever writes into a folder holds it: by a lock of the system on the folder itself, not on its name. The lock goes along when the folder
is renamed, keeps out other threads as well as other processes, and ends with the process, however that ends. Between finding a folder by
its name and locking it, the name may come to stand for another one, or for none; so one looks again once it is locked, and begins anew.
A process that was forked meanwhile, such as a worker of a DataLoader, would have the lock too, and outlive us: it drops it when it begins.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import pickle
import re
import secrets
import shutil
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from lightning_par.checkpoint.errors import CheckpointError


def require_file_names(where: Path, what: str, called: Iterable[str]) -> None:
    """Raise a CheckpointError that tells which of these names, of ``what``, cannot name a file or folder: they could lead elsewhere."""
    bad = [name for name in called if name in ("", ".", "..") or set(name) & set("/\\\0") or len(name.encode(errors="replace")) > 250]
    if bad:
        raise CheckpointError(
            f"{where}: {what} {', '.join(map(repr, bad))} cannot be the name of a file or folder: such a name is not empty, '.' or '..', "
            "has no slash, backslash or NUL in it, and at most 250 bytes"
        )


def load(file: Path, stubs: Mapping[str, type] | None = None) -> Any:
    """What ``torch.save`` wrote, on CPU. See Note [What is refused] and Note [Memory].

    Args:
        stubs: classes in place of those that the file names, by module and name.

    Raises:
        CheckpointError: the file is damaged, or names what is refused.
    """
    try:
        with torch.serialization.safe_globals([(stub, name) for name, stub in (stubs or {}).items()]):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError as error:
        named = re.search(r"(?:GLOBAL|global|function|class) '?([\w.]+\.[\w.]+)'?", str(error))
        if named is None:
            told = str(error).rpartition("error:")[2].strip().split("\n")[0]
            raise CheckpointError(f"{file} is damaged, or no file of torch.save: {told}") from error
        raise CheckpointError(
            f"{file} names {named[1]}, which is no plain data, so reading it could run any code: refused. If you wrote the file yourself, "
            f"allow it with torch.serialization.add_safe_globals([{named[1]}])"
        ) from None
    except Exception as error:  # a damaged pickle may lead anywhere
        raise CheckpointError(f"{file} is damaged, or no file of torch.save: {type(error).__name__}: {error}") from error


def save(value: Any, file: Path, pickle_module: Any = pickle) -> None:
    """``torch.save``, through to the disk."""
    write_through(file, lambda opened: torch.save(value, opened, pickle_module=pickle_module))


def write_through(file: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Return when what ``write`` wrote lies on the disk."""
    with open(file, "wb") as opened:
        write(opened)
        opened.flush()
        os.fsync(opened.fileno())


def sync_folder(folder: Path) -> None:
    """Return when the names in ``folder`` lie on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


PATIENCE = 3.0
"""Seconds that one waits for a folder which others hold: who tidies up or asks holds it for a moment, who writes for longer."""

_HELD: set[int] = set()
"""Handles of the folders that this process holds."""


def _drop_in_a_fork() -> None:
    for handle in _HELD:
        os.close(handle)
    _HELD.clear()


os.register_at_fork(after_in_child=_drop_in_a_fork)


@dataclass(frozen=True)
class Hold:
    """A folder that this thread holds.

    Attributes:
        sure: others are kept out; not so where the file system has no locks.
    """

    handle: int
    sure: bool

    def is_called(self, folder: Path) -> bool:
        """Whether this is still its name."""
        try:
            return self.handle in _HELD and os.path.samestat(os.fstat(self.handle), os.lstat(folder))
        except FileNotFoundError:
            return False


@contextmanager
def held(folder: Path, *, make: bool = False, patience: float | None = None) -> Iterator[Hold | None]:
    """Hold ``folder`` as long as this lasts; None if others do, or it is not there. See Note [Whose folder it is].

    Args:
        make: make it if it is not there, and delete it at the end if it is empty then.
        patience: seconds to wait for others; ``PATIENCE`` of them if it is left out.
    """
    hold, made = _hold(folder, make, time.monotonic() + (PATIENCE if patience is None else patience))
    try:
        yield hold
    finally:
        if hold is not None and hold.handle in _HELD:
            if made and hold.is_called(folder):
                with suppress(OSError):
                    folder.rmdir()
            _HELD.discard(hold.handle)
            with suppress(OSError):
                fcntl.flock(hold.handle, fcntl.LOCK_UN)
            os.close(hold.handle)


def _hold(folder: Path, make: bool, end: float) -> tuple[Hold | None, bool]:
    """The hold, and whether the folder was made."""
    made = False
    while True:
        if make:
            with suppress(FileExistsError):
                folder.mkdir()
                made = True
        try:
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            if make:
                continue
            return None, False
        _HELD.add(handle)
        with suppress(BlockingIOError):
            hold = Hold(handle, _lock(handle, fcntl.LOCK_EX))
            if hold.is_called(folder):
                return hold, made
        _HELD.discard(handle)
        os.close(handle)
        if time.monotonic() >= end:
            return None, False
        time.sleep(0.01)


def _lock(handle: int, kind: int) -> bool:
    """Whether the file system has locks; a BlockingIOError if others have this one."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def is_held(folder: Path, *, patience: float | None = 0.0) -> bool:
    """Whether somebody holds ``folder``, as far as the file system can tell, and still does after ``patience``, as for ``held``."""
    end = time.monotonic() + (PATIENCE if patience is None else patience)
    while held_now := _is_held(folder):
        if time.monotonic() >= end:
            break
        time.sleep(0.01)
    return held_now


def _is_held(folder: Path) -> bool:
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        _lock(handle, fcntl.LOCK_SH)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


class Scratch:
    """Tensors in files that have no name any more: they go when the tensors go. See Note [Memory].

    Args:
        folder: on a disk with room for them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        numel = torch.Size(shape).numel()
        if numel == 0:
            return torch.zeros(shape, dtype=dtype)
        handle, path = tempfile.mkstemp(dir=self._folder)
        try:
            os.ftruncate(handle, numel * dtype.itemsize)
            return torch.from_file(path, shared=True, size=numel, dtype=dtype).view(shape)
        finally:
            os.close(handle)
            os.unlink(path)

    def keep(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A copy."""
        return self.zeros(tuple(tensor.shape), dtype or tensor.dtype).copy_(tensor)


def without_scheme(path: str | os.PathLike[str]) -> str:
    """``file:///a/b`` is ``/a/b``, as Lightning takes it."""
    return os.fspath(path).removeprefix("file://")


def local_path(path: str | os.PathLike[str]) -> str:
    """Where a checkpoint is to be written: the same place, wherever the process goes meanwhile.

    Raises:
        CheckpointError: it is an address, or would replace the folder that the process is in.
    """
    told = os.fspath(path)
    if "://" in told:
        raise CheckpointError(f"{told} is not saved: {NO_URL}")
    place = os.path.abspath(told)
    if Path.cwd().is_relative_to(os.path.realpath(place)):
        raise CheckpointError(f"{told!r} is the folder that this process runs in, or is around it: a checkpoint takes a folder of its own")
    return place


NO_URL = "checkpoints are folders of a file system that all ranks see. Save to one that is mounted, and copy complete folders elsewhere"


UNFINISHED = re.compile(r"\.[0-9a-f]{16}\.unfinished")
"""What folders are called in which something is written that is to be put in place."""


@contextmanager
def put_in_place(target: Path) -> Iterator[Path]:
    """A path near ``target`` to write a file or folder to; it becomes ``target`` by one rename, or is deleted after an error.

    What processes that were killed have left beside ``target`` is deleted. See Note [Whose folder it is].

    Raises:
        CheckpointError: there is something at ``target``, or nothing can be written there.
    """
    if target.exists() or target.is_symlink():
        raise CheckpointError(f"{target} is there already: nothing is overwritten; delete it, or choose another path")
    folder = target.with_name(f".{secrets.token_hex(8)}.unfinished")
    with ExitStack() as holding:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            for left in target.parent.glob(".*.unfinished"):
                with suppress(OSError), held(left, patience=0) as hold:
                    if UNFINISHED.fullmatch(left.name) and hold is not None and hold.sure:
                        shutil.rmtree(left)
            holding.enter_context(held(folder, make=True))
        except OSError as error:
            raise CheckpointError(
                f"{target} cannot be written, since {target.parent} is no folder that one can make or write to "
                f"({type(error).__name__}: {error}): choose another path"
            ) from error
        try:
            yield folder / target.name
            _move(folder / target.name, target)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _move(written: Path, target: Path) -> None:
    """Give it its name, if nobody else has it by now."""
    try:
        if target.exists() or target.is_symlink():
            raise FileExistsError
        if written.is_dir() or not _linked(written, target):
            written.rename(target)
    except OSError as error:
        if not (target.exists() or target.is_symlink()):
            raise
        raise CheckpointError(f"{target} has come to be while this was being written: nothing is overwritten") from error


def _linked(written: Path, target: Path) -> bool:
    """Give a file a second name, which unlike a rename overwrites nothing; False where the file system has no links."""
    try:
        target.hardlink_to(written)
    except FileExistsError:
        raise
    except OSError:
        return False
    return True


def give_back() -> None:
    """Let the system have what is free. glibc keeps freed tensors of up to 32 MB for later ones, and hardly ever finds one that fits."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none, and keeps none
        if trim is not None:
            trim(0)
