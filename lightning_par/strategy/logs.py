"""What a step logs and returns, made the same number on every rank.

Note [Logging under any layout]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A user's step runs several times for one batch (once per micro-batch) and on ranks that see different pieces of it (context shards,
replicas) or no result at all (stages before the last). So ``self.log`` is recorded while the steps run, and replayed afterwards, once per
batch, with the value that one process would have logged: the mean over pieces with the weights of the loss, then the mean over replicas
(``reduce_fx="sum"``: pieces of samples and replicas add up, context shards average; ``min`` and ``max`` as they say). A name that some
pieces do not log is the mean over those that do.

A ``batch_size`` that the user says is what the value weighs in the mean over an epoch: where the step ran on micro-batches it is what
the user said of each, added up (a number of tokens), unless it was that of the whole batch.

Numbers of one batch travel in one reduction of a fixed size, whatever they are called; its first cell holds a hash of the names, so that
ranks that log different names find out instead of mixing numbers up. Its second counts the ranks for which the batch is the last of the
epoch: where some have more batches than others, they would wait for each other in different places from the next one on. Its third
counts the ranks that saw something wrong (see ``agree.Doubt``), its fourth those that want to stop (see Note [Stopping] in ``agree``).

A stage before the last leaves the step on the way: what it has logged until then, the last stage logs too if it stands before the
layers. What only that stage can log (inside its layers) would get lost, and is refused.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_par.pipeline import require_known

HEAD, NAMES = 4, 256
CELLS = HEAD + 3 * NAMES
"""Numbers that one reduction carries: the hash; the counts of ranks at their data's end, in doubt, about to stop; three for each name."""


@dataclass
class Logged:
    """Calls of ``log`` with one name: their values, their weights, what they said of the batch's size, and the options of the last."""

    values: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    precision: float = 0.0  # the smallest number by which the least precise of them can exceed 1

    @property
    def op(self) -> str:
        """How pieces combine: mean, sum, min or max."""
        reduce_fx = self.options.get("reduce_fx", "mean")
        name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
        return {"avg": "mean", "amin": "min", "amax": "max"}.get(name, name)

    def total(self) -> tuple[Tensor, Tensor]:
        """The sum of the values by their weights, and of the weights; for ``reduce_fx="sum"`` the plain sum."""
        values, weights = torch.stack(self.values), torch.stack(self.weights)
        if self.op == "sum":
            return values.sum(), weights.sum()
        return torch.where(weights > 0, values * weights, 0.0).sum(), weights.sum()  # a mean over nothing is NaN, and counts nothing

    def size(self, samples: int | None) -> int:
        """Of the batch, by what calls with micro-batches of it said; ``samples``: how many it has."""
        return samples if samples is not None and all(size == samples for size in self.sizes) else sum(self.sizes)


class LogRecorder:
    """Stands in for ``LightningModule.log`` while steps run."""

    def __init__(self, real: Callable[..., None], device: torch.device, *, deferred: bool) -> None:
        self.real, self.device = real, device
        self.deferred = deferred  # objects cannot be replayed by ranks that did not see them
        self.logged: dict[str, Logged] = {}
        self.sizes: dict[str, int] = {}  # what replayed calls say of the batch's size, instead of what was said
        self.weight: Tensor = torch.ones((), dtype=torch.float64, device=device)
        self._forgotten: set[str] = set()

    def __call__(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        if self.deferred:
            require_known(value, f"self.log({name!r}, ...)")
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
        if number.is_floating_point():
            entry.precision = max(entry.precision, torch.finfo(number.dtype).eps)
        if options.get("batch_size") is not None:
            entry.sizes.append(int(options["batch_size"]))
        entry.options = options

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Forget what is logged inside if the step does not come to its end: a stage before the last leaves it on the way."""
        before = {name: (len(entry.values), len(entry.sizes), entry.options) for name, entry in self.logged.items()}
        try:
            yield
        except BaseException:
            for name, entry in list(self.logged.items()):
                count, sizes, entry.options = before.get(name, (0, 0, {}))
                if len(entry.values) > count:
                    self._forgotten.add(name)
                del entry.values[count:], entry.weights[count:], entry.sizes[sizes:]
                if not count:
                    del self.logged[name]
            raise

    def require_heard(self, names: Collection[str]) -> None:
        """Raise if a stage before the last logged something that the last did not, whose values are those that count."""
        if lost := sorted(self._forgotten - set(names)):
            raise RuntimeError(
                f"self.log({lost[0]!r}, ...) was called on a pipeline stage before the last, and not on the last: inside a layer, or in a "
                "hook of one. Its value would be lost. Return it through the layers to the step and log it there, or use pp=1"
            )

    def replay(self, values: dict[str, Tensor], options: dict[str, dict[str, Any]]) -> None:
        """Log the agreed values for real; they are the same on all ranks, so nothing is left to synchronize."""
        for name, value in values.items():
            chosen = options[name] | {"sync_dist": False}
            if name in self.sizes and chosen.get("batch_size") is not None:
                chosen["batch_size"] = self.sizes[name]
            self.real(name, value, **chosen)


class MutedLogger:
    """Stands in for a logger while a step runs under a pipeline: whatever is asked of it but to log, the logger answers."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    @property
    def __class__(self) -> type:
        return type(self._logger)

    def __getattr__(self, name: str) -> Any:
        if name == "experiment" or (name.startswith("log_") and name != "log_dir"):
            raise RuntimeError(
                f"self.logger.{name} in a step under a pipeline: rank 0, which has the loggers, does not come to the step's end, and the "
                "last stage runs it once a micro-batch. Use self.log, or return what you want to log and do so in a hook at the end of "
                "the batch (on_train_batch_end), or use pp=1"
            )
        return getattr(self._logger, name)


@contextmanager
def recording(module: Any, device: torch.device, *, deferred: bool) -> Iterator[LogRecorder]:
    """Record ``module.log`` inside the block; with ``deferred`` loggers are muted there."""
    recorder, trainer = LogRecorder(module.log, device, deferred=deferred), module.trainer
    module.__dict__["log"] = recorder
    loggers = trainer.loggers
    if deferred:
        trainer.loggers = [MutedLogger(logger) for logger in loggers]
    try:
        yield recorder
    finally:
        trainer.loggers = loggers
        del module.__dict__["log"]


def name_hash(names: list[str]) -> float:
    """A number that tells lists of names apart and that a float64 holds exactly, summed over thousands of ranks too."""
    return float(zlib.crc32("\n".join(names).encode()))
