"""Lowering: from forwards and backwards to complete lists, with every message started, and every buffer freed, by name.

Note [Messages and lanes]
~~~~~~~~~~~~~~~~~~~~~~~~~
All messages from one rank to another travel along one *lane*, in the order in which the sender starts them; the receiver must start
its receives in that same order. There is a lane for each direction, so when the next rank is also the previous one (pp=2 with
chunks: activations and gradients both ways) the lane's order alone says which message is which, and nothing can be mixed up.

A receive is started one forward or backward before the one that needs it, so the message travels while the rank computes; earlier if
the lane's order asks for it, never later. A send is started as soon as its tensor exists. Its tensor is let go (``FREE``) once the rank has
computed with something that the receiver sent *after* using it: by then it has surely arrived and nothing waits. If two more messages
have left on the same lane before that (a rank that runs ahead; forward-only passes), it is let go then, so that a lane never holds more
than three; the simulator shows that this costs no time either::

    rank 0   0F0 0SEND_F0  0RECV_B0 0F1 0SEND_F1  0B0 0FREE_F0 ...
    rank 1   1RECV_F0 1F0  1RECV_F1 1B0 1SEND_B0  1F1 ...
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_par.layout import Action, Kind

PLACES_BEHIND = 2
"""How many messages later a send is waited for, if nothing has come back on the opposite lane by then."""

_SENDS = {Kind.F: Kind.SEND_F, Kind.B: Kind.SEND_B}
_RECEIVES = {Kind.SEND_F: (1, Kind.RECV_F), Kind.SEND_B: (-1, Kind.RECV_B)}
_CONSUMERS = {Kind.RECV_F: Kind.F, Kind.RECV_B: Kind.B}
_FREES = {Kind.SEND_F: Kind.FREE_F, Kind.SEND_B: Kind.FREE_B}
_FREED = {free: send for send, free in _FREES.items()}


def receive_of(send: Action) -> Action:
    """The receive that takes what ``send`` sends: the next stage's input, or the gradient of the previous stage's output."""
    step, kind = _RECEIVES[send.kind]
    return Action(send.stage + step, kind, send.microbatch)


def send_of_free(free: Action) -> Action:
    """The send whose buffer ``free`` lets go."""
    return free._replace(kind=_FREED[free.kind])


def places(compute: Sequence[Sequence[Action]]) -> dict[int, int]:
    """The rank on which each stage lives."""
    return {action.stage: rank for rank, actions in enumerate(compute) for action in actions}


@dataclass(frozen=True, slots=True)
class _Message:
    send: Action
    sent_after: int  # place, in the sender's list, of the forward or backward that makes it
    used_by: int  # place, in the receiver's list, of the one that needs it


def lower(compute: Sequence[Sequence[Action]]) -> list[list[Action]]:
    """Add sends, receives and frees to each rank's forwards and backwards. See Note [Messages and lanes]."""
    lanes = _lanes(compute)
    before: list[dict[int, list[Action]]] = [defaultdict(list) for _ in compute]
    after: list[dict[int, list[Action]]] = [defaultdict(list) for _ in compute]
    for (_, receiver), lane in lanes.items():
        for message, place in zip(lane, _receive_places(lane), strict=True):
            before[receiver][place].append(receive_of(message.send))
    for (sender, _), lane in lanes.items():
        for message in lane:
            after[sender][message.sent_after].append(message.send)
    for (sender, receiver), lane in lanes.items():
        for message, place in zip(lane, _free_places(lane, lanes.get((receiver, sender), [])), strict=True):
            end = len(compute[sender]) - 1 if place is None else place
            after[sender][end].append(message.send._replace(kind=_FREES[message.send.kind]))
    return [
        [action for i, own in enumerate(actions) for action in (*before[rank][i], own, *after[rank][i])]
        for rank, actions in enumerate(compute)
    ]


def _lanes(compute: Sequence[Sequence[Action]]) -> dict[tuple[int, int], list[_Message]]:
    """Every message, by (sender, receiver), in the order in which it is sent."""
    rank_of = places(compute)
    place_of = {action: i for actions in compute for i, action in enumerate(actions)}
    lanes: dict[tuple[int, int], list[_Message]] = defaultdict(list)
    for rank, actions in enumerate(compute):
        for i, action in enumerate(actions):
            if action.kind not in _SENDS:
                continue
            send = action._replace(kind=_SENDS[action.kind])
            receive = receive_of(send)
            if rank_of.get(receive.stage, rank) != rank:
                lanes[rank, rank_of[receive.stage]].append(_Message(send, i, place_of[receive._replace(kind=_CONSUMERS[receive.kind])]))
    return dict(lanes)


def _receive_places(lane: list[_Message]) -> list[int]:
    """Before which forward or backward of the receiver each receive starts: one ahead of its use, in the lane's order."""
    found: list[int] = []
    latest = None
    for message in reversed(lane):
        wanted = max(0, message.used_by - 1)
        latest = wanted if latest is None else min(wanted, latest)
        found.append(latest)
    return found[::-1]


def _free_places(lane: list[_Message], back: list[_Message]) -> list[int | None]:
    """After which forward or backward of the sender each send's buffer goes; None for the end of its list."""
    found: list[int | None] = []
    for i, message in enumerate(lane):
        first = bisect_left(back, message.used_by, key=lambda answer: answer.sent_after)
        answers = [answer.used_by for answer in back[first : first + 1]]
        later = [message.sent_after for message in lane[i + PLACES_BEHIND : i + PLACES_BEHIND + 1]]
        found.append(min(answers + later, default=None))
    return found
