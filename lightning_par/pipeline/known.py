"""Known numbers: those of tensors on the meta device that come from the batch and from constants alone, in a dry run.

Models ask for some: whether a mask hides anything, how long the longest sequence is. What is computed from no parameter is computed a
second time, on the CPU, so that they get the answer that they will get when they run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

LIMIT = 2**24
"""Elements of a tensor up to which its numbers are kept."""

_RANDOM = {"bernoulli", "multinomial", "normal", "rand", "randn", "randint", "randperm", "dropout"} | {
    f"{name}_" for name in ("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "random", "uniform")
}
"""Functions whose numbers are others each time."""

CPU, META = torch.device("cpu"), torch.device("meta")


class Known:
    """The numbers of tensors without them, as far as they are known."""

    def __init__(self) -> None:
        self._numbers: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def onto_meta(self, tensor: Tensor) -> Tensor:
        """One without numbers, whose numbers are known."""
        meta = tensor.to(META)
        if meta.numel() <= LIMIT:
            self._numbers[meta] = tensor.detach().to(CPU, copy=True)
        return meta

    def knows(self, values: Any) -> bool:
        """Whether the numbers of all tensors in ``values`` are known."""
        return all(tensor in self._numbers for tensor in tensors_in(values))

    def compute(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What the function returns when it is called with numbers; it must know them."""
        args, kwargs = tree_map(self._number, (args, kwargs))
        with torch._C.DisableTorchFunction(), torch.no_grad():
            return func(*args, **kwargs)

    def follow(self, func: Callable[..., Any], args: Any, kwargs: Any, output: Any) -> None:
        """The function was called, and returned this."""
        outputs = tensors_in(output)
        if self.knows((args, kwargs)) and func.__name__ not in _RANDOM and all(tensor.numel() <= LIMIT for tensor in outputs):
            with suppress(Exception):
                numbers = tensors_in(self.compute(func, args, kwargs))
                for tensor, number in zip(outputs, numbers, strict=True):
                    self._numbers[tensor] = number
                return
        for tensor in (*outputs, *tensors_in(args[:1] if func.__name__ == "__setitem__" else ())):
            self._forget(tensor)

    def _forget(self, tensor: Tensor) -> None:
        """Something unknown was written there."""
        if tensor in self._numbers:
            memory = self._numbers[tensor].untyped_storage()._cdata
            for other in [other for other, number in self._numbers.items() if number.untyped_storage()._cdata == memory]:
                del self._numbers[other]

    def _number(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self._numbers[leaf]
        return CPU if isinstance(leaf, torch.device) and leaf == META else leaf


def tensors_in(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
