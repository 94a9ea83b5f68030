# SPDX-License-Identifier: Apache-2.0
"""Accuracy on held-out sums, before and after training, with a control for every algorithm.

    python -m benchmarks.learning [--algorithms ppo grpo] [--seeds 0 1 2] [--out DIR]

Each run is `hfjax train ALGORITHM --seed S` as a user would type it; the control has the same
settings, but its rewards, preferences or demonstrations are drawn at random. `unconstrained` is
Safe RLHF that watches costs only; dapo, dr_grpo and gspo are settings of GRPO. Exits 1 when a run
ends below its line, a control rises more than CONTROL_RISE, or a cost ends on the wrong side of
its limit.
"""

import argparse
import itertools
import json
import math
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from hfjax import arithmetic
from hfjax.algorithm import algorithm_names

LEARNED = 0.8
CONSTRAINED = 0.6  # under a cost that a quarter of the right answers have
PREFERRED = 0.9  # of pairs
CONTROL_RISE = 0.05  # of sums
LAST = 20  # steps over which costs are averaged and the multiplier is watched
COST_LIMIT = 0.1
SETTLED = 0.25  # the multiplier's range over the last steps, a share of their mean
ACCURACY = {"val-core/sums/reward/mean@1", "val-core/accuracy"}  # of sums, or of pairs of them
NLL = "val-core/nll"
PAIRED = ("dpo", "reward_model")
REWARDS = {"sums": "hfjax.arithmetic:sum_reward", "random": "hfjax.arithmetic:random_reward"}
UNCONSTRAINED = "unconstrained"
SAFE = "--steps 80 --actor.optimizer.lr 3e-4 --algorithm.cost-window 512"  # responses of a step
VARIANTS = {  # a name: an algorithm and its settings
    "safe_rlhf": (
        "safe_rlhf",
        f"{SAFE} --algorithm.cost-limit {COST_LIMIT} --algorithm.multiplier-lr 0.3",
    ),
    UNCONSTRAINED: ("safe_rlhf", f"{SAFE} --algorithm.multiplier 0"),
    "dapo": (
        "grpo",
        "--algorithm.dynamic-batches 3 --algorithm.clip-high 0.28 --algorithm.kl.where none "
        "--actor.minibatch-sequences 256",
    ),
    "dr_grpo": (
        "grpo",
        "--algorithm.normalize none --algorithm.aggregation seq-mean-token-sum-norm "
        "--algorithm.aggregation-length 4",
    ),
    "gspo": (
        "grpo",
        "--algorithm.ratio sequence --algorithm.aggregation seq-mean-token-mean "
        "--algorithm.clip-low 3e-4 --algorithm.clip-high 4e-4 --actor.minibatch-sequences 256",
    ),
}
DEADLINE_S = 1800
Row = dict[str, float]


def run(name: str, seed: int, reward: str, out: Path, runtime: str, *more: str) -> Row:
    """What came of a run: accuracies `start` and `end` (of SFT, a right token's probability).

    `training_s` counts from the first step to the last; `more` are further options.
    """
    algorithm, settings = VARIANTS.get(name, (name, ""))
    command = [sys.executable, "-m", "hfjax.cli", "train", algorithm, "--seed", str(seed)]
    command += [*settings.split(), *teaching(algorithm, reward, out), *more]
    command += ["--runtime", runtime, "--out", str(out)]
    begin_s = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=DEADLINE_S)
    wall_s = time.perf_counter() - begin_s
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    accuracy = [record[name] for record in records for name in ACCURACY & record.keys()]
    accuracy += [math.exp(-record[NLL]) for record in records if NLL in record]
    names = ("timing_s/step", "timing_s/testing", "timing_s/save_checkpoint")
    training_s = sum(record.get(name, 0.0) for record in records for name in names)
    row = {"start": accuracy[0], "end": accuracy[-1], "steps": len(records) - 1}
    return row | costs(records) | {"training_s": training_s, "wall_s": wall_s}


def costs(records: list[dict[str, float]]) -> Row:
    """Of the last steps: mean cost, lambda at the end, and its range as a share of its mean."""
    steps = [record for record in records if "lagrange/lambda" in record]
    if not steps:
        return {}
    last = steps[-LAST:]
    multipliers = [record["lagrange/lambda"] for record in last]
    mean = sum(multipliers) / len(last)
    return {
        "cost": sum(record["cost/score/mean"] for record in last) / len(last),
        "lambda": multipliers[-1],
        "moved": (max(multipliers) - min(multipliers)) / mean if mean else 0.0,
    }


def teaching(algorithm: str, reward: str, out: Path) -> list[str]:
    """Options that say what is learned from; the evaluation is the same."""
    if algorithm in PAIRED:
        pairs = {"sums": "sums-pairs", "random": "sums-pairs-random"}[reward]
        return ["--data.train", pairs, "--data.eval", "sums-pairs", "--eval-every", "20"]
    if algorithm == "sft":
        return ["--data.train", str(demonstrations(reward, out)), "--data.eval", "sums-sft"]
    return ["--reward.function", REWARDS[reward], "--reward.eval-function", REWARDS["sums"]]


def demonstrations(reward: str, out: Path) -> Path:
    """A file beside `out` of right answers, or of the same in random order."""
    rows = arithmetic.rows("train")
    answers = [row["ground_truth"] for row in rows]
    if reward == "random":
        random.Random(0).shuffle(answers)
    path = out.with_suffix(".jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    shown = zip(rows, answers, strict=True)
    lines = (json.dumps({"prompt": row["prompt"], "response": told}) for row, told in shown)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def passed(name: str, reward: str, row: Row) -> bool:
    """Whether a run did what it has to; a control stays below the line that the run crosses.

    Where chance prefers, accuracy over pairs wanders: all their margins move together.
    """
    if reward == "random":
        rose = row["end"] > row["start"] + CONTROL_RISE
        return row["end"] < line(name) and (name in PAIRED or not rose)
    if name == "safe_rlhf" and not (row["cost"] <= COST_LIMIT and row["moved"] <= SETTLED):
        return False
    if name == UNCONSTRAINED and row["cost"] <= COST_LIMIT:
        return False
    return row["end"] >= line(name)


def line(name: str) -> float:
    """The accuracy that a run has to reach."""
    return PREFERRED if name in PAIRED else CONSTRAINED if name == "safe_rlhf" else LEARNED


def main() -> int:
    """Runs them all, one after the other, and prints a table."""
    parser = argparse.ArgumentParser(description="Accuracy before and after training")
    shipped = algorithm_names()
    names = [*shipped, *(name for name in VARIANTS if name not in shipped)]
    parser.add_argument("--algorithms", nargs="+", choices=names, default=[*shipped, UNCONSTRAINED])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rewards", nargs="+", choices=REWARDS, default=list(REWARDS))
    parser.add_argument("--runtime", choices=("ray", "local"), default="ray")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp(prefix="hfjax-learning-"))
    print(f"{platform.machine()}, {os.cpu_count()} cores, jax {version('jax')}, {options.runtime}")
    print(
        "algorithm      seed  reward  start    end  steps   cost  lambda  moved  training_s  wall_s"
    )
    failed = 0
    runs = itertools.product(options.algorithms, options.rewards, options.seeds)
    for name, reward, seed in runs:
        row = run(name, seed, reward, out / f"{name}-{reward}-{seed}", options.runtime)
        ok = passed(name, reward, row)
        failed += not ok
        constraint = (
            f"{row['cost']:.3f}  {row['lambda']:6.3f}  {row['moved']:5.2f}"
            if "cost" in row
            else f"{'-':>5}  {'-':>6}  {'-':>5}"
        )
        print(
            f"{name:13}  {seed:4}  {reward:6}  {row['start']:.3f}  {row['end']:.3f}  "
            f"{row['steps']:5.0f}  {constraint}  {row['training_s']:10.0f}  {row['wall_s']:6.0f}"
            f"{'' if ok else '  FAILED'}",
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
