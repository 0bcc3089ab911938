"""Group: ranks that communicate. A group of one is a no-op, decided here and nowhere else.

Note [Reduce-scatter and all-gather on gloo]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
gloo's own reduce_scatter puts as many bytes on the wire as its all_reduce, twice what is needed, and its all_gather copies everything once
more. So on gloo a reduce_scatter is an all_to_all of slices, added up in rank order, and an all_gather a broadcast of each rank's slice
into its place. What is left to compute then is done by gloo's own thread as soon as the slices are there, so that nobody has to wait for
it. All-reduce stays the backend's own, and so does everything on NCCL. A mean is never asked of a backend (gloo has summed where AVG was
meant, pytorch#162338): callers scale.

The calls of one process group must come in the same order on all ranks. Where two kinds of calls may interleave differently (values
that are gathered when a rank needs them, gradients that are reduced when it has them), each kind has a process group of its own; see Mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.comm.trace import Trace

T = TypeVar("T")
Op = Literal["sum", "max", "min"]
# What every backend sends:
_SENT = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8})
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Work(Protocol):
    """Communication under way. ``wait`` makes its result usable by what the caller runs next (on CUDA: on the current stream)."""

    def wait(self) -> object: ...

    def is_done(self) -> bool:
        """Whether the result is there already."""


class _Done:
    def wait(self) -> None:
        """Nothing was sent."""

    def is_done(self) -> bool:
        return True


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

    def is_done(self) -> bool:
        return all(_is_done(work) for work in self._works)


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

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def _is_gloo(self) -> bool:
        return self.size > 1 and dist.get_backend(self.handle) == "gloo"

    def _is_silent(self, tensor: Tensor) -> bool:
        """There is nobody to talk to, or nothing to say (a meta tensor has a shape only)."""
        return self.size == 1 or tensor.is_meta or not tensor.numel()

    def all_reduce(self, tensor: Tensor, op: Op = "sum", *, async_op: bool = False) -> Work:
        """Combine ``tensor`` over the group, in place, on every rank."""
        if self._is_silent(tensor):
            return DONE
        self.trace.add("all_reduce", self.name, 2 * tensor.numel() * (self.size - 1) // self.size, tensor)
        return _started(_Works([dist.all_reduce(tensor, _OPS[op], group=self.handle, async_op=True)]), async_op)

    def reduce_scatter(self, out: Tensor, whole: Tensor, *, async_op: bool = False) -> Work:
        """Sum ``whole`` (size · out.numel() elements, flat) over the group; rank i keeps slice i in ``out``.

        ``out`` may be this rank's slice of ``whole``; the other slices of ``whole`` are left as they are.
        """
        if self._is_silent(out):
            if out.data_ptr() != whole.data_ptr():
                out.copy_(whole)
            return DONE
        self.trace.add("reduce_scatter", self.name, out.numel() * (self.size - 1), out)
        if self._is_gloo:
            received = torch.empty_like(whole)
            work = dist.all_to_all_single(received, whole, group=self.handle, async_op=True)
            return _started(_Works([_followed(work, lambda: _add(received.view(self.size, -1), out), whole)]), async_op)
        return _started(_Works([dist.reduce_scatter_tensor(out, whole, group=self.handle, async_op=True)]), async_op)

    def all_gather(self, whole: Tensor, mine: Tensor, *, async_op: bool = False) -> Work:
        """Fill ``whole`` (size · mine.numel() elements, flat) with every rank's ``mine``, in rank order.

        ``mine`` may be this rank's slice of ``whole``.
        """
        if self._is_silent(mine):
            if mine.data_ptr() != whole.data_ptr():
                whole.copy_(mine)
            return DONE
        self.trace.add("all_gather", self.name, mine.numel() * (self.size - 1), mine)
        whole, mine = wire(whole), wire(mine)
        if self._is_gloo:
            parts = list(whole.view(self.size, -1))
            place, parts[self.index] = parts[self.index], mine
            works = [dist.broadcast(part, rank, group=self.handle, async_op=True) for part, rank in zip(parts, self.ranks, strict=True)]
            if mine.data_ptr() != place.data_ptr():
                works[self.index] = _followed(works[self.index], lambda: place.copy_(mine), mine)
        else:
            works = [dist.all_gather_into_tensor(whole, mine, group=self.handle, async_op=True)]
        return _started(_Works(works), async_op)

    def broadcast(self, tensor: Tensor, source: int = 0, *, async_op: bool = False) -> Work:
        """Overwrite ``tensor`` with that of the rank at index ``source``."""
        if self._is_silent(tensor):
            return DONE
        self.trace.add("broadcast", self.name, tensor.numel() * (self.size - 1) if self.index == source else 0, tensor)
        return _started(_Works([dist.broadcast(wire(tensor), self.ranks[source], group=self.handle, async_op=True)]), async_op)

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


def wire(tensor: Tensor) -> Tensor:
    """What travels of a tensor that is sent as it is: the bytes of those dtypes that not every backend knows (contiguous ones)."""
    return tensor if tensor.dtype in _SENT or not tensor.numel() else tensor.view(-1).view(torch.uint8)


def _add(parts: Tensor, out: Tensor) -> None:
    """The sum of two or more parts, in order."""
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out.add_(part)


def _is_done(work: Any) -> bool:
    """Of any of the three kinds of things that torch and we have for it."""
    if isinstance(work, torch._C.Future):
        return work.done()
    return work.is_done() if isinstance(work, _Works) else work.is_completed()


def _followed(work: Any, then: Callable[[], object], tensor: Tensor) -> Any:
    """``work`` on gloo, and ``then``: for CPU tensors in gloo's own thread, for CUDA ones by whoever waits, whose stream is known."""
    if tensor.is_cuda:
        return _Works([work], then)

    todo = [then]

    def run(future: torch.futures.Future) -> None:
        future.value()  # raises what the communication raised
        todo.pop()()  # and gone is what it held, before anybody who waits goes on

    return work.get_future().then(run)


def _started(work: Work, async_op: bool) -> Work:
    if async_op:
        return work
    work.wait()
    return DONE
