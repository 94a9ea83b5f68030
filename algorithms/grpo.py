# SPDX-License-Identifier: Apache-2.0
"""Group relative policy optimisation: no critic, the group is the baseline (arXiv 2402.03300).

Its kin are settings. Dr. GRPO (arXiv 2503.20783): normalize=none, aggregation
seq-mean-token-sum-norm. DAPO (arXiv 2503.14476): clip_high=0.28, kl.where=none, overlong_from,
dynamic_batches. GSPO (arXiv 2507.18071): ratio=sequence, aggregation seq-mean-token-mean, clips
near 3e-4.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from hfjax import rl
from hfjax.batch import Batch
from hfjax.config import KLConfig
from hfjax.metrics import finalize, stage
from hfjax.policy import PolicySettings, actor, check_group, old_log_probs, reference
from hfjax.roles import Reward


@dataclass(frozen=True, kw_only=True)
class Settings(PolicySettings):
    """GRPO's constants; defaults are verl's."""

    normalize: Literal["std", "none"] = "std"  # divide by the group's deviation, or not
    dynamic_batches: int = 1  # prompt batches a step may take, so that no group's scores are equal
    overlong_from: int = 0  # response tokens from which on each further one costs; 0: none does
    overlong_buffer: int = 0  # after so many more the cost is overlong_factor
    overlong_factor: float = 1.0  # taken from the score, a multiple of it beyond the buffer
    kl: KLConfig = KLConfig(where="loss", estimator="k3", coef=0.001)  # from the reference

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dynamic_batches < 1:
            raise ValueError(f"algorithm.dynamic_batches={self.dynamic_batches}: use 1 or more")
        if self.kl.where == "reward":
            raise ValueError("kl.where=reward: group scores hold no KL; use loss or none")
        rl.check_overlong(self.overlong_from, self.overlong_buffer, self.overlong_factor)


def check(config: Any) -> None:
    """Refuses settings of a whole run that GRPO cannot work with."""
    check_group(config, "GRPO")
    if (start := config.algorithm.overlong_from) >= config.rollout.max_new_tokens:
        raise ValueError(
            f"algorithm.overlong_from={start}: no response is longer than rollout.max_new_tokens="
            f"{config.rollout.max_new_tokens}; use less, or 0"
        )


def roles(cfg: Settings) -> dict[str, Any]:
    """Role classes with their losses and the columns those read."""
    return {"actor": actor(cfg), "reward": partial(Reward)} | reference(cfg)


def step(m: Any, prompts: Batch, cfg: Settings) -> tuple[Batch, Any]:
    """Generation, preparation, training."""
    batch = prompts | m.actor.generate_sequences(prompts)
    if cfg.dynamic_batches > 1:
        batch = refilled(m, batch, cfg.dynamic_batches - 1)
    batch |= old_log_probs(m, batch, cfg)
    if cfg.kl.where != "none":
        batch |= m.reference.compute_ref_log_prob(batch)
    if cfg.dynamic_batches == 1:
        batch |= m.reward.compute_reward(batch)
    batch |= compute_advantage(batch, cfg)
    return batch, m.actor.update_actor(batch)


def refilled(m: Any, batch: Batch, more: int) -> Batch:
    """The batch, scored, its groups that teach nothing replaced from up to `more` new batches.

    DAPO's dynamic sampling (arXiv 2503.14476 §3.2). Where too few are found, flat groups stay: they
    count in the loss's divisor. The columns come to the controller.
    """
    rows, drawn = len(batch), 1
    batch |= m.reward.compute_reward(batch)
    metrics = dict(batch.metrics.result())  # those of the first batch, whose weights are new
    while drawn <= more and flat_rows(batch).any():
        prompts = m.more_prompts()
        prompts |= {
            "row_id": prompts["row_id"] + np.int32(drawn * rows),
            "uid": prompts["uid"] + drawn * rows,
        }
        fresh = prompts | m.actor.generate_sequences(prompts)
        fresh |= m.reward.compute_reward(fresh)
        if "reward/failed" in metrics:
            metrics["reward/failed"] += fresh.metrics.result()["reward/failed"]
        both = Batch.concat([batch, fresh.columns(*batch.names)])
        batch = both.select(np.argsort(flat_rows(both), kind="stable")[:rows])
        drawn += 1
    metrics |= {"dynamic/batches": float(drawn), "dynamic/flat": float(flat_rows(batch).mean())}
    return batch | Batch(metrics=metrics)


def flat_rows(batch: Batch) -> np.ndarray:
    """Whether a row's group has equal scores, those apart whose reward failed."""
    score_B, valid_B = batch["score"], batch["response_mask"].any(-1)
    _, group_B = np.unique(batch["uid"], return_inverse=True)
    high, low = np.full(len(score_B), -np.inf), np.full(len(score_B), np.inf)
    np.maximum.at(high, group_B[valid_B], score_B[valid_B])
    np.minimum.at(low, group_B[valid_B], score_B[valid_B])
    return ~(high > low)[group_B]


@stage("adv")
def compute_advantage(batch: Batch, cfg: Settings) -> Batch:
    """Each score against its group's, spread over the response; on the controller."""
    mask_BT, score_B = batch["response_mask"], batch["score"]
    if cfg.overlong_from:
        tokens_B = batch["length"] - batch["prompt_length"]
        where = (cfg.overlong_from, cfg.overlong_buffer, cfg.overlong_factor)
        score_B = score_B + rl.overlong_penalty(tokens_B, *where)
    advantage_B, flat_groups = rl.grpo_advantages(
        score_B, batch["uid"], normalize=cfg.normalize, valid_B=mask_BT.any(-1)
    )
    advantages_BT = np.where(mask_BT, advantage_B[:, None], np.float32(0))
    metrics = finalize({"critic/flat_groups": flat_groups})  # groups that teach nothing
    return Batch({"advantages": advantages_BT}, metrics=metrics)
