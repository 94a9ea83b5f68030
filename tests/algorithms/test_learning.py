# SPDX-License-Identifier: Apache-2.0
"""Each algorithm crosses its line on the embedded task, and a random reward does not."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.learning import UNCONSTRAINED, passed, run
from hfjax.algorithm import algorithm_names

pytestmark = pytest.mark.slow

SHORT = ("--steps", "30", "--actor.optimizer.lr", "3e-4")
OPTIONS = {  # of a run and its control; the others are as the benchmark has them
    **dict.fromkeys(("ppo", "grpo", "remax", "rloo", "reinforce_pp"), SHORT),
    UNCONSTRAINED: ("--steps", "40"),
}
RUNS = [(name, reward) for name in algorithm_names() for reward in ("sums", "random")]


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A run and its control are the same programs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("programs")))
        yield


@pytest.mark.parametrize(("name", "reward"), [*RUNS, (UNCONSTRAINED, "sums")])
def test_what_is_rewarded_is_learned_and_chance_is_not(
    name: str, reward: str, tmp_path: Path
) -> None:
    """Safe RLHF learns under its limit on costs, which it breaks when it only watches them."""
    options = OPTIONS.get(name, ())
    if (name, reward) == ("safe_rlhf", "random"):
        options = ("--steps", "40")  # half: what chance does is plain by then
    row = run(name, 0, reward, tmp_path / "run", "local", *options)
    assert 0.2 <= row["start"] <= 0.7
    assert passed(name, reward, row), row
