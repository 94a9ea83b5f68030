# SPDX-License-Identifier: Apache-2.0
"""Proximal policy optimisation with a critic (arXiv 1707.06347; HybridFlow figure 6)."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from hfjax import rl
from hfjax.actor import Actor
from hfjax.batch import Batch
from hfjax.config import KLConfig
from hfjax.engine.train import Outputs
from hfjax.metrics import Mean, stage
from hfjax.roles import Critic, Reference, Reward


@dataclass(frozen=True, kw_only=True)
class Settings:
    """PPO's constants; defaults are verl's."""

    gamma: float = 1.0  # discount a token
    lam: float = 1.0  # lambda of generalised advantage estimation
    clip_low: float = 0.2  # the ratio stays above 1 - clip_low
    clip_high: float = 0.2  # and below 1 + clip_high
    dual_clip: float = 3.0  # bounds the loss of negative advantages; 0: it does not
    value_clip: float = 0.5  # how far a value may move from the one before the update
    entropy_coef: float = 0.0  # weight of the entropy bonus
    aggregation: rl.Aggregation = "token-mean"  # of token losses over the mini-batch
    kl: KLConfig = KLConfig(where="reward", estimator="k1", coef=0.001)  # from the reference

    def __post_init__(self) -> None:
        rl.check_policy_clip(self.clip_low, self.clip_high, self.dual_clip or None)
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"algorithm.{name}={getattr(self, name)}: must lie in [0, 1]")
        if not self.value_clip > 0:
            raise ValueError(f"algorithm.value_clip={self.value_clip}: must be above 0, as 0.5")
        if not abs(self.entropy_coef) < float("inf"):
            raise ValueError(f"algorithm.entropy_coef={self.entropy_coef}: must be finite")


def roles(cfg: Settings) -> dict[str, Any]:
    """Role classes with their losses and the columns those read."""
    kl_columns = ("ref_log_prob",) if cfg.kl.where == "loss" else ()
    table: dict[str, Any] = {
        "actor": partial(
            Actor,
            loss=partial(actor_loss, cfg=cfg),
            columns=("old_log_probs", "advantages", *kl_columns),
            loss_entropy=cfg.entropy_coef != 0,
        ),
        "critic": partial(
            Critic, loss=partial(critic_loss, cfg=cfg), columns=("values", "returns")
        ),
        "reward": partial(Reward),
    }
    return table if cfg.kl.where == "none" else table | {"reference": partial(Reference)}


def step(m: Any, prompts: Batch, cfg: Settings) -> tuple[Batch, Any]:
    """Generation, preparation, training."""
    batch = prompts | m.actor.generate_sequences(prompts)
    batch |= m.actor.compute_log_prob(batch)
    batch |= m.critic.compute_values(batch)
    if cfg.kl.where != "none":
        batch |= m.reference.compute_ref_log_prob(batch)
    batch |= m.reward.compute_reward(batch)
    batch |= compute_advantage(batch, cfg)
    critic_metrics = m.critic.update_critic(batch)
    actor_metrics = m.actor.update_actor(batch)
    return batch, critic_metrics | actor_metrics


@stage("adv")
def compute_advantage(batch: Batch, cfg: Settings) -> Batch:
    """Token rewards, returns and whitened advantages, on the controller."""
    names = ["score", "response_mask", "values"]
    if cfg.kl.where == "reward":
        names += ["old_log_probs", "ref_log_prob"]
    return Batch(_advantage({name: batch[name] for name in names}, cfg=cfg))


@partial(jax.jit, static_argnames="cfg")
def _advantage(columns: Mapping[str, Any], *, cfg: Settings) -> dict[str, jax.Array]:
    mask_BT = columns["response_mask"]
    scores_BT = rewards_BT = rl.token_rewards(columns["score"], mask_BT)
    if cfg.kl.where == "reward":
        logp_BT, ref_BT = columns["old_log_probs"], columns["ref_log_prob"]
        kl_BT = rl.kl_penalty(cfg.kl.estimator, logp_BT, ref_BT, mask_BT)
        rewards_BT = rl.kl_in_reward(scores_BT, kl_BT, mask_BT, cfg.kl.coef)
    advantages_BT, returns_BT = rl.gae(rewards_BT, columns["values"], mask_BT, cfg.gamma, cfg.lam)
    return {
        "token_level_scores": scores_BT,
        "token_level_rewards": rewards_BT,
        "advantages": rl.masked_whiten(advantages_BT, mask_BT),
        "returns": returns_BT,
    }


def actor_loss(
    outputs: Outputs, batch: Mapping[str, jax.Array], total: rl.Denominators, *, cfg: Any
) -> tuple[jax.Array, Mapping[str, Mean]]:
    """Clipped surrogate, less the entropy bonus, plus the KL term where it is part of the loss.

    `cfg` is any Settings with the clip, entropy, aggregation and kl fields (GRPO's too).
    """
    mask_BT, logp_BT = batch["response_mask"], outputs.log_probs_BT
    loss_BT, metrics = rl.policy_loss(
        logp_BT,
        batch["old_log_probs"],
        batch["advantages"],
        mask_BT,
        eps_low=cfg.clip_low,
        eps_high=cfg.clip_high,
        dual_clip=cfg.dual_clip or None,
    )
    aggregate = partial(rl.aggregate, mask_BT=mask_BT, denominators=total, mode=cfg.aggregation)
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


def critic_loss(
    outputs: Outputs, batch: Mapping[str, jax.Array], total: rl.Denominators, *, cfg: Settings
) -> tuple[jax.Array, Mapping[str, Mean]]:
    """Half the squared error of clipped values, averaged over tokens."""
    mask_BT = batch["response_mask"]
    loss_BT, metrics = rl.value_loss(
        outputs.values_BT, batch["values"], batch["returns"], mask_BT, clip=cfg.value_clip
    )
    loss = rl.aggregate(loss_BT, mask_BT, total)
    return loss, metrics | {"vf_loss": rl.loss_metric(loss, mask_BT, total)}
