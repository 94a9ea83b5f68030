# SPDX-License-Identifier: Apache-2.0
"""Faults done to real runs, in short; `python -m benchmarks.faults` does all of them."""

import pytest

from benchmarks import faults

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_a_worker_that_is_killed_costs_what_the_table_says() -> None:
    assert faults.main(["--only", "worker killed", "--placements", "processes"]) == 0


def test_runs_killed_three_times_at_random_are_those_never_killed() -> None:
    """Twice without Ray, once with two pools."""
    placements = ["--placements", "local", "two"]
    assert faults.main(["kills", "--times", "3", "--steps", "10", *placements]) == 0
