# SPDX-License-Identifier: Apache-2.0
"""A reward model from preferences: the chosen answer's score above the rejected one's.

Bradley-Terry, as in InstructGPT (arXiv 2203.02155 eq. 1).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hfjax import preferences, rl
from hfjax.batch import Batch
from hfjax.engine.train import Outputs
from hfjax.items import PAIRS
from hfjax.metrics import Mean
from hfjax.roles import RewardModel

DATA = PAIRS  # rows are pairs: prompt, chosen, rejected


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The constants of the loss."""

    label_smoothing: float = 0.0  # share of pairs that may be labelled the wrong way round
    centre: float = 0.0  # weight of the squared sum of a pair's scores: keeps them around 0

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(
                f"algorithm.label_smoothing={self.label_smoothing}: must lie in [0, 0.5)"
            )
        if not 0 <= self.centre < float("inf"):
            raise ValueError(f"algorithm.centre={self.centre}: must be finite, 0 or more")


def roles(cfg: Settings) -> dict[str, Any]:
    """The score model alone; `hfjax export` writes a directory for reward.model."""
    loss = partial(preference_loss, cfg=cfg)
    return {"reward_model": partial(RewardModel, loss=loss, columns=(), rows_together=2)}


def step(m: Any, pairs: Batch, cfg: Settings) -> tuple[Batch, Any]:
    """One update on rows of chosen and rejected answers."""
    return pairs, m.reward_model.update_reward(pairs)


def evaluate(m: Any, pairs: Batch, cfg: Settings) -> dict[str, np.ndarray]:
    """accuracy (N,): 1 where the chosen answer has the higher score."""
    chosen_N, rejected_N = preferences.paired(m.reward_model.compute_reward(pairs)["score"])
    return {"accuracy": preferences.accuracy(chosen_N - rejected_N)}


def preference_loss(
    outputs: Outputs, batch: Mapping[str, jax.Array], total: rl.Denominators, *, cfg: Settings
) -> tuple[jax.Array, Mapping[str, Mean]]:
    """-log sigmoid(s_chosen - s_rejected), averaged over the mini-batch's pairs."""
    mask_BT = batch["response_mask"]
    score_B = jnp.where(mask_BT.any(-1), outputs.scores_B, 0.0)  # NaN there would reach gradients
    chosen_N, rejected_N = preferences.paired(score_B)
    margin_N = chosen_N - rejected_N
    loss_N = preferences.pair_loss(margin_N, cfg.label_smoothing)
    loss_N += cfg.centre * (chosen_N + rejected_N) ** 2
    metrics = preferences.pair_metrics(margin_N, mask_BT)
    return preferences.mean_over_pairs(loss_N, mask_BT, total), metrics
