"""Level 3. Data parallelism: gradients in flat buckets, reduced over the data ranks; optimizer states whole or sharded (ZeRO)."""

from lightning_par.zero.bucket import ReduceGroups
from lightning_par.zero.data_parallel import DataParallel
from lightning_par.zero.gradients import ModelGradients
from lightning_par.zero.plan import BucketPlan, ParameterInfo, Slot, plan_buckets

__all__ = ["BucketPlan", "DataParallel", "ModelGradients", "ParameterInfo", "ReduceGroups", "Slot", "plan_buckets"]
