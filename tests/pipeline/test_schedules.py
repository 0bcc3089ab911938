"""Schedules, lowering and the simulator: pure functions on small lists."""

from __future__ import annotations

import json
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_par.layout import SCHEDULES, Action, Kind
from lightning_par.layout.schedules import read, show
from lightning_par.pipeline import Costs, ScheduleError, forward_plan, simulate, training_plan
from lightning_par.pipeline.draw import draw
from lightning_par.pipeline.lower import lower

SPLIT = ("zb_h1", "zbv")
"""Schedules whose backward is in two parts."""


def chunks_of(name: str) -> list[int]:
    """Those of 1 to 3 that a schedule takes."""
    return [chunks for chunks in (1, 2, 3) if SCHEDULES[name].refusal(chunks) is None]


def parts(name: str) -> str:
    return "FBW" if name in SPLIT else "FB"


def test_actions_print_and_parse() -> None:
    line = "2F0 1RECV_B3 0FREE_F12 1W2"
    assert read(line) == [Action(2, Kind.F, 0), Action(1, Kind.RECV_B, 3), Action(0, Kind.FREE_F, 12), Action(1, Kind.W, 2)]
    assert show(read(line)) == line
    with pytest.raises(ValueError, match="2X0"):
        Action.parse("2X0")


def test_1f1b_is_the_published_order() -> None:
    assert [show(actions) for actions in SCHEDULES["1f1b"](3, 1, 4)] == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_interleaved_1f1b_is_the_published_order() -> None:
    plan = SCHEDULES["interleaved_1f1b"](2, 2, 4)
    assert [show(actions) for actions in plan] == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


def test_zb_h1_is_1f1b_with_weight_gradients_where_a_rank_would_idle() -> None:
    assert draw(simulate(training_plan("zb_h1", 3, 1, 4))).splitlines() == [
        "rank 0  f0 f1 f2 ......b0 w0 f3 b1 w1 b2 w2 b3 w3",
        "rank 1  ...f0 f1 ...b0 f2 b1 w0 f3 b2 w1 b3 w2 w3",
        "rank 2  ......f0 b0 f1 b1 f2 b2 w0 f3 b3 w1 w2 w3",
    ]


def test_zbv_goes_down_and_up_again() -> None:
    assert draw(simulate(training_plan("zbv", 2, 2, 4))).splitlines() == [
        "rank 0  f0 f1 f2 F0 B0 W0 F1 B1 W1 f3 b0 w0 F2 B2 W2 b1 w1 F3 B3 W3 b2 w2 b3 w3 ...",
        "rank 1  ...f0 F0 f1 F1 B0 W0 f2 b0 w0 F2 B1 W1 f3 b1 w1 F3 B2 W2 b2 B3 b3 w2 W3 w3",
    ]


def test_stages_stand_in_rounds_or_in_a_v() -> None:
    assert [SCHEDULES["interleaved_1f1b"].rank_of(stage, 3) for stage in range(9)] == [0, 1, 2] * 3
    assert [SCHEDULES["zbv"].rank_of(stage, 3) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert [SCHEDULES["zbv"].stages_of(rank, 3, 2) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]


def test_lowering_starts_receives_early_and_lets_sent_buffers_go() -> None:
    assert [show(actions) for actions in lower(SCHEDULES["1f1b"](2, 1, 2))] == [
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0FREE_F0 0B1 0FREE_F1",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1FREE_B0 1FREE_B1",
    ]


def test_the_gradient_of_an_input_is_sent_before_the_weights_part() -> None:
    assert [show(actions) for actions in lower(SCHEDULES["zb_h1"](2, 1, 1))] == [
        "0RECV_B0 0F0 0SEND_F0 0B0 0FREE_F0 0W0",
        "1RECV_F0 1F0 1B0 1SEND_B0 1W0 1FREE_B0",
    ]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("latency", [0.0, 3.0])
def test_P7_P8_no_schedule_deadlocks_at_any_number_of_microbatches(name: str, latency: float) -> None:
    for ranks in range(1, 6):
        for chunks in chunks_of(name):
            for microbatches in range(1, 11):
                simulate(training_plan(name, ranks, chunks, microbatches), Costs(latency=latency))


SIZES: dict[str, Any] = {
    "name": st.sampled_from(list(SCHEDULES)),
    "ranks": st.integers(1, 9),
    "microbatches": st.integers(1, 30),
    "data": st.data(),
}


@settings(max_examples=40, deadline=None)
@given(costs=st.builds(Costs, *[st.floats(0.1, 3)] * 3, latency=st.floats(0, 9)), **SIZES)
def test_any_schedule_runs_everything_once_and_in_order(name: str, ranks: int, microbatches: int, data: Any, costs: Costs) -> None:
    chunks = data.draw(st.sampled_from(chunks_of(name)))
    ran = [run for timeline in simulate(training_plan(name, ranks, chunks, microbatches), costs).timeline for run in timeline]
    end = {str(run.action): run.end for run in ran}
    assert len(ran) == len(end) == len(parts(name)) * ranks * chunks * microbatches
    for stage, m in product(range(ranks * chunks), range(microbatches)):
        mine = [end[f"{stage}{letter}{m}"] for letter in parts(name)]
        assert mine == sorted(mine), "forward, then backward, then its weights part"
        if stage > 0:
            assert end[f"{stage - 1}F{m}"] < end[f"{stage}F{m}"]
            assert end[f"{stage}B{m}"] < end[f"{stage - 1}B{m}"]
        if m > 0:
            assert all(end[f"{stage}{letter}{m - 1}"] < end[f"{stage}{letter}{m}"] for letter in parts(name))
    simulate(forward_plan(name, ranks, chunks, microbatches), costs)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b"])
def test_bubble_is_the_published_one(name: str) -> None:
    for ranks in range(1, 6):
        for chunks in chunks_of(name):
            for microbatches in (m for m in range(1, 13) if chunks == 1 or m % ranks == 0):
                bubble = simulate(training_plan(name, ranks, chunks, microbatches)).bubble
                assert bubble == pytest.approx((ranks - 1) / (chunks * microbatches)), (ranks, chunks, microbatches)


@settings(max_examples=20, deadline=None)
@given(ranks=st.integers(1, 9), more=st.integers(0, 12), weights=st.floats(0.3, 1.0))
def test_zb_h1_idles_by_the_published_formula_in_the_memory_of_1f1b(ranks: int, more: int, weights: float) -> None:
    """(p-1)(F+B-W) where the weights part takes no longer than the others (arXiv 2401.10241, table 2)."""
    microbatches = ranks + more
    simulation = simulate(training_plan("zb_h1", ranks, 1, microbatches), Costs(weights=weights))
    idle = simulation.makespan - microbatches * (2 + weights)
    assert idle == pytest.approx((ranks - 1) * (2 - weights))
    assert max(simulation.peak_live) == max(simulate(training_plan("1f1b", ranks, 1, microbatches)).peak_live)


@settings(max_examples=20, deadline=None)
@given(ranks=st.integers(1, 9), microbatches=st.integers(1, 30))
def test_zbv_idles_nowhere_once_the_v_is_full_in_the_memory_of_1f1b(ranks: int, microbatches: int) -> None:
    simulation = simulate(training_plan("zbv", ranks, 2, microbatches))
    if microbatches >= 2 * ranks - 1:
        assert simulation.bubble_rate == pytest.approx(0)
    assert max(simulation.peak_live) <= min(2 * microbatches, 2 * ranks), "halves of a 1F1B stage"


PUBLISHED = Path(__file__).with_name("zero_bubble_table5.json")


@pytest.mark.parametrize(
    ("schedule", "column", "tolerance"),
    [("1f1b", "r_1f1b", 1.5e-4), ("zb_h1", "r_zbh1", 1.5e-4)],
)
def test_bubble_rates_with_communication_are_those_of_table_5(schedule: str, column: str, tolerance: float) -> None:
    """Qi et al., arXiv 2401.10241, tables 5 and 9: rates simulated from profiled times of 1.5B, 6.2B and 14.6B models."""
    for row in json.loads(PUBLISHED.read_text()):
        costs = Costs(row["TF_ms"], row["TB_ms"], row["TW_ms"], row["Tcomm_ms"])
        rate = simulate(training_plan(schedule, row["p"], 1, row["m"]), costs).bubble_rate
        assert rate == pytest.approx(row[column], abs=tolerance), row


def test_peak_activations_are_the_published_ones() -> None:
    for ranks in range(1, 6):
        for microbatches in range(1, 10):
            assert simulate(training_plan("1f1b", ranks, 1, microbatches)).peak_live == [min(microbatches, ranks - i) for i in range(ranks)]
            assert simulate(training_plan("gpipe", ranks, 1, microbatches)).peak_live == [microbatches] * ranks
            assert simulate(training_plan("zb_h1", ranks, 1, microbatches)).peak_live == [min(microbatches, ranks)] * ranks
    assert simulate(forward_plan("interleaved_1f1b", 3, 2, 5)).peak_live == [0, 0, 0]


@pytest.mark.parametrize("name", SCHEDULES)
def test_letting_go_of_sent_buffers_soon_costs_no_time(name: str) -> None:
    for ranks in range(2, 5):
        for chunks in chunks_of(name):
            plan = training_plan(name, ranks, chunks, 2 * ranks)
            assert max(map(_under_way, plan)) <= 3
            without = [[action for action in actions if action.kind not in (Kind.FREE_F, Kind.FREE_B)] for actions in plan]
            for costs in (Costs(), Costs(1, 1, 2, 0.3), Costs(2, 1, 1, 3)):
                assert simulate(plan, costs).makespan == simulate(without, costs).makespan


def _under_way(actions: list[Action]) -> int:
    """The most messages of one stage and direction that were sent and whose buffer was not let go."""
    counts, peak = Counter(), 0
    for action in actions:
        if action.kind in (Kind.SEND_F, Kind.SEND_B, Kind.FREE_F, Kind.FREE_B):
            counts[action.stage, action.kind.value[-1]] += 1 if action.kind.value.startswith("SEND") else -1
            peak = max(peak, *counts.values())
    return peak


def test_messages_are_one_a_boundary_and_direction() -> None:
    assert simulate(training_plan("1f1b", 3, 1, 4)).messages == [4, 8, 4]
    assert simulate(training_plan("zb_h1", 3, 1, 4)).messages == [4, 8, 4]
    assert simulate(training_plan("interleaved_1f1b", 2, 2, 4)).messages == [12, 12]
    assert simulate(training_plan("interleaved_1f1b", 1, 3, 4)).messages == [0]  # from hand to hand
    assert simulate(training_plan("zbv", 2, 2, 4)).messages == [8, 8]  # where the V turns, too


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (["0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"], r"(?s)no rank can go on.*rank 0: 0F0 0SEND_F0 0B0 <-- here"),  # never receives
        (["0F0 0SEND_F0 0RECV_B0 0B0", "1F0 1RECV_F0 1B0 1SEND_B0"], r"(?s)no rank can go on.*1F0 <-- here"),  # receives too late
        (["0F0 0F1 0SEND_F1 0SEND_F0", "1RECV_F0 1RECV_F1 1F0 1F1"], "0SEND_F1 meets 1RECV_F0"),
        (["0F0 0F1 0B0 0B0"], "0B0 is missing, doubled"),
        (["0F0 0F1 0B0"], "missing"),
        (["0F0 0B0 0B1 0F1"], "0B1 runs before its F"),
        (["0F0 0W0 0B0"], "0W0 runs before its B"),
        (["0F0 0F1 0B0 0B1 0W1"], "0W1 is missing, doubled"),
        (["0F1 0F0"], "out of order"),
        (["0F0", "2F0"], "numbered from 0"),
    ],
)
def test_the_simulator_refuses_plans_that_cannot_run(plan: list[str], reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        simulate([read(line) for line in plan])


def test_wrong_sizes_and_names_are_refused() -> None:
    with pytest.raises(ValueError, match="choose one of gpipe, 1f1b"):
        training_plan("2f2b", 2, 1, 4)
    with pytest.raises(ValueError, match="chunks=2: 1f1b runs one stage a rank"):
        training_plan("1f1b", 2, 2, 4)
    with pytest.raises(ValueError, match="chunks=3: zbv runs 2 stages on each rank; set chunks=2"):
        forward_plan("zbv", 2, 3, 4)
    with pytest.raises(ValueError, match="microbatches=0"):
        SCHEDULES["gpipe"](2, 1, 0)


def test_a_plan_is_drawn_as_a_grid() -> None:
    assert draw(simulate(training_plan("1f1b", 2, 1, 2))).splitlines() == [
        "rank 0  f0 f1 ......b0 -- ...b1 --",
        "rank 1  ...f0 b0 -- f1 b1 -- ......",
    ]
