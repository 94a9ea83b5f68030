# SPDX-License-Identifier: Apache-2.0
"""Losses of pairs: rows 2i and 2i + 1 of a micro-batch are the chosen and the rejected answer.

A pair counts where both of its rows have trained tokens; rows that fill a shape up count nothing.
"""

import jax
import jax.numpy as jnp
import numpy as np

from hfjax.metrics import Mean
from hfjax.rl import Denominators


def pair_loss(margin_N: jax.Array, smoothing: float = 0.0) -> jax.Array:
    """-(1 - s) log sigmoid(margin) - s log sigmoid(-margin) a pair (Bradley-Terry; s > 0: cDPO)."""
    log_sigmoid = jax.nn.log_sigmoid
    return -(1.0 - smoothing) * log_sigmoid(margin_N) - smoothing * log_sigmoid(-margin_N)


def paired(x_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The rows 2i and the rows 2i + 1: chosen and rejected answers of pair i."""
    x_N2 = jnp.asarray(x_B).reshape(-1, 2)
    return x_N2[:, 0], x_N2[:, 1]


def accuracy(margin_N: jax.Array) -> np.ndarray:
    """1 where the chosen answer leads, 1/2 where the two are equal: what tossing gives."""
    return (0.5 + 0.5 * np.sign(np.asarray(margin_N, np.float32))).astype(np.float32)


def mean_over_pairs(loss_N: jax.Array, mask_BT: jax.Array, denominators: Denominators) -> jax.Array:
    """A micro-batch's share of the mean over the mini-batch's pairs; by its real ones."""
    pairs = jnp.asarray(denominators.sequences).astype(jnp.float32) / 2.0
    return jnp.where(_real_pairs(mask_BT), loss_N, 0.0).sum() / jnp.maximum(pairs, 1.0)


def pair_metrics(margin_N: jax.Array, mask_BT: jax.Array) -> dict[str, Mean]:
    """The share of pairs whose chosen answer leads, and by how much."""
    real_N = _real_pairs(mask_BT)
    leads_N = 0.5 + 0.5 * jnp.sign(margin_N)  # an equal margin is half right
    return {"accuracy": Mean.of(leads_N, real_N), "margin": Mean.of(margin_N, real_N)}


def _real_pairs(mask_BT: jax.Array) -> jax.Array:
    chosen_N, rejected_N = paired(jnp.asarray(mask_BT).any(-1))
    return chosen_N & rejected_N
