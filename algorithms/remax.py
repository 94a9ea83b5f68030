# SPDX-License-Identifier: Apache-2.0
"""ReMax: no critic, the score of the greedy response is the baseline (arXiv 2310.10505).

With rollout.n above 1 the responses of a prompt share the baseline.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from hfjax import rl
from hfjax.batch import Batch
from hfjax.config import KLConfig
from hfjax.metrics import stage
from hfjax.policy import (
    PolicySettings,
    actor,
    old_log_probs,
    reference,
    reward_columns,
    steer_kl,
    token_rewards,
)
from hfjax.roles import Reward


@dataclass(frozen=True, kw_only=True)
class Settings(PolicySettings):
    """ReMax's constants: PPO's clipped loss, as in verl."""

    kl: KLConfig = KLConfig(where="reward", estimator="k1", coef=0.001)  # from the reference


def check(config: Any) -> None:
    """Refuses settings of a whole run that ReMax cannot work with."""
    if config.rollout.temperature == 0:
        raise ValueError(
            "rollout.temperature=0: ReMax compares sampled responses with greedy ones; use 1.0"
        )


def roles(cfg: Settings) -> dict[str, Any]:
    """Role classes with their losses and the columns those read."""
    return {"actor": actor(cfg), "reward": partial(Reward)} | reference(cfg)


def step(m: Any, prompts: Batch, cfg: Settings) -> tuple[Batch, Any]:
    """Two generations, preparation, training."""
    batch = prompts | m.actor.generate_sequences(prompts)
    greedy = prompts.select(rl.first_rows(prompts["uid"]))
    greedy |= m.actor.generate_sequences(greedy, greedy=True, group=1)
    batch |= old_log_probs(m, batch, cfg)
    if cfg.kl.where != "none":
        batch |= m.reference.compute_ref_log_prob(batch)
    batch |= m.reward.compute_reward(batch)
    greedy |= m.reward.compute_reward(greedy, group=1)
    batch |= compute_advantage(batch, greedy, cfg, m.memory)
    return batch, m.actor.update_actor(batch)


@stage("adv")
def compute_advantage(batch: Batch, greedy: Batch, cfg: Settings, memory: dict[str, Any]) -> Batch:
    """What is still to come of a token's rewards, less the score of the prompt's greedy response.

    Rows without that score, because its reward failed, are left out.
    """
    _, of_B = np.unique(batch["uid"], return_inverse=True)  # greedy's rows are in this order
    if len(greedy) != (prompts := of_B.max() + 1):
        raise ValueError(f"{len(greedy)} greedy responses to {prompts} prompts: each needs one")
    scored_B = greedy["response_mask"].any(-1)[of_B]
    columns = reward_columns(batch, cfg.kl, memory)
    columns |= {"response_mask": columns["response_mask"] & scored_B[:, None]}
    more = _advantage(columns | {"baseline": greedy["score"][of_B]}, cfg=cfg)
    metrics = steer_kl(columns, cfg.kl, memory)
    return Batch(more, response_mask=columns["response_mask"], metrics=metrics)


@partial(jax.jit, static_argnames="cfg")
def _advantage(columns: Mapping[str, Any], *, cfg: Settings) -> dict[str, jax.Array]:
    mask_BT, rewards = columns["response_mask"], token_rewards(columns, cfg.kl)
    returns_BT = rl.returns_to_go(rewards["token_level_rewards"], mask_BT)
    advantages_BT = returns_BT - rl.over_tokens(columns["baseline"], mask_BT)
    return rewards | {"advantages": advantages_BT, "returns": returns_BT}
