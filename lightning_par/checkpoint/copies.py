"""Shards as they are now, in host memory, so that training may change them while they are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

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
        mine = {name: shard for name, shard in shards.items() if shard.writes}
        self._buffers = {name: self._buffer(name, shard.data) for name, shard in mine.items()}
        arrived = None
        for name, shard in mine.items():
            data = shard.data.detach().view(-1)
            self._buffers[name].copy_(data, non_blocking=data.is_cuda)
            if data.is_cuda:
                data.record_stream(torch.cuda.current_stream(data.device))
                arrived = torch.cuda.Event() if arrived is None else arrived
        if arrived is not None:
            arrived.record()
        return Copies({name: replace(shard, data=self._buffers[name], origin=None) for name, shard in mine.items()}, arrived)

    def clear(self) -> None:
        """Give the memory back."""
        self._buffers = {}

    def _buffer(self, name: str, data: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is not None and buffer.numel() == data.numel() and buffer.dtype == data.dtype and buffer.is_pinned() == data.is_cuda:
            return buffer
        return torch.empty(data.numel(), dtype=data.dtype, pin_memory=data.is_cuda)
