# SPDX-License-Identifier: Apache-2.0
"""Overlap, its picture and idle shares are right for timelines made by hand."""

from pathlib import Path

import pytest

from benchmarks.dispatch import idle_shares
from benchmarks.overlap import across, inside, report, side_by_side, warm_steps
from hfjax.controller.calls import CallRecord
from hfjax.controller.worker import CallInfo
from hfjax.timeline import Bar, Timeline, busy_s, picture, read_bars

GENERATES, SCORES, VALUES = (
    "actor.generate_sequences",
    "actor.compute_log_prob",
    "critic.compute_values",
)
ACTOR, CRITIC, REWARDS = "actor.update_actor", "critic.update_critic", "reward.compute_reward"


def a_step(step: int = 3, at_s: float = 0.0) -> list[Bar]:
    """Two pools, ten seconds: preparation from 1 to 4, training from 5 to 9."""
    spans = [
        (GENERATES, "policy", 0, 1),
        (SCORES, "policy", 1, 4),
        (VALUES, "value", 1.5, 3),
        (REWARDS, "driver", 2, 4.5),
        ("adv", "controller", 3.5, 5),
        (CRITIC, "value", 5, 9),
        (ACTOR, "policy", 5, 8),
    ]
    return [Bar(name, pool, 0, at_s + a, at_s + b, step) for name, pool, a, b in spans]


def without(*names: str) -> list[Bar]:
    return [bar for bar in a_step() if bar.name not in names]


def test_bars_are_those_that_a_timeline_wrote(tmp_path: Path) -> None:
    infos = (CallInfo(0, 1.0, 2.5, 0, {}), CallInfo(1, 1.25, 2.0, 0, {}))
    call = CallRecord(7, 3, "actor", "update_actor", "policy", 1.0, 2.5, 0, frozenset(), infos)
    Timeline(tmp_path / "trace.json").write([call], [("adv", 0.5, 0.75)], step=3)
    assert read_bars(tmp_path / "trace.json") == [
        Bar(ACTOR, "policy", 0, 1.0, 2.5, 3),
        Bar(ACTOR, "policy", 1, 1.25, 2.0, 3),
        Bar("adv", "controller", 0, 0.5, 0.75, 3),
    ]


def test_seconds_across_pools_are_summed_by_names_without_the_controllers_waits() -> None:
    again = [Bar(VALUES, "value", 0, 3.25, 3.75), Bar(VALUES, "value", 1, 0, 9)]
    assert across([*a_step(), *again]) == {
        (ACTOR, CRITIC): 3.0,
        (SCORES, VALUES): 1.5 + 0.5,
        (SCORES, REWARDS): 2.0,
        (VALUES, REWARDS): 1.0 + 0.5,
    }


def test_two_calls_in_one_process_are_found_but_not_ranks_that_end_apart() -> None:
    late = Bar(SCORES, "policy", 1, 1, 5.5)  # the first rank is already in the next call
    assert inside([*a_step(), late]) == 0
    assert inside([*a_step(), Bar(GENERATES, "policy", 0, 7.75, 9)]) == pytest.approx(0.25)


def test_a_report_refuses_what_is_not_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    one_pool = [Bar(GENERATES, "all", 0, 0, 1, 3), Bar(REWARDS, "driver", 0, 1, 2, 3)]
    serial = [*without(CRITIC), Bar(CRITIC, "value", 0, 8, 12, 3)]
    assert report("split", [a_step()])
    assert report("one", [one_pool])
    assert side_by_side(a_step())
    assert not report("split", [a_step(), serial])  # updates one after the other
    assert not report("split", [without(VALUES)])  # the reward function is on no device
    assert not report("one", [[*one_pool, Bar(SCORES, "all", 0, 0.5, 2, 3)]])
    assert f"3000.0 ms a step  {ACTOR} beside {CRITIC}: 100% of the shorter" in (
        capsys.readouterr().out
    )


def test_the_picture_has_a_line_a_process_and_a_letter_a_call() -> None:
    bars = [Bar("x", "a", 0, 0, 36), Bar("y", "a", 0, 36, 72), Bar("z", "b", 1, 72, 72)]
    assert [line.split() for line in picture(bars).splitlines()] == [
        ["a", "0", "A" * 36 + "B" * 36],
        ["b", "1", "." * 71 + "C"],
        ["72000", "ms;", "A", "x", "B", "y", "C", "z"],
    ]


def test_warm_up_and_the_last_step_are_left_out() -> None:
    bars = [bar for step in (0, 5, 4, 3, 2, 1) for bar in a_step(step)]
    assert [{bar.step for bar in step} for step in warm_steps(bars)] == [{3}, {4}]


def test_an_iteration_is_idle_where_no_worker_runs() -> None:
    """Ten seconds: workers run from 0 to 4 and 5 to 9; the reward function until 4.5."""
    assert busy_s(a_step()) == pytest.approx(9)
    bars = [bar for step in range(1, 6) for bar in a_step(step, 10.0 * step)]
    assert idle_shares(bars) == [pytest.approx((0.2, 0.15))]
