# SPDX-License-Identifier: Apache-2.0
"""One seed gives the same first step of PPO on every placement, in this process or in several."""

from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import invariance
from benchmarks.invariance import CASES, SEED, STEP, Step, compare, first_step
from tests.fixtures import slow_but


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Step:
    """The step on one device."""
    return first_step(CASES["local:1"], tmp_path_factory.mktemp("first"), model="embedded")


@pytest.mark.parametrize(
    "name",
    slow_but(
        [
            "local:data2-tensor4-generate2",
            "local:pools4+4",
            "local:pools4+3+1",
            "local:data8",
            "local:data2-tensor4",
            "local:fsdp8",
            "local:fsdp4-tensor2",
            "local:zero1-8",
            "local:pipe3-data2",
            "local:pipe3-tensor2-generate-pipe3",
            "local:pipe3-data2-infer-data6",
            "local:ds-chat8-generate2",
        ],
        "local:data2-tensor4-generate2",
    ),
)
def test_tokens_losses_and_gradients_do_not_depend_on_the_placement(
    name: str, first: Step, tmp_path: Path
) -> None:
    """Four-way tensor parallelism holds two key-value heads twice; generation keeps half of it."""
    found = compare(first_step(CASES[name], tmp_path, model="embedded"), first)
    assert found.holds, found
    assert found.rows == found.ties == 0


def test_a_different_token_is_a_fault_unless_it_is_a_tie(first: Step) -> None:
    """With the noise that belongs to the row and position, and the log-probs of both runs."""
    row, at = 5, int(first["prompt_length"][5])
    token = int(first["input_ids"][row, at])
    other = token + 1
    key = jax.random.key(SEED)
    for number in (STEP, row, 0):
        key = jax.random.fold_in(key, number)
    noise = np.asarray(jax.random.gumbel(key, (20,), np.float32))
    tied = float(first["rollout_log_probs"][row, at]) + float(noise[token] - noise[other])
    for log_prob, ties in ((tied + 1e-5, 1), (tied - 1e-2, 0)):
        ids, log_probs = first["input_ids"].copy(), first["rollout_log_probs"].copy()
        ids[row, at], log_probs[row, at] = other, log_prob
        found = compare(first | {"input_ids": ids, "rollout_log_probs": log_probs}, first)
        assert (found.rows, found.ties, found.holds) == (1, ties, ties == 1)


def test_a_loss_or_norm_beyond_the_bound_is_a_fault(first: Step) -> None:
    assert compare(first, first).holds
    for name in ("actor/pg_loss", "critic/grad_norm", invariance.GAP):
        assert not compare(first | {name: first[name] * 1.01 + 1e-4}, first).holds


@pytest.mark.ray
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("ray:")])
def test_processes_under_ray_give_the_same_step(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two processes of four devices each, and pools of their own."""
    status = invariance.main(["--placements", name])
    assert status == 0, capsys.readouterr().out
