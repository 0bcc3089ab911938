"""Do all ranks come? Asked where a rank may be alone: a collective would wait for the others until it times out, and not say for whom."""

from __future__ import annotations

import uuid
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from lightning_par.comm.group import Group


class Meeting:
    """A place where all ranks of ``world`` meet, again and again. All of them make it together."""

    def __init__(self, world: Group) -> None:
        self.world = world
        self._name = world.broadcast_object(f"lightning_par/meeting/{uuid.uuid4().hex}")
        self._count = 0

    def missing(self, patience: timedelta) -> list[int]:
        """Wait until all ranks have called; those that have not when ``patience`` is over."""
        if self.world.size == 1:
            return []
        store, self._count = _get_default_store(), self._count + 1
        keys = [f"{self._name}/{self._count}/{rank}" for rank in range(self.world.size)]
        try:
            store.set(keys[self.world.index], "here")
            store.wait(keys, patience)
        except RuntimeError:
            return [rank for rank, key in enumerate(keys) if rank != self.world.index and not _has(store, key)]
        return []


def _has(store: dist.Store, key: str) -> bool:
    try:
        return store.check([key])
    except RuntimeError:  # the rank that keeps the store is gone
        return False
