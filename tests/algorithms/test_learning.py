# SPDX-License-Identifier: Apache-2.0
"""Each algorithm crosses its line on the embedded task, and a random reward does not."""

from pathlib import Path

import pytest

from benchmarks.learning import passed, run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "remax", "rloo", "reinforce_pp"])
@pytest.mark.parametrize("reward", ["sums", "random"])
def test_reinforcement_learns_what_is_rewarded(algorithm: str, reward: str, tmp_path: Path) -> None:
    row = run(algorithm, 0, reward, tmp_path / "run", "local")
    assert 0.2 <= row["start"] <= 0.5
    assert passed(reward, row), row
