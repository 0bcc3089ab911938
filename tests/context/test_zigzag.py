"""The cut of a sequence and the tiles of attention, as plain data."""

from __future__ import annotations

import pytest
import torch

from lightning_par.context import Zigzag

SIZES = [(total, size) for size in (1, 2, 3, 4, 5) for total in range(size, 4 * size + 3)]


@pytest.mark.parametrize(("total", "size"), SIZES)
def test_C16_joining_is_the_inverse_of_cutting(total: int, size: int) -> None:
    zigzag, whole = Zigzag(total, size), torch.arange(2 * total * 3).view(2, total, 3)
    shards = [zigzag.cut(whole, 1, index) for index in range(size)]
    assert torch.equal(zigzag.join(shards, 1), whole)
    assert torch.equal(zigzag.join([zigzag.indices(index) for index in range(size)], 0), torch.arange(total))


@pytest.mark.parametrize(("total", "size"), SIZES)
def test_C10_every_token_has_one_rank_and_every_rank_a_token_at_any_length(total: int, size: int) -> None:
    zigzag = Zigzag(total, size)
    held = [zigzag.indices(index) for index in range(size)]
    assert sorted(torch.cat(held).tolist()) == list(range(total))
    assert [len(indices) for indices in held] == [zigzag.tokens(index) for index in range(size)]
    assert min(zigzag.tokens(index) for index in range(size)) >= 1
    assert max(zigzag.tokens(index) for index in range(size)) - min(zigzag.tokens(index) for index in range(size)) <= 1
    assert all((indices.diff() > 0).all() for indices in held)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("total", "size"), SIZES)
def test_C11_tiles_cover_each_pair_that_attends_exactly_once(total: int, size: int, causal: bool) -> None:
    zigzag = Zigzag(total, size)
    seen_TT = torch.zeros(total, total, dtype=torch.int64)
    for mine in range(size):
        for theirs in range(size):
            q_T, k_S = zigzag.indices(mine), zigzag.indices(theirs)
            for tile in zigzag.tiles(mine, theirs, causal=causal):
                pairs = torch.ones(tile.queries.size, tile.keys.size, dtype=torch.int64)
                pairs = pairs.tril() if tile.causal else pairs
                seen_TT[q_T[tile.queries.slice()].unsqueeze(1), k_S[tile.keys.slice()].unsqueeze(0)] += pairs
    whole_TT = torch.ones(total, total, dtype=torch.int64)
    assert torch.equal(seen_TT, whole_TT.tril() if causal else whole_TT)


def test_causal_work_is_even_at_every_step_of_the_ring() -> None:
    zigzag = Zigzag(64, 4)
    for step in range(1, 4):
        work = [sum(t.queries.size * t.keys.size for t in zigzag.tiles(r, (r - step) % 4, causal=True)) for r in range(4)]
        assert len(set(work)) == 1
