"""`lightning-par COMMAND [overrides]`."""

from __future__ import annotations

import sys
from collections.abc import Callable

from lightning_par.cli import launch

COMMANDS: dict[str, Callable[[], None]] = {"train": launch.run}

USAGE = """\
usage: lightning-par COMMAND [overrides]

  train    train the model that the config names: lightning-par train model=gpt parallel.tp=2 trainer.devices=2
           -m before the overrides runs one job for each combination; --help lists every choice, --cfg job prints the config
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
