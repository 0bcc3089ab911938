"""`lightning-par plan pipeline`, in this process."""

from __future__ import annotations

import ast
from functools import partial
from pathlib import Path

import pytest

from lightning_par.cli import plan
from lightning_par.layout import SCHEDULES
from lightning_par.pipeline import Costs, figure, simulate, training_plan


@pytest.fixture
def command(in_process):
    return partial(in_process, "plan")


def test_a_schedule_is_drawn_with_its_numbers(command):
    assert command("pipeline", "pp=2", "chunks=2", "microbatches=4", "schedule=interleaved", "backward=1", "weights=0") == "\n".join(
        [
            "interleaved_1f1b pp=2 chunks=2 microbatches=4, forward 1, backward 1 (gradients of weights 0), latency 0",
            "",
            "rank 0  f0 f1 F0 F1 f2 B0 f3 B1 F2 b0 F3 b1 ...B2 ...B3 b2 b3",
            "rank 1  ...f0 f1 F0 B0 F1 B1 f2 b0 f3 b1 F2 B2 F3 B3 b2 b3 ...",
            "",
            "f forward · b backward · w gradients of weights, with the micro-batch; capitals: every other stage of a rank; a column is 1",
            "",
            "step 18 · ideal 16 · bubble 0.125 of ideal · idle 11.1% of the step",
            "",
            "rank  stages   idle  peak live  of its micro-batch  messages sent",
            "   0    0, 2  11.1%          5                 2.5             12",
            "   1    1, 3  11.1%          3                 1.5             12",
            "",
            "peak live: most (stage, micro-batch) pairs whose activations a rank holds at once, and how many micro-batches of all its",
            "stages that is",
            "",
        ]
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_number_is_the_simulators(command, name):
    chunks = 2 if name in ("zbv", "interleaved_1f1b") else 1
    costs = {"forward": 2, "backward": 5, "weights": 1.5, "latency": 0.5}
    said = command("pipeline", "pp=3", f"chunks={chunks}", "microbatches=5", f"schedule={name}", *(f"{k}={v}" for k, v in costs.items()))
    simulation = simulate(training_plan(name, 3, chunks, 5), Costs(2, 3.5, 1.5, 0.5))
    assert f"step {simulation.makespan:g} · " in said
    assert f"bubble {simulation.bubble:.3f} of ideal" in said
    rows = [line.split() for line in said.splitlines() if line.startswith("   ")]
    assert [int(row[-1]) for row in rows] == simulation.messages
    assert [int(row[-3]) for row in rows] == simulation.peak_live
    assert "a column is 0.5" in said


def test_the_default_number_of_micro_batches_is_the_layouts(command):
    assert "1f1b pp=4 chunks=1 microbatches=4, forward 1, backward 2 (gradients of weights 1)" in command("pipeline")
    assert "zbv pp=3 chunks=2 microbatches=6" in command("pipeline", "schedule=zbv", "pp=3", "chunks=2")


def test_long_lines_are_broken_in_step(monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "40")
    lines = command("pipeline", "pp=2", "microbatches=12").splitlines()
    assert max(len(line) for line in lines if line.startswith("rank ") and "stages" not in line) <= 40
    assert [line[:6] for line in lines[2:9]] == ["rank 0", "rank 1", "", "rank 0", "rank 1", "", "rank 0"]
    assert lines[2].startswith("rank 0  f0  f1  ")


def test_times_too_fine_for_a_grid_are_told_in_numbers(command):
    said = command("pipeline", "forward=1.0001", "backward=1.7")
    assert "too fine for a grid" in said
    assert "peak live" in said


def test_everything_that_is_wrong_is_told_at_once_with_what_is_allowed(command):
    said = command("pipeline", "ranks=2", "pp=0", "loud", "schedule=zb", "chunks=[1", "forward=-1", "latency=x", "out=grid.gif", "pp=3")
    for reason in (
        "'ranks' is no key: choose among pp, schedule, chunks, microbatches, forward, backward, weights, latency, out",
        "'loud': write key=value",
        "pp=0: a degree is a whole number of at least 1",
        "pp=3: pp is given twice",
        "schedule='zb': choose one of gpipe, 1f1b, interleaved_1f1b, zb_h1, zbv",
        "chunks='[1': a degree",
        "forward=-1: a time is a number that is not negative",
        "latency='x': a time",
        "out=grid.gif: the picture is written as .svg or .png",
        "usage: lightning-par plan pipeline",
    ):
        assert reason in said, said


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["chunks=2"], "chunks=2: 1f1b runs one stage a rank"),
        (["schedule=zbv"], "chunks=1: zbv runs 2 stages on each rank; set chunks=2"),
        (["microbatches=0"], "microbatches=0: give a whole number of at least 1"),
        (["backward=0"], "backward=0: must take some time"),
        (["weights=3"], "weights=3 is a part of backward=2: give at most that"),
        (["weights=true"], "weights=True: a time"),
        (["forward=.inf"], "forward=inf: a time"),
        (["out=nowhere/grid.svg"], "out=nowhere/grid.svg: there is no folder nowhere"),
    ],
)
def test_what_cannot_be_planned_is_refused(command, words, reason):
    assert reason in command("pipeline", *words)


def test_what_to_plan_must_be_said(command):
    assert "'memory' cannot be planned; there is: pipeline" in command("memory")
    for asked in ([], ["--help"], ["pipeline", "--help"]):
        assert command(*asked) == plan.USAGE


def test_a_picture_needs_matplotlib_and_says_how_to_get_it(monkeypatch, command, tmp_path):
    monkeypatch.setattr(figure, "find_spec", lambda name: None)
    assert "out=grid.svg: pictures need matplotlib, which is not installed: pip install 'lightning-par[plots]'" in command(
        "pipeline", "out=grid.svg"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_the_picture_shows_every_box_and_the_numbers(command, tmp_path, schedule):
    pytest.importorskip("matplotlib")
    chunks = 2 if schedule == "zbv" else 1
    words = ["pipeline", "pp=2", "microbatches=3", f"schedule={schedule}", f"chunks={chunks}"]
    assert "written to grid.svg" in command(*words, "out=grid.svg")
    svg = (tmp_path / "grid.svg").read_text()
    simulation = simulate(training_plan(schedule, 2, chunks, 3), Costs())
    for rank in range(2):
        assert f"rank {rank}: peak live {simulation.peak_live[rank]}, sends {simulation.messages[rank]}" in svg
    assert f"{schedule} pp=2 chunks={chunks} microbatches=3: bubble {simulation.bubble:.3f}" in svg
    assert ("gradients of weights" in svg) == (schedule == "zbv")
    command(*words, "out=again.svg")
    assert (tmp_path / "again.svg").read_text() == svg, "the same plan is the same picture"
    command(*words, "out=grid.png")
    assert (tmp_path / "grid.png").read_bytes()[:4] == b"\x89PNG"


def test_matplotlib_is_imported_inside_functions_only():
    tree = ast.parse(Path(figure.__file__).read_text())
    top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not any("matplotlib" in ast.unparse(node) for node in top)
