"""Shards as they are now, in host memory, so that training may change them while they are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_par.checkpoint.shard import Shard


@dataclass(frozen=True)
class Copies:
    """Copies on their way to the host.

    Attributes:
        shards: those that this rank writes.
        arrived: on CUDA, what tells that all are there.
    """

    shards: dict[str, Shard]
    arrived: torch.cuda.Event | None

    def wait(self) -> None:
        """Until the data can be read."""
        if self.arrived is not None:
            self.arrived.synchronize()


class HostCopies:
    """Takes copies of a rank's shards, into the same memory each time: the last copies are gone when the next are taken.

    CPU tensors are copied when ``take`` returns. CUDA tensors are copied by their device into pinned memory, in order with what the
    current stream is given before and after; the host waits for nothing.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, shards: Mapping[str, Shard]) -> Copies:
        before, self._buffers, copies, arrived = self._buffers, {}, {}, None
        with torch.no_grad():
            for name, shard in shards.items():
                if not shard.writes:
                    continue
                data = shard.data
                self._buffers[name] = buffer = _like(data, before.get(name))
                buffer.copy_(data, non_blocking=data.is_cuda)
                copies[name] = Shard(shard.spec, buffer)
                if data.is_cuda:
                    data.record_stream(torch.cuda.current_stream(data.device))
                    arrived = torch.cuda.Event() if arrived is None else arrived
        if arrived is not None:
            arrived.record()
        return Copies(copies, arrived)

    def clear(self) -> None:
        """Give the memory back."""
        self._buffers = {}


def _like(data: Tensor, buffer: Tensor | None) -> Tensor:
    """Host memory for a copy: ``buffer``, if it fits."""
    if buffer is not None and buffer.shape == data.shape and buffer.dtype == data.dtype and buffer.is_pinned() == data.is_cuda:
        return buffer
    return torch.empty(data.shape, dtype=data.dtype, pin_memory=data.is_cuda)
