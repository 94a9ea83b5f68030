# SPDX-License-Identifier: Apache-2.0
"""Losses and their gradients against the papers' formulas in float64, and against rlax."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from algorithms import grpo, ppo, reinforce_pp, remax, rloo, safe_rlhf
from hfjax import rl
from hfjax.batch import Batch
from hfjax.config import KLConfig

RNG = np.random.default_rng(0)
MASK_BT = np.array([[0, 1, 1, 1, 0], [0, 1, 0, 1, 1], [0, 1, 0, 0, 0]] * 4, bool)
LOGP_BT, OLD_BT, REF_BT = -2 * RNG.random((3, *MASK_BT.shape))
ADVANTAGE_BT, VALUE_BT, RETURN_BT = RNG.normal(size=(3, *MASK_BT.shape))


def slopes(f: Callable[[np.ndarray], Any], x: np.ndarray, h: float = 1e-6) -> np.ndarray:
    """Central differences of a scalar function of float64 numbers."""
    found = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[i] = h
        found[i] = (f(x + step) - f(x - step)) / (2 * h)
    return found


def surrogate(logp: np.ndarray, low: float, high: float, c: float) -> float:
    """PPO's equation 7 with the dual clip, a mean over tokens."""
    r, a = np.exp(logp - OLD_BT), ADVANTAGE_BT
    objective = np.minimum(r * a, np.clip(r, 1 - low, 1 + high) * a)
    objective = np.where(a < 0, np.maximum(objective, c * a), objective)
    return -objective[MASK_BT].mean()


def sequence_surrogate(logp: np.ndarray, low: float, high: float) -> float:
    """GSPO's objective (its equation 5): the ratio is the geometric mean of a row's."""
    n = MASK_BT.sum(-1)
    s_B = np.exp(np.where(MASK_BT, logp - OLD_BT, 0).sum(-1) / n)
    a_B = np.where(MASK_BT, ADVANTAGE_BT, 0).sum(-1) / n  # one number a row
    return -np.minimum(s_B * a_B, np.clip(s_B, 1 - low, 1 + high) * a_B).mean()


def squares(values: np.ndarray, clip: float) -> float:
    clipped = np.clip(values, VALUE_BT - clip, VALUE_BT + clip)
    worse = np.maximum((values - RETURN_BT) ** 2, (clipped - RETURN_BT) ** 2)
    return 0.5 * worse[MASK_BT].mean()


KL = {
    "k1": lambda logp: (logp - REF_BT)[MASK_BT].mean(),
    "k2": lambda logp: 0.5 * ((logp - REF_BT) ** 2)[MASK_BT].mean(),
    "k3": lambda logp: (np.exp(REF_BT - logp) - (REF_BT - logp) - 1)[MASK_BT].mean(),
}


def check(ours: Callable[..., Any], papers: Callable[..., Any], x: np.ndarray) -> None:
    """Value and gradient, garbage under the mask."""
    filled = np.where(MASK_BT, x, np.nan).astype(np.float32)
    value, gradient = jax.value_and_grad(ours)(jnp.asarray(filled))
    assert value == pytest.approx(papers(x), abs=1e-5)
    np.testing.assert_allclose(gradient, slopes(papers, x), atol=1e-5)


def mean(loss_BT: jax.Array, mode: str = "token-mean") -> jax.Array:
    return rl.aggregate(loss_BT, MASK_BT, rl.denominators(MASK_BT), mode)


@pytest.mark.parametrize(("low", "high", "c"), [(0.2, 0.2, 3.0), (0.1, 0.3, 1.2), (0.5, 0.9, 50.0)])
def test_the_policy_loss_and_its_gradient(low: float, high: float, c: float) -> None:
    def ours(logp: jax.Array) -> jax.Array:
        clips = {"clip_low": low, "clip_high": high, "dual_clip": c}
        return mean(rl.policy_loss(logp, OLD_BT, ADVANTAGE_BT, MASK_BT, **clips)[0])

    check(ours, lambda x: surrogate(x, low, high, c), LOGP_BT)


def test_gspo_and_its_gradient() -> None:
    row_B = np.where(MASK_BT, ADVANTAGE_BT, 0).sum(-1) / MASK_BT.sum(-1)
    advantage_BT = np.repeat(row_B[:, None], MASK_BT.shape[1], 1)

    def ours(logp: jax.Array) -> jax.Array:
        how = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "ratio": "sequence"}
        loss_BT, _ = rl.policy_loss(logp, OLD_BT, advantage_BT, MASK_BT, **how)
        return mean(loss_BT, "seq-mean-token-mean")

    check(ours, lambda x: sequence_surrogate(x, 0.2, 0.2), LOGP_BT)


@pytest.mark.parametrize("clip", [0.1, 5.0])
def test_the_value_loss_and_its_gradient(clip: float) -> None:
    def ours(values: jax.Array) -> jax.Array:
        return mean(rl.value_loss(values, VALUE_BT, RETURN_BT, MASK_BT, clip=clip)[0])

    check(ours, lambda x: squares(x, clip), VALUE_BT + 0.3 * ADVANTAGE_BT)


@pytest.mark.parametrize("kind", KL)
def test_the_divergence_and_its_gradient(kind: str) -> None:
    def ours(logp: jax.Array) -> jax.Array:
        return mean(rl.kl_penalty(kind, logp, REF_BT, MASK_BT))

    check(ours, KL[kind], LOGP_BT)


@pytest.mark.hf
def test_rlax_has_the_same_advantages_and_surrogate() -> None:
    rlax = pytest.importorskip("rlax")
    rewards_T, values_T = RNG.normal(size=(2, 6)).astype(np.float32)
    whole_1T = np.ones((1, 6), bool)
    ours, _ = rl.gae(rewards_T[None], values_T[None], whole_1T, 0.9, 0.8)
    ends_T = np.array([0.9] * 5 + [0.0], np.float32)  # nothing comes after the last token
    theirs = rlax.truncated_generalized_advantage_estimation(
        rewards_T, ends_T, 0.8, np.append(values_T, np.float32(0))
    )
    np.testing.assert_allclose(ours[0], theirs, atol=1e-5)
    ratios_T = np.exp(RNG.normal(size=6)).astype(np.float32)
    advantages_T = RNG.normal(size=6).astype(np.float32)
    loss_1T, _ = rl.policy_loss(
        np.log(ratios_T)[None], np.zeros((1, 6)), advantages_T[None], whole_1T, dual_clip=None
    )
    theirs = rlax.clipped_surrogate_pg_loss(jnp.asarray(ratios_T), jnp.asarray(advantages_T), 0.2)
    assert float(loss_1T.mean()) == pytest.approx(float(theirs), abs=1e-5)


def a_batch(mask_BT: np.ndarray) -> Batch:
    """Four rows of two prompts; NaN where the mask is False."""
    rng = np.random.default_rng(1)
    numbers = rng.normal(size=(4, *mask_BT.shape)).astype(np.float32)
    names = ("values", "cost_values", "old_log_probs", "ref_log_prob")
    columns = {n: np.where(mask_BT, x, np.nan) for n, x in zip(names, numbers, strict=True)}
    score_B, cost_B = rng.normal(size=(2, 4)).astype(np.float32)
    uid_B = np.array([0, 0, 1, 1])
    return Batch(columns, response_mask=mask_BT, score=score_B, cost=cost_B, uid=uid_B)


def advantages(algorithm: Any, batch: Batch) -> Batch:
    """What the algorithm's arithmetic on the controller makes of it."""
    kl = {} if algorithm is grpo else {"kl": KLConfig(where="reward", estimator="k1", coef=0.1)}
    more = {"multiplier_lr": 1e-9} if algorithm is safe_rlhf else {}
    compute, cfg = algorithm.compute_advantage, algorithm.Settings(**kl, **more)
    if algorithm is remax:
        first = batch.select(rl.first_rows(batch["uid"]))
        compute = partial(compute, greedy=first)
    return compute(batch, cfg=cfg) if algorithm is grpo else compute(batch, cfg=cfg, memory={})


@pytest.mark.parametrize("algorithm", [ppo, grpo, remax, rloo, reinforce_pp, safe_rlhf])
def test_tokens_of_a_tool_are_as_if_they_were_not_there(algorithm: Any) -> None:
    """Two tokens inside each response are left out of the mask, or were never there."""
    holes_BT = np.array([[0, 1, 0, 0, 1, 1], [0, 1, 0, 0, 1, 0]] * 2, bool)
    with_holes = a_batch(holes_BT)
    kept = [0, 1, 4, 5]
    names = ("values", "cost_values", "old_log_probs", "ref_log_prob", "response_mask")
    without = with_holes | {name: with_holes[name][:, kept] for name in names}
    found, wanted = advantages(algorithm, with_holes), advantages(algorithm, without)
    for name in set(wanted.names) - {"response_mask"}:
        np.testing.assert_allclose(found[name][:, kept], wanted[name], atol=1e-6, err_msg=name)
        assert not np.asarray(found[name])[~holes_BT].any(), name
    for name, value in dict(wanted.metrics.result()).items():
        assert found.metrics.result()[name] == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("algorithm", [ppo, grpo, remax, rloo, reinforce_pp, safe_rlhf])
@pytest.mark.parametrize("score", [1.0, np.nan])
def test_a_batch_without_a_trained_token_prepares_nothing(algorithm: Any, score: float) -> None:
    """Every reward failed, or no row has a response: zeros, and no metric that is NaN."""
    batch = a_batch(np.zeros((4, 3), bool))
    scores = {name: np.full(4, score, np.float32) for name in ("score", "cost")}
    found = advantages(algorithm, batch | scores)
    for name in set(found.names) - {"response_mask"}:
        assert not np.asarray(found[name]).any(), name
    assert np.isfinite(list(dict(found.metrics.result()).values())).all()
