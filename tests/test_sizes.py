# SPDX-License-Identifier: Apache-2.0
"""Sizes that do not divide: evaluation counts each row once, contradictions are refused."""

import re
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from algorithms import grpo, ppo
from hfjax.batch import Batch
from hfjax.prepare import prepare
from hfjax.run import Run
from meshes.mesh import MeshShape
from tests.fixtures import path_table, placed, write_lut
from tests.test_run import EOS, configured, prompts_file

FOUR = MeshShape(data=4)


def word_number(prompts: list[str], responses: list[str], truths: list[str]) -> list[float]:
    """The number of the response's word, less 7: t8 is 1."""
    return [float(response[1:]) - 7 for response in responses]


@pytest.mark.parametrize("rows", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_four_replicas_evaluate_rows_that_they_do_not_divide_once_and_in_order(
    rows: int, tmp_path: Path
) -> None:
    """t3 is answered by t8, t4 by t9, and so on: rewards 1 to 5."""
    table = sum(path_table(3 + row, 8 + row, EOS) for row in range(5))
    model = write_lut(tmp_path / "model", np.asarray(table))
    placed(tmp_path / "placement.toml", FOUR, "actor", "reference")
    held_out = prompts_file(tmp_path / "eval.jsonl", [[3 + row] for row in range(rows)])
    config = configured(
        *(grpo, tmp_path, model, [[3]] * 4),
        data={"eval": held_out},
        reward={"function": f"{__file__}:word_number"},
    )
    with Run(grpo, config) as run:
        assert run.plan.held_out is not None
        run.models.group = 1
        ((columns, count),) = run.plan.held_out.batches(rows)
        batch = Batch(columns)
        batch |= run.models.actor.generate_sequences(batch, greedy=True)
        batch |= run.models.reward.compute_reward(batch)
        scores = np.arange(1, rows + 1)
        assert (count, batch["score"].tolist()) == (rows, scores.tolist())
        assert run.evaluate(0)["val-core/all/reward/mean@1"] == scores.mean()


# prompts of a step, n, replicas, the actor's mini-batch and micro-batch in sequences
REFUSALS: dict[str, tuple[tuple[int, int, int, int, int], str]] = {
    "less than a row a replica": (
        (4, 1, 4, 4, 2),
        "actor.micro_sequences=2 must divide the 4 rows of a mini-batch (4 = 2 x 2 + 0) and be a "
        "multiple of 4 (replicas x rows that stay together); use one of [4]",
    ),
    "a rest of micro-batches": (
        (6, 1, 1, 6, 4),
        "actor.micro_sequences=4 must divide the 6 rows of a mini-batch (6 = 1 x 4 + 2) and be a "
        "multiple of 1 (replicas x rows that stay together); use one of [1, 2, 3, 6]",
    ),
    "a mini-batch that replicas cannot cut": (
        (6, 1, 4, 6, 4),
        "actor.micro_sequences=4 must divide the 6 rows of a mini-batch (6 = 1 x 4 + 2) and be a "
        "multiple of 4 (replicas x rows that stay together); use mini-batches of a multiple of 4",
    ),
    "a micro-batch larger than the mini-batch": (
        (8, 1, 1, 4, 8),
        "actor.micro_sequences=8 must divide the 4 rows of a mini-batch (4 = 0 x 8 + 4)",
    ),
    "a rest of mini-batches": (
        (8, 1, 1, 6, 0),
        "actor.minibatch_sequences=6 does not divide the 8 rows of a step (data.prompts_per_step "
        "x responses or answers a prompt); use one of [1, 2, 4, 8]",
    ),
    "five responses a prompt, counted in sequences": (
        (2, 5, 1, 4, 0),
        "actor.minibatch_sequences=4 does not divide the 10 rows of a step",
    ),
}


def sized(folder: Path, sizes: tuple[int, int, int, int, int]) -> Any:
    """Settings of a PPO run of these sizes."""
    prompts, n, replicas, mini, micro = sizes
    roles = ("actor", "critic", "reference")
    placed(folder / "placement.toml", MeshShape(data=replicas), *roles)
    return configured(
        *(ppo, folder, write_lut(folder / "model", path_table(3, EOS)), [[3]] * prompts),
        rollout={"n": n},
        actor={"minibatch_sequences": mini, "micro_sequences": micro},
    )


@pytest.mark.parametrize("case", REFUSALS)
def test_sizes_that_contradict_each_other_are_refused_with_the_arithmetic(
    case: str, tmp_path: Path
) -> None:
    sizes, message = REFUSALS[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        prepare(ppo, sized(tmp_path, sizes), datetime(2026, 1, 2))


@pytest.mark.parametrize(
    ("sizes", "line"),
    [
        ((6, 1, 4, 0, 0), "actor: 1 x 6 rows an update, 6 a micro-batch"),  # two rows fill it up
        ((2, 5, 1, 5, 5), "2 prompts x 5 = 10 rows; actor: 2 x 5 rows an update, 5 a micro-batch"),
        ((2, 5, 4, 0, 0), "2 prompts x 5 = 10 rows; actor: 1 x 10 rows an update"),
    ],
)
def test_sizes_that_work_are_told_with_their_arithmetic(
    sizes: tuple[int, int, int, int, int], line: str, tmp_path: Path
) -> None:
    assert line in prepare(ppo, sized(tmp_path, sizes), datetime(2026, 1, 2)).sizes()
