"""Block kernels: attention of some queries over one block of keys, with its log-sum-exp, forward and backward.

Shape letters: B batch, H query heads, K key/value heads, G = H / K queries per key head, T query tokens, S key tokens,
E width of a query or key head, F width of a value head.

Note [Backward of one block]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The softmax weights of a block are exp(scores - l) with l the log-sum-exp over *all* keys, and the term that the softmax's gradient
subtracts from every score is the row sum of grad · out with the *merged* out. A flash backward kernel takes both as arguments, so
called on one block with the merged out and l it returns exactly that block's share of dQ and its dK and dV: nothing is merged afterwards,
shares of dQ add up. (FlashAttention-2, arXiv 2307.08691, section 3.1.2; Ring Attention, arXiv 2310.01889, appendix A.)
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from lightning_par.context.merge import exact

aten = torch.ops.aten


class BlockKernel(Protocol):
    """Attention over one block. Queries and keys are never empty; with ``causal`` there are as many of one as of the other.

    ``forward`` returns out [B, H, T, F] in any floating dtype and the log-sum-exp [B, H, T] of the scaled scores in float32 or float64.
    ``backward`` takes out and log-sum-exp of the whole sequence (see Note [Backward of one block]) and returns this block's dQ, dK, dV.
    """

    def supports(self, q_BHTE: Tensor, k_BKSE: Tensor, v_BKSF: Tensor) -> bool: ...

    def forward(self, q_BHTE: Tensor, k_BKSE: Tensor, v_BKSF: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]: ...

    def backward(
        self,
        grad_BHTF: Tensor,
        q_BHTE: Tensor,
        k_BKSE: Tensor,
        v_BKSF: Tensor,
        out_BHTF: Tensor,
        lse_BHT: Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class CpuFlash(BlockKernel):
    """torch's flash kernel for CPUs: any float dtype, grouped heads as they are, values as wide as keys.

    It must not be given what the tiles of a zigzag never hold: a fully masked row (its log-sum-exp comes back as 0) or no keys at all
    (the process dies of a division by zero).
    """

    @override
    def supports(self, q_BHTE: Tensor, k_BKSE: Tensor, v_BKSF: Tensor) -> bool:
        return q_BHTE.device.type == "cpu" and k_BKSE.shape[-1] == v_BKSF.shape[-1]

    @override
    def forward(self, q_BHTE: Tensor, k_BKSE: Tensor, v_BKSF: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        return aten._scaled_dot_product_flash_attention_for_cpu(q_BHTE, k_BKSE, v_BKSF, 0.0, causal, scale=scale)

    @override
    def backward(
        self,
        grad_BHTF: Tensor,
        q_BHTE: Tensor,
        k_BKSE: Tensor,
        v_BKSF: Tensor,
        out_BHTF: Tensor,
        lse_BHT: Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_BHTF, q_BHTE, k_BKSE, v_BKSF, out_BHTF, lse_BHT, 0.0, causal, scale=scale
        )


class CudaFlash(BlockKernel):
    """FlashAttention-2 as built into torch: 16-bit, heads up to 256 wide, grouped heads as they are."""

    @override
    def supports(self, q_BHTE: Tensor, k_BKSE: Tensor, v_BKSF: Tensor) -> bool:
        width = k_BKSE.shape[-1]
        return (
            q_BHTE.is_cuda
            and torch.backends.cuda.is_flash_attention_available()
            and torch.cuda.get_device_capability(q_BHTE.device) >= (8, 0)
            and q_BHTE.dtype in (torch.float16, torch.bfloat16)
            and v_BKSF.shape[-1] == width <= 256
            and width % 8 == 0
        )

    @override
    def forward(self, q_BHTE: Tensor, k_BKSE: Tensor, v_BKSF: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        return aten._scaled_dot_product_flash_attention(q_BHTE, k_BKSE, v_BKSF, 0.0, causal, scale=scale)[:2]

    @override
    def backward(
        self,
        grad_BHTF: Tensor,
        q_BHTE: Tensor,
        k_BKSE: Tensor,
        v_BKSF: Tensor,
        out_BHTF: Tensor,
        lse_BHT: Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # no ragged batch: no cumulative lengths
        ragged = (None, None, q_BHTE.shape[2], k_BKSE.shape[2])
        seed, offset = _no_dropout(q_BHTE)
        return aten._scaled_dot_product_flash_attention_backward(
            grad_BHTF, q_BHTE, k_BKSE, v_BKSF, out_BHTF, lse_BHT.contiguous(), *ragged, 0.0, causal, seed, offset, scale=scale
        )


class CudaEfficient(BlockKernel):
    """torch's memory-efficient kernel: float32 and 16-bit, any width that is aligned; grouped heads are repeated for it, and only here."""

    LSE_ALIGNMENT = 32  # rows of the log-sum-exp are padded to this many queries

    @override
    def supports(self, q_BHTE: Tensor, k_BKSE: Tensor, v_BKSF: Tensor) -> bool:
        aligned = all(t.shape[-1] * t.element_size() % 16 == 0 for t in (k_BKSE, v_BKSF))
        return q_BHTE.is_cuda and q_BHTE.dtype in (torch.float32, torch.float16, torch.bfloat16) and aligned

    @override
    def forward(self, q_BHTE: Tensor, k_BKSE: Tensor, v_BKSF: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        k_BHSE, v_BHSF = (_repeated(t, q_BHTE) for t in (k_BKSE, v_BKSF))
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(q_BHTE, k_BHSE, v_BHSF, None, True, 0.0, causal, scale=scale)
        return out, lse[..., : q_BHTE.shape[2]]

    @override
    def backward(
        self,
        grad_BHTF: Tensor,
        q_BHTE: Tensor,
        k_BKSE: Tensor,
        v_BKSF: Tensor,
        out_BHTF: Tensor,
        lse_BHT: Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        k_BHSE, v_BHSF = (_repeated(t, q_BHTE) for t in (k_BKSE, v_BKSF))
        padded_lse = F.pad(lse_BHT, (0, -lse_BHT.shape[-1] % self.LSE_ALIGNMENT))
        seed, offset = _no_dropout(q_BHTE)
        wanted = [True, True, True, False]
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad_BHTF, q_BHTE, k_BHSE, v_BHSF, None, out_BHTF, padded_lse, seed, offset, 0.0, wanted, causal, scale=scale
        )
        groups = (k_BKSE.shape[1], -1)
        return dq, dk.unflatten(1, groups).sum(2), dv.unflatten(1, groups).sum(2)


class Plain(BlockKernel):
    """Softmax written out, computed in float32 or float64 with all scores in memory: any device, dtype, widths, and empty inputs too."""

    @override
    def supports(self, q_BHTE: Tensor, k_BKSE: Tensor, v_BKSF: Tensor) -> bool:
        return True

    @override
    def forward(self, q_BHTE: Tensor, k_BKSE: Tensor, v_BKSF: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = (t.to(exact(t.dtype)) for t in (q_BHTE, k_BKSE, v_BKSF))
        scores_BKGTS = _scores(q, k, causal, scale)
        lse_BKGT = scores_BKGTS.logsumexp(-1)
        out_BKGTF = _weights(scores_BKGTS, lse_BKGT) @ v.unsqueeze(2)
        return out_BKGTF.flatten(1, 2), lse_BKGT.flatten(1, 2)

    @override
    def backward(
        self,
        grad_BHTF: Tensor,
        q_BHTE: Tensor,
        k_BKSE: Tensor,
        v_BKSF: Tensor,
        out_BHTF: Tensor,
        lse_BHT: Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad, q, k, v, out, lse = (t.to(exact(t.dtype)) for t in (grad_BHTF, q_BHTE, k_BKSE, v_BKSF, out_BHTF, lse_BHT))
        p_BKGTS = _weights(_scores(q, k, causal, scale), _grouped(lse, k))
        grad_BKGTF, q_BKGTE = _grouped(grad, k), _grouped(q, k)
        row_BKGT = _grouped((grad * out).sum(-1), k)
        ds_BKGTS = p_BKGTS * (grad_BKGTF @ v.unsqueeze(2).mT - row_BKGT.unsqueeze(-1)) * scale
        dq_BHTE = (ds_BKGTS @ k.unsqueeze(2)).flatten(1, 2)
        dk_BKSE = (ds_BKGTS.mT @ q_BKGTE).sum(2)
        dv_BKSF = (p_BKGTS.mT @ grad_BKGTF).sum(2)
        return dq_BHTE, dk_BKSE, dv_BKSF


KERNELS: tuple[BlockKernel, ...] = (CpuFlash(), CudaFlash(), CudaEfficient(), Plain())
"""In order of preference."""


def kernel_for(q_BHTE: Tensor, k_BKSE: Tensor, v_BKSF: Tensor) -> BlockKernel:
    """The best kernel for tensors of this device, dtype and width."""
    return next(kernel for kernel in KERNELS if kernel.supports(q_BHTE, k_BKSE, v_BKSF))


def _grouped(per_query_head: Tensor, k_BKSE: Tensor) -> Tensor:
    """[B, H, ...] as [B, K, G, ...]: queries beside the key head they share, as in grouped-query attention."""
    return per_query_head.unflatten(1, (k_BKSE.shape[1], -1))


def _repeated(per_key_head: Tensor, q_BHTE: Tensor) -> Tensor:
    return per_key_head.repeat_interleave(q_BHTE.shape[1] // per_key_head.shape[1], dim=1)


def _scores(q_BHTE: Tensor, k_BKSE: Tensor, causal: bool, scale: float) -> Tensor:
    scores_BKGTS = _grouped(q_BHTE, k_BKSE) @ k_BKSE.unsqueeze(2).mT * scale
    if causal:
        future_TS = torch.ones(scores_BKGTS.shape[-2:], dtype=torch.bool, device=q_BHTE.device).triu(1)
        scores_BKGTS = scores_BKGTS.masked_fill(future_TS, -torch.inf)
    return scores_BKGTS


def _weights(scores_BKGTS: Tensor, lse_BKGT: Tensor) -> Tensor:
    """exp(scores - lse); 0 for a query that sees no key (lse = -inf)."""
    return (scores_BKGTS - lse_BKGT.masked_fill(lse_BKGT == -torch.inf, 0.0).unsqueeze(-1)).exp()


def _no_dropout(like: Tensor) -> tuple[Tensor, Tensor]:
    """The random state that CUDA kernels ask for and, without dropout, do not read."""
    unread = torch.zeros(2, dtype=torch.int64, device=like.device)
    return unread, unread
