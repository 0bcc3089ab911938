"""Buffers that change in training (running statistics) are kept equal on the data ranks, as DDP does."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lightning_par.comm import Group


class BufferSync:
    """Makes buffers those of data rank 0. Give it the persistent ones: others are taken to be constants.

    Args:
        places: modules and the names of their buffers; what is there is looked up each time, since a module may put a new tensor there.
    """

    def __init__(self, places: Iterable[tuple[nn.Module, str]], group: Group) -> None:
        self.places, self.group = list(places), group

    def broadcast(self) -> None:
        """One message for each dtype. All ranks of the group call, before a forward pass."""
        if self.group.size == 1:
            return
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for module, name in self.places:
            buffer = getattr(module, name)
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        with torch.no_grad():
            for buffers in by_dtype.values():
                flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
                self.group.broadcast(flat)
                for buffer, value in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
                    buffer.copy_(value.view_as(buffer))
