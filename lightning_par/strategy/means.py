"""Means: what of a loss a pipeline may take for the mean over its batch, seen in its graph."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor
from torch.autograd.graph import Node

from lightning_par.pipeline import children_first

_BENDING = frozenset(
    {
        *("Sqrt", "Rsqrt", "Pow", "Exp", "Exp2", "Expm1", "Log", "Log2", "Log10", "Log1P", "Reciprocal", "Logsumexp", "Abs"),
        *("LinalgVectorNorm", "Sigmoid", "LogSigmoid", "Tanh", "Softplus", "Relu"),
        *("Clamp", "ClampMin", "ClampMax", "Maximum", "Minimum", "Max", "Min"),
    }
)
"""Functions of which the mean is not the function of the mean, as autograd calls them."""


def bent_by(loss: Tensor, means: Collection[Node]) -> str | None:
    """The function that makes something else of a mean on its way into ``loss``, by the nodes of such ``means``; None if none is known."""
    if loss.grad_fn is None or not means:
        return None
    leading = set(means)
    for node in children_first([loss.grad_fn], without=means):
        places = [place for place, (child, _) in enumerate(node.next_functions) if child in leading]
        if places:
            leading.add(node)
            name = type(node).__name__.rstrip("0123456789").removesuffix("Backward")
            if name in _BENDING or (name == "Mul" and len(places) == 2) or (name == "Div" and 1 in places):
                return name.lower()
    return None


def require_straight(loss: Tensor, means: Collection[Node]) -> None:
    """Refuse a loss that is one of these functions of a mean, a product of two or a quotient by one.

    Raises:
        ValueError: something else is made of one.
    """
    if name := bent_by(loss, means):
        raise ValueError(
            f"training_step's loss is {name}(...) of a mean: that of the batch's mean is another number than the mean of those of "
            "micro-batches. Set microbatches=1, or pp=1"
        )
