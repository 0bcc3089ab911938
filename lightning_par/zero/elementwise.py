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


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` computes the same on spans as on whole parameters. Unknown classes are taken to need them whole."""
    return any(cls.__name__ in ELEMENTWISE for cls in type(optimizer).__mro__)
