"""Several nodes: the strategy lays its ranks over nodes x devices."""

from __future__ import annotations

import os
from functools import cache, partial
from typing import Any

import pytest

from lightning_par import HybridParallelStrategy
from tests.harness import run_world
from tests.harness.models import TinyGPT, token_loader
from tests.harness.parity import Run, assert_same, fit

MODULE = partial(TinyGPT, layers=2)
LOADER = partial(token_loader, 12)


@cache
def _reference() -> Run:
    return fit(MODULE, LOADER)


def _fit_as_a_node_of_its_own(layout: dict[str, Any]) -> tuple[Run, dict[str, int]]:
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": os.environ["RANK"]}
    strategy = HybridParallelStrategy(**layout)
    run = fit(MODULE, LOADER, strategy, devices=1, num_nodes=2)
    place = {"nodes": strategy.num_nodes, "node": strategy.node_rank, "local rank": strategy.local_rank, "rank": strategy.global_rank}
    return run, place | {"world": strategy.layout.world, "ranks": strategy.world_size}


@pytest.mark.parametrize("layout", [{"zero": 1}, {"tp": 2}, {"pp": 2}], ids=["dp auto", "tp2", "pp2"])
def test_L15_two_nodes_of_one_device_are_a_world_of_two(layout: dict[str, Any]) -> None:
    runs, places = zip(*run_world(_fit_as_a_node_of_its_own, 2, layout), strict=True)
    for rank, place in enumerate(places):
        assert place == {"nodes": 2, "node": rank, "local rank": 0, "rank": rank, "world": 2, "ranks": 2}
    assert_same(list(runs), _reference())
