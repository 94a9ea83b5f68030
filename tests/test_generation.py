# SPDX-License-Identifier: Apache-2.0
"""One actor in every layout of generation: same tokens, the trainer's log-probs, no stale weight.

Slow: each layout compiles its own programs.
"""

from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

from algorithms import ppo
from hfjax.batch import Batch
from hfjax.config import KLConfig, RolloutConfig, TrainingConfig
from hfjax.controller.handle import Models, start
from hfjax.engine.train import OptimizerConfig
from hfjax.items import Prompt, prompt_columns
from hfjax.models.hf import load_config, load_params, save_hf
from hfjax.run import train
from meshes.mesh import MeshShape
from meshes.placement import Placement, Pool, RolePlacement
from tests.fixtures import write_tiny_hf
from tests.test_run import configured

pytestmark = pytest.mark.slow

SETTINGS = ppo.Settings(kl=KLConfig(where="none"))
PROMPTS = [[5, 9, 2], [7], [11, 3, 8, 90, 41], [1, 2, 3, 4, 5, 6], [60, 61], [33], [9, 9], [4]]
TIE = 1e-4  # a first difference must be between candidates this close
TRAINED = MeshShape(pipe=2, tensor=4)  # the actor of all layouts but ds-chat's
LAYOUTS: dict[str, dict[str, Any]] = {
    f"hybrid, p_g {p}, t_g {t}": {"generate": MeshShape(pipe=p, tensor=t)}
    for p in (1, 2)
    for t in (1, 2, 4)
}
LAYOUTS |= {
    "hybrid-v": {"generate": MeshShape(tensor=2), "relay": "hybrid-v"},
    "hybrid-v, p_g 2": {"generate": MeshShape(pipe=2, tensor=2), "relay": "hybrid-v"},
    "hybrid-v-permute": {"generate": MeshShape(tensor=2), "relay": "hybrid-v-permute"},
    "shared": {"relay": "shared"},
    "ds-chat": {
        "train": MeshShape(fsdp=8),
        "generate": MeshShape(tensor=2),
        "relay": "ds-chat",
    },
    "zero 1": {"train": MeshShape(fsdp=2, tensor=4), "generate": MeshShape(tensor=2), "zero": 1},
    "zero 3, pipe": {
        "train": MeshShape(fsdp=2, pipe=2, tensor=2),
        "generate": MeshShape(tensor=1),
    },
    "offload": {"generate": MeshShape(tensor=2), "offload": True},
    "two-copies": {
        "train": MeshShape(pipe=2, tensor=2),
        "generate": MeshShape(tensor=2),
        "generate_pool": "other",
        "relay": "two-copies",
    },
    "two-copies, zero 3, p_g 2, offload": {
        "train": MeshShape(fsdp=2, tensor=2),
        "generate": MeshShape(pipe=2),
        "generate_pool": "other",
        "relay": "two-copies",
        "offload": True,
    },
}


def started(model: Path, **where: Any) -> Models:
    """An actor of `model` in this process."""
    where = {"train": TRAINED} | where
    actor = RolePlacement("actor", "all", **where)
    pools = {"all": Pool("all", actor.base.devices)}
    pools |= {name: Pool(name, 4) for name in [actor.generate_pool] if name}
    placement = Placement(pools, {"actor": actor})
    training = TrainingConfig(optimizer=OptimizerConfig(lr=0.02))
    rollout = RolloutConfig(max_new_tokens=12)
    builder = partial(
        ppo.roles(SETTINGS)["actor"], model=str(model), training=training, rollout=rollout
    )
    return start(placement, {"actor": builder}, runtime="local", group=2)


def role_of(models: Models) -> Any:
    """The actor itself."""
    return models.handles["actor"].pool.worker.roles["actor"]


def generated(models: Models) -> Batch:
    """Sampled responses to eight prompts, twice each, with the log-probs of both engines."""
    rows = [
        [5, 9, 2],
        [7],
        [11, 3, 8, 90, 41],
        [1, 2, 3, 4, 5, 6, 7, 8],
        [60, 61],
        [33],
        [9, 9],
        [4],
    ]
    batch = Batch(prompt_columns([Prompt(ids, "", "", "") for ids in rows], 2))
    batch |= models.actor.generate_sequences(batch)
    return batch | models.actor.compute_log_prob(batch)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Weights before and after three large updates, made once, on one device."""
    folder = tmp_path_factory.mktemp("weights")
    before = write_tiny_hf(folder / "before", eos=None)
    with started(before, train=MeshShape()) as models:
        batch = generated(models)
        noise = np.random.default_rng(0).standard_normal(batch["input_ids"].shape)
        batch |= {"advantages": noise.astype(np.float32)}
        for _ in range(3):
            models.actor.update_actor(batch).result()
        role = role_of(models)
        params = role.held.state().params
        save_hf(params, role.config, "lm", before, folder / "after", "float32")
    return before, folder / "after"


def take(models: Models, model: Path) -> None:
    """Puts the weights of `model` into the running actor, as an update does."""
    role = role_of(models)
    config, placed = role.config, role.replicas.state_shardings
    params = load_params(model, config, "lm", placed, "float32")
    role.held.take(role.trainer.init_state(params))


@pytest.fixture(scope="module")
def expected(weights: tuple[Path, Path]) -> list[Batch]:
    """What one device generates with the weights before and after."""
    before, after = weights
    assert load_config(before) == load_config(after)
    with started(before, train=MeshShape()) as models:
        first = generated(models)
        take(models, after)
        return [first, generated(models)]


def assert_same_tokens(found: Batch, wanted: Batch) -> None:
    """Row by row; where a row first differs, the two tokens were all but tied."""
    differ_BT = found["input_ids"] != wanted["input_ids"]
    for row in np.flatnonzero(differ_BT.any(-1)):
        t = int(differ_BT[row].argmax())
        gap = abs(found["rollout_log_probs"][row, t] - wanted["rollout_log_probs"][row, t])
        assert gap < TIE, f"row {row} differs from column {t} on"


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_every_layout_generates_what_one_device_does_with_the_newest_weights(
    name: str, weights: tuple[Path, Path], expected: list[Batch]
) -> None:
    before, after = weights
    with started(before, **LAYOUTS[name]) as models:
        found = [generated(models)]
        take(models, after)
        found.append(generated(models))
    for ours, wanted in zip(found, expected, strict=True):
        assert_same_tokens(ours, wanted)
        gap_BT = np.abs(ours["rollout_log_probs"] - ours["old_log_probs"])
        assert gap_BT.max() < 1e-4
    assert jax.device_count() == 8


def test_the_updates_were_large(expected: list[Batch]) -> None:
    """Old and new weights differ by more than 0.1 in the log-prob of a token, most by far more."""
    old, new = expected
    first_B = old["prompt_length"]
    rows = np.arange(len(first_B))
    gaps = np.abs(old["old_log_probs"][rows, first_B] - new["old_log_probs"][rows, first_B])
    assert (gaps > 0.1).mean() > 0.5


HYBRID: dict[str, Any] = {"generate": MeshShape(tensor=1)}
COPIES: dict[str, Any] = {"relay": "two-copies", "generate_pool": "value"} | HYBRID
POOLS: dict[str, tuple[str, bool, dict[str, Any]]] = {  # the critic's pool, offload, the actor's
    "one pool": ("policy", False, HYBRID),
    "one pool, offload": ("policy", True, HYBRID),
    "two pools": ("value", False, HYBRID),
    "two pools, offload": ("value", True, HYBRID),
    "two copies, offload": ("value", True, COPIES),
}


def first_reward(prompts: list[str], responses: list[str], truths: list[str]) -> list[float]:
    """A number of the response's first word."""
    return [float(int(response.split()[0][1:]) % 7) for response in responses]


@pytest.mark.parametrize("name", POOLS)
def test_each_step_generates_with_the_weights_of_the_last_update(name: str, tmp_path: Path) -> None:
    """PPO with a learning rate far too large, three steps."""
    pool, offload, relay = POOLS[name]
    train_shape = MeshShape(fsdp=2, tensor=2)
    roles = {
        "actor": RolePlacement("actor", "policy", train=train_shape, offload=offload, **relay),
        "critic": RolePlacement("critic", pool, train=MeshShape(data=4), offload=offload),
    }
    pools = {each: Pool(each, 4) for each in ("policy", *{pool} - {"policy"})}
    (tmp_path / "placement.toml").write_text(Placement(pools, roles).to_toml())
    changes: list[tuple[float, float]] = []

    def step(m: Any, prompts: Batch, cfg: Any) -> tuple[Batch, Any]:
        batch, metrics = ppo.step(m, prompts, cfg)
        now = m.actor.compute_log_prob(batch)["old_log_probs"]
        trainer, mask = batch["old_log_probs"], batch["response_mask"]
        rollout = batch["rollout_log_probs"]
        changes.append(tuple(np.abs(x - trainer)[mask].mean() for x in (rollout, now)))
        return batch, metrics

    algorithm = ModuleType("stepped")
    vars(algorithm).update(vars(ppo), step=step)
    config = configured(
        *(algorithm, tmp_path, write_tiny_hf(tmp_path / "model", eos=None), PROMPTS),
        steps=3,
        actor={"optimizer": {"lr": 0.02}},
        rollout={"ignore_eos": True},
        reward={"function": f"{__file__}:first_reward"},
        algorithm={"kl": {"where": "none"}},
    )
    train(algorithm, config)
    assert len(changes) == 3
    assert max(gap for gap, _ in changes) <= 1e-4
    assert min(change for _, change in changes) > 0.1
