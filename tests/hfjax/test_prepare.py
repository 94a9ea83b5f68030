# SPDX-License-Identifier: Apache-2.0
"""What cannot work is refused before a process starts or a file is written."""

from pathlib import Path
from typing import Any

import pytest

import hfjax
from algorithms import ppo
from hfjax.config import to_toml


def test_the_algorithms_own_settings_are_an_override_of_train(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`train(ppo, algorithm={...})`: the name of the section is no name of a parameter."""
    seen: list[Any] = []

    class Watched:
        out = Path("run")

        def __init__(self, algorithm: Any, config: Any) -> None:
            seen.append(config)

        def __enter__(self) -> "Watched":
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def train(self) -> None:
            pass

    monkeypatch.setattr("hfjax.run.Run", Watched)
    hfjax.train(ppo, algorithm={"gamma": 0.9})
    assert seen[0].algorithm.gamma == 0.9
    assert "gamma = 0.9" in to_toml(seen[0])
