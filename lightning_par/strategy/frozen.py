"""Pipeline stages that train nothing: ``configure_optimizers`` finds no parameter there, and torch makes no optimizer of none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_par.comm import Group


@contextmanager
def empty_optimizers() -> Iterator[None]:
    """Inside, an optimizer may have no parameters. It takes part in everything that the optimizers of other stages do."""
    real = Optimizer.__init__

    def make(self: Optimizer, params: Any, *args: Any, **kwargs: Any) -> None:
        real(self, params if isinstance(params, Tensor) else list(params) or [{"params": []}], *args, **kwargs)

    Optimizer.__init__ = make
    try:
        yield
    finally:
        Optimizer.__init__ = real


def require_parameters(optimizers: Sequence[Optimizer], pp: Group) -> None:
    """Somewhere along the pipeline each optimizer has parameters. All ranks of ``pp`` call.

    Raises:
        ValueError: as torch does, on every rank.
    """
    counts = pp.gather_objects([sum(len(group["params"]) for group in optimizer.param_groups) for optimizer in optimizers])
    for optimizer, *found in zip(optimizers, *counts, strict=True):
        if not any(found):
            raise ValueError(f"{type(optimizer).__name__} got an empty parameter list, on every pipeline stage: is everything frozen?")
