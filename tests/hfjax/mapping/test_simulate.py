# SPDX-License-Identifier: Apache-2.0
"""Timelines of simulated steps are those that a hand would draw."""

from pathlib import Path
from random import Random

import pytest

from hfjax.mapping.period import order
from hfjax.mapping.simulate import (
    Played,
    d_cost,
    idle_shares,
    period_s,
    picture_of,
    play,
    steady_s,
    write_trace,
)
from hfjax.timeline import CONTROLLER, read_bars
from tests.hfjax.mapping.steps import (
    DRIVER,
    GENERATE,
    INFER,
    PPO,
    SAFE,
    TRAIN,
    A,
    C,
    R,
    W,
    a_problem,
    random_problem,
)

APART = {A: "policy", R: "policy", C: "value", W: "value"}
ONE = dict.fromkeys(APART, "all")
# generate 8, log-probs 2, values 1, reference 2, reward 1, driver 1, critic's update 6, actor's 5
SECONDS = {0: 8.0, 1: 2.0, 2: 1.0, 3: 2.0, 4: 1.0, 5: 1.0, 6: 6.0, 7: 5.0}


def spans(played: list[Played], iteration: int = 0) -> list[tuple[float, float]]:
    return [(one.start_s, one.end_s) for one in played if one.iteration == iteration]


def test_one_pool_runs_calls_in_order_with_the_driver_between() -> None:
    played = play(a_problem(*PPO), ONE, SECONDS, iterations=3)
    assert spans(played) == [
        (0, 8), (8, 10), (10, 11), (11, 13), (13, 14), (14, 15), (15, 21), (21, 26)
    ]  # fmt: skip
    assert spans(played, 1)[0] == (26, 34)
    assert period_s(played) == steady_s(a_problem(*PPO), ONE, SECONDS) == 26
    assert {one.pool for one in played} == {"all", CONTROLLER}


def test_pools_prepare_and_train_side_by_side_and_training_overlaps_the_next_generation() -> None:
    """Policy: 8 + 2 + 2, driver to 13, update to 18. Value: 8 to 10, 13 to 19 while the next
    generation runs from 18 on; the next values wait for its tokens at 26.
    """
    played = play(a_problem(*PPO), APART, SECONDS)
    assert spans(played) == [
        (0, 8), (8, 10), (8, 9), (10, 12), (9, 10), (12, 13), (13, 19), (13, 18)
    ]  # fmt: skip
    assert spans(played, 1)[:3] == [(18, 26), (26, 28), (26, 27)]
    assert period_s(played) == steady_s(a_problem(*PPO), APART, SECONDS) == 18
    shares = idle_shares(played)
    assert shares == {"policy": pytest.approx(1 / 18), "value": pytest.approx(10 / 18)}


def test_joined_iterations_do_not_overlap() -> None:
    played = play(a_problem(*PPO), APART, SECONDS, joined=True)
    assert spans(played, 1)[0] == (19, 27)
    assert period_s(played) == steady_s(a_problem(*PPO), APART, SECONDS, joined=True) == 19


def test_columns_that_cross_pools_come_later_but_not_those_of_the_driver() -> None:
    """The critic's values begin half a second after the tokens; the update waits for no more."""
    played = play(a_problem(*PPO), APART, SECONDS, transfer_s=lambda call, a, b: call.bytes_out / 2)
    assert spans(played)[1:8] == [
        (8, 10), (8.5, 9.5), (10, 12), (9.5, 10.5), (12, 13), (13, 19), (13, 18)
    ]  # fmt: skip


def test_what_comes_after_a_driver_call_in_the_program_waits_for_it() -> None:
    """The second pool's call needs nothing, but the driver only then asks for it."""
    problem = a_problem(
        (A, GENERATE, set()), ("f", DRIVER, {0}), (C, INFER, set()), (A, TRAIN, {2})
    )
    played = play(problem, {A: "a", C: "c"}, {0: 3.0, 1: 2.0, 2: 1.0, 3: 1.0}, iterations=2)
    assert spans(played) == [(0, 3), (3, 5), (5, 6), (6, 7)]
    assert spans(played, 1) == [(7, 10), (10, 12), (12, 13), (13, 14)]


def test_the_next_iteration_is_asked_for_after_the_drivers_last_call() -> None:
    """The critic could begin at 1; the driver ends at 5."""
    problem = a_problem((C, INFER, set()), (A, GENERATE, set()), ("f", DRIVER, {1}))
    played = play(problem, {A: "a", C: "c"}, {0: 1.0, 1: 4.0, 2: 1.0}, iterations=2)
    assert spans(played, 1) == [(5, 6), (5, 9), (9, 10)]


def test_without_a_driver_call_a_pool_runs_ahead() -> None:
    problem = a_problem((A, GENERATE, set()), (C, TRAIN, {0}))
    played = play(problem, {A: "a", C: "c"}, {0: 2.0, 1: 3.0}, iterations=4)
    assert spans(played, 3) == [(6, 8), (11, 14)]
    assert period_s(played) == 3


def test_a_cycle_over_two_iterations_sets_the_pace() -> None:
    """No pool works more than 5, and none waits for itself longer. But a's last call waits for
    c's first (1 + 5 + 1 by way of f), and c's last for a's first (1 + 5 + 1 by way of e): from
    a's first call to the next but one are 14.
    """
    problem = a_problem(
        (C, INFER, set()),
        (A, INFER, set()),
        ("e", INFER, {1}),
        ("f", INFER, {0}),
        (A, TRAIN, {3}),
        (C, TRAIN, {2}),
    )
    pools = {role: role for role in problem.models}
    seconds = {0: 1.0, 1: 1.0, 2: 5.0, 3: 5.0, 4: 1.0, 5: 1.0}
    assert steady_s(problem, pools, seconds) == 7
    assert period_s(play(problem, pools, seconds)) == 7


@pytest.mark.parametrize(
    ("calls", "alone", "moving"),
    [
        ([(A, GENERATE, set()), (A, INFER, set()), (C, INFER, {0, 1})], (0, 0, 2), (0, 1, 2)),
        ([(A, GENERATE, set()), (A, INFER, set()), (C, INFER, {0})], (0, 1, 2), (0, 1, 2)),
        ([(A, INFER, set()), (C, INFER, {0}), (C, TRAIN, {0})], (0, 1, 1), (0, 1, 1)),
        ([(A, INFER, set()), (C, INFER, set()), (C, TRAIN, {0})], (0, 1, 2), (0, 1, 2)),
        (
            [(A, INFER, set()), ("f", DRIVER, {0}), (C, INFER, {1}), (C, TRAIN, {0})],
            (0, 1, 2, 2),
            (0, 1, 2, 3),
        ),
    ],
)
def test_calls_count_as_one_only_where_nothing_comes_or_goes_between(
    calls: list, alone: tuple[int, ...], moving: tuple[int, ...]
) -> None:
    """Columns that take time to come may come between where the calls before them do not show."""
    problem = a_problem(*calls)
    for moves, leads in ((False, alone), (True, moving)):
        assert order(problem.calls, {A: 0, C: 1}, 2, moves).leads == leads


@pytest.mark.parametrize("seed", range(60))
def test_the_long_run_is_what_many_iterations_come_to(seed: int) -> None:
    random = Random(seed)
    problem = random_problem(random, random.randint(1, 4))
    pools = {role: random.choice("xyz") for role in problem.models}
    seconds = {call.number: random.randint(0, 12) / 4 for call in problem.calls}
    moved = random.choice([None, lambda call, a, b: call.number / 8])
    joined = seed % 4 == 0
    given = {"transfer_s": moved, "joined": joined}
    long = play(problem, pools, seconds, iterations=181, **given)
    ends = [max(end for _, end in spans(long, k)) for k in (60, 180)]
    # 120 is a multiple of every cycle's length
    assert steady_s(problem, pools, seconds, **given) == pytest.approx((ends[1] - ends[0]) / 120)


def test_pools_share_a_hosts_cores_by_their_devices() -> None:
    """Eight devices of a host: a has 2, b has 6. Alone a runs 4 times as fast, b 4/3 times.

    a's call: 8 s at full load; b's: 2 s. Both run at rate 1 until 2; a's other 6 take 6/4 s.
    Then b's second call, 4 s, alone: 3 s.
    """
    problem = a_problem((A, INFER, set()), (C, INFER, set()), (C, TRAIN, {0}))
    devices = {"a": 2, "b": 6}
    given = {"devices": devices, "shares": 8, "iterations": 1}
    played = play(problem, {A: "a", C: "b"}, {0: 8.0, 1: 2.0, 2: 4.0}, **given)
    assert spans(played) == [(0, 3.5), (0, 2), (3.5, 6.5)]


def test_a_host_has_one_seconds_work_a_second_and_the_driver_takes_none_of_it() -> None:
    """Seconds times the pool's share of the devices; the driver's second comes on top."""
    whole = {"devices": {"all": 8}, "shares": 8}
    assert period_s(play(a_problem(*PPO), ONE, SECONDS, **whole)) == pytest.approx(26)
    half = {"devices": {"policy": 4, "value": 4}, "shares": 8}
    work = sum(s for number, s in SECONDS.items() if number != 5) / 2
    period = period_s(play(a_problem(*PPO), APART, SECONDS, **half))
    assert work < period <= work + 1 + 1e-9
    joined = play(a_problem(*PPO), APART, SECONDS, joined=True, **half)
    assert period_s(joined) == pytest.approx(work + 1)


def test_without_contention_a_shared_host_plays_as_any_other() -> None:
    """With as many devices as share, pools that never run together keep their seconds."""
    problem = a_problem((A, GENERATE, set()), (C, INFER, {0}), ("f", DRIVER, {1}), (A, TRAIN, {2}))
    pools, seconds = {A: "a", C: "c"}, {0: 3.0, 1: 2.0, 2: 1.0, 3: 4.0}
    shared = play(problem, pools, seconds, devices={"a": 8, "c": 8}, shares=8)
    assert shared == play(problem, pools, seconds)


def test_d_cost_sums_in_a_set_and_takes_the_most_of_the_sets() -> None:
    """Generation 8; preparation max(2 + 2, 1 + 1); training max(5, 6); the driver is free."""
    problem = a_problem(*PPO)
    assert d_cost(problem, [(A, R), (C, W)], SECONDS) == 8 + 4 + 6
    assert d_cost(problem, [(A, R, C, W)], SECONDS) == 25
    assert d_cost(problem, [(A,), (R,), (C,), (W,)], SECONDS) == 8 + 2 + 6


def test_the_picture_and_the_trace_show_the_simulated_calls(tmp_path: Path) -> None:
    played = play(a_problem(*PPO), APART, SECONDS)
    lines = picture_of(played, 1).splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["policy", "value", CONTROLLER]
    assert "actor.generate" in lines[-1]
    assert "critic.train" in lines[-1]
    write_trace(tmp_path / "trace.json", played)
    write_trace(tmp_path / "trace.json", played)  # replaces the one before
    bars = read_bars(tmp_path / "trace.json")
    assert [(b.name, b.pool, b.begin_s, b.end_s, b.step) for b in bars] == [
        (f"{one.call.role}.{one.call.method}", one.pool, one.start_s, one.end_s, one.iteration + 1)
        for one in played
    ]
    assert '"simulated": true' in (tmp_path / "trace.json").read_text()


def test_safe_rlhf_waits_for_the_costs_reading_of_rewards() -> None:
    apart = {role: role for role in (A, C, R, W, "cost")}
    seconds = dict.fromkeys(range(9), 1.0)
    assert spans(play(a_problem(*SAFE), apart, seconds))[5:] == [(2, 3), (3, 4), (4, 5), (4, 5)]
