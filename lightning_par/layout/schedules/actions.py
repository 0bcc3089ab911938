"""Action: one thing a rank does for one stage and one micro-batch, printed as ``2F0``."""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """What is done. Schedules speak of the first three; ``pipeline.lower`` adds the rest."""

    F = "F"  # run the stage forward
    B = "B"  # run it backward; where a W follows, as far as the gradient of its input needs it
    W = "W"  # the rest of its backward: the gradients of its parameters
    SEND_F = "SEND_F"  # start sending the stage's output to the next stage
    RECV_F = "RECV_F"  # start receiving the stage's input from the previous stage
    SEND_B = "SEND_B"  # start sending the gradient of the stage's input to the previous stage
    RECV_B = "RECV_B"  # start receiving the gradient of the stage's output from the next stage
    FREE_F = "FREE_F"  # SEND_F has arrived: let go of what it sent
    FREE_B = "FREE_B"  # SEND_B has arrived: let go of what it sent

    @property
    def is_compute(self) -> bool:
        return self in (Kind.F, Kind.B, Kind.W)


class Action(NamedTuple):
    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The inverse of ``str``."""
        match = re.fullmatch(r"(\d+)([A-Z_]+)(\d+)", text)
        if match is None or match[2] not in Kind.__members__:
            raise ValueError(f"{text!r} is not an action: write stage, kind and micro-batch, as in 2F0 or 1RECV_B3")
        return cls(int(match[1]), Kind[match[2]], int(match[3]))


def show(actions: list[Action]) -> str:
    """A rank's list on one line."""
    return " ".join(map(str, actions))


def read(line: str) -> list[Action]:
    """The inverse of ``show``."""
    return [Action.parse(word) for word in line.split()]
