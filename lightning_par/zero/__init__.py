"""Level 3. Data parallelism: gradients in flat buckets, reduced over the data ranks; what each ZeRO stage shards, sharded."""

from lightning_par.zero.access import full_gradient, full_optimizer_state, full_parameters
from lightning_par.zero.buffers import BufferSync
from lightning_par.zero.data_parallel import DataParallel
from lightning_par.zero.gradients import ModelGradients, Overflow
from lightning_par.zero.groups import ReduceGroups
from lightning_par.zero.guard import GuardedParameter
from lightning_par.zero.master import HALF, HalfWeights
from lightning_par.zero.options import ZeroOptions
from lightning_par.zero.plan import BucketPlan, ParameterInfo, Slot, plan_buckets
from lightning_par.zero.sync_batch_norm import SyncBatchNorm, synchronize_batch_norms

__all__ = [
    "HALF",
    "BucketPlan",
    "BufferSync",
    "DataParallel",
    "GuardedParameter",
    "HalfWeights",
    "ModelGradients",
    "Overflow",
    "ParameterInfo",
    "ReduceGroups",
    "Slot",
    "SyncBatchNorm",
    "ZeroOptions",
    "full_gradient",
    "full_optimizer_state",
    "full_parameters",
    "plan_buckets",
    "synchronize_batch_norms",
]
