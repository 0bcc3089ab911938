"""Lightning's WeightAveraging callbacks where no rank holds whole weights (ZeRO 3).

The averages themselves are whole on every rank. In a checkpoint the callback puts them in the place of the weights, and the weights under
a key of their own. When it loads one, it takes whole values of both, which ``Holdings.load_averages`` gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, WeightAveraging
from torch import nn

from lightning_par.zero import full_parameters

HOOKS = (
    "setup",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_load_checkpoint",
)
"""The hooks in which the callback reads or writes the module's weights."""


def averages(callbacks: Iterable[Callback]) -> list[WeightAveraging]:
    """The callbacks that keep an average of the weights."""
    return [callback for callback in callbacks if isinstance(callback, WeightAveraging)]


def has_averages(callbacks: Iterable[Callback]) -> bool:
    """Whether any has made its averages, in this fit or an earlier one, so that it takes from a checkpoint what they go on from."""
    return any(callback._average_model is not None for callback in averages(callbacks))


def open_weights(trainer: pl.Trainer, module: nn.Module) -> ExitStack:
    """Until the returned stack is closed, the hooks of the trainer's averaging callbacks find whole weights and may write them."""
    stack = ExitStack()
    for callback in averages(trainer.callbacks):
        for name in HOOKS:
            stack.enter_context(_wrapped(callback, name, module))
    return stack


@contextmanager
def _wrapped(callback: WeightAveraging, name: str, module: nn.Module) -> Iterator[None]:
    hook: Callable[..., Any] = getattr(callback, name)

    @wraps(hook)
    def whole(*args: Any, **kwargs: Any) -> Any:
        with full_parameters(module, modify=True):
            return hook(*args, **kwargs)

    callback.__dict__[name] = whole
    try:
        yield
    finally:
        callback.__dict__.pop(name, None)
