"""Pipelines: a step against the simulator's and against torch.distributed.pipelining's. ``python -m benchmarks.pipeline --help``.

Note [Stages that sleep]
~~~~~~~~~~~~~~~~~~~~~~~~
Few machines have a core for each of four stages. Here stages sleep instead of computing, a nap forward, a nap for the gradient of
the input and a nap for that of the weight, in proportion to the layers they hold, so that ranks overlap as on hardware of their own, and
what is left between a step and its simulation is what the engine costs: Python, autograd, messages that come late. Every layer
adds its weight to what passes, so that the gradients are real. Both sides run the same layers; each of their naps is a nap of the
simulator, which knows no latency. A stage's two backward naps are taken together where a schedule does not part them.

A layer takes longer than its naps: sleeps do, and it adds and sums up activations. How long it really takes is measured in each round,
while all ranks run one and nothing is sent; the simulator is given that. So is how long a message takes between two ranks that have just
slept, with isend and irecv alone: a virtual machine needs milliseconds for what takes it a tenth when it is awake, and more the longer it
has slept. What the simulator says with and without it stands side by side.

A step is compared with what was measured in the same round, and medians of ratios are shown: machines are faster and slower by the minute.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import truediv
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from typing_extensions import override

from benchmarks.launch import HOST, launch
from benchmarks.rank import join
from benchmarks.report import aligned
from lightning_par.comm import Mesh
from lightning_par.layout import SCHEDULES, ParallelLayout
from lightning_par.pipeline import Costs, Pipeline, simulate, training_plan

TORCH = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
    "zbv": pipelining.ScheduleZBVZeroBubble,
}
"""Torch's schedule of the same name; of ZB-H1 it has none for one stage a rank."""

SIMULATED, PEER = 1.03, 1.0
"""What a step may take of the simulator's, messages and all, and of torch's in the same run."""


class _Nap(torch.autograd.Function):
    """Sleeps forward, and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        time.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_seconds)
        return grad, None, None


class SleepingLayer(nn.Module):
    """See Note [Stages that sleep]."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seconds = seconds

    @override
    def forward(self, x: Tensor) -> Tensor:
        return _Nap.apply(x, self.seconds, self.seconds) + _Nap.apply(self.weight, 0.0, self.seconds)


class SleepingModel(nn.Module):
    def __init__(self, layers: int, seconds: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SleepingLayer(seconds) for _ in range(layers))

    @override
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _loss(output: Tensor, target: Tensor) -> Tensor:
    """Its gradient lies in one piece, which torch's receives ask for."""
    return output.square().sum()


def _measured(layer: nn.Module, elements: int, times: int = 5) -> Costs:
    """What a layer takes forward and backward, on average over all ranks. They call together."""
    took = torch.zeros(2, dtype=torch.float64)
    grad = torch.ones(1, elements)
    dist.barrier()
    for _ in range(times):
        x = torch.ones(1, elements, requires_grad=True)
        begin = time.perf_counter()
        output = layer(x)
        middle = time.perf_counter()
        output.backward(grad)
        took += torch.tensor([middle - begin, time.perf_counter() - middle])
    dist.all_reduce(took)
    forward, backward = (took / times / dist.get_world_size()).tolist()
    return Costs(forward, backward / 2, backward / 2)


def _hop(elements: int, nap: float, times: int = 3) -> float:
    """Seconds from a rank's last wink of sleep until its message is with the next rank, which waits for it; the median. All call."""
    rank, took = dist.get_rank(), list[float]()
    for sender in [rank for _ in range(times) for rank in range(dist.get_world_size() - 1)]:
        time.sleep(nap)
        if rank == sender:
            x, left = torch.ones(elements), torch.tensor([time.perf_counter()], dtype=torch.float64)
            dist.isend(x, rank + 1).wait()
            dist.send(left, rank + 1)
        elif rank == sender + 1:
            x, left = torch.empty(elements), torch.empty(1, dtype=torch.float64)
            dist.irecv(x, sender).wait()
            arrived = time.perf_counter()  # the same clock in all processes of a machine
            dist.recv(left, sender)
            took.append(arrived - left.item())
        dist.barrier()
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, took)
    return median(seconds for own in everyone for seconds in own)


Step = Callable[[], object]


@dataclass(frozen=True)
class Bench:
    """One setting: stages of equal length, so many micro-batches, so much sent between stages."""

    ranks: int
    microbatches: int
    elements: int  # of an activation, fp32
    nap: float  # seconds that a rank's forward of one micro-batch is to sleep

    def chunks(self, schedule: str) -> int:
        return 1 if SCHEDULES[schedule].refusal(1) is None and schedule != "interleaved_1f1b" else 2

    def simulated(self, schedule: str, costs: Costs | None = None) -> float:
        """Seconds of a step, if a layer takes this, or just its naps."""
        chunks = self.chunks(schedule)
        nap = self.nap / chunks
        return simulate(training_plan(schedule, self.ranks, chunks, self.microbatches), costs or Costs(nap, nap, nap)).makespan

    def costs(self, schedule: str) -> Costs:
        """What a layer takes, and a message. Every rank calls."""
        nap = self.nap / self.chunks(schedule)
        return replace(_measured(SleepingLayer(nap), self.elements), latency=_hop(self.elements, nap))

    def layers(self, schedule: str) -> SleepingModel:
        chunks = self.chunks(schedule)
        return SleepingModel(self.ranks * chunks, self.nap / chunks)

    def batch(self) -> Tensor:
        return torch.ones(self.microbatches, self.elements)

    def ours(self, schedule: str) -> Step:
        model = self.layers(schedule)
        group = Mesh.build(ParallelLayout(pp=self.ranks).resolve(self.ranks)).pp
        pipeline = Pipeline.split(model, group, schedule, self.chunks(schedule))
        pieces = self.batch().split(1)

        def forward(microbatch: int) -> Tensor:
            return _loss(model(pieces[microbatch].requires_grad_()), pieces[microbatch])

        return lambda: pipeline.forward_backward(forward, ["same"] * self.microbatches)

    def torch(self, schedule: str) -> Step:
        chunks, layers = self.chunks(schedule), self.layers(schedule).layers
        mine = SCHEDULES[schedule].stages_of(dist.get_rank(), self.ranks, chunks)
        stages = [pipelining.PipelineStage(layers[s], s, self.ranks * chunks, torch.device("cpu")) for s in mine]
        kind = TORCH[schedule]
        run = kind(stages if chunks > 1 else stages[0], self.microbatches, loss_fn=_loss, scale_grads=False)
        inputs, last = self.batch().requires_grad_(), self.ranks * chunks - 1
        given = {"target": torch.zeros(self.microbatches)} if last in mine else {}
        return lambda: run.step(*([inputs] if 0 in mine else []), **given)


@dataclass(frozen=True)
class Round:
    """What was measured within a minute: what a layer and a message take, and seconds of our step and of torch's, if it has such."""

    costs: Costs
    ours: float
    torch: float | None

    @classmethod
    def run(cls, bench: Bench, schedule: str, steps: Sequence[Step]) -> Round:
        """Every rank calls."""
        costs = bench.costs(schedule)
        ours, *torch = (_seconds(step) for step in steps)
        return cls(costs, ours, torch[0] if torch else None)


def _seconds(step: Step) -> float:
    """From barrier to barrier."""
    dist.barrier()
    begin = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - begin


@dataclass(frozen=True)
class Result:
    """Medians over rounds."""

    schedule: str
    microbatches: int
    hop: float
    simulated: float
    ours: float
    of_naps: float  # ours of the simulator's, which knows no messages
    of_simulated: float  # which knows them
    of_torch: float | None

    @classmethod
    def of(cls, bench: Bench, schedule: str, rounds: Sequence[Round]) -> Result:
        """Of a schedule."""
        simulated = [bench.simulated(schedule, each.costs) for each in rounds]
        naps = [bench.simulated(schedule, replace(each.costs, latency=0.0)) for each in rounds]
        ours = [each.ours for each in rounds]
        peers = [each.ours / each.torch for each in rounds if each.torch is not None]
        return cls(
            schedule,
            bench.microbatches,
            median(each.costs.latency for each in rounds),
            median(simulated),
            median(ours),
            median(map(truediv, ours, naps)),
            median(map(truediv, ours, simulated)),
            median(peers) if peers else None,
        )

    @property
    def is_kept(self) -> bool:
        """Whether the step took what it may."""
        return self.of_simulated <= SIMULATED and (self.of_torch is None or self.of_torch <= PEER)

    def row(self) -> list[str]:
        """As it is printed, under ``HEAD``."""
        milliseconds = [f"{1e3 * self.hop:.1f}", f"{1e3 * self.simulated:.0f}", f"{1e3 * self.ours:.0f}"]
        ratios = [f"{self.of_naps:.3f}", f"{self.of_simulated:.3f}", "-" if self.of_torch is None else f"{self.of_torch:.3f}"]
        return [self.schedule, str(self.microbatches), *milliseconds, *ratios]


HEAD = ["schedule", "micro-batches", "hop ms", "simulated ms", "ours ms", "of it without hops", "of simulated", "of torch's"]


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    if not dist.is_torchelastic_launched():
        return launch("benchmarks.pipeline", arguments, ranks=options.ranks, link=options.link)
    warnings.filterwarnings("ignore")
    rank, _ = join()
    results = []
    for schedule in options.schedules:
        for microbatches in options.microbatches:
            bench = Bench(options.ranks, microbatches, options.elements, options.nap / 1e3)
            steps = [bench.ours(schedule), *([bench.torch(schedule)] if schedule in TORCH else [])]
            for step in steps:
                step()  # to warm up
            results.append(Result.of(bench, schedule, [Round.run(bench, schedule, steps) for _ in range(options.rounds)]))
    kept = all(result.is_kept for result in results)
    if rank == 0:
        print(f"{options.ranks} ranks, naps of {options.nap:g} ms a rank, activations of {4 * options.elements / 2**20:.1f} MiB\n")
        print(aligned([HEAD, *(result.row() for result in results)]))
        if options.check:
            print(f"\nat most {SIMULATED:.2f} of the simulator's (with hops) and {PEER:.2f} of torch's: {'pass' if kept else 'MISS'}")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0 if kept or not options.check or rank else 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.pipeline", description="Pipeline steps against the simulator and torch.")
    parser.add_argument("--schedules", type=lambda text: text.split(","), default=list(SCHEDULES))
    parser.add_argument("--microbatches", type=lambda text: [int(m) for m in text.split(",")], default=[8, 16])
    parser.add_argument("--nap", type=float, default=100.0, help="milliseconds of a rank's forward of a micro-batch; backward twice")
    parser.add_argument("--elements", type=int, default=2**18, help="of an activation (fp32)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--link", default=HOST, help="as in benchmarks.zero")
    parser.add_argument("--check", action="store_true", help="exit 1 if a step takes more than it may")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
