"""What context parallelism refuses, by name."""

from __future__ import annotations


class ContextParallelError(RuntimeError):
    """Something in the batch or the module that context parallelism would compute wrongly, so it does not compute it at all."""


class UnsupportedBatchError(ContextParallelError, ValueError):
    """A batch that cannot be cut into sequence shards."""


class UnsupportedAttentionError(ContextParallelError, NotImplementedError):
    """A call of attention that the ring cannot compute."""


class AttentionNotUsedError(ContextParallelError):
    """The step attended by other means than scaled dot product attention, or not at all."""


class PositionsNotUsedError(ContextParallelError):
    """The step did not read the positions of its shard's tokens."""


class LossWeightError(ContextParallelError):
    """The step's loss was weighted by labels that it does not average over."""


class LabelsNotShiftedError(ContextParallelError):
    """The step of a causal model took the labels, but not those shifted before the sequence was cut."""
