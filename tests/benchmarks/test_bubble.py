# SPDX-License-Identifier: Apache-2.0
"""The pipeline's schedule has m + p - 1 ticks, by the compiled program's own count."""

import os

import pytest

from benchmarks import bubble


def test_ticks_are_those_of_the_schedule(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # put back what the command sets
    monkeypatch.setattr(bubble, "TOKENS", 8)
    assert bubble.main(["--stages", "2", "--micros", "1", "3"]) == 0
    table = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    assert ["1", "2", "1"] in table
    assert ["3", "4", "1"] in table
