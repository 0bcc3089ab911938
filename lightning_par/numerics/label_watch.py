"""Does the loss average over what it is weighted by? See Note [The weight of a loss]."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_par.numerics.loss_weight import IGNORED_LABEL

PARAMETERS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
"""Of ``F.cross_entropy`` and ``F.nll_loss`` alike, in order."""


@dataclass
class CrossEntropy:
    """One that was computed: its value, the targets it counts (by their class weights), and whether it adds up or averages."""

    value: Tensor
    targets: Tensor
    is_sum: bool


class LabelWatch(TorchFunctionMode):
    """Sees every cross entropy over class numbers inside the block: a list for each of ``pieces``. Waits for no device."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[list[CrossEntropy]] = []

    def next_piece(self) -> None:
        """What is computed from now on belongs to another piece of the batch."""
        self.pieces.append([])

    @override
    def __torch_function__(self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        value = func(*args, **(kwargs or {}))
        if func in (F.cross_entropy, F.nll_loss) and self.pieces:
            said = dict(zip(PARAMETERS, args, strict=False)) | (kwargs or {})
            target, weight = said["target"], said.get("weight")
            if not target.is_floating_point() and value.dim() == 0:
                counts = target != said.get("ignore_index", IGNORED_LABEL)
                if weight is not None:
                    counts = torch.where(counts, weight[target.where(counts, 0)], 0.0)
                is_sum = said.get("reduction", "mean") == "sum"
                self.pieces[-1].append(CrossEntropy(value.detach().double(), counts.sum(dtype=torch.float64), is_sum))
        return value

    def averages_otherwise(self, shares: list[Tensor], samples: list[int]) -> Tensor:
        """Whether a mean cross entropy of the pieces averages over other parts of the batch than ``shares`` says: a 0-dim bool.

        Where pieces made unequally many, or one for each of their ``samples``, that cannot be told.
        """
        pieces = [[entropy.targets for entropy in piece if not entropy.is_sum] for piece in self._seen]
        number = len(pieces[0]) if pieces else 0
        is_loop = number > 1 and [len(piece) for piece in pieces] == samples
        if not number or is_loop or len(pieces) != len(shares) or any(len(piece) != number for piece in pieces):
            return torch.tensor(False, device=shares[0].device)
        counts = torch.stack([torch.stack(piece) for piece in pieces])  # [pieces, cross entropies]
        weights = torch.stack(shares).to(counts.device)
        wrong = (counts / counts.sum(0) - (weights / weights.sum())[:, None]).abs() > 1e-6
        return wrong.any()  # of targets that are all ignored nothing is said: NaN

    def adds_up(self, losses: list[Tensor], samples: list[int]) -> Tensor:
        """Whether ``losses`` of the pieces are one multiple of summed cross entropies, and no means over targets or samples: a bool."""
        pieces = self._seen
        if len(losses) < 2 or len(pieces) != len(losses) or any([e.is_sum for e in piece] != [True] for piece in pieces):
            return torch.tensor(False, device=losses[0].device)
        factors = torch.stack([loss.double() for loss in losses]) / torch.stack([piece[0].value for piece in pieces])
        targets, rows = torch.stack([piece[0].targets for piece in pieces]), torch.tensor(samples, device=factors.device)
        is_multiple = _close(factors, factors[0])
        return is_multiple & ~_close(factors * targets, 1.0) & ~_close(factors * rows, 1.0)

    def complaint(self, shares: list[Tensor]) -> ValueError:
        """What to raise where a mean is one over something else."""
        counts = [[f"{entropy.targets.item():g}" for entropy in piece if not entropy.is_sum] for piece in self._seen]
        several = ", ".join(" and ".join(piece) for piece in counts)
        return ValueError(
            f"the losses of the micro-batches average over [{several}] targets, but count {[share.item() for share in shares]} of the "
            "whole by the labels of the batch, so their sum is not the loss of the whole batch. In a dict, 'labels' beside 'input_ids' are "
            "taken to be shifted by the model; give labels that it does not shift (masked tokens, token classes, or shifted already) as "
            f"'shift_labels', and targets in which {IGNORED_LABEL} occurs as one of the two. Several losses over different numbers of "
            "targets, and class weights, have no common weight. Else set microbatches=1, or pp=1"
        )

    @property
    def _seen(self) -> list[list[CrossEntropy]]:
        """Of the pieces whose step came to its end: stages before the last leave it before a loss is made."""
        return [piece for piece in self.pieces if piece]


def _close(values: Tensor, wanted: Tensor | float) -> Tensor:
    return ((values - wanted).abs() <= 1e-4 * values.abs()).all()
