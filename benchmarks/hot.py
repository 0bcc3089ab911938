"""Where the time of a step goes: its phases side by side, and Python's top functions. ``python -m benchmarks.hot --help``."""

from __future__ import annotations

import argparse
import cProfile
import io
import os
import pstats
import sys
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch.distributed as dist

from benchmarks.launch import HOST, launch
from benchmarks.models import SIZES, Size
from benchmarks.rank import join
from benchmarks.report import aligned
from benchmarks.variant import Built, Context, names_among
from benchmarks.zero import VARIANTS

PHASES = ("forward", "hooks", "backward", "step", "zero", "settle")
"""Of ``Context.mark``. For ours ``hooks`` is autograd's backward and ``backward`` is what ``finish`` still had to do."""


class Phases:
    """Seconds of this rank by phase, one entry a step: by the clock, and of the CPU (all threads)."""

    def __init__(self) -> None:
        self.walls: dict[str, list[float]] = defaultdict(list)
        self.cpus: dict[str, list[float]] = defaultdict(list)
        self.start()

    def start(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def mark(self, phase: str) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        self.walls[phase].append(wall - self._wall)
        self.cpus[phase].append(cpu - self._cpu)
        self._wall, self._cpu = wall, cpu

    def row(self, name: str, seconds: dict[str, list[float]]) -> list[str]:
        middles = {phase: median(values) * 1e3 for phase, values in seconds.items()}
        cells = [f"{middles[phase]:.2f}" if phase in middles else "" for phase in PHASES]
        return [name, *cells, f"{sum(middles.values()):.2f}"]


def compare(names: Sequence[str], size: Size) -> dict[str, Phases]:
    """Interleaved turns of all variants, each step cut into its phases. Every rank calls."""
    built, phases = {}, {}
    for name in names:
        context, phases[name] = Context(size, dist.get_rank(), dist.get_world_size()), Phases()
        built[name] = VARIANTS[name].build(context)
        _steps(built[name], 0, 3)
        context.mark = phases[name].mark
    for turn in range(size.rounds):
        for name, subject in built.items():
            dist.barrier()
            for i in range(size.turn):
                phases[name].start()
                subject.step(3 + turn * size.turn + i)
            subject.settle()
            phases[name].mark("settle")
    return phases


def profile(name: str, size: Size, *, steps: int, top: int) -> str:
    """cProfile over ``steps`` steps: the functions with the most time of their own. Every rank calls."""
    profiler, threads = cProfile.Profile(), []

    def follow(*event: object) -> None:  # called in every thread that a builder starts: the Trainer runs in one
        threads.append(threading.current_thread())
        profiler.enable()

    threading.setprofile(follow)
    try:
        subject = VARIANTS[name].build(Context(size, dist.get_rank(), dist.get_world_size()))
    finally:
        threading.setprofile(None)
    _steps(subject, 0, 3)
    dist.barrier()
    profiler.clear()
    if threads:
        _steps(subject, 3, steps)
    else:
        profiler.runcall(_steps, subject, 3, steps)
    text = io.StringIO()
    stats = pstats.Stats(profiler, stream=text).strip_dirs()
    stats.sort_stats("tottime").print_stats(top)
    return text.getvalue()


def _steps(subject: Built, first: int, count: int) -> None:
    for i in range(first, first + count):
        subject.step(i)
    subject.settle()


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    if not dist.is_torchelastic_launched():
        return launch("benchmarks.hot", arguments, ranks=2, link=options.link)
    warnings.filterwarnings("ignore")
    rank, _ = join()
    size = SIZES[options.size]
    size = replace(size, rounds=options.rounds or size.rounds)
    phases = compare(options.variants, size)
    profiles = {name: profile(name, size, steps=options.steps, top=options.top) for name in options.profile}
    if rank == 0:
        for what in ("cpus", "walls"):
            rows = [phases[name].row(name, getattr(phases[name], what)) for name in options.variants]
            print(f"\n{what.removesuffix('s')} ms by phase, rank 0, median over steps\n{aligned([['variant', *PHASES, 'sum'], *rows])}")
        for name, text in profiles.items():
            print(f"\n{name}, {options.steps} steps, rank 0\n{text}")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.hot", description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument(
        "--variants", type=names_among(VARIANTS), default=["ddp", "ddp_view", "stage0", "stage1"], help="whose phases are compared"
    )
    parser.add_argument(
        "--profile", type=names_among(VARIANTS), default=["stage0", "stage1"], help="who is profiled (slower under the profiler)"
    )
    parser.add_argument("--rounds", type=int, help="turns of each variant (default: as the size says)")
    parser.add_argument("--steps", type=int, default=50, help="profiled")
    parser.add_argument("--top", type=int, default=25, help="functions shown")
    parser.add_argument("--link", default=HOST, help="as in benchmarks.zero")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
