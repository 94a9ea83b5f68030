# SPDX-License-Identifier: Apache-2.0
"""Strong scaling, SIMULATED: (throughput_max / throughput_min) / (GPUs_max / GPUs_min).

    python -m benchmarks.scaling

HybridFlow §8.2 has 66.8 % on average over three algorithms and all sizes, from the fewest GPUs that
fit to 128.
"""

import argparse
import statistics
import sys
from collections.abc import Iterable, Sequence

from benchmarks.simulated import (
    ALGORITHMS,
    MOST,
    PROFILE,
    SIZES_FROM,
    TOLERANCE,
    Setting,
    best,
    near,
)
from hfjax.mapping.prices import Objective
from hfjax.mapping.report import aligned

THEIRS = 66.8  # percent


def efficiency(setting: Setting, least: int, objective: Objective) -> float | None:
    """From `least` GPUs to 128; None where one of them does not fit."""
    few, many = (best(setting, gpus, objective) for gpus in (least, MOST))
    if few is None or many is None:
        return None
    return few.value / many.value / (MOST / least)


def efficiencies(objective: Objective = "paper") -> Iterable[tuple[str, str, float]]:
    """By algorithm and size, where both ends fit."""
    for algorithm in ALGORITHMS:
        for size, least in SIZES_FROM.items():
            found = efficiency(Setting(algorithm, size), least, objective)
            if found is not None:
                yield algorithm, size, found


def text(sizes: Sequence[str] = tuple(SIZES_FROM)) -> str:
    """The table, with the mean beside the paper's."""
    rows: list[tuple[str, ...]] = [("algorithm", "size", "GPUs", "paper", "time")]
    by: dict[str, list[float]] = {"paper": [], "time": []}
    for algorithm in ALGORITHMS:
        for size in sizes:
            least, setting = SIZES_FROM[size], Setting(algorithm, size)
            cells = []
            for objective in ("paper", "time"):
                found = efficiency(setting, least, objective)
                by[objective] += [] if found is None else [found]
                cells.append("does not fit" if found is None else f"{found:.1%}")
            rows.append((algorithm, size, f"{least} to {MOST}", *cells))
    means = {name: statistics.mean(found) for name, found in by.items() if found}
    rows.append(("mean", "", "", *(f"{mean:.1%}" for mean in means.values())))
    matched = near(100 * means["paper"], THEIRS) if means else False
    verdict = "matched" if matched else "not matched"
    return (
        f"strong scaling by the objectives paper and time, SIMULATED: a100-80g, profile {PROFILE}\n"
        f"{aligned(rows)}\n"
        f"theirs {THEIRS} % on average: {verdict} (within {TOLERANCE:.0%})"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling")
    parser.add_argument("--sizes", nargs="+", choices=SIZES_FROM, default=list(SIZES_FROM))
    print(text(parser.parse_args(arguments).sizes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
