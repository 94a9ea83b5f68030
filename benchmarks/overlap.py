# SPDX-License-Identifier: Apache-2.0
"""What runs beside what: PPO on one pool and on two, from the timelines that the runs write.

    python -m benchmarks.overlap [--placements cpu8_colocate cpu8_split] [--steps 12] [--rounds 3]

Exit status 1 where two calls overlap in one process, or where a placement has several pools and in
some step they do not prepare side by side, or do not train side by side.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path

from benchmarks.figure14 import host
from hfjax.timeline import CONTROLLER, HERE, Bar, picture, read_bars

DEADLINE_S = 1200  # of a run
WARM = 2  # first steps, which compile
TOLERANCE_S = 1e-4  # of the processes' clocks
PREPARE = {
    "actor.compute_log_prob",
    "critic.compute_values",
    "reference.compute_ref_log_prob",
    "reward.compute_reward",
}
TRAIN = {"critic.update_critic", "actor.update_actor"}


def warm_steps(bars: Iterable[Bar]) -> list[list[Bar]]:
    """The bars of each step after warm-up but the last, which an evaluation and a save follow."""
    steps: dict[int, list[Bar]] = {}
    for bar in bars:
        steps.setdefault(bar.step, []).append(bar)
    return [steps[step] for step in sorted(steps) if WARM < step < max(steps)]


def inside(bars: Sequence[Bar]) -> float:
    """The most seconds that two calls share in one process."""
    same = (a.shared_s(b) for a, b in combinations(bars, 2) if (a.pool, a.rank) == (b.pool, b.rank))
    return max(0.0, max(same, default=0.0))


def across(bars: Sequence[Bar]) -> dict[tuple[str, str], float]:
    """Seconds that calls of different pools share, by their names in order, of first ranks.

    The controller's stages are left out: most of what they do is wait.
    """
    found: dict[tuple[str, str], float] = {}
    first = [bar for bar in bars if bar.rank == 0 and bar.pool != CONTROLLER]
    for a, b in combinations(first, 2):
        if a.pool != b.pool and (shared_s := a.shared_s(b)) > TOLERANCE_S:
            names = min(a.name, b.name), max(a.name, b.name)
            found[names] = found.get(names, 0.0) + shared_s
    return found


def side_by_side(bars: Sequence[Bar]) -> bool:
    """Whether devices of different pools prepare at the same time, and train at the same time."""
    found = across([bar for bar in bars if bar.pool not in HERE])
    return all(any({*names} <= stage for names in found) for stage in (PREPARE, TRAIN))


def run(placement: str, steps: int, out: Path) -> list[float]:
    """Runs PPO with a timeline; seconds of its steps after warm-up."""
    command = [sys.executable, "-m", "hfjax.cli", "train", "ppo", "--placement", placement]
    command += ["--steps", str(steps), "--eval-every", "0", "--no-tensorboard", "--trace"]
    command += ["--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=DEADLINE_S)
    records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [r["timing_s/step"] for r in records if r["training/global_step"] > WARM]


def report(placement: str, steps: Sequence[list[Bar]]) -> bool:
    """Prints what overlapped in these steps; whether it is as it must be."""
    pools = {bar.pool for bars in steps for bar in bars} - {*HERE}
    wrong_s = max(map(inside, steps))
    shared: dict[tuple[str, str], float] = {}
    took: dict[str, float] = {}
    for bars in steps:
        for names, seconds in across(bars).items():
            shared[names] = shared.get(names, 0.0) + seconds
        for bar in bars:
            took[bar.name] = took.get(bar.name, 0.0) + (bar.end_s - bar.begin_s) * (bar.rank == 0)
    print(f"{placement}: pools {', '.join(sorted(pools))}; {len(steps)} steps")
    print(f"  two calls in one process share at most {wrong_s * 1e3:.1f} ms")
    for names, seconds in sorted(shared.items(), key=lambda item: -item[1]):
        share = seconds / min(took[name] for name in names)
        print(f"  {seconds / len(steps) * 1e3:7.1f} ms a step  {' beside '.join(names)}", end="")
        print(f": {share:.0%} of the shorter")
    print(picture(steps[-1]), flush=True)
    return wrong_s <= TOLERANCE_S and (len(pools) < 2 or all(map(side_by_side, steps)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the placements in turn and prints their pictures and seconds; 1 where order breaks."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap")
    parser.add_argument("--placements", nargs="+", default=["cpu8_colocate", "cpu8_split"])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    if options.steps < WARM + 2:
        parser.error(f"--steps {options.steps}: the first {WARM} and the last are left out")
    out = options.out or Path(tempfile.mkdtemp(prefix="hfjax-overlap-"))
    print(f"PPO on the embedded model; {host()}")
    seconds: dict[str, list[float]] = {name: [] for name in options.placements}
    steps: dict[str, list[list[Bar]]] = {name: [] for name in options.placements}
    for run_number in range(options.rounds * len(seconds)):
        name = list(seconds)[run_number % len(seconds)]
        folder = out / f"{Path(name).stem}-{run_number}"
        seconds[name].append(statistics.median(run(name, options.steps, folder)))
        steps[name] += warm_steps(read_bars(folder / "trace.json"))
    fine = [report(name, steps[name]) for name in options.placements]
    print("seconds a step: median of the runs' medians (least, most); runs in turn")
    for name, medians in seconds.items():
        middle_s = statistics.median(medians)
        print(f"  {name:16} {middle_s:.3f} ({min(medians):.3f}, {max(medians):.3f})")
    print("Simulated devices share this host's cores: overlap shows in the picture, less in time.")
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
