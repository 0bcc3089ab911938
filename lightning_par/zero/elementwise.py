"""Which optimizers may be given flat spans of parameters in place of whole ones."""

from __future__ import annotations

import inspect

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
"""Classes whose update of an element depends on that element's own gradient and state alone."""

WHOLE_MODEL = ("DAdaptAdaGrad", "DAdaptAdam", "DAdaptLion", "DAdaptSGD", "LBFGS", "Prodigy")
"""Classes that compute with all parameters at once."""


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` computes the same on spans as on whole parameters. Unknown classes are taken to need them whole.

    A subclass is known as long as it leaves ``step`` as it is.
    """
    step = _step(type(optimizer))
    return any(cls.__name__ in ELEMENTWISE and _step(cls) is step for cls in type(optimizer).__mro__)


def needs_whole_model(optimizer: Optimizer) -> bool:
    """Whether a rank must have every parameter for ``optimizer`` to compute what it does in one process."""
    return any(cls.__name__ in WHOLE_MODEL for cls in type(optimizer).__mro__)


def _step(cls: type) -> object:
    """torch wraps ``step`` of each class when it is first used."""
    return inspect.unwrap(cls.step)  # type: ignore[attr-defined]
