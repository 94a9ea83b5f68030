# SPDX-License-Identifier: Apache-2.0
"""Losses, gradients and advantages against NumPy transcriptions; masks and cuts change nothing."""

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms import dpo, grpo, ppo, reinforce_pp, remax, reward_model, rloo, safe_rlhf, sft
from hfjax import policy, rl
from hfjax.batch import Batch
from hfjax.config import KLConfig
from hfjax.engine.train import Outputs
from hfjax.metrics import finalize, merge

B, T = 4, 5
GAMMA, LAM = 0.9, 0.8


def normal(seed: int, scale: float = 1.0) -> np.ndarray:
    """(B, T) float32, as float64, so that both sides read the same numbers."""
    x_BT = np.random.default_rng(seed).normal(0, scale, (B, T))
    return x_BT.astype(np.float32).astype(np.float64)


def holed(seed: int = 0) -> np.ndarray:
    """(B, T) bool with holes; every row has a True token."""
    mask_BT = np.random.default_rng(seed).random((B, T)) < 0.7
    mask_BT[:, 2] = True
    return mask_BT


X: Any = normal(1)
OLD: Any = normal(2)
ADVANTAGE: Any = normal(3)
MASK: Any = holed()
ROW_ADVANTAGE: Any = np.where(MASK, ADVANTAGE[:, :1], 0)


# --- the papers, in float64


def np_policy(x: np.ndarray, low: float, high: float, c: float | None) -> float:
    """PPO eq. 7; where A < 0 the objective is at least c A (dual clip eq. 5)."""
    r = np.exp(x - OLD)
    objective = np.minimum(r * ADVANTAGE, np.clip(r, 1 - low, 1 + high) * ADVANTAGE)
    if c is not None:
        objective = np.where(ADVANTAGE < 0, np.maximum(objective, c * ADVANTAGE), objective)
    return -objective[MASK].mean()


def np_value(x: np.ndarray, clip: float) -> float:
    clipped = OLD + np.minimum(np.maximum(x - OLD, -clip), clip)
    return 0.5 * np.maximum((x - ADVANTAGE) ** 2, (clipped - ADVANTAGE) ** 2)[MASK].mean()


def np_kl(x: np.ndarray, kind: str) -> float:
    """Schulman's estimators of KL(x || OLD), with r = p_OLD / p_x."""
    r = np.exp(OLD - x)
    return {"k1": -np.log(r), "k2": np.log(r) ** 2 / 2, "k3": r - 1 - np.log(r)}[kind][MASK].mean()


def np_gspo(x: np.ndarray, low: float, high: float) -> float:
    """GSPO eq. 5 and 7: one ratio and one advantage a row."""
    total = 0.0
    for i in range(B):
        s = np.exp((x - OLD)[i][MASK[i]].mean())
        a = ADVANTAGE[i, 0]
        total += min(s * a, np.clip(s, 1 - low, 1 + high) * a)
    return -total / B


def np_dpo(x: np.ndarray, cfg: dpo.Settings) -> float:
    """DPO eq. 7, cDPO's labels turned round with probability s; IPO eq. 17 of token means."""
    losses = []
    for i in range(0, B, 2):
        w, l = ((x - OLD)[j][MASK[j]] for j in (i, i + 1))
        if cfg.loss == "ipo":
            losses.append((w.mean() - l.mean() - 1 / (2 * cfg.beta)) ** 2)
        else:
            p, s = 1 / (1 + np.exp(-cfg.beta * (w.sum() - l.sum()))), cfg.label_smoothing
            losses.append(-(1 - s) * np.log(p) - s * np.log(1 - p))
    return float(np.mean(losses))


def np_bradley_terry(x: np.ndarray, s: float, centre: float) -> float:
    w, l = x[::2, 0], x[1::2, 0]
    p = np.exp(w) / (np.exp(w) + np.exp(l))
    return float(np.mean(-(1 - s) * np.log(p) - s * np.log(1 - p) + centre * (w + l) ** 2))


def mean(x_BT: Any, mode: str = "token-mean") -> jax.Array:
    return rl.aggregate(x_BT, jnp.asarray(MASK), rl.denominators(jnp.asarray(MASK)), mode)


def ours_policy(x: Any, low: float, high: float, c: float | None) -> jax.Array:
    clips: dict[str, Any] = {"clip_low": low, "clip_high": high, "dual_clip": c}
    return mean(rl.policy_loss(x, OLD, ADVANTAGE, MASK, **clips)[0])


def ours_value(x: Any, clip: float) -> jax.Array:
    return mean(rl.value_loss(x, OLD, ADVANTAGE, MASK, clip=clip)[0])


def ours_kl(x: Any, kind: str) -> jax.Array:
    return mean(rl.kl_penalty(kind, x, OLD, MASK))


def ours_gspo(x: Any, low: float, high: float) -> jax.Array:
    clips: dict[str, Any] = {"clip_low": low, "clip_high": high, "dual_clip": None}
    loss_BT, _ = rl.policy_loss(x, OLD, ROW_ADVANTAGE, MASK, ratio="sequence", **clips)
    return mean(loss_BT, "seq-mean-token-mean")


def ours_dpo(x: Any, cfg: dpo.Settings) -> jax.Array:
    batch = {"ref_log_prob": jnp.asarray(OLD), "response_mask": jnp.asarray(MASK)}
    total = rl.denominators(jnp.asarray(MASK))
    return dpo.dpo_loss(Outputs(log_probs_BT=x), batch, total, cfg=cfg)[0]


def ours_bradley_terry(x: Any, s: float, centre: float) -> jax.Array:
    cfg = reward_model.Settings(label_smoothing=s, centre=centre)
    mask_BT = jnp.asarray(MASK)
    outputs, total = Outputs(scores_B=x[:, 0]), rl.denominators(mask_BT)
    return reward_model.preference_loss(outputs, {"response_mask": mask_BT}, total, cfg=cfg)[0]


PAPERS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]] = {
    "clipped": (ours_policy, np_policy, (0.1, 0.3, None)),
    "dual clip": (ours_policy, np_policy, (0.2, 0.2, 2.0)),
    "value": (ours_value, np_value, (0.5,)),
    **{kind: (ours_kl, np_kl, (kind,)) for kind in ("k1", "k2", "k3")},
    "gspo": (ours_gspo, np_gspo, (0.3, 0.4)),
    "dpo": (ours_dpo, np_dpo, (dpo.Settings(beta=0.7),)),
    "cdpo": (ours_dpo, np_dpo, (dpo.Settings(beta=0.7, label_smoothing=0.2),)),
    "ipo": (ours_dpo, np_dpo, (dpo.Settings(beta=0.7, loss="ipo"),)),
    "bradley-terry": (ours_bradley_terry, np_bradley_terry, (0.0, 0.0)),
    "smoothed and centred": (ours_bradley_terry, np_bradley_terry, (0.1, 0.3)),
}


@pytest.mark.parametrize("name", PAPERS)
def test_a_loss_and_its_gradient_are_the_papers(name: str) -> None:
    """Gradients by central differences; an entry within 1e-6 of a kink would not agree."""
    ours, paper, args = PAPERS[name]
    loss, grad = jax.value_and_grad(lambda x: ours(x, *args))(jnp.asarray(X, jnp.float32))
    np.testing.assert_allclose(loss, paper(X, *args), rtol=2e-5)
    wanted = np.zeros_like(X)
    for i in np.ndindex(X.shape):
        step = np.zeros_like(X)
        step[i] = 1e-6
        wanted[i] = (paper(X + step, *args) - paper(X - step, *args)) / 2e-6
    np.testing.assert_allclose(grad, wanted, rtol=1e-4, atol=2e-6)
    assert (wanted != 0).any()


# --- advantages


def np_gae(reward: np.ndarray, value: np.ndarray, lam: float) -> np.ndarray:
    advantage, after, next_value = np.zeros_like(reward), 0.0, 0.0
    for t in range(len(reward))[::-1]:
        after = reward[t] + GAMMA * next_value - value[t] + GAMMA * lam * after
        advantage[t], next_value = after, value[t]
    return advantage


KL = KLConfig(where="reward", estimator="k1", coef=0.1)
SCORE, COST = np.array([1.0, 3.0, -2.0, 0.5]), np.array([2.0, 0.0, 1.0, -1.0])
GREEDY, UID = np.array([0.5, -1.0]), np.array([7, 7, 9, 9])
VALUES, COST_VALUES = normal(4), normal(5)


def advantage_batch(mask_BT: np.ndarray = MASK) -> Batch:
    tokens = {"old_log_probs": X, "ref_log_prob": OLD, "values": VALUES, "cost_values": COST_VALUES}
    columns = {name: x.astype(np.float32) for name, x in tokens.items()}
    rows = {"score": SCORE.astype(np.float32), "cost": COST.astype(np.float32), "uid": UID}
    return Batch(columns | rows | {"response_mask": mask_BT})


def greedy_batch() -> Batch:
    mask_BT = np.ones((2, 1), bool)
    return Batch(score=GREEDY.astype(np.float32), response_mask=mask_BT, uid=np.array([7, 9]))


def rows_of(x_BT: np.ndarray) -> list[np.ndarray]:
    return [x[mask] for x, mask in zip(x_BT, MASK, strict=True)]


def rewards(score_B: np.ndarray, sign: float = 1.0) -> list[np.ndarray]:
    """Minus beta (log p - log p_ref) a token, the score on the last one."""
    out = [-sign * KL.coef * x for x in rows_of(X - OLD)]
    for row, score in zip(out, score_B, strict=True):
        row[-1] += score
    return out


def whitened(rows: list[np.ndarray]) -> np.ndarray:
    x = np.concatenate(rows)
    return (x - x.mean()) / np.sqrt(x.var(ddof=1) + 1e-8)


def np_to_come(rows: list[np.ndarray], gamma: float) -> list[np.ndarray]:
    return [
        np.array([sum(gamma ** (s - t) * r[s] for s in range(t, len(r))) for t in range(len(r))])
        for r in rows
    ]


def np_ppo() -> np.ndarray:
    pairs = zip(rewards(SCORE), rows_of(VALUES), strict=True)
    return whitened([np_gae(r, v, LAM) for r, v in pairs])


def np_rloo() -> np.ndarray:
    r = np.array([row.sum() for row in rewards(SCORE)])
    a = [r[0] - r[1], r[1] - r[0], r[2] - r[3], r[3] - r[2]]
    return np.repeat(a, MASK.sum(-1))


def np_remax() -> np.ndarray:
    rows = np_to_come(rewards(SCORE), 1.0)
    return np.concatenate([row - b for row, b in zip(rows, np.repeat(GREEDY, 2), strict=True)])


def np_grpo() -> np.ndarray:
    pairs = SCORE.reshape(2, 2)
    centred, std = pairs - pairs.mean(1, keepdims=True), pairs.std(1, ddof=1, keepdims=True)
    return np.repeat((centred / (std + 1e-6)).ravel(), MASK.sum(-1))


def np_safe() -> np.ndarray:
    """log lambda += lr lambda (mean cost - limit); (A_r - lambda A_c) / (1 + lambda)."""
    multiplier = np.exp(np.log(0.5) + 0.1 * 0.5 * (COST.mean() - 0.2))
    gains = zip(rewards(SCORE), rows_of(VALUES), strict=True)
    harms = zip(rewards(COST, sign=-1.0), rows_of(COST_VALUES), strict=True)
    gain, harm = (np.concatenate([np_gae(r, v, LAM) for r, v in part]) for part in (gains, harms))
    return (gain - multiplier * harm) / (1 + multiplier)


SAFE = safe_rlhf.Settings(kl=KL, gamma=GAMMA, lam=LAM, multiplier=0.5, cost_limit=0.2)
ADVANTAGES: dict[str, tuple[ModuleType, Any, Callable[[], np.ndarray]]] = {
    "ppo": (ppo, ppo.Settings(kl=KL, gamma=GAMMA, lam=LAM), np_ppo),
    "rloo": (rloo, rloo.Settings(kl=KL), np_rloo),
    "remax": (remax, remax.Settings(kl=KL), np_remax),
    "reinforce_pp": (
        reinforce_pp,
        reinforce_pp.Settings(kl=KL, gamma=GAMMA),
        lambda: whitened(np_to_come(rewards(SCORE), GAMMA)),
    ),
    "grpo": (grpo, grpo.Settings(), np_grpo),
    "safe_rlhf": (safe_rlhf, SAFE, np_safe),
}


def prepared(name: str, batch: Batch) -> Batch:
    module, cfg, _ = ADVANTAGES[name]
    more = {"remax": (greedy_batch(), cfg, {}), "grpo": (cfg,)}.get(name, (cfg, {}))
    return module.compute_advantage(batch, *more)


def advantages(name: str, batch: Batch) -> np.ndarray:
    """Those of the batch's trained tokens, row after row."""
    return np.asarray(prepared(name, batch)["advantages"])[batch["response_mask"]]


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_are_the_papers(name: str) -> None:
    wanted = ADVANTAGES[name][2]()
    np.testing.assert_allclose(advantages(name, advantage_batch()), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_hole_in_a_response_is_as_if_cut_out(name: str) -> None:
    """The tokens of a tool's output, say, whatever stands there."""
    with_hole, cut_out = {}, {"response_mask": np.arange(T) < MASK.sum(-1)[:, None]}
    batch = advantage_batch()
    for key in ("old_log_probs", "ref_log_prob", "values", "cost_values"):
        with_hole[key] = np.where(MASK, batch[key], np.float32(np.nan))
        cut_out[key] = np.zeros((B, T), np.float32)
        cut_out[key][cut_out["response_mask"]] = batch[key][MASK]
    found, wanted = (advantages(name, batch | more) for more in (with_hole, cut_out))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_the_adaptive_kl_coefficient_is_the_papers() -> None:
    """arXiv 1909.08593 section 2.2: the error is clipped to a fifth."""
    for kl in (0.0, 1.05, 0.9, 4.0):
        error = np.clip((kl - 1.0) / 1.0, -0.2, 0.2)
        found = rl.adapted_kl_coef(0.3, kl, 64, target=1.0, horizon=1000)
        assert found == pytest.approx(0.3 * (1 + error * 64 / 1000))


@pytest.mark.hf
def test_rlax_agrees() -> None:
    rlax = pytest.importorskip("rlax")
    whole = jnp.ones((1, T), bool)
    for i in range(B):
        r, v = (jnp.asarray(x[i], jnp.float32) for x in (X, VALUES))
        found, _ = rl.gae(r[None], v[None], whole, GAMMA, LAM)
        args = jnp.full(T, GAMMA), LAM, jnp.append(v, 0.0)
        wanted = rlax.truncated_generalized_advantage_estimation(r, *args)
        np.testing.assert_allclose(found[0], wanted, rtol=1e-5, atol=1e-6)
        a = jnp.asarray(ADVANTAGE[i], jnp.float32)
        loss_BT, _ = rl.policy_loss(r[None], 0 * r[None], a[None], whole, dual_clip=None)
        wanted = rlax.clipped_surrogate_pg_loss(jnp.exp(r), a, 0.2)
        np.testing.assert_allclose(loss_BT.mean(), wanted, rtol=1e-5)


PAIRS = 3
EVERYTHING = policy.PolicySettings(
    kl=KLConfig(where="loss", coef=0.3), entropy_coef=0.2, rollout_correction="token"
)
OF_ROWS = policy.PolicySettings(
    kl=KLConfig(where="loss", estimator="k2", coef=0.3),
    ratio="sequence",
    rollout_correction="sequence",
    aggregation="seq-mean-token-mean",
)
LOSSES: dict[str, tuple[Callable[..., Any], Any]] = {
    "policy with everything": (policy.policy_loss, EVERYTHING),
    "policy of rows": (policy.policy_loss, OF_ROWS),
    "measured": (
        policy.measured_loss,
        policy.PolicySettings(aggregation="seq-mean-token-sum", entropy_coef=0.1),
    ),
    "value": (ppo.critic_loss, ppo.Settings()),
    "dpo": (dpo.dpo_loss, dpo.Settings(label_smoothing=0.1)),
    "ipo": (dpo.dpo_loss, dpo.Settings(loss="ipo")),
    "reward model": (
        reward_model.preference_loss,
        reward_model.Settings(label_smoothing=0.1, centre=0.2),
    ),
    "sft": (sft.sft_loss, sft.Settings()),
    "pretrain": (safe_rlhf.pretrain_loss, safe_rlhf.Settings(ptx_coef=2.0)),
}
NAMES = (
    *("log_probs", "entropy", "new_values", "scores", "old_log_probs", "ref_log_prob"),
    *("advantages", "values", "returns", policy.ROLLOUT),
)
Columns = dict[str, Any]


@jax.jit
def every_loss(columns: Columns, mask_BT: jax.Array, total: rl.Denominators) -> dict[str, Any]:
    """((loss, metrics), gradients to every column) of every loss."""

    def of(columns: Columns, name: str) -> Any:
        outputs = Outputs(
            log_probs_BT=columns["log_probs"],
            entropy_BT=columns["entropy"],
            values_BT=columns["new_values"],
            scores_B=columns["scores"],
        )
        batch = {**columns, "response_mask": mask_BT}
        loss, cfg = LOSSES[name]
        return loss(outputs, batch, total, cfg=cfg)

    return {name: jax.value_and_grad(of, has_aux=True)(columns, name) for name in LOSSES}


CASES = st.tuples(
    st.integers(0, 2**32 - 1),
    st.integers(0, T - 1),
    st.lists(st.booleans(), min_size=PAIRS, max_size=PAIRS),
)
Case = tuple[int, int, list[bool]]


def drawn(seed: int, column: int, real_N: list[bool]) -> tuple[Columns, np.ndarray]:
    """Columns, and a mask with holes, True in one column; pairs that are not real are masked."""
    rng = np.random.default_rng(seed)
    mask_BT = rng.random((2 * PAIRS, T)) < 0.6
    mask_BT[:, column] = True
    columns: Columns = {name: rng.normal(0, 1, mask_BT.shape).astype("f4") for name in NAMES}
    columns["scores"] = columns["scores"][:, 0]
    return columns, mask_BT & np.repeat(real_N, 2)[:, None]


def filled(columns: Columns, mask_BT: np.ndarray, garbage: float) -> Columns:
    masks = {name: mask_BT if x.ndim == 2 else mask_BT.any(-1) for name, x in columns.items()}
    return {name: np.where(masks[name], x, np.float32(garbage)) for name, x in columns.items()}


@settings(max_examples=20, deadline=None)
@given(CASES, st.sampled_from([1e30, -np.inf, np.nan]))
def test_garbage_under_the_mask_changes_no_loss(case: Case, garbage: float) -> None:
    columns, mask_BT = drawn(*case)
    total = rl.denominators(jnp.asarray(mask_BT))
    found, wanted = (
        every_loss(filled(columns, mask_BT, x), mask_BT, total) for x in (garbage, 0.0)
    )
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    for (loss, _), grads in found.values():
        assert np.isfinite(loss)
        kept = filled(grads, mask_BT, 0.0)
        jax.tree.map(np.testing.assert_array_equal, kept, jax.tree.map(np.asarray, grads))


@settings(max_examples=12, deadline=None)
@given(CASES, st.permutations(range(PAIRS)), st.sampled_from([[1, 1, 1], [2, 1], [1, 2]]))
def test_no_cut_into_micro_batches_changes_a_loss(
    case: Case, order: list[int], sizes: list[int]
) -> None:
    columns, mask_BT = drawn(*case)
    total = rl.denominators(jnp.asarray(mask_BT))
    whole = every_loss(columns, mask_BT, total)
    pairs = np.split(np.array(order), np.cumsum(sizes)[:-1])
    parts = [(2 * pair[:, None] + np.arange(2)).ravel() for pair in pairs]
    found = [
        every_loss({name: x[rows] for name, x in columns.items()}, mask_BT[rows], total)
        for rows in parts
    ]
    for name, ((loss, metrics), grads) in whole.items():
        np.testing.assert_allclose(sum(f[name][0][0] for f in found), loss, rtol=1e-5, atol=1e-6)
        merged: dict[str, Any] = {}
        for rows, f in zip(parts, found, strict=True):
            merged = merge(merged, f[name][0][1])
            for column, grad in f[name][1].items():
                np.testing.assert_allclose(grad, grads[column][rows], rtol=1e-5, atol=1e-7)
        assert finalize(merged) == pytest.approx(finalize(metrics), rel=1e-5, abs=1e-6)


@cache
def statistics(name: str, garbage: float) -> dict[str, Any]:
    """What an algorithm prepares where row 2 is masked out, and its metrics."""
    mask_BT = MASK & (np.arange(B) != 2)[:, None]
    batch = advantage_batch(mask_BT)
    keys = ("old_log_probs", "ref_log_prob", "values", "cost_values")
    columns = {key: np.where(mask_BT, batch[key], np.float32(garbage)) for key in keys}
    real_B = mask_BT.any(-1)
    columns |= {key: np.where(real_B, batch[key], np.float32(garbage)) for key in ("score", "cost")}
    found = prepared(name, batch | columns)
    return {key: np.asarray(found[key]) for key in found.names} | found.metrics.result()


@pytest.mark.parametrize("garbage", [1e30, np.inf, np.nan])
@pytest.mark.parametrize("name", ADVANTAGES)
def test_garbage_under_the_mask_changes_no_statistic(name: str, garbage: float) -> None:
    found = statistics(name, garbage)
    assert all(np.isfinite(x).all() for x in found.values())
    jax.tree.map(np.testing.assert_array_equal, found, statistics(name, 0.0))
