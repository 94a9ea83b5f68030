# SPDX-License-Identifier: Apache-2.0
"""Long runs in one process: nothing compiles again, and nothing stays behind."""

import gc
import types
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
import pytest

from algorithms import ppo
from benchmarks.dispatch import resident
from hfjax.batch import Batch
from hfjax.controller.worker import COMPILE_EVENT
from hfjax.run import Run, train
from tests.fixtures import write_tiny_hf
from tests.test_run import configured, prompts_file, records

STEPS, EVALUATIONS = 200, 20
PROMPTS: list[Any] = [[3, 4, 5], [6, 7], [8, 9, 10, 11], [13]]
DECAY = {"optimizer": {"lr": 1e-3, "schedule": "linear"}}


def settings(folder: Path, **more: Any) -> Any:
    """PPO on a random model of two small layers; learning rates and KL's weight move each step."""
    kl = {"where": "reward", "estimator": "k1", "coef": 0.1, "target": 0.01, "horizon": 100.0}
    model = write_tiny_hf(folder / "model")
    moving: dict[str, Any] = {"actor": DECAY, "critic": DECAY, "algorithm": {"kl": kl}}
    return configured(ppo, folder, model, PROMPTS, **moving, **more)


def observed(marks: list[tuple[int, int]]) -> types.ModuleType:
    """PPO that notes, as a step begins, programs compiled in this process and bytes resident."""
    compiled: list[str] = []

    def count(event: str, duration_secs: float, **about: Any) -> None:
        compiled.extend([event] if event == COMPILE_EVENT else [])

    def step(models: Any, prompts: Batch, cfg: Any) -> Any:
        if len(marks) % 20 == 0:
            gc.collect()
        marks.append((len(compiled), resident("self")))
        return ppo.step(models, prompts, cfg)

    jax.monitoring.register_event_duration_secs_listener(count)
    module = types.ModuleType(ppo.__name__)
    vars(module).update(vars(ppo) | {"step": step})
    return module


@pytest.mark.slow
def test_two_hundred_steps_compile_no_more_and_hold_no_more(tmp_path: Path) -> None:
    marks: list[tuple[int, int]] = []
    data = {"eval": prompts_file(tmp_path / "eval.jsonl", PROMPTS)}
    every = STEPS // EVALUATIONS
    config = settings(tmp_path, steps=STEPS, eval_every=every, data=data)
    found = records(train(observed(marks), config))
    assert sum("val-core/all/reward/mean@1" in record for record in found) == 1 + EVALUATIONS
    steps = found[1:]
    for name in ("actor/lr", "actor/reward_kl_penalty_coeff"):
        assert len({record[name] for record in steps}) > 0.9 * STEPS  # they do move
    assert [record["perf/compiles"] for record in steps[2:]] == [0] * (STEPS - 2)
    assert marks[-1][0] == marks[2][0] > 0  # the controller's and those of evaluation among them
    assert marks[STEPS - 20][1] < 1.05 * marks[20][1]


@pytest.mark.slow
def test_models_that_are_dropped_leave_no_array(tmp_path: Path) -> None:
    gc.collect()
    before = len(jax.live_arrays())
    counts = []
    for number in range(5):
        with Run(ppo, settings(tmp_path, out=str(tmp_path / f"run-{number}"))) as run:
            if number in (0, 4):  # compiling takes the time
                run.step(1)
            assert len(jax.live_arrays()) > before
        del run
        gc.collect()
        counts.append(len(jax.live_arrays()))
    assert counts == [before] * 5
