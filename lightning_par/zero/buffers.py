"""Buffers that change in training (running statistics) are kept equal on the data ranks, as DDP does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_par.comm import Group


class BufferSync:
    """Makes buffers those of data rank 0. Give it the persistent ones: others are taken to be constants."""

    def __init__(self, buffers: Sequence[Tensor], group: Group) -> None:
        self.group = group
        self._by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in buffers:
            self._by_dtype.setdefault(buffer.dtype, []).append(buffer)

    def broadcast(self) -> None:
        """One message for each dtype. All ranks of the group call, before a forward pass."""
        if self.group.size == 1:
            return
        with torch.no_grad():
            for buffers in self._by_dtype.values():
                flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
                self.group.broadcast(flat)
                for buffer, value in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
                    buffer.copy_(value.view_as(buffer))
