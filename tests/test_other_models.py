# SPDX-License-Identifier: Apache-2.0
"""A critic and a reward model of another family and size than the actor, in one run with it."""

import dataclasses
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from algorithms import ppo, safe_rlhf
from hfjax.algorithm import config_class
from hfjax.engine.scoring import scores_at_end, values_of
from hfjax.models.hf import load_config, load_params
from hfjax.models.llama import Head
from hfjax.prepare import prepare
from hfjax.run import Run, train
from hfjax.rundir import export_run
from meshes.mesh import MeshShape
from meshes.placement import Placement, Pool, RolePlacement
from tests.fixtures import is_timing, write_tiny_hf
from tests.test_run import configured, records, watched

SMALL: dict[str, Any] = {  # no size is the actor's
    "family": "qwen2",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 112,  # more than the actor's 96: its ids are the first of them
    "seed": 1,
}
PROMPTS = [[5, 9, 7], [7], [11, 3, 8, 90], [60, 61]]


DATA, TENSOR, FSDP = MeshShape(data=2), MeshShape(tensor=2), MeshShape(fsdp=2)
COLOCATED = Placement(  # each role in a layout of its own
    {"all": Pool("all", 2)},
    {
        "actor": RolePlacement("actor", "all", train=DATA),
        "critic": RolePlacement("critic", "all", train=TENSOR),
        "reference": RolePlacement("reference", "all", infer=TENSOR),
        "reward": RolePlacement("reward", "all", infer=FSDP),
    },
    "cpu",
)
THREE_POOLS = Placement(
    {"policy": Pool("policy", 4), "value": Pool("value", 2), "score": Pool("score", 2)},
    {
        "actor": RolePlacement("actor", "policy", train=MeshShape(fsdp=2, tensor=2)),
        "critic": RolePlacement("critic", "value", train=FSDP, offload=True),
        "reference": RolePlacement("reference", "policy", infer=MeshShape(data=4)),
        "reward": RolePlacement("reward", "score", infer=TENSOR),
    },
    "cpu",
)


def asked(folder: Path, critic: str, placed: Placement = COLOCATED, **settings: Any) -> Any:
    """PPO of a tiny Llama."""
    placement = folder / "placement.toml"
    placement.write_text(placed.to_toml())
    judge = write_tiny_hf(folder / "judge", head="score", **SMALL | {"seed": 2})
    table: dict[str, Any] = {
        "steps": 2,
        "save_every": 1,
        "reward": {"model": str(judge), "function": "", "workers": 2},
        "actor": {"optimizer": {"lr": 1e-3}},
        "critic": {"model": critic},
    }
    model = write_tiny_hf(folder / "model", max_position_embeddings=256)
    return configured(ppo, folder, model, PROMPTS, **table | settings)


def expected(model: Path, head: Head, batch: dict[str, Any]) -> np.ndarray:
    """Values or scores by the model alone, on one device."""
    config, tokens_BT = load_config(model), batch["input_ids"]
    params = load_params(model, config, head)
    if head == "score":
        return np.asarray(
            jax.jit(scores_at_end, static_argnums=0)(config, params, tokens_BT, batch["length"])
        )
    values_BT = np.asarray(jax.jit(values_of, static_argnums=0)(config, params, tokens_BT))
    return np.where(batch["response_mask"], values_BT, 0)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["score", "lm"])
def test_critic_and_reward_are_models_of_their_own(head: str, tmp_path: Path) -> None:
    """A critic started from a score model has its head; from a language model's files, zeros.

    A run goes on with its own alone.
    """
    critic = write_tiny_hf(tmp_path / "critic", head=head, **SMALL)
    algorithm, batches = watched(ppo)
    config = asked(tmp_path, str(critic), steps=1)
    (record,) = records(train(algorithm, config))
    (batch,) = batches
    values_BT = expected(critic, "value", batch)
    assert (np.abs(values_BT).max() > 0.1) == (head == "score")
    np.testing.assert_allclose(batch["values"], values_BT, atol=1e-5)
    score_B = expected(tmp_path / "judge", "score", batch)
    np.testing.assert_allclose(batch["score"], score_B, atol=1e-5)
    assert record["critic/grad_norm"] > 0
    assert record["critic/skipped"] == 0
    third = write_tiny_hf(tmp_path / "third", **SMALL | {"seed": 3})
    other = dataclasses.replace(config.critic, model=str(third))
    with pytest.raises(ValueError, match=r"critic\.model was '.*critic', is '.*third'"):
        Run(ppo, dataclasses.replace(config, steps=3, resume=True, critic=other))


@pytest.mark.slow
def test_a_run_with_a_critic_of_its_own_is_resumed_bit_for_bit_and_exported(
    tmp_path: Path,
) -> None:
    critic = write_tiny_hf(tmp_path / "critic", **SMALL)
    config = asked(tmp_path, str(critic))
    whole = records(train(ppo, config))
    part = dataclasses.replace(config, out=str(tmp_path / "part"))
    train(ppo, dataclasses.replace(part, steps=1))
    found = records(train(ppo, dataclasses.replace(part, resume=True)))
    for ours, theirs in zip(found, whole, strict=True):
        names = [name for name in theirs if not is_timing(name)]
        assert {name: ours[name] for name in names} == {name: theirs[name] for name in names}
    export_run(part.out, tmp_path / "exported")
    assert load_config(tmp_path / "exported") == load_config(tmp_path / "model")


@pytest.mark.slow
def test_three_pools_give_the_losses_of_one(tmp_path: Path) -> None:
    """Actor and reference on four devices, critic and reward model on two each."""
    critic = write_tiny_hf(tmp_path / "critic", head="score", **SMALL)
    found = []
    for placed in (COLOCATED, THREE_POOLS):
        algorithm, batches = watched(ppo)
        out = str(tmp_path / f"{len(placed.pools)}-pools")
        config = asked(tmp_path, str(critic), placed, steps=1, out=out)
        found.append((batches, records(train(algorithm, config))[0]))
    ((one,), first), ((three,), second) = found
    np.testing.assert_array_equal(one["input_ids"], three["input_ids"])
    for name in ("values", "score", "ref_log_prob", "advantages", "returns"):
        np.testing.assert_allclose(three[name], one[name], atol=1e-5, err_msg=name)
    for name in ("actor/pg_loss", "critic/vf_loss", "actor/grad_norm", "critic/grad_norm"):
        np.testing.assert_allclose(second[name], first[name], rtol=1e-5, atol=1e-5, err_msg=name)


def test_a_critic_of_costs_has_a_model_too_and_the_actor_has_the_runs() -> None:
    config = config_class(safe_rlhf)()
    assert config.critic.model == config.cost_critic.model == ""
    assert not hasattr(config.actor, "model")


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "no files": ({}, r"critic\.model='.*nowhere' is neither a directory"),
    "too few ids": ({"vocab_size": 90}, r"token id 95 .*vocabulary of 90 of .*critic"),
    "too few positions": (
        {"max_position_embeddings": 8},
        r"rows of up to 12 tokens .* exceed the 8 positions of .*critic",
    ),
    "heads": ({"num_attention_heads": 3, "num_key_value_heads": 3}, "does not divide heads=3"),
    "tokenizer": ({}, r"critic' has another tokenizer .*: id 7 is 't8' there and 't7' here"),
    "weights": ({}, "config.json says"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_critics_model_that_cannot_be_its_is_refused_before_anything_starts(
    case: str, tmp_path: Path
) -> None:
    sizes, message = REFUSALS[case]
    critic = write_tiny_hf(tmp_path / "critic", **SMALL | sizes)
    name = tmp_path / "nowhere" if case == "no files" else critic
    if case == "tokenizer":
        words = json.loads((critic / "tokenizer.json").read_text())
        words["model"]["vocab"] |= {"t7": 8, "t8": 7}
        (critic / "tokenizer.json").write_text(json.dumps(words))
    if case == "weights":
        raw = json.loads((critic / "config.json").read_text())
        (critic / "config.json").write_text(json.dumps(raw | {"intermediate_size": 48}))
    with pytest.raises(ValueError, match=message):
        prepare(ppo, asked(tmp_path, str(name)), datetime(2026, 1, 2))
