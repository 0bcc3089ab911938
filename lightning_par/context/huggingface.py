"""prepare: transformers models attend without a mask tensor inside ring_attention, and as always outside.

Note [No mask tensors]
~~~~~~~~~~~~~~~~~~~~~~
transformers builds a mask from padding and positions before the first layer. On a zigzag shard that goes wrong: a jump in the positions
looks to it like the border of two packed documents, and a mask could only be that of the shard anyway. So the model is switched to an
implementation of attention of ours, which differs from its "sdpa" in one thing: inside ``ring_attention`` no mask is built, and each
layer's own ``is_causal`` says whether attention is causal. What needs a mask beyond that (sliding windows, chunks, overlays) is refused.
Outside the block everything is "sdpa" to the letter, so the switch need not be undone.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lightning_par.context.attention import current
from lightning_par.context.errors import UnsupportedAttentionError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IMPLEMENTATION = "lightning_par_ring"


def prepare(module: nn.Module) -> None:
    """Switch every transformers model inside ``module`` to attention that works inside ``ring_attention``; leave all else alone.

    Called once, before the first step; no communication. transformers is not imported if it was not already.

    Raises:
        UnsupportedAttentionError: a model's attention cannot be switched, or does not go through scaled dot product attention.
    """
    transformers = sys.modules.get("transformers.modeling_utils")
    if transformers is None:
        return
    for name, model in module.named_modules():
        if isinstance(model, transformers.PreTrainedModel) and model.config._attn_implementation != IMPLEMENTATION:
            _switch(name, model)


def _switch(name: str, model: PreTrainedModel) -> None:
    _register()
    before = model.config._attn_implementation
    if model._supports_sdpa and model._can_set_attn_implementation():
        model.set_attn_implementation(IMPLEMENTATION)
    if model.config._attn_implementation != IMPLEMENTATION:
        raise UnsupportedAttentionError(
            f"{type(model).__name__} ({name or 'the module itself'}) has attn_implementation={before!r} and cannot use scaled dot product "
            "attention, which context parallelism works through: choose another model, or set cp=1"
        )


def _register() -> None:
    """Make the implementation known to transformers. See Note [No mask tensors]."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, sdpa_attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _mask)


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """transformers' own mask, or none inside ``ring_attention``."""
    from transformers.masking_utils import sdpa_mask

    ring = current()
    if ring is None:
        return sdpa_mask(*args, **kwargs)
    window = kwargs.get("local_size")
    if window is not None and window < ring.total:
        raise UnsupportedAttentionError(
            f"a layer attends only to a window or chunk of {window} tokens, and the sequence has {ring.total}; the ring has no windows "
            f"yet: train on sequences of at most {window} tokens, switch the windows off in the model's config, or set cp=1"
        )
    if kwargs.get("use_vmap"):
        raise UnsupportedAttentionError(
            "the model lays a pattern of its own over the attention mask (images, prefixes, ...), which the ring cannot compute: set cp=1"
        )
    return None
