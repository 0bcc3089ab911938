"""Of which parts a batch is made, and how many samples it has.

Note [Fields and samples]
~~~~~~~~~~~~~~~~~~~~~~~~~
A batch is a tree of mappings, dataclasses, named tuples, lists and tuples over tensors and NumPy arrays. A list or tuple is one of two
things: fields (``[x, y]``), which are each as long as the batch, or samples (one target for each image), of which there are as many as
the batch has. The batch itself is fields, unless it is three or more arrays of different lengths. A list inside it of another length
than the batch is fields; one of the batch's length is samples, unless its items are of different kinds and one of them is as long as the
batch. Items of one kind, as many as each is long, could be either: that is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from torch import Tensor

Array = Tensor | np.ndarray


def batch_size(batch: Any) -> int:
    """The samples of a batch: the first dim of its first tensor that has dims, or else array. See Note [Fields and samples].

    Those inside lists count only where there are no others; where the lists are of samples, it is how many there are.

    Raises:
        ValueError: it has no such tensor, or lists of samples beside lists of another length.
    """
    if _is_list_of_samples(batch):
        return len(batch)
    alone, lists = _found(batch, is_top=True)
    if alone:
        return len(next((array for array in alone if isinstance(array, Tensor)), alone[0]))
    if lists and not any(_differ(items) for items in lists):
        return _lengths(lists[0])[0]
    if len({len(items) for items in lists}) == 1:
        return len(lists[0])
    raise ValueError(
        f"cannot tell the number of samples of a batch of type {type(batch).__name__}: it holds no tensor with a first dim"
        + (f", but lists of {', '.join(str(len(items)) for items in lists)} things" if lists else "")
        + ". Let the dataloader's collate_fn return tensors, or use a layout with pp=1 and cp=1"
    )


def children(value: Any) -> dict[Any, Any] | None:
    """The named parts of a mapping, dataclass or named tuple; None for anything else."""
    if isinstance(value, dict):
        return dict(dict.items(value))  # past the methods of one that keeps count of what is read
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: getattr(value, item.name) for item in fields(value)}
    return None


def with_children(value: Any, parts: dict[Any, Any]) -> Any:
    """A value like ``value``, which has ``children``, with others in their places."""
    if isinstance(value, Mapping):
        return parts if type(value) is dict else type(value)(parts)
    if isinstance(value, tuple):
        return type(value)(*parts.values())
    other = copy.copy(value)
    for name, part in parts.items():
        object.__setattr__(other, name, part)  # frozen or not
    return other


def are_samples(items: list[Any] | tuple[Any, ...], size: int, name: str, *, is_top: bool = False, of_lists: bool = False) -> bool:
    """Whether ``items`` are one for each of ``size`` samples, not fields. See Note [Fields and samples].

    ``of_lists``: a list among the items may be a field as well, as a tensor may.

    Raises:
        ValueError: it cannot be told; the message calls the items ``name``.
    """
    if len(items) != size or (is_top and not _is_list_of_samples(items)):
        return False
    lengths = _lengths(items) + [len(item) for item in items if of_lists and isinstance(item, list | tuple)]
    if len({_kind(item) for item in items}) > 1:
        return size not in lengths
    if size > 1 and lengths and all(length == size for length in lengths):
        raise ValueError(
            f"{name} is a {type(items).__name__} of {size}, and each of its items is as long: is that one item for each of {size} samples, "
            f"or {size} fields of all samples? Stack samples to one tensor, and name fields in a dict; or use microbatches=1"
        )
    return True


def _is_list_of_samples(batch: Any) -> bool:
    """A batch that is no tuple of fields: three or more arrays of several lengths."""
    is_plain = isinstance(batch, list | tuple) and not hasattr(batch, "_fields")
    return is_plain and len(batch) > 2 and all(isinstance(item, Array) for item in batch) and _differ(batch)


def _differ(items: list[Any] | tuple[Any, ...]) -> bool:
    """These are of one kind and of several lengths: samples."""
    return len({_kind(item) for item in items}) == 1 and len(set(_lengths(items))) > 1


def _kind(value: Any) -> Hashable:
    """Equal for samples of one data set, whatever their lengths."""
    if isinstance(value, Array):
        return str(value.dtype), value.ndim
    if (parts := children(value)) is not None:
        return tuple((str(name), _kind(part)) for name, part in parts.items())
    return type(value)


def _found(value: Any, *, is_top: bool = False) -> tuple[list[Any], list[Any]]:
    """Arrays with dims that are in no list, and the lists that hold arrays."""
    if isinstance(value, Array):
        return ([value] if value.ndim else []), []
    parts = children(value)
    if parts is None and isinstance(value, list | tuple):
        if not is_top:
            return [], [value] if _lengths(value) else []
        parts = dict(enumerate(value))
    found = [_found(part) for part in (parts or {}).values()]
    return [array for arrays, _ in found for array in arrays], [items for _, lists in found for items in lists]


def _lengths(value: Any) -> list[int]:
    """First dims of all arrays in it."""
    if isinstance(value, Array):
        return [len(value)] if value.ndim else []
    parts = children(value)
    items = parts.values() if parts is not None else value if isinstance(value, list | tuple) else ()
    return [length for item in items for length in _lengths(item)]
