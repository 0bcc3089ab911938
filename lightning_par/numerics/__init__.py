"""Level 2. Numbers that must not depend on the layout: the weight of a loss, the norm of a gradient."""

from lightning_par.numerics.grad_norm import GradientShard, clip_by_norm, clip_by_value, total_norm
from lightning_par.numerics.label_watch import LabelWatch
from lightning_par.numerics.loss_weight import IGNORED_LABEL, batch_size, loss_weight

__all__ = ["IGNORED_LABEL", "GradientShard", "LabelWatch", "batch_size", "clip_by_norm", "clip_by_value", "loss_weight", "total_norm"]
