"""verify_step: did the step that just ran use what makes it right on a shard?"""

from __future__ import annotations

from lightning_par.context.attention import RingAttention
from lightning_par.context.errors import AttentionNotUsedError, LabelsNotShiftedError, LossWeightError, PositionsNotUsedError
from lightning_par.context.shard import ShardedBatch


def verify_step(batch: ShardedBatch, ring: RingAttention) -> None:
    """Raise if the step could not have been right; called after the first forward pass on ``batch`` inside ``ring``. No communication.

    A module can work out positions, shift labels or attend in its own way, which is right on one device and silently wrong on a shard.
    """
    if not ring.calls:
        raise AttentionNotUsedError(
            "the step made no call of torch.nn.functional.scaled_dot_product_attention, which context parallelism works through, so each "
            "rank attended to its own tokens only: compute attention by that function, or set cp=1"
        )
    if "position_ids" not in batch.read:
        raise PositionsNotUsedError(
            f"the step did not read batch['position_ids']; positions counted from 0 are wrong on a shard of a sequence (this one has "
            f"{ring.total} tokens in all): pass them to the model (model(**batch) does), or set cp=1. A model that needs none only has to "
            "read them"
        )
    if ring.causal and "labels" in batch.read and "shift_labels" in batch and "shift_labels" not in batch.read:
        raise LabelsNotShiftedError(
            "the step of a causal model read batch['labels'] but not batch['shift_labels']; labels that the module shifts itself are wrong "
            "at the borders of a shard: use batch['shift_labels'] where it is given (model(**batch) does, for transformers models), or, if "
            "your labels are shifted already, give them under that name"
        )
    if batch.weighed_as_causal not in (None, ring.causal) and "shift_labels" in batch:
        raise LossWeightError(
            f"the loss was weighted by the {'shifted' if batch.weighed_as_causal else 'unshifted'} labels of each shard, but attention was "
            f"{'causal' if ring.causal else 'full'}: masked language models, whose labels stand at their own tokens, are weighted slightly "
            "wrong by what models of the next token average over; set cp=1"
        )
