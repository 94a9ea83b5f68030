# SPDX-License-Identifier: Apache-2.0
"""Wrong weights and numbers end a run, or a step, before they reach a checkpoint."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from algorithms import grpo, ppo, sft
from hfjax.actor import Actor
from hfjax.batch import Batch
from hfjax.cli import main
from hfjax.config import to_toml
from hfjax.controller.worker import RoleError
from hfjax.engine.checkpoint import CheckpointStore, restore_role
from hfjax.engine.checks import CHANGED, NOT_FINITE
from hfjax.engine.train import OptimizerConfig, TrainState
from hfjax.guard import MAX_REFUSED
from hfjax.roles import saved_state
from hfjax.run import train
from meshes.mesh import MeshShape
from meshes.placement import Placement, Pool, RolePlacement
from tests.fixtures import damaged, placed, write_tiny_hf
from tests.test_run import configured, records, tuning

PROMPTS = [[3, 4, 5], [6, 7], [8, 9, 10, 11], [13]]
LR = {"optimizer": {"lr": 1e-3}}


def poisoned(monkeypatch: pytest.MonkeyPatch, column: str, value: float, steps: range) -> None:
    """PPO with a number in one row of its scores, or of its advantages, in some steps."""
    plain, calls = ppo.compute_advantage, []

    def put(batch: Batch, name: str) -> Batch:
        values = np.array(batch[name])
        values[0] = value
        return batch | {name: values}

    def compute(batch: Batch, cfg: Any, memory: Any) -> Batch:
        calls.append(None)
        if len(calls) not in steps:
            return plain(batch, cfg, memory)
        if column in batch:
            return plain(put(batch, column), cfg, memory)
        return put(plain(batch, cfg, memory), column)

    monkeypatch.setattr(ppo, "compute_advantage", compute)


def saved(out: Path, role: str, step: int) -> TrainState:
    """A role's state in a checkpoint."""
    here = SingleDeviceSharding(jax.devices()[0])
    shapes = saved_state(str(out.parent / "model"), "lm" if role == "actor" else "value", LR_ONLY)
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), shapes)
    return restore_role(CheckpointStore(out / "checkpoints").path(step) / role, wanted)


LR_ONLY = OptimizerConfig(lr=1e-3)


def assert_finite(out: Path, *steps: int) -> None:
    """All the checkpoints, and nothing in any of them that is not a number."""
    assert CheckpointStore(out / "checkpoints").steps() == list(steps)
    for step in steps:
        for leaf in jax.tree.leaves([saved(out, role, step) for role in ("actor", "critic")]):
            assert np.isfinite(leaf).all()


def on_two_replicas(folder: Path, **settings: Any) -> Any:
    """PPO with every role on the same two devices; weights are checked in every step."""
    model = write_tiny_hf(folder / "model")
    shape = MeshShape(data=2)
    placement = placed(folder / "two.toml", shape, "actor", "critic", "reference")
    table: dict[str, Any] = {"actor": LR, "critic": LR, "check_every": 1}
    return configured(ppo, folder, model, PROMPTS, placement=placement, **table | settings)


@pytest.mark.parametrize(
    ("column", "value", "hit"),
    [
        ("score", np.nan, ("actor", "critic")),
        pytest.param("advantages", np.inf, ("actor",), marks=pytest.mark.slow),
    ],
)
def test_a_step_with_a_number_that_is_none_changes_no_bit_of_the_weights(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    column: str,
    value: float,
    hit: tuple[str, ...],
) -> None:
    """A reward, which reaches every row by whitening, or one row's advantages: on one replica."""
    poisoned(monkeypatch, column, value, range(3, 4))
    config = on_two_replicas(tmp_path, steps=4, save_every=1, keep_last=4)
    found = records(train(ppo, config))
    out = tmp_path / "run"
    assert_finite(out, 1, 2, 3, 4)
    for role in ("actor", "critic"):
        skips = [0, 0, float(role in hit), 0]
        assert [record[f"{role}/skipped"] for record in found] == skips
        assert [record[f"{role}/grad_norm"] is None for record in found] == [*map(bool, skips)]
        for step in (2, 3, 4):
            before, after = saved(out, role, step - 1), saved(out, role, step)
            pairs = zip(jax.tree.leaves(before.params), jax.tree.leaves(after.params), strict=True)
            same = all(np.array_equal(a, b) for a, b in pairs)
            assert same == bool(skips[step - 1])
            if same:
                jax.tree.map(np.testing.assert_array_equal, before.opt_state, after.opt_state)
                assert (after.updates, after.skipped) == (before.updates, before.skipped + 1)
    assert caplog.text.count("updates that were not finite") == 1
    assert f"step 3: {' and '.join(sorted(hit, reverse=True))} had" in caplog.text


def test_updates_refused_again_and_again_end_the_run_with_the_last_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poisoned(monkeypatch, "score", np.nan, range(2, 99))
    config = on_two_replicas(tmp_path, steps=20, save_every=3, check_every=0)
    (tmp_path / "given.toml").write_text(to_toml(config))
    assert main(["train", "ppo", "--config", str(tmp_path / "given.toml")]) == 1
    out, last = tmp_path / "run", 1 + MAX_REFUSED
    file = out / f"refused_step_{last:08d}.npz"
    told = capsys.readouterr().err
    assert f"{MAX_REFUSED} steps in a row, up to {last}" in told
    assert str(file) in told
    assert_finite(out, 6, 9)
    with np.load(file) as dump:
        assert np.isnan(dump["advantages"]).any()
        assert dump["response"].dtype.kind == "U"
        assert len(dump["row_id"]) == len(PROMPTS)
        assert '"actor/skipped": 1.0' in str(dump["metrics"])
