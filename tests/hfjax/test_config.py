# SPDX-License-Identifier: Apache-2.0
"""Settings: TOML and the command line say the same, and what is written reads back equal."""

import dataclasses
import tomllib
from types import ModuleType
from typing import Any

import pytest

from algorithms import grpo, ppo, sft
from hfjax import cli
from hfjax.algorithm import config_class
from hfjax.config import flat, from_dict, to_toml

ALGORITHMS = pytest.mark.parametrize("algorithm", [ppo, grpo, sft])


def others(value: Any) -> list[Any]:
    """Other values of a setting, legal or not."""
    if isinstance(value, bool):
        return [not value]
    return [value * 0, value + value / 3, value + 1] if isinstance(value, int | float) else ["x"]


@ALGORITHMS
def test_settings_read_back_as_they_were_written(algorithm: ModuleType) -> None:
    """Each number at 0 and elsewhere, switches turned, texts: where that is legal, one a time."""
    cls = config_class(algorithm)
    tried = 0
    for name, value in flat(dataclasses.asdict(cls())).items():
        for other in others(value):
            table: Any = other
            for part in reversed(name.split(".")):
                table = {part: table}
            try:
                config = from_dict(cls, table, where="test")
            except ValueError:
                continue
            tried += config != cls()
            assert from_dict(cls, tomllib.loads(to_toml(config)), where="test") == config
    assert tried > 30


@pytest.mark.parametrize("algorithm", [ppo, grpo])
def test_dual_clip_can_be_switched_off(algorithm: ModuleType) -> None:
    config = cli.parse(algorithm, ["--algorithm.dual-clip", "0"])
    assert config.algorithm.dual_clip == 0
    again = from_dict(config_class(algorithm), tomllib.loads(to_toml(config)), where="test")
    assert again.algorithm.dual_clip == 0


def test_a_setting_that_toml_cannot_hold_is_refused() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Settings:
        clip: float | None = 3.0

    with pytest.raises(ValueError, match=r"setting algorithm\.clip: TOML has no None"):
        config_class(type("loose", (), {"Settings": Settings, "roles": staticmethod(lambda c: {})}))
