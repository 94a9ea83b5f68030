# SPDX-License-Identifier: Apache-2.0
"""The clipped policy loss as an actor has it: settings that algorithms share, role and columns."""

import math
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from hfjax import rl
from hfjax.actor import Actor
from hfjax.batch import Batch
from hfjax.config import KLConfig
from hfjax.engine.train import Outputs
from hfjax.metrics import GAP, Max, Mean, Metric
from hfjax.roles import Reference

KL_COEF = "kl_coef"  # in the algorithm's memory
ROLLOUT = "rollout_truncated_log_probs"  # of the distribution that was sampled from
WEIGHTS = ("token", "sequence")  # corrections that are part of the loss
SCORED_EVERY = 20  # steps: from the first on, sampled tokens are scored before the update
LARGEST_GAP = 1e-4  # of probabilities in rollout and training, above which they always are
APART = "rollout_apart"  # in the algorithm's memory: from which step on, after such a gap


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """Constants of the policy's loss; defaults are verl's."""

    clip_low: float = 0.2  # the ratio stays above 1 - clip_low
    clip_high: float = 0.2  # and below 1 + clip_high
    dual_clip: float = 3.0  # bounds the loss of negative advantages; 0: it does not
    ratio: Literal["token", "sequence"] = "token"  # to the old policy: a token's, or GSPO's
    rollout_correction: rl.Correction = "none"  # importance of tokens, rows, or rows refused
    rollout_cap: float = 2.0  # its largest weight; of reject: the rows kept lie in [1/cap, cap]
    old_log_probs: Literal["auto", "score"] = "auto"  # auto: the rollout's, while training agrees
    entropy_coef: float = 0.0  # weight of the entropy bonus
    aggregation: rl.Aggregation = "token-mean"  # of token losses over the mini-batch
    aggregation_length: int = 0  # tokens that seq-mean-token-sum-norm divides by
    kl: KLConfig = KLConfig()  # from the reference

    def __post_init__(self) -> None:
        rl.check_policy_clip(self.clip_low, self.clip_high, self.dual_clip or None)
        if not abs(self.entropy_coef) < float("inf"):
            raise ValueError(f"algorithm.entropy_coef={self.entropy_coef}: must be finite")
        if not 1 < self.rollout_cap < float("inf"):
            raise ValueError(f"algorithm.rollout_cap={self.rollout_cap}: must be above 1, as 2.0")
        if self.rollout_cap != 2.0 and self.rollout_correction == "none":
            raise ValueError(
                f"algorithm.rollout_cap={self.rollout_cap}: nothing is capped with "
                "rollout_correction='none'; set that too"
            )
        rl.check_aggregation(self.aggregation, self.aggregation_length)
        if self.aggregation_length and self.aggregation != "seq-mean-token-sum-norm":
            raise ValueError(
                f"algorithm.aggregation_length={self.aggregation_length}: only aggregation "
                f"'seq-mean-token-sum-norm' reads it, not {self.aggregation!r}; leave it 0"
            )
        usual = type(self).kl
        for name in ("estimator", "coef") if self.kl.where == "none" else ():
            value = getattr(self.kl, name)
            if value not in (getattr(KLConfig, name), getattr(usual, name)):
                raise ValueError(
                    f"algorithm.kl.{name}={value}: nothing is measured with kl.where=none; leave "
                    f"it {getattr(usual, name)}, or set kl.where"
                )


def actor(cfg: PolicySettings, **more: Any) -> Any:
    """The policy under this loss; `more` goes to the role."""
    columns = ("ref_log_prob",) if cfg.kl.where == "loss" else ()
    columns += (ROLLOUT,) if cfg.rollout_correction in WEIGHTS else ()
    return partial(
        Actor,
        loss=partial(policy_loss, cfg=cfg),
        measured_loss=partial(measured_loss, cfg=cfg) if takes_rollout(cfg) else None,
        columns=("old_log_probs", "advantages", *columns),
        loss_entropy=cfg.entropy_coef != 0,
        **more,
    )


def takes_rollout(cfg: PolicySettings) -> bool:
    """Whether old_log_probs may be those of sampling; a correction needs both."""
    return cfg.old_log_probs == "auto" and cfg.rollout_correction == "none"


def old_log_probs(m: Any, batch: Batch, cfg: PolicySettings) -> Batch:
    """Log-probs before the update; with "reject" the mask of the rows that are kept.

    They are of the actor's pass over what was sampled, or where m.rollout_agrees (one precision,
    nothing truncated: HybridFlow's two engines are one here) the rollout's own. The pass then runs
    in the first step and every 20th, and the update's first mini-batch measures entropy and the gap
    in the others. After a gap above 1e-4 the pass runs in every step, from the next but one on.
    Refused rows leave every loss, statistic and divisor, as those whose reward failed do.
    """
    apart = m.step >= m.memory.get(APART, math.inf)
    if takes_rollout(cfg) and m.rollout_agrees and not apart and m.step % SCORED_EVERY != 1:
        return batch.columns("rollout_log_probs").renamed(rollout_log_probs="old_log_probs")
    scored = m.actor.compute_log_prob(batch)
    if cfg.rollout_correction != "reject":
        return scored
    mask_BT = batch["response_mask"]
    kept_B = rl.kept_rows(scored["old_log_probs"], batch[ROLLOUT], mask_BT, cfg.rollout_cap)
    refused = float((mask_BT.any(-1) & ~kept_B).sum())
    metrics = {"rollout_corr/rollout_rs_masked": refused}
    return scored | Batch(response_mask=mask_BT & kept_B[:, None], metrics=metrics)


def check_group(config: Any, name: str) -> None:
    """Refuses one response a prompt where an algorithm compares several."""
    if config.rollout.n < 2:
        raise ValueError(
            f"rollout.n={config.rollout.n}: {name} compares the responses of one prompt; use 2 or "
            "more, as 8"
        )


def greedy_scores(m: Any, prompts: Batch, cfg: Any = None) -> dict[str, np.ndarray]:
    """reward/mean@1 (B,): of greedy responses; NaN where the function failed."""
    batch = prompts | m.actor.generate_sequences(prompts, greedy=True)
    batch |= m.reward.compute_reward(batch, evaluates=True)
    scored_B = batch["response_mask"].any(-1)
    return {"reward/mean@1": np.where(scored_B, batch["score"], np.nan)}


def reference(cfg: PolicySettings) -> dict[str, Any]:
    """The reference role, where the divergence from it is asked for."""
    return {} if cfg.kl.where == "none" else {"reference": partial(Reference)}


def policy_loss(
    outputs: Outputs,
    batch: Mapping[str, jax.Array],
    total: rl.Denominators,
    *,
    cfg: PolicySettings,
) -> tuple[jax.Array, Mapping[str, Mean]]:
    """Clipped surrogate, less the entropy bonus, plus the KL term where it is part of the loss."""
    mask_BT, logp_BT = batch["response_mask"], outputs.log_probs_BT
    loss_BT, metrics = rl.policy_loss(
        logp_BT,
        batch["old_log_probs"],
        batch["advantages"],
        mask_BT,
        clip_low=cfg.clip_low,
        clip_high=cfg.clip_high,
        dual_clip=cfg.dual_clip or None,
        ratio=cfg.ratio,
    )
    if cfg.rollout_correction in WEIGHTS:
        weights_BT, more = rl.rollout_weights(
            batch["old_log_probs"],
            batch[ROLLOUT],
            mask_BT,
            mode=cfg.rollout_correction,
            cap=cfg.rollout_cap,
        )
        loss_BT, metrics = loss_BT * weights_BT, metrics | more
    aggregate = partial(
        rl.aggregate,
        mask_BT=mask_BT,
        denominators=total,
        mode=cfg.aggregation,
        length=cfg.aggregation_length or None,
    )
    loss = aggregate(loss_BT)
    metrics["pg_loss"] = rl.loss_metric(loss, mask_BT, total)
    if cfg.entropy_coef:
        entropy = aggregate(outputs.entropy_BT)
        metrics["entropy_loss"] = rl.loss_metric(entropy, mask_BT, total)
        loss -= cfg.entropy_coef * entropy
    if cfg.kl.where == "loss":
        kl_BT = rl.kl_penalty(cfg.kl.estimator, logp_BT, batch["ref_log_prob"], mask_BT)
        kl_loss = aggregate(kl_BT)
        metrics["kl_loss"] = rl.loss_metric(kl_loss, mask_BT, total)
        loss += cfg.kl.coef * kl_loss
    return loss, metrics


def measured_loss(
    outputs: Outputs,
    batch: Mapping[str, jax.Array],
    total: rl.Denominators,
    *,
    cfg: PolicySettings,
) -> tuple[jax.Array, Mapping[str, Metric]]:
    """policy_loss of weights that are still the rollout's: entropy, and how far training is off."""
    loss, metrics = policy_loss(outputs, batch, total, cfg=cfg)
    mask_BT = batch["response_mask"]
    gap_BT = jnp.abs(jnp.exp(outputs.log_probs_BT) - jnp.exp(batch["old_log_probs"]))
    more = {
        "entropy": Mean.of(outputs.entropy_BT, mask_BT),
        f"{GAP}_max": Max(jnp.where(mask_BT, gap_BT, -jnp.inf).max()),
        f"{GAP}_mean": Mean.of(gap_BT, mask_BT),
    }
    return loss, dict(metrics) | more


def token_rewards(columns: Mapping[str, Any], kl: KLConfig) -> dict[str, jax.Array]:
    """Scores on last tokens, and what the policy is rewarded with: less the KL if it is there.

    Reads reward_columns, `kl_coef` among them, which is a number.
    """
    mask_BT = columns["response_mask"]
    scores_BT = rewards_BT = rl.token_rewards(columns["score"], mask_BT)
    if kl.where == "reward":
        kl_BT = _kl(columns, kl)
        rewards_BT = rl.kl_in_reward(scores_BT, kl_BT, mask_BT, columns["kl_coef"])
    return {"token_level_scores": scores_BT, "token_level_rewards": rewards_BT}


def reward_columns(batch: Batch, kl: KLConfig, memory: Mapping[str, Any]) -> dict[str, Any]:
    """What token_rewards reads; the KL coefficient is the memory's, where that has one."""
    more = ("old_log_probs", "ref_log_prob") if kl.where == "reward" else ()
    columns = {name: batch[name] for name in ("score", "response_mask", *more)}
    return columns | {"kl_coef": np.float32(memory.get(KL_COEF, kl.coef))} if more else columns


def steer_kl(
    columns: Mapping[str, Any], kl: KLConfig, memory: MutableMapping[str, Any]
) -> dict[str, float]:
    """Metrics of the KL in the reward; with a target, the coefficient of the next step."""
    if kl.where != "reward":
        return {}
    mask_BT, coef = columns["response_mask"], float(columns["kl_coef"])
    valid_B = np.asarray(mask_BT).any(-1)
    mean_B = jax.vmap(rl.masked_mean)(_kl(columns, kl), jnp.asarray(mask_BT))
    found = float(np.asarray(mean_B)[valid_B].mean()) if valid_B.any() else float("nan")
    if kl.target:
        options = {"target": kl.target, "horizon": kl.horizon}
        memory[KL_COEF] = rl.adapted_kl_coef(coef, found, int(valid_B.sum()), **options)
    penalty = {"actor/reward_kl_penalty": found} if valid_B.any() else {}
    return penalty | {"actor/reward_kl_penalty_coeff": coef}


def _kl(columns: Mapping[str, Any], kl: KLConfig) -> jax.Array:
    names = ("old_log_probs", "ref_log_prob", "response_mask")
    return rl.kl_penalty(kl.estimator, *(columns[name] for name in names))
