"""Lanes: one-way, first-in-first-out messages between two ranks of a group.

Note [One lane a direction]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
A receive is started long before its message comes, and must not hold up a send the other way. On gloo it never does. NCCL runs what
goes through one communicator in order, so there each direction between two ranks is a process group of its own; all of them are
made, and used once, when the lanes are opened, since the first use of a communicator waits for the other side. torch names a group that
only its ranks make after how many groups each of them has made before: so whoever is not of a lane makes a group of its own instead, and
all have made as many. gloo cannot send CUDA tensors: they go through a copy on the CPU.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.comm.group import DONE, Group, Work, _Works


@dataclass(frozen=True)
class Lanes:
    """This rank's lanes to and from the ranks of ``group`` it talks to. Peers are indices along the group."""

    group: Group
    _to: dict[int, dist.ProcessGroup | None] = field(default_factory=dict, repr=False)
    _from: dict[int, dist.ProcessGroup | None] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, group: Group, pairs: Iterable[tuple[int, int]]) -> Lanes:
        """Lanes for these (sender, receiver) pairs; every rank of the group must call, with the same pairs."""
        lanes = cls(group)
        for sender, receiver in sorted(set(pairs)):
            handle = group.handle if group._is_gloo else _new_lane(group, sender, receiver)
            if group.index == sender:
                lanes._to[receiver] = handle
            elif group.index == receiver:
                lanes._from[sender] = handle
        if not group._is_gloo and (lanes._to or lanes._from):
            lanes._greet()
        return lanes

    def send(self, tensors: Sequence[Tensor], peer: int) -> Work:
        """Start sending contiguous tensors; they must stay alive and unchanged until the work was waited for."""
        for tensor in tensors:
            self.group.trace.add("send", self.group.name, tensor.numel(), tensor)
        staged = [tensor.cpu() for tensor in tensors] if self._stages(tensors) else tensors
        works = [dist.isend(tensor, self.group.ranks[peer], group=self._to[peer]) for tensor in staged]
        return _Works(works, lambda: staged) if works else DONE  # the work keeps the copies alive

    def receive(self, tensors: Sequence[Tensor], peer: int) -> Work:
        """Start receiving into contiguous tensors, which are filled once the work was waited for."""
        staged = [torch.empty_like(tensor, device="cpu") for tensor in tensors] if self._stages(tensors) else tensors
        works = [dist.irecv(tensor, self.group.ranks[peer], group=self._from[peer]) for tensor in staged]
        if staged is tensors:
            return _Works(works) if works else DONE
        return _Works(works, lambda: [tensor.copy_(copy) for tensor, copy in zip(tensors, staged, strict=True)])

    def send_object(self, value: object, peer: int, device: torch.device) -> Work:
        """Start sending a pickled value (for descriptions, not for the steady state)."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
        return self.send([torch.tensor([data.numel()], device=device), data], peer)

    def receive_object(self, peer: int, device: torch.device) -> object:
        """Wait for the next message of the lane, which must be an object."""
        size = torch.empty(1, dtype=torch.int64, device=device)
        self.receive([size], peer).wait()
        data = torch.empty(int(size), dtype=torch.uint8, device=device)
        self.receive([data], peer).wait()
        return pickle.loads(bytes(data.tolist()))

    def _stages(self, tensors: Sequence[Tensor]) -> bool:
        return self.group._is_gloo and any(tensor.is_cuda for tensor in tensors)

    def _greet(self) -> None:
        """Use every lane once, so that no later first use waits. Lanes are opened in one order on all ranks: no cycle."""
        device = torch.device("cuda", torch.cuda.current_device())
        pairs = [(self.group.index, peer) for peer in self._to] + [(peer, self.group.index) for peer in self._from]
        for sender, receiver in sorted(pairs):
            word = [torch.zeros(1, device=device)]
            (self.send(word, receiver) if sender == self.group.index else self.receive(word, sender)).wait()


def _new_lane(group: Group, sender: int, receiver: int) -> dist.ProcessGroup:
    """A process group of the two; on the other ranks one of the rank alone. See Note [One lane a direction]."""
    members = (sender, receiver) if group.index in (sender, receiver) else (group.index,)
    ranks = sorted(group.ranks[index] for index in members)
    return dist.new_group(ranks, timeout=group.timeout, use_local_synchronization=True)
