# SPDX-License-Identifier: Apache-2.0
"""Algorithms are found by name or path, and by what algorithm_name says of them."""

import random
import sys
from pathlib import Path

import pytest

from algorithms import ppo
from hfjax.algorithm import algorithm_name, load_algorithm
from hfjax.controller.ray_pool import _packed

SOURCE = """
from dataclasses import dataclass
from functools import partial
from hfjax.roles import Reward

@dataclass(frozen=True, kw_only=True)
class Settings:
    scale: float = 1.0

def roles(cfg):
    return {"reward": partial(Reward, model=cfg)}

def step(m, prompts, cfg):
    return prompts, m
"""


@pytest.mark.parametrize("file", ["random.py", "my.algo.py", "with-dash.py"])
def test_a_file_of_any_name_hides_no_module_and_is_found_again(file: str, tmp_path: Path) -> None:
    path = tmp_path / file
    path.write_text(SOURCE)
    module = load_algorithm(str(path))
    assert sys.modules["random"] is random
    assert "." not in module.__name__
    assert algorithm_name(module) == str(path)
    assert load_algorithm(algorithm_name(module)).Settings().scale == 1.0


def test_workers_get_an_algorithms_own_file_by_value(tmp_path: Path) -> None:
    """They cannot import it: the names in its source travel instead of the module's."""
    (tmp_path / "mine.py").write_text(SOURCE)
    module = load_algorithm(str(tmp_path / "mine.py"))
    packed = _packed(module.roles(module.Settings())["reward"])
    assert b"scale" in packed


def test_shipped_algorithms_are_found_by_their_short_name() -> None:
    assert load_algorithm(algorithm_name(ppo)) is ppo


def test_a_file_finds_its_neighbours_and_a_name_what_is_in_this_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "neighbour_of_mine.py").write_text(SOURCE)
    (tmp_path / "mine.py").write_text("from neighbour_of_mine import Settings, roles, step")
    package = tmp_path / "package_of_mine"
    package.mkdir()
    (package / "deep.py").write_text(SOURCE)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    assert load_algorithm(str(tmp_path / "mine.py")).Settings().scale == 1.0
    monkeypatch.setattr(sys, "path", sys.path[:-1])
    monkeypatch.chdir(tmp_path)
    assert load_algorithm("package_of_mine.deep").Settings().scale == 1.0
