"""Every rule of a layout: refused with its numbers and a way out, all broken rules at once."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_par.layout import LayoutError, ModelFacts, ParallelLayout

FACTS = ModelFacts(layers=5, heads=6, kv_heads=3, vocab=33, sequence=13, batch=7)


@pytest.mark.parametrize(
    ("fields", "world", "words"),
    [
        ({"tp": 3, "pp": 4}, 4, ["world size 4", "tp=3", "pp=4", "= 12", "start 12 ranks"]),
        ({"dp": 3}, 4, ["dp=3", "= 3 ranks, but 4 run", "auto"]),
        ({"pp": 6}, 6, ["pp=6", "model has 5"]),
        ({"pp": 2, "chunks": 3, "schedule": "interleaved_1f1b"}, 2, ["pp=2 · chunks=3 = 6 stages", "model has 5"]),
        ({"zero": 1, "replicate": 3}, 4, ["replicate=3", "4 data-parallel replicas", "among 1, 2, 4"]),
        ({"tp": 4}, 4, ["tp=4", "6 attention heads", "choose tp among 1, 2, 3, 6"]),
        ({"tp": 2}, 2, ["tp=2", "3 key-value heads", "choose tp among 1, 3"]),
        ({"cp": 14}, 14, ["cp=14", "sequence of 13", "lower cp to 13"]),
        ({"pp": 2, "microbatches": 8}, 2, ["microbatches=8", "7 samples", "at most 7"]),
        ({"pp": 2, "balance": [2, 2]}, 2, ["balance=(2, 2) places 4 layers", "model has 5"]),
    ],
    ids=["world", "dp", "layers", "chunks", "replicate", "heads", "T5 kv heads", "sequence", "micro-batches", "P1 balance"],
)
def test_an_impossible_layout_is_refused_with_its_numbers_and_a_way_out(fields: dict[str, Any], world: int, words: list[str]) -> None:
    with pytest.raises(LayoutError) as error:
        ParallelLayout(**fields).resolve(world, FACTS)
    for word in words:
        assert word in str(error.value)


def test_all_violations_come_in_one_message() -> None:
    with pytest.raises(LayoutError) as error:
        ParallelLayout(tp=4, pp=6, cp=14, microbatches=8).resolve(10, FACTS)
    assert len(error.value.violations) == 6
    assert "for 6 reasons" in str(error.value)
    for words in ("world size 10", "model has 5", "6 attention heads", "3 key-value heads", "sequence of 13", "7 samples"):
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tp": 0}, "tp=0: a degree is a whole number of at least 1"),
        ({"pp": 2.0}, "pp=2.0: a degree"),
        ({"cp": True}, "cp=True: a degree"),
        ({"dp": "two"}, "dp='two': a degree is a whole number of at least 1, or \"auto\""),
        ({"zero": 4}, "zero=4: choose one of"),
        ({"pp": 2, "schedule": "zigzag"}, "schedule='zigzag': choose one of gpipe, 1f1b"),
        ({"pp": 2, "microbatches": 0}, "microbatches=0: give a whole number"),
        ({"microbatches": 4}, "microbatches=4 with pp=1"),
        ({"pp": 2, "chunks": 2}, "chunks=2: 1f1b runs one stage a rank"),
        ({"pp": 2, "schedule": "zbv"}, "chunks=1: zbv runs 2 stages on each rank; set chunks=2"),
        ({"pp": 2, "schedule": ["1f1b"]}, "choose one of gpipe"),
        ({"schedule": "interleaved_1f1b", "chunks": 2}, "chunks=2 with pp=1"),
        ({"replicate": 2}, "replicate=2 with zero=0"),
        ({"pp": 2, "balance": "time"}, "balance='time': choose one of parameters, flops, profile, or give"),
        ({"pp": 2, "balance": (3, 0)}, "balance=(3, 0): choose"),
        ({"pp": 2, "balance": 3}, "balance=3: choose"),
        ({"pp": 2, "balance": [1, 2, 3]}, "balance=(1, 2, 3) speaks of 3 stages, but pp=2 · chunks=1 are 2"),
    ],
)
def test_fields_that_mean_nothing_are_refused_at_once(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(LayoutError) as error:
        ParallelLayout(**fields)
    assert words in str(error.value)


def test_bad_fields_are_all_told_at_once() -> None:
    with pytest.raises(LayoutError, match="for 3 reasons"):
        ParallelLayout(tp=0, zero=9, schedule="never")


def test_dp_auto_takes_the_ranks_that_are_left() -> None:
    layout = ParallelLayout(tp=2, pp=3).resolve(12, ModelFacts(heads=4, kv_heads=2) | FACTS)
    assert layout.dp == 2
    assert layout.world == 12


def test_rules_about_unknown_facts_are_skipped() -> None:
    assert ParallelLayout(tp=4, pp=6, cp=14).violations(4 * 6 * 14) == []


def test_there_are_never_more_microbatches_than_samples() -> None:
    assert ParallelLayout(pp=4).microbatches_for(8) == 4
    assert ParallelLayout(pp=4).microbatches_for(3) == 3
    assert ParallelLayout(pp=2, microbatches=5).microbatches_for(12) == 5
