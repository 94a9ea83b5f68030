# SPDX-License-Identifier: Apache-2.0
"""trace.json: what each process and the controller did when, for Perfetto or chrome://tracing."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hfjax.controller.calls import CallRecord

DRIVER = "controller"


class Timeline:
    """Appends events to a file in the Trace Event Format, whose closing bracket may be missing."""

    def __init__(self, path: str | Path) -> None:
        """A file that is there, of the same run before it was resumed, is continued."""
        self._path = Path(path)
        self._tracks: dict[str, int] = {}  # a pool's name -> its process number in the picture
        if not self._path.exists():
            self._path.write_text("[\n")

    def write(
        self, calls: Sequence[CallRecord], spans: Iterable[tuple[str, float, float]] = ()
    ) -> None:
        """The calls of a step, and the controller's own stages."""
        events = [event for call in calls for event in self._events(call)]
        events += [self._event(name, DRIVER, 0, (begin, end)) for name, begin, end in spans]
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
        track = self._tracks.setdefault(pool, len(self._tracks))
        where = {"pid": track, "tid": rank, "ts": begin, "dur": end - begin}
        return {"name": name, "ph": "X", **where, "args": args or {}}

    def _names(self) -> Iterable[dict[str, Any]]:
        for pool, track in self._tracks.items():
            yield {"name": "process_name", "ph": "M", "pid": track, "args": {"name": pool}}
