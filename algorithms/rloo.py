# SPDX-License-Identifier: Apache-2.0
"""REINFORCE leave-one-out: the other responses to a prompt are the baseline (arXiv 2402.14740)."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from hfjax import rl
from hfjax.batch import Batch
from hfjax.config import KLConfig
from hfjax.metrics import stage
from hfjax.policy import (
    PolicySettings,
    actor,
    check_group,
    old_log_probs,
    reference,
    reward_columns,
    steer_kl,
    token_rewards,
)
from hfjax.roles import Reward


@dataclass(frozen=True, kw_only=True)
class Settings(PolicySettings):
    """RLOO's constants; the weight of the KL is TRL's."""

    kl: KLConfig = KLConfig(where="reward", estimator="k1", coef=0.05)  # from the reference


def check(config: Any) -> None:
    """Refuses settings of a whole run that RLOO cannot work with."""
    check_group(config, "RLOO")


def roles(cfg: Settings) -> dict[str, Any]:
    """Role classes with their losses and the columns those read."""
    return {"actor": actor(cfg), "reward": partial(Reward)} | reference(cfg)


def step(m: Any, prompts: Batch, cfg: Settings) -> tuple[Batch, Any]:
    """Generation, preparation, training."""
    batch = prompts | m.actor.generate_sequences(prompts)
    batch |= old_log_probs(m, batch, cfg)
    if cfg.kl.where != "none":
        batch |= m.reference.compute_ref_log_prob(batch)
    batch |= m.reward.compute_reward(batch)
    batch |= compute_advantage(batch, cfg, m.memory)
    return batch, m.actor.update_actor(batch)


@stage("adv")
def compute_advantage(batch: Batch, cfg: Settings, memory: dict[str, Any]) -> Batch:
    """A response's reward, the KL in it, less the mean of the others'; spread over its tokens."""
    columns = reward_columns(batch, cfg.kl, memory)
    mask_BT, rewards = columns["response_mask"], token_rewards(columns, cfg.kl)
    reward_B = np.asarray(rewards["token_level_rewards"]).sum(-1)
    advantage_B = rl.rloo_advantages(reward_B, batch["uid"], valid_B=mask_BT.any(-1))
    advantages_BT = np.where(mask_BT, advantage_B[:, None], np.float32(0))
    return Batch(rewards, advantages=advantages_BT, metrics=steer_kl(columns, cfg.kl, memory))
