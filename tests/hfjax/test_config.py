# SPDX-License-Identifier: Apache-2.0
"""Settings: TOML and the command line say the same, and what is written reads back equal."""

import dataclasses
import tomllib
from types import ModuleType
from typing import Any

import pytest

from algorithms import grpo, ppo, rloo, safe_rlhf, sft
from hfjax import cli
from hfjax.algorithm import config_class
from hfjax.config import RolloutConfig, flat, from_dict, to_toml

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


NONE = {"kl": {"where": "none"}}


@pytest.mark.parametrize(
    ("algorithm", "table", "words"),
    [
        (ppo, {"kl": {"where": "none", "coef": 0.5}}, r"kl\.coef=0\.5.*where=none.*0\.001"),
        (rloo, {"kl": {"where": "none", "estimator": "k2"}}, r"kl\.estimator=k2.*leave it k1"),
        (
            safe_rlhf,
            {"multiplier": 0.0, "multiplier_lr": 0.2},
            r"multiplier_lr=0\.2.*leave it 0\.1",
        ),
        (safe_rlhf, {"multiplier": 0.0, "multiplier_max": 9.0}, r"multiplier_max=9\.0.*leave it 5"),
        (safe_rlhf, {"multiplier": 0.0, "cost_limit": 1.0}, r"cost_limit=1\.0.*leave it 0"),
        (grpo, {"overlong_factor": 2.0}, "overlong_factor=2"),
    ],
)
def test_settings_that_another_one_switches_off_are_refused(
    algorithm: ModuleType, table: dict[str, Any], words: str
) -> None:
    cls = config_class(algorithm)
    with pytest.raises(ValueError, match=words):
        from_dict(cls, {"algorithm": table}, where="test")


@pytest.mark.parametrize("algorithm", [ppo, grpo, rloo, safe_rlhf])
def test_the_divergence_is_switched_off_by_one_setting(algorithm: ModuleType) -> None:
    cls = config_class(algorithm)
    config = from_dict(cls, {"algorithm": NONE}, where="test")
    assert "reference" not in algorithm.roles(config.algorithm)
    again = from_dict(cls, tomllib.loads(to_toml(config)), where="test")
    assert again == config


@pytest.mark.parametrize("filters", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_filters_of_what_is_not_sampled_are_refused(filters: dict[str, Any]) -> None:
    (name,) = filters
    assert RolloutConfig(**filters).truncates
    with pytest.raises(ValueError, match=rf"rollout\.{name}=.*with rollout\.temperature=0"):
        RolloutConfig(temperature=0.0, **filters)
