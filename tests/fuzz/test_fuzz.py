# SPDX-License-Identifier: Apache-2.0
"""Damaged inputs at every door: each works or is refused by name, at once, without a trace."""

import os
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.doors import (
    CASE_S,
    DOORS,
    SETTINGS,
    Door,
    damages,
    forget_peak,
    limited,
    listing,
    peak_bytes,
    resident_bytes,
)

MOST_GROWTH = 100 << 20
SHORT, LONG = 8, 80  # cases a door


class Case(NamedTuple):
    """How one input ended."""

    message: str | None  # of a refusal, None where the input was taken
    grown: int  # bytes of memory that are kept after it
    peak: int  # and the most during it


def refused_or_works(door: Door, folder: Path, file: Path, damaged: bytes) -> Case:
    """Refused by name or taken; all else fails the test."""
    good = file.read_bytes()
    file.write_bytes(damaged)
    before = listing(folder)
    message = None
    forget_peak()
    base = resident_bytes()
    try:
        with limited(CASE_S):
            door.read(folder)
    except ValueError as error:
        message = str(error)
        names = [file.name, str(file.parent), str(folder / "run/checkpoints")]
        names += SETTINGS if file.suffix == ".toml" else []
        assert any(name in message for name in names), f"names nothing: {message!r:.500}"
        assert len(message) < 20_000
    case = Case(message, resident_bytes() - base, peak_bytes() - base)
    assert listing(folder) == before
    file.write_bytes(good)
    return case


class Shown(NamedTuple):
    """A file's content that is not printed whole."""

    content: bytes

    def __repr__(self) -> str:
        return f"{len(self.content)} bytes"


def fuzz(name: str, folder: Path, cases: int) -> None:
    door = DOORS[name]
    targets = door.write(folder)
    goods = {file: file.read_bytes() for file in targets}
    door.read(folder)
    ended: list[Case] = []

    @settings(
        max_examples=cases,
        deadline=None,
        derandomize="HFJAX_FUZZ_RANDOM" not in os.environ,
        database=None,
        phases=[Phase.generate],  # files are small: the damaged one is left for a look
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def run(data: st.DataObject) -> None:
        file = data.draw(st.sampled_from(targets))
        damaged = data.draw(damages(door, goods[file]).map(Shown)).content
        ended.append(refused_or_works(door, folder, file, damaged))

    run()
    refused = sum(case.message is not None for case in ended)
    grown = max(sum(case.grown for case in ended), *(case.peak for case in ended))
    print(f"{name}: {len(ended)} cases, {refused} refused, at most {grown >> 20} MiB more")
    assert grown <= MOST_GROWTH
    assert len(ended) >= min(cases, 5)


@pytest.mark.parametrize("name", DOORS)
def test_damaged_input_works_or_is_refused_by_name(name: str, tmp_path: Path) -> None:
    fuzz(name, tmp_path, SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("name", DOORS)
def test_much_damaged_input_works_or_is_refused_by_name(name: str, tmp_path: Path) -> None:
    fuzz(name, tmp_path, LONG)
