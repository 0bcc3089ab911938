"""Cut a batch into the pieces that a pipeline and context shards work on."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_par.layout import Span, split
from lightning_par.numerics import batch_size


def microbatches(batch: Any, count: int) -> list[Any]:
    """``batch`` as ``count`` batches of nearly equal size: every tensor and sequence that is as long as the batch is cut."""
    size = batch_size(batch)
    return [_take(batch, span, size) for span in split(size, count)]


def signature(batch: Any) -> Hashable:
    """Shapes and dtypes of a batch's tensors, in order: equal for batches that lead to activations of equal shapes."""
    if isinstance(batch, Tensor):
        return tuple(batch.shape), batch.dtype
    if isinstance(batch, Mapping):
        return tuple((key, signature(value)) for key, value in batch.items())
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return tuple(signature(value) for value in batch)
    return type(batch).__name__


def _take(value: Any, span: Span, size: int) -> Any:
    if isinstance(value, Tensor):
        return value[span.slice()] if value.dim() and value.shape[0] == size else value
    if isinstance(value, Mapping):
        items = {key: _take(item, span, size) for key, item in value.items()}
        return items if type(value) is dict else type(value)(items)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_take(item, span, size) for item in value))
    if isinstance(value, list | tuple):
        if len(value) == size and not any(isinstance(item, Tensor | Mapping | list | tuple) for item in value):
            return value[span.slice()]
        return type(value)(_take(item, span, size) for item in value)
    return value


def join(outputs: list[Any], shares: list[Tensor]) -> Any:
    """One batch's output from those of its micro-batches: numbers are averaged with ``shares``, tensors and lists put together."""
    first = outputs[0]
    if isinstance(first, Tensor):
        if first.dim() == 0:
            return sum((value * share for value, share in zip(outputs, shares, strict=True)), start=first.new_zeros(())).to(first.dtype)
        return torch.cat(outputs)
    if isinstance(first, Mapping):
        return {key: join([output[key] for output in outputs], shares) for key in first}
    if isinstance(first, tuple):
        return tuple(join(list(items), shares) for items in zip(*outputs, strict=True))
    if isinstance(first, list):
        return [item for output in outputs for item in output]
    return first
