# SPDX-License-Identifier: Apache-2.0
"""Log-probs before the update: the rollout's own while training agrees, scored where it may not."""

from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from algorithms import grpo, ppo
from hfjax.batch import Batch
from hfjax.policy import old_log_probs
from hfjax.prepare import prepare
from hfjax.run import train
from tests.fixtures import write_tiny_hf
from tests.test_run import configured, records

PROMPTS: list[Any] = [[3, 4, 5], [6, 7], [8, 9, 10, 11, 12], [13]]
GAP = "training/rollout_probs_diff_max"


def settings_of(folder: Path, program: Any = grpo, **settings: Any) -> Any:
    """Settings of a small run."""
    folder.mkdir(exist_ok=True)
    return configured(program, folder, write_tiny_hf(folder / "model"), PROMPTS, **settings)


def run(folder: Path, program: Any = grpo, **settings: Any) -> list[dict[str, Any]]:
    """A small run's records."""
    return records(train(program, settings_of(folder, program, **settings)))


def scored(found: list[dict[str, Any]]) -> list[int]:
    """Steps in which sampled tokens were scored before the update."""
    return [r["training/global_step"] for r in found if "timing_s/old_log_prob" in r]


@pytest.mark.slow
def test_the_pass_runs_in_the_first_step_and_every_twentieth_after(tmp_path: Path) -> None:
    """Gap and entropy are those of the pass: with a learning rate of 0 a run with it has both."""
    found = run(tmp_path / "auto", steps=22)
    assert scored(found) == [1, 21]
    assert all(record[GAP] <= 1e-5 for record in found)
    assert {record["perf/compiles"] for record in found[1:]} == {0}
    always = run(tmp_path / "score", steps=22, algorithm={"old_log_probs": "score"})
    assert scored(always) == list(range(1, 23))
    for one, other in zip(found, always, strict=True):
        assert one["actor/entropy"] == pytest.approx(other["actor/entropy"], abs=1e-5)
        assert one["actor/pg_loss"] == pytest.approx(other["actor/pg_loss"], abs=1e-5)
        assert one[GAP.replace("max", "mean")] <= one[GAP]


@pytest.mark.slow
def test_only_the_first_mini_batch_is_measured(tmp_path: Path) -> None:
    """After an update the weights are no longer the rollout's: a large step shows in no gap."""
    actor = {"epochs": 2, "minibatch_sequences": 1, "optimizer": {"lr": 0.1}}
    found = run(tmp_path, ppo, steps=3, actor=actor)
    assert scored(found) == [1]
    assert all(record[GAP] <= 1e-5 for record in found)
    assert max(abs(record["actor/ppo_kl"]) for record in found) > 1e-2


@pytest.mark.parametrize(
    "settings",
    [
        {"rollout": {"top_k": 5}},
        {"rollout": {"top_p": 0.9}},
        {"rollout": {"min_p": 0.01}},
        {"rollout": {"min_new_tokens": 2}},
        {"actor": {"compute_dtype": "bfloat16"}},
        {"algorithm": {"rollout_correction": "token"}},
    ],
    ids=lambda settings: "-".join(settings[next(iter(settings))]),
)
def test_where_rollout_and_training_may_differ_every_step_scores(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    config = settings_of(tmp_path, **settings)
    plan = prepare(grpo, config, datetime(2026, 1, 2))
    called: list[Batch] = []
    actor = SimpleNamespace(compute_log_prob=lambda batch: called.append(batch) or batch)
    m = SimpleNamespace(actor=actor, rollout_agrees=plan.rollout_agrees, memory={}, step=2)
    old_log_probs(m, Batch(rollout_log_probs=np.zeros((4, 2), np.float32)), config.algorithm)
    assert called


@pytest.mark.slow
def test_after_a_gap_above_rounding_every_step_scores_also_when_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hfjax.run.LARGEST_GAP", 0.0)  # any rounding is more
    assert scored(run(tmp_path, steps=3)) == [1, 3]
    (warning,) = [r.getMessage() for r in caplog.records if "more than rounding" in r.getMessage()]
    assert f"{GAP}=" in warning
    monkeypatch.undo()
    assert scored(run(tmp_path, steps=5, resume=True)) == [1, 3, 4, 5]
