"""Level 5. The Precision plugin."""

from lightning_par.precision.plugin import ParallelPrecision

__all__ = ["ParallelPrecision"]
