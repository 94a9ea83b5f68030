# SPDX-License-Identifier: Apache-2.0
"""One workload for hfjax and for others, each job in a process of its own, in turn.

    python -m benchmarks.peers --models DIR --job "..." ... [--sizes tiny small] [--rounds 3]

A job is a command that takes the options of `benchmarks.peer_job` and prints such a line; DIR holds
model-tiny and model-small. Medians are over the rounds, with their spread. Ratios count: seconds
are the host's. A job that takes more than half an hour is ended. Exit status 1 when a job failed.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from benchmarks.peer_job import SIZES
from benchmarks.steps import Line

LIMIT_S = 1800.0  # of a job


def rotate(options: argparse.Namespace) -> int:
    """Every job of every size, round by round; medians and spread; 1 when a job failed."""
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    results = out / "results.jsonl"
    results.write_text("")
    failed = 0
    for size in options.sizes:
        common = f"--size {size} --model {options.models}/model-{size} --steps {options.steps} "
        common += f"--warmup {options.warmup} --wait-idle {options.wait_idle} --out {results}"
        for number in range(options.rounds):
            for command in options.job:
                print(f"{size}, round {number + 1}: {command}", file=sys.stderr, flush=True)
                with (out / "errors.log").open("a") as errors:
                    why = fails(shlex.split(f"{command} {common}"), errors)
                if why:
                    failed += 1
                    print(f"  {why}, see {out}/errors.log", flush=True)
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    print(table(lines))
    return 1 if failed else 0


def fails(command: Sequence[str], errors: IO[str]) -> str:
    """Runs a job; why it failed, in words."""
    streams = {"stdout": subprocess.DEVNULL, "stderr": errors}
    try:
        ended = subprocess.run(command, timeout=LIMIT_S, check=False, **streams)
    except subprocess.TimeoutExpired:
        return f"not finished after {LIMIT_S:g} s"
    except OSError as error:
        return str(error)
    return f"ended with {ended.returncode}" if ended.returncode else ""


def table(lines: Sequence[Line]) -> str:
    """A row a job: medians over rounds, and each kind's fastest as 1."""
    rows = [
        f"{'workload':10}{'job':26}{'runs':>5}{'step s':>9}{'spread':>16}{'x best':>8}{'MB':>8}"
    ]
    groups: dict[tuple[str, str], dict[str, list[Line]]] = {}
    for line in lines:
        if "step_s_median" in line:
            kind = groups.setdefault((line["workload"], line.get("kind", "")), {})
            kind.setdefault(line["name"], []).append(line)
    for (workload, _), named in groups.items():
        medians = {
            name: statistics.median(line["step_s_median"] for line in runs)
            for name, runs in named.items()
        }
        for name, seconds in sorted(medians.items(), key=lambda item: item[1]):
            every = [line["step_s_median"] for line in named[name]]
            spread = f"{min(every):.3f} to {max(every):.3f}"
            memory = max(line.get("peak_rss_all_mb") or line["peak_rss_mb"] for line in named[name])
            ratio = seconds / min(medians.values())
            rows.append(
                f"{workload:10}{name:26}{len(every):5}{seconds:9.3f}{spread:>16}{ratio:8.2f}"
                f"{memory:8}"
            )
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers")
    parser.add_argument("--job", action="append", required=True, help="a command; repeat it")
    parser.add_argument("--models", required=True, help="a folder with model-tiny, model-small")
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="measured, of a job")
    parser.add_argument("--warmup", type=int, default=2, help="before them")
    parser.add_argument("--wait-idle", type=float, default=120.0, help="seconds, at most")
    parser.add_argument("--out", default="peers", help="folder of the results")
    return rotate(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
