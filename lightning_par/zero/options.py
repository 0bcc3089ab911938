"""What users may choose about ZeRO, and what each stage keeps whole."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

REDUCE_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ZeroOptions:
    """Options of data parallelism at every ZeRO stage.

    Args:
        bucket_mb: gradients are reduced in buckets of about this many MiB (stage 3: a unit at a time).
        reduce_dtype: in which gradients travel and are added up over ranks: ``float32``, ``bfloat16``, ``float16``, ``float64``, as a
            word or a ``torch.dtype``; None = the one they have (complex ones always). Halves the bytes for less precise sums; what was
            summed is kept in full.
        prefetch: stage 3: units gathered ahead of the one that computes.
        min_unit_mb: stage 3: neighbouring units are joined until they hold about this many MiB of values, since many small messages
            take longer than the memory they save is worth. 0 leaves each alone.
        units: stage 3: names of the classes whose instances are gathered and freed as one; empty = the members of the module's
            ModuleLists and Sequentials. All other parameters form a unit of their own.
        ignored: names of submodules that stay whole on every rank, their optimizer states too.

    Raises:
        ValueError: for values out of range, all of them named.
    """

    bucket_mb: float = 25.0
    reduce_dtype: torch.dtype | str | None = None
    prefetch: int = 1
    min_unit_mb: float = 1.0
    units: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        faults = []
        for field, what in (("units", "class names"), ("ignored", "names of submodules")):
            given = getattr(self, field)
            if isinstance(given, str) or not isinstance(given, Iterable) or not all(isinstance(name, str) for name in given):
                faults.append(f"{field}={given!r} must be a list of {what}")
            else:
                object.__setattr__(self, field, tuple(given))
        if self.reduce_dtype not in (None, *REDUCE_DTYPES, *REDUCE_DTYPES.values()):
            faults.append(f"reduce_dtype={self.reduce_dtype!r} must be one of {', '.join(REDUCE_DTYPES)}, or None")
        if isinstance(self.reduce_dtype, str):
            object.__setattr__(self, "reduce_dtype", REDUCE_DTYPES.get(self.reduce_dtype))
        if not _is_finite(self.min_unit_mb) or self.min_unit_mb < 0:
            faults.append(f"min_unit_mb={self.min_unit_mb!r} must be a number of at least 0")
        if not _is_finite(self.bucket_mb) or self.bucket_mb <= 0:
            faults.append(f"bucket_mb={self.bucket_mb!r} must be a number above 0")
        if not isinstance(self.prefetch, int) or self.prefetch < 0:
            faults.append(f"prefetch={self.prefetch!r} must be a whole number of at least 0")
        if faults:
            raise ValueError("; ".join(faults))

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> ZeroOptions:
        """From a dict of its fields."""
        known = [field.name for field in fields(cls)]
        if unknown := [name for name in given if name not in known]:
            raise TypeError(f"ZeroOptions has no {', '.join(map(repr, unknown))}; there are {', '.join(known)}")
        return cls(**given)

    @property
    def bucket_bytes(self) -> int:
        return max(1, int(self.bucket_mb * 2**20))

    @property
    def min_unit_bytes(self) -> int:
        return int(self.min_unit_mb * 2**20)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


@dataclass(frozen=True)
class Stage:
    """What a stage does not keep whole on every rank."""

    shards_optimizer: bool = False
    frees_gradients: bool = False
    frees_values: bool = False


STAGES = {0: Stage(), 1: Stage(True), 2: Stage(True, True), 3: Stage(True, True, True)}
"""Rajbhandari et al., ZeRO (arXiv 1910.02054), section 5: P_os, P_os+g, P_os+g+p; 0 is plain data parallelism."""
