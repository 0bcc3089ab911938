"""Level 3. Tensor parallelism: one matrix shared by several ranks (Megatron-LM, arXiv 1909.08053, section 3)."""

from lightning_par.tensor.convert import TensorShards, plan_shards, shard_module
from lightning_par.tensor.embedding import VocabParallelEmbedding
from lightning_par.tensor.in_place import Sharding
from lightning_par.tensor.linear import (
    ColumnParallelLinear,
    GatheredColumnParallelLinear,
    RowParallelLinear,
    SplitInputRowParallelLinear,
)
from lightning_par.tensor.plan import PlanError, resolve_plan
from lightning_par.tensor.styles import STYLES, Style

__all__ = [
    "STYLES",
    "ColumnParallelLinear",
    "GatheredColumnParallelLinear",
    "PlanError",
    "RowParallelLinear",
    "Sharding",
    "SplitInputRowParallelLinear",
    "Style",
    "TensorShards",
    "VocabParallelEmbedding",
    "plan_shards",
    "resolve_plan",
    "shard_module",
]
