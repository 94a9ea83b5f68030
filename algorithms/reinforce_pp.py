# SPDX-License-Identifier: Apache-2.0
"""REINFORCE++: returns whitened over the whole batch, no critic (arXiv 2501.03262)."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
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
    """REINFORCE++'s constants."""

    baseline: Literal["none", "group"] = "none"  # group: rewards less their prompt's mean first
    gamma: float = 1.0  # discount a token
    kl: KLConfig = KLConfig(where="reward", estimator="k1", coef=0.001)  # from the reference

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"algorithm.gamma={self.gamma}: must lie in [0, 1]")
        if self.baseline == "group" and self.gamma != 1:
            raise ValueError(
                f"algorithm.gamma={self.gamma}: baseline=group has one number a row; leave it 1"
            )


def check(config: Any) -> None:
    """Refuses settings of a whole run that do not fit together."""
    if config.algorithm.baseline == "group":
        check_group(config, "algorithm.baseline=group")


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
    """What is still to come of a token's rewards, whitened over all tokens of the batch."""
    columns = reward_columns(batch, cfg.kl, memory)
    if cfg.baseline == "group":
        reward_BT = token_rewards(columns, cfg.kl)["token_level_rewards"]
        reward_B, valid_B = np.asarray(reward_BT).sum(-1), columns["response_mask"].any(-1)
        centred_B, _ = rl.grpo_advantages(reward_B, batch["uid"], normalize="none", valid_B=valid_B)
        columns |= {"centred": centred_B}
    return Batch(_advantage(columns, cfg=cfg), metrics=steer_kl(columns, cfg.kl, memory))


@partial(jax.jit, static_argnames="cfg")
def _advantage(columns: Mapping[str, Any], *, cfg: Settings) -> dict[str, jax.Array]:
    mask_BT, rewards = columns["response_mask"], token_rewards(columns, cfg.kl)
    if cfg.baseline == "group":  # the row's, on each of its tokens
        returns_BT = rl.over_tokens(columns["centred"], mask_BT)
    else:
        returns_BT = rl.returns_to_go(rewards["token_level_rewards"], mask_BT, cfg.gamma)
    advantages_BT = rl.masked_whiten(returns_BT, mask_BT)
    return rewards | {"advantages": advantages_BT, "returns": returns_BT}
