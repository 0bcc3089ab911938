"""What watches a run: tokens a second, the norm of the gradient, the held-out loss, the last checkpoint."""

from lightning_par.callbacks.checkpoint import SaveLast
from lightning_par.callbacks.gradient_norm import GradientNorm
from lightning_par.callbacks.held_out import HeldOutLoss
from lightning_par.callbacks.throughput import Throughput

__all__ = ["GradientNorm", "HeldOutLoss", "SaveLast", "Throughput"]
