"""Known numbers: those of tensors on the meta device that come from the batch and from constants alone, in a dry run.

Models ask for some: whether a mask hides anything, how long the longest sequence is. What is computed from no parameter is computed a
second time, on the CPU, so that they get the answer that they will get when they run.
Random numbers are not known, nor is memory to which nothing has been written.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from lightning_par.pipeline.torch_functions import map_tensors, tensors_in

LIMIT, SMOOTH_LIMIT = 2**24, 2**20
"""Elements of a tensor up to which its numbers are kept; of one that a function made of floating or complex numbers."""

CPU, META = torch.device("cpu"), torch.device("meta")


class _UnknownError(Exception):
    """The numbers that a function returns are others each time."""


class Known:
    """The numbers of tensors without them, as far as they are known.

    Beside each stands which memory its tensor had then, and how often that had been written to. If this has changed since (``x.data = y``,
    ``out=x``, in place in whatever way) and the same was not done to the number, it is not known any more.
    """

    def __init__(self) -> None:
        self._numbers: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def onto_meta(self, tensor: Tensor) -> Tensor:
        """One without numbers, whose numbers are known."""
        return self._onto_meta(tensor.detach().to(CPU, copy=True)) if tensor.numel() <= LIMIT else tensor.detach().to(META)

    def knows(self, values: Any) -> bool:
        """Whether the numbers of all tensors in ``values`` are known."""
        return all(tensor in self._numbers and self._numbers[tensor][1] == _State.of(tensor) for tensor in tensors_in(values))

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What the function returns, called without numbers, or with them where that cannot be. What is known of it is known afterwards."""
        known, given = self.knows((args, kwargs)), [tensor for tensor in tensors_in((args, kwargs)) if self.knows(tensor)]
        try:
            output = func(*args, **kwargs)
        except Exception:  # it cannot be done without numbers, or not at all
            if not known:
                raise
            with suppress(_UnknownError):
                return map_tensors(self._onto_meta, self._apart(self._compute(func, args, kwargs), given))
            self._forget(given)
            raise
        changed = [tensor for tensor in given if tensor.is_inference() or not self.knows(tensor)]
        outputs = tensors_in(output)
        if known and all(self._fits(tensor, given) for tensor in outputs):
            with suppress(Exception):
                numbers = tensors_in(self._compute(func, args, kwargs))
                self._remember(dict(zip(outputs, numbers, strict=True)))
                self._remember(self._beside(changed))
                return output
        self._forget(changed)
        return output

    def _compute(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What the function returns when it is called with numbers, all known. Torch's generator is left as it was.

        Raises:
            _UnknownError: what it returns is random, or not written yet.
        """
        if any(isinstance(leaf, torch.Generator) for leaf in tree_leaves((args, kwargs))):
            raise _UnknownError
        args, kwargs = tree_map(self._number, (args, kwargs))
        before = torch.get_rng_state()
        try:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                output = func(*args, **kwargs)
        finally:
            drawn = not torch.equal(before, torch.get_rng_state())
            torch.set_rng_state(before)
        if drawn or (_leaves_unset(func.__name__) and any(tensor.numel() for tensor in tensors_in(output))):
            raise _UnknownError
        return output

    def _fits(self, tensor: Tensor, given: list[Tensor]) -> bool:
        """Whether the numbers of what a function made of these can be kept, and were made at little cost."""
        if tensor.device.type not in ("cpu", "meta") or tensor.numel() > LIMIT:
            return False
        whole = not (tensor.is_floating_point() or tensor.is_complex())
        return whole or tensor.numel() <= SMOOTH_LIMIT or memory_of(tensor) in {memory_of(one) for one in given}

    def _apart(self, numbers: Any, given: list[Tensor]) -> Any:
        """With copies of those that are a given tensor's own (``.cpu()``)."""
        own = {id(self._numbers[tensor][0]) for tensor in given}
        return map_tensors(lambda number: number.clone() if id(number) in own else number, numbers)

    def _onto_meta(self, number: Tensor) -> Tensor:
        meta = number.to(META)
        if meta.numel() <= LIMIT:
            self._remember({meta: number})
        return meta

    def _remember(self, numbers: dict[Tensor, Tensor]) -> None:
        for tensor, number in numbers.items():
            self._numbers[tensor] = number, _State.of(tensor)

    def _forget(self, tensors: list[Tensor]) -> None:
        """Something unknown was written there."""
        for tensor in self._beside(tensors):
            del self._numbers[tensor]

    def _beside(self, tensors: list[Tensor]) -> dict[Tensor, Tensor]:
        """The numbers of these, and all that lie in the same memory."""
        memories = {memory_of(self._numbers[tensor][0]) for tensor in tensors}
        return {other: number for other, (number, _) in self._numbers.items() if memory_of(number) in memories} if memories else {}

    def _number(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self._numbers[leaf][0]
        return CPU if isinstance(leaf, torch.device) and leaf == META else leaf


class _State(NamedTuple):
    """Which memory a tensor has, and how often that has been written to (not counted in inference mode)."""

    memory: UntypedStorage | None
    version: int | None

    @classmethod
    def of(cls, tensor: Tensor) -> _State:
        return cls(memory_of(tensor), None if tensor.is_inference() else tensor._version)


def memory_of(tensor: Tensor) -> UntypedStorage | None:
    """Where a tensor's elements lie, if it is strided. Views share it."""
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        return None


def _leaves_unset(name: str) -> bool:
    """Whether what this function returns lies in memory to which nothing has been written."""
    return "empty" in name or "resize" in name or name == "new"
