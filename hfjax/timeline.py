# SPDX-License-Identifier: Apache-2.0
"""What each process and the controller did when: for Perfetto, as text, seconds by stage."""

import contextlib
import itertools
import json
import os
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfjax.controller.calls import CallRecord
from hfjax.controller.handle import RECEIVE, SEND

STAGES = {  # method -> verl's name of the stage
    "generate_sequences": "gen",
    "compute_reward": "reward",
    "compute_log_prob": "old_log_prob",
    "compute_ref_log_prob": "ref",
    "compute_values": "values",
}
CONTROLLER, DRIVER = "controller", "driver"  # its stages, and the pool of roles beside it
HERE = (CONTROLLER, DRIVER)  # they have no devices
COLUMNS = 72  # of the picture


@dataclass(frozen=True)
class Bar:
    """One call in one process, or a stage of the controller; seconds by the host's clock."""

    name: str
    pool: str
    rank: int
    begin_s: float
    end_s: float
    step: int = 0

    def shared_s(self, other: "Bar") -> float:
        """Seconds in which both run; negative, those between them."""
        return min(self.end_s, other.end_s) - max(self.begin_s, other.begin_s)


class Timeline:
    """Appends events to a file in the Trace Event Format, whose closing bracket may be missing."""

    def __init__(self, path: str | Path, done: int = 0) -> None:
        """Of a file that is there, of the same run before it was resumed, steps to `done` stay.

        Numbers of calls begin anew after a resume, and each beginning has tracks of its own.
        """
        self._path, kept = Path(path), []
        for line in self._path.read_text().splitlines()[1:] if self._path.exists() else []:
            with contextlib.suppress(json.JSONDecodeError):  # a last line that is half written
                event = json.loads(line.rstrip(","))
                kept += [event] if event["args"].get("step", 0) <= done and done else []
        self._first = 1 + max((event["pid"] for event in kept), default=-1)
        self._tracks: dict[str, int] = {}  # a pool's name -> its process number in the picture
        fresh = self._path.with_name(f"{self._path.name}.new")
        fresh.write_text("[\n" + "".join(json.dumps(event) + ",\n" for event in kept))
        os.replace(fresh, self._path)

    def write(
        self,
        calls: Sequence[CallRecord],
        spans: Iterable[tuple[str, float, float]] = (),
        step: int = 0,
    ) -> None:
        """Calls, and the controller's own stages in a step."""
        events = [event for call in calls for event in self._events(call)]
        about = {"step": step}
        events += [
            self._event(name, CONTROLLER, 0, (begin, end), about) for name, begin, end in spans
        ]
        self._append(events)

    def write_bars(self, bars: Iterable[Bar], **about: Any) -> None:
        """Bars that no process reported, as those of a simulation; `about` goes with each."""
        events = [
            self._event(b.name, b.pool, b.rank, (b.begin_s, b.end_s), {"step": b.step, **about})
            for b in bars
        ]
        self._append(events)

    def _append(self, events: Iterable[Mapping[str, Any]]) -> None:
        with self._path.open("a") as file:
            file.writelines(json.dumps(event) + ",\n" for event in [*self._names(), *events])

    def _events(self, call: CallRecord) -> Iterable[dict[str, Any]]:
        for info in call.infos:
            sizes = {n: getattr(info, n) for n in ("rows", "tokens", "bytes_in", "bytes_out")}
            about = {"call": call.number, "step": call.step, "after": sorted(call.inputs)}
            span, name = (info.start_s, info.end_s), f"{call.role}.{call.method}"
            yield self._event(name, call.pool, info.rank, span, about | sizes)

    def _event(
        self, name: str, pool: str, rank: int, span: tuple[float, float], args: Any = None
    ) -> dict[str, Any]:
        begin, end = (round(second * 1e6) for second in span)
        track = self._tracks.setdefault(pool, self._first + len(self._tracks))
        where = {"pid": track, "tid": rank, "ts": begin, "dur": end - begin}
        return {"name": name, "ph": "X", **where, "args": args or {}}

    def _names(self) -> Iterable[dict[str, Any]]:
        for pool, track in self._tracks.items():
            yield {"name": "process_name", "ph": "M", "pid": track, "args": {"name": pool}}


def read_bars(path: Path) -> list[Bar]:
    """The bars of a timeline."""
    events = json.loads(path.read_text().rstrip().rstrip(",") + "]")
    pools = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    return [
        Bar(
            e["name"],
            pools[e["pid"]],
            e["tid"],
            e["ts"] / 1e6,
            (e["ts"] + e["dur"]) / 1e6,
            e["args"].get("step", 0),
        )
        for e in events
        if e["ph"] == "X"
    ]


def busy_s(bars: Iterable[Bar]) -> float:
    """Seconds in which at least one of the bars runs."""
    total_s, until_s = 0.0, float("-inf")
    for bar in sorted(bars, key=lambda bar: bar.begin_s):
        total_s += max(0.0, bar.end_s - max(bar.begin_s, until_s))
        until_s = max(until_s, bar.end_s)
    return total_s


def picture(bars: Sequence[Bar]) -> str:
    """A line a process: letters of its calls, over one step."""
    begin_s, end_s = min(bar.begin_s for bar in bars), max(bar.end_s for bar in bars)
    scale = COLUMNS / (end_s - begin_s)
    names = list(dict.fromkeys(bar.name for bar in sorted(bars, key=lambda bar: bar.begin_s)))
    letters = dict(zip(names, string.ascii_letters.swapcase(), strict=False))
    lines: dict[tuple[bool, str, int], list[str]] = {}
    for bar in bars:
        line = lines.setdefault((bar.pool in HERE, bar.pool, bar.rank), ["."] * COLUMNS)
        first, last = (int((at - begin_s) * scale) for at in (bar.begin_s, bar.end_s))
        for column in range(min(first, COLUMNS - 1), min(max(last, first + 1), COLUMNS)):
            line[column] = letters[bar.name]
    width = max(10, *(len(pool) for _, pool, _ in lines))
    rows = [f"  {key[1]:>{width}} {key[2]}  {''.join(lines[key])}" for key in sorted(lines)]
    legend = "  ".join(f"{letter} {name}" for name, letter in letters.items())
    return "\n".join([*rows, f"  {(end_s - begin_s) * 1e3:.0f} ms; {legend}"])


def stage_seconds(calls: list[CallRecord]) -> dict[str, float]:
    """Seconds by stage: from the first process that began a call to the last that ended."""
    seconds: dict[str, float] = {}
    for transfer, group in itertools.groupby(calls, lambda call: call.method in (SEND, RECEIVE)):
        found = list(group)
        for stage, call in ((STAGES.get(c.method, c.method), c) for c in found if not transfer):
            seconds[stage] = seconds.get(stage, 0.0) + call.end_s - call.start_s
        if transfer:  # between pools, side by side: what lies between calls counts too
            took_s = max(call.end_s for call in found) - min(call.start_s for call in found)
            seconds["update_weights"] = seconds.get("update_weights", 0.0) + took_s
    return seconds
