"""What users may choose about ZeRO, and what each stage keeps whole."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ZeroOptions:
    """Options of data parallelism at every ZeRO stage.

    Args:
        bucket_mb: gradients are reduced in buckets of about this many MiB (stage 3: a unit at a time).
        prefetch: stage 3: units gathered ahead of the one that computes.
        units: stage 3: names of the classes whose instances are gathered and freed as one; empty = the members of the module's
            ModuleLists and Sequentials. All other parameters form a unit of their own.
        ignored: names of submodules that stay whole on every rank, their optimizer states too.

    Raises:
        ValueError: for values out of range, all of them named.
    """

    bucket_mb: float = 25.0
    prefetch: int = 1
    units: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "units", tuple(self.units))
        object.__setattr__(self, "ignored", tuple(self.ignored))
        faults = []
        if not self.bucket_mb > 0:
            faults.append(f"bucket_mb={self.bucket_mb!r} must be above 0")
        if not isinstance(self.prefetch, int) or self.prefetch < 0:
            faults.append(f"prefetch={self.prefetch!r} must be a whole number of at least 0")
        if faults:
            raise ValueError("; ".join(faults))

    @property
    def bucket_bytes(self) -> int:
        return max(1, int(self.bucket_mb * 2**20))


@dataclass(frozen=True)
class Stage:
    """What a stage does not keep whole on every rank."""

    shards_optimizer: bool = False
    frees_gradients: bool = False
    frees_values: bool = False


STAGES = {0: Stage(), 1: Stage(True), 2: Stage(True, True), 3: Stage(True, True, True)}
"""Rajbhandari et al., ZeRO (arXiv 1910.02054), section 5: P_os, P_os+g, P_os+g+p; 0 is plain data parallelism."""
