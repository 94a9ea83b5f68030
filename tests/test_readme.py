# SPDX-License-Identifier: Apache-2.0
"""What the README says is so: its commands parse, its tables match the tree."""

import importlib.util
import re
import shlex
import tomllib
from pathlib import Path

import pytest

import hfjax.models.llama
from hfjax import cli
from hfjax.algorithm import load_algorithm

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
ROOMS = ("meshes", "hfjax", "algorithms")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
COMMANDS = [line for kind, block in BLOCKS if kind == "" for line in block.splitlines()]
SET_UP = "python3 -m venv .venv && .venv/bin/pip install -q -e "


def section(title: str) -> str:
    """The text under a heading."""
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def first_cells(text: str) -> list[str]:
    """What stands between backticks in the first column of a table's rows."""
    rows = re.findall(r"^\|(.*?)\|", text, re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def commands_of(program: str) -> list[str]:
    """Commands of the code blocks that start with `program`, parts of && chains too."""
    parts = [part.strip() for line in COMMANDS for part in line.split("&&")]
    return [part for part in parts if part.startswith(program)]


def test_two_commands_set_everything_up_themselves() -> None:
    whole = [line for line in COMMANDS if line.startswith(SET_UP)]
    assert whole == [
        f"{SET_UP}. && .venv/bin/hfjax train ppo",
        f"{SET_UP}'.[test]' && .venv/bin/pytest",
    ]


def test_the_test_command_is_what_ci_runs() -> None:
    lines = (ROOT / ".ci/run").read_text().splitlines()
    assert f"{SET_UP}'.[test]' && .venv/bin/pytest" in lines


@pytest.mark.parametrize("command", commands_of("hfjax train "))
def test_training_commands_parse(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [example] = [block for kind, block in BLOCKS if kind == "python" and "def step(" in block]
    (tmp_path / "reinforce.py").write_text(example)
    monkeypatch.chdir(tmp_path)
    _, _, algorithm, *arguments = shlex.split(command, comments=True)
    settings = cli.parse(load_algorithm(algorithm), arguments)
    assert settings.data.prompts_per_step


def test_other_commands_exist() -> None:
    for command in commands_of("hfjax export "):
        assert len(shlex.split(command, comments=True)) == 4
    modules = [shlex.split(command)[2] for command in commands_of("python -m ")]
    assert modules
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []


def test_room_map_is_the_tree() -> None:
    named = {name for name in first_cells(section("Room map")) if name.endswith(".py")}
    assert {name for name in named if not (ROOT / name).is_file()} == set()
    found = {path for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    bare = {path for path in found if path.name == "__init__.py" and path.parent.name != "hfjax"}
    tree = {str(path.relative_to(ROOT)) for path in found - bare}
    assert {name for name in named if not name.startswith("benchmarks/")} == tree


def test_presets_are_listed() -> None:
    text = section("Add a placement")
    presets = {path.stem for path in (ROOT / "meshes/presets").glob("*.toml")}
    assert {name for name in presets if f"`{name}`" not in text} == set()


def test_letters_are_those_of_the_model() -> None:
    docstring = hfjax.models.llama.__doc__ or ""
    table = "".join(f"{line[2:]}\n" for line in docstring.splitlines() if line.startswith("  "))
    assert "K kv heads" in table
    assert ("", table) in BLOCKS


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [name for names in project["optional-dependencies"].values() for name in names]
    needed = {re.split(r"[<>=]", name)[0] for name in project["dependencies"] + extras}
    assert set(first_cells(section("Dependencies"))) - set(project["optional-dependencies"]) == (
        needed
    )
