# SPDX-License-Identifier: Apache-2.0
"""trace.json holds what Perfetto reads, also while a run goes on and after it was resumed."""

import json
from pathlib import Path

from hfjax.controller.calls import CallRecord
from hfjax.controller.worker import CallInfo
from hfjax.timeline import CONTROLLER, Timeline


def a_call(number: int, pool: str, *spans: tuple[float, float]) -> CallRecord:
    infos = tuple(
        CallInfo(rank, start, end, 0, {}, rows=4, tokens=9, bytes_in=16, bytes_out=32)
        for rank, (start, end) in enumerate(spans)
    )
    starts, ends = zip(*spans, strict=True)
    where = ("actor", "generate_sequences", pool, min(starts), max(ends))
    return CallRecord(number, 3, *where, 0, frozenset({0}) if number else frozenset(), infos)


def events(path: Path) -> list[dict]:
    """As a viewer reads it: the closing bracket may be missing."""
    return json.loads(path.read_text().rstrip().rstrip(",") + "]")


def test_a_process_has_a_bar_a_call(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    calls = [a_call(0, "policy", (1.0, 2.0), (1.5, 2.5)), a_call(1, "value", (2.0, 4.0))]
    Timeline(path).write(calls, [("adv", 4.0, 4.25)], step=3)
    with path.open("a") as file:
        file.write('{"name": "half')  # killed while writing
    Timeline(path, done=3).write([a_call(2, "policy", (5.0, 6.0))])
    found = events(path)
    bars = [event for event in found if event["ph"] == "X"]
    assert [(e["pid"], e["tid"], e["ts"], e["dur"]) for e in bars[:3]] == [
        (0, 0, 1_000_000, 1_000_000),
        (0, 1, 1_500_000, 1_000_000),
        (1, 0, 2_000_000, 2_000_000),
    ]
    assert bars[2]["args"] == {
        "call": 1,
        "step": 3,
        "after": [0],
        "rows": 4,
        "tokens": 9,
        "bytes_in": 16,
        "bytes_out": 32,
    }
    assert (bars[3]["name"], bars[3]["dur"], len(bars)) == ("adv", 250_000, 5)
    names = {e["pid"]: e["args"]["name"] for e in found if e["ph"] == "M"}
    assert set(names.values()) == {"policy", "value", CONTROLLER}
    assert len({e["pid"] for e in bars}) == 4  # a resume has tracks of its own
    Timeline(path, done=2)
    assert [e for e in events(path) if e["ph"] == "X"] == []  # step 3 comes again
