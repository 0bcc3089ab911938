"""What a step logs and returns, made the same number on every rank.

Note [Logging under any layout]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A user's step runs several times for one batch (once per micro-batch) and on ranks that see different pieces of it (context shards,
replicas) or no result at all (stages before the last). So ``self.log`` is recorded while the steps run, and replayed afterwards, once per
batch, with the value that one process would have logged: the mean over pieces with the weights of the loss, then the mean over replicas
(``reduce_fx="sum"``: pieces of samples and replicas add up, context shards average; ``min`` and ``max`` as they say). A name that some
pieces do not log is the mean over those that do.

Numbers of one batch travel in one reduction of a fixed size, whatever they are called; its first cell holds a hash of the names, so that
ranks that log different names find out instead of mixing numbers up. Its second counts the ranks for which the batch is the last of the
epoch: where some have more batches than others, they would wait for each other in different places from the next one on.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

CELLS = 512
"""Numbers that one reduction carries: the hash, the count of ranks at the end of their data, then two for each name."""


@dataclass
class Logged:
    """Calls of ``log`` with one name: their values, their weights, and the options of the last."""

    values: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def op(self) -> str:
        """How pieces combine: mean, sum, min or max."""
        reduce_fx = self.options.get("reduce_fx", "mean")
        name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
        return {"avg": "mean", "amin": "min", "amax": "max"}.get(name, name)


class LogRecorder:
    """Stands in for ``LightningModule.log`` while steps run."""

    def __init__(self, real: Callable[..., None], device: torch.device, *, deferred: bool) -> None:
        self.real, self.device = real, device
        self.deferred = deferred  # objects cannot be replayed by ranks that did not see them
        self.logged: dict[str, Logged] = {}
        self.weight: Tensor = torch.ones((), dtype=torch.float64, device=device)

    def __call__(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        if not isinstance(value, Tensor | int | float):
            if self.deferred:
                raise TypeError(
                    f"self.log({name!r}, {type(value).__name__}) under a pipeline: only the last stage sees this object. Log its value "
                    "as a tensor or a number, or use pp=1"
                )
            self.real(name, value, *args, **options)
            return
        if args:
            options |= dict(zip(("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx"), args, strict=False))
        if options.get("rank_zero_only"):
            self.real(name, value, **options)
            return
        entry = self.logged.setdefault(name, Logged())
        number = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
        if number.numel() != 1:
            raise ValueError(f"self.log({name!r}, ...) takes one number, but got a tensor of shape {tuple(number.shape)}")
        entry.values.append(number.to(self.device, torch.float64, non_blocking=True).reshape(()))
        entry.weights.append(self.weight)
        entry.options = options

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Forget what is logged inside if the step does not come to its end: a stage before the last leaves it on the way."""
        before = {name: (len(entry.values), entry.options) for name, entry in self.logged.items()}
        try:
            yield
        except BaseException:
            for name, entry in list(self.logged.items()):
                count, entry.options = before.get(name, (0, {}))
                del entry.values[count:], entry.weights[count:]
                if not count:
                    del self.logged[name]
            raise

    def replay(self, values: dict[str, Tensor], options: dict[str, dict[str, Any]], samples: int | None) -> None:
        """Log the agreed values for real; they are the same on all ranks, so nothing is left to synchronize.

        A ``batch_size`` that the user gave for a micro-batch becomes ``samples``, that of the batch.
        """
        for name, value in values.items():
            chosen = options[name] | {"sync_dist": False}
            if samples is not None and chosen.get("batch_size") is not None:
                chosen["batch_size"] = samples
            self.real(name, value, **chosen)


@contextmanager
def recording(module: Any, device: torch.device, *, deferred: bool) -> Iterator[LogRecorder]:
    """Record ``module.log`` inside the block."""
    recorder = LogRecorder(module.log, device, deferred=deferred)
    module.__dict__["log"] = recorder
    try:
        yield recorder
    finally:
        del module.__dict__["log"]


def name_hash(names: list[str]) -> float:
    """A number that tells lists of names apart and that a float64 holds exactly, summed over thousands of ranks too."""
    return float(zlib.crc32("\n".join(names).encode()))
