"""What torch's functions do with their arguments, for those who see them called (``__torch_function__``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

NUMBERS = frozenset(
    {
        *("__bool__", "__float__", "__int__", "__index__", "__complex__", "__contains__", "__array__"),
        *("item", "tolist", "numpy", "equal", "allclose", "is_nonzero"),
    }
)
"""Functions that return numbers of their arguments, not tensors."""

GRADIENTS = ("backward", "grad")
"""Functions that run a graph backward."""

_LIKE = frozenset({"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"}) | {
    *("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
}
"""Functions that ask their first argument for its shape, dtype and device only."""

_WRITES = frozenset(
    {
        *("__setitem__", "__set__", "__iadd__", "__isub__", "__imul__", "__imatmul__", "__itruediv__", "__ifloordiv__", "__imod__"),
        *("__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"),
    }
)

OVERWRITES = ("copy_", "zero_", "fill_")
"""Functions after which nothing is left of what was there."""

_NO_WRITES = ("requires_grad_", "detach_", "share_memory_")

_SHAPED_BY_NUMBERS = ("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount")

CHECKED = frozenset(
    {
        *("bernoulli", "bernoulli_", "multinomial", "poisson", "binomial", "binary_cross_entropy", "normal"),
        *("linalg_eig", "linalg_eigvals", "linalg_eigh", "linalg_eigvalsh", "linalg_svd", "linalg_svdvals", "linalg_qr", "linalg_pinv"),
        *("svd", "qr", "pinverse"),
    }
)
"""Functions that refuse what is no probability, on a GPU so that nothing can be done there any more; or NaN, if they do not crash."""


def tensors_in(values: Any) -> list[Tensor]:
    """All tensors in any nesting of tuples, lists and dicts, in order."""
    found: list[Tensor] = []
    _find(values, found)
    return found


def _find(values: Any, found: list[Tensor]) -> None:
    """``tree_leaves``, which takes long, only for what is not plain."""
    kind = type(values)
    if kind is tuple or kind is list:
        for value in values:
            _find(value, found)
    elif kind is dict:
        for value in values.values():
            _find(value, found)
    elif isinstance(values, Tensor):
        found.append(values)
    elif kind not in _NUMBERS_AND_NAMES:
        found += [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


_NUMBERS_AND_NAMES = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})


def map_tensors(function: Callable[[Tensor], Any], values: Any) -> Any:
    """The same nesting with what a function gives in place of each tensor."""
    return function(values) if isinstance(values, Tensor) else tree_map_only(Tensor, function, values)


def asked_for_numbers(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of which a function takes more than shape, dtype and device."""
    if name in _LIKE:
        return args[1:], {key: value for key, value in kwargs.items() if key not in ("input", "self")}
    return args[0] if name == "to" or name.endswith("_as") else (args, kwargs)


def name_of(func: Callable[..., Any]) -> str:
    """``add_`` of ``Tensor.add_`` and of ``torch.ops.aten.add_.Tensor``."""
    return func.__name__.split(".")[0]


def writes(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether a function writes to its arguments."""
    return name in _WRITES or (name.endswith("_") and not name.endswith("__") and name not in _NO_WRITES) or "out" in kwargs


def written(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors to which a function writes: itself, in place, or what is given as ``out``."""
    name = name_of(func)
    if not writes(name, kwargs) or (name == "__set__" and func != Tensor.data.__set__):
        return []
    return tensors_in(kwargs["out"] if "out" in kwargs else args[:1])


def shaped_by_numbers(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments whose numbers decide the shape of what a function returns."""
    if name == "__getitem__":
        return [tensor for tensor in tensors_in(args[1:]) if tensor.dtype in (torch.bool, torch.uint8)]
    if name == "repeat_interleave":
        return tensors_in((args[1:2], kwargs.get("repeats")))
    counts_classes = name == "one_hot" and (args[1] if len(args) > 1 else kwargs.get("num_classes", -1)) == -1
    is_one = (name == "where" and len(args) == 1) or counts_classes
    return tensors_in(args[:1]) if name in _SHAPED_BY_NUMBERS or is_one else []
