"""Ring attention: every rank keeps its queries, keys and values go round. (Ring Attention, arXiv 2310.01889.)

Shape letters: B batch, H query heads, K key/value heads, T my tokens, S tokens of the rank whose keys are here,
E width of a query or key head, F width of a value head.

Note [What travels when]
~~~~~~~~~~~~~~~~~~~~~~~~
Each rank passes keys and values to its right neighbour, one flat message for both, while it computes with those it has. At step s
rank r holds the keys of rank r - s; how many tokens that is follows from the zigzag, so no sizes are sent. For three ranks, as rank 0
sees it (`kv2`: keys and values of rank 2)::

    forward     step 0               step 1               step 2
    compute     q0 · kv0             q0 · kv2             q0 · kv1
    meanwhile   kv0 ->  kv2 <-       kv2 ->  kv1 <-

The backward pass runs the same ring. The gradient of a block of keys is a sum over all ranks, and the sum travels along behind the
block: a rank adds its share to what came from the left and passes it on, while it computes the next block. What a rank gives to its own
block (step 0) waits at home. So the sums make size - 1 hops, like the keys, and arrive home after the last one::

    backward    step 0               step 1               step 2
    compute     dq0, dkv0 (home)     dq0, dkv2            dq0, dkv1
    meanwhile   kv0 ->  kv2 <-       kv2 ->  kv1 <-
    after                            dkv2 ->  dkv1 <-     dkv1 ->  dkv0 <- (add to home)

Keys and values travel in their own dtype and with their own heads (grouped queries: K of them, not H); their gradients travel in
float32 at least. With one rank there is one step and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_par.comm import DONE, Group, Message, Work, exchange
from lightning_par.context.block import BlockKernel, kernel_for
from lightning_par.context.merge import Attended, exact
from lightning_par.context.zigzag import Zigzag
from lightning_par.layout import Span


def attend(q_BHTE: Tensor, k_BKTE: Tensor, v_BKTF: Tensor, *, group: Group, total: int, causal: bool, scale: float) -> Tensor:
    """Attention of my queries over the keys of the whole sequence, [B, H, T, F] in the dtype of ``q_BHTE``.

    All ranks of ``group`` must call, in the same order, in forward and in backward; each with its zigzag shard of ``total`` tokens. H is a
    multiple of K. Gradients have the dtypes of the inputs.
    """
    kernel = kernel_for(q_BHTE, k_BKTE, v_BKTF)
    return _RingAttention.apply(q_BHTE, k_BKTE, v_BKTF, _Ring(group, Zigzag(total, group.size), causal, scale, kernel))


@dataclass(frozen=True)
class _Ring:
    """What stays the same on the way round."""

    group: Group
    zigzag: Zigzag
    causal: bool
    scale: float
    kernel: BlockKernel

    def owner(self, step: int) -> int:
        """The index of the rank whose keys are here at ``step``."""
        return (self.group.index - step) % self.group.size

    def pass_on(self, to_right: Tensor, from_left: Tensor) -> Work:
        size, index = self.group.size, self.group.index
        return exchange(self.group, [Message(to_right, (index + 1) % size)], [Message(from_left, (index - 1) % size)])


@dataclass(frozen=True)
class _Blocks:
    """Keys and values of one rank, back to back in one flat tensor: how to make it, and how to see it as k and v again."""

    zigzag: Zigzag
    batch: int
    heads: int
    key_width: int
    value_width: int

    @classmethod
    def of(cls, ring: _Ring, k_BKTE: Tensor, v_BKTF: Tensor) -> _Blocks:
        return cls(ring.zigzag, k_BKTE.shape[0], k_BKTE.shape[1], k_BKTE.shape[3], v_BKTF.shape[3])

    def elements(self, owner: int) -> int:
        return self.batch * self.heads * self.zigzag.tokens(owner) * (self.key_width + self.value_width)

    def pack(self, k_BKTE: Tensor, v_BKTF: Tensor) -> Tensor:
        return torch.cat([k_BKTE.flatten(), v_BKTF.flatten()])

    def unpack(self, flat: Tensor, owner: int) -> tuple[Tensor, Tensor]:
        """Views [B, K, S, E] and [B, K, S, F]."""
        rows = (self.batch, self.heads, self.zigzag.tokens(owner))
        keys = flat.numel() // (self.key_width + self.value_width) * self.key_width
        return flat[:keys].view(*rows, self.key_width), flat[keys:].view(*rows, self.value_width)


def _travel(ring: _Ring, blocks: _Blocks, mine: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(owner, keys and values) of every rank in turn, mine first; the next ones are on their way while the caller computes."""
    present = mine
    for step in range(ring.group.size):
        following, arrival = present, DONE
        if step + 1 < ring.group.size:
            following = present.new_empty(blocks.elements(ring.owner(step + 1)))
            arrival = ring.pass_on(present, following)
        yield ring.owner(step), present
        arrival.wait()
        present = following


class _RingAttention(torch.autograd.Function):
    """See Note [What travels when]."""

    @staticmethod
    def forward(ctx: Any, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTF: Tensor, ring: _Ring) -> Tensor:
        with torch.autocast(q_BHTE.device.type, enabled=False):
            attended = _forward(ring, q_BHTE, k_BKTE, v_BKTF)
        out_BHTF = attended.out.to(q_BHTE.dtype)
        ctx.save_for_backward(q_BHTE, k_BKTE, v_BKTF, out_BHTF, attended.lse)
        ctx.ring = ring
        return out_BHTF

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BHTF: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q_BHTE, k_BKTE, v_BKTF, out_BHTF, lse_BHT = ctx.saved_tensors
        with torch.autocast(q_BHTE.device.type, enabled=False):
            dq_BHTE, dk_BKTE, dv_BKTF = _backward(ctx.ring, grad_BHTF, q_BHTE, k_BKTE, v_BKTF, out_BHTF, lse_BHT)
        return dq_BHTE.to(q_BHTE.dtype), dk_BKTE.to(k_BKTE.dtype), dv_BKTF.to(v_BKTF.dtype), None


def _forward(ring: _Ring, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTF: Tensor) -> Attended:
    blocks = _Blocks.of(ring, k_BKTE, v_BKTF)
    attended = Attended.nothing(q_BHTE, blocks.value_width)
    for owner, kv in _travel(ring, blocks, blocks.pack(k_BKTE, v_BKTF)):
        k_BKSE, v_BKSF = blocks.unpack(kv, owner)
        for tile in ring.zigzag.tiles(ring.group.index, owner, causal=ring.causal):
            q, k, v = _rows(q_BHTE, tile.queries), _rows(k_BKSE, tile.keys), _rows(v_BKSF, tile.keys)
            attended.add(*ring.kernel.forward(q, k, v, causal=tile.causal, scale=ring.scale), tile.queries)
    return attended


def _backward(
    ring: _Ring, grad_BHTF: Tensor, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTF: Tensor, out_BHTF: Tensor, lse_BHT: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV of my tokens, in float32 at least."""
    blocks = _Blocks.of(ring, k_BKTE, v_BKTF)
    dq_BHTE = torch.zeros_like(q_BHTE, dtype=exact(q_BHTE.dtype), memory_format=torch.contiguous_format)

    def share(owner: int, kv: Tensor) -> Tensor:
        """Add this block's share to dQ; return mine of its keys' and values' gradient, flat."""
        k_BKSE, v_BKSF = blocks.unpack(kv, owner)
        dkv = torch.zeros_like(kv, dtype=exact(kv.dtype))
        dk_BKSE, dv_BKSF = blocks.unpack(dkv, owner)
        for tile in ring.zigzag.tiles(ring.group.index, owner, causal=ring.causal):
            grad, q, out, lse = (_rows(t, tile.queries) for t in (grad_BHTF, q_BHTE, out_BHTF, lse_BHT))
            k, v = _rows(k_BKSE, tile.keys), _rows(v_BKSF, tile.keys)
            dq, dk, dv = ring.kernel.backward(grad, q, k, v, out, lse, causal=tile.causal, scale=ring.scale)
            _rows(dq_BHTE, tile.queries).add_(dq)
            _rows(dk_BKSE, tile.keys).add_(dk)
            _rows(dv_BKSF, tile.keys).add_(dv)
        return dkv

    travel = _travel(ring, blocks, blocks.pack(k_BKTE, v_BKTF))
    home = share(*next(travel))
    from_left, arrival = home.new_zeros(blocks.elements(ring.owner(1))), DONE  # nobody is before me at step 1
    for step, (owner, kv) in enumerate(travel, start=1):
        mine = share(owner, kv)
        arrival.wait()  # also for the last send: only now may its tensor go
        to_right = mine.add_(from_left)
        from_left = home.new_empty(blocks.elements(ring.owner(step + 1)))
        arrival = ring.pass_on(to_right, from_left)
    arrival.wait()
    return dq_BHTE, *blocks.unpack(home + from_left, ring.group.index)


def _rows(tensor: Tensor, tokens: Span) -> Tensor:
    """These tokens of a tensor [B, heads, tokens, ...], a view."""
    return tensor.narrow(2, tokens.start, tokens.size)
