"""Which samples a replica sees.

Note [The order of samples]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
Lightning's own distributed sampler shuffles training data whatever the dataloader says, in another order than one process would. Here the
user's sampler stays, and decides: every rank asks it for an epoch's order (so that random generators go on alike everywhere), rank 0's
answer counts, and replica r of n takes places r, r + n, r + 2n, ... of it. So the batches of all replicas put together are the batches that
one process with an n times bigger batch size would draw, in the same order. Where n does not divide the epoch, the first samples are
repeated at its end.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler, SequentialSampler

from lightning_par.comm import Group


class ReplicaSampler(Sampler):
    """One replica's part of the order that ``sampler`` gives. All ranks of ``world`` must start an epoch together.

    Args:
        sampler: the user's.
        replicas, index: how many replicas there are, and which this is.
    """

    def __init__(self, sampler: Any, replicas: int, index: int, world: Group, device: torch.device) -> None:
        if not isinstance(sampler, Sized):
            raise TypeError(
                f"the dataloader's {type(sampler).__name__} has no length, so it cannot be divided over {replicas} replicas: give it a "
                "__len__, or divide it yourself and set Trainer(use_distributed_sampler=False)"
            )
        self.sampler, self.replicas, self.index = sampler, replicas, index
        self._world, self._device = world, device

    @property
    def repeated(self) -> int:
        """How many samples come twice in an epoch."""
        return -len(self.sampler) % self.replicas if len(self.sampler) else 0

    def __iter__(self) -> Iterator[Any]:
        order = self._agreed(list(self.sampler))
        missing = -len(order) % self.replicas
        order += itertools.islice(itertools.cycle(order), missing if order else 0)
        return iter(order[self.index :: self.replicas])

    def __len__(self) -> int:
        return -(-len(self.sampler) // self.replicas)

    def set_epoch(self, epoch: int) -> None:
        """Lightning calls this before an epoch."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def _agreed(self, order: list[Any]) -> list[Any]:
        """Rank 0's order; a sequential one needs no asking."""
        if isinstance(self.sampler, SequentialSampler) or self._world.size == 1:
            return order
        if not all(isinstance(place, int) for place in order):
            return self._world.broadcast_object(order)
        places = torch.tensor(order, dtype=torch.int64, device=self._device)
        self._world.broadcast(places)
        return places.tolist()
