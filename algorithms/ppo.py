# SPDX-License-Identifier: Apache-2.0
"""Proximal policy optimisation with a critic (arXiv 1707.06347; HybridFlow figure 6)."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from hfjax import rl
from hfjax.batch import Batch
from hfjax.config import KLConfig
from hfjax.engine.train import Outputs
from hfjax.metrics import Mean, stage
from hfjax.policy import (
    PolicySettings,
    actor,
    old_log_probs,
    reference,
    reward_columns,
    steer_kl,
    token_rewards,
)
from hfjax.roles import Critic, Reward


@dataclass(frozen=True, kw_only=True)
class Settings(PolicySettings):
    """PPO's constants; defaults are verl's."""

    gamma: float = 1.0  # discount a token
    lam: float = 1.0  # lambda of generalised advantage estimation
    value_clip: float = 0.5  # how far a value may move from the one before the update
    kl: KLConfig = KLConfig(where="reward", estimator="k1", coef=0.001)  # from the reference

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"algorithm.{name}={getattr(self, name)}: must lie in [0, 1]")
        if not self.value_clip > 0:
            raise ValueError(f"algorithm.value_clip={self.value_clip}: must be above 0, as 0.5")


def roles(cfg: Settings) -> dict[str, Any]:
    """Role classes with their losses and the columns those read."""
    critic = partial(Critic, loss=partial(critic_loss, cfg=cfg), columns=("values", "returns"))
    return {"actor": actor(cfg), "critic": critic, "reward": partial(Reward)} | reference(cfg)


def step(m: Any, prompts: Batch, cfg: Settings) -> tuple[Batch, Any]:
    """Generation, preparation, training."""
    batch = prompts | m.actor.generate_sequences(prompts)
    batch |= old_log_probs(m, batch, cfg)
    batch |= m.critic.compute_values(batch)
    if cfg.kl.where != "none":
        batch |= m.reference.compute_ref_log_prob(batch)
    batch |= m.reward.compute_reward(batch)
    batch |= compute_advantage(batch, cfg, m.memory)
    critic_metrics = m.critic.update_critic(batch)
    actor_metrics = m.actor.update_actor(batch)
    return batch, critic_metrics | actor_metrics


@stage("adv")
def compute_advantage(batch: Batch, cfg: Settings, memory: dict[str, Any]) -> Batch:
    """Token rewards, returns and whitened advantages, on the controller."""
    columns = reward_columns(batch, cfg.kl, memory)
    more = _advantage(columns | {"values": batch["values"]}, cfg=cfg)
    return Batch(more, metrics=steer_kl(columns, cfg.kl, memory))


@partial(jax.jit, static_argnames="cfg")
def _advantage(columns: Mapping[str, Any], *, cfg: Settings) -> dict[str, jax.Array]:
    mask_BT, rewards = columns["response_mask"], token_rewards(columns, cfg.kl)
    advantages_BT, returns_BT = rl.gae(
        rewards["token_level_rewards"], columns["values"], mask_BT, cfg.gamma, cfg.lam
    )
    advantages_BT = rl.masked_whiten(advantages_BT, mask_BT)
    return rewards | {"advantages": advantages_BT, "returns": returns_BT}


def critic_loss(
    outputs: Outputs,
    batch: Mapping[str, jax.Array],
    total: rl.Denominators,
    *,
    cfg: Any,
    of: str = "",
) -> tuple[jax.Array, Mapping[str, Mean]]:
    """Half the squared error of clipped values, averaged over tokens; `of` begins the columns.

    `cfg` is any Settings with value_clip.
    """
    mask_BT, old_BT = batch["response_mask"], batch[f"{of}values"]
    returns_BT = batch[f"{of}returns"]
    loss_BT, metrics = rl.value_loss(
        outputs.values_BT, old_BT, returns_BT, mask_BT, clip=cfg.value_clip
    )
    loss = rl.aggregate(loss_BT, mask_BT, total)
    return loss, metrics | {"vf_loss": rl.loss_metric(loss, mask_BT, total)}
