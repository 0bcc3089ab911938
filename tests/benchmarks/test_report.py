"""What the benchmarks make of their numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.launch import _in_namespace
from benchmarks.measure import state_formula
from benchmarks.rank import Record
from benchmarks.report import Limit, Results, Spread, aligned, loss_difference, overheads, paired_ratio, table, verdicts


def record(*walls: float, losses: tuple[float, ...] = (2.0, 1.0)) -> Record:
    return Record(losses=list(losses), state_bytes=[16, 12], heap_bytes=[20, 20], walls=list(walls), cpus=list(walls), wires=[7, 5])


def test_ratios_are_paired_by_round() -> None:
    """The second round was ten times slower for all: it says nothing about the variant."""
    assert paired_ratio([1.1, 11.0, 1.1], [1.0, 10.0, 1.0]).median == pytest.approx(1.1)


def test_one_round_has_a_spread() -> None:
    assert Spread.of([3.0]) == (3.0, 3.0, 3.0)


@pytest.mark.parametrize(("stage", "expected"), [(0, 16.0), (1, 12.0), (2, 10.0), (3, 8.0)])
def test_state_formula_on_two_ranks(stage: int, expected: float) -> None:
    assert state_formula(stage, 1, 2, optimizer_bytes=8) == expected


def test_a_limit_is_missed_kept_or_not_judged() -> None:
    records = {"ddp": record(1.0, 2.0), "stage0": record(1.01, 2.0), "stage1": record(1.2, 2.4), "stage2": Record(skipped="not yet")}
    limits = [Limit(f"stage{stage}", "walls", 1.05) for stage in range(4)]
    lines, passed = verdicts(records, "ddp", limits)
    assert [line.split()[0] for line in lines] == ["pass", "MISS", "none", "none"]
    assert not passed
    assert verdicts(records, "ddp", limits[:1])[1]


def test_results_come_back_from_their_file(tmp_path: Path) -> None:
    results = Results({"size": "tiny"}, {"ddp": record(1.0), "stage2": Record(skipped="not yet")})
    results.write(tmp_path / "deep" / "run.json")
    assert Results.read(tmp_path / "deep" / "run.json") == results


def test_the_table_has_a_line_per_variant_and_names_what_was_skipped() -> None:
    records = {"single": record(1.0, losses=(2.0, 1.5)), "ddp": record(1.0), "stage2": Record(skipped="not yet")}
    lines = table(records, "ddp", {"single": 16.0, "ddp": 8.0}).splitlines()
    assert [line.split()[0] for line in lines] == ["variant", "single", "ddp", "stage2:"]
    assert "2.000" in lines[2], "16 bytes held, 8 needed"
    assert lines[2].endswith("5e-01"), "losses are compared with the single process"


def test_a_table_without_rounds_or_anchor_still_stands() -> None:
    assert "-" in table({"stage0": Record(losses=[1.0], state_bytes=[16], heap_bytes=[20])}, "ddp", {"stage0": 16.0})


def test_overheads_need_both_sides() -> None:
    records = {"stage0": record(1.0, 1.0), "trainer0": record(1.1, 1.1), "trainer1": record(1.0, 1.0)}
    text = overheads(records, {"trainer0": "stage0", "trainer1": "stage1"})
    assert "trainer0 / stage0  1.100" in text
    assert "trainer1" not in text


def test_loss_difference_is_the_largest() -> None:
    assert loss_difference(record(losses=(2.0, 1.0)), record(losses=(2.5, 1.1))) == 0.5


def test_columns_line_up() -> None:
    assert aligned([["a", "b"], ["long", "1"]]) == "a     b\nlong  1"


def test_a_namespace_is_throttled_only_on_request() -> None:
    assert "tc qdisc" not in " ".join(_in_namespace(["python"], "private"))
    assert "rate 4gbit" in " ".join(_in_namespace(["python"], "4gbit"))
