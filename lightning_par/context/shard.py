"""shard_batch: this rank's part of a batch, and a record of what the step read from it.

Note [Labels are shifted before the cut]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A causal model predicts at position t the label at t + 1. At the end of a piece that label lies on another rank, so a module that shifts
the labels of its shard loses or confuses one at every border. The sharded batch therefore has, beside ``labels`` (still aligned with their
tokens, as masked language models want them), ``shift_labels``: shifted over the whole sequence, then cut. transformers' causal models
take ``shift_labels`` in place of ``labels`` if they are given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from lightning_par.comm import Group
from lightning_par.context.errors import UnsupportedBatchError
from lightning_par.context.zigzag import Zigzag
from lightning_par.numerics import IGNORED_LABEL


class ShardedBatch(dict[str, Any]):
    """One rank's part of a batch; knows which keys were read, by ``batch[key]``, ``model(**batch)`` or any other way.

    Attributes:
        padded: some sequences of the whole batch have padding at their end.
        read: the keys read so far.
        weighed_as_causal: what ``weight`` was last asked for.
    """

    def __init__(self, values: Mapping[str, Any], *, padded: bool = False) -> None:
        super().__init__(values)
        self.padded = padded
        self.read: set[str] = set()
        self.weighed_as_causal: bool | None = None

    def plain(self) -> dict[str, Any]:
        """The same as a plain dict; this is no reading."""
        return dict(super().items())

    def __copy__(self) -> ShardedBatch:
        """With the same tensors; what is read of the copy is read of this, but copying is no reading."""
        other = ShardedBatch(self.plain(), padded=self.padded)
        other.read, other.weighed_as_causal = self.read, self.weighed_as_causal
        return other

    def weight(self, *, causal: bool = True) -> Tensor:
        """What a mean loss over this shard counts, a 0-dim float64 tensor; this is no reading.

        Labels that are not -100, shifted ones for a causal model; without labels, tokens. Summed over the group it is that of the whole.
        """
        self.weighed_as_causal = causal
        values = self.plain()
        labels = values.get("shift_labels" if causal else "labels")
        if isinstance(labels, Tensor) and labels.shape == values["input_ids"].shape and not labels.is_floating_point():
            return (labels != IGNORED_LABEL).sum(dtype=torch.float64)
        return torch.tensor(float(values["input_ids"].numel()), dtype=torch.float64, device=values["input_ids"].device)

    @override
    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    @override
    def __iter__(self) -> Iterator[str]:
        """Overridden so that ``**batch`` goes through ``__getitem__``; Python copies a dict without it."""
        return super().__iter__()

    @override
    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    @override
    def pop(self, key: str, *default: Any) -> Any:
        self.read.add(key)
        return super().pop(key, *default)

    @override
    def items(self) -> Any:
        self.read.update(self)
        return super().items()

    @override
    def values(self) -> Any:
        self.read.update(self)
        return super().values()


def shard_batch(batch: Any, group: Group) -> tuple[ShardedBatch, int]:
    """This rank's zigzag part of ``batch``, and the number of tokens T of the whole sequence.

    Every tensor [B, T, ...] is cut along dim 1 (B and T are those of ``input_ids``), the rest is passed on as it is. ``position_ids``,
    global positions [B, tokens], are added or cut. With ``labels``, ``shift_labels`` are added, see Note [Labels are shifted
    before the cut]. An ``attention_mask`` [B, T] of ones and padding at the end is cut like the rest.

    Every rank of ``group`` calls with the same batch, whole; nothing is sent. A batch is cut into micro-batches before, not after.

    Raises:
        UnsupportedBatchError: no ``input_ids``, fewer tokens than ranks, or masks and positions that need a mask (padding on the left,
            packed documents).
    """
    ids_BT = _input_ids(batch)
    rows, total = ids_BT.shape
    if total < group.size:
        raise UnsupportedBatchError(
            f"a sequence of {total} tokens cannot be cut over cp={group.size} ranks, each needs a token: lower cp to {total} or less, or "
            "make sequences longer"
        )
    padded = _is_padded(batch, ids_BT)
    _require_token_labels(batch, ids_BT)
    whole = {**batch, "position_ids": _positions(batch, ids_BT)}
    if isinstance(whole.get("labels"), Tensor) and whole["labels"].shape == ids_BT.shape and whole.get("shift_labels") is None:
        whole["shift_labels"] = _shifted(whole["labels"])
    zigzag = Zigzag(total, group.size)

    def mine(value: Any) -> Any:
        along_sequence = isinstance(value, Tensor) and value.shape[:2] == (rows, total)
        return zigzag.cut(value, 1, group.index) if along_sequence else value

    return ShardedBatch({key: mine(value) for key, value in whole.items()}, padded=padded), total


def _input_ids(batch: Any) -> Tensor:
    found = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if isinstance(found, Tensor) and found.dim() == 2:
        return found
    if isinstance(batch, Mapping):
        what = f"a batch with the keys {sorted(map(str, batch))}" + ("" if found is None else f", input_ids {_described(found)}")
    else:
        what = f"a batch of type {type(batch).__name__}"
    raise UnsupportedBatchError(
        f"context parallelism got {what}; it needs a dict with 'input_ids' [batch, tokens] to know what to cut (further tensors "
        "[batch, tokens, ...] are cut with it): let the dataset or the collate function return such a dict, or set cp=1"
    )


def _require_token_labels(batch: Mapping[str, Any], ids_BT: Tensor) -> None:
    """A loss over whole sequences is no sum of losses over shards of them."""
    labels = batch.get("labels")
    if isinstance(labels, Tensor) and labels.shape[:2] != ids_BT.shape:
        raise UnsupportedBatchError(
            f"labels of shape {tuple(labels.shape)} are not one a token, as input_ids {tuple(ids_BT.shape)} are: a loss over whole "
            "sequences (classification, say) cannot be put together from shards of them; set cp=1"
        )


def _described(value: Any) -> str:
    return f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"of type {type(value).__name__}"


def _shifted(labels_BT: Tensor) -> Tensor:
    """The label of each position's next token; the last has none."""
    return F.pad(labels_BT, (0, 1), value=IGNORED_LABEL)[:, 1:]


def _positions(batch: Mapping[str, Any], ids_BT: Tensor) -> Tensor:
    """The given positions, or 0 to T - 1 for every row: [B, T]."""
    given = batch.get("position_ids")
    if given is None:
        return torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
    if given.dim() > 2 or given.shape[-1] != ids_BT.shape[1]:
        raise UnsupportedBatchError(
            f"position_ids of shape {tuple(given.shape)} do not fit input_ids {tuple(ids_BT.shape)}: give one position a token, [batch, "
            "tokens] or [1, tokens], or leave them out"
        )
    if (given.diff(dim=-1) != 1).any():
        raise UnsupportedBatchError(
            "position_ids do not rise by one from token to token, so the sequences are packed documents or padded on the left; their "
            "attention needs a mask, which context parallelism does not have yet: give one document a sequence, padded at its end, or "
            "set cp=1"
        )
    return given.expand_as(ids_BT)


def _is_padded(batch: Mapping[str, Any], ids_BT: Tensor) -> bool:
    """Whether there is padding; refuses any but at the end, and labels on it."""
    mask = batch.get("attention_mask")
    if mask is None:
        return False
    if mask.shape != ids_BT.shape:
        raise UnsupportedBatchError(
            f"an attention_mask of shape {tuple(mask.shape)} cannot be cut, only one of input_ids' shape {tuple(ids_BT.shape)} can, with 0 "
            "at padding and 1 elsewhere: leave the mask out (causal attention needs none), or set cp=1"
        )
    real_BT = mask.bool()
    if (real_BT[:, 1:] & ~real_BT[:, :-1]).any():
        raise UnsupportedBatchError(
            "the attention_mask has a 0 before a 1, so sequences are padded on the left or have gaps; context parallelism takes padding at "
            "the end only: set the tokenizer's padding_side='right', or set cp=1"
        )
    padded = not bool(real_BT.all())
    labels = batch.get("labels")
    if padded and isinstance(labels, Tensor) and labels.shape == ids_BT.shape and (labels[~real_BT] != IGNORED_LABEL).any():
        raise UnsupportedBatchError(
            f"some padding tokens have labels other than {IGNORED_LABEL}; their loss would depend on attention to padding, which context "
            f"parallelism leaves out: set the labels of padding to {IGNORED_LABEL}"
        )
    return padded
