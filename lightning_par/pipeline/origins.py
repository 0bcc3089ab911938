"""Origins: what tensors were computed from, also where no gradient flows: whole numbers, comparisons, what was detached.

Autograd's graph tells it of all others. Here every function that torch runs is looked at: what it returns without a graph comes from the
leaves of its arguments' graphs, and whatever is computed from that, with a graph or without, comes from them, too. It is the memory of a
tensor that has origins: what is written into a view is in the whole, too. What a tensor's own graph tells is not told a second time.
What comes from where no function is looked at (``torch.vmap`` and the like, TorchScript) without a graph may come from anything that was
computed before the layers, and is taken for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from lightning_par.pipeline.backward import children_first, is_leaf
from lightning_par.pipeline.entering import Entering
from lightning_par.pipeline.known import META, Known, memory_of
from lightning_par.pipeline.torch_functions import NUMBERS, asked_for_numbers, tensors_in, writes

Leaves = frozenset[Tensor]


class Origins(TorchFunctionMode):
    """Inside, remembers origins that no graph tells, and answers where a number is wanted that is ``known``.

    ``used`` is told them when something is computed from such a tensor, ``asked`` when the number itself is wanted (``if``, ``.item()``).
    ``anything`` are all origins that a tensor of which nothing is known may have.
    """

    def __init__(self, used: Callable[[Leaves], None], asked: Callable[[Leaves], None], anything: Callable[[], Leaves]) -> None:
        super().__init__()
        self._used, self._asked, self._anything = used, asked, anything
        self._seen: set[UntypedStorage | Tensor] = set()
        self._graphs: dict[UntypedStorage | Tensor, Node] = {}
        self._origins: dict[UntypedStorage | Tensor, Leaves] = {}  # held, so that no memory is used twice
        self.known = Known()
        self._entering = Entering(self.known)

    def of(self, values: Any) -> Leaves:
        """What the tensors in ``values`` come from, but for their graphs."""
        with torch._C.DisableTorchFunction():
            values = self._entering(values)
        return frozenset().union(*(self._of(tensor) for tensor in tensors_in(values)))

    def see(self, tensors: Iterable[Tensor]) -> None:
        """It is known where these come from."""
        for tensor in tensors:
            place = _place(tensor)
            self._seen.add(place)
            if tensor.grad_fn is not None:
                self._graphs[place] = tensor.grad_fn

    def _of(self, tensor: Tensor) -> Leaves:
        place = _place(tensor)
        if place not in self._seen and not tensor.requires_grad and tensor.is_meta and not is_functorch_wrapped_tensor(tensor):
            self._seen.add(place)
            self._origins[place] = self._anything()
        if place in self._graphs and place not in self._origins and not tensor.requires_grad:  # detached where nobody looked
            self._origins[place] = leaves_below([self._graphs[place]])
        found = self._origins.get(place, frozenset())
        return found - leaves_of([tensor]) if found and tensor.requires_grad else found

    @override
    def __torch_function__(self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, name = kwargs or {}, func.__name__
        if name in _MOVES:
            func, name, args, kwargs = Tensor.to, "to", (args[0], META), {}
        func = _ON_META.get(name, func)
        args, kwargs, moved = _on_meta(name, args, kwargs)
        real = [not tensor.is_meta for tensor in tensors_in((args, kwargs))]
        args, kwargs = self._entering((args, kwargs), always=moved or name in _COPIES or writes(name, kwargs))
        self.see(tensor for tensor, was_real in zip(tensors_in((args, kwargs)), real, strict=True) if was_real)
        if name in NUMBERS and not self.known.knows(args):
            self._asked(self.of(args) | leaves_of(tensors_in(args)))
        try:
            output = self._filled(func, args, kwargs) if name in _FILLED else self.known.call(func, args, kwargs)
        except Exception:  # it wants numbers, perhaps
            self._asked(self.of((args, kwargs)) | leaves_of(tensors_in((args, kwargs))))
            raise
        outputs = tensors_in(args[0] if name == "__setitem__" else output)
        if not outputs:
            return output
        given = tensors_in(asked_for_numbers(name, args, kwargs))
        origins = self.of(given)
        self.see(tensor for tensor in outputs if not is_functorch_wrapped_tensor(tensor))
        if origins:
            self._used(origins)
        loose = any(not tensor.requires_grad for tensor in outputs)
        for tensor in outputs:
            found = origins | (leaves_of(given) if loose and not tensor.requires_grad else frozenset())
            if found:
                place = _place(tensor)
                self._origins[place] = self._origins.get(place, frozenset()) | found
        return output

    def _filled(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The number with which a function fills a new tensor is not wanted for its shape: it is filled in afterwards."""
        place = 2 if func.__name__ == "new_full" else 1
        fill = args[place] if len(args) > place else kwargs.get("fill_value")
        if not isinstance(fill, Tensor):
            return self.known.call(func, args, kwargs)
        zero = torch.zeros((), dtype=fill.dtype, device="cpu").item()
        if len(args) > place:
            args = *args[:place], zero, *args[place + 1 :]
        else:
            kwargs = kwargs | {"fill_value": zero}
        return self.known.call(Tensor.fill_, (self.known.call(func, args, kwargs), fill.detach()), {})


def _grouped_mm(a: Tensor, b: Tensor, *, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None) -> Tensor:
    """Products of groups of rows (or columns) with matrices of their own: torch has it on the meta device in bfloat16 only."""
    if a.dim() == b.dim() == 2:
        output = (a @ b).expand(len(offs), -1, -1)
    elif a.dim() == b.dim():
        output = a @ b
    else:
        output = (a.sum(0) if a.dim() == 3 else a) @ (b.sum(0) if b.dim() == 3 else b)
    return (output if bias is None else output + bias.sum(0)).to(out_dtype or a.dtype)


_ON_META = {"grouped_mm": _grouped_mm, "_grouped_mm": _grouped_mm}
"""What is called in place of functions that cannot run without numbers."""

_MOVES = ("cpu", "cuda", "xpu", "pin_memory")

_COPIES = ("tensor", "as_tensor", "asarray")
"""Functions that make a tensor on the default device of what they are given."""

_FILLED = ("full", "full_like", "new_full")


def _on_meta(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """Arguments with the meta device in place of any other, and whether there was one."""
    devices = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.device)]
    if devices:
        args, kwargs = tree_map_only(torch.device, lambda _: META, (args, kwargs))
    named = isinstance(kwargs.get("device"), str | int)
    if named:
        kwargs = kwargs | {"device": META}
    placed = name == "to" and len(args) > 1 and isinstance(args[1], str | int)
    if placed:
        args = args[0], META, *args[2:]
    return args, kwargs, bool(devices) or named or placed


def _place(tensor: Tensor) -> UntypedStorage | Tensor:
    """What has its origins: its memory, or itself where it has none that can be told."""
    with torch._C.DisableTorchFunction():
        memory = memory_of(tensor)
    return tensor if memory is None else memory


def leaves_of(tensors: Iterable[Tensor]) -> Leaves:
    """The leaves of the graphs of these."""
    tensors = list(tensors)
    own = frozenset(tensor for tensor in tensors if tensor.requires_grad and tensor.is_leaf)
    return own | leaves_below([tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None])


def leaves_below(nodes: Sequence[Node]) -> Leaves:
    return frozenset(node.variable for node in children_first(nodes) if is_leaf(node))
