"""Which samples a replica sees.

Note [The order of samples]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
Lightning's own distributed sampler shuffles training data whatever the dataloader says, in another order than one process would. Here the
user's sampler stays, and decides: every rank asks it for an epoch's order (so that random generators go on alike everywhere), rank 0's
answer counts, and replica r of n takes places r, r + n, r + 2n, ... of it. So the batches of all replicas put together are the batches that
one process with an n times bigger batch size would draw, in the same order. Where n does not divide the epoch, the first samples are
repeated at its end.

An order can be drawn again: see Note [The next sample] in ``resuming``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import Sampler, SequentialSampler

from lightning_par.comm import Group
from lightning_par.strategy.state import generators, generators_kept, set_generators

ENDED = "ended"
"""Noted of an order whose sampler was asked for more than there is."""


class ReplicaSampler(Sampler):
    """One replica's part of the order that ``sampler`` gives. All ranks of ``world`` must start an epoch together.

    Args:
        sampler: the user's.
        replicas, index: how many replicas there are, and which this is.

    Attributes:
        drawn_from: what the order of the epoch at hand was drawn from, as plain data; None before the first.
        ahead: how many samples of that epoch were given beyond what its count of batches says: another number of replicas or another
            batch size gave the first of them.
    """

    def __init__(self, sampler: Any, replicas: int, index: int, world: Group, device: torch.device) -> None:
        if not isinstance(sampler, Sized):
            raise TypeError(
                f"the dataloader's {type(sampler).__name__} has no length, so it cannot be divided over {replicas} replicas: give it a "
                "__len__, or divide it yourself and set Trainer(use_distributed_sampler=False)"
            )
        self.sampler, self.replicas, self.index = sampler, replicas, index
        self.drawn_from: dict[str, Any] | None = None
        self.ahead = 0
        self._world, self._device = world, device
        self._epoch = 0
        self._next: tuple[list[Any], Iterator[Any], int, torch.Tensor | None] | None = None

    @property
    def repeated(self) -> int:
        """How many samples come twice in an epoch."""
        return -len(self.sampler) % self.replicas if len(self.sampler) else 0

    def __iter__(self) -> Iterator[Any]:
        if self._next is None:
            self.drawn_from, self.ahead = self._note(), 0
            (order, rest), first = self._draw(), 0
        else:
            (order, rest, first, generator), self._next = self._next, None
            if generator is not None:  # a new iterator has drawn from it; that of the straight run did so before the order was drawn
                self.sampler.generator.set_state(generator)
        missing = -(len(order) - first) % self.replicas
        places = itertools.chain(order[first:], itertools.islice(itertools.cycle(order), missing if order else 0))
        return self._given(itertools.islice(places, self.index, None, self.replicas), rest, self.drawn_from)

    def __len__(self) -> int:
        return -(-len(self.sampler) // self.replicas)

    def set_epoch(self, epoch: int) -> None:
        """Lightning calls this before an epoch."""
        self._epoch = epoch
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def draw_again(self, drawn_from: Mapping[str, Any] | None, first: int | None, ahead: int = 0) -> None:
        """Draw the order of an epoch that another process has begun. All ranks call together.

        Args:
            drawn_from: what it was drawn from there; None: that is not known, and it is drawn from what there is.
            first: the place in the whole order where the next pass begins; None: the epoch was complete, and the next draws its own order.
            ahead: the attribute, as it was there.
        """
        epoch, self.ahead = self._epoch, ahead
        with generators_kept():
            if drawn_from is not None:
                self._recall(drawn_from)
            self.drawn_from = self._note()
            order, rest = self._draw()
            if (drawn_from or {}).get(ENDED):
                next(rest, None)
                self.drawn_from[ENDED] = True
        self.set_epoch(epoch)
        if first is not None:
            generator = getattr(self.sampler, "generator", None)
            self._next = order, rest, first, generator.get_state() if isinstance(generator, torch.Generator) else None

    def drop_rest(self) -> None:
        """What is left of an epoch that was drawn again is not wanted: the next pass draws its own order."""
        if self._next is not None and self._next[-1] is not None:  # an iterator was made meanwhile, and has drawn from it
            self.sampler.generator.set_state(self._next[-1])
        self._next = None

    def _note(self) -> dict[str, Any]:
        noted: dict[str, Any] = {"epoch": self._epoch, "generators": generators()}
        if isinstance(generator := getattr(self.sampler, "generator", None), torch.Generator):
            noted["generator"] = generator.get_state()
        if _is_stateful(self.sampler):
            noted["sampler"] = self.sampler.state_dict()
        return noted

    def _recall(self, noted: Mapping[str, Any]) -> None:
        set_generators(noted["generators"])
        self.set_epoch(noted["epoch"])
        if "generator" in noted and isinstance(generator := getattr(self.sampler, "generator", None), torch.Generator):
            generator.set_state(noted["generator"])
        if "sampler" in noted and _is_stateful(self.sampler):
            self.sampler.load_state_dict(noted["sampler"])

    def _given(self, places: Iterator[Any], rest: Iterator[Any], noted: dict[str, Any] | None) -> Iterator[Any]:
        """A sampler may draw once more when it is asked for more than there is (torch's RandomSampler does): when we are, it is."""
        yield from places
        next(rest, None)
        if noted is not None:
            noted[ENDED] = True

    def _draw(self) -> tuple[list[Any], Iterator[Any]]:
        """Rank 0's order (a sequential one needs no asking), and what is left of this rank's pass over the user's sampler."""
        rest = iter(self.sampler)
        order = list(itertools.islice(rest, len(self.sampler)))
        if isinstance(self.sampler, SequentialSampler) or self._world.size == 1:
            return order, rest
        if not all(isinstance(place, int) for place in order):
            return self._world.broadcast_object(order), rest
        places = torch.tensor(order, dtype=torch.int64, device=self._device)
        self._world.broadcast(places)
        return places.tolist(), rest


def _is_stateful(sampler: Any) -> bool:
    return hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict")
