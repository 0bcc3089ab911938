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
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import pickle
import re
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
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


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Tell other processes, through ``is_held``, that this one works in ``folder``. The system forgets it when the process ends.

    Whoever asks holds a lock of that moment, which is waited for.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)  # also for processes forked meanwhile, which have the handle too
        os.close(handle)


def is_held(folder: Path) -> bool | None:
    """Whether a living process works in ``folder``; None where the file system cannot tell."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
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


@contextmanager
def put_in_place(target: Path) -> Iterator[Path]:
    """A path beside ``target`` to write a file or folder to; it becomes ``target`` by one rename, or is deleted after an error.

    Raises:
        CheckpointError: there is something at ``target``.
    """
    if target.exists() or target.is_symlink():
        raise CheckpointError(f"{target} is there already: nothing is overwritten; delete it, or choose another path")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        written = Path(folder) / target.name
        yield written
        if target.exists():
            raise CheckpointError(f"{target} has come to be while this was being written: nothing is overwritten")
        written.rename(target)


def give_back() -> None:
    """Let the system have what is free. glibc keeps freed tensors of up to 32 MB for later ones, and hardly ever finds one that fits."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none, and keeps none
        if trim is not None:
            trim(0)
