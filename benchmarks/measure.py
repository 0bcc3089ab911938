"""Meters: time, bytes on the wire, bytes of state."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


class Turn(NamedTuple):
    """What one turn cost, per step: seconds by the clock (barrier to barrier), CPU seconds of all ranks, bytes over loopback."""

    wall: float
    cpu: float
    wire: int


def take_turn(step: Callable[[int], object], settle: Callable[[], object], first: int, count: int) -> Turn:
    """Run ``count`` steps, and ``settle`` what they leave under way. All ranks call, and all get the same CPU seconds.

    One more step comes first, untimed: while others had their turns, this variant's memory has left the caches, and on a virtual machine
    the host may have taken note that it lay idle, which makes the first touch of each page dear.
    """
    step(first)
    settle()
    sent = loopback_bytes()
    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    for i in range(first + 1, first + 1 + count):
        step(i)
    settle()
    dist.barrier()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    wire = loopback_bytes() - sent
    total = torch.tensor([cpu], dtype=torch.float64)
    dist.all_reduce(total)
    return Turn(wall / count, total.item() / count, wire // count)


def loopback_bytes() -> int:
    """Bytes this machine (or network namespace) has sent over its loopback; other programs' too, so take the least of several."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    raise RuntimeError("/proc/net/dev knows no lo: wire bytes are measured on Linux's loopback")


def storages() -> dict[int, int]:
    """Address and bytes of every storage behind a tensor that Python knows of; a flat buffer with many views counts once."""
    time.sleep(0.05)  # gloo's thread lets go of what it worked with a moment after it has said that it is done
    gc.collect()
    with torch._C.DisableTorchFunctionSubclass():  # only to look: a freed parameter of ours would object
        tensors = [found for found in gc.get_objects() if issubclass(type(found), Tensor) and not issubclass(type(found), FakeTensor)]
        tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
        tensors = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]  # a DTensor has no memory of its own
        held = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu" and tensor.layout == torch.strided]
    return {storage.data_ptr(): storage.nbytes() for storage in held if storage.nbytes()}


class _Mallinfo2(ctypes.Structure):
    NAMES = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES]


def heap_bytes() -> int:
    """Bytes that this process has allocated and not freed (glibc): buffers in C++, which ``storages`` cannot see, are in it."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Mallinfo2
    info = libc.mallinfo2()
    return info.uordblks + info.hblkhd


def state_formula(stage: int, params: int, ranks: int, optimizer_bytes: int) -> float:
    """Bytes of fp32 parameters, gradients and optimizer state that a rank needs right before its optimizer's step.

    ZeRO (arXiv 1910.02054, section 5): stage 1 divides the optimizer's state by the number of ranks, 2 the gradients too, 3 all.
    """
    parts = [optimizer_bytes, 4, 4]  # optimizer, gradients, parameters: in the order in which stages cut them
    return params * sum(part / ranks if index < stage else part for index, part in enumerate(parts))
