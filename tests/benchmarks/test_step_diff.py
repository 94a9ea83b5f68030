# SPDX-License-Identifier: Apache-2.0
"""Steps are compared line by line, in the branches that settings take."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import step_diff


def test_the_claims_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert step_diff.main() == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert next(row[3:] for row in rows if row[:2] == ["ppo", "source"]) == ["0", "0"]
    assert ["+batch", "|=", "m.cost.compute_cost(batch)"] in rows


def test_only_branches_that_settings_take_are_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(step=a_step, Settings=SimpleNamespace)
    monkeypatch.setattr(step_diff, "load_algorithm", lambda name: module)
    first = ["x = m.one()", "x |= m.two()", "x |= m.three()", "return x"]
    assert step_diff.lines("toy", {"far": True}) == first
    assert step_diff.lines("toy", {"far": False}) == ["x = m.one()", "x |= m.four()", "return x"]
    assert step_diff.lines("toy")[1:3] == ["if cfg.far:", "    x |= m.two()"]
    assert step_diff.changes(["a", "b"], ["a", "c"]) == [" a", "-b", "+c"]


def a_step(m: Any, cfg: Any) -> Any:
    """Two ways."""
    x = m.one()
    if cfg.far:
        x |= m.two()
    x |= m.three() if cfg.far else m.four()
    return x


@pytest.mark.parametrize(
    ("of", "change"),
    [
        ("safe_rlhf", lambda lines: [*lines, "more()", "more()", "more()"]),
        ("remax", lambda lines: [*lines, "m.actor.generate_sequences(prompts)"]),
        ("remax", lambda lines: [*lines, "m.critic.compute_values(batch)"]),
    ],
)
def test_a_claim_that_fails_is_told(
    of: str, change: Callable[[list[str]], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = step_diff.lines

    def changed(name: str, settings: dict[str, Any] | None = None) -> list[str]:
        found = lines(name, settings)
        return change(found) if name == of else found

    monkeypatch.setattr(step_diff, "lines", changed)
    assert step_diff.main() == 1
