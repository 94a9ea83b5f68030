# SPDX-License-Identifier: Apache-2.0
"""A run killed at random moments and resumed until it is done, for `benchmarks.faults kills`."""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.victims import Victim, differences

PLACED = {"local": 2, "two": 1, "processes": 1}  # placement -> its share of the kills
WHOM = ("driver", "worker", "save")  # in a save it is one of the other two
LATER_S = 0.5  # of a save


class Killer:
    """Kills runs of one placement; how often, and what became of them."""

    def __init__(self, folder: Path, placed: str, steps: int, times: int, seed: int) -> None:
        self.folder, self.placed, self.times = folder, placed, times
        self.over = {"steps": steps, "keep_last": 2}
        self.chance = random.Random(f"{seed} {placed}")
        self.kills: dict[str, int] = dict.fromkeys(WHOM, 0)
        self.runs = 0
        self.wrong: list[str] = []
        self.whole = Victim(folder / "whole", placed, self.over)
        start_s = time.monotonic()
        self.whole.start()
        if status := self.whole.end():
            raise RuntimeError(f"the undisturbed run ended with {status}: {self.whole.said()}")
        self.whole_s = time.monotonic() - start_s

    @property
    def total(self) -> int:
        return sum(self.kills.values())

    def go(self) -> None:
        """Runs, until there were kills enough."""
        while self.total < self.times:
            self.runs += 1
            victim = Victim(self.folder / f"run-{self.runs}", self.placed, self.over)
            while (status := self.once(victim)) in (1, -signal.SIGKILL):
                pass
            if status:
                self.wrong.append(f"run {self.runs}: status {status}: {victim.said()}")
                return
            self.wrong += [f"run {self.runs}: {what}" for what in differences(victim, self.whole)]

    def once(self, victim: Victim) -> int | None:
        """Starts or resumes a run, kills it if that is still to be done; its exit status."""
        victim.start(resume=victim.begun())
        killed = self.kill(victim) if self.total < self.times else ""
        if killed:
            self.kills[killed] += 1
        status = victim.end()
        if status == 1 and not killed:
            status = 3  # a failure of its own
        left, _ = victim.left()
        self.wrong += [f"kill {self.total}: left {left}"] if left else []
        print(
            f"{self.placed:10} kill {self.total if killed else '-':>3} {killed:7}"
            f"status {status!s:4} step {victim.last_step():3} saved {victim.saved():3}  "
            f"{victim.said()[:90]}",
            flush=True,
        )
        return status

    def kill(self, victim: Victim) -> str:
        """Ends one process of a run at some moment; what, and empty where the run ended before."""
        whom = self.chance.choice(WHOM)
        after_s = self.chance.uniform(0.0, self.whole_s)
        pick, later_s = self.chance.random(), self.chance.uniform(0.0, LATER_S)
        ends_s, saving = time.monotonic() + after_s, False
        while not saving if whom == "save" else time.monotonic() < ends_s:
            if victim.process.poll() is not None:
                return ""
            saving = bool(victim.saving(victim.saved() + 1))
            time.sleep(0.005)
        time.sleep(later_s if saving else 0.0)
        workers = victim.workers() if whom == "worker" or (saving and pick < 0.5) else []
        pid = workers[int(pick * len(workers))] if workers else victim.process.pid
        if victim.process.poll() is not None:
            return ""
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return "save" if saving else "worker" if workers else "driver"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints every kill and what the runs became; 1 when one differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults kills")
    parser.add_argument("--times", type=int, default=100, help="kills, over all placements")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60, help="of each run")
    parser.add_argument(
        "--placements",
        nargs="*",
        default=list(PLACED),
        choices=list(PLACED),
        help="local is one process without Ray; it takes half of the kills",
    )
    parser.add_argument("--out", help="a new directory to keep the runs in")
    options = parser.parse_args(arguments)
    wrong: list[str] = []
    shares = {placed: PLACED[placed] for placed in options.placements}
    with tempfile.TemporaryDirectory() as scratch:
        for placed, share in shares.items():
            times = round(options.times * share / sum(shares.values()))
            folder = Path(options.out or scratch) / placed
            killer = Killer(folder, placed, options.steps, times, options.seed)
            killer.go()
            counts = ", ".join(f"{count} {whom}" for whom, count in killer.kills.items())
            print(
                f"{placed}: seed {options.seed}, {killer.total} kills ({counts}) of {killer.runs} "
                f"runs of {options.steps} steps; "
                + ("; ".join(killer.wrong) or "records, samples, rows and weights bit-equal")
            )
            wrong += killer.wrong
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
