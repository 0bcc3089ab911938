"""Level 2. Numbers that must not depend on the layout: the weight of a loss, its scale, the norm of a gradient."""

from lightning_par.numerics.grad_norm import GradientShard, clip_by_norm, clip_by_value, total_norm
from lightning_par.numerics.loss_scale import (
    DynamicLossScale,
    LossScale,
    MinimumReachedError,
    ScaleState,
    StaticLossScale,
    named_loss_scale,
)
from lightning_par.numerics.loss_watch import LossWatch
from lightning_par.numerics.loss_weight import IGNORED_LABEL, loss_weight
from lightning_par.numerics.overflow import overflowed
from lightning_par.numerics.samples import Array, are_samples, batch_size, children, with_children
from lightning_par.numerics.streams import SEEDS, Apart, MicrobatchStreams, pass_by, seed_streams

__all__ = [
    "IGNORED_LABEL",
    "SEEDS",
    "Apart",
    "Array",
    "DynamicLossScale",
    "GradientShard",
    "LossScale",
    "LossWatch",
    "MicrobatchStreams",
    "MinimumReachedError",
    "ScaleState",
    "StaticLossScale",
    "are_samples",
    "batch_size",
    "children",
    "clip_by_norm",
    "clip_by_value",
    "loss_weight",
    "named_loss_scale",
    "overflowed",
    "pass_by",
    "seed_streams",
    "total_norm",
    "with_children",
]
