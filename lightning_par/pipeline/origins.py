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
from torch.utils._pytree import tree_leaves
from typing_extensions import override

Leaves = frozenset[Tensor]


class Origins(TorchFunctionMode):
    """Inside, remembers origins that no graph tells.

    ``used`` is told them when something is computed from such a tensor, ``asked`` when the number itself is wanted (``if``, ``.item()``).
    """

    def __init__(self, used: Callable[[Leaves], None], asked: Callable[[Leaves], None]) -> None:
        super().__init__()
        self._used, self._asked = used, asked
        self._known: dict[Tensor, Leaves] = {}

    def of(self, values: Any) -> Leaves:
        """What the tensors in ``values`` come from, but for their graphs."""
        return frozenset().union(*(self._known.get(tensor, ()) for tensor in _tensors(values)))

    @override
    def __torch_function__(self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, name = kwargs or {}, func.__name__
        if name in _NUMBERS:
            self._asked(self.of(args) | leaves_of(_tensors(args)))
        output = func(*args, **kwargs)
        outputs = _tensors(args[0] if name == "__setitem__" else output)
        if not outputs or name.startswith(_LIKE):
            return output
        given = _tensors(args[0] if name == "to" or name.endswith("_as") else (args, kwargs))
        origins = self.of(given)
        if origins:
            self._used(origins)
        loose = any(not tensor.requires_grad for tensor in outputs)
        for tensor in outputs:
            found = origins | (leaves_of(given) if loose and not tensor.requires_grad else frozenset())
            if found:
                self._known[tensor] = self._known.get(tensor, frozenset()) | found
        return output


_LIKE = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like", "new_")
"""Functions that ask a tensor for its shape, dtype and device only."""

_NUMBERS = ("__bool__", "__float__", "__int__", "__index__", "item", "tolist", "numpy")


def leaves_of(tensors: Iterable[Tensor]) -> Leaves:
    """The leaves of the graphs of these."""
    tensors = list(tensors)
    leaves = {tensor for tensor in tensors if tensor.requires_grad and tensor.is_leaf}
    todo: list[Node] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if hasattr(node, "variable"):
            leaves.add(node.variable)
        children = {child for child, _ in node.next_functions if child is not None} - seen
        seen |= children
        todo += children
    return frozenset(leaves)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
