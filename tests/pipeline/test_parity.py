"""Every schedule at every size against one process, in float64: loss and every gradient."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from lightning_par.layout import SCHEDULES
from tests.harness import run_world
from tests.pipeline.models import gpt
from tests.pipeline.parity import Twin, pp_group, tokens

ROWS = 9
MICROBATCHES = range(1, 10)
LAYERS = range(5, 9)


def _steps(size: int, schedule: str, chunks: int, cases: list[tuple[int, bool, bool]], microbatches: list[int]) -> None:
    """Train models of so many layers, tied or not, checkpointed or not, each with every number of micro-batches."""
    group = pp_group(size)
    for layers, tie, checkpointed in cases:
        twin = Twin(gpt(layers, tie, checkpointed=checkpointed), group, schedule, chunks)
        ends = sorted({0, twin.pipeline.rank_of(size * chunks - 1)})
        assert twin.pipeline.tied == ({"embed.weight": tuple(ends)} if tie and len(ends) > 1 else {})
        for count in microbatches:
            twin.train_step(tokens(ROWS, 5, seed=count), count)


def _chunks(schedule: str, size: int, layers: int) -> list[int]:
    return [chunks for chunks in (1, 2, 3) if SCHEDULES[schedule].refusal(chunks) is None and size * chunks <= layers]


def _sizes(*without: str) -> list[Any]:
    everything = [(size, name, chunks) for size, name in product((2, 3, 4), SCHEDULES) for chunks in _chunks(name, size, max(LAYERS))]
    named = {"pp{} {} v{}".format(*sizes): sizes for sizes in everything}
    return [pytest.param(*sizes, id=name) for name, sizes in named.items() if not name.startswith(without)]


LEFT_OUT = ("pp3 gpipe", "pp3 1f1b", "pp4 gpipe", "pp4 interleaved", "pp2 interleaved_1f1b v1", "pp3 interleaved_1f1b v1")
"""Of the quick tests, for their neighbours' sake."""


@pytest.mark.parametrize(("size", "schedule", "chunks"), _sizes(*LEFT_OUT))
def test_P1_P3_P5_P7_P8_a_schedule_gives_the_gradients_of_one_process(size: int, schedule: str, chunks: int) -> None:
    """Micro-batches: one, fewer than stages, not a multiple, every row apart."""
    microbatches = [1, size - 1, 2 * size + 1, ROWS]
    run_world(_steps, size, size, schedule, chunks, [(7 + chunks // 2, True, False)], microbatches)


@pytest.mark.parametrize(
    ("size", "schedule", "chunks"), [(2, "1f1b", 1), (2, "interleaved_1f1b", 2), (2, "interleaved_1f1b", 4), (3, "zb_h1", 1), (2, "zbv", 2)]
)
def test_P9_checkpointed_layers(size: int, schedule: str, chunks: int) -> None:
    run_world(_steps, size, size, schedule, chunks, [(8, False, True)], [3])


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 3), ("zb_h1", 1), ("zbv", 2)])
def test_all_stages_on_one_rank(schedule: str, chunks: int) -> None:
    run_world(_steps, 1, 1, schedule, chunks, [(5, True, False)], [1, 4])


@pytest.mark.slow
@pytest.mark.parametrize(("size", "schedule", "chunks"), _sizes())
def test_P1_P7_every_schedule_at_every_size(size: int, schedule: str, chunks: int) -> None:
    cases = [(layers, tie, False) for layers, tie in product(LAYERS, (False, True)) if chunks in _chunks(schedule, size, layers)]
    run_world(_steps, size, size, schedule, chunks, cases, list(MICROBATCHES), timeout=300)
