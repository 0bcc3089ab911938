"""A stage's backward in one piece, large gradients added up by the nodes that make them.

Note [Sums of products]
~~~~~~~~~~~~~~~~~~~~~~~
Backward runs once for each micro-batch. From the second on autograd writes the gradient of a weight to new memory, and then adds that to
``weight.grad``; the fewer tokens a micro-batch has, the more of the time goes there. ``grad.addmm_(dy.t(), x)`` does both in one pass over
memory, and needs none of its own (as the gradient accumulation fusion of Megatron-LM, whose layers are made for it); of an embedding only
the rows that were looked up need to be touched.

Here the layers are the user's, so it is done in the graph that they left::

    output <- mm <- ... <- input        a hook on mm adds the product of what mm saved and the gradient that comes to it;
              |                         autograd is asked for mm and for all parameters but w, so mm computes the other half alone
              t <- w

It is done for a weight if every way to it is the second factor of a ``torch.mm`` or ``addmm`` (which ``F.linear`` comes to), straight or
transposed, or an ordinary embedding; and what the node saved is there as it was (nothing brings it back: no checkpointing, no
offloading); and nobody but the caller waits for its gradient: no hooks of others on the weight, its transpose or these nodes. All other
weights get their gradients from autograd, half precision ones too, whose sums are wider than they are. What cannot be seen are
``register_prehook`` hooks that someone put on the weight's own node.

Such sums can wait. Once a rank has run its last forward, the stage before idles until a gradient comes: it is sent first, and the sums are
made while it travels, so that each stage on the way back holds up the next by half a backward only. The idea is that of zero bubble (Qi et
al., arXiv 2401.10241), in the order and, but for what one micro-batch's products need, the memory of any schedule.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from typing_extensions import override

from lightning_par.pipeline.backward import Rest, backward, nothing

LARGE = 2**16
"""Elements of a gradient from which on a pass over memory takes longer than to find its product."""

_FIRST_FACTORS = {"MmBackward0": "self", "AddmmBackward0": "mat1"}
"""The nodes of products of two matrices, and what they call the first; the second is the last of their inputs."""


def is_large(weight: Tensor) -> bool:
    """Whether it is worth looking for nodes that add to this weight's gradient."""
    return weight.numel() >= LARGE


def backward_summing(outputs: Sequence[GradientEdge], grads: Sequence[Tensor], weights: Collection[Tensor], *, wait: bool = False) -> Rest:
    """Run a graph backward in one piece, adding to the ``grad`` of such of ``weights`` as it can. See Note [Sums of products].

    Args:
        weights: parameters that have a ``grad``, to which anybody may add.
        wait: whether sums are left to what this returns, which must be called once; else that does nothing.
    """
    leaves, found = _find(outputs, weights) if outputs and weights else ([], [])
    if not found:
        backward(outputs, grads)
        return nothing
    waiting: list[Callable[[], None]] = []
    summed = {use.weight for use in found}
    wanted = [GradientEdge(leaf, 0) for leaf in leaves if leaf.variable not in summed] + [GradientEdge(use.node, 0) for use in found]
    with ExitStack() as stack:
        for use in found:
            hook = partial(use.add, waiting.append if wait else _at_once, _stream_of(use.weight))
            stack.callback(use.node.register_prehook(hook).remove)
        torch.autograd.backward(outputs, grads, inputs=wanted)
    lost = sum(not use.is_added for use in found)
    assert not lost, f"autograd did not come to {lost} of the nodes that were to add"
    return partial(_one_by_one, waiting)


def _at_once(sum_: Callable[[], None]) -> None:
    sum_()


def _one_by_one(waiting: list[Callable[[], None]]) -> None:
    """Each lets go of what it was made of."""
    while waiting:
        waiting.pop(0)()


class _Use(ABC):
    """A node that makes a gradient of a weight, and adds it to the others."""

    def __init__(self, node: Node, weight: Tensor) -> None:
        self.node, self.weight, self.is_added = node, weight, False

    @abstractmethod
    def can_add(self) -> bool:
        """Whether what is there will do for ``sum_up``."""

    @property
    @abstractmethod
    def saved(self) -> Tensor | None:
        """What the node keeps for the gradient of the weight; None if it does not, or someone brings it back: then it cannot add."""

    @abstractmethod
    def sum_up(self, sum_: Tensor, dy: Tensor, saved: Tensor) -> None:
        """Add the gradient of the weight, by that of the node's output and what the node had ``saved``."""

    def add(
        self, take: Callable[[Callable[[], None]], None], stream: torch.cuda.Stream | None, gradients: tuple[Tensor | None, ...]
    ) -> None:
        """A hook of the node, before it runs: hands the sum to ``take``.

        On a GPU a node runs on the stream of its forward. Sums are all made on the caller's, ``stream``: one after another, and the caller
        need not wait for those on others, as he would not for autograd's.
        """
        self.is_added = True
        (dy,) = gradients
        if dy is None:
            return
        saved, now = self.saved, _stream_of(self.weight)
        if now != stream:
            stream.wait_stream(now)
            for tensor in (dy, saved):
                tensor.record_stream(stream)
        take(partial(self._sum, stream, dy, saved))

    @torch.no_grad()
    def _sum(self, stream: torch.cuda.Stream | None, dy: Tensor, saved: Tensor) -> None:
        if self.weight.grad is None:  # somebody has taken it away since
            self.weight.grad = torch.zeros_like(self.weight)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            self.sum_up(self.weight.grad, dy, saved)


class _Product(_Use):
    """A matrix product of which the weight is the second factor, or its transpose."""

    def __init__(self, node: Node, weight: Tensor, transposed: bool) -> None:
        super().__init__(node, weight)
        self.transposed = transposed

    @override
    def can_add(self) -> bool:
        first, second = self.saved, _saved(self.node, "mat2")  # each is saved for the gradient of the other
        if first is None or second is None or second._backward_hooks or second.retains_grad:
            return False
        return _is_plain(first) and _takes(self.weight.grad, first.dtype)

    @property
    @override
    def saved(self) -> Tensor | None:
        return _saved(self.node, _FIRST_FACTORS[type(self.node).__name__])

    @override
    def sum_up(self, sum_: Tensor, dy: Tensor, saved: Tensor) -> None:
        factors = (dy.t(), saved) if self.transposed else (saved.t(), dy)
        sum_.addmm_(*factors, alpha=getattr(self.node, "_saved_alpha", 1))


class _Lookup(_Use):
    """An embedding of which the weight is the table."""

    @override
    def can_add(self) -> bool:
        if self.node._saved_sparse or self.node._saved_scale_grad_by_freq or self.saved is None:
            return False
        return _takes(self.weight.grad, self.weight.dtype)

    @property
    @override
    def saved(self) -> Tensor | None:
        return _saved(self.node, "indices")

    @override
    def sum_up(self, sum_: Tensor, dy: Tensor, saved: Tensor) -> None:
        padding = self.node._saved_padding_idx
        if padding < len(self.weight):  # else there is none
            dy = dy.masked_fill((saved == padding).unsqueeze(-1), 0)
        places, rows = saved.reshape(-1), dy.reshape(-1, dy.shape[-1])
        if dy.device.type == "cpu":
            sum_.index_add_(0, places, rows)
        else:  # in the same order every time, as autograd's own
            sum_.index_put_((places,), rows, accumulate=True)


def _find(outputs: Sequence[GradientEdge], weights: Collection[Tensor]) -> tuple[list[Node], list[_Use]]:
    """The nodes of all parameters, and the nodes that can add. See Note [Sums of products]."""
    leaves: dict[Tensor, list[Node]] = defaultdict(list)
    uses: dict[Node, list[tuple[Node, bool]]] = defaultdict(list)  # of parameters and transposes: by whom, and whether as its last input
    todo = list({edge.node: None for edge in outputs})
    for node in todo:
        uses[node].append((node, False))  # by the caller
    seen = set(todo)
    while todo:  # every node, in any order: this is the part that costs, once for each micro-batch
        node = todo.pop()
        kind = type(node).__name__
        if kind == "AccumulateGrad":
            leaves[node.variable].append(node)
            continue
        if "Checkpoint" in kind:  # reentrant: it cannot run for some parameters only
            return [], []
        inputs = node.next_functions
        for place, (child, _) in enumerate(inputs, 1):
            if child is None:
                continue
            if type(child).__name__ in ("AccumulateGrad", "TBackward0"):
                uses[child].append((node, place == len(inputs)))
            if child not in seen:
                seen.add(child)
                todo.append(child)
    found: list[_Use] = []
    for weight in weights:
        nodes = leaves.get(weight, ())
        if len(nodes) == 1 and weight.requires_grad and not weight._backward_hooks and not _has_hooks(nodes[0]):
            ways = list(_uses_of(nodes[0], uses))
            if all(ways):
                found += ways
    return [node for nodes in leaves.values() for node in nodes], found


def _uses_of(leaf: Node, uses: dict[Node, list[tuple[Node, bool]]]) -> Iterator[_Use | None]:
    """One for each way to a parameter; None where it is none that can add."""
    for use in uses[leaf]:
        transposed = type(use[0]).__name__ == "TBackward0"
        known = not transposed or not _has_hooks(use[0])
        for node, is_last in uses[use[0]] if transposed else [use]:
            kind = type(node).__name__
            way: _Use | None = None
            if known and is_last and kind in _FIRST_FACTORS:
                way = _Product(node, leaf.variable, transposed)
            elif kind == "EmbeddingBackward0" and not transposed:
                way = _Lookup(node, leaf.variable)
            yield way if way is not None and way.can_add() and not _has_hooks(node) else None


def _saved(node: Node, name: str) -> Any:
    """A tensor that a node saved; None where it did not, or someone brings it back."""
    raw = getattr(node, f"_raw_saved_{name}")
    return None if getattr(raw, "unpack_hook", None) else getattr(node, f"_saved_{name}")


def _has_hooks(node: Node) -> bool:
    """Whether someone waits for what a node computes."""
    handle = node.register_hook(nothing)
    others = len(handle.hooks_dict_ref()) > 1
    handle.remove()
    return others


def _stream_of(tensor: Tensor) -> torch.cuda.Stream | None:
    """Where work on a tensor is queued now; None on a device without streams."""
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


def _takes(sum_: Tensor, dtype: torch.dtype) -> bool:
    """Whether gradients of this dtype may be added here, one by one."""
    return _is_plain(sum_) and sum_.dtype == dtype and dtype in (torch.float32, torch.float64) and not sum_.requires_grad


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided
