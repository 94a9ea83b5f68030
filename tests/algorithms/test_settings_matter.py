# SPDX-License-Identifier: Apache-2.0
"""Every setting of every algorithm moves a number, or changes what is called."""

import dataclasses
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

from algorithms import dpo, grpo, ppo, reinforce_pp, remax, reward_model, rloo, safe_rlhf, sft
from hfjax import rl
from hfjax.batch import Batch
from hfjax.config import KLConfig
from hfjax.engine.train import Outputs
from hfjax.policy import takes_rollout

ALL = (ppo, grpo, remax, rloo, reinforce_pp, safe_rlhf, dpo, reward_model, sft)
NORM = {"aggregation": "seq-mean-token-sum-norm", "aggregation_length": 7}
LONG = {"overlong_from": 1, "overlong_buffer": 2}
WEIGHED = {"rollout_correction": "token"}
STEERED = KLConfig(where="reward", estimator="k2", coef=0.3, target=0.5)
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of a field: settings to compare
    "clip_low": ({}, {"clip_low": 0.05}),
    "clip_high": ({}, {"clip_high": 0.05}),
    "dual_clip": ({"dual_clip": 0.0}, {"dual_clip": 1.01}),
    "ratio": ({}, {"ratio": "sequence"}),
    "rollout_correction": ({}, {"rollout_correction": "token"}),
    "rollout_cap": (WEIGHED, WEIGHED | {"rollout_cap": 1.1}),
    "old_log_probs": ({}, {"old_log_probs": "score"}),
    "entropy_coef": ({}, {"entropy_coef": 0.1}),
    "aggregation": ({"aggregation": "token-mean"}, {"aggregation": "token-sum"}),
    "aggregation_length": (NORM, NORM | {"aggregation_length": 9}),
    "gamma": ({}, {"gamma": 0.5}),
    "lam": ({}, {"lam": 0.5}),
    "value_clip": ({}, {"value_clip": 0.01}),
    "normalize": ({}, {"normalize": "none"}),
    "dynamic_batches": ({}, {"dynamic_batches": 2}),
    "overlong_from": ({}, LONG),
    "overlong_buffer": (LONG, LONG | {"overlong_buffer": 1}),
    "overlong_factor": (LONG, LONG | {"overlong_factor": 0.5}),
    "baseline": ({}, {"baseline": "group"}),
    "cost_limit": ({}, {"cost_limit": 0.4}),
    "multiplier": ({}, {"multiplier": 2.0}),
    "multiplier_lr": ({}, {"multiplier_lr": 0.5}),
    "multiplier_max": ({}, {"multiplier_max": 1.0}),
    "cost_window": ({}, {"cost_window": 1}),
    "cost_critic": ({}, {"cost_critic": False}),
    "ptx_coef": ({"ptx_coef": 1.0}, {"ptx_coef": 2.0}),
    "score_clip": ({}, {"score_clip": 0.1}),
    "beta": ({}, {"beta": 0.7}),
    "loss": ({}, {"loss": "ipo"}),
    "label_smoothing": ({}, {"label_smoothing": 0.3}),
    "centre": ({}, {"centre": 0.3}),
}
KL_CHANGES = {
    "where": (KLConfig(where="loss"), KLConfig(where="none")),
    "estimator": (KLConfig(where="loss", estimator="k2"), KLConfig(where="loss", estimator="k3")),
    "coef": (KLConfig(where="loss", coef=0.1), KLConfig(where="loss", coef=0.2)),
    "target": (STEERED, dataclasses.replace(STEERED, target=2.5)),
    "horizon": (STEERED, dataclasses.replace(STEERED, horizon=5.0)),
}


def a_batch() -> Batch:
    """Sixteen rows, two of a prompt, with every column that a loss or an advantage reads."""
    rng = np.random.default_rng(3)
    mask_BT = np.array([[0, 1, 1, 1], [0, 1, 1, 0], [0, 0, 1, 1], [0, 0, 1, 0]] * 4, bool)
    names = ("old_log_probs", "ref_log_prob", "values", "cost_values", "rollout_log_probs")
    columns = {name: rng.normal(size=(16, 4)).astype(np.float32) for name in names}
    return Batch(
        columns,
        rollout_truncated_log_probs=columns["rollout_log_probs"],
        response_mask=mask_BT,
        prompt_length=np.array([1, 1, 2, 2] * 4),
        length=np.array([4, 3, 4, 3] * 4),
        score=rng.normal(size=16).astype(np.float32),
        cost=rng.normal(size=16).astype(np.float32) + 1,
        uid=np.arange(16) // 2,
    )


def trace_of(algorithm: ModuleType, cfg: Any) -> Any:
    """All that settings can move: advantages of two steps, losses, gradients, roles."""
    batch, told, memory = a_batch(), [], {}
    if algorithm not in (dpo, reward_model, sft):
        for _ in range(2):
            args = [batch.select(rl.first_rows(batch["uid"]))] if algorithm is remax else []
            args += [cfg] if algorithm is grpo else [cfg, memory]
            made = algorithm.compute_advantage(batch, *args)
            told.append(jax.tree.map(np.asarray, dict(made.resolved())))
            told.append(dict(made.metrics.result()))
        batch |= made
        told += [takes_rollout(cfg), getattr(cfg, "dynamic_batches", 0)]
    columns, total = batch.resolved(), rl.denominators(batch["response_mask"])
    x_BT = np.random.default_rng(4).normal(size=(16, 4)).astype(np.float32)
    for role, builder in algorithm.roles(cfg).items():
        told.append(role)
        for name in ("loss", "pretrain"):
            if loss := builder.keywords.get(name):

                def of(x_BT: jax.Array, loss: Any = loss) -> Any:
                    outputs = Outputs(x_BT, x_BT**2, x_BT, x_BT[:, -1])
                    return loss(outputs, columns, total)[0]

                told.append(jax.value_and_grad(of)(x_BT))
    return jax.tree.leaves(told, is_leaf=lambda x: x is None)


def differ(one: list[Any], other: list[Any]) -> bool:
    if len(one) != len(other):
        return True
    same = (
        np.array_equal(a, b, equal_nan=np.asarray(a).dtype.kind == "f")
        for a, b in zip(one, other, strict=True)
    )
    return not all(same)


@pytest.mark.parametrize("algorithm", ALL, ids=lambda algorithm: algorithm.__name__)
def test_every_setting_has_an_effect(algorithm: ModuleType) -> None:
    fields = {field.name for field in dataclasses.fields(algorithm.Settings)}
    for name in sorted(fields - {"kl"}):
        one, other = (algorithm.Settings(**settings) for settings in CHANGES[name])
        assert getattr(one, name) != getattr(other, name), name
        assert differ(trace_of(algorithm, one), trace_of(algorithm, other)), name
    assert not differ(*(trace_of(algorithm, algorithm.Settings()) for _ in range(2)))


@pytest.mark.parametrize("algorithm", ALL[:6], ids=lambda algorithm: algorithm.__name__)
@pytest.mark.parametrize("name", KL_CHANGES)
def test_every_setting_of_the_divergence_has_an_effect(algorithm: ModuleType, name: str) -> None:
    kls = KL_CHANGES[name]
    if algorithm is grpo and kls[0].where == "reward":
        with pytest.raises(ValueError, match=r"kl\.where=reward"):
            grpo.Settings(kl=kls[0])
        return
    one, other = (trace_of(algorithm, algorithm.Settings(kl=kl)) for kl in kls)
    assert differ(one, other)
