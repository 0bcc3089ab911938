"""What the tensor-parallel ranks of DeepSpeed hold, made whole.

Note [How a parameter was cut]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
DeepSpeed leaves it to the user's modules, and its files do not tell. A plan does: patterns of names (``*`` is one segment; first segments
may be left out) and for each

    a word for modules, Hugging Face's    colwise, colwise_gather_output, embedding_rowwise: weight and bias along dim 0; rowwise: weight
                                          along dim 1; packed_colwise: two matrices in one, each along dim 0; replicate: whole
    a number, for parameters              the dim, or
    {dim: 0, parts: 3}, for parameters    several matrices in one parameter, equal ones or of the sizes [64, 16, 16]. Of each of them a rank
                                          has its part, as Megatron's fused query, key and value:

                                          whole   Q Q K K V V        rank 0   Q K V        rank 1   Q K V

What no pattern names must be the same on all ranks. Without a plan, the patterns of a ``universal_checkpoint_info`` in the files are taken.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_par.checkpoint.errors import CheckpointError
from lightning_par.checkpoint.source import MODEL, Entry, Source, parameter_of
from lightning_par.tensor.styles import ALIASES, STYLES


@dataclass(frozen=True)
class Cut:
    """See Note [How a parameter was cut].

    Attributes:
        dim: along which the parts of the ranks follow each other; None: each rank has the whole.
        parts: sizes along it, in any unit, of the matrices that were cut each for itself.
    """

    dim: int | None = None
    parts: tuple[int, ...] = (1,)

    def shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Of the whole, from those of the ranks. Raises ValueError if they cannot be parts of one."""
        first, dim = shapes[0], self.dim
        if dim is None:
            if len(set(shapes)) > 1:
                raise ValueError("is not the same on all ranks, and no pattern says how it was cut")
            return first
        if not -len(first) <= dim < len(first):
            raise ValueError(f"has no dim {dim}")
        dim %= len(first)
        if len({shape[:dim] + shape[dim + 1 :] for shape in shapes}) > 1:
            raise ValueError(f"cannot have been cut along dim {dim}: the others differ")
        if any(shape[dim] * part % sum(self.parts) for shape in shapes for part in self.parts):
            raise ValueError(f"cannot hold parts of {list(self.parts)} along dim {dim}")
        return (*first[:dim], sum(shape[dim] for shape in shapes), *first[dim + 1 :])

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole. Raises ValueError if ranks differ in what should be the same."""
        if self.dim is None:
            if any(not torch.equal(part, parts[0]) for part in parts[1:]):
                raise ValueError("differs from rank to rank, and no pattern says how it was cut")
            return parts[0]
        pieces = [part.split([part.shape[self.dim] * n // sum(self.parts) for n in self.parts], self.dim) for part in parts]
        return torch.cat([piece for matrix in zip(*pieces, strict=True) for piece in matrix], self.dim)


WORDS: dict[str, dict[str, Cut]] = {word: {key: Cut(dim) for key, dim in style.cut.items()} for word, style in STYLES.items()} | {
    "packed_colwise": {"weight": Cut(0, (1, 1)), "bias": Cut(0, (1, 1))}
}
WORDS |= {alias: WORDS[word] for alias, word in ALIASES.items()}


def join(ranks: Sequence[Source], plan: Mapping[str, Any] | None, info: Mapping[str, Any]) -> Source:
    """One checkpoint of those of the tensor ranks, in their order.

    Args:
        plan: see Note [How a parameter was cut].
        info: ``universal_checkpoint_info`` of the files.

    Raises:
        CheckpointError: something is not on all ranks, or the plan cannot be; all of it is named. Reading raises it too, if a
            tensor that is not cut differs from rank to rank.
    """
    first = ranks[0]
    names = [name for entry in first.entries if entry.startswith(f"{MODEL}.") and (name := parameter_of(entry))]
    cuts, faults = _planned(plan, names) if plan is not None else _told(info, names)
    if cuts is None:
        raise CheckpointError(
            f"{first.path} was written by {len(ranks)} tensor ranks of DeepSpeed, and does not tell how they cut the parameters: convert "
            "it first, and say it, for example lightning-par convert 'tp_plan={layers.*.up: colwise, layers.*.down: rowwise}'"
        )
    entries = {}
    for entry, here in first.entries.items():
        if any(entry not in rank.entries for rank in ranks):
            faults.append(f"{entry} is not on all ranks")
            continue
        parts, name = [rank.entries[entry] for rank in ranks], parameter_of(entry)
        model = first.entries.get(f"{MODEL}.{name}", here)
        cut = cuts.get(name, Cut()) if here.shape == model.shape else Cut()
        try:
            shape = cut.shape([part.shape for part in parts])
        except ValueError as error:
            faults.append(f"{entry} {tuple(here.shape)} {error}")
            continue
        entries[entry] = Entry(shape, here.dtype, partial(_read, first, entry, cut, parts))
    if faults:
        raise CheckpointError(f"the tensor ranks of {first.path} cannot be joined:\n" + "\n".join(f"  - {fault}" for fault in faults))
    return replace(first, entries=entries)


def _read(source: Source, entry: str, cut: Cut, parts: Sequence[Entry]) -> Tensor:
    try:
        return cut.join([part.read() for part in parts])
    except ValueError as error:
        raise CheckpointError(f"the tensor ranks of {source.path} cannot be joined: {entry} {error} (tp_plan)") from error


def _planned(plan: Mapping[str, Any], names: Sequence[str]) -> tuple[dict[str, Cut], list[str]]:
    """How each named parameter was cut, and what is wrong with the plan."""
    cuts: dict[str, Cut] = {}
    by: dict[str, str] = {}
    faults = []
    for pattern, how in plan.items():
        expression = re.compile(r"(?:.+\.)?" + re.escape(pattern).replace(r"\*", r"[^.]+"))
        try:
            found = {name: cut for name in names if (cut := _cut(how, expression, name)) is not None}
        except ValueError as error:
            faults.append(f"tp_plan {pattern!r}: {error}")
            continue
        if not found:
            faults.append(f"tp_plan {pattern!r} matches no {'module' if isinstance(how, str) else 'parameter'}")
        for name, cut in found.items():
            if cuts.setdefault(name, cut) != cut:
                faults.append(f"{name}: cut in one way by {by[name]!r}, in another by {pattern!r}")
            by[name] = pattern
    return cuts, faults


def _cut(how: Any, expression: re.Pattern[str], name: str) -> Cut | None:
    """How the plan's ``how`` says that parameter ``name`` was cut; None if it does not speak of it."""
    owner, _, key = name.rpartition(".")
    if isinstance(how, str):
        if how not in WORDS:
            raise ValueError(f"unknown word {how!r}: known are {', '.join(WORDS)}, a dim, or a mapping with dim and parts")
        return WORDS[how].get(key, Cut()) if expression.fullmatch(owner) else None
    told = dict(how) if isinstance(how, Mapping) else {"dim": how}
    parts = told.pop("parts", 1)
    parts = (1,) * parts if isinstance(parts, int) else tuple(parts)
    if told.keys() != {"dim"} or not isinstance(told["dim"], int) or not parts or not all(isinstance(n, int) and n > 0 for n in parts):
        raise ValueError(f"{how!r} must be a word, a dim, or a mapping with dim and parts (a number, or sizes)")
    return Cut(told["dim"], parts) if expression.fullmatch(name) else None


# fmt: off
_PATTERNS = {
    "tp_replicated_parameter_patterns": Cut(),
    "parameter_with_row_parallelism_patterns": Cut(1),
    "parameter_with_2_sub_params_cat_dim_0": Cut(0, (1, 1)),
}
_UNKNOWN = [
    "parameter_to_average_patterns", "parameter_with_sub_params", "vocabulary_parameter_patterns", "affine_map",
    "autotp_unsupported_parameter_patterns", "expert_parameter_patterns",
]
# fmt: on


def _told(info: Mapping[str, Any], names: Sequence[str]) -> tuple[dict[str, Cut] | None, list[str]]:
    """The same from DeepSpeed's patterns (checkpoint/ds_to_universal.py, ``merge_tp_slices``): what none names was cut along dim 0."""
    if not any(info.get(key) for key in _PATTERNS) or any(info.get(key) for key in _UNKNOWN):
        return None, []
    named = {name: cut for key, cut in _PATTERNS.items() for pattern in info.get(key, ()) for name in names if re.match(pattern, name)}
    return {name: Cut(0) for name in names} | named, []
