"""What users take today: torch's DDP, FSDP2 and ZeroRedundancyOptimizer, and DeepSpeed."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.models import ADAMW, build_optimizer, global_batch
from benchmarks.variant import Built, Context, UnavailableError, plain_loop

BUCKET_ELEMENTS = 25 * 2**20 // 4
"""DDP's bucket, for DeepSpeed too: its own default of 5e8 elements costs more memory and 12-18 % more time here."""


def single(context: Context) -> Built:
    """One process with the whole batch; the other ranks wait."""
    if context.rank > 0:
        return Built(lambda step: None)
    model = context.model()
    return Built(plain_loop(context, model, context.optimizer(model), lambda step: global_batch(context.size, step)))


def ddp(context: Context, *, bucket_view: bool = False) -> Built:
    model = DistributedDataParallel(context.model(), gradient_as_bucket_view=bucket_view)
    return Built(plain_loop(context, model, context.optimizer(model), context.batch))


def zero_redundancy(context: Context) -> Built:
    """DDP, and an optimizer whose states are spread over the ranks by whole parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    if context.optimizer_name != "adamw":
        raise UnavailableError("built for AdamW only")
    model = DistributedDataParallel(context.model(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **ADAMW)
    return Built(plain_loop(context, model, optimizer, context.batch))


def fsdp2(context: Context, *, reshard: bool) -> Built:
    """``fully_shard`` around each layer and the whole; without ``reshard`` weights stay whole from forward to backward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (context.world,))
    model = context.model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return Built(plain_loop(context, model, context.optimizer(model), context.batch))


def deepspeed_zero(context: Context, *, stage: int) -> Built:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed knows no other way to be told
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)
    deepspeed.init_distributed(dist_backend="gloo")
    model = context.model()
    optimizer = build_optimizer(context.optimizer_name, model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=_deepspeed_config(context, stage))

    def step(i: int) -> Tensor:
        loss = engine(*context.batch(i))
        context.mark("forward")
        engine.backward(loss)
        context.mark("backward")
        engine.step()
        context.mark("step")
        return loss.detach()

    return Built(step)


def _deepspeed_config(context: Context, stage: int) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": BUCKET_ELEMENTS}
    zero["stage3_prefetch_bucket_size" if stage == 3 else "allgather_bucket_size"] = BUCKET_ELEMENTS
    return {
        "train_micro_batch_size_per_gpu": context.size.batch // dist.get_world_size(),
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # 0.19.8 clips at 1.0 unless told not to
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
        "steps_per_print": 10**9,
    }
