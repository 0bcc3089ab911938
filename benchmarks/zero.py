"""ZeRO and data parallelism, ours and what a user would take instead, in one run. ``python -m benchmarks.zero --help``."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from benchmarks import ours, peers
from benchmarks.launch import HOST, PRIVATE, launch
from benchmarks.measure import state_formula
from benchmarks.models import SIZES, build_model
from benchmarks.rank import run
from benchmarks.report import Limit, Results, overheads, table, verdicts
from benchmarks.variant import Variant, names_among

VARIANTS = {
    "single": Variant(peers.single),
    "ddp": Variant(peers.ddp),
    "ddp_view": Variant(partial(peers.ddp, bucket_view=True)),
    "stage0": Variant(partial(ours.bare, stage=0), 0),
    "stage1": Variant(partial(ours.bare, stage=1), 1),
    "stage2": Variant(partial(ours.bare, stage=2), 2),
    "stage3": Variant(partial(ours.bare, stage=3), 3),
    "trainer0": Variant(partial(ours.trainer, stage=0), 0),
    "trainer1": Variant(partial(ours.trainer, stage=1), 1),
    "trainer2": Variant(partial(ours.trainer, stage=2), 2),
    "trainer3": Variant(partial(ours.trainer, stage=3), 3),
    "plain_trainer": Variant(ours.plain_trainer),
    "zero_redundancy": Variant(peers.zero_redundancy, 1),
    "fsdp2": Variant(partial(peers.fsdp2, reshard=True), 3),
    "fsdp2_keep": Variant(partial(peers.fsdp2, reshard=False), 3),
    "deepspeed1": Variant(partial(peers.deepspeed_zero, stage=1), 1),
    "deepspeed2": Variant(partial(peers.deepspeed_zero, stage=2), 2),
    "deepspeed3": Variant(partial(peers.deepspeed_zero, stage=3), 3),
}

OPTIMIZER_BYTES = {"adamw": 8, "sgd": 0}
"""Of fp32 state a parameter."""

OURS = ("stage0", "stage1", "stage2", "stage3")
BUILT_ON = {f"trainer{stage}": f"stage{stage}" for stage in range(4)} | {"plain_trainer": "ddp"}

LIMITS = {
    "base": [Limit(name, "cpus", ratio) for name, ratio in zip(OURS, (1.02, 1.05, 1.05, 1.15), strict=True)],
    "tiny": [Limit(name, "walls", ratio) for name, ratio in zip(OURS, (1.0, 1.1, 1.1, 1.5), strict=True)],
    "shaped": [Limit(name, "walls", ratio) for name, ratio in zip(OURS, (1.0, 1.10, 1.10, 1.45), strict=True)],
}
"""What each stage may cost of DDP: CPU where the loopback is not throttled, since there a transfer is work for the same cores; on
``tiny`` the clock, since waiting for Python counts; on a throttled link the clock, since there overlap shows."""


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    if dist.is_torchelastic_launched():
        _measure(options)
    path = _path(options)
    if not options.show:
        path.unlink(missing_ok=True)
        launch("benchmarks.zero", arguments, ranks=options.ranks, link=options.link)
    if not path.exists():
        print(f"there is no {path}: the ranks did not come to their end")
        return 2
    return _report(Results.read(path), options)


def _measure(options: argparse.Namespace) -> NoReturn:
    """What each rank does; rank 0 writes the file."""
    warnings.filterwarnings("ignore")
    size = SIZES[options.size]
    size = replace(size, turn=options.turn or size.turn, rounds=options.rounds or size.rounds)
    records = run({name: VARIANTS[name] for name in options.variants}, size, options.optimizer)
    if dist.get_rank() == 0:
        params = sum(param.numel() for param in build_model(size).parameters())
        versions = {name: version(name) for name in ("torch", "lightning", "deepspeed")}
        setting = {"size": options.size, "turn": size.turn, "rounds": size.rounds, "ranks": options.ranks, "link": options.link}
        setting |= {"optimizer": options.optimizer, "parameters": params, "cpus": os.cpu_count(), "versions": versions}
        Results(setting, records).write(_path(options))
    dist.barrier()
    os._exit(0)  # Trainer threads and engines are left as they stand


def _report(results: Results, options: argparse.Namespace) -> int:
    setting, records = results.setting, results.records
    params, ranks, state = setting["parameters"], setting["ranks"], OPTIMIZER_BYTES[setting["optimizer"]]
    formulas = {name: state_formula(VARIANTS[name].stage, params, 1 if name == "single" else ranks, state) for name in records}
    parts = [f"{setting['size']}: {params / 1e6:.1f} M parameters", f"{ranks} ranks", f"link {setting['link']}"]
    parts += [setting["optimizer"], f"{setting['rounds']} rounds of {setting['turn']} steps"]
    print(f"\n{', '.join(parts)}; a step, all ranks together\n\n{table(records, options.anchor, formulas)}")
    if extra := overheads(records, BUILT_ON):
        print(f"\n{extra}")
    if not options.check:
        return 0
    lines, passed = verdicts(records, options.anchor, LIMITS["shaped" if setting["link"] not in (HOST, PRIVATE) else setting["size"]])
    print("\n" + "\n".join(lines))
    return 0 if passed else 1


def _path(options: argparse.Namespace) -> Path:
    link = "" if options.link == HOST else f"-{options.link}"
    return Path(options.out or f"runs/benchmarks/zero-{options.size}{link}.json")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.zero", description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--variants", type=names_among(VARIANTS), default=list(VARIANTS), help=f"comma-separated, of {', '.join(VARIANTS)}")
    parser.add_argument("--rounds", type=int, help="turns of each variant (default: as the size says)")
    parser.add_argument("--turn", type=int, help="steps in a turn (default: as the size says)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--link", default=HOST, help=f"{HOST}, {PRIVATE} (a network namespace of its own), or a rate such as 4gbit")
    parser.add_argument(
        "--optimizer", choices=OPTIMIZER_BYTES, default="adamw", help="sgd shows a wrong scale of gradients, AdamW hides it"
    )
    parser.add_argument("--anchor", default="ddp", help="what ratios are taken against")
    parser.add_argument("--check", action="store_true", help="judge our stages by the limits we set ourselves; exit 1 if one is missed")
    parser.add_argument("--out", help="the JSON file (default: under runs/benchmarks)")
    parser.add_argument("--show", action="store_true", help="measure nothing, report the JSON file that is there")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
