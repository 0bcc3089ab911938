"""Does the loss average over what it is weighted by? See Note [The weight of a loss]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_par.numerics.loss_weight import IGNORED_LABEL


class LabelWatch(TorchFunctionMode):
    """Counts the targets of every mean cross entropy inside the block: a list for each of ``pieces``."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[list[Tensor]] = []

    def next_piece(self) -> None:
        """What is counted from now on belongs to another piece of the batch."""
        self.pieces.append([])

    @override
    def __torch_function__(self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.cross_entropy, F.nll_loss) and self.pieces:
            target = kwargs["target"] if "target" in kwargs else args[1]
            if not target.is_floating_point() and kwargs.get("reduction", "mean") == "mean":
                self.pieces[-1].append((target != kwargs.get("ignore_index", IGNORED_LABEL)).sum(dtype=torch.float64))
        return func(*args, **kwargs)

    def require(self, shares: list[Tensor]) -> None:
        """Raise if each piece made one loss, and these averaged over other parts of the batch than ``shares`` says.

        Raises:
            ValueError: with what was counted and what was weighted.
        """
        losses = [piece for piece in self.pieces if piece]  # stages before the last leave the step before they make one
        if any(len(piece) != 1 for piece in losses) or len(losses) != len(shares):
            return
        counts = torch.stack([piece[0] for piece in losses])
        weighted = torch.stack(shares).to(counts.device)
        if not torch.allclose(counts / counts.sum(), weighted / weighted.sum(), rtol=1e-6):
            raise ValueError(
                f"the losses of the micro-batches average over {counts.int().tolist()} targets, but count {weighted.tolist()} of the whole "
                "by the labels of the batch, so their sum is not the loss of the whole batch. In a dict, 'labels' beside 'input_ids' are "
                "taken to be shifted by the model; give labels that are shifted already as 'shift_labels', and targets in which "
                f"{IGNORED_LABEL} occurs as one of the two. Else set microbatches=1, or pp=1"
            )
