"""Level 4. Checkpoints: sharded folders that know nothing of the layout they were written under, and every other format we read."""

from lightning_par.checkpoint.collect import collect
from lightning_par.checkpoint.conversion import WRITERS, Report, convert, open_checkpoint, summary
from lightning_par.checkpoint.deepspeed.write import Target
from lightning_par.checkpoint.errors import CheckpointError
from lightning_par.checkpoint.layers import find_layers
from lightning_par.checkpoint.native import is_native, read_index, read_meta, read_tensors, save
from lightning_par.checkpoint.plain import plain
from lightning_par.checkpoint.shard import Shard
from lightning_par.checkpoint.source import (
    AVERAGING_STATE,
    CURRENT,
    CURRENT_STATE,
    DATA,
    EXTRA_STATES,
    MODEL,
    MODULE,
    OPTIMIZER,
    OPTIMIZERS,
    RNG,
    Joining,
    Source,
    is_extra,
)
from lightning_par.checkpoint.whole import as_single

__all__ = [
    "AVERAGING_STATE",
    "CURRENT",
    "CURRENT_STATE",
    "DATA",
    "EXTRA_STATES",
    "MODEL",
    "MODULE",
    "OPTIMIZER",
    "OPTIMIZERS",
    "RNG",
    "WRITERS",
    "CheckpointError",
    "Joining",
    "Report",
    "Shard",
    "Source",
    "Target",
    "as_single",
    "collect",
    "convert",
    "find_layers",
    "is_extra",
    "is_native",
    "open_checkpoint",
    "plain",
    "read_index",
    "read_meta",
    "read_tensors",
    "save",
    "summary",
]
