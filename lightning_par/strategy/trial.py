"""Is what a step gives for a batch the mean of what it gives for parts of it? Seen once, on a few samples.

Note [What a pipeline takes for a mean]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A pipeline runs steps on micro-batches and adds up what they return and log by the weight of each. That is right for means. A sum, a mean
over a mask, a loss over pairs within the batch or something made of a mean is another number then, and no code says which it is. So before
a step's first batch is cut, the step is tried on samples of its first micro-batch: on two parts of them, and twice on both together. All
micro-batches draw other random numbers, so what comes out equal both times draws none that matter, and must be the mean of the parts.

The trial has no backward. The modules inside are in evaluation mode, since dropout would not let numbers be compared, and everything is put
back afterwards. It never runs more samples at once than a micro-batch has, or two. It sees what is wrong for these samples, by more than
the numbers' precision: losses of torch's functions are looked at in each batch besides, more closely (see ``numerics.LossWatch``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.comm import Group
from lightning_par.numerics import SEEDS, LossWatch
from lightning_par.pipeline import aside
from lightning_par.strategy.logs import Logged
from lightning_par.strategy.pieces import Piece


@dataclass(frozen=True)
class Outcome:
    """A number that a step gives for two parts of a batch, for both together, and for those again.

    Attributes:
        name: under which it is logged.
        combined: what a pipeline makes of the parts.
    """

    name: str
    first: float
    second: float
    combined: float
    whole: float
    again: float

    def is_combined(self, precision: float) -> bool | None:
        """Whether the whole's number is what a pipeline makes of the parts'; None if there is no telling.

        Args:
            precision: the smallest number by which 1 can be exceeded where numbers are least precise.
        """
        numbers = (self.first, self.second, self.whole, self.again)
        scale, noise, gap = max(map(abs, numbers)), abs(self.whole - self.again), abs(self.whole - self.combined)
        allowed = tolerance(precision) * scale
        if not math.isfinite(sum(numbers)) or noise > allowed:
            return None
        return gap <= max(allowed, 10 * noise, 8 * precision)


@dataclass
class Trial:
    """What came of a trial, as the last stage sees it.

    Args:
        sizes: the samples of the two parts.
        pieces: of the first part, of the second, of both together, and those again.
    """

    sizes: tuple[int, int]
    pieces: Sequence[Piece]
    watch: LossWatch = field(default_factory=LossWatch)
    losses: list[Tensor] = field(default_factory=list)
    precision: float = 0.0
    _logs: list[Mapping[str, Logged]] = field(default_factory=list)

    def note(self, loss: Any, logged: Mapping[str, Logged], precision: float) -> None:
        """One run has come to its end."""
        self.precision = max(self.precision, precision)
        self._logs.append(logged)
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self.losses.append(loss.detach())

    def loss(self, shards: Group) -> Outcome:
        """Of all shards of the sequence. All ranks of ``shards`` call; NaN if one of them has no loss."""
        values = torch.full((len(self.pieces),), torch.nan, dtype=torch.float64, device=self.pieces[0].share.device)
        if len(self.losses) == len(self.pieces):
            runs = zip(self.pieces, self.losses, strict=True)
            values = torch.stack([piece.share * loss.to(piece.share).reshape(()) for piece, loss in runs])
        shards.all_reduce(values)
        first, second, whole, again = values.tolist()
        return Outcome("", first, second, first + second, whole, again)

    @property
    def logged(self) -> list[Outcome]:
        """What all runs logged, that is a mean over micro-batches or their sum."""
        if len(self._logs) != len(self.pieces):
            return []
        first = self._logs[0].items()
        names = [name for name, entry in first if entry.op in ("mean", "sum") and all(name in log for log in self._logs)]
        return [_logged(name, [log[name] for log in self._logs]) for name in names]


def _logged(name: str, entries: Sequence[Logged]) -> Outcome:
    if entries[0].op == "sum":
        values = [torch.stack(entry.values).sum().item() for entry in entries]
        return Outcome(name, *values[:2], values[0] + values[1], *values[2:])
    weights = [torch.stack(entry.weights) for entry in entries]
    totals = [(torch.stack(entry.values) * weight).sum().item() for entry, weight in zip(entries, weights, strict=True)]
    sums = [weight.sum().item() or math.nan for weight in weights]
    values = [total / weight for total, weight in zip(totals, sums, strict=True)]
    return Outcome(name, *values[:2], (totals[0] + totals[1]) / (sums[0] + sums[1]), *values[2:])


def tolerance(precision: float) -> float:
    """By how much, relatively, results may differ between batches: by more than rounding, where kernels multiply with fewer digits."""
    return 1e-6 if precision < 1e-10 else 1e-3 if precision < 1e-6 else 3e-2


def precision_of(module: nn.Module, device: torch.device) -> float:
    """That of the least precise floating-point numbers that the module computes with, within its autocast context."""
    kinds = {param.dtype for param in module.parameters() if param.is_floating_point()} | {torch.get_default_dtype()}
    if torch.is_autocast_enabled(device.type):
        kinds.add(torch.get_autocast_dtype(device.type))
    return max(torch.finfo(kind).eps for kind in kinds)


@contextmanager
def trying(module: Any) -> Iterator[None]:
    """A LightningModule's step runs a few times too many inside: the modules in it are in evaluation mode, and nothing is left of it."""
    modes, trainer, seeds = [(part, part.training) for part in module.modules()], module.trainer, SEEDS.get_state()
    stops = trainer.should_stop
    with aside(module):
        _uncompile(module)
        for child in module.children():
            child.eval()
        try:
            yield
        finally:
            for part, mode in modes:
                part.train(mode)  # and all in it, which follow
            trainer.should_stop = stops
            SEEDS.set_state(seeds)


def _uncompile(module: nn.Module) -> None:
    """Let modules run as they are written: a compiler would take the sizes of parts for those of batches.

    What they call stays as it is: attention that was compiled may have no room otherwise.
    """
    for part in module.modules():
        attributes = vars(part)
        if attributes.get("_compiled_call_impl") is not None:
            attributes["_compiled_call_impl"] = None
        if (written := getattr(attributes.get("forward"), "_torchdynamo_orig_callable", None)) is not None:
            attributes["forward"] = written


def loss_error(loss: Outcome, sizes: Sequence[int]) -> ValueError:
    """``loss``: by the shares of the parts; ``sizes``: their samples."""
    return ValueError(
        f"training_step's loss for {sum(sizes)} samples of a batch is {loss.whole:.6g}, but that of the first {sizes[0]} and that of the "
        f"other {sizes[1]} make {loss.combined:.6g} in a pipeline: it adds micro-batches up by their samples (or labels that count), which "
        "is right for means over those only. A sum, a mean over a mask, a loss over pairs within the batch and what is made of a mean (a "
        "root) are other numbers. Return such a mean, or set microbatches=1, or pp=1. (The step was tried without dropout.)"
    )


def log_warning(step: str, outcomes: Sequence[Outcome], sizes: Sequence[int]) -> str:
    """``sizes``: the samples of the parts."""
    told = "; ".join(f"self.log({o.name!r}, ...) is {o.whole:.6g}, but {o.first:.6g} and {o.second:.6g} for its parts" for o in outcomes)
    return (
        f"in {step}, for {sum(sizes)} samples of a batch {told} ({sizes[0]} and {sizes[1]} samples). A pipeline logs the mean over "
        "micro-batches, by their weight, which is another number than that of the batch. Log means; counts with reduce_fx='sum'; make of "
        "means what you want (a perplexity) at the epoch's end, or with torchmetrics; or set microbatches=1"
    )
