"""Origins: what tensors were computed from, also where no gradient flows: whole numbers, comparisons, what was detached.

Autograd's graph tells it of all others. Here every function that torch runs is looked at: what it returns without a graph comes from the
leaves of its arguments' graphs, and whatever is computed from that, with a graph or without, comes from them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_par.pipeline.backward import is_leaf
from lightning_par.pipeline.known import Known, tensors_in

Leaves = frozenset[Tensor]

Edge = tuple[Node, int]
"""A node of autograd's graph, and to which of its outputs in the forward pass the gradient belongs."""


class Origins(TorchFunctionMode):
    """Inside, remembers origins that no graph tells, and answers where a number is wanted that is ``known``.

    ``used`` is told them when something is computed from such a tensor, ``asked`` when the number itself is wanted (``if``, ``.item()``).
    """

    def __init__(self, used: Callable[[Leaves], None], asked: Callable[[Leaves], None]) -> None:
        super().__init__()
        self._used, self._asked = used, asked
        self._origins: dict[Tensor, Leaves] = {}
        self.known = Known()

    def of(self, values: Any) -> Leaves:
        """What the tensors in ``values`` come from, but for their graphs."""
        return frozenset().union(*(self._origins.get(tensor, ()) for tensor in tensors_in(values)))

    @override
    def __torch_function__(self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, name = kwargs or {}, func.__name__
        if name in _NUMBERS and not self.known.knows(args):
            self._asked(self.of(args) | leaves_of(tensors_in(args)))
        output = self.known.call(func, args, kwargs)
        outputs = tensors_in(args[0] if name == "__setitem__" else output)
        if not outputs or name.startswith(_LIKE):
            return output
        given = tensors_in(args[0] if name == "to" or name.endswith("_as") else (args, kwargs))
        origins = self.of(given)
        if origins:
            self._used(origins)
        loose = any(not tensor.requires_grad for tensor in outputs)
        for tensor in outputs:
            found = origins | (leaves_of(given) if loose and not tensor.requires_grad else frozenset())
            if found:
                self._origins[tensor] = self._origins.get(tensor, frozenset()) | found
        return output


_LIKE = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like", "new_")
"""Functions that ask a tensor for its shape, dtype and device only."""

_NUMBERS = ("__bool__", "__float__", "__int__", "__index__", "item", "tolist", "numpy", "__contains__")


def leaves_of(tensors: Iterable[Tensor]) -> Leaves:
    """The leaves of the graphs of these."""
    tensors = list(tensors)
    own = {tensor for tensor in tensors if tensor.requires_grad and tensor.is_leaf}
    return frozenset(own | {node.variable for node, _ in edges_of(tensors) if is_leaf(node)})


def edges_of(tensors: Iterable[Tensor]) -> frozenset[Edge]:
    """The edges of the graphs of these, and those by which gradients come to them."""
    todo = [(tensor.grad_fn, tensor.output_nr) for tensor in tensors if tensor.grad_fn is not None]
    edges, seen = set(todo), set[Node]()
    while todo:
        node, _ = todo.pop()
        if node not in seen:
            seen.add(node)
            onward = {edge for edge in node.next_functions if edge[0] is not None} - edges
            edges |= onward
            todo += onward
    return frozenset(edges)
