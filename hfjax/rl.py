# SPDX-License-Identifier: Apache-2.0
"""Masked statistics, advantages, KL and clipped losses as pure functions of arrays and floats.

Per-token arrays are (B, T), column t belonging to the token it scores; masks are bool and True on
trained response tokens, with holes and empty rows allowed. What stands under False, NaN included,
changes neither values nor gradients. Everything is computed in float32.
"""

import math
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from hfjax.metrics import Mean

MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8: far outside any clip range, yet finite in float32
WHITEN_EPS = 1e-8

Pair = tuple[jax.Array, jax.Array]


class Denominators(NamedTuple):
    """What the losses of one GLOBAL mini-batch divide by, whatever part of it a device holds."""

    tokens: jax.Array
    sequences: jax.Array


def denominators(mask_BT: jax.Array) -> Denominators:
    """True tokens, and rows that have any: a masked-out row counts in neither."""
    mask_BT = jnp.asarray(mask_BT)
    return Denominators(mask_BT.sum(dtype=jnp.int32), mask_BT.any(-1).sum(dtype=jnp.int32))


def _under(mask: jax.Array, x: jax.Array) -> jax.Array:
    """x in float32, 0 where masked. Applied to inputs, so that gradients there are 0, not NaN."""
    return jnp.where(mask, jnp.asarray(x).astype(jnp.float32), 0.0)


def masked_mean(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Σ m x / Σ m, and 0 under an empty mask (verl adds 1e-8 to the divisor instead)."""
    count = jnp.asarray(mask).sum(dtype=jnp.float32)
    return _under(mask, x).sum() / jnp.maximum(count, 1.0)


def masked_whiten(x: jax.Array, mask: jax.Array) -> jax.Array:
    """(x - μ) / √(v + 1e-8) over the True entries of the whole, global, batch; 0 elsewhere.

    v has n-1 in the divisor, as verl (OpenRLHF: n). One True entry has no variance and whitens to
    0 (verl raises).
    """
    mean = masked_mean(x, mask)
    centred = _under(mask, _under(mask, x) - mean)
    freedom = jnp.maximum(jnp.asarray(mask).sum(dtype=jnp.float32) - 1.0, 1.0)
    return _under(mask, centred * jax.lax.rsqrt((centred**2).sum() / freedom + WHITEN_EPS))


def over_tokens(x_B: jax.Array, mask_BT: jax.Array) -> jax.Array:
    """A number a sequence, spread over its response tokens."""
    return _under(mask_BT, jnp.broadcast_to(jnp.asarray(x_B)[:, None], mask_BT.shape))


def token_rewards(score_B: jax.Array, mask_BT: jax.Array) -> jax.Array:
    """The sequence's score on its last response token (last True); an empty row gets none."""
    columns_BT = jnp.broadcast_to(jnp.arange(mask_BT.shape[-1])[None], mask_BT.shape)
    last_B = jnp.where(mask_BT, columns_BT, -1).max(-1)
    return over_tokens(score_B, columns_BT == last_B[:, None])


@jax.jit  # called eagerly, a scan over a new closure would compile at every call
def gae(
    rewards_BT: jax.Array, values_BT: jax.Array, mask_BT: jax.Array, gamma: float, lam: float
) -> tuple[jax.Array, jax.Array]:
    """Generalised advantages and returns = advantages + values, before any whitening; 0 if masked.

    A_t = delta_t + gamma lam A_next, delta_t = r_t + gamma V_next - V_t (arXiv 1506.02438 eq. 16),
    V_t the value BEFORE token t and `next` the row's next True token: masked tokens, a tool's
    output say, are stepped over, as verl does (OpenRLHF zeroes them and discounts through them).
    Past the end both are 0.
    """
    rewards_BT, values_BT = _under(mask_BT, rewards_BT), _under(mask_BT, values_BT)

    def back(next_B: Pair, at_B: tuple[jax.Array, ...]) -> tuple[Pair, jax.Array]:
        (next_value_B, next_advantage_B), (reward_B, value_B, mask_B) = next_B, at_B
        delta_B = reward_B + gamma * next_value_B - value_B
        advantage_B = delta_B + gamma * lam * next_advantage_B
        next_value_B = jnp.where(mask_B, value_B, next_value_B)
        return (next_value_B, jnp.where(mask_B, advantage_B, next_advantage_B)), advantage_B

    end_B = jnp.zeros(rewards_BT.shape[0], jnp.float32)
    columns_TB = (rewards_BT.T, values_BT.T, jnp.asarray(mask_BT).T)
    _, advantages_TB = jax.lax.scan(back, (end_B, end_B), columns_TB, reverse=True)
    advantages_BT = _under(mask_BT, advantages_TB.T)
    return advantages_BT, _under(mask_BT, advantages_BT + values_BT)


def _log_ratio(logp: jax.Array, ref: jax.Array) -> jax.Array:
    """Δ = logp - ref clamped to ±20, its gradient not: a token that drifted away is pulled back."""
    delta = jnp.asarray(logp).astype(jnp.float32) - jnp.asarray(ref).astype(jnp.float32)
    fixed = jax.lax.stop_gradient(delta)
    return jnp.clip(fixed, -MAX_LOG_RATIO, MAX_LOG_RATIO) + (delta - fixed)


def kl_k1(logp: jax.Array, ref: jax.Array) -> jax.Array:
    """Δ: unbiased, may be negative; its gradient is 0 in expectation, so not for use in a loss."""
    return _log_ratio(logp, ref)


def kl_k2(logp: jax.Array, ref: jax.Array) -> jax.Array:
    """Δ²/2: its gradient is the reverse KL's, on policy."""
    return 0.5 * _log_ratio(logp, ref) ** 2


def kl_k3(logp: jax.Array, ref: jax.Array) -> jax.Array:
    """exp(-Δ) + Δ - 1: unbiased and never negative. Not clamped itself, as verl's is to ±10."""
    delta = _log_ratio(logp, ref)
    return jnp.maximum(jnp.expm1(-delta) + delta, 0.0)  # expm1 rounds to -1e-15 near 0


KL_ESTIMATORS = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


def kl_penalty(
    kind: str, logp_BT: jax.Array, ref_BT: jax.Array, mask_BT: jax.Array | None = None
) -> jax.Array:
    """KL(policy || reference) a token, by Schulman's estimator k1, k2 or k3 of Δ = logp - ref.

    With a mask, masked entries are 0 and have no gradient, whatever stands there.
    """
    if kind not in KL_ESTIMATORS:
        raise ValueError(f"KL estimator {kind!r} is unknown; use one of {', '.join(KL_ESTIMATORS)}")
    if mask_BT is not None:
        logp_BT, ref_BT = _under(mask_BT, logp_BT), _under(mask_BT, ref_BT)
    return KL_ESTIMATORS[kind](logp_BT, ref_BT)


def kl_in_reward(
    scores_BT: jax.Array, kl_BT: jax.Array, mask_BT: jax.Array, coef: float | jax.Array
) -> jax.Array:
    """r_t = score_t - β kl_t (HybridFlow's and InstructGPT's reward); 0 where masked."""
    return _under(mask_BT, scores_BT) - coef * _under(mask_BT, kl_BT)


def adapted_kl_coef(
    coef: float, kl: float, sequences: int, *, target: float, horizon: float
) -> float:
    """The KL coefficient after `sequences` sequences, steered to a target (arXiv 1909.08593 §2.2).

    β ← β (1 + e n / horizon), e = clip(KL / target - 1, ±0.2); KL is the mean over sequences of
    each one's mean over tokens. A KL that is NaN leaves β as it is.
    """
    if math.isnan(kl):
        return coef
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * sequences / horizon)


def check_policy_clip(eps_low: float, eps_high: float, dual_clip: float | None) -> None:
    """Refuse clip settings under which the surrogate is not PPO's; for settings at the start."""
    if not 0.0 < eps_low < 1.0:
        raise ValueError(
            f"eps_low={eps_low} must be in (0, 1): the ratio's lower bound is 1-eps_low"
        )
    if not 0.0 < eps_high < math.inf:
        raise ValueError(f"eps_high={eps_high} must be finite and > 0, for example 0.2")
    if dual_clip is not None and not 1.0 < dual_clip < math.inf:
        raise ValueError(
            f"dual_clip={dual_clip} must be > 1 (3.0 is usual), or left out (in settings: 0)"
        )


def policy_loss(
    logp_BT: jax.Array,
    old_logp_BT: jax.Array,
    advantages_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = 3.0,
    ratio: str = "token",
) -> tuple[jax.Array, dict[str, Mean]]:
    """PPO's clipped surrogate a token, to be aggregated, and its metrics.

    max(-A r, -A clip(r, 1-ε_low, 1+ε_high)) (arXiv 1707.06347 eq. 7), and where A < 0 at most
    -A c (dual clip, arXiv 1912.09729 eq. 5; on at c = 3 as in verl, off in most others). r is the
    token's ratio to the old policy, or with `ratio` "sequence" the geometric mean of its row's,
    with the gradient of the token's (GSPO, arXiv 2507.18071 eq. 14); both clamped to exp(±20).
    Metrics: pg_clipfrac, where the clipped term is the larger; pg_clipfrac_lower, where the dual
    clip acts; ppo_kl, the k1 estimate of KL(old || new); ppo_kl_k3, the same by k3, never negative.
    """
    check_policy_clip(eps_low, eps_high, dual_clip)
    if ratio not in ("token", "sequence"):
        raise ValueError(f"ratio={ratio!r} is unknown; use 'token' or 'sequence'")
    log_ratio_BT = _under(mask_BT, logp_BT) - _under(mask_BT, old_logp_BT)
    advantages_BT = _under(mask_BT, advantages_BT)
    used_BT = log_ratio_BT if ratio == "token" else _sequence_log_ratio(log_ratio_BT, mask_BT)
    ratio_BT = jnp.exp(jnp.clip(used_BT, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    plain_BT = -advantages_BT * ratio_BT
    clipped_BT = -advantages_BT * jnp.clip(ratio_BT, 1.0 - eps_low, 1.0 + eps_high)
    loss_BT = jnp.maximum(plain_BT, clipped_BT)
    bound_BT = jnp.full_like(loss_BT, jnp.inf) if dual_clip is None else -dual_clip * advantages_BT
    bounded_BT = (advantages_BT < 0.0) & (loss_BT > bound_BT)
    metrics = {
        "pg_clipfrac": Mean.of(clipped_BT > plain_BT, mask_BT),
        "pg_clipfrac_lower": Mean.of(bounded_BT, mask_BT),
        "ppo_kl": Mean.of(-log_ratio_BT, mask_BT),
        "ppo_kl_k3": Mean.of(kl_k3(-log_ratio_BT, jnp.zeros_like(log_ratio_BT)), mask_BT),
    }
    return jnp.where(bounded_BT, bound_BT, loss_BT), metrics


def _sequence_log_ratio(log_ratio_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
    """The mean over a row's tokens as the value, each token's own gradient."""
    mean_B = jax.vmap(masked_mean)(log_ratio_BT, jnp.asarray(mask_BT))
    own_BT = log_ratio_BT - jax.lax.stop_gradient(log_ratio_BT)
    return over_tokens(jax.lax.stop_gradient(mean_B), mask_BT) + own_BT


Correction = Literal["none", "token", "sequence", "reject"]


def rollout_weights(
    old_logp_BT: jax.Array, rollout_logp_BT: jax.Array, mask_BT: jax.Array, *, mode: str, cap: float
) -> tuple[jax.Array, dict[str, Mean]]:
    """Importance of sampled tokens where the sampler's distribution was another, and its metrics.

    w = exp(old - rollout). token: min(w, cap) (truncated importance sampling); sequence: the same
    of the row's product. No gradient passes.
    """
    if mode not in ("token", "sequence"):
        raise ValueError(f"rollout correction {mode!r} has no weights; use 'token' or 'sequence'")
    log_BT = _under(mask_BT, old_logp_BT) - _under(mask_BT, rollout_logp_BT)
    if mode == "sequence":
        log_BT = jnp.broadcast_to(log_BT.sum(-1, keepdims=True), log_BT.shape)
    weights_BT = jax.lax.stop_gradient(jnp.exp(jnp.minimum(log_BT, math.log(cap))))
    metrics = {
        "rollout_is_mean": Mean.of(weights_BT, mask_BT),
        "rollout_is_ratio_fraction_high": Mean.of(log_BT > math.log(cap), mask_BT),
    }
    return weights_BT, metrics


def kept_rows(
    old_logp_BT: np.ndarray, rollout_logp_BT: np.ndarray, mask_BT: np.ndarray, cap: float
) -> np.ndarray:
    """(B,) whether the product of a row's ratios exp(old - rollout) lies in [1/cap, cap]."""
    gap_BT = np.where(mask_BT, old_logp_BT, 0) - np.where(mask_BT, rollout_logp_BT, 0)
    return np.abs(gap_BT.sum(-1, dtype=np.float64)) <= math.log(cap)


def value_loss(
    values_BT: jax.Array,
    old_values_BT: jax.Array,
    returns_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    clip: float = 0.5,
) -> tuple[jax.Array, dict[str, Mean]]:
    """½ max((v - R)², (v_c - R)²) a token, v_c = clip(v, v_old ± clip), and its metrics.

    With the factor ½, as verl. Metrics: vf_clipfrac, where the clipped term is the larger;
    vpred_mean.
    """
    if not clip > 0.0:
        raise ValueError(f"value clip={clip} must be > 0; use 0.5, or float('inf') for no clipping")
    values_BT, returns_BT = _under(mask_BT, values_BT), _under(mask_BT, returns_BT)
    old_BT = _under(mask_BT, old_values_BT)
    clipped_BT = (jnp.clip(values_BT, old_BT - clip, old_BT + clip) - returns_BT) ** 2
    plain_BT = (values_BT - returns_BT) ** 2
    metrics = {
        "vf_clipfrac": Mean.of(clipped_BT > plain_BT, mask_BT),
        "vpred_mean": Mean.of(values_BT, mask_BT),
    }
    return 0.5 * jnp.maximum(plain_BT, clipped_BT), metrics


def entropy(logits: jax.Array) -> jax.Array:
    """-Σ p log p over the last axis; logits already divided by the temperature, and finite."""
    logp = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -(jnp.exp(logp) * logp).sum(-1)


Aggregation = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]
AGGREGATIONS = get_args(Aggregation)


def check_aggregation(mode: str, length: float | None) -> None:
    """Refuse an unknown mode, or Dr. GRPO's without its constant; for settings at the start."""
    if mode not in AGGREGATIONS:
        raise ValueError(f"aggregation {mode!r} is unknown; use one of {', '.join(AGGREGATIONS)}")
    if mode == "seq-mean-token-sum-norm" and not (length is not None and length > 0):
        raise ValueError(
            f"{mode} divides by a constant length > 0, got {length}; use max_new_tokens"
        )


def aggregate(
    x_BT: jax.Array,
    mask_BT: jax.Array,
    denominators: Denominators,
    mode: str = "token-mean",
    *,
    length: float | None = None,
) -> jax.Array:
    """One loss from per-token terms, divided by the mini-batch's denominators.

    The results of the micro-batches ADD up to the mini-batch's, for every mode and every cut.
    token-mean Σmx/N; token-sum Σmx; seq-mean-token-sum Σ_i(Σ_t mx)/S; seq-mean-token-mean
    Σ_i(Σ_t mx/Σ_t m)/S; seq-mean-token-sum-norm Σmx/(S·length) (Dr. GRPO, arXiv 2503.20783), N
    tokens and S sequences with a True token; `length` is a constant of the settings (verl: the
    padded width, which depends on the cut). An all-masked mini-batch gives 0.
    """
    check_aggregation(mode, length)
    sums_B = _under(mask_BT, x_BT).sum(-1)
    counts_B, tokens, sequences = (
        jnp.maximum(jnp.asarray(n).astype(jnp.float32), 1.0)
        for n in (jnp.asarray(mask_BT).sum(-1), denominators.tokens, denominators.sequences)
    )
    divisor = {
        "token-mean": tokens,
        "token-sum": 1.0,
        "seq-mean-token-sum": sequences,
        "seq-mean-token-mean": sequences,
        "seq-mean-token-sum-norm": sequences * (length or 1.0),
    }[mode]
    return (sums_B / counts_B if mode == "seq-mean-token-mean" else sums_B).sum() / divisor


def loss_metric(loss: jax.Array, mask_BT: jax.Array, denominators: Denominators) -> Mean:
    """An aggregated loss as a metric: micro-batches add up, mini-batches are averaged.

    The count is the part's share of the mini-batch's tokens, 1 over the whole of it.
    """
    tokens_here = jnp.asarray(mask_BT).sum(dtype=jnp.float32)
    whole = jnp.asarray(denominators.tokens).astype(jnp.float32)
    return Mean(loss, tokens_here / jnp.maximum(whole, 1.0))


@jax.jit
def returns_to_go(rewards_BT: jax.Array, mask_BT: jax.Array, gamma: float = 1.0) -> jax.Array:
    """G_t = r_t + gamma G_next over a row's True tokens; 0 where masked."""
    return gae(rewards_BT, jnp.zeros_like(rewards_BT), mask_BT, gamma, 1.0)[1]


def rloo_advantages(
    score_B: np.ndarray, group_B: np.ndarray, *, valid_B: np.ndarray | None = None
) -> np.ndarray:
    """R less the mean of the other responses to its prompt (RLOO, arXiv 2402.14740 eq. 6).

    Rows that are not valid enter no mean and get 0, as does a row without valid others.
    """
    keep_B = np.ones(len(score_B), bool) if valid_B is None else np.asarray(valid_B)
    x = np.where(keep_B, np.asarray(score_B, np.float64), 0.0)
    _, row_group = np.unique(group_B, return_inverse=True)
    n = np.bincount(row_group, keep_B)[row_group]
    total = np.bincount(row_group, x)[row_group]
    others = np.maximum(n - 1, 1)
    return np.where(keep_B & (n > 1), x - (total - x) / others, 0.0).astype(np.float32)


def first_rows(group_B: np.ndarray) -> np.ndarray:
    """(groups,) the first row of each group, groups in ascending order."""
    return np.unique(group_B, return_index=True)[1]


def check_overlong(start: int, buffer: int, factor: float) -> None:
    """Refuse a length penalty of which one part is missing; for settings at the start."""
    both_or_neither = (start > 0) == (buffer > 0) and min(start, buffer) >= 0
    if not both_or_neither or not 0.0 < factor < math.inf:
        raise ValueError(
            f"overlong_from={start}, overlong_buffer={buffer}, overlong_factor={factor}: two "
            "counts of tokens (both 0: no penalty) and a finite number above 0"
        )
    if not start and factor != 1.0:
        raise ValueError(
            f"overlong_factor={factor}: no length costs anything with overlong_from=0; set "
            "overlong_from and overlong_buffer too, or leave it 1.0"
        )


def overlong_penalty(tokens_B: np.ndarray, start: int, buffer: int, factor: float) -> np.ndarray:
    """min(0, -(tokens - start) / buffer x factor): DAPO's length term (arXiv 2503.14476 eq. 13).

    Not bounded below, as in verl; the paper's stops at -factor, where generation does.
    """
    over_B = (np.asarray(tokens_B, np.float32) - start) / buffer
    return np.minimum(-over_B * np.float32(factor), np.float32(0))


def grpo_advantages(
    score_B: np.ndarray,
    group_B: np.ndarray,
    *,
    normalize: str = "std",
    eps: float = 1e-6,
    valid_B: np.ndarray | None = None,
) -> tuple[np.ndarray, Mean]:
    """(R - mean_g) / (std_g + eps) a row, and the share of groups whose scores are all equal.

    GRPO (arXiv 2402.03300); n-1 and eps 1e-6 as verl. normalize='none' leaves out std (Dr. GRPO).
    Rows that are not valid (their reward failed, say) enter no statistic and get 0. Equal scores
    give exactly 0. A group of one row is refused: there is nothing to compare it with.
    """
    if normalize not in ("std", "none"):
        raise ValueError(f"normalize={normalize!r} is unknown; use 'std' or 'none'")
    names, sizes = np.unique(group_B, return_counts=True)
    if (sizes == 1).any():
        raise ValueError(
            f"group {names[sizes == 1][0]} has one response; group advantages compare the "
            "responses of one prompt: use n >= 2"
        )
    keep_B = np.ones(len(score_B), bool) if valid_B is None else np.asarray(valid_B)
    x = np.asarray(score_B, np.float64)[keep_B]
    _, first, row_group = np.unique(group_B[keep_B], return_index=True, return_inverse=True)
    groups = len(first)
    n = np.bincount(row_group, minlength=groups)
    centred = x - (np.bincount(row_group, x, groups) / n)[row_group]
    sigma = np.sqrt(np.bincount(row_group, centred**2, groups) / np.maximum(n - 1, 1))
    differs = np.bincount(row_group, x != x[first][row_group], groups) > 0
    scaled = centred / (sigma + eps)[row_group] if normalize == "std" else centred
    out_B = np.zeros(len(score_B), np.float32)
    out_B[keep_B] = np.where(differs[row_group], scaled, 0.0)
    return out_B, Mean(float((~differs).sum()), float(groups))
