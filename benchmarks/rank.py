"""One rank of a benchmark: build the variants, let them take turns, bring the numbers of all ranks together.

Note [Turns]
~~~~~~~~~~~~
All variants live in the same processes and take turns, A B C A B C, so that whatever else the machine does hits them alike; what
is compared is the ratio within a round. Memory is read once, while a variant takes its first steps, as what was added since before
it was built.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measure import Turn, heap_bytes, storages, take_turn
from benchmarks.models import OptimizerName, Size
from benchmarks.variant import Built, Context, UnavailableError, Variant

CHECKED_STEPS = 5
"""Steps before anything is timed; their losses are compared with the single process."""


@dataclass
class Record:
    """What one variant showed. ``skipped`` says why there is nothing else."""

    skipped: str | None = None
    losses: list[float] = field(default_factory=list)  # mean over the ranks that have one
    state_bytes: list[int] = field(default_factory=list)  # by rank, right before an optimizer step
    heap_bytes: list[int] = field(default_factory=list)
    traced_bytes: int | None = None  # all ranks, one step, as comm.trace counts them
    walls: list[float] = field(default_factory=list)  # by round
    cpus: list[float] = field(default_factory=list)
    wires: list[int] = field(default_factory=list)


def join() -> tuple[int, int]:
    """This rank and the world's size, once the gloo world stands and everything that is lazy has been used."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    weight = torch.randn(256, 256, requires_grad=True)
    (weight @ weight).sum().backward()
    dist.all_reduce(weight.detach())
    return dist.get_rank(), dist.get_world_size()


def run(variants: Mapping[str, Variant], size: Size, optimizer: OptimizerName) -> dict[str, Record]:
    """All variants, interleaved. Every rank calls; every rank gets the same records."""
    rank, world = join()
    records, running = {}, {}
    for name, variant in variants.items():
        context = Context(size, rank, world, optimizer)
        records[name], built = _begin(name, variant, context)
        if built is not None:
            running[name] = built
        _say(f"{name}: {records[name].skipped or 'ready'}")
    step = CHECKED_STEPS + 1
    for turn in range(size.rounds):
        for name, built in running.items():
            _note(records[name], take_turn(built.step, built.settle, step, size.turn))
        step += 1 + size.turn
        _say(f"round {turn + 1} of {size.rounds}", end="\r")
    _say("")
    return records


def _begin(name: str, variant: Variant, context: Context) -> tuple[Record, Built | None]:
    """Build a variant and take its first steps; None if it cannot run on some rank."""
    record, built, problem = Record(), None, None
    try:
        built = _first_steps(variant, context, record)
    except UnavailableError as error:
        problem = str(error)
    except Exception as error:  # a peer that fails is a result, as long as it fails on all ranks
        traceback.print_exc()
        problem = f"{type(error).__name__}: {error}"
    problems = [text for text in _from_all(problem) if text is not None]
    if problems:
        return Record(skipped=problems[0].splitlines()[0]), None
    return record, built


def _first_steps(variant: Variant, context: Context, record: Record) -> Built:
    before, heap_before = storages(), heap_bytes()
    built = variant.build(context)
    losses = [built.step(i) for i in range(CHECKED_STEPS - 1)]
    held: dict[str, int] = {}

    def look(phase: str) -> None:
        if phase == "backward":
            held["state"] = sum(size for address, size in storages().items() if before.get(address) != size)
            held["heap"] = heap_bytes() - heap_before

    context.mark = look
    losses.append(built.step(CHECKED_STEPS - 1))
    context.mark = lambda phase: None
    record.losses = [_mean([None if loss is None else float(loss) for loss in step]) for step in zip(*_from_all(losses), strict=True)]
    built.settle()
    record.state_bytes = _from_all(held.get("state", 0))
    record.heap_bytes = _from_all(held.get("heap", 0))
    record.traced_bytes = _trace(built)
    return built


def _trace(built: Built) -> int | None:
    if built.trace is None:
        return None
    with built.trace.recording() as calls:
        built.step(CHECKED_STEPS)
    built.settle()
    return sum(_from_all(sum(call.bytes for call in calls)))


def _note(record: Record, turn: Turn) -> None:
    record.walls.append(turn.wall)
    record.cpus.append(turn.cpu)
    record.wires.append(turn.wire)


def _from_all(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _mean(values: list[float | None]) -> float:
    there = [value for value in values if value is not None]
    return sum(there) / len(there)


def _say(text: str, end: str = "\n") -> None:
    if dist.get_rank() == 0:
        print(text, end=end, flush=True, file=sys.stderr)
