"""Schedules, lowering and the simulator: pure functions on small lists."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_par.pipeline import SCHEDULES, Costs, ScheduleError, forward_plan, simulate, training_plan
from lightning_par.pipeline.actions import Action, Kind, read, show
from lightning_par.pipeline.draw import draw
from lightning_par.pipeline.lower import lower
from lightning_par.pipeline.schedules import gpipe, one_forward_one_backward

ONE_CHUNK = ("gpipe", "1f1b")


def chunks_of(name: str) -> tuple[int, ...]:
    return (1,) if name in ONE_CHUNK else (1, 2, 3)


def test_actions_print_and_parse() -> None:
    line = "2F0 1RECV_B3 0FREE_F12"
    assert read(line) == [Action(2, Kind.F, 0), Action(1, Kind.RECV_B, 3), Action(0, Kind.FREE_F, 12)]
    assert show(read(line)) == line
    with pytest.raises(ValueError, match="2X0"):
        Action.parse("2X0")


def test_1f1b_is_the_published_order() -> None:
    assert [show(actions) for actions in one_forward_one_backward(3, 1, 4)] == [
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


def test_lowering_starts_receives_early_and_lets_sent_buffers_go() -> None:
    assert [show(actions) for actions in lower(one_forward_one_backward(2, 1, 2))] == [
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0FREE_F0 0B1 0FREE_F1",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1FREE_B0 1FREE_B1",
    ]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("latency", [0.0, 3.0])
def test_P7_P8_no_schedule_deadlocks_at_any_number_of_microbatches(name: str, latency: float) -> None:
    for ranks in range(1, 6):
        for chunks in chunks_of(name):
            for microbatches in range(1, 11):
                simulation = simulate(training_plan(name, ranks, chunks, microbatches), Costs(latency=latency))
                assert sum(map(len, simulation.timeline)) == 2 * ranks * chunks * microbatches


@settings(max_examples=30, deadline=None)
@given(
    ranks=st.integers(1, 9),
    chunks=st.integers(1, 4),
    microbatches=st.integers(1, 30),
    costs=st.builds(Costs, st.floats(0.1, 3), st.floats(0.1, 3), st.floats(0, 9)),
)
def test_interleaved_and_forward_only_run_at_any_size(ranks: int, chunks: int, microbatches: int, costs: Costs) -> None:
    simulate(training_plan("interleaved_1f1b", ranks, chunks, microbatches), costs)
    simulate(forward_plan(ranks, chunks, microbatches), costs)


@pytest.mark.parametrize("name", SCHEDULES)
def test_bubble_is_the_published_one(name: str) -> None:
    for ranks in range(1, 6):
        for chunks in chunks_of(name):
            for microbatches in (m for m in range(1, 13) if name in ONE_CHUNK or m % ranks == 0):
                bubble = simulate(training_plan(name, ranks, chunks, microbatches)).bubble
                assert bubble == pytest.approx((ranks - 1) / (chunks * microbatches)), (ranks, chunks, microbatches)


def test_peak_activations_are_the_published_ones() -> None:
    for ranks in range(1, 6):
        for microbatches in range(1, 10):
            assert simulate(training_plan("1f1b", ranks, 1, microbatches)).peak_live == [min(microbatches, ranks - i) for i in range(ranks)]
            assert simulate(training_plan("gpipe", ranks, 1, microbatches)).peak_live == [microbatches] * ranks
    assert simulate(forward_plan(3, 2, 5)).peak_live == [0, 0, 0]


@pytest.mark.parametrize("name", SCHEDULES)
def test_letting_go_of_sent_buffers_costs_no_time(name: str) -> None:
    for ranks in range(2, 5):
        for chunks in chunks_of(name):
            plan = training_plan(name, ranks, chunks, 2 * ranks)
            without = [[action for action in actions if action.kind not in (Kind.FREE_F, Kind.FREE_B)] for actions in plan]
            assert simulate(plan).makespan == simulate(without).makespan


def test_messages_are_one_a_boundary_and_direction() -> None:
    assert simulate(training_plan("1f1b", 3, 1, 4)).messages == [4, 8, 4]
    assert simulate(training_plan("interleaved_1f1b", 2, 2, 4)).messages == [12, 12]
    assert simulate(training_plan("interleaved_1f1b", 1, 3, 4)).messages == [0]  # from hand to hand


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (["0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"], r"(?s)no rank can go on.*rank 0: 0F0 0SEND_F0 0B0 <-- here"),  # never receives
        (["0F0 0SEND_F0 0RECV_B0 0B0", "1F0 1RECV_F0 1B0 1SEND_B0"], r"(?s)no rank can go on.*1F0 <-- here"),  # receives too late
        (["0F0 0F1 0SEND_F1 0SEND_F0", "1RECV_F0 1RECV_F1 1F0 1F1"], "0SEND_F1 meets 1RECV_F0"),
        (["0F0 0F1 0B0 0B0"], "0B0 is missing, doubled"),
        (["0F0 0F1 0B0"], "missing"),
        (["0F0 0B0 0B1 0F1"], "0B1 runs before its forward"),
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
    with pytest.raises(ValueError, match="microbatches=0"):
        gpipe(2, 1, 0)


def test_a_plan_is_drawn_as_a_grid() -> None:
    assert draw(simulate(training_plan("1f1b", 2, 1, 2))).splitlines() == [
        "rank 0  f0 f1 ......b0 -- ...b1 --",
        "rank 1  ...f0 b0 -- f1 b1 -- ......",
    ]
