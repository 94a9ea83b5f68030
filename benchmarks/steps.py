# SPDX-License-Identifier: Apache-2.0
"""What a job's steps took, what else the machine did meanwhile, and what the job holds.

Read from /proc, for a process with all that it has started.
"""

import os
import resource
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hfjax.controller.processes import stat_of
from hfjax.controller.worker import COMPILE_EVENT

CLEAN = 0.15  # cores that others may use in a step that counts as undisturbed
TICK = os.sysconf("SC_CLK_TCK")
Line = dict[str, Any]


class Meter:
    """Seconds of steps, what else the machine did meanwhile, and the most memory of all it is."""

    def __init__(self, warmup: int) -> None:
        self.warmup, self.steps = warmup, list[dict[str, float]]()
        self.first_done_s, self.peak = 0.0, 0
        self.first: Path | None = None  # a file that is written to when the first step is done
        self._since = busy_s(), own_s(), time.perf_counter()
        self._ends = threading.Event()
        self._watch = threading.Thread(target=self._sample, daemon=True)
        self._watch.start()

    def add(self, total: float, **parts: float) -> None:
        self.steps.append({"total": total, **parts})
        self.first_done_s = self.first_done_s or age_s()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Times what happens inside."""
        since = busy_s(), own_s(), time.perf_counter()
        yield
        self.add(time.perf_counter() - since[2], others=others(*since))

    def mean_others(self) -> float:
        """Cores that others used since this meter began."""
        return others(*self._since)

    def line(self, tokens: int) -> Line:
        """What the rotation reads; medians are over the undisturbed steps, if there are three."""
        self._ends.set()
        self._watch.join()
        every = self.steps[self.warmup :]
        clean = [step for step in every if step.get("others", 0.0) < CLEAN]
        steady = clean if len(clean) >= 3 else every
        total = statistics.median(step["total"] for step in steady)
        first = sum(max(step["total"] - total, 0.0) for step in self.steps[: self.warmup])
        line = {
            "tokens_per_s": round(tokens / total, 1),
            "step_s_median": round(total, 4),
            "step_s_min": round(min(step["total"] for step in every), 4),
            "step_s_max": round(max(step["total"] for step in every), 4),
            "steps": len(every),
            "clean_steps": len(clean),
            "compile_s": round(first, 3),
            "first_step_done_s": round(self.first_done_s, 2),
            "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
            "peak_rss_all_mb": self.peak >> 20,
            "load1": [None, round(os.getloadavg()[0], 2)],
        }
        for name in sorted({name for step in steady for name in step} - {"total"}):
            key = "other_cores" if name == "others" else f"{name}_s_median"
            found = [step[name] for step in steady if name in step]
            line[key] = round(statistics.median(found), 4)
        if "gen_s_median" in line:
            line["train_s_median"] = round(total - line["gen_s_median"], 4)
        return line

    def _sample(self) -> None:
        while not self._ends.wait(0.25):
            self.peak = max(self.peak, sum(resident(pid) for pid in family()))
            if self.first and self.first.exists() and self.first.stat().st_size:
                self.first_done_s = self.first_done_s or age_s()


def others(busy: float, own: float, at_s: float) -> float:
    """Cores that others have used on average since then."""
    return max(busy_s() - busy - (own_s() - own), 0.0) / (time.perf_counter() - at_s)


def family() -> list[int]:
    """This process and all below it; shared pages count in each."""
    pids = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    parents = {pid: stat_of(pid)[1] for pid in pids}
    found = [os.getpid()]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == str(pid)]
    return found


def resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def busy_s() -> float:
    """Seconds that all cores have worked so far."""
    ticks = [int(x) for x in Path("/proc/stat").read_text().partition("\n")[0].split()[1:]]
    return (sum(ticks) - ticks[3] - ticks[4]) / TICK


def own_s() -> float:
    """Those of this process and of all below it."""
    return sum(int(x) for pid in family() for x in stat_of(pid)[11:15]) / TICK


def age_s() -> float:
    """Seconds since this process began."""
    began = int(stat_of(os.getpid())[19]) / TICK
    return float(Path("/proc/uptime").read_text().split()[0]) - began


def wait_idle(at_most_s: float) -> None:
    """Until others have left the cores alone for two seconds, or so long."""
    until = time.monotonic() + at_most_s
    while time.monotonic() < until:
        since = busy_s(), own_s(), time.perf_counter()
        time.sleep(2)
        if others(*since) < CLEAN:
            return


@dataclass
class Compiles:
    """Programs that XLA compiled, step by step."""

    by_step: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        import jax.monitoring

        def count(event: str, duration_secs: float, **more: Any) -> None:
            if event == COMPILE_EVENT and self.by_step:
                self.by_step[-1] += 1

        jax.monitoring.register_event_duration_secs_listener(count)

    @contextmanager
    def step(self) -> Iterator[None]:
        self.by_step.append(0)
        yield
