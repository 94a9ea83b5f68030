# SPDX-License-Identifier: Apache-2.0
"""What runs beside what: PPO on one pool and on two, from the timelines that the runs write.

    python -m benchmarks.overlap [--placements cpu8_colocate cpu8_split] [--steps 6] [--out DIR]

Exit status 1 when calls of one pool overlap, or where a placement has several and neither
preparation nor training does. Simulated
devices share the cores of this host: overlap shows in the picture more than in the seconds.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks.figure14 import host

DEADLINE_S = 1200  # of a run
WARM = 2  # first steps, which compile
COLUMNS = 72  # of the picture
TOLERANCE_S = 1e-4  # of two clocks of one host
DRIVER = "driver"  # the pool of roles beside the controller: a reward function
BESIDE = {  # what two pools must do side by side
    frozenset(("critic.compute_values", "reference.compute_ref_log_prob")),
    frozenset(("critic.update_critic", "actor.update_actor")),
}


@dataclass(frozen=True)
class Bar:
    """One call in one process, or a stage of the controller; seconds by the host's clock."""

    name: str
    pool: str
    rank: int
    begin_s: float
    end_s: float
    step: int

    def shared_s(self, other: "Bar") -> float:
        """Seconds in which both run."""
        return min(self.end_s, other.end_s) - max(self.begin_s, other.begin_s)


def read_bars(path: Path) -> list[Bar]:
    """The bars of a timeline; the controller's have step 0."""
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


def inside(bars: Sequence[Bar]) -> float:
    """The most seconds that two calls of one pool share, on any of its processes."""
    same = (
        a.shared_s(b) for a, b in combinations(bars, 2) if a.pool == b.pool and a.name != b.name
    )
    return max(0.0, max(same, default=0.0))


def across(bars: Sequence[Bar]) -> dict[tuple[str, str], float]:
    """Seconds that calls of different pools share, by their names, of first ranks."""
    found: dict[tuple[str, str], float] = {}
    for a, b in combinations([bar for bar in bars if bar.rank == 0], 2):
        if a.pool != b.pool and (shared := a.shared_s(b)) > TOLERANCE_S:
            names = (a.name, b.name)
            found[names] = found.get(names, 0.0) + shared
    return found


def picture(bars: Sequence[Bar]) -> str:
    """A line a process: its calls' first letters, over one step."""
    begin_s, end_s = min(bar.begin_s for bar in bars), max(bar.end_s for bar in bars)
    scale = COLUMNS / (end_s - begin_s)
    names = list(dict.fromkeys(bar.name for bar in sorted(bars, key=lambda bar: bar.begin_s)))
    letters = dict(zip(names, "ABCDEFGHIJKLMNOPQRSTUVWXYZ", strict=False))
    lines: dict[tuple[str, int], list[str]] = {}
    for bar in bars:
        line = lines.setdefault((bar.pool, bar.rank), ["."] * COLUMNS)
        first, last = (int((at - begin_s) * scale) for at in (bar.begin_s, bar.end_s))
        for column in range(first, min(max(last, first + 1), COLUMNS)):
            line[column] = letters[bar.name]
    rows = [f"  {pool:>10} {rank}  {''.join(line)}" for (pool, rank), line in lines.items()]
    legend = "  ".join(f"{letter} {name}" for name, letter in letters.items())
    return "\n".join([*rows, f"  {(end_s - begin_s) * 1e3:.0f} ms; {legend}"])


def run(placement: str, steps: int, out: Path) -> list[dict[str, Any]]:
    """Runs PPO with a timeline; its metrics."""
    command = [sys.executable, "-m", "hfjax.cli", "train", "ppo", "--placement", placement]
    command += ["--steps", str(steps), "--eval-every", "0", "--trace", "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=DEADLINE_S)
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["training/global_step"] > WARM]


def report(placement: str, records: Sequence[dict[str, Any]], bars: Iterable[Bar]) -> bool:
    """Prints what overlapped in the steps after warm-up; whether it is as it must be."""
    warm = [bar for bar in bars if bar.step > WARM and bar.pool != DRIVER]
    steps = sorted({bar.step for bar in warm})
    pools = {bar.pool for bar in warm}
    step_s = statistics.median(record["timing_s/step"] for record in records)
    wrong_s = max(inside([bar for bar in warm if bar.step == step]) for step in steps)
    shared: dict[tuple[str, str], float] = {}
    for step in steps:
        for names, seconds in across([bar for bar in warm if bar.step == step]).items():
            shared[names] = shared.get(names, 0.0) + seconds / len(steps)
    print(f"{placement}: {step_s:.3f} s a step, median of {len(records)}; pools {len(pools)}")
    print(f"  inside a pool at most {wrong_s * 1e3:.1f} ms overlap")
    for (one, other), seconds in sorted(shared.items(), key=lambda item: -item[1]):
        print(f"  {seconds * 1e3:8.1f} ms a step  {one} beside {other}")
    print(picture([bar for bar in warm if bar.step == steps[-1]]), flush=True)
    found = {frozenset(names) for names in shared}
    return wrong_s <= TOLERANCE_S and (len(pools) < 2 or found >= BESIDE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs each placement and prints its picture; 1 where the order in a pool is not kept."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap")
    parser.add_argument("--placements", nargs="+", default=["cpu8_colocate", "cpu8_split"])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    if options.steps <= WARM:
        parser.error(f"--steps {options.steps}: {WARM} are for warming up; use {WARM + 1} or more")
    out = options.out or Path(tempfile.mkdtemp(prefix="hfjax-overlap-"))
    print(f"PPO on the embedded model; {host()}")
    fine = True
    for placement in options.placements:
        records = run(placement, options.steps, out / placement)
        fine &= report(placement, records, read_bars(out / placement / "trace.json"))
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
