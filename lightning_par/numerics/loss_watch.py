"""Does the loss average over what it is weighted by? See Note [The weight of a loss]."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_par.numerics.loss_weight import IGNORED_LABEL

ENTROPIES = frozenset({F.cross_entropy, F.nll_loss})

REDUCED = ENTROPIES | {
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits),
    *(F.kl_div, F.poisson_nll_loss, F.gaussian_nll_loss),
}
"""Losses that average over what they are given, or add it up."""

SIGNATURES = {function: inspect.signature(function) for function in REDUCED}


@dataclass
class Reduced:
    """A loss that was computed: its value, the targets it counts (by their class weights), and whether it adds up or averages."""

    value: Tensor
    targets: Tensor
    is_sum: bool
    is_of_classes: bool = True


class LossWatch(TorchFunctionMode):
    """Sees every loss of torch's inside the block that is a mean or a sum: a list for each of ``pieces``. Waits for no device."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[list[Reduced]] = []
        self.nodes: list[Node] = []
        """Where the graphs of means end. They hold those graphs: who has looked clears them."""

    def next_piece(self) -> None:
        """What is computed from now on belongs to another piece of the batch."""
        self.pieces.append([])

    @override
    def __torch_function__(self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        value = func(*args, **(kwargs or {}))
        if not self.pieces or func not in REDUCED or value.dim() > 0:
            return value
        said = SIGNATURES[func].bind(*args, **(kwargs or {})).arguments
        is_of_classes = func in ENTROPIES and not said["target"].is_floating_point()
        targets = _classes(said) if is_of_classes else torch.full((), said["input"].numel(), device=value.device)
        is_sum = said.get("reduction", "mean") == "sum" or said.get("size_average") is False
        if not is_sum and value.grad_fn is not None:
            self.nodes.append(value.grad_fn)
        self.pieces[-1].append(Reduced(value.detach().double(), targets.double(), is_sum, is_of_classes))
        return value

    @property
    def has_seen(self) -> bool:
        """Whether any piece computed a loss that is known here."""
        return any(self.pieces)

    def averages_otherwise(self, shares: list[Tensor], samples: list[int]) -> Tensor:
        """Whether a mean of the pieces averages over other parts of the batch than ``shares`` says: a 0-dim bool.

        Where pieces made unequally many, or one for each of their ``samples``, that cannot be told.
        """
        pieces = [[loss.targets for loss in piece] for piece in self._means]
        number = len(pieces[0]) if pieces else 0
        is_loop = number > 1 and [len(piece) for piece in pieces] == samples
        if not number or is_loop or len(pieces) != len(shares) or any(len(piece) != number for piece in pieces):
            return torch.tensor(False, device=shares[0].device)
        counts = torch.stack([torch.stack(piece) for piece in pieces])  # [pieces, cross entropies]
        weights = torch.stack(shares).to(counts.device)
        wrong = (counts / counts.sum(0) - (weights / weights.sum())[:, None]).abs() > 1e-6  # False if all targets are ignored: NaN
        same = (counts == counts[0]).all(0)  # it may be one of weights, or of a codebook
        columns = enumerate(zip(self._means[0], wrong.any(0), strict=True))
        told = [column if loss.is_of_classes else column & ~same[i] for i, (loss, column) in columns]
        return torch.stack(told).any()

    def adds_up(self, losses: list[Tensor], samples: list[int]) -> Tensor:
        """Whether ``losses`` of the pieces are sums, or one multiple of summed cross entropies, and no means over targets or samples."""
        pieces = self._seen
        if len(losses) < 2 or len(pieces) != len(losses) or any([e.is_sum for e in piece] != [True] for piece in pieces):
            return torch.tensor(False, device=losses[0].device)
        factors = torch.stack([loss.double() for loss in losses]) / torch.stack([piece[0].value for piece in pieces])
        targets, rows = torch.stack([piece[0].targets for piece in pieces]), torch.tensor(samples, device=factors.device)
        is_multiple = _close(factors, factors[0] if pieces[0][0].is_of_classes else 1.0)  # half a mean is usual where these add up
        return is_multiple & ~_close(factors * targets, 1.0) & ~_close(factors * rows, 1.0)

    def complaint(self, shares: list[Tensor]) -> ValueError:
        """What to raise where a mean is one over something else."""
        counts = [[f"{loss.targets.item():g}" for loss in piece] for piece in self._means]
        several = ", ".join(" and ".join(piece) for piece in counts)
        return ValueError(
            f"the losses of the micro-batches average over [{several}] targets, but count {[share.item() for share in shares]} of the "
            "whole by the labels of the batch, so their sum is not the loss of the whole batch. In a dict, 'labels' beside 'input_ids' are "
            "taken to be shifted by the model; give labels that it does not shift (masked tokens, token classes, or shifted already) as "
            f"'shift_labels', and targets in which {IGNORED_LABEL} occurs as one of the two. Several losses over different numbers of "
            "targets, and class weights, have no common weight. Else set microbatches=1, or pp=1"
        )

    @property
    def _seen(self) -> list[list[Reduced]]:
        """Of the pieces whose step came to its end: stages before the last leave it before a loss is made."""
        return [piece for piece in self.pieces if piece]

    @property
    def _means(self) -> list[list[Reduced]]:
        return [[loss for loss in piece if not loss.is_sum] for piece in self._seen]


def _classes(said: dict[str, Any]) -> Tensor:
    """How many targets a cross entropy counts, by their class weights."""
    target, weight = said["target"], said.get("weight")
    counts = target != said.get("ignore_index", IGNORED_LABEL)
    if weight is not None:
        counts = torch.where(counts, weight[target.where(counts, 0)], 0.0)
    return counts.sum(dtype=torch.float64)


def _close(values: Tensor, wanted: Tensor | float) -> Tensor:
    return ((values - wanted).abs() <= 1e-4 * values.abs()).all()
