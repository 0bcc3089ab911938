"""Level 3. Context parallelism: sequences cut zigzag over ranks, attention as a ring over the cut."""

from lightning_par.context.attention import RingAttention, ring_attention
from lightning_par.context.errors import (
    AttentionNotUsedError,
    ContextParallelError,
    LabelsNotShiftedError,
    LossWeightError,
    PositionsNotUsedError,
    UnsupportedAttentionError,
    UnsupportedBatchError,
)
from lightning_par.context.huggingface import prepare
from lightning_par.context.shard import ShardedBatch, shard_batch
from lightning_par.context.verify import verify_step
from lightning_par.context.zigzag import Tile, Zigzag

__all__ = [
    "AttentionNotUsedError",
    "ContextParallelError",
    "LabelsNotShiftedError",
    "LossWeightError",
    "PositionsNotUsedError",
    "RingAttention",
    "ShardedBatch",
    "Tile",
    "UnsupportedAttentionError",
    "UnsupportedBatchError",
    "Zigzag",
    "prepare",
    "ring_attention",
    "shard_batch",
    "verify_step",
]
