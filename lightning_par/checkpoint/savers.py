"""Who saves and deletes checkpoints: at once, or in the background while training goes on."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from lightning_par.checkpoint import native
from lightning_par.checkpoint.copies import Copies, HostCopies
from lightning_par.checkpoint.errors import CheckpointError
from lightning_par.checkpoint.shard import Shard
from lightning_par.comm import Group, apart


class Saver(Protocol):
    """All ranks make one together."""

    def save(self, folder: str | os.PathLike[str], tensors: Mapping[str, Shard], meta: Mapping[str, Any]) -> None:
        """As ``native.save``. All ranks call."""

    def remove(self, folder: str | os.PathLike[str]) -> None:
        """Delete a checkpoint, or warn that it cannot be. Rank 0 acts; others may call."""

    def wait(self) -> None:
        """Until all that was asked for is done.

        Raises:
            CheckpointError: on every rank, if the save under way failed on any.
        """

    def close(self) -> None:
        """Give threads and memory back; what is asked for later gets new ones."""


class Immediate:
    """Everything is done when the call returns."""

    def __init__(self, world: Group) -> None:
        self._world = world

    def save(self, folder: str | os.PathLike[str], tensors: Mapping[str, Shard], meta: Mapping[str, Any]) -> None:
        native.save(folder, tensors, meta, self._world)

    def remove(self, folder: str | os.PathLike[str]) -> None:
        if self._world.index == 0:
            _remove(folder)

    def wait(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """There is nothing to give back."""


class Background:
    """Saves return when this rank's parts are copied to host memory; a thread writes the copies.

    At most one save is under way: the next waits for it, and raises what it failed with. Deletions come after it, and not at all if it
    failed, so that a checkpoint is there at every moment. The ranks' threads meet in a process group of their own: their calls need no
    order among those of training, whose groups they never touch.
    """

    def __init__(self, world: Group) -> None:
        self._world = world
        self._apart: Group | None = None
        self._copies = HostCopies()
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: list[Future[None]] = []
        self._will_exist: dict[str, bool] = {}

    def save(self, folder: str | os.PathLike[str], tensors: Mapping[str, Shard], meta: Mapping[str, Any]) -> None:
        self.wait()
        if self._apart is None:
            self._apart = apart(self._world, "gloo")
        copies, plain = self._taken(tensors, meta if self._world.index == 0 else {})
        self._start(folder, True, lambda: _write(folder, copies, plain, self._apart))

    def _taken(self, tensors: Mapping[str, Shard], meta: Mapping[str, Any]) -> tuple[Callable[[], Mapping[str, Shard]], Mapping[str, Any]]:
        """Copies: those of ``tensors`` when they can be read. What is wrong with them is raised in the thread, where ranks meet."""
        try:
            copies, plain = self._copies.take(tensors), copy.deepcopy(dict(meta))
            device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        except Exception as error:
            return partial(_raise, error), {}
        return lambda: _arrived(copies, device), plain

    def remove(self, folder: str | os.PathLike[str]) -> None:
        if self._world.index == 0 and self._under_way:
            saved = self._under_way[0]
            self._start(folder, False, lambda: None if saved.exception() else _remove(folder))
        elif self._world.index == 0:
            _remove(folder)

    def will_exist(self, path: str | os.PathLike[str]) -> bool:
        """Whether it is there once all that was asked for is done. On rank 0."""
        return self._will_exist.get(os.path.abspath(path), os.path.exists(path))

    def wait(self) -> None:
        under_way, self._under_way = self._under_way, []
        wait(under_way)
        self._will_exist.clear()
        for done in under_way:
            done.result()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        self._thread = None
        self._copies.clear()

    def _start(self, folder: str | os.PathLike[str], will_exist: bool, action: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._will_exist[os.path.abspath(folder)] = will_exist
        self._under_way.append(self._thread.submit(action))


def _raise(error: Exception) -> Mapping[str, Shard]:
    raise error


def _arrived(copies: Copies, device: int | None) -> Mapping[str, Shard]:
    if device is not None:
        torch.cuda.set_device(device)  # a new thread would make a context on the first one
    copies.wait()
    return copies.shards


def _write(folder: str | os.PathLike[str], copies: Callable[[], Mapping[str, Shard]], meta: Mapping[str, Any], world: Group) -> None:
    try:
        native.save_awaited(folder, copies, meta, world)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"checkpoint {folder} is not saved: {native.describe(error)}") from error


def _remove(folder: str | os.PathLike[str]) -> None:
    try:
        native.remove(Path(folder))
    except (OSError, CheckpointError) as error:
        warnings.warn(f"checkpoint {folder} cannot be deleted: {native.describe(error)}", stacklevel=3)
