"""Schedules: the order in which each rank runs its stages forward and backward.

A schedule is a pure function ``(ranks, chunks, microbatches) -> [actions of rank 0, actions of rank 1, ...]`` of forwards and
backwards only; ``lower`` adds the messages. Stages are numbered along the model, ``0 .. ranks·chunks - 1``, and stage ``s`` lives on
rank ``s % ranks``. A new schedule is one function and one line of ``SCHEDULES``.

Note [Any number of micro-batches]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The interleaved order goes round in blocks of ``ranks`` micro-batches: each block visits chunk 0, then chunk 1, and so on, which is what
lets a micro-batch return to rank 0 just when rank 0 is free for its next chunk. A last block that is not full would break that
rhythm (and can deadlock). So the order is written for the next multiple of ``ranks``, and the actions of the micro-batches that do
not exist are dropped. That is always right: micro-batches do not depend on one another, so what remains is the old order, which
had no cycle, with some of its nodes gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lightning_par.pipeline.actions import Action, Kind

Schedule = Callable[[int, int, int], list[list[Action]]]


def gpipe(ranks: int, chunks: int, microbatches: int) -> list[list[Action]]:
    """All forwards, then all backwards. Holds every micro-batch at once; bubble (p-1)/m (Huang et al., arXiv 1811.06965)."""
    _require(ranks, chunks, microbatches, only_one_chunk="gpipe")
    return [
        [Action(rank, Kind.F, m) for m in range(microbatches)] + [Action(rank, Kind.B, m) for m in range(microbatches)]
        for rank in range(ranks)
    ]


def one_forward_one_backward(ranks: int, chunks: int, microbatches: int) -> list[list[Action]]:
    """Rank i runs p-1-i forwards ahead, then a forward and a backward in turn. Bubble (p-1)/m as GPipe, but rank i
    holds only min(m, p-i) micro-batches (Narayanan et al., arXiv 2006.09503)."""
    _require(ranks, chunks, microbatches, only_one_chunk="1f1b")
    return [_alternate(*_order(rank, ranks, 1, microbatches), ahead=ranks - 1 - rank) for rank in range(ranks)]


def interleaved_one_forward_one_backward(ranks: int, chunks: int, microbatches: int) -> list[list[Action]]:
    """1F1B over ``chunks`` stages a rank: bubble (p-1)/(v·m) (Narayanan et al., arXiv 2104.04473, section 2.2).

    See Note [Any number of micro-batches].
    """
    _require(ranks, chunks, microbatches)
    padded = -(-microbatches // ranks) * ranks
    plan = []
    for rank in range(ranks):
        ahead = ranks - 1 - rank if chunks == 1 else 2 * (ranks - 1 - rank) + (chunks - 1) * ranks
        order = _alternate(*_order(rank, ranks, chunks, padded), ahead=ahead)
        plan.append([action for action in order if action.microbatch < microbatches])
    return plan


def forward_only(ranks: int, chunks: int, microbatches: int) -> list[list[Action]]:
    """Forwards alone, for validation, test and prediction."""
    _require(ranks, chunks, microbatches)
    return [_order(rank, ranks, chunks, microbatches)[0] for rank in range(ranks)]


SCHEDULES: dict[str, Schedule] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved_1f1b": interleaved_one_forward_one_backward,
}


def _order(rank: int, ranks: int, chunks: int, microbatches: int) -> tuple[list[Action], list[Action]]:
    """The rank's forwards and its backwards, each in their order: blocks of ``ranks`` micro-batches, chunk by chunk."""
    blocks = [range(start, min(start + ranks, microbatches)) for start in range(0, microbatches, ranks)]
    stages = [chunk * ranks + rank for chunk in range(chunks)]
    forwards = [Action(stage, Kind.F, m) for block in blocks for stage in stages for m in block]
    backwards = [Action(stage, Kind.B, m) for block in blocks for stage in reversed(stages) for m in block]
    return forwards, backwards


def _alternate(forwards: list[Action], backwards: list[Action], *, ahead: int) -> list[Action]:
    """``ahead`` forwards, then a forward and a backward in turn, then the backwards that are left."""
    return list(_taken_in_turn(iter(forwards), iter(backwards), ahead))


def _taken_in_turn(forwards: Iterator[Action], backwards: Iterator[Action], ahead: int) -> Iterator[Action]:
    for _, forward in zip(range(ahead), forwards, strict=False):
        yield forward
    for forward in forwards:
        yield forward
        yield next(backwards)
    yield from backwards


def _require(ranks: int, chunks: int, microbatches: int, only_one_chunk: str | None = None) -> None:
    if min(ranks, chunks, microbatches) < 1:
        raise ValueError(f"ranks={ranks}, chunks={chunks}, microbatches={microbatches}: each must be at least 1")
    if only_one_chunk and chunks > 1:
        raise ValueError(f"chunks={chunks}: {only_one_chunk} runs one stage a rank; take interleaved_1f1b, or leave chunks at 1")
