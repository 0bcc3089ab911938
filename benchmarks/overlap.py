"""How much of the communication hides behind computing. ``python -m benchmarks.overlap --help``.

Note [Layers that sleep]
~~~~~~~~~~~~~~~~~~~~~~~~
On a CPU a transfer over loopback is work for the cores that compute, so there is little to hide it behind; on a GPU there is. Here
layers sleep instead of computing. Each step is timed in four ways, with communication and without, with sleep and without::

    alone    = talking, awake  - silent, awake     what communication costs when nothing hides it
    exposed  = talking, asleep - silent, asleep    what of it a step still waits for
    hidden   = 1 - exposed / alone

The silent step runs the same code over a group whose calls do nothing. The optimizer does nothing either (it steps after zero_grad):
its part would be timed as well. The ways take turns, and of each the fastest turn counts: whatever else runs on the machine only adds, and
here it would be taken for exposed communication. The last bucket of a backward pass and the first unit of a forward pass have nothing
to hide behind: with 24 layers 4 % are out of reach.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from benchmarks.launch import HOST, launch
from benchmarks.ours import parallelize
from benchmarks.rank import join
from benchmarks.report import aligned
from lightning_par.comm import DONE, Group, Work
from lightning_par.zero import ReduceGroups, ZeroOptions

STEPS = 3
"""Timed in a turn."""


class _Sleep(torch.autograd.Function):
    """Takes ``nap[0]`` seconds forward and twice that backward; the weight's gradient is there at the end of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gradient: Tensor, nap: list[float]) -> Tensor:
        ctx.gradient, ctx.nap = gradient, nap
        time.sleep(nap[0])
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        time.sleep(2 * ctx.nap[0])
        return grad, ctx.gradient.clone(), None, None


class SleepingLayer(nn.Module):
    def __init__(self, gradient: Tensor, nap: list[float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros_like(gradient))
        self.gradient, self.nap = gradient, nap

    @override
    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x, self.weight, self.gradient, self.nap)


class Silent(Group):
    """A group of the same size and place whose calls do nothing."""

    @override
    def all_reduce(self, *args: Any, **kwargs: Any) -> Work:
        return DONE

    reduce_scatter = all_gather = all_reduce


@dataclass(frozen=True)
class Subject:
    """One way to train: its step, and what waits for all that a step leaves under way."""

    step: Callable[[int], object]
    settle: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Bench:
    """Builds subjects whose layers share one nap."""

    layers: int
    elements: int  # of a layer
    nap: list[float]  # seconds, in a list so that it can change between steps
    apart: dist.ProcessGroup  # for values

    def model(self) -> nn.Sequential:
        gradient = torch.ones(self.elements)
        return nn.Sequential(*(SleepingLayer(gradient, self.nap) for _ in range(self.layers)))

    def ours(self, stage: int, *, talks: bool) -> Subject:
        size, index = dist.get_world_size(), dist.get_rank()
        everyone = (Group if talks else Silent)("data", tuple(range(size)), index, dist.group.WORLD)
        values = (Group if talks else Silent)("values", tuple(range(size)), index, self.apart)
        groups = ReduceGroups(everyone, values, Group("replicate"), everyone, size, Group("pp"), Group("tp"))
        model = self.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data_parallel = parallelize(model, optimizer, groups, stage, ZeroOptions(bucket_mb=4 * self.elements / 2**20))

        def step(i: int) -> None:
            model(torch.ones(1, requires_grad=True)).sum().backward()
            data_parallel.finish()
            optimizer.zero_grad()
            optimizer.step()

        return Subject(step, data_parallel.settle_values)

    def ddp(self, *, talks: bool) -> Subject:
        alone = None if talks else dist.new_group([dist.get_rank()], use_local_synchronization=True)
        model = DistributedDataParallel(self.model(), process_group=alone, bucket_cap_mb=4 * self.elements / 2**20)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(i: int) -> None:
            model(torch.ones(1, requires_grad=True)).sum().backward()
            optimizer.zero_grad()
            optimizer.step()

        return Subject(step)

    def build(self, name: str, *, talks: bool) -> Subject:
        return self.ddp(talks=talks) if name == "ddp" else self.ours(int(name.removeprefix("stage")), talks=talks)


@dataclass(frozen=True)
class Overlap:
    """Seconds a step, by round; see Note [Layers that sleep]. Keys say whether a step talks and whether its layers sleep."""

    turns: dict[tuple[bool, bool], list[float]]

    def extra(self, *, asleep: bool) -> float:
        """What talking adds."""
        return min(self.turns[True, asleep]) - min(self.turns[False, asleep])

    @property
    def hidden(self) -> float:
        return 1 - self.extra(asleep=True) / self.extra(asleep=False)

    def row(self, name: str) -> list[str]:
        medians = (median(self.turns[True, asleep]) - median(self.turns[False, asleep]) for asleep in (False, True))
        return [
            name,
            *(f"{1e3 * self.extra(asleep=asleep):.1f}" for asleep in (False, True)),
            f"{self.hidden:.0%}",
            *(f"{1e3 * m:.1f}" for m in medians),
        ]


def measure(bench: Bench, names: list[str], nap: float, rounds: int) -> dict[str, Overlap]:
    """Every rank calls. The first round warms up and is left out."""
    subjects = {(name, talks): bench.build(name, talks=talks) for name in names for talks in (True, False)}
    overlaps = {name: Overlap(defaultdict(list)) for name in names}
    for number in range(rounds + 1):
        for asleep in (False, True):
            bench.nap[0] = nap if asleep else 0.0
            for (name, talks), subject in subjects.items():
                seconds = _steady(subject)
                if number:
                    overlaps[name].turns[talks, asleep].append(seconds)
    return overlaps


def _steady(subject: Subject) -> float:
    """Seconds of a step among others: the first one finds what a step before it left under way, and the last leaves its own."""
    dist.barrier()
    subject.step(0)
    begin = time.perf_counter()
    for i in range(1, STEPS + 1):
        subject.step(i)
    seconds = (time.perf_counter() - begin) / STEPS
    subject.settle()
    dist.barrier()
    return seconds


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    if not dist.is_torchelastic_launched():
        return launch("benchmarks.overlap", arguments, ranks=options.ranks, link=options.link)
    warnings.filterwarnings("ignore")
    rank, _ = join()
    bench = Bench(options.layers, options.elements, [0.0], dist.new_group())
    overlaps = measure(bench, options.variants, options.nap / 1e3, options.rounds)
    status = 0
    if rank == 0:
        mebibytes = 4 * options.elements / 2**20
        print(f"{options.layers} layers of {mebibytes:.0f} MiB, {options.nap:g} ms forward and {2 * options.nap:g} ms backward each\n")
        head = ["variant", "alone ms", "exposed ms", "hidden", "alone (medians)", "exposed (medians)"]
        print(aligned([head, *(overlap.row(name) for name, overlap in overlaps.items())]))
        missed = [name for name in overlaps if name != "ddp" and overlaps[name].hidden < options.least]
        if options.check:
            print(f"\nhidden at least {options.least:.0%}: " + (f"MISS: {', '.join(missed)}" if missed else "pass"))
            status = 1 if missed else 0
    dist.barrier()
    sys.stdout.flush()
    os._exit(status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.overlap", description="How much of the communication hides behind computing.")
    parser.add_argument("--variants", type=lambda text: text.split(","), default=["ddp", "stage0", "stage1", "stage2", "stage3"])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--elements", type=int, default=2**20, help="of a layer's weight, which is a bucket (fp32)")
    parser.add_argument("--nap", type=float, default=12.0, help="milliseconds a layer sleeps forward; backward twice that")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--link", default=HOST, help="as in benchmarks.zero")
    parser.add_argument("--check", action="store_true", help="exit 1 if less than --least is hidden at one of our stages")
    parser.add_argument("--least", type=float, default=0.9)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
