# SPDX-License-Identifier: Apache-2.0
"""Direct preference optimisation: pairs of answers, no reward model (arXiv 2305.18290)."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from hfjax import preferences, rl
from hfjax.actor import Actor
from hfjax.batch import Batch
from hfjax.engine.train import Outputs
from hfjax.items import PAIRS
from hfjax.metrics import Mean
from hfjax.roles import Reference

DATA = PAIRS  # rows are pairs: prompt, chosen, rejected


@dataclass(frozen=True, kw_only=True)
class Settings:
    """DPO's constants; defaults are TRL's."""

    beta: float = 0.1  # how dearly the policy leaves the reference
    loss: Literal["sigmoid", "ipo"] = "sigmoid"  # ipo: a squared distance (arXiv 2310.12036)
    label_smoothing: float = 0.0  # share of pairs that may be labelled the wrong way round

    def __post_init__(self) -> None:
        if not 0 < self.beta < float("inf"):
            raise ValueError(f"algorithm.beta={self.beta}: must be finite and above 0, as 0.1")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(
                f"algorithm.label_smoothing={self.label_smoothing}: must lie in [0, 0.5)"
            )
        if self.loss == "ipo" and self.label_smoothing:
            raise ValueError("algorithm.label_smoothing: of loss 'sigmoid' alone; leave it 0")


def roles(cfg: Settings) -> dict[str, Any]:
    """The policy and the reference it starts from."""
    loss = partial(dpo_loss, cfg=cfg)
    actor = partial(Actor, loss=loss, columns=("ref_log_prob",), rows_together=2)
    return {"actor": actor, "reference": partial(Reference)}


def step(m: Any, pairs: Batch, cfg: Settings) -> tuple[Batch, Any]:
    """One update on rows of chosen and rejected answers."""
    batch = pairs | m.reference.compute_ref_log_prob(pairs)
    return batch, m.actor.update_actor(batch)


def evaluate(m: Any, pairs: Batch, cfg: Settings) -> dict[str, np.ndarray]:
    """accuracy (N,): 1 where the policy, against the reference, prefers the chosen answer."""
    batch = pairs | m.actor.compute_log_prob(pairs) | m.reference.compute_ref_log_prob(pairs)
    columns = (batch["old_log_probs"], batch["ref_log_prob"], batch["response_mask"])
    return {"accuracy": preferences.accuracy(_margins(*columns, loss=cfg.loss))}


def _margins(logp_BT: jax.Array, ref_BT: jax.Array, mask_BT: jax.Array, *, loss: str) -> jax.Array:
    """(N,) log-ratio of the chosen answer less that of the rejected; of IPO a token's mean."""
    ratio_BT = jnp.where(mask_BT, logp_BT, 0.0) - jnp.where(mask_BT, ref_BT, 0.0)
    ratio_B = ratio_BT.sum(-1)
    if loss == "ipo":
        ratio_B /= jnp.maximum(jnp.asarray(mask_BT).sum(-1, dtype=jnp.float32), 1.0)
    chosen_N, rejected_N = preferences.paired(ratio_B)
    return chosen_N - rejected_N


def dpo_loss(
    outputs: Outputs, batch: Mapping[str, jax.Array], total: rl.Denominators, *, cfg: Settings
) -> tuple[jax.Array, Mapping[str, Mean]]:
    """-log sigmoid(beta h), or (h - 1 / (2 beta))^2, averaged over the mini-batch's pairs."""
    mask_BT = batch["response_mask"]
    h_N = _margins(outputs.log_probs_BT, batch["ref_log_prob"], mask_BT, loss=cfg.loss)
    loss_N = (
        (h_N - 0.5 / cfg.beta) ** 2
        if cfg.loss == "ipo"
        else preferences.pair_loss(cfg.beta * h_N, cfg.label_smoothing)
    )
    metrics = preferences.pair_metrics(cfg.beta * h_N, mask_BT)
    return preferences.mean_over_pairs(loss_N, mask_BT, total), metrics
