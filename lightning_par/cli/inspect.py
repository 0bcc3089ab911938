"""`lightning-par inspect PATH`: what is in a checkpoint, of any format we read."""

from __future__ import annotations

import sys

from lightning_par.checkpoint import CheckpointError, open_checkpoint, summary

USAGE = "usage: lightning-par inspect PATH [--tensors]"


def run() -> None:
    """The command `inspect`, with its arguments in `sys.argv`. Only what is asked for is read: no tensor is."""
    paths = [argument for argument in sys.argv[1:] if argument != "--tensors"]
    if len(paths) != 1 or paths[0] in ("-h", "--help"):
        sys.exit(USAGE)
    try:
        source = open_checkpoint(paths[0])
    except CheckpointError as error:
        sys.exit(f"lightning-par inspect: {error}")
    rows = list(summary(source))
    if "--tensors" in sys.argv:
        rows += [(name, f"{list(entry.shape)} {str(entry.dtype).removeprefix('torch.')}") for name, entry in source.entries.items()]
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name:<{width}}  {value}" for name, value in rows))
