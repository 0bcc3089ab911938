"""Is what a step gives for a batch the mean of what it gives for micro-batches? Seen on two of them.

Note [What a pipeline takes for a mean]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A pipeline runs steps on micro-batches and adds up what they return and log by the weight of each. That is right for means. A sum, a mean
over a mask, a loss over pairs within the batch or something made of a mean is another number then, and no code says which it is. So the
last stage, which comes to the end of steps, runs the step again: on each of two micro-batches, and three times on both together, from
what arrived there. Each run draws other random numbers, so what comes out equal each time draws none that matter, and must be the mean of
the two. That it is shows nothing where the two are too much alike for the precision of their numbers, or by chance (two masks of equal
size). So a step is tried on several batches, and torch's loss functions are looked at in each besides (``numerics.LossWatch``, ``means``).

These runs have no backward, and keep nothing for one. The modules of the stage are in evaluation mode, since dropout would not let numbers
be compared, and run as they are written where they were compiled. What is in the module is put back after each run, but for weights: a step
that is seen to write to those that are not trained is refused (``frozen_stay``). A step that raises is not judged: it has come to its end
before. Nothing is tried where other replicas or shards of the sequence would have to run along: where ZeRO gathers weights, and under
context parallelism.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.pipeline import Arrived, PipelineError, aside, require_known
from lightning_par.strategy.logs import Logged, LogRecorder
from lightning_par.strategy.pieces import Piece, changes

TRIED = (1, 2, 4, 8, 16, 32, 64)
"""Batches of each step, counted from 1."""


@dataclass(frozen=True)
class Outcome:
    """A number that a step gives for two micro-batches, and for both together several times.

    Attributes:
        name: under which it is logged.
        combined: what a pipeline makes of the parts.
        noise: how far apart the numbers for both together are.
        precision: the smallest number by which 1 can be exceeded where numbers are least precise.
    """

    name: str
    first: float
    second: float
    combined: float
    whole: float
    noise: float
    precision: float = 0.0

    @property
    def is_combined(self) -> bool | None:
        """Whether the whole's number is what a pipeline makes of the parts'; None if these numbers do not tell."""
        numbers = (self.first, self.second, self.whole)
        scale = max(1.0, *map(abs, numbers))  # of numbers near 0 nobody knows how large the terms were
        allowed = tolerance(self.precision) * scale
        if not math.isfinite(sum(numbers) + self.noise) or self.noise > allowed / 100:
            return None
        if abs(self.whole - self.combined) > allowed:
            return False
        tells = (self.first - self.second) ** 2 > 16 * allowed * scale  # for parts so far apart a root differs by twice what is allowed
        return True if tells else None


@dataclass
class Trial:
    """What the last stage sees when it runs a step again.

    Args:
        place: of the first of two micro-batches.
        sizes: their samples.
        pieces: the first, the second, and both together three times.
        together: other ranks run the same on their parts of matrices, and wait for one that has no memory for it.

    Attributes:
        error: of the step; None if it came to its end each time.
    """

    place: int
    sizes: tuple[int, int]
    pieces: Sequence[Piece]
    together: bool = False
    precision: float = 0.0
    error: str | None = None
    _losses: list[Tensor] = field(default_factory=list)
    _logs: list[Mapping[str, Logged]] = field(default_factory=list)

    def inputs(self, arrivals: Sequence[Arrived]) -> list[Arrived]:
        """What is to arrive at the last stage for each piece, from what did for the two; empty if nobody can tell."""
        first, second = arrivals
        both = first.joined(second, self.sizes)
        return [first, second, both, both, both] if both is not None else []

    def run(self, step: Callable[[], Any], log: LogRecorder, module: nn.Module) -> None:
        """Run the step on the next piece."""
        try:
            output = step()
            require_known(output, "what the step returns")
        except Exception as error:
            if self.together and isinstance(error, torch.OutOfMemoryError):
                raise
            self.error = f"{type(error).__name__}: {error}"
            return
        loss = output.get("loss") if isinstance(output, Mapping) else output
        self.precision = max(self.precision, _precision(module, log.device, loss))
        self._logs.append(log.logged)
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach())

    @property
    def loss(self) -> Outcome:
        """Of training; NaN if a run did not come to its end."""
        shares = torch.stack([piece.share for piece in self.pieces])
        if len(self._losses) != len(self.pieces):
            return Outcome("", math.nan, math.nan, math.nan, math.nan, math.nan)
        values = torch.stack([loss.to(shares).reshape(()) for loss in self._losses])
        return _outcome("", values, (values * shares)[:2].sum(), self.precision)

    def warn_of_logs(self, told: set[str]) -> None:
        """Name, once, what the step logs that is no mean over micro-batches, or no sum if it is logged as such."""
        if len(self._logs) != len(self.pieces):
            return
        first = self._logs[0].items()
        names = [name for name, entry in first if entry.op in ("mean", "sum") and all(name in log for log in self._logs)]
        seen = [_logged(name, [log[name] for log in self._logs], self.precision) for name in names]
        if wrong := [one for one in seen if one.name not in told and one.is_combined is False]:
            told |= {one.name for one in wrong}
            warnings.warn(_log_warning(wrong, self.sizes), stacklevel=2)


def _logged(name: str, entries: Sequence[Logged], precision: float) -> Outcome:
    totals, weights = (torch.stack(numbers) for numbers in zip(*(entry.total() for entry in entries), strict=True))
    precision = max(precision, *(entry.precision for entry in entries))
    if entries[0].op == "sum":
        return _outcome(name, totals, totals[:2].sum(), precision)
    return _outcome(name, totals / weights, totals[:2].sum() / weights[:2].sum(), precision)


def _outcome(name: str, values: Tensor, combined: Tensor, precision: float) -> Outcome:
    """``values``: of all runs."""
    wholes = values[2:]
    return Outcome(name, *values[:2].tolist(), combined.item(), wholes[0].item(), (wholes.max() - wholes.min()).item(), precision)


def tolerance(precision: float) -> float:
    """By how much results of size 1 may differ between batches: kernels add up in other orders, and multiply with fewer digits."""
    return 4 * precision if precision > 1e-5 else 1e-4 if precision > 1e-10 else 1e-9


def _precision(module: nn.Module, device: torch.device, loss: Any) -> float:
    """That of the least precise floating-point numbers that this rank's part computes with, within its autocast context."""
    kinds = {param.dtype for param in module.parameters()} | {torch.get_default_dtype()}
    if isinstance(loss, Tensor):
        kinds.add(loss.dtype)
    if torch.is_autocast_enabled(device.type):
        kinds.add(torch.get_autocast_dtype(device.type))
    if device.type == "cuda" and torch.float32 in kinds and (torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32):
        kinds.add(torch.float16)  # TF32 has as many digits
    return max(torch.finfo(kind).eps for kind in kinds if kind.is_floating_point)


@contextmanager
def trying(module: Any) -> Iterator[None]:
    """Inside, a LightningModule's step runs once too many. See Note [What a pipeline takes for a mean].

    Generators in the module go on: who runs the step several times puts them back.
    """
    modes, trainer = [(part, part.training) for part in module.modules() if part is not module], module.trainer
    stops = trainer.should_stop
    with aside(module, generators=False), torch.autograd.graph.saved_tensors_hooks(_nothing, _no_backward):
        _uncompile(module)
        for part, _ in modes:
            part.training = False  # not eval(), of which some modules make more
        try:
            yield
        finally:
            for part, mode in modes:
                part.training = mode  # that of a ScriptModule is no attribute
            trainer.should_stop = stops


@contextmanager
def frozen_stay(module: nn.Module) -> Iterator[None]:
    """A step runs inside for several micro-batches or stages.

    Raises:
        PipelineError: it has written to weights that are not trained, as often.
    """
    before = _frozen(module)
    yield
    if changed := [name for name, now in _frozen(module).items() if now != before.get(name, now)]:
        raise PipelineError(
            f"training_step writes to {', '.join(changed)} (a moving average?). A pipeline runs it for every micro-batch and each of a "
            "rank's stages, so it would do that as often: do it in a hook, such as on_train_batch_end; or use pp=1"
        )


def _frozen(module: nn.Module) -> dict[str, tuple[int, float]]:
    """Of weights that are not trained, what shows whether they were written to, through ``.data`` too. Lookups write to some embeddings."""
    bounded = {part.weight for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None}
    frozen = [(name, param) for name, param in module.named_parameters() if not param.requires_grad and param not in bounded]
    sums = torch.stack([_sum(param.detach()) for _, param in frozen]).tolist() if frozen else []
    return {name: (changes(param), total) for (name, param), total in zip(frozen, sums, strict=True)}


def _sum(weight: Tensor) -> Tensor:
    """0 where a dtype or a kind of tensor has none (float8, quantized)."""
    try:
        return weight.sum(dtype=torch.complex128 if weight.is_complex() else torch.float64).abs().cpu()
    except (RuntimeError, TypeError):
        return torch.zeros((), dtype=torch.float64)


def _nothing(tensor: Tensor) -> None:
    """What is kept of a tensor that is saved for backward."""


def _no_backward(_: None) -> Tensor:
    raise RuntimeError("a pipeline tries this step without keeping what its backward needs")


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


def loss_error(loss: Outcome, sizes: tuple[int, int]) -> ValueError:
    """``sizes``: the samples of the two micro-batches."""
    return ValueError(
        f"training_step's loss is {loss.first:.6g} and {loss.second:.6g} for two micro-batches of {sizes[0]} and {sizes[1]} samples, of "
        f"which a pipeline makes {loss.combined:.6g}, by their samples (or labels that count); but for both together it is "
        f"{loss.whole:.6g}. That is right for means over samples or labels only: a sum, a mean over a mask, a loss over pairs within the "
        "batch and what is made of a mean (a root) are other numbers. Return such a mean, or set microbatches=1, or pp=1. (The end of the "
        "step was run again for this, without dropout.)"
    )


def own_loss_warning(trial: Trial | None) -> str:
    """``trial``: which did not tell; None if there could be none."""
    why = "it is random, or two micro-batches were too much alike"
    if trial is None:
        why = "under cp and zero=3, and where what comes to the last stage for two micro-batches cannot be put together, nobody looks"
    elif trial.error is not None:
        why = trial.error
    return (
        "training_step computes its loss by no loss function of torch's that averages (F.cross_entropy, F.mse_loss). A pipeline takes it "
        "for a mean over the samples, or labels, of a micro-batch, and adds micro-batches up by how many they have. Whether it is could "
        f"not be seen ({why}). If it is none (a sum, a mean over a mask, a root, pairs within the batch), set microbatches=1"
    )


def _log_warning(outcomes: Sequence[Outcome], sizes: tuple[int, int]) -> str:
    told = "; ".join(
        f"self.log({o.name!r}, ...) is {o.first:.6g} and {o.second:.6g}, of which a pipeline makes {o.combined:.6g}, but {o.whole:.6g} for "
        "both together"
        for o in outcomes
    )
    return (
        f"for two micro-batches of {sizes[0]} and {sizes[1]} samples {told}. A pipeline logs means over micro-batches, by their weight, or "
        "sums if told reduce_fx='sum'. Log means as means and counts as sums; make of means what you want (a perplexity) at the end of the "
        "epoch, or with torchmetrics; or set microbatches=1"
    )
