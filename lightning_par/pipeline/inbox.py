"""Inbox: receives started early where it is known what comes, late where it is not.

Note [Forms are sent once]
~~~~~~~~~~~~~~~~~~~~~~~~~~
To start a receive one must know shapes and dtypes. They follow from the shapes of the micro-batch (its *signature*, equal on all ranks),
so the form of a boundary is sent along, ahead of its tensors, only the first time that boundary meets that signature; both sides keep
it. From then on nothing but tensors travels and the host never waits. A receive whose form is still to come cannot start early, nor
can those behind it on the same lane: they start when the first of them is needed. That cannot deadlock: what stands ahead on
the lane was sent before what is needed now.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_par.comm import Lanes, Work
from lightning_par.layout import Action
from lightning_par.pipeline.boundary import TensorForm, flat

FormsOf = Callable[[Action], list[TensorForm] | None]
"""What a receive brings; None while it is not known."""


class Inbox:
    """What this rank receives in one step. See Note [Forms are sent once]."""

    def __init__(self, lanes: Lanes, device: torch.device, forms_of: FormsOf, learn: Callable[[Action, object], None]) -> None:
        self._lanes, self._device, self._forms_of, self._learn = lanes, device, forms_of, learn
        self._waiting: dict[int, deque[Action]] = defaultdict(deque)  # by peer, in the lane's order
        self._started: dict[Action, tuple[Work, list[Tensor]]] = {}

    def expect(self, receive: Action, peer: int) -> None:
        """Start this receive, or as soon as that can be. Calls must come in the lane's order."""
        self._waiting[peer].append(receive)
        self._start_known(peer)

    def take(self, receive: Action, peer: int) -> list[Tensor]:
        """The tensors of an expected receive, once they are there."""
        self._start_known(peer)
        while receive not in self._started:
            self._learn(self._waiting[peer][0], self._lanes.receive_object(peer, self._device))
            self._start_known(peer)
        work, tensors = self._started.pop(receive)
        work.wait()
        return tensors

    @property
    def is_empty(self) -> bool:
        return not self._started and not any(self._waiting.values())

    def _start_known(self, peer: int) -> None:
        waiting = self._waiting[peer]
        while waiting and (forms := self._forms_of(waiting[0])) is not None:
            tensors = [form.empty(self._device) for form in forms]
            self._started[waiting.popleft()] = self._lanes.receive([flat(tensor) for tensor in tensors], peer), tensors
