"""Ring attention on real ranks against one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_par.comm import Group, Mesh
from lightning_par.context import UnsupportedAttentionError, Zigzag, ring_attention
from lightning_par.layout import ParallelLayout
from tests.harness import run_world


def _inputs(
    total: int, heads: tuple[int, int] = (6, 2), widths: tuple[int, int] = (8, 8), dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """q, k, v and the gradient of the output, of the whole sequence."""
    torch.manual_seed(total)
    (h, k), (e, f) = heads, widths
    return [torch.randn(2, *shape, dtype=torch.float64).to(dtype) for shape in ((h, total, e), (k, total, e), (k, total, f), (h, total, f))]


def _ring(group: Group, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, *, causal: bool, scale: float | None = None) -> list[Tensor]:
    """This rank's out, dq, dk, dv."""
    zigzag = Zigzag(q.shape[2], group.size)
    q, k, v, grad = (zigzag.cut(t, 2, group.index) for t in (q, k, v, grad))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    with ring_attention(group, zigzag.total):
        out = F.scaled_dot_product_attention(*leaves, is_causal=causal, scale=scale, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def _one_process(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, *, causal: bool, scale: float | None = None) -> list[Tensor]:
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, is_causal=causal, scale=scale, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.double())]


def _assert_parity(group: Group, inputs: list[Tensor], *, causal: bool, scale: float | None = None, tolerance: float = 1e-10) -> None:
    mine, whole = (run(*inputs, causal=causal, scale=scale) for run in (lambda *a, **k: _ring(group, *a, **k), _one_process))
    for ours, theirs in zip(mine, whole, strict=True):
        assert ours.dtype == inputs[0].dtype
        expected = Zigzag(inputs[0].shape[2], group.size).cut(theirs, 2, group.index)
        torch.testing.assert_close(ours.double(), expected, atol=tolerance, rtol=0.0)


def _cp_group(size: int) -> Group:
    return Mesh.build(ParallelLayout(cp=size).resolve(size)).cp


def _exact(size: int) -> None:
    group = _cp_group(size)
    for total in sorted({size, 2 * size - 1, 2 * size, 5, 7, 13, 16}):
        for causal in (True, False):
            _assert_parity(group, _inputs(total), causal=causal)
    _assert_parity(group, _inputs(13, heads=(4, 4)), causal=True, scale=0.2)
    _assert_parity(group, _inputs(13, heads=(3, 1), widths=(8, 6)), causal=True)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_C13_C11_C17_ring_attention_and_its_gradients_are_those_of_one_process(size: int) -> None:
    run_world(_exact, size, size)


def _low_precision() -> None:
    group = _cp_group(2)
    for dtype, tolerance in ((torch.bfloat16, 5e-2), (torch.float16, 8e-3), (torch.float32, 5e-6)):
        _assert_parity(group, _inputs(13, dtype=dtype), causal=True, scale=0.3, tolerance=tolerance)
    q, k, v, grad = _inputs(13, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out, dq, *_ = _ring(group, q, k, v, grad.bfloat16(), causal=True)
    assert (out.dtype, dq.dtype) == (torch.bfloat16, torch.float32)


def test_C14_outputs_and_gradients_keep_the_dtype_of_the_inputs() -> None:
    run_world(_low_precision, 2)


def _sent() -> None:
    mesh = Mesh.build(ParallelLayout(cp=3).resolve(3))
    inputs = _inputs(13, dtype=torch.bfloat16)
    with mesh.trace.recording() as sent:
        _ring(mesh.cp, *inputs, causal=True)
    kv = [2 * 2 * Zigzag(13, 3).tokens((mesh.cp.index - step) % 3) * (8 + 8) for step in range(3)]  # two key heads, not six
    in_16_bit = [(kv[0], 2), (kv[1], 2)]
    backward = [(kv[0], 2), (kv[1], 2), (kv[1], 4), (kv[2], 4)]
    assert [(s.elements, s.itemsize) for s in sent] == [*in_16_bit, *backward]


def test_key_heads_travel_unrepeated_in_their_own_dtype_and_gradients_in_float32() -> None:
    run_world(_sent, 3)


def _multi_head() -> None:
    group = _cp_group(2)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    mine = Zigzag(7, 2).cut(x, 1, group.index)
    with ring_attention(group, 7):
        full, causal = layer(mine), layer(mine, src_mask=nn.Transformer.generate_square_subsequent_mask(len(mine[0])), is_causal=True)
    for ours, theirs in (
        (full, layer(x)),
        (causal, layer(x, src_mask=nn.Transformer.generate_square_subsequent_mask(7, dtype=x.dtype), is_causal=True)),
    ):
        torch.testing.assert_close(ours, Zigzag(7, 2).cut(theirs, 1, group.index), atol=1e-10, rtol=0)


def test_multihead_attention_of_torch_is_the_ring_too() -> None:
    run_world(_multi_head, 2)


def _recomputed() -> None:
    group, aliased = _cp_group(2), F.scaled_dot_product_attention  # as `from torch.nn.functional import ...` leaves it
    inputs = _inputs(13)
    expected = [Zigzag(13, 2).cut(grad, 2, group.index) for grad in _one_process(*inputs, causal=True)[1:]]
    q, k, v, grad = (Zigzag(13, 2).cut(t, 2, group.index) for t in inputs)
    leaves = [t.requires_grad_() for t in (q, k, v)]

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return aliased(q, k, v, is_causal=True, enable_gqa=True)

    def into_grad(backward) -> list[Tensor]:
        backward()
        grads = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return grads

    for use_reentrant in (False, True):
        entries = {
            "backward": lambda out: into_grad(lambda: out.backward(grad)),
            "autograd.backward": lambda out: into_grad(lambda: torch.autograd.backward([out], [grad])),
            "autograd.grad": lambda out: torch.autograd.grad(out, leaves, grad),
        }
        for name, run in entries.items():
            if use_reentrant and name == "autograd.grad":
                continue  # torch has no such pair
            with ring_attention(group, 13) as ring:
                grads = run(checkpoint(attention, *leaves, use_reentrant=use_reentrant))
            assert ring.calls[True] == 2
            for ours, theirs in zip(grads, expected, strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


def test_attention_recomputed_in_backward_is_the_ring_too() -> None:
    run_world(_recomputed, 2)


def _call(tokens: int = 5, keys: int | None = None, *, padded: bool = False, **more: object) -> Tensor:
    q, kv = torch.randn(1, 4, tokens, 8), torch.randn(1, 2, keys or tokens, 8)
    with ring_attention(Group("cp"), 5, padded=padded):
        return F.scaled_dot_product_attention(q, kv, kv, enable_gqa=True, **more)


def test_what_the_ring_cannot_compute_says_so() -> None:
    with pytest.raises(UnsupportedAttentionError, match=r"attn_mask of shape \(5, 5\).*is_causal=True"):
        _call(attn_mask=torch.ones(5, 5, dtype=torch.bool))
    with pytest.raises(UnsupportedAttentionError, match=r"dropout_p=0.1.*attention dropout to 0"):
        _call(dropout_p=0.1)
    with pytest.raises(UnsupportedAttentionError, match=r"4 queries, 4 keys and 4 values, but this rank's share .* is 5"):
        _call(4)
    with pytest.raises(UnsupportedAttentionError, match="cross-attention"):
        _call(5, 9)
    with pytest.raises(UnsupportedAttentionError, match="attend to the padding"):
        _call(padded=True)
    _call(padded=True, is_causal=True)
    attention, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(1, 5, 8)
    with ring_attention(Group("cp"), 5), pytest.raises(UnsupportedAttentionError, match="need_weights=False"):
        attention(x, x, x)


def test_inputs_without_a_batch_dim_or_with_several_are_right() -> None:
    for lead in ((), (2, 3)):
        q, kv = torch.randn(*lead, 4, 5, 8, dtype=torch.float64), torch.randn(*lead, 4, 5, 8, dtype=torch.float64)
        with ring_attention(Group("cp"), 5) as ring:
            ours = F.scaled_dot_product_attention(q, kv, kv, is_causal=True)
        torch.testing.assert_close(ours, F.scaled_dot_product_attention(q, kv, kv, is_causal=True))
        assert (ring.calls[True], ring.causal) == (1, True)
