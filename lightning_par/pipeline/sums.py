"""A stage's backward in one piece, large gradients added up by the matrix products that make them.

Note [Sums of products]
~~~~~~~~~~~~~~~~~~~~~~~
Backward runs once for each micro-batch. From the second on autograd writes the gradient of a weight to new memory, and then adds that to
``weight.grad``; the fewer tokens a micro-batch has, the more of the time goes there. ``grad.addmm_(dy.t(), x)`` does both in one pass over
memory, and needs none of its own (as the gradient accumulation fusion of Megatron-LM, whose layers are made for it).

Here the layers are the user's, so it is done in the graph that they left::

    output <- mm <- ... <- input        a hook on mm adds the product of what mm saved and the gradient that comes to it;
              |                         w is left out of what autograd is asked for, so mm computes the other half alone
              t <- w

It is done for a weight if every way to it is the second factor of a ``torch.mm`` or ``addmm`` (which ``F.linear`` comes to), straight or
transposed, whose first factor has a gradient too (without that autograd would not come to the node), and was saved as it was (nothing
brings it back: no checkpointing, no offloading); and if nobody but the caller waits for its gradient: no hooks of others. All other
weights get their gradients from autograd.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from lightning_par.pipeline.backward import backward, children_first

LARGE = 2**16
"""Elements of a gradient from which on a pass over memory takes longer than to find its product."""

_FIRST_FACTORS = {"MmBackward0": "self", "AddmmBackward0": "mat1"}
"""The nodes of products of two matrices, and what they call the first; the second is the last of their inputs."""


def is_large(weight: Tensor) -> bool:
    """Whether it is worth looking for products that add to this weight's gradient."""
    return weight.numel() >= LARGE


def backward_summing(outputs: Sequence[GradientEdge], grads: Sequence[Tensor], weights: Collection[Tensor]) -> None:
    """Run a graph backward in one piece, adding to the ``grad`` of such of ``weights`` as it can by their products.

    Args:
        weights: parameters that have a ``grad``, to which anybody may add.
    """
    leaves, products = _find(outputs, weights) if outputs and weights else ([], [])
    if not products:
        backward(outputs, grads)
        return
    summed = {product.weight for product in products}
    left = [GradientEdge(leaf, 0) for leaf in leaves if leaf.variable not in summed]
    with ExitStack() as stack:
        for product in products:
            stack.callback(product.node.register_prehook(product.add).remove)
        torch.autograd.backward(outputs, grads, inputs=left)
    lost = sum(not product.is_added for product in products)
    assert not lost, f"autograd did not come to {lost} of the products that were to be added"


@dataclass(eq=False)
class _Product:
    """A matrix product of which a weight is the second factor, or its transpose."""

    node: Node
    weight: Tensor
    transposed: bool
    is_added: bool = False

    @property
    def first_factor(self) -> Tensor:
        return getattr(self.node, f"_saved_{_FIRST_FACTORS[type(self.node).__name__]}")

    @property
    def can_add(self) -> bool:
        """What the node saved will do for ``add``. It must be the node of a product."""
        *_, (before, _), _ = self.node.next_functions
        saved = getattr(self.node, f"_raw_saved_{_FIRST_FACTORS[type(self.node).__name__]}")
        if before is None or getattr(saved, "unpack_hook", None):
            return False
        x, sum_ = self.first_factor, self.weight.grad
        return _is_plain(x) and _is_plain(sum_) and x.dtype == sum_.dtype and x.dtype.is_floating_point and not sum_.requires_grad

    def add(self, gradients: tuple[Tensor | None, ...]) -> None:
        """A hook of the node, before it runs."""
        self.is_added = True
        (dy,) = gradients
        if dy is not None:
            x = self.first_factor
            factors = (dy.t(), x) if self.transposed else (x.t(), dy)
            self.weight.grad.addmm_(*factors, alpha=getattr(self.node, "_saved_alpha", 1))


def _find(outputs: Sequence[GradientEdge], weights: Collection[Tensor]) -> tuple[list[Node], list[_Product]]:
    """The nodes of all parameters, and the products that can be added. See Note [Sums of products]."""
    leaves: list[Node] = []
    uses: dict[Node, list[tuple[Node, bool]]] = defaultdict(list)  # of parameters and transposes: by whom, and whether as its last input
    for node in children_first([edge.node for edge in outputs]):
        inputs = node.next_functions
        for place, (child, _) in enumerate(inputs, 1):
            if child is not None and type(child).__name__ in {"AccumulateGrad", "TBackward0"}:
                uses[child].append((node, place == len(inputs)))
        if hasattr(node, "variable"):
            leaves.append(node)
        elif "Checkpoint" in type(node).__name__:  # reentrant: it cannot run for some parameters only
            return leaves, []
    for edge in outputs:
        uses[edge.node].append((edge.node, False))
    wanted = set(weights)
    products: list[_Product] = []
    for leaf in leaves:
        if leaf.variable in wanted and not leaf.variable._backward_hooks:
            found = list(_products_of(leaf, uses))
            if all(found):
                products += found
    return leaves, products


def _products_of(leaf: Node, uses: dict[Node, list[tuple[Node, bool]]]) -> Iterator[_Product | None]:
    """One for each way to a parameter; None where it is no product that can be added."""
    for use in uses[leaf]:
        transposed = type(use[0]).__name__ == "TBackward0"
        for node, is_last in uses[use[0]] if transposed else [use]:
            product = _Product(node, leaf.variable, transposed)
            yield product if is_last and type(node).__name__ in _FIRST_FACTORS and product.can_add else None


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided
