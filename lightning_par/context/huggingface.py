"""prepare: transformers models attend without a mask tensor inside ring_attention, and as always outside.

Note [No mask tensors]
~~~~~~~~~~~~~~~~~~~~~~
transformers builds a mask from padding and positions before the first layer. On a zigzag shard that goes wrong: a jump in the positions
looks to it like the border of two packed documents, and a mask could only be that of the shard anyway. So the model is switched to an
implementation of attention of ours, which differs from its "sdpa" only inside ``ring_attention``: no mask is built, and each layer's own
``is_causal`` says whether attention is causal. What needs a mask beyond that (sliding windows, chunks, overlays) is refused.
Outside the block everything is "sdpa" to the letter, so the switch need not be undone.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_par.context.attention import current
from lightning_par.context.errors import UnsupportedAttentionError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IMPLEMENTATION = "lightning_par_ring"
UNSUPPORTED = ("softcap", "position_bias", "s_aux", "sinks", "output_attentions")
"""What a layer may ask of its attention beyond scaled dot products."""


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
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _mask)


def _attend(
    layer: nn.Module, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTF: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """transformers' interface of attention: ([B, T, H, F], no weights)."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if current() is None:
        return sdpa_attention_forward(layer, q_BHTE, k_BKTE, v_BKTF, mask, **options)
    for name in UNSUPPORTED:
        if options.get(name) is not None and options[name] is not False:
            raise UnsupportedAttentionError(f"a layer's attention uses {name}, which the ring cannot compute: set cp=1")
    causal = options.get("is_causal")
    out_BHTF = F.scaled_dot_product_attention(
        q_BHTE,
        k_BKTE,
        v_BKTF,
        attn_mask=mask,
        dropout_p=options.get("dropout", 0.0),
        is_causal=getattr(layer, "is_causal", True) if causal is None else causal,  # also if the shard is one token: no decoding here
        scale=options.get("scaling"),
        enable_gqa=True,
    )
    return out_BHTF.transpose(1, 2).contiguous(), None


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
