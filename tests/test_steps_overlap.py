# SPDX-License-Identifier: Apache-2.0
"""A step is issued before the last one's updates are waited for; no number depends on it."""

import dataclasses
import json
import signal
import types
from pathlib import Path
from typing import Any

import pytest

from algorithms import ppo, sft
from hfjax.batch import Batch
from hfjax.controller.handle import Models
from hfjax.engine.store import CheckpointStore
from hfjax.metrics import STEP
from hfjax.run import Run, train
from meshes.mesh import MeshShape
from meshes.placement import Placement, Pool, RolePlacement
from tests.fixtures import is_timing
from tests.test_old_log_probs import run, scored
from tests.test_resume import configured, finished, untimed
from tests.test_run import records, tuning


@pytest.fixture
def overlapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs take every step for one whose calls are under way, as with pools elsewhere."""
    monkeypatch.setattr(Models, "waits", True)


def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What runs do from now on, in order."""
    seen: list[tuple[str, int]] = []

    def of(name: str) -> Any:
        method = getattr(Run, name)

        def call(self: Run, first: Any, *rest: Any) -> Any:
            seen.append((name, getattr(first, "step", first)))
            return method(self, first, *rest)

        return call

    for name in ("step", "finish", "evaluate", "save"):
        monkeypatch.setattr(Run, name, of(name))
    return seen


def test_a_step_is_issued_before_the_last_is_finished_but_after_what_follows_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlapping: None
) -> None:
    """An evaluation after step 2, a checkpoint after step 3, the end after step 6."""
    seen = watched(monkeypatch)
    (tmp_path / "eval.jsonl").write_text('{"prompt": "t3", "response": "t4"}\n')
    config = tuning(tmp_path, steps=6, eval_every=2, save_every=3)
    data = dataclasses.replace(config.data, eval=str(tmp_path / "eval.jsonl"))
    out = train(sft, dataclasses.replace(config, data=data))
    assert seen == [
        ("evaluate", 0),
        *[("step", 1), ("step", 2), ("finish", 1), ("finish", 2), ("evaluate", 2)],
        *[("step", 3), ("finish", 3), ("save", 3), ("step", 4), ("finish", 4), ("evaluate", 4)],
        *[("step", 5), ("step", 6), ("finish", 5), ("finish", 6), ("evaluate", 6), ("save", 6)],
    ]
    assert [record[STEP] for record in records(out)] == list(range(7))


@pytest.mark.parametrize(
    "at", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_ctrl_c_saves_the_step_that_was_issued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Wherever it comes: while step 3 is issued, when it has been, or after its record."""
    plain, saved = Run.step, Run._written

    def step(self: Run, step: int) -> Any:
        if (at, step) == (1, 3):
            signal.raise_signal(signal.SIGINT)
        return plain(self, step)

    def waits(self: Models) -> bool:
        if (at, self.step) == (2, 3):
            signal.raise_signal(signal.SIGINT)
        return True

    def written(self: Run, issued: Any, *rest: Any, **more: Any) -> None:
        saved(self, issued, *rest, **more)
        if (at, issued.step) == (3, 2):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Run, "step", step)
    monkeypatch.setattr(Run, "_written", written)
    monkeypatch.setattr(Models, "waits", property(waits))
    with pytest.raises(KeyboardInterrupt):
        train(sft, tuning(tmp_path, steps=6))
    assert [record[STEP] for record in records(tmp_path / "run")] == [1, 2, 3]
    assert CheckpointStore(tmp_path / "run" / "checkpoints").latest() == 3


def test_an_error_in_a_step_leaves_the_record_of_the_one_before(
    tmp_path: Path, overlapping: None
) -> None:
    def step(models: Any, prompts: Batch, cfg: Any) -> tuple[Batch, Any]:
        if models.step == 3:
            raise ArithmeticError("of the algorithm")
        return sft.step(models, prompts, cfg)

    wrong = types.ModuleType("wrong")
    vars(wrong).update(vars(sft), step=step)
    with pytest.raises(ArithmeticError):
        train(wrong, tuning(tmp_path, steps=6))
    assert [record[STEP] for record in records(tmp_path / "run")] == [1, 2]


@pytest.mark.slow
def test_a_gap_is_followed_by_the_same_steps_with_and_without_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hfjax.run.LARGEST_GAP", 0.0)  # any rounding is more
    found = {"plain": run(tmp_path / "plain", steps=5)}
    monkeypatch.setattr(Models, "waits", True)
    found["overlapping"] = run(tmp_path / "overlapping", steps=5)
    found["saving"] = run(tmp_path / "saving", steps=5, save_every=1)
    for each in found.values():
        assert scored(each) == [1, 3, 4, 5]
    assert len({len(each) for each in found.values()}) == 1
    numbers = [
        [{k: v for k, v in record.items() if not is_timing(k)} for record in each]
        for each in found.values()
    ]
    assert numbers[0] == numbers[1] == numbers[2]


@pytest.mark.ray
def test_a_critic_in_its_own_pool_is_updated_while_the_next_step_generates(tmp_path: Path) -> None:
    """Its updates are made long. Every record is that of a run in one process."""
    pools = {name: Pool(name, 1) for name in ("policy", "value")}
    one = MeshShape()
    roles = {
        "actor": RolePlacement("actor", "policy", train=one),
        "critic": RolePlacement("critic", "value", train=one),
        "reference": RolePlacement("reference", "policy", infer=one),
    }
    placement, runs = Placement(pools, roles, "cpu"), []
    for runtime in ("ray", "local"):
        folder = tmp_path / runtime
        folder.mkdir()
        (folder / "split.toml").write_text(placement.to_toml())
        more = {"placement": str(folder / "split.toml"), "runtime": runtime, "trace": True}
        more |= {"critic": {"epochs": 40, "optimizer": {"lr": 1e-3}}, "save_every": 0, "steps": 5}
        runs.append(configured(folder, **more))
    finished(runs[0])
    train(ppo, runs[1])
    assert untimed(Path(runs[0].out)) == untimed(Path(runs[1].out))
    text = (Path(runs[0].out) / "trace.json").read_text()
    events = json.loads(text.rstrip().rstrip(",") + "]")
    spans = {
        (e["name"], e["args"]["step"]): (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e["ph"] == "X"
    }
    overlaps = [
        spans["actor.generate_sequences", step + 1][0] < spans["critic.update_critic", step][1]
        for step in range(2, 5)
    ]
    assert all(overlaps)
    found = records(Path(runs[0].out))
    assert all(record["timing_s/step"] > 0 for record in found)
