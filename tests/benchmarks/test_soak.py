# SPDX-License-Identifier: Apache-2.0
"""The soak's verdict: what grows with the steps is named, what jitters is not."""

import numpy as np
import pytest

from benchmarks.soak import WARM, report, slope

STEPS = range(0, 200, 10)


def marked(name: str, growth: float, jitter: float = 0.0) -> dict[int, dict[str, float]]:
    """A number of a hundred that grows so much in 100 steps, twice as fast before warm-up."""
    noise = np.random.default_rng(0).normal(size=len(STEPS)) * jitter
    return {
        step: {name: 100 + growth * max(step, WARM) / 100 + noise[at] - 30 * (step < WARM)}
        for at, step in enumerate(STEPS)
    }


def test_slopes_are_those_of_least_squares() -> None:
    rise, error = slope([0, 100, 200], [1.0, 3.0, 2.0])
    assert rise == pytest.approx(0.5)  # from (0, 1) to (200, 2)
    assert error == pytest.approx((1.5 / 2) ** 0.5)  # residuals -0.5, 1, -0.5; one left over


@pytest.mark.parametrize(
    ("name", "growth", "jitter", "fine"),
    [
        ("driver: MB resident", 0.5, 0.0, True),
        ("driver: MB resident", 2.0, 0.1, False),
        ("policy/0: live arrays", 0.0, 2.0, True),
        ("policy/0: live arrays", 0.5, 0.1, False),
    ],
)
def test_memory_may_grow_by_a_hundredth_and_counts_not_at_all(
    name: str, growth: float, jitter: float, fine: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(marked(name, growth, jitter)) == fine
    assert ("GROWS" in capsys.readouterr().out) == (not fine)
