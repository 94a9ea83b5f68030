# SPDX-License-Identifier: Apache-2.0
"""What others wrote: JSON and TOML within bounds, texts that steer no terminal."""

import io
import logging
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from hfjax import cli
from hfjax.files import MOST_JSON_BYTES, fingerprint, free_bytes, printable, read_json
from hfjax.metrics import console_block, make_console
from meshes.toml import MOST_BYTES, toml_file


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "cannot be read as JSON.*recursion"),
        (b"\xff\xfe", "not text in UTF-8"),
        (b'{"a": ' + b"9" * 6000 + b"}", "cannot be read as JSON.*4300 digits"),
        (b"[1]", "holds a list"),
        (b'{"a": 1}' + b" " * MOST_JSON_BYTES, "at most"),
    ],
    ids=lambda value: value[:9] if isinstance(value, bytes) else "",
)
def test_json_that_cannot_be_taken_is_refused_by_name(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "some.json").write_bytes(content)
    with pytest.raises(ValueError, match=f"{tmp_path}/some.json.*{message}"):
        read_json(tmp_path / "some.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a = " + "[" * 5000, "recursion"),
        ("a." * 50_000 + "a = 1", "line 1 has a key of more than 100 dots"),
        ("'a' . 'b.b'" + " . a" * 50_000 + " = 1", "line 1 has a key of more than 100 dots"),
        ('x = """\n\\""""""\ny = { ' + "a." * 50_000 + "a = 1 }", "line 3 has a key of more"),
        ("a = 1\n\nb = = 2", "line 3, column 5"),
        ("a = \xff", "line 1, column 5"),
    ],
    ids=["deep", "dotted", "quoted", "inline", "syntax", "value"],
)
def test_toml_that_cannot_be_taken_is_refused_by_name(
    tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "some.toml").write_text(content)
    with pytest.raises(ValueError, match=f"{tmp_path}/some.toml: not valid TOML.*{message}"):
        toml_file(tmp_path / "some.toml")


def test_toml_that_is_no_text_of_its_length_is_refused_without_talk_of_syntax(
    tmp_path: Path,
) -> None:
    (tmp_path / "long.toml").write_text("# " + "x" * 2**18)
    for name, message in (("long.toml", "has 262146 bytes; at most 262144"), ("", "cannot be")):
        with pytest.raises(ValueError, match=f"^{tmp_path / name} {message}"):
            toml_file(tmp_path / name)


def test_dots_in_comments_texts_and_numbers_are_no_parts_of_keys(tmp_path: Path) -> None:
    dots = "." * 400
    lines = [
        f"# {dots}",
        f'a = "{dots} \\"# {dots}"',
        f"b = '{dots}\\'",
        f'c = """{dots}\n# {dots} "" {dots}"""""',
        f"d = '''{dots}\n\\'''",
        "e = [" + "1.5, " * 400 + "]",
    ]
    (tmp_path / "some.toml").write_text("\n".join(lines))
    found = toml_file(tmp_path / "some.toml")
    assert found["e"] == [1.5] * 400
    assert found["c"].endswith('""')


@pytest.mark.parametrize("part", ['"""\\', '"\\', "'''", "'", '"', "#", "a.", "[", ",a.="])
def test_no_text_takes_long_to_look_through(tmp_path: Path, part: str) -> None:
    (tmp_path / "some.toml").write_text(part * (MOST_BYTES // len(part)))
    began_s = time.process_time()
    with suppress(ValueError):
        toml_file(tmp_path / "some.toml")
    assert time.process_time() - began_s < 2


HOSTILE = "\x1b[2J\x1b]0;owned\x07 [red]:smile: \u202eé\r\x9b31m"


def test_texts_of_models_and_data_steer_no_terminal() -> None:
    shown = printable(HOSTILE)
    assert shown == "\\x1b[2J\\x1b]0;owned\\x07 [red]:smile: \\u202eé\\r\\x9b31m"
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=200)
    console.print(console_block({f"val-core/{HOSTILE}/score": 1.0}, 1))
    assert shown in out.getvalue()
    assert "\x1b[2J" not in out.getvalue()


def test_warnings_and_refusals_of_the_command_line_are_shown_printable(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["train", "ppo", "--model", HOSTILE]) == 2
    error = capsys.readouterr().err
    assert "\\x1b[2J" in error
    assert not {"\x1b", "\x07", "\r"} & set(error)
    record = logging.LogRecord("x", logging.WARNING, "", 1, "%s", (HOSTILE,), None)
    assert cli._handler().format(record) == f"WARNING {printable(HOSTILE)}"


@pytest.mark.parametrize(
    ("group", "folder", "files"),
    [
        ("0::/a/b", "a/b", {"memory.max": "1000", "memory.current": "700"}),
        ("0::/a/b", "a", {"memory.max": "1000", "memory.current": "700"}),
        ("0::/", ".", {"memory.max": "1000", "memory.current": "700"}),
        ("0::/a/b", "a", {"memory.max": "max", "memory.current": "700"}),
        ("4:cpu,memory:/a", "memory/a", {"memory.limit_in_bytes": "1000"}),
        ("4:cpu,memory:/elsewhere", "memory", {"memory.limit_in_bytes": "1000"}),
    ],
)
def test_a_containers_limit_bounds_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, folder: str, files: dict[str, str]
) -> None:
    monkeypatch.setattr("hfjax.files.PROC", tmp_path / "proc")
    monkeypatch.setattr("hfjax.files.CGROUPS", tmp_path / "cgroup")
    (tmp_path / "proc/self").mkdir(parents=True)
    assert free_bytes() == 1 << 62
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 8 kB\nHugePages: 0\n")
    assert free_bytes() == 8192
    (tmp_path / "proc/self/cgroup").write_text(f"9:cpu:/\n{group}\n")
    assert free_bytes() == 8192
    (where := tmp_path / "cgroup" / folder).mkdir(parents=True)
    stat = "anon 1\ninactive_file 100\ntotal_inactive_file 100\n"
    for name, text in ({"memory.usage_in_bytes": "700", "memory.stat": stat} | files).items():
        (where / name).write_text(f"{text}\n")
    assert free_bytes() == (8192 if "max" in files.values() else 400)


def test_paths_with_brackets_are_printed_as_they_are() -> None:
    console = make_console()
    console.file = io.StringIO()
    console.print("run directory: runs/[bold]:smile:")
    assert console.file.getvalue() == "run directory: runs/[bold]:smile:\n"


@pytest.mark.parametrize("size", [1000, 40 << 20])
def test_models_of_one_size_with_other_weights_differ_in_their_fingerprints(
    size: int, tmp_path: Path
) -> None:
    weights = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(weights.tobytes())
    before = fingerprint(str(tmp_path))
    assert fingerprint(str(tmp_path)) == before
    weights[size // 3 : size // 2] += 1
    (tmp_path / "model.safetensors").write_bytes(weights.tobytes())
    assert fingerprint(str(tmp_path)) != before
    assert fingerprint(str(tmp_path / "model.safetensors")) != before
