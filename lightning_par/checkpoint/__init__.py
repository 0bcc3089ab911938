"""Level 4. Checkpoints: sharded folders that know nothing of the layout they were written under."""

from lightning_par.checkpoint.collect import collect
from lightning_par.checkpoint.native import CheckpointError, is_native, read_index, read_meta, read_tensors, save
from lightning_par.checkpoint.plain import plain
from lightning_par.checkpoint.shard import Shard

__all__ = ["CheckpointError", "Shard", "collect", "is_native", "plain", "read_index", "read_meta", "read_tensors", "save"]
