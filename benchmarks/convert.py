"""What a conversion costs in memory and time, from each format to each. ``python -m benchmarks.convert --help``."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from benchmarks.report import aligned
from lightning_par import DeepSpeedTarget, convert
from lightning_par.checkpoint.source import MODULE, OPTIMIZERS, Entry, Source
from lightning_par.checkpoint.whole import write_native

MEGA = 1e6
SLACK = 200 * MEGA
"""A conversion may take this, and twice the largest tensor."""
STEPS = [("native", "ckpt"), ("ckpt", "deepspeed"), ("deepspeed", "universal"), ("universal", "native"), ("native", "hf")]
"""Each from what the one before made."""


def make(path: Path, size: float, largest: float) -> None:
    """A native checkpoint of about ``size`` bytes, AdamW's moments included: one matrix of ``largest`` bytes, others a quarter of it."""
    count = max(1, round((size / 3 - largest) / (largest / 4)))
    numels = [int(largest) // 4, *[int(largest) // 16] * count]
    entries: dict[str, Entry] = {}
    for place, numel in enumerate(numels):
        name = f"layers.{place}.weight"
        for seed, entry in enumerate((f"model.{name}", f"optimizer.0.{name}.exp_avg", f"optimizer.0.{name}.exp_avg_sq")):
            entries[entry] = Entry((numel // 64, 64), torch.float32, lambda numel=numel, seed=seed + 3 * place: _values(numel, seed))
        entries[f"optimizer.0.{name}.step"] = Entry.of(torch.tensor(1.0))
    names = [f"layers.{place}.weight" for place in range(len(numels))]
    told = {"aliases": {name: name for name in names}, "buffers": [], "frozen": [], "huggingface": {"prefix": "", "config": {}}}
    meta = {OPTIMIZERS: [{"groups": [{"params": names, "lr": 0.1}], "scalars": {}}], MODULE: told, "global_step": 1}
    write_native(Source(path, "made", meta, entries), path)


def _values(numel: int, seed: int) -> torch.Tensor:
    return torch.randn(numel // 64, 64, generator=torch.Generator().manual_seed(seed))


def measure(src: str, dst: str, format: str) -> None:
    """In a process of its own: print by how much its memory grew at most, without what it maps of files, and seconds."""
    torch.zeros(1).add_(1.0)
    before, over = _anonymous(), threading.Event()
    peak = [before]

    def watch() -> None:
        while not over.wait(0.002):
            peak[0] = max(peak[0], _anonymous())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    begin = time.perf_counter()
    convert(src, dst, format, target=DeepSpeedTarget(2, 2) if format == "deepspeed" else None)
    seconds = time.perf_counter() - begin
    over.set()
    watcher.join()
    print(peak[0] - before, seconds)


def _anonymous() -> int:
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")) * 1024


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    if options.one:
        measure(*options.one)
        return 0
    limit, missed = 2 * options.largest * MEGA + SLACK, False
    rows = [["from", "to", "grew MB", "limit MB", "", "seconds", "MB/s of source"]]
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="convert-") as folder:
        places = {"native": Path(folder) / "made"}
        make(places["native"], options.size * MEGA, options.largest * MEGA)
        for source, format in STEPS:
            size = _bytes(places[source])
            to = Path(folder) / f"to-{format}"
            command = [sys.executable, "-m", "benchmarks.convert", "--one", str(places[source]), str(to), format]
            grown, seconds = map(float, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-2:])
            kept = grown < limit
            missed |= not kept
            verdict = "pass" if kept else "MISS"
            rows.append(
                [source, format, f"{grown / MEGA:.0f}", f"{limit / MEGA:.0f}", verdict, f"{seconds:.1f}", f"{size / MEGA / seconds:.0f}"]
            )
            places[format] = to
    print(f"{options.size:g} MB, the largest tensor {options.largest:g} MB; written, read back and compared\n\n{aligned(rows)}")
    return int(missed and options.check)


def _bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.convert", description=__doc__)
    parser.add_argument("--size", type=float, default=1000, help="MB of the checkpoint; the disk needs room for seven of it")
    parser.add_argument("--largest", type=float, default=64, help="MB of its largest tensor")
    parser.add_argument("--folder", type=Path, help="where there is room; by default where temporary files go")
    parser.add_argument("--check", action="store_true", help="exit 1 if the limit is missed")
    parser.add_argument("--one", nargs=3, metavar=("SRC", "DST", "FORMAT"), help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
