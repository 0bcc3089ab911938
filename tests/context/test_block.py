"""Block kernels and the merge of their results against plain softmax."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_par.context.block import BlockKernel, CpuFlash, CudaEfficient, CudaFlash, Plain, kernel_for
from lightning_par.context.merge import Attended
from lightning_par.layout import Span

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 8e-3}
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CASES = [
    *(("cpu", kernel, dtype) for kernel in (CpuFlash(), Plain()) for dtype in TOLERANCE),
    *(pytest.param("cuda", CudaFlash(), dtype, marks=ON_GPU) for dtype in (torch.bfloat16, torch.float16)),
    *(pytest.param("cuda", CudaEfficient(), dtype, marks=ON_GPU) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
    *(pytest.param("cuda", Plain(), dtype, marks=ON_GPU) for dtype in TOLERANCE),
]


def _named(case: object) -> str:
    return str(case).removeprefix("torch.") if isinstance(case, str | torch.dtype) else type(case).__name__


def _reference(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def _inputs(dtype: torch.dtype, heads: tuple[int, int], tokens: tuple[int, int], widths: tuple[int, int], device: str) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(2, heads[0], tokens[0], widths[0]), (2, heads[1], tokens[1], widths[0]), (2, heads[1], tokens[1], widths[1])]
    return [torch.randn(shape, dtype=torch.float64).to(device, dtype) for shape in shapes]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize(("device", "kernel", "dtype"), CASES, ids=_named)
def test_C13_a_block_kernel_is_softmax_and_its_gradient(
    device: str, kernel: BlockKernel, dtype: torch.dtype, heads: tuple[int, int], causal: bool
) -> None:
    q, k, v = _inputs(dtype, heads, (7, 7 if causal else 5), (8, 8), device)
    assert kernel.supports(q, k, v)
    out, lse = kernel.forward(q, k, v, causal=causal, scale=0.3)
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    out_ref, lse_ref = _reference(*exact, causal, 0.3)
    tolerance = {"atol": TOLERANCE[dtype], "rtol": 0.0}
    assert out.shape == out_ref.shape
    assert lse.dtype in (torch.float32, torch.float64)
    torch.testing.assert_close(out.double(), out_ref, **tolerance)
    torch.testing.assert_close(lse.double(), lse_ref, **tolerance)
    grad = torch.randn_like(out_ref).to(dtype)
    grads = kernel.backward(grad, q, k, v, out.to(dtype), lse, causal=causal, scale=0.3)
    for mine, theirs in zip(grads, torch.autograd.grad(out_ref, exact, grad.double()), strict=True):
        assert mine.shape == theirs.shape
        torch.testing.assert_close(mine.double(), theirs, **tolerance)


def test_values_may_be_wider_than_keys() -> None:
    q, k, v = _inputs(torch.float64, (4, 2), (5, 5), (8, 6), "cpu")
    assert isinstance(kernel_for(q, k, v), Plain)
    torch.testing.assert_close(Plain().forward(q, k, v, causal=True, scale=0.3), _reference(q, k, v, True, 0.3))


def test_the_flash_kernel_is_preferred_on_cpu() -> None:
    assert isinstance(kernel_for(*_inputs(torch.bfloat16, (4, 2), (5, 5), (8, 8), "cpu")), CpuFlash)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_fused_kernels_are_preferred_on_cuda() -> None:
    assert isinstance(kernel_for(*_inputs(torch.bfloat16, (4, 2), (5, 5), (8, 8), "cuda")), CudaFlash)
    assert isinstance(kernel_for(*_inputs(torch.float32, (4, 2), (5, 5), (8, 8), "cuda")), CudaEfficient)


@pytest.mark.parametrize("tokens", [(0, 5), (5, 0), (0, 0)])
def test_plain_attention_to_nothing_is_nothing(tokens: tuple[int, int]) -> None:
    q, k, v = _inputs(torch.float64, (4, 2), tokens, (8, 8), "cpu")
    out, lse = Plain().forward(q, k, v, causal=False, scale=1.0)
    assert torch.equal(out, torch.zeros_like(q))
    assert (lse == -torch.inf).all()
    grads = Plain().backward(torch.ones_like(out), q, k, v, out, lse, causal=False, scale=1.0)
    assert all(torch.equal(grad, torch.zeros_like(t)) for grad, t in zip(grads, (q, k, v), strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", [CpuFlash(), Plain()], ids=["flash", "plain"])
def test_merged_blocks_are_attention_over_all_keys(kernel: BlockKernel, dtype: torch.dtype) -> None:
    q, k, v = _inputs(dtype, (4, 2), (6, 11), (8, 8), "cpu")
    q = q * 20  # large scores: sums of exponentials would overflow
    merged = Attended.nothing(q, 8)
    assert merged.out.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for first, last in ((0, 4), (4, 5), (5, 11)):
        merged.add(*kernel.forward(q, k[:, :, first:last], v[:, :, first:last], causal=False, scale=0.3), Span(0, 6))
    out_ref, lse_ref = _reference(q.double(), k.double(), v.double(), False, 0.3)
    tolerance = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(merged.out.double(), out_ref, **tolerance)
    torch.testing.assert_close(merged.lse.double(), lse_ref, **tolerance)


def test_merging_one_block_changes_nothing() -> None:
    q, k, v = _inputs(torch.float32, (4, 2), (6, 6), (8, 8), "cpu")
    out, lse = CpuFlash().forward(q, k, v, causal=True, scale=0.3)
    merged = Attended.nothing(q, 8)
    merged.add(out, lse, Span(0, 6))
    assert torch.equal(merged.out, out)
    assert torch.equal(merged.lse, lse)


def test_queries_that_saw_no_key_stay_empty() -> None:
    q, k, v = _inputs(torch.float64, (4, 2), (6, 5), (8, 8), "cpu")
    merged = Attended.nothing(q, 8)
    merged.add(torch.zeros_like(q), torch.full(q.shape[:3], -torch.inf, dtype=q.dtype), Span(0, 6))
    assert (merged.lse == -torch.inf).all()
    assert torch.equal(merged.out, torch.zeros_like(q))
    late = Span(2, 6)
    out, lse = Plain().forward(q[:, :, 2:], k, v, causal=False, scale=0.3)
    merged.add(out, lse, late)
    assert torch.equal(merged.out[:, :, 2:], out)
    assert torch.equal(merged.out[:, :, :2], torch.zeros_like(q[:, :, :2]))
    assert not merged.lse.isnan().any()
