"""Point-to-point messages along an axis."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from lightning_par.comm.group import DONE, Group, Work, _Works, wire


@dataclass(frozen=True, slots=True)
class Message:
    """A contiguous tensor and the index, along the group, of the rank it goes to or comes from."""

    tensor: Tensor
    peer: int


def exchange(group: Group, sends: list[Message], receives: list[Message]) -> Work:
    """Start all these messages as one batch and return without waiting.

    Between two ranks messages pair up in the order in which each side started them, whatever their direction's batch, so both sides
    must agree on that order. Tensors must stay alive and unchanged until the work was waited for.
    """
    ops = []
    for kind, messages in ((dist.irecv, receives), (dist.isend, sends)):
        for message in messages:
            ops.append(dist.P2POp(kind, wire(message.tensor), group.ranks[message.peer], group.handle))
    for message in sends:
        group.trace.add("send", group.name, message.tensor.numel(), message.tensor)
    return _Works(dist.batch_isend_irecv(ops)) if ops else DONE
