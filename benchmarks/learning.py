# SPDX-License-Identifier: Apache-2.0
"""Greedy held-out accuracy on the embedded task, before and after training, with a control.

    python -m benchmarks.learning [--algorithms ppo grpo] [--seeds 0 1 2] [--out DIR]

Each run is `hfjax train ALGORITHM --seed S` as a user would type it; the control has the same
settings but rewards at random. Exits 1 when a run ends below LEARNED or a control rises more
than CONTROL_RISE.
"""

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

LEARNED = 0.8
CONTROL_RISE = 0.05
ACCURACY = {"val-core/sums/reward/mean@1", "val-core/accuracy"}  # of sums, or of pairs of them
PAIRED = ("dpo", "reward_model")
REWARDS = {"sums": "hfjax.arithmetic:sum_reward", "random": "hfjax.arithmetic:random_reward"}
DEADLINE_S = 1800


def run(algorithm: str, seed: int, reward: str, out: Path, runtime: str) -> dict[str, float]:
    """Accuracy at the start and at the end, and the seconds from the first step to the last."""
    command = [sys.executable, "-m", "hfjax.cli", "train", algorithm, "--seed", str(seed)]
    command += [*teaching(algorithm, reward), "--runtime", runtime, "--out", str(out)]
    begin_s = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=DEADLINE_S)
    wall_s = time.perf_counter() - begin_s
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    accuracy = [record[name] for record in records for name in ACCURACY & record.keys()]
    names = ("timing_s/step", "timing_s/testing", "timing_s/save_checkpoint")
    training_s = sum(record.get(name, 0.0) for record in records for name in names)
    return {
        "start": accuracy[0],
        "end": accuracy[-1],
        "steps": len(records) - 1,
        "training_s": training_s,
        "wall_s": wall_s,
    }


def teaching(algorithm: str, reward: str) -> list[str]:
    """Options that say what is learned from; the evaluation is the same."""
    if algorithm in PAIRED:
        pairs = {"sums": "sums-pairs", "random": "sums-pairs-random"}[reward]
        return ["--data.train", pairs, "--data.eval", "sums-pairs", "--eval-every", "20"]
    return ["--reward.function", REWARDS[reward], "--reward.eval-function", REWARDS["sums"]]


def passed(reward: str, row: dict[str, float]) -> bool:
    """Whether a run did what it has to."""
    if reward == "random":
        return row["end"] <= row["start"] + CONTROL_RISE
    return row["end"] >= LEARNED


def main() -> int:
    """Runs them all, one after the other, and prints a table."""
    parser = argparse.ArgumentParser(description="Accuracy before and after training")
    parser.add_argument("--algorithms", nargs="+", default=["ppo", "grpo"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rewards", nargs="+", choices=REWARDS, default=list(REWARDS))
    parser.add_argument("--runtime", choices=("ray", "local"), default="ray")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp(prefix="hfjax-learning-"))
    print(f"{platform.machine()}, {os.cpu_count()} cores, jax {version('jax')}, {options.runtime}")
    print("algorithm  seed  reward  start    end  steps  training_s  wall_s")
    failed = 0
    runs = itertools.product(options.algorithms, options.rewards, options.seeds)
    for algorithm, reward, seed in runs:
        row = run(algorithm, seed, reward, out / f"{algorithm}-{reward}-{seed}", options.runtime)
        ok = passed(reward, row)
        failed += not ok
        print(
            f"{algorithm:9}  {seed:4}  {reward:6}  {row['start']:.3f}  {row['end']:.3f}  "
            f"{row['steps']:5.0f}  {row['training_s']:10.0f}  {row['wall_s']:6.0f}"
            f"{'' if ok else '  FAILED'}",
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
