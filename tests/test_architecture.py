# SPDX-License-Identifier: Apache-2.0
"""The house rules that a reader may rely on, checked by reading the sources."""

import ast
from pathlib import Path

import pytest

from meshes.mesh import FSDP, PIPE_MICRO, TENSOR_MICRO

ROOT = Path(__file__).parent.parent
ROOMS = ("meshes", "hfjax", "algorithms")  # each may import itself and the rooms before it
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
ALL = sorted(
    path for folder in (*ROOMS, "benchmarks", "tests") for path in (ROOT / folder).rglob("*.py")
)
MOST_LINES = 450  # look again at 350
AXIS_NAMES = {FSDP, PIPE_MICRO, TENSOR_MICRO}


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _imports(path: Path) -> set[str]:
    """Top-level packages that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(path.relative_to(ROOT).parts[0] if node.level else _first(node.module))
    return found


def _first(module: str | None) -> str:
    return (module or "").partition(".")[0]


def test_the_rooms_are_here() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in SOURCES} == set(ROOMS)


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_imports_go_one_way(path: Path) -> None:
    room = ROOMS.index(path.relative_to(ROOT).parts[0])
    forbidden = {*ROOMS[room + 1 :], "benchmarks", "tests"}
    assert not _imports(path) & forbidden


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_no_pickle_and_no_torch_at_run_time(path: Path) -> None:
    assert not _imports(path) & {"pickle", "cloudpickle", "dill", "torch", "transformers"}


@pytest.mark.parametrize(
    "path", [path for path in SOURCES if _name(path).split("/")[0] != "meshes"], ids=_name
)
def test_mesh_axes_are_spelled_in_meshes_only(path: Path) -> None:
    texts = {
        node.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert not texts & AXIS_NAMES


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_functions_say_what_they_return(path: Path) -> None:
    functions = (
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    assert [f.name for f in functions if f.returns is None] == []


@pytest.mark.parametrize("path", ALL, ids=_name)
def test_files_say_licence_and_purpose_first(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n")
    assert ast.get_docstring(ast.parse(text)), "the first docstring line is the file's purpose"


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_files_stay_readable(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MOST_LINES
