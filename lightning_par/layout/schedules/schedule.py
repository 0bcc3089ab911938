"""Schedule: where the stages of a pipeline stand, and the order in which each rank runs them.

Note [Any number of micro-batches]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Some orders have a rhythm that needs a multiple of something, or at least so many micro-batches. They are written for the next number
that suits them, and the actions of the micro-batches that do not exist are dropped. That is always right: micro-batches do not
depend on one another, so what remains is the old order, which had no cycle, with some of its nodes gone. For the same reason the
forwards of a schedule alone are an order for validation, test and prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_par.layout.schedules.actions import Action, Kind


class Sizes(NamedTuple):
    """What an order is written for."""

    ranks: int
    chunks: int
    microbatches: int


Order = Callable[[Sizes, int], Sequence[Action]]
"""A rank's forwards and backwards (in one piece or as B and W). May go on to micro-batches beyond the last; those are dropped."""


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule. Stages are numbered along the model, ``0 .. ranks·chunks - 1``.

    Attributes:
        name: as a layout has it.
        order: a pure function of the sizes and a rank.
        chunks: how many stages a rank may hold, from (least) to (most; None: any number).
        turns: where stages stand. False: chunk after chunk from the first rank to the last (stage s on rank ``s % ranks``). True: every
            other chunk comes back from the last rank to the first, so that stages which follow each other on one rank need no message.
    """

    name: str
    order: Order
    chunks: tuple[int, int | None] = (1, 1)
    turns: bool = False

    def __call__(self, ranks: int, chunks: int, microbatches: int) -> list[list[Action]]:
        """Every rank's list.

        Raises:
            ValueError: for sizes that no pipeline has, or this schedule does not take.
        """
        if min(ranks, chunks, microbatches) < 1:
            raise ValueError(f"ranks={ranks}, chunks={chunks}, microbatches={microbatches}: each must be at least 1")
        if refusal := self.refusal(chunks):
            raise ValueError(refusal)
        sizes = Sizes(ranks, chunks, microbatches)
        return [[action for action in self.order(sizes, rank) if action.microbatch < microbatches] for rank in range(ranks)]

    def forwards(self, ranks: int, chunks: int, microbatches: int) -> list[list[Action]]:
        """Every rank's list without backwards. See Note [Any number of micro-batches]."""
        return [[action for action in actions if action.kind is Kind.F] for actions in self(ranks, chunks, microbatches)]

    def refusal(self, chunks: int) -> str | None:
        """Why a rank cannot hold this many stages, and the way out; None where it can."""
        least, most = self.chunks
        if least <= chunks and (most is None or chunks <= most):
            return None
        if most is None:
            return f"chunks={chunks}: {self.name} needs at least {least} stages on each rank"
        if least == most == 1:
            return f"chunks={chunks}: {self.name} runs one stage a rank; leave chunks at 1, or take schedule=interleaved_1f1b"
        allowed = str(least) if least == most else f"{least} to {most}"
        return f"chunks={chunks}: {self.name} runs {allowed} stages on each rank; set chunks={least}"

    def rank_of(self, stage: int, ranks: int) -> int:
        """The pipeline rank on which a stage stands."""
        chunk, place = divmod(stage, ranks)
        return ranks - 1 - place if self.turns and chunk % 2 else place

    def stages_of(self, rank: int, ranks: int, chunks: int) -> list[int]:
        """The stages that stand on a pipeline rank, in the order of the model."""
        return [stage for stage in range(ranks * chunks) if self.rank_of(stage, ranks) == rank]


def in_turn(forwards: Sequence[Action], backwards: Sequence[Action], *, ahead: int) -> list[Action]:
    """``ahead`` forwards, then a forward and a backward in turn, then the backwards that are left."""
    pairs = zip(forwards[ahead:], backwards, strict=False)
    turns = [action for pair in pairs for action in pair]
    return [*forwards[:ahead], *turns, *backwards[len(turns) // 2 :]]
