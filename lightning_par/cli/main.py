"""`lightning-par COMMAND [overrides]`."""

from __future__ import annotations

import sys
from collections.abc import Callable

from lightning_par.cli import convert, inspect, launch, plan

COMMANDS: dict[str, Callable[[], None]] = {"train": launch.run, "convert": convert.run, "inspect": inspect.run, "plan": plan.run}

USAGE = """\
usage: lightning-par COMMAND [overrides]

  train    train the model that the config names: lightning-par train model=gpt parallel.tp=2 trainer.devices=2
           -m before the overrides runs one job for each combination; --help lists every choice, --cfg job prints the config
  convert  write a checkpoint in another format: lightning-par convert src=PATH dst=PATH format=native|ckpt|deepspeed|universal|hf
           for DeepSpeed with parallel.zero=1|2|3 parallel.dp=RANKS dtype=fp32|bf16|fp16; optimizer=false leaves its state out
  plan     draw a pipeline's schedule and tell its bubble: lightning-par plan pipeline pp=4 microbatches=8 schedule=1f1b; plan --help
  inspect  tell what is in a checkpoint of any of these formats: lightning-par inspect PATH [--tensors]
"""


def main() -> None:
    command, *overrides = sys.argv[1:] or ["--help"]
    if command in ("-h", "--help"):
        print(USAGE, end="")
        return
    if command not in COMMANDS:
        sys.exit(f"lightning-par: there is no command {command!r}; choose one of: {', '.join(COMMANDS)} (lightning-par --help)")
    sys.argv = [f"lightning-par {command}", *overrides]
    COMMANDS[command]()
