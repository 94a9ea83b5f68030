# SPDX-License-Identifier: Apache-2.0
"""The mapper's benchmark at its smallest: 7B on 8 GPUs, simulated."""

import pytest

from benchmarks import placement, points, relatives, systems
from benchmarks.simulated import (
    Setting,
    best,
    colocate,
    doubled,
    near,
    placements,
    split,
    standalone,
)
from hfjax.mapping.work import Kind

PPO = Setting("ppo", "7b")


def test_the_step_is_the_papers() -> None:
    """Eight lines, of which the actor's own scoring is none; Safe-RLHF has five models."""
    calls = [(call.role, call.method) for call in PPO.problem.calls if call.kind is not Kind.DRIVER]
    assert ("actor", "compute_log_prob") not in calls
    assert len(calls) == 6
    assert len(Setting("safe-rlhf", "7b").problem.models) == 5


def test_a_placement_by_hand_costs_what_the_search_says_of_it() -> None:
    found = best(PPO, 8, "paper")
    assert found
    given = placements(PPO, "paper", 8).given(found.sets, [sum(p.devices) for p in found.pools])
    assert given
    assert (given.value, given.d_cost) == (found.value, found.d_cost)
    for sets in (colocate(PPO.problem), split(PPO.problem), standalone(PPO.problem)):
        other = placements(PPO, "paper", 8).allocated(sets, 8)
        assert other is None or other.value >= found.value


def test_placements_that_do_not_fit_are_none() -> None:
    room = placements(Setting("ppo", "70b"), "paper", 8)
    assert room.given(colocate(room.problem), [8]) is None


@pytest.mark.parametrize("name", list(systems.SYSTEMS))
def test_other_systems_take_longer(name: str) -> None:
    found, ours = systems.SYSTEMS[name](PPO, 8), best(PPO, 8, "paper")
    assert found
    assert ours
    assert set(found.calls) == {c.number for c in PPO.problem.calls if c.kind is not Kind.DRIVER}
    assert found.seconds > ours.seconds


def test_preparation_and_learning_overlap_and_generation_waits() -> None:
    """Of two halves the longer counts in both stages; a critic that learns longer delays all."""
    setting = Setting("ppo", "7b", "13b")
    found = systems.SYSTEMS["NeMo-Aligner"](setting, 16)
    assert found
    generate, critic, reference, reward, learn_critic, learn_actor = (
        found.calls[number] for number in (0, 1, 2, 3, 5, 6)
    )
    assert learn_critic > learn_actor
    stages = generate + max(reference, critic + reward) + learn_critic
    assert found.seconds == pytest.approx(stages)


def test_shares_of_the_script_are_scaled() -> None:
    shares = {"actor": 8, "critic": 8, "reference": 4, "reward": 4, "rollout": 8}
    assert systems.allocation(PPO, 32) == shares
    shares = {"actor": 2, "critic": 2, "reference": 1, "reward": 1, "cost": 1, "rollout": 1}
    assert systems.allocation(Setting("safe-rlhf", "7b"), 8) == shares
    shares = {"actor": 4, "reference": 1, "reward": 1, "rollout": 2}
    assert systems.allocation(Setting("remax", "7b"), 8) == shares


def test_the_known_plan_is_priced_as_it_was_measured() -> None:
    """The three constants of the profile are fitted to such steps: within 20 %, and it fits."""
    first = relatives.MEASURED[0]
    found = relatives.heuristic(relatives.setting_of("7b", "7b", first.length), first.gpus)
    assert found.fits
    assert found.seconds == pytest.approx(first.heuristic_s, rel=relatives.SECONDS_WITHIN)
    large = relatives.heuristic(relatives.setting_of("70b", "70b", 128), 32)
    assert not large.fits


def test_verdicts_follow_the_numbers() -> None:
    assert points.number("", 60.0, 58.0, "").verdict == "matched"
    assert points.number("", 60.0, 80.0, "far").verdict.startswith("not matched: far; 1.33 x")
    assert not points.share("", 81.2, 99.6, "").matched  # what is left is a fiftieth
    assert points.number("", 81.2, 99.6, "").matched
    assert points.number("", 10.0, 12.0, "", " s").matched
    assert placement.range_verdict((1.0, 9.0), (1.1, 8.0)) == "matched"
    assert placement.range_verdict((1.0, 9.0), (2.0, 3.0)) == (
        "not matched: low end 0.50 x, high end 3.00 x theirs"
    )
    assert near(75, 100)
    assert not near(74, 100)


def test_winners_are_compared_with_their_devices() -> None:
    sets = colocate(PPO.problem)
    found = best(PPO, 8, "paper")
    assert found
    point = points.winner(PPO, 8, "colocate", sets, [8])
    assert point.matched == (found.sets == sets)
    other = points.winner(PPO, 8, "split", split(PPO.problem), [4, 4])
    assert not other.matched or found.sets == split(PPO.problem)


def test_tables_say_that_they_are_simulated() -> None:
    texts = [
        placement.grid_text([PPO], [8]),
        placement.systems_text(["ppo"], ["7b"], most=8),
        placement.relatives_text(relatives.MEASURED[:2], [], []),
        placement.heading(""),
    ]
    for text in texts:
        for table in text.split("\n\n"):
            assert "SIMULATED" in table.splitlines()[0]
    document = placement.document({"placement grid": texts[0]})
    assert "SIMULATED" in document.splitlines()[0]
    assert texts[0] in document


def test_sizes_double() -> None:
    assert doubled(32) == [32, 64, 128]
