# SPDX-License-Identifier: Apache-2.0
"""Group relative policy optimisation: no critic, the group is the baseline (arXiv 2402.03300)."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from algorithms.ppo import actor_loss
from hfjax import rl
from hfjax.actor import Actor
from hfjax.batch import Batch
from hfjax.config import KLConfig
from hfjax.metrics import finalize, stage
from hfjax.roles import Reference, Reward


@dataclass(frozen=True, kw_only=True)
class Settings:
    """GRPO's constants; defaults are verl's."""

    normalize: Literal["std", "none"] = "std"  # divide by the group's deviation, or not
    clip_low: float = 0.2  # the ratio stays above 1 - clip_low
    clip_high: float = 0.2  # and below 1 + clip_high
    dual_clip: float = 3.0  # bounds the loss of negative advantages; 0: it does not
    entropy_coef: float = 0.0  # weight of the entropy bonus
    aggregation: rl.Aggregation = "token-mean"  # of token losses over the mini-batch
    kl: KLConfig = KLConfig(where="loss", estimator="k3", coef=0.001)  # from the reference

    def __post_init__(self) -> None:
        rl.check_policy_clip(self.clip_low, self.clip_high, self.dual_clip or None)
        if not abs(self.entropy_coef) < float("inf"):
            raise ValueError(f"algorithm.entropy_coef={self.entropy_coef}: must be finite")
        if self.kl.where == "reward":
            raise ValueError("kl.where=reward: group scores hold no KL; use loss or none")


def check(config: Any) -> None:
    """Refuses settings of a whole run that GRPO cannot work with."""
    if config.rollout.n < 2:
        raise ValueError(
            f"rollout.n={config.rollout.n}: GRPO compares the responses of one prompt; use 2 or "
            "more, as 8"
        )


def roles(cfg: Settings) -> dict[str, Any]:
    """Role classes with their losses and the columns those read."""
    kl_columns = () if cfg.kl.where == "none" else ("ref_log_prob",)
    actor = partial(
        Actor,
        loss=partial(actor_loss, cfg=cfg),
        columns=("old_log_probs", "advantages", *kl_columns),
        loss_entropy=cfg.entropy_coef != 0,
    )
    table: dict[str, Any] = {"actor": actor, "reward": partial(Reward)}
    return table if cfg.kl.where == "none" else table | {"reference": partial(Reference)}


def step(m: Any, prompts: Batch, cfg: Settings) -> tuple[Batch, Any]:
    """Generation, preparation, training."""
    batch = prompts | m.actor.generate_sequences(prompts)
    batch |= m.actor.compute_log_prob(batch)
    if cfg.kl.where != "none":
        batch |= m.reference.compute_ref_log_prob(batch)
    batch |= m.reward.compute_reward(batch)
    batch |= compute_advantage(batch, cfg)
    return batch, m.actor.update_actor(batch)


@stage("adv")
def compute_advantage(batch: Batch, cfg: Settings) -> Batch:
    """Each score against its group's, spread over the response; on the controller."""
    mask_BT = batch["response_mask"]
    advantage_B, flat_groups = rl.grpo_advantages(
        batch["score"], batch["uid"], normalize=cfg.normalize, valid_B=mask_BT.any(-1)
    )
    advantages_BT = np.where(mask_BT, advantage_B[:, None], np.float32(0))
    metrics = finalize({"critic/flat_groups": flat_groups})  # groups that teach nothing
    return Batch({"advantages": advantages_BT}, metrics=metrics)
