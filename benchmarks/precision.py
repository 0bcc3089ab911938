"""What half precision costs in quality: the GPT recipe trained the same way in each. ``python -m benchmarks.precision --help``."""

from __future__ import annotations

import argparse
import functools
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist

from benchmarks.launch import launch
from benchmarks.report import aligned
from lightning_par import HybridParallelStrategy, ParallelPrecision
from lightning_par.recipes.gpt import GPTModule
from lightning_par.recipes.text import TextDataModule

PRECISIONS: dict[str, Callable[[], ParallelPrecision]] = {
    "32-true": functools.partial(ParallelPrecision, "32-true"),
    "bf16-mixed": functools.partial(ParallelPrecision, "bf16-mixed"),
    "16-mixed": functools.partial(ParallelPrecision, "16-mixed"),
    "bf16-true": functools.partial(ParallelPrecision, "bf16-true"),
    "16-true": functools.partial(ParallelPrecision, "16-true"),
    "bf16 pure": functools.partial(ParallelPrecision, "bf16-true", master_weights=False),
    "bf16 stochastic": functools.partial(ParallelPrecision, "bf16-true", master_weights=False, stochastic_rounding=True),
}
LIMITS = {"bf16-true": 0.005, "16-mixed": 0.01, "16-true": 0.01, "bf16 stochastic": 0.01}
"""By how much the held-out loss may lie above that of 32-true."""
SIZES = {"vocab_size": 256, "hidden": 128, "layers": 4, "heads": 4, "kv_heads": 2, "ffn": 320}


def train(precision: ParallelPrecision, options: argparse.Namespace) -> tuple[float, int]:
    """The held-out loss after training on this rank's part, and the steps that were skipped. Every rank calls."""
    L.seed_everything(options.seed, verbose=False)
    optimizer = functools.partial(torch.optim.AdamW, lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    module = GPTModule(dict(SIZES), optimizer=optimizer, warmup_steps=25)
    data = TextDataModule(sequence_length=128, batch_size=16, seed=options.seed, cache_dir=options.cache)
    trainer = L.Trainer(
        accelerator=options.accelerator,
        devices=dist.get_world_size(),
        strategy=HybridParallelStrategy(zero=options.zero),
        plugins=[precision],
        max_steps=options.steps,
        gradient_clip_val=1.0,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data)
    trainer.limit_val_batches = 1.0
    (told,) = trainer.validate(module, datamodule=data, verbose=False)
    return told["val_loss"], precision.scale.skipped if precision.scale is not None else 0


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    if not dist.is_torchelastic_launched():
        return launch("benchmarks.precision", arguments, ranks=options.ranks)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo" if options.accelerator == "cpu" else None)
    results: dict[str, tuple[float, int, float]] = {}
    for name in options.precisions:
        begin = time.perf_counter()
        results[name] = (*train(PRECISIONS[name](), options), time.perf_counter() - begin)
        if dist.get_rank() == 0:
            print(f"{name}: {results[name][0]:.4f}", file=sys.stderr, flush=True)
    status = _report(results, options) if dist.get_rank() == 0 else 0
    dist.barrier()
    sys.stdout.flush()
    os._exit(status)


def _report(results: dict[str, tuple[float, int, float]], options: argparse.Namespace) -> int:
    base = results["32-true"][0]
    rows = [["precision", "held-out loss", "above 32-true", "limit", "", "skipped", "seconds"]]
    missed = False
    for name, (loss, skipped, seconds) in results.items():
        over, limit = loss / base - 1, LIMITS.get(name)
        kept = limit is None or over <= limit
        missed |= not kept
        verdict = "" if limit is None else "pass" if kept else "MISS"
        rows.append([name, f"{loss:.4f}", f"{over:+.2%}", "" if limit is None else f"{limit:.1%}", verdict, str(skipped), f"{seconds:.0f}"])
    print(f"\nGPT of {options.steps} steps, learning rate {options.lr:g}, zero={options.zero}, {options.ranks} ranks\n\n{aligned(rows)}")
    return int(missed and options.check)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.precision", description=__doc__)
    parser.add_argument("--precisions", type=lambda text: ["32-true", *text.split(",")], default=list(PRECISIONS))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--zero", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--accelerator", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cache", type=Path, default=Path("runs/cache"))
    parser.add_argument("--check", action="store_true", help="exit 1 if a limit is missed")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
