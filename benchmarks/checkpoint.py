"""What saving costs: bytes on the disk, and how long training stands still. ``python -m benchmarks.checkpoint --help``."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.launch import launch
from benchmarks.models import ADAMW, SIZES, Decoder, Size, global_batch
from benchmarks.report import aligned
from lightning_par import HybridParallelStrategy

LIMITS = {"bytes": 1.02, "stall": 1.2}
"""Bytes written, of the bytes of the state. What a step waits for an asynchronous save, of the time to copy the same shards in memory."""


class Module(L.LightningModule):
    def __init__(self, size: Size) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Decoder(size.config)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.model(*batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), **ADAMW)


class Measure(L.Callback):
    """Measures after the second step, when the optimizer has its state: in the middle of training, as a save would be."""

    def __init__(self, folder: Path, rounds: int) -> None:
        self.folder, self.rounds = folder, rounds
        self.found: dict[str, float] = {}
        self._began = 0.0
        self._steps: dict[bool, list[float]] = {False: [], True: []}

    def on_train_batch_start(self, *_: Any) -> None:
        self._began = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        step = time.perf_counter() - self._began
        if trainer.global_step == 2:
            self._measure(trainer)
        elif trainer.global_step > 3:
            writes = trainer.global_step % 2 == 1
            self._steps[writes].append(step)
            trainer.strategy.wait_for_checkpoint()
            if not writes and trainer.strategy.async_save:  # the next step trains while this is written
                trainer.save_checkpoint(self.folder / "next")
        dist.barrier()

    def on_train_end(self, *_: Any) -> None:
        self.found |= {f"step, writing={writes}": statistics.median(steps) for writes, steps in self._steps.items()}

    def _measure(self, trainer: L.Trainer) -> None:
        shards = _shards(trainer)
        buffers = [torch.empty_like(shard) for shard in shards]
        name = "async" if trainer.strategy.async_save else "sync"

        def copy() -> None:
            for buffer, shard in zip(buffers, shards, strict=True):
                buffer.copy_(shard)

        def plain() -> None:
            with open(self.folder / f"plain-{trainer.global_rank}", "wb") as file:
                torch.save(shards, file)
                file.flush()
                os.fsync(file.fileno())

        def save() -> None:
            trainer.save_checkpoint(self.folder / name)

        times: dict[str, list[float]] = {"copy": [], name: [], "torch.save": []}
        for _ in range(self.rounds + 1):
            times["copy"].append(_seconds(copy))
            times[name].append(_seconds(save))
            trainer.strategy.wait_for_checkpoint()
            times["torch.save"].append(_seconds(plain))
        self.found |= {f"first {name}": times[name][0]}
        self.found |= {key: statistics.median(values[1:]) for key, values in times.items()}
        self.found["ratio"] = statistics.median(mine / other for mine, other in zip(times[name][1:], times["copy"][1:], strict=True))
        total = torch.tensor([sum(shard.nbytes for shard in shards)], dtype=torch.float64)
        dist.all_reduce(total)
        self.found["state"] = total.item()
        self.found["written"] = float(sum(file.stat().st_size for file in (self.folder / name).iterdir()))


def _shards(trainer: L.Trainer) -> list[Tensor]:
    """What this rank writes of weights and optimizer."""
    strategy = trainer.strategy
    shards = strategy.lightning_module_state_dict() | strategy.optimizer_state(trainer.optimizers[0])["shards"]
    return [shard.data for shard in shards.values() if shard.writes]


def _seconds(action: Callable[[], None]) -> float:
    """Of the slowest rank. All ranks call."""
    dist.barrier()
    begin = time.perf_counter()
    action()
    taken = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def run(folder: Path, options: argparse.Namespace, *, async_save: bool) -> dict[str, float]:
    """Every rank's numbers of one training run, the worst of each. All ranks call."""
    size = SIZES[options.size]
    tokens, targets = global_batch(size, 0)
    ranks = dist.get_world_size()
    mine = slice(dist.get_rank() * size.batch // ranks, (dist.get_rank() + 1) * size.batch // ranks)
    measure = Measure(folder, options.rounds)
    steps = 3 + 2 * options.rounds
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=HybridParallelStrategy(zero=options.zero, async_save=async_save),
        callbacks=[measure],
        max_steps=steps,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(size), DataLoader([(tokens[mine], targets[mine])] * steps, batch_size=None))
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, measure.found)
    return {key: max(found[key] for found in everyone) for key in measure.found}


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    if not dist.is_torchelastic_launched():
        return launch("benchmarks.checkpoint", arguments, ranks=options.ranks)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    box = [tempfile.mkdtemp(dir=options.folder) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(box)
    try:
        found = {async_save: run(Path(box[0]), options, async_save=async_save) for async_save in (False, True)}
        status = _report(found[False], found[True], options) if dist.get_rank() == 0 else 0
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(box[0], ignore_errors=True)
    sys.stdout.flush()
    os._exit(status)


def _report(sync: dict[str, float], later: dict[str, float], options: argparse.Namespace) -> int:
    kept = {"bytes": sync["written"] / sync["state"], "stall": later["ratio"]}
    rows = [["what", "seconds", "of", "", "limit", ""]]
    rows.append(["copy of the shards in memory", f"{later['copy']:.3f}", "", "", "", ""])
    rows.append(["asynchronous save, as a step waits for it", f"{later['async']:.3f}", "the copy", *_verdict("stall", kept)])
    rows.append(
        ["the first, which gets its memory", f"{later['first async']:.3f}", "the copy", *_ratio(later["first async"], later["copy"])]
    )
    rows.append(["torch.save of the same bytes", f"{sync['torch.save']:.3f}", "", "", "", ""])
    rows.append(["save at once", f"{sync['sync']:.3f}", "torch.save", *_ratio(sync["sync"], sync["torch.save"])])
    idle, busy = later["step, writing=False"], later["step, writing=True"]
    rows.append(["a step while nothing is written", f"{idle:.3f}", "", "", "", ""])
    rows.append(["a step while a checkpoint is written", f"{busy:.3f}", "the step", *_ratio(busy, idle)])
    load = ", ".join(f"{load:.2f}" for load in os.getloadavg())
    print(
        f"{sync['state'] / 1e6:,.1f} MB of state on {options.ranks} ranks, zero={options.zero}; load averages {load}\n\n{aligned(rows)}\n"
    )
    value, limit, verdict = _verdict("bytes", kept)
    print(f"bytes written, of the bytes of the state: {value} (limit {limit}) {verdict}")
    return int(options.check and any(kept[name] > limit for name, limit in LIMITS.items()))


def _ratio(value: float, other: float) -> list[str]:
    return [f"{value / other:.2f}", "", ""]


def _verdict(name: str, kept: dict[str, float]) -> list[str]:
    return [f"{kept[name]:.4g}", f"{LIMITS[name]:g}", "pass" if kept[name] <= LIMITS[name] else "MISS"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument("--size", choices=tuple(SIZES), default="base")
    parser.add_argument("--zero", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=None, help="where to write; the system's folder for temporary files if left out")
    parser.add_argument("--check", action="store_true", help="exit 1 if a limit is missed")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
