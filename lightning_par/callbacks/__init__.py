"""What watches a run: tokens a second, the held-out loss, the last checkpoint."""

from lightning_par.callbacks.checkpoint import SaveLast
from lightning_par.callbacks.held_out import HeldOutLoss
from lightning_par.callbacks.throughput import Throughput

__all__ = ["HeldOutLoss", "SaveLast", "Throughput"]
