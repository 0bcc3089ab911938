"""What watches a run: tokens a second, the norm of the gradient, the loss scale, the held-out loss, the last checkpoint."""

from lightning_par.callbacks.checkpoint import SaveLast
from lightning_par.callbacks.gradient_norm import GradientNorm
from lightning_par.callbacks.held_out import HeldOutLoss
from lightning_par.callbacks.loss_scale import LossScaleMonitor
from lightning_par.callbacks.throughput import Throughput

__all__ = ["GradientNorm", "HeldOutLoss", "LossScaleMonitor", "SaveLast", "Throughput"]
