"""Means: what of a loss a pipeline may take for the mean over its batch, seen in its graph."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor
from torch.autograd.graph import Node

from lightning_par.pipeline import children_first

_BENDING = frozenset(
    f"{name}Backward0"
    for name in (
        *("Sqrt", "Rsqrt", "Pow", "Exp", "Exp2", "Expm1", "Log", "Log2", "Log10", "Log1P", "Reciprocal", "Logsumexp", "Abs"),
        *("LinalgVectorNorm", "Sigmoid", "LogSigmoid", "Tanh", "Softplus", "Relu"),
        *("Clamp", "ClampMin", "ClampMax", "Maximum", "Minimum", "Max", "Min"),
    )
)
"""Nodes of functions of which the mean is not the function of the mean."""


def bent_by(loss: Tensor, means: Collection[Node]) -> str | None:
    """The function that makes something else of a mean on its way into ``loss``, by the nodes of such ``means``; None if there is none."""
    if loss.grad_fn is None or not means:
        return None
    leading = set(means)
    for node in children_first([loss.grad_fn], without=means):
        if any(child in leading for child, _ in node.next_functions):
            leading.add(node)
            if type(node).__name__ in _BENDING:
                return type(node).__name__.removesuffix("Backward0").lower()
    return None


def require_straight(loss: Tensor, means: Collection[Node]) -> None:
    """Refuse a loss that is no sum of multiples of means.

    Raises:
        ValueError: something else is made of one.
    """
    if name := bent_by(loss, means):
        raise ValueError(
            f"training_step's loss is {name}(...) of a mean: that of the batch's mean is another number than the mean of those of "
            "micro-batches. Set microbatches=1, or pp=1"
        )
