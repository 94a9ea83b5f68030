# SPDX-License-Identifier: Apache-2.0
"""Roles trained in one layout that score in another: the same numbers, after updates too."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from algorithms import ppo, reward_model
from hfjax.batch import Batch
from hfjax.config import KLConfig, RolloutConfig, TrainingConfig
from hfjax.controller.handle import Models, start
from hfjax.controller.protocol import Shard
from hfjax.engine.passes import Passes
from hfjax.engine.scoring import Scorer
from hfjax.engine.train import OptimizerConfig
from hfjax.items import Prompt, prompt_columns
from hfjax.roles import check_model
from hfjax.run import train
from meshes.mesh import MeshShape
from meshes.placement import Placement, Pool, RolePlacement, load_placement
from tests.fixtures import is_timing, write_tiny_hf
from tests.test_run import configured, records

SETTINGS = ppo.Settings(kl=KLConfig(where="none"))
ROLES = ppo.roles(SETTINGS) | reward_model.roles(reward_model.Settings())
METHODS = {  # a forward pass, its column, the update
    "actor": ("compute_log_prob", "old_log_probs", "update_actor"),
    "critic": ("compute_values", "values", "update_critic"),
    "judge": ("compute_reward", "score", "update_reward"),
}
PAIRS = {
    "fsdp4, tensor2 data2": (
        {"train": MeshShape(fsdp=4)},
        MeshShape(data=2, tensor=2),
    ),
    "pipe2 data2, data4, generate": (
        {"train": MeshShape(data=2, pipe=2), "generate": MeshShape()},
        MeshShape(data=4),
    ),
    "zero1, fsdp4, offload": (
        {"train": MeshShape(fsdp=4), "zero": 1, "offload": True},
        MeshShape(fsdp=4),
    ),
    "tensor4, pipe2 fsdp2, generate": (
        {"train": MeshShape(tensor=4), "generate": MeshShape(tensor=2)},
        MeshShape(fsdp=2, pipe=2),
    ),
    "sequence parallel, of 8 devices": (
        {"train": MeshShape(fsdp=4, data=2), "sequence_parallel": True},
        MeshShape(tensor=4, fsdp=2),
    ),
}


def started(folder: Path, where: dict[str, Any], infer: MeshShape, *roles: str) -> Models:
    """Roles whose updates are large; a vocabulary that tensor 4 pads."""
    policy = write_tiny_hf(folder / "policy", eos=None, vocab_size=98)
    score = write_tiny_hf(folder / "score", head="score", seed=1, eos=None, vocab_size=98)
    training = TrainingConfig(optimizer=OptimizerConfig(lr=0.02))
    rollout = RolloutConfig(max_new_tokens=8)
    builders = {
        "actor": partial(ROLES["actor"], model=str(policy), training=training, rollout=rollout),
        "critic": partial(ROLES["critic"], model=str(score), training=training),
        "judge": partial(ROLES["reward_model"], model=str(score), training=training),
    }
    placed = {role: RolePlacement(role, "all", infer=infer, **where) for role in roles}
    placement = Placement({"all": Pool("all", infer.devices)}, placed)
    return start(placement, {role: builders[role] for role in roles}, runtime="local")


def said(m: Models, role: str, batch: Batch) -> np.ndarray:
    """What the role says of the rows, in its layout for that."""
    method = getattr(getattr(m, role), METHODS[role][0])
    return np.asarray(method(batch)[METHODS[role][1]])


def said_in_training(m: Models, role: str, batch: Batch) -> np.ndarray:
    """The same by the weights and in the layout of training."""
    it = getattr(m, role).pool.worker.roles[role]
    scorer = Scorer(it.config, it.replicas)
    compute = (scorer.log_probs, scorer.values, scorer.scores)[list(METHODS).index(role)]
    names = ("input_ids", "length")[: 1 + (role == "judge")]
    columns = {name: batch[name] for name in names}
    shard = Shard(columns, np.arange(len(batch)), len(batch), 1, 0)
    over = Passes(it.mesh, it.layout).over
    found = over(shard, names, partial(compute, it.held.train()))[0]
    return found if found.ndim == 1 else np.where(batch["response_mask"], found, np.float32(0))


@pytest.mark.parametrize(
    ("name", "roles"),
    [
        ("fsdp4, tensor2 data2", ["critic"]),
        pytest.param("fsdp4, tensor2 data2", ["actor", "judge"], marks=pytest.mark.slow),
        pytest.param("pipe2 data2, data4, generate", ["actor"], marks=pytest.mark.slow),
        pytest.param("zero1, fsdp4, offload", ["critic"], marks=pytest.mark.slow),
        pytest.param("tensor4, pipe2 fsdp2, generate", ["actor"], marks=pytest.mark.slow),
        pytest.param("sequence parallel, of 8 devices", ["critic"], marks=pytest.mark.slow),
    ],
)
def test_scores_are_those_of_the_training_layout_before_and_after_each_update(
    name: str, roles: list[str], tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    batch = Batch(
        prompt_columns([Prompt([3 + k, 7, 9][: 1 + k % 3], "", "", "") for k in range(8)])
    )
    with started(tmp_path, *PAIRS[name], *roles) as m:
        if "actor" in roles:
            batch |= m.actor.generate_sequences(batch)
        else:
            ids_BT, length_B = (
                rng.integers(3, 96, (8, 16), np.int32),
                np.arange(9, 17, dtype=np.int32),
            )
            mask_BT = (np.arange(16) < length_B[:, None]) & (np.arange(16) > 2)
            batch |= {"input_ids": ids_BT, "length": length_B, "response_mask": mask_BT}
        names = ("old_log_probs", "values", "advantages", "returns")
        numbers = rng.standard_normal((4, *batch["input_ids"].shape)).astype(np.float32)
        batch |= dict(zip(names, numbers, strict=True))
        for role in roles:
            before = None
            for _ in range(2):
                found = said(m, role, batch)
                np.testing.assert_array_equal(found, said(m, role, batch))
                wanted = said_in_training(m, role, batch)
                np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
                assert before is None or np.abs(found - before).max() > 0.05
                before = found
                getattr(getattr(m, role), METHODS[role][2])(batch).result()
                if role == "actor":
                    m.actor.generate_sequences(batch)


def test_a_layout_to_score_in_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    model = write_tiny_hf(tmp_path)
    place = RolePlacement("critic", "all", train=MeshShape(data=3), infer=MeshShape(tensor=3))
    with pytest.raises(ValueError, match=r"'infer' on mesh tensor 3: tensor=3 does not .* heads=8"):
        check_model(partial(ROLES["critic"], model=str(model)), place, 1, 1)


@pytest.mark.slow
def test_a_run_with_a_layout_to_score_in_has_the_losses_of_one_without(tmp_path: Path) -> None:
    """PPO with rows scored in every step, on two devices; training lies as it does without."""
    model = write_tiny_hf(tmp_path / "model")
    placement = tmp_path / "infer.toml"
    devices = "[pool.all]\ndevices = 2\n"
    for role in ("actor", "critic"):
        devices += f'[{role}]\npool = "all"\ntrain = {{ data = 2 }}\ninfer = {{ tensor = 2 }}\n'
    placement.write_text(f'{devices}[reference]\npool = "all"\ninfer = {{ data = 2 }}\n')
    plain = load_placement(placement)
    roles = {name: replace(role, infer=None) for name, role in plain.roles.items() if role.train}
    plain = replace(plain, roles={**plain.roles, **roles})
    found = []
    for name, placed in (("own", load_placement(placement)), ("plain", plain)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "placement.toml").write_text(placed.to_toml())
        settings = {"algorithm": {"old_log_probs": "score"}, "steps": 2}
        optimizer = {"actor": {"optimizer": {"lr": 1e-3}}, "critic": {"optimizer": {"lr": 1e-3}}}
        prompts: list[Any] = [[3, 4, 5], [6, 7], [8, 9, 10, 11, 12], [13]]
        found.append(
            records(train(ppo, configured(ppo, folder, model, prompts, **settings, **optimizer)))
        )
    assert len(found[0]) == 2
    for own, other in zip(*found, strict=True):
        for key, number in other.items():
            if not is_timing(key):
                assert own[key] == pytest.approx(number, abs=1e-5, rel=1e-5), key
