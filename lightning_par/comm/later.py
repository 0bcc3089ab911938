"""Numbers that the host reads later than the device computes them."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_par.comm.group import DONE, Work


class Later:
    """A small tensor on its way to the host. Making one blocks nobody; ``read`` waits until it is there.

    Args:
        tensor: must not be written any more.
        work: the communication that fills it.
    """

    def __init__(self, tensor: Tensor, work: Work = DONE) -> None:
        self._tensor, self._work = tensor, work
        self._ready: torch.cuda.Event | None = None
        if tensor.is_cuda:
            work.wait()
            self._tensor = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record()

    def read(self) -> Tensor:
        """The numbers, on the host."""
        if self._ready is not None:
            self._ready.synchronize()
        else:
            self._work.wait()
        return self._tensor
