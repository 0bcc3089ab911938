"""Which optimizers may be given flat spans of parameters in place of whole ones."""

from __future__ import annotations

from torch.optim import Optimizer

ELEMENTWISE = (
    "ASGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Lion",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
"""Classes (and their subclasses) whose update of an element depends on that element's own gradient and state alone."""


def require_elementwise(optimizer: Optimizer, stage: int) -> None:
    """Refuse optimizers that need whole matrices or whole-tensor statistics: on spans they would compute something else."""
    names = {cls.__name__ for cls in type(optimizer).__mro__ if cls not in (Optimizer, object)}
    if names.isdisjoint(ELEMENTWISE):
        raise ValueError(
            f"zero={stage} gives each rank flat spans of the parameters, but {type(optimizer).__name__} is not known to work element by "
            f"element ({', '.join(ELEMENTWISE)} and their subclasses do). Use zero=0, or one of these"
        )
