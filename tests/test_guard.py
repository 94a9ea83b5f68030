# SPDX-License-Identifier: Apache-2.0
"""Wrong weights and numbers end a run, or a step, before they reach a checkpoint."""

import dataclasses
import socket
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import load_file, save_file

from algorithms import ppo, sft
from hfjax.actor import Actor
from hfjax.batch import Batch
from hfjax.cli import main
from hfjax.config import to_toml
from hfjax.controller.handle import RoleHandle
from hfjax.controller.worker import RoleContext, RoleError
from hfjax.engine.checkpoint import restore_role
from hfjax.engine.checks import CHANGED, NOT_FINITE
from hfjax.engine.store import CheckpointStore
from hfjax.engine.train import OptimizerConfig, TrainState
from hfjax.guard import MAX_REFUSED
from hfjax.roles import saved_state
from hfjax.run import Run, train
from meshes.layouts import TWO_COPIES
from meshes.mesh import MeshShape
from meshes.placement import Placement, Pool, RolePlacement
from tests.fixtures import damaged, placed, write_tiny_hf
from tests.test_run import configured, records, tuning

PROMPTS = [[3, 4, 5], [6, 7], [8, 9, 10, 11], [13]]
LR = {"optimizer": {"lr": 1e-3}}
OPTIMIZER = OptimizerConfig(lr=1e-3)
MOMENT = "opt_state.1.0.nu.final_norm"
HOST = socket.gethostname()


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
    shapes = saved_state(str(out.parent / "model"), "lm" if role == "actor" else "value", OPTIMIZER)
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), shapes)
    return restore_role(CheckpointStore(out / "checkpoints").path(step) / role, wanted)


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
    table: dict[str, Any] = {"actor": LR, "critic": LR, "check_every": 1, "placement": placement}
    return configured(ppo, folder, model, PROMPTS, **table | settings)


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


@pytest.mark.slow
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


def flip_one_bit(values: np.ndarray) -> None:
    """The lowest of the first value."""
    values.reshape(-1)[:1].view("u4")[0] ^= 1


class Flipping(Actor):
    """An actor whose process `rank` finds another bit on its last device after update 3."""

    def __init__(self, context: RoleContext, *, flips: int, **settings: Any) -> None:
        self.flips, self.calls = context.rank == flips, 0
        super().__init__(context, **settings)

    def updated(self, trainer: Any, micros: Any) -> dict[str, Any]:
        """The update, and then the fault."""
        metrics = super().updated(trainer, micros)
        self.calls += 1
        if self.calls == 3 and self.flips:
            state = self.held.state()
            norm = damaged(state.params["final_norm"], -1, flip_one_bit)
            params = state.params | {"final_norm": norm}
            self.held.take(dataclasses.replace(state, params=params))
        return metrics


def flipping(rank: int) -> ModuleType:
    """Fine-tuning with an actor that flips a bit."""

    def roles(cfg: Any) -> dict[str, Any]:
        actor = sft.roles(cfg)["actor"]
        return {"actor": partial(Flipping, *actor.args, flips=rank, **actor.keywords)}

    module = ModuleType("flipping")
    vars(module).update(vars(sft), roles=roles)
    return module


@pytest.mark.parametrize(("every", "stops"), [(0, 4), pytest.param(1, 3, marks=pytest.mark.slow)])
def test_a_bit_that_one_replica_flips_is_not_saved(tmp_path: Path, every: int, stops: int) -> None:
    placement = placed(tmp_path / "four.toml", MeshShape(data=2, tensor=2), "actor")
    config = tuning(tmp_path, steps=6, save_every=2, placement=placement, check_every=every)
    wrong = rf"role 'actor', check_weights at step {stops} \(rank 0 of pool 'all' on host {HOST}\)"
    wrong += r": params.final_norm on cpu:3 \(rank 0 on host .*\) differs from 3 other"
    with pytest.raises(RoleError, match=wrong):
        train(flipping(0), config)
    assert CheckpointStore(tmp_path / "run" / "checkpoints").steps() == [2]


@pytest.mark.slow
def test_files_with_numbers_that_are_none_are_found_in_the_first_step(tmp_path: Path) -> None:
    config = tuning(tmp_path, steps=3, save_every=1)
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = np.inf
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(RoleError, match=f"step 1 .*: params.layers.w_up on cpu:0 .* {NOT_FINITE}"):
        train(sft, config)
    assert CheckpointStore(tmp_path / "run" / "checkpoints").steps() == []


@pytest.mark.ray
def test_the_process_whose_device_flipped_a_bit_is_named(tmp_path: Path) -> None:
    placement = placed(tmp_path / "four.toml", MeshShape(data=2, tensor=2), "actor", processes=2)
    config = tuning(tmp_path, steps=6, check_every=3, placement=placement, runtime="ray")
    wrong = rf"check_weights at step 3 \(rank 1 of pool 'all' on host {HOST}\): params.final_norm"
    with pytest.raises(
        RoleError, match=rf"{wrong} on \S+ \(rank 1 on host {HOST}\) differs from 3"
    ):
        train(flipping(1), config)
    assert CheckpointStore(tmp_path / "run" / "checkpoints").steps() == []


def object_of(handle: RoleHandle) -> Any:
    """A role of this process behind its handle."""
    pool: Any = handle.pool
    return pool.worker.roles[handle.role]


def flip_a_moment(path: Any, leaf: jax.Array) -> jax.Array:
    """Flips a bit on the first device of one array of a training state."""
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    return damaged(leaf, 0, flip_one_bit) if name == MOMENT else leaf


@pytest.mark.slow
def test_every_copy_of_weights_is_checked(tmp_path: Path) -> None:
    """Frozen ones too, those that rest on the host, and those that generate in another pool."""
    two = MeshShape(data=2)
    roles = {
        "actor": RolePlacement("actor", "all", train=two, generate_pool="other", relay=TWO_COPIES),
        "critic": RolePlacement("critic", "all", train=two, offload=True),
        "reference": RolePlacement("reference", "all", infer=two, offload=True),
    }
    placement = Placement({name: Pool(name, 2) for name in ("all", "other")}, roles)
    (tmp_path / "pools.toml").write_text(placement.to_toml())
    config = on_two_replicas(tmp_path, placement=str(tmp_path / "pools.toml"))
    with Run(ppo, config) as run:
        run.step(1)
        run.guard.judge(1)
        reference, critic = (object_of(run.models.handles[n]) for n in ("reference", "critic"))
        second: Any = run.models.actor.second_copy
        rollout = object_of(second.handle)
        embed = damaged(reference.params["embed"], 1, flip_one_bit)
        reference.params = reference.params | {"embed": embed}
        rollout.params[0] = damaged(rollout.params[0], 1, flip_one_bit)
        state = critic.held.state()
        critic.held.take(jax.tree_util.tree_map_with_path(flip_a_moment, state))
        with pytest.raises(RoleError) as told:
            run.guard.check(2)
    lines = str(told.value).splitlines()[:-1]
    both = "should hold the same part and do not"
    for line, parts in zip(
        lines,
        [
            ("role 'critic'", f"{MOMENT} on cpu:0", "cpu:1", both),
            ("role 'reference'", "embed on cpu:1", CHANGED),
            ("role 'actor'", "pool 'other'", "embed on cpu:2", "cpu:3", both),
        ],
        strict=True,
    ):
        assert all(part in line for part in parts), line
