# SPDX-License-Identifier: Apache-2.0
"""trace.json: what each process and the controller did when, for Perfetto or chrome://tracing."""

import contextlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hfjax.controller.calls import CallRecord

CONTROLLER = "controller"


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
