# SPDX-License-Identifier: Apache-2.0
"""The four roles on whole rows: neighbours, widths, fillers and padding ids change no number."""

import dataclasses
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from algorithms import ppo, safe_rlhf
from hfjax.batch import Batch
from hfjax.config import KLConfig, RolloutConfig, TrainingConfig
from hfjax.controller.handle import Models, start
from hfjax.controller.worker import RoleError
from hfjax.engine.train import OptimizerConfig
from hfjax.items import Example, Prompt, example_columns, prompt_columns
from hfjax.roles import Reward
from meshes.mesh import MeshShape
from meshes.placement import Placement, Pool, RolePlacement
from tests.fixtures import slow_but, write_lut, write_tiny_hf

SETTINGS = ppo.Settings(kl=KLConfig(where="loss", estimator="k3", coef=0.1))
ROLES = ppo.roles(SETTINGS)
FROZEN = TrainingConfig(optimizer=OptimizerConfig(lr=0.0))
ONE = MeshShape()
SHORT, LONG = [5, 9, 2, 44, 17], list(range(40, 63))
PER_TOKEN = ("input_ids", "rollout_log_probs", "old_log_probs", "ref_log_prob", "values")


def started(shape: MeshShape = ONE, *, group: int = 1, **builders: Any) -> Models:
    """The roles, all on one mesh, in this process."""
    roles = {role: RolePlacement(role, "all", train=shape) for role in builders}
    placement = Placement({"all": Pool("all", shape.devices)}, roles)
    return start(placement, builders, runtime="local", group=group)


def an_actor(model: Path, **rollout: Any) -> Any:
    """Its updates move nothing, so that it can be asked twice."""
    settings = RolloutConfig(**rollout)
    return partial(ROLES["actor"], model=str(model), training=FROZEN, rollout=settings)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    """Random weights and no stop token; the critic's head is a score model's, not zeros."""
    folder = tmp_path_factory.mktemp("models")
    policy = write_tiny_hf(folder / "policy", eos=None)
    score = write_tiny_hf(folder / "score", head="score", seed=1, eos=None)
    with started(
        actor=an_actor(policy, max_new_tokens=16),
        critic=partial(ROLES["critic"], model=str(score), training=FROZEN),
        reference=partial(ROLES["reference"], model=str(policy)),
        reward=partial(ROLES["reward"], model=str(score)),
    ) as started_models:
        yield started_models


def prompts(*rows: list[int], n: int = 1) -> Batch:
    """Columns of prompts given as ids."""
    return Batch(prompt_columns([Prompt(ids, "", "", "") for ids in rows], n))


def scored(m: Models, batch: Batch) -> Batch:
    """With what each of the four roles says of the rows."""
    batch = batch | m.actor.compute_log_prob(batch)
    batch |= m.reference.compute_ref_log_prob(batch)
    batch |= m.critic.compute_values(batch)
    return batch | m.reward.compute_reward(batch)


def response(batch: Batch, row: int) -> dict[str, np.ndarray]:
    """A row's response tokens and what was said of them, and its score."""
    mask_T = batch["response_mask"][row]
    return {name: batch[name][row][mask_T] for name in PER_TOKEN} | {"score": batch["score"][row]}


def assert_same_response(found: Batch, row: int, wanted: dict[str, np.ndarray]) -> None:
    for name, value in response(found, row).items():
        np.testing.assert_allclose(value, wanted[name], rtol=0, atol=1e-5, err_msg=name)


@pytest.fixture(scope="module")
def alone(models: Models) -> Batch:
    """The short prompt with its greedy response, a batch of its own."""
    batch = prompts(SHORT)
    return scored(models, batch | models.actor.generate_sequences(batch, greedy=True))


def test_a_row_beside_a_longer_one_is_to_every_role_what_it_is_alone(
    models: Models, alone: Batch
) -> None:
    wanted = response(alone, 0)
    assert len(wanted["input_ids"]) == 16
    assert np.abs(wanted["values"]).min() > 1e-3
    batch = prompts(LONG, SHORT)
    batch |= models.actor.generate_sequences(batch, greedy=True)
    assert_same_response(scored(models, batch), 1, wanted)


@pytest.mark.parametrize("width", [1, 7, 64])
def test_columns_behind_a_row_change_nothing_that_a_role_says_of_it(
    models: Models, alone: Batch, width: int
) -> None:
    names = ("input_ids", "response_mask", "rollout_log_probs")
    wider = {name: np.pad(alone[name], [(0, 0), (0, width)]) for name in names}
    wider["input_ids"][:, -width:] = 95
    assert_same_response(scored(models, alone | wider), 0, response(alone, 0))


def test_what_fills_a_row_up_behind_its_limit_is_neither_scored_nor_trained(
    models: Models,
) -> None:
    """A response of 3 without a stop token in a row of 24: loss, KL and advantages are its own."""
    batch = prompts([3], [4, 5]) | {"max_new_tokens": np.array([3, 3], np.int32)}
    batch |= models.actor.generate_sequences(batch)
    assert [np.flatnonzero(row).tolist() for row in batch["response_mask"]] == [
        [1, 2, 3],
        [2, 3, 4],
    ]
    assert batch["truncated"].all()
    behind_BT = np.arange(24) >= batch["length"][:, None]
    found = []
    for filler in (0, 15):
        ids_BT = np.where(behind_BT, np.int32(filler), batch["input_ids"])
        filled = scored(models, batch | {"input_ids": ids_BT})
        filled |= ppo.compute_advantage(filled, SETTINGS, {})
        metrics = models.critic.update_critic(filled) | models.actor.update_actor(filled)
        columns = {name: filled[name] for name in filled.names if name != "input_ids"}
        found.append((columns, dict(metrics.result())))
    (first, first_metrics), (second, second_metrics) = found
    assert first_metrics == second_metrics
    assert first_metrics["actor/grad_norm"] > 0
    for name, column in first.items():
        np.testing.assert_array_equal(column, second[name], err_msg=name)


def test_a_padding_id_that_is_the_stop_token_masks_no_stop_token(tmp_path: Path) -> None:
    """With 2 or 0 for it the same masks, log-probs and loss, also of a prompt that holds a 2."""
    found = []
    for pad in (2, 0):
        model = write_tiny_hf(tmp_path / f"{pad}", eos=2)
        file = model / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"pad_token": f"t{pad}"}))
        with started(
            group=16, actor=an_actor(model, n=16, temperature=4.0, max_new_tokens=32)
        ) as m:
            batch = prompts([6, 2, 3], LONG[:8], n=16)
            batch |= m.actor.generate_sequences(batch)
            batch |= m.actor.compute_log_prob(batch)
            ones_BT = np.where(batch["response_mask"], np.float32(1), np.float32(0))
            batch |= {"advantages": ones_BT, "ref_log_prob": batch["old_log_probs"] - ones_BT}
            metrics = m.actor.update_actor(batch).result()
        found.append({name: np.asarray(batch[name]) for name in batch.names} | dict(metrics))
    for name, value in found[0].items():
        np.testing.assert_array_equal(value, found[1][name], err_msg=name)
    batch = found[0]
    stopped_B = ~batch["truncated"]
    assert 0 < stopped_B.sum() < 32
    columns_T = np.arange(batch["input_ids"].shape[1])
    length_B, first_B = batch["length"][:, None], batch["prompt_length"][:, None]
    mask_BT = (columns_T >= first_B) & (columns_T < length_B)
    np.testing.assert_array_equal(batch["response_mask"], mask_BT)
    last_B = np.take_along_axis(batch["input_ids"], length_B - 1, axis=1)[:, 0]
    np.testing.assert_array_equal(last_B == 2, stopped_B)


def test_a_vocabulary_padded_for_tensor_parallelism_has_no_more_words(tmp_path: Path) -> None:
    """11 words held as 12, all equally likely: log 11 = 2.39790, where log 12 would be 2.48491."""
    model = write_lut(tmp_path, np.zeros((11, 11), np.float32))
    drawn = []
    for tensor in (1, 4):
        actor = an_actor(model, n=5000, max_new_tokens=1)
        with started(MeshShape(tensor=tensor), group=5000, actor=actor) as m:
            assert m.actor.pool.worker.roles["actor"].config.padded_vocab == 12 - (tensor == 1)
            batch = prompts([3], n=5000)
            batch |= m.actor.generate_sequences(batch)
            batch |= m.actor.compute_log_prob(batch)
        for name in ("rollout_log_probs", "old_log_probs"):
            np.testing.assert_allclose(batch[name][:, 1], -2.39790, atol=1e-5)
        np.testing.assert_allclose(batch["entropy"][:, 1], 2.39790, atol=1e-5)
        drawn.append(batch["input_ids"][:, 1])
    assert set(drawn[0]) == set(range(11))
    np.testing.assert_array_equal(*drawn)


def test_a_score_model_reads_the_last_token_and_adds_its_bias(tmp_path: Path) -> None:
    """Text 3, 2, 5, 7 with stop token 2 inside and behind it: 4 x 0.25 for token 7, and 0.5."""
    model = write_lut(tmp_path, scores=np.eye(16)[7], bias=0.5)
    rows = [
        [3, 2, 5, 7, 2, 2, 2],
        [3, 2, 5, 7, 0, 0, 0],
        [3, 2, 5, 7, 7, 9, 1],
        [2, 2, 2, 3, 2, 5, 7],
    ]
    together = Batch(input_ids=np.array(rows, np.int32), length=np.array([4, 4, 4, 7], np.int32))
    by_itself = Batch(input_ids=np.array([[3, 2, 5, 7]], np.int32), length=np.array([4], np.int32))
    with started(reward=partial(Reward, model=str(model))) as m:
        for batch in (together, by_itself):
            score_B = m.reward.compute_reward(batch)["score"]
            np.testing.assert_allclose(score_B, [1.5] * len(score_B), atol=1e-5)


def test_metrics_of_an_update_carry_the_roles_name(tmp_path: Path) -> None:
    """Two policies in one run do not take each other's place."""
    policy = write_tiny_hf(tmp_path / "policy", eos=None)
    builder = partial(ROLES["actor"], model=str(policy), training=FROZEN)
    batch = prompts([5, 9, 2])
    with started(actor=an_actor(policy, max_new_tokens=4), student=builder) as m:
        batch |= m.actor.generate_sequences(batch)
        batch |= m.actor.compute_log_prob(batch)
        batch |= {"advantages": np.ones_like(batch["old_log_probs"])}
        batch |= {"ref_log_prob": batch["old_log_probs"]}
        found = {**m.actor.update_actor(batch).result(), **m.student.update_actor(batch).result()}
    assert {"actor/loss", "student/loss", "actor/grad_norm", "student/grad_norm"} <= found.keys()


def test_rows_of_different_prompts_are_not_taken_for_one_prompts(models: Models) -> None:
    with pytest.raises(RoleError, match="2 neighbouring rows are not one prompt each"):
        models.actor.generate_sequences(prompts([3], [4, 5]), group=2)
    both = models.actor.generate_sequences(prompts([3], [4, 5], n=2), group=2, greedy=True)
    one = models.actor.generate_sequences(prompts([3], [4, 5]), group=1, greedy=True)
    np.testing.assert_array_equal(both["input_ids"][::2], one["input_ids"])


@pytest.mark.parametrize("micro", slow_but([0, 1], 1))
def test_texts_are_learned_as_text_whatever_the_temperature_of_sampling(
    tmp_path: Path, micro: int
) -> None:
    model = write_tiny_hf(tmp_path / "model")
    training = dataclasses.replace(FROZEN, micro_sequences=micro)
    loss = partial(safe_rlhf.pretrain_loss, cfg=safe_rlhf.Settings(ptx_coef=1.0))
    rollout = RolloutConfig(temperature=0.5)
    builder = partial(ROLES["actor"], model=str(model), training=training, rollout=rollout)
    with started(
        actor=partial(builder, pretrain=loss),
        reference=partial(ROLES["reference"], model=str(model)),
    ) as models:
        examples = [Example(ids, [False] + [True] * (len(ids) - 1)) for ids in ([3, 4, 5], [6, 7])]
        texts = Batch(example_columns(examples, 1))
        (record,) = [models.actor.update_pretrain(texts).result()]
        logp_BT = models.reference.compute_ref_log_prob(texts)["ref_log_prob"]
    mean = -logp_BT[texts["response_mask"]].mean()
    assert record["actor/pretrain_nll"] == pytest.approx(mean, abs=1e-5)
