"""Entering: real tensors in a dry run. A step brings some: constants made before it, NumPy's arrays, modules that are no part of the model.

Where one meets tensors on the meta device, one of those stands for it from then on. Those that lie in one memory have stand-ins in one
memory, too: what is written into a part of one, in place of the real one, is there for all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_par.pipeline.known import META, Known, memory_of
from lightning_par.pipeline.torch_functions import map_tensors, tensors_in


class _Stand(NamedTuple):
    """What stands for a tensor, and how often the real one had been written to out of sight (not counted in inference mode)."""

    tensor: Tensor
    version: int | None


class Entering:
    """Stand-ins for real tensors, with their numbers ``known`` if they need no gradient."""

    def __init__(self, known: Known) -> None:
        self._known = known
        self._stands = WeakIdKeyDictionary()
        self._wholes: dict[UntypedStorage, Tensor] = {}

    def __call__(self, values: Any, *, always: bool = False) -> Any:
        """The same values, with stand-ins if some real tensors in it have one, or stand beside tensors on the meta device."""
        tensors = tensors_in(values)
        real = [tensor for tensor in tensors if not tensor.is_meta]
        if real and (always or len(real) < len(tensors) or any(self._has_entered(tensor) for tensor in real)):
            return map_tensors(self._stand_in, values)
        return values

    def _has_entered(self, tensor: Tensor) -> bool:
        return tensor in self._stands or memory_of(tensor) in self._wholes

    def _stand_in(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta or is_functorch_wrapped_tensor(tensor):
            return tensor
        stand, version = self._stands.get(tensor), None if tensor.is_inference() else tensor._version
        if stand is None or stand.version != version:
            if stand is not None:
                self._wholes.pop(memory_of(tensor), None)
            stand = self._stands[tensor] = _Stand(self._made(tensor), version)
        return stand.tensor

    def _made(self, tensor: Tensor) -> Tensor:
        memory, plain = memory_of(tensor), tensor.detach()
        if memory is None or tensor.is_conj() or tensor.is_neg():
            return self._known.onto_meta(plain)
        if memory not in self._wholes:
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(memory)
            self._wholes[memory] = whole.to(META) if tensor.requires_grad else self._known.onto_meta(whole)
        whole = self._wholes[memory]
        if whole.dtype != tensor.dtype:
            whole = self._known.call(Tensor.view, (whole, tensor.dtype), {})
        return self._known.call(torch.as_strided, (whole, tensor.size(), tensor.stride(), tensor.storage_offset()), {})
