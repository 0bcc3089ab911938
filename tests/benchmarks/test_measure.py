"""The meters."""

from __future__ import annotations

import torch

from benchmarks.measure import heap_bytes, storages


def test_a_flat_buffer_counts_once() -> None:
    before = storages()
    flat = torch.zeros(1000)
    views = [flat[:10].view(2, 5), flat[500:]]
    views[0].requires_grad_()
    views[0].grad = torch.ones(2, 5)  # only C++ keeps the gradient
    new = {address: size for address, size in storages().items() if before.get(address) != size}
    assert sorted(new.values()) == [40, 4000]


def test_the_heap_sees_what_is_allocated() -> None:
    before = heap_bytes()
    tensor = torch.empty(2**22, dtype=torch.uint8)
    assert 2**22 <= heap_bytes() - before < 2**22 + 2**20
    del tensor
