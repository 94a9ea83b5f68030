# SPDX-License-Identifier: Apache-2.0
"""A batch in which nothing is trained gives every algorithm zeros, and no metric that is NaN."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from algorithms import grpo, ppo, reinforce_pp, remax, rloo, safe_rlhf
from hfjax import rl
from hfjax.batch import Batch
from hfjax.config import KLConfig


def a_batch(mask_BT: np.ndarray) -> Batch:
    """Four rows of two prompts; NaN where the mask is False."""
    rng = np.random.default_rng(1)
    numbers = rng.normal(size=(4, *mask_BT.shape)).astype(np.float32)
    names = ("values", "cost_values", "old_log_probs", "ref_log_prob")
    columns = {n: np.where(mask_BT, x, np.nan) for n, x in zip(names, numbers, strict=True)}
    score_B, cost_B = rng.normal(size=(2, 4)).astype(np.float32)
    uid_B = np.array([0, 0, 1, 1])
    return Batch(columns, response_mask=mask_BT, score=score_B, cost=cost_B, uid=uid_B)


def advantages(algorithm: Any, batch: Batch) -> Batch:
    """What the algorithm's arithmetic on the controller makes of it."""
    kl = {} if algorithm is grpo else {"kl": KLConfig(where="reward", estimator="k1", coef=0.1)}
    more = {"multiplier_lr": 1e-9} if algorithm is safe_rlhf else {}
    compute, cfg = algorithm.compute_advantage, algorithm.Settings(**kl, **more)
    if algorithm is remax:
        first = batch.select(rl.first_rows(batch["uid"]))
        compute = partial(compute, greedy=first)
    return compute(batch, cfg=cfg) if algorithm is grpo else compute(batch, cfg=cfg, memory={})


@pytest.mark.parametrize("algorithm", [ppo, grpo, remax, rloo, reinforce_pp, safe_rlhf])
@pytest.mark.parametrize("score", [1.0, np.nan])
def test_a_batch_without_a_trained_token_prepares_nothing(algorithm: Any, score: float) -> None:
    """Every reward failed, or no row has a response: zeros, and no metric that is NaN."""
    batch = a_batch(np.zeros((4, 3), bool))
    scores = {name: np.full(4, score, np.float32) for name in ("score", "cost")}
    found = advantages(algorithm, batch | scores)
    for name in set(found.names) - {"response_mask"}:
        assert not np.asarray(found[name]).any(), name
    assert np.isfinite(list(dict(found.metrics.result()).values())).all()
