"""Cut a batch into the pieces that a pipeline and context shards work on, and put together what steps return for them.

Note [One piece, several runs]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A rank with several stages runs the step on a piece once for each. What a step does to its batch before the layers (``batch.pop``,
``batch["y"] = ...``) must not meet the next run, so each gets containers and arrays of its own. Tensors may be large, and are the same for
all: one that a run changes in place is refused while another run is to come. In evaluation, which keeps none of them, they are copied, as
are those made in inference mode, which do not count their changes.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Hashable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from numbers import Integral, Number
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_par.layout import Span, split
from lightning_par.numerics import Array, are_samples, batch_size, children, with_children
from lightning_par.pipeline import PipelineError, StageExit

PLAIN = (str, bytes, Number, Enum, np.generic, type, type(None), torch.dtype, torch.device, torch.Size)
"""No data of single samples."""


@dataclass(frozen=True)
class Piece:
    """One part of a batch, and its share of the batch's weight (a 0-dim float64 tensor)."""

    batch: Any
    share: Tensor


def microbatches(batch: Any, count: int) -> list[Any]:
    """``batch`` as ``count`` batches of nearly equal size: every tensor, array and list of samples as long as the batch is cut.

    See Note [Fields and samples] in ``numerics.samples``.

    Raises:
        ValueError: something in it cannot be cut, or it cannot be told whether it is to be.
    """
    if count == 1:
        return [batch]
    return samples_at(batch, split(batch_size(batch), count))


def samples_at(batch: Any, spans: Sequence[Span]) -> list[Any]:
    """These samples of ``batch``, as ``microbatches``."""
    size = batch_size(batch)
    return [_take(batch, span, size, "batch", is_top=True) for span in spans]


def sizes_of(samples: int, count: int) -> list[int]:
    """The samples of each of ``count`` micro-batches."""
    return [span.size for span in split(samples, count)]


def signature(batch: Any) -> Hashable:
    """Shapes and dtypes of a batch's tensors, in order: equal for batches that lead to activations of equal shapes."""
    if isinstance(batch, Array):
        return tuple(batch.shape), batch.dtype
    if (parts := children(batch)) is not None:
        return tuple((key, signature(value)) for key, value in parts.items())
    if isinstance(batch, list | tuple):
        return tuple(signature(value) for value in batch)
    return type(batch).__name__


def _take(value: Any, span: Span, size: int, name: str, *, is_top: bool = False) -> Any:
    if isinstance(value, Array):
        return _apart(value[span.slice()]) if value.ndim and len(value) == size else value
    if isinstance(value, PLAIN):
        return value
    parts = children(value) if not isinstance(value, PackedSequence) else None
    if parts is not None:
        return with_children(value, {key: _take(part, span, size, f"{name}[{key!r}]") for key, part in parts.items()})
    if type(value) in (list, tuple):
        if are_samples(value, size, name, is_top=is_top, of_lists=True):
            return value[span.slice()]
        return type(value)(_take(item, span, size, f"{name}[{place}]") for place, item in enumerate(value))
    raise ValueError(
        f"{name} is a {type(value).__name__}, and a pipeline cannot tell how to cut it into micro-batches. Give tensors, NumPy arrays, "
        "dicts, dataclasses, or lists with one item for each sample; or use microbatches=1"
    )


def _apart(piece: Any) -> Any:
    """A piece of an array whose changes in place are not taken for those of other pieces."""
    return piece.data if isinstance(piece, Tensor) and not piece.requires_grad else piece


class Handout:
    """Hands out pieces of a batch, each to ``runs`` runs of a step. See Note [One piece, several runs]."""

    def __init__(self, pieces: Sequence[Any], runs: int) -> None:
        self._pieces, self._runs = pieces, runs
        self._done: Counter[int] = Counter()

    @contextmanager
    def piece(self, m: int) -> Iterator[Any]:
        """Piece ``m`` for one run, inside.

        Raises:
            PipelineError: the run, of a stage before the last, has changed a tensor that another is still to see.
        """
        self._done[m] += 1
        if self._runs == 1:
            yield self._pieces[m]
            return
        tensors = dict(_tensors(self._pieces[m], "batch")) if self._done[m] < self._runs else {}
        before = {name: changes(tensor) for name, tensor in tensors.items()}
        try:
            yield own(self._pieces[m])
        except StageExit:
            if changed := [name for name, tensor in tensors.items() if changes(tensor) != before[name]]:
                raise PipelineError(
                    f"the step changes {changed[0]} in place before the layers. This rank has {self._runs} stages, and runs the step on "
                    "the same tensor once for each: it would be changed as often. Clone it first, or use chunks=1"
                ) from None
            raise


def changes(tensor: Tensor) -> int:
    """How often the tensor, or another on the same memory, was changed in place."""
    return 0 if tensor.is_inference() else tensor._version


def own(value: Any) -> Any:
    """The same in other containers; without gradients, with other tensors."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Tensor):
        shared = torch.is_grad_enabled() and not value.is_inference()
        return value if shared else value.clone().requires_grad_(value.requires_grad)
    if isinstance(value, MutableMapping):
        other = copy.copy(value)
        for key, part in list(children(value).items()):
            other[key] = own(part)
        return other
    if type(value) in (list, tuple):
        return type(value)(own(item) for item in value)
    parts = children(value) if not isinstance(value, PackedSequence) else None
    return value if parts is None else with_children(value, {key: own(part) for key, part in parts.items()})


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """By the names that messages have for them."""
    if isinstance(value, Tensor):
        yield name, value
        return
    parts = children(value)
    if parts is None and isinstance(value, list | tuple):
        parts = dict(enumerate(value))
    for key, part in (parts or {}).items():
        yield from _tensors(part, f"{name}[{key!r}]")


def join(outputs: list[Any], shares: list[Tensor], samples: int, name: str) -> Any:
    """One batch's output from those of its micro-batches.

    Numbers are averaged with ``shares``, tensors, arrays and lists with one row or item for each sample put together.

    Args:
        samples: of the whole batch, which ``microbatches`` has cut.
        name: what the output is called in messages.

    Raises:
        ValueError: there is something else in it, and it is not known what one process would return.
    """
    if len(outputs) == 1:
        return outputs[0]
    return _join(outputs, shares, sizes_of(samples, len(outputs)), name)


def _join(outputs: list[Any], shares: list[Tensor], sizes: list[int], name: str) -> Any:
    first = outputs[0]
    if len(kinds := sorted({type(output).__name__ for output in outputs})) > 1:
        raise _refusal(name, f"is of types {', '.join(kinds)}")
    if isinstance(first, Array) and first.ndim:
        if [len(output) for output in outputs] != sizes:
            raise _refusal(name, f"has {[len(output) for output in outputs]} rows for {sizes} samples")
        return torch.cat(outputs) if isinstance(first, Tensor) else np.concatenate(outputs)
    if isinstance(first, Array | Number | np.generic) and not isinstance(first, bool):
        return _mean(outputs, shares, name)
    if (parts := children(first)) is not None:
        several = [children(output) for output in outputs]
        if any(other.keys() != parts.keys() for other in several):
            raise _refusal(name, "has different keys")
        return with_children(first, {key: _join([other[key] for other in several], shares, sizes, f"{name}[{key!r}]") for key in parts})
    if isinstance(first, list | tuple):
        lengths = [len(output) for output in outputs]
        if isinstance(first, list) and lengths == sizes and are_samples(first, sizes[0], name):
            return [item for output in outputs for item in output]
        if len(set(lengths)) > 1:
            raise _refusal(name, f"has {lengths} items for {sizes} samples")
        return type(first)(_join(list(items), shares, sizes, f"{name}[{place}]") for place, items in enumerate(zip(*outputs, strict=True)))
    if not all(_is_same(first, output) for output in outputs):
        raise _refusal(name, f"is a {type(first).__name__}, another for each")
    return first


def _mean(outputs: list[Any], shares: list[Tensor], name: str) -> Any:
    first = outputs[0]
    is_whole = not torch.is_floating_point(first) and not first.is_complex() if isinstance(first, Tensor) else _is_whole(first)
    if is_whole:
        raise _refusal(name, "is a whole number, perhaps a count")
    weights = torch.stack(shares)
    values = torch.stack([torch.as_tensor(output, device=weights.device) for output in outputs])
    summed = torch.where(weights > 0, values * weights, 0.0).sum()  # a mean over nothing is NaN, and counts nothing
    mean = summed / weights.sum()  # of a context shard the shares are parts of one
    if isinstance(first, Tensor):
        return mean.to(first)
    return np.asarray(mean.item(), first.dtype) if isinstance(first, np.ndarray) else type(first)(mean.item())


def _is_whole(number: Any) -> bool:
    return isinstance(number, Integral) or np.asarray(number).dtype.kind not in "fc"


def _is_same(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except Exception:  # comparing such objects has another meaning
        return False


def _refusal(name: str, what: str) -> ValueError:
    return ValueError(
        f"{name} {what}: a pipeline runs the step on micro-batches, and cannot tell what it would be for the whole batch. Return tensors, "
        "arrays or lists with one row or item for each sample, and means over samples as floats; or use microbatches=1"
    )
