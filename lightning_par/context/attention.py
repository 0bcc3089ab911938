"""ring_attention: inside it, torch's scaled dot product attention attends to the whole sequence although each rank holds a shard.

Shape letters: B batch, H query heads, K key/value heads, T my tokens, E width of a query or key head, F width of a value head.

Note [Interception]
~~~~~~~~~~~~~~~~~~~
A ``TorchFunctionMode`` sees every call of a torch function, however the module got hold of it, and hands those of
``F.scaled_dot_product_attention`` to the ring. While a mode handles a function it is off. That would let attention slip by inside two kinds
of functions that a mode sees: ``F.multi_head_attention_forward`` (``nn.MultiheadAttention``), and backward, since activation checkpointing
runs the forward again in it. So these run with the mode on again. They begin by asking whether anything overrides them, which a mode does,
and would come straight back; so they are told "no", that one time, by the name under which their module keeps the question.

Modes follow autograd into its threads, so checkpointing works if *backward is called inside the block too*. Outside of it the recomputed
attention would be that of the shard alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function
from typing_extensions import override

from lightning_par.comm import Group
from lightning_par.context import ring
from lightning_par.context.errors import UnsupportedAttentionError
from lightning_par.context.zigzag import Zigzag


def ring_attention(group: Group, total: int, *, padded: bool = False) -> RingAttention:
    """A context manager for the forward and the backward of one step on zigzag shards of ``total`` tokens.

    All ranks of ``group`` must run the same calls of attention inside it, in the same order. ``is_causal=True`` is causal over the whole
    sequence, ``is_causal=False`` without a mask is full attention. See Note [Interception].

    Args:
        padded: the sequences have padding at their end (``ShardedBatch.padded``). Causal attention of real tokens never sees it; full
            attention would, and is refused.

    Raises:
        UnsupportedAttentionError: at a call with a mask or dropout, or whose tokens are not a shard of ``total``.
    """
    return RingAttention(group, total, padded=padded)


def current() -> RingAttention | None:
    """The innermost ``ring_attention`` block around the caller, or None. The stack of modes is asked, so there is no global to keep."""
    return handle_torch_function(current, ()) if has_torch_function((None,)) else None


class _Arguments(NamedTuple):
    """Those of ``F.scaled_dot_product_attention``, by name and default."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False  # whether keys have fewer heads shows in their shape


_OUTER_FUNCTIONS: dict[Callable[..., Any], tuple[ModuleType, str]] = {
    F.multi_head_attention_forward: (F, "has_torch_function"),
    torch.autograd.backward: (torch.autograd, "has_torch_function"),
    torch.autograd.grad: (torch.autograd, "has_torch_function"),
    Tensor.backward: (torch._tensor, "has_torch_function_unary"),
}
"""Functions inside which attention may run, and where each finds whether it is overridden. See Note [Interception]."""


class RingAttention(TorchFunctionMode):
    """See ``ring_attention``.

    Attributes:
        total: tokens of the whole sequence.
        calls: how often the ring was used so far, by ``is_causal``.
    """

    def __init__(self, group: Group, total: int, *, padded: bool = False) -> None:
        super().__init__()
        self.group, self.total, self.padded = group, total, padded
        self.calls: Counter[bool] = Counter()

    @property
    def causal(self) -> bool:
        """Whether every call so far was causal."""
        return not self.calls[False]

    @override
    def __torch_function__(self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func is current:
            return self
        if func is F.multi_head_attention_forward:
            self._refuse_weights(**kwargs)
        return self._inside(func, args, kwargs) if func in _OUTER_FUNCTIONS else func(*args, **kwargs)

    def _inside(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call ``func`` with this mode on. See Note [Interception]."""
        module, name = _OUTER_FUNCTIONS[func]
        is_overridden = getattr(module, name)

        def not_this_time(*_: Any) -> bool:
            setattr(module, name, is_overridden)
            return False

        with self:
            setattr(module, name, not_this_time)
            try:
                return func(*args, **kwargs)
            finally:
                setattr(module, name, is_overridden)

    def _attend(self, *args: Any, **kwargs: Any) -> Tensor:
        call = _Arguments(*args, **kwargs)
        self._refuse(call)
        self.calls[call.is_causal] += 1
        q_BHTE, k_BKTE, v_BKTF = (_four_dims(t) for t in _autocast(call.query, call.key, call.value))
        scale = 1 / math.sqrt(q_BHTE.shape[-1]) if call.scale is None else call.scale
        out_BHTF = ring.attend(q_BHTE, k_BKTE, v_BKTF, group=self.group, total=self.total, causal=call.is_causal, scale=scale)
        return out_BHTF.view(*call.query.shape[:-1], call.value.shape[-1])

    def _refuse_weights(self, need_weights: bool = True, **_: Any) -> None:
        if need_weights:
            raise UnsupportedAttentionError(
                "nn.MultiheadAttention was called with need_weights=True, but no rank has the attention weights of the whole sequence "
                "under context parallelism: call it with need_weights=False, or set cp=1"
            )

    def _refuse(self, call: _Arguments) -> None:
        query, key, value = call.query, call.key, call.value
        if call.attn_mask is not None:
            raise UnsupportedAttentionError(
                f"attention was called with an attn_mask of shape {tuple(call.attn_mask.shape)}, but each rank holds only a shard of "
                "the sequence: pass is_causal=True for causal attention (padding at the end then needs no mask) or no mask for full "
                "attention, or set cp=1"
            )
        if call.dropout_p > 0:
            raise UnsupportedAttentionError(
                f"attention was called with dropout_p={call.dropout_p}, and the ring has no dropout of attention weights yet: set the "
                "model's attention dropout to 0 (dropout elsewhere works), or set cp=1"
            )
        mine = Zigzag(self.total, self.group.size).tokens(self.group.index)
        if not query.shape[-2] == key.shape[-2] == value.shape[-2] == mine:
            raise UnsupportedAttentionError(
                f"attention was called with {query.shape[-2]} queries, {key.shape[-2]} keys and {value.shape[-2]} values, but this "
                f"rank's share of the sequence of {self.total} tokens is {mine} (cp={self.group.size}, index {self.group.index}): only "
                "self-attention over the whole sequence can be cut; for cross-attention, prefixes or caches set cp=1"
            )
        if query.dim() < 3 or query.shape[:-3] != key.shape[:-3] or key.shape[:-2] != value.shape[:-2] or query.shape[-3] % key.shape[-3]:
            raise UnsupportedAttentionError(
                f"attention was called with query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}; the ring takes "
                "[..., heads, tokens, width] with equal leading dims and as many query heads as key heads, or a multiple"
            )
        if self.padded and not call.is_causal:
            raise UnsupportedAttentionError(
                "full (not causal) attention over a batch with padding would attend to the padding: give batches without padding (a batch "
                "of one sample needs none), or set cp=1"
            )


def _four_dims(tensor: Tensor) -> Tensor:
    """[..., heads, tokens, width] as [B, heads, tokens, width]."""
    return tensor.reshape(-1, *tensor.shape[-3:])


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As torch's autocast would for attention: to its dtype, but for float64."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors)
