"""Group: ranks that communicate. A group of one is a no-op, decided here and nowhere else.

Note [Exchanges on gloo]
~~~~~~~~~~~~~~~~~~~~~~~~
gloo's reduce_scatter puts as many bytes on the wire as its all_reduce, twice what is needed, and copies its input in the calling
thread. So on gloo reduce_scatter is sends and receives of slices, added up in rank order by whoever waits, and all_gather sends and
receives straight into the output's slices. All-reduce stays the backend's own, and so does everything on NCCL. A mean is never asked of a
backend (gloo has summed where AVG was meant, pytorch#162338): callers give a ``scale``.

gloo pairs sends and receives between two ranks by tag, and those of one tag in the order in which they are posted. Groups of several axes
may share a process group, so each exchange draws a tag of its own when it is called, which all ranks of its group do in the same order.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.comm.trace import Trace

T = TypeVar("T")
Op = Literal["sum", "max", "min"]
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Work(Protocol):
    """Communication under way. ``wait`` makes its result usable by what the caller runs next (on CUDA: on the current stream)."""

    def wait(self) -> object: ...


class _Done:
    def wait(self) -> None:
        """Nothing was sent."""


DONE: Work = _Done()


class _Works:
    """Several pieces of communication, and what is to be computed once they are there. Waiting twice is harmless."""

    def __init__(self, works: Sequence[Any], then: Callable[[], object] | None = None) -> None:
        self._works, self._then = works, then

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = ()
        then, self._then = self._then, None
        if then is not None:
            then()


@dataclass(frozen=True)
class Group:
    """The ranks along one axis (or several) of the mesh, as this rank sees them.

    Every method but the properties must be called by all ranks of the group, in the same order.

    Args:
        name: the axes, for traces and messages.
        ranks: global ranks, in the order of their index.
        index: this rank's place among them.
        handle: torch's process group; None for a group of one.
        trace: where calls are recorded.
        timeout: how long a rank waits for the others, for process groups made from this one; None for the backend's default.
    """

    name: str
    ranks: tuple[int, ...] = (0,)
    index: int = 0
    handle: dist.ProcessGroup | None = None
    trace: Trace = field(default_factory=Trace, repr=False, compare=False)
    timeout: timedelta | None = None
    _gathers: Iterator[int] = field(default_factory=itertools.count, repr=False, compare=False)
    _reductions: Iterator[int] = field(default_factory=itertools.count, repr=False, compare=False)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def _is_gloo(self) -> bool:
        return self.size > 1 and dist.get_backend(self.handle) == "gloo"

    def _is_silent(self, tensor: Tensor) -> bool:
        """There is nobody to talk to, or nothing to say (a meta tensor has a shape only)."""
        return self.size == 1 or tensor.is_meta or not tensor.numel()

    @property
    def channel(self) -> int:
        """The first of this group's tags; groups of other names on the same ranks have others. See Note [Exchanges on gloo]."""
        return (zlib.crc32(self.name.encode()) % 2047 + 1) << 20

    def all_reduce(self, tensor: Tensor, op: Op = "sum", *, scale: float = 1.0, async_op: bool = False) -> Work:
        """Combine ``tensor`` over the group, in place, on every rank, and multiply it by ``scale``."""
        if self._is_silent(tensor):
            _scale(tensor, scale)
            return DONE
        self.trace.add("all_reduce", self.name, 2 * tensor.numel() * (self.size - 1) // self.size, tensor)
        work = _Works([dist.all_reduce(tensor, _OPS[op], group=self.handle, async_op=True)], lambda: _scale(tensor, scale))
        return _started(work, async_op)

    def reduce_scatter(self, out: Tensor, whole: Tensor, *, scale: float = 1.0, async_op: bool = False) -> Work:
        """Sum ``whole`` (size · out.numel() elements, flat) over the group; rank i keeps slice i, times ``scale``, in ``out``.

        ``out`` may be this rank's slice of ``whole``; the other slices of ``whole`` are left as they are.
        """
        if self._is_silent(out):
            if out.data_ptr() != whole.data_ptr():
                out.copy_(whole)
            _scale(out, scale)
            return DONE
        self.trace.add("reduce_scatter", self.name, out.numel() * (self.size - 1), out)
        if self._is_gloo:
            work: Work = self._reduce_by_exchange(out, whole, scale)
        else:
            work = _Works([dist.reduce_scatter_tensor(out, whole, group=self.handle, async_op=True)], lambda: _scale(out, scale))
        return _started(work, async_op)

    def all_gather(self, whole: Tensor, mine: Tensor, *, async_op: bool = False) -> Work:
        """Fill ``whole`` (size · mine.numel() elements, flat) with every rank's ``mine``, in rank order.

        ``mine`` may be this rank's slice of ``whole``.
        """
        if self._is_silent(mine):
            if mine.data_ptr() != whole.data_ptr():
                whole.copy_(mine)
            return DONE
        self.trace.add("all_gather", self.name, mine.numel() * (self.size - 1), mine)
        if self._is_gloo:
            work: Work = self._gather_by_exchange(whole, mine)
        else:
            work = _Works([dist.all_gather_into_tensor(whole, mine, group=self.handle, async_op=True)])
        return _started(work, async_op)

    def broadcast(self, tensor: Tensor, source: int = 0, *, async_op: bool = False) -> Work:
        """Overwrite ``tensor`` with that of the rank at index ``source``."""
        if self._is_silent(tensor):
            return DONE
        self.trace.add("broadcast", self.name, tensor.numel() * (self.size - 1) if self.index == source else 0, tensor)
        return _started(_Works([dist.broadcast(tensor, self.ranks[source], group=self.handle, async_op=True)]), async_op)

    def broadcast_object(self, value: T, source: int = 0) -> T:
        """The value of the rank at index ``source`` (pickled: for settings and names, not for the training step)."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, self.ranks[source], group=self.handle)
        return box[0]

    def gather_objects(self, value: T) -> list[T]:
        """Every rank's value, in index order, on every rank (pickled)."""
        if self.size == 1:
            return [value]
        values: list[T] = [value] * self.size
        dist.all_gather_object(values, value, group=self.handle)
        return values

    def barrier(self) -> None:
        """Wait until every rank of the group has come here."""
        if self.size > 1:
            dist.barrier(group=self.handle)

    def _reduce_by_exchange(self, out: Tensor, whole: Tensor, scale: float) -> Work:
        """See Note [Exchanges on gloo]."""
        slices = whole.view(self.size, -1)
        received = whole.new_empty(self.size - 1, out.numel())
        parts = list(received)
        parts.insert(self.index, slices[self.index])

        def add() -> None:
            if self.size == 2 and scale == 0.5:
                torch.lerp(parts[0], parts[1], 0.5, out=out)
                return
            total = parts[0] + parts[1]
            for part in parts[2:]:
                total.add_(part)
            torch.mul(total, scale, out=out)

        tag = self.channel + next(self._reductions) % (1 << 19)
        return _Works(self._exchange(sends=slices, receives=parts, tag=tag), add)

    def _gather_by_exchange(self, whole: Tensor, mine: Tensor) -> Work:
        """See Note [Exchanges on gloo]."""
        slices = whole.view(self.size, -1)
        tag = self.channel + (1 << 19) + next(self._gathers) % (1 << 19)
        works = self._exchange(sends=[mine] * self.size, receives=slices, tag=tag)
        if mine.data_ptr() != slices[self.index].data_ptr():
            slices[self.index].copy_(mine)
        return _Works(works)

    def _exchange(self, sends: Sequence[Tensor], receives: Sequence[Tensor], tag: int) -> list[Any]:
        """Start sending ``sends[i]`` to, and receiving ``receives[i]`` from, every other rank i."""
        others = [(self.index + step) % self.size for step in range(1, self.size)]
        ops = [dist.P2POp(dist.irecv, receives[i], self.ranks[i], self.handle, tag) for i in others]
        ops += [dist.P2POp(dist.isend, sends[i], self.ranks[i], self.handle, tag) for i in reversed(others)]
        return dist.batch_isend_irecv(ops)


def _scale(tensor: Tensor, scale: float) -> None:
    if scale != 1.0:
        tensor.mul_(scale)


def _started(work: Work, async_op: bool) -> Work:
    if async_op:
        return work
    work.wait()
    return DONE
