# SPDX-License-Identifier: Apache-2.0
"""Losses of pairs against ten lines of NumPy; no cut and no filler changes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from algorithms import dpo, reward_model
from hfjax.engine.train import Outputs
from hfjax.rl import denominators


def drawn(pairs=3, width=5, seed=0):
    """Log-probs of both models and a mask with holes; NaN where it is False."""
    rng = np.random.default_rng(seed)
    mask_BT = rng.random((2 * pairs, width)) < 0.7
    mask_BT[:, 1] = True
    logp_BT, ref_BT = (
        np.where(mask_BT, -rng.random(mask_BT.shape), np.nan).astype(np.float32) for _ in range(2)
    )
    return logp_BT, ref_BT, mask_BT


def by_hand(logp_BT, ref_BT, mask_BT, cfg):
    losses = []
    for i in range(0, len(mask_BT), 2):
        ratios = [float((logp_BT[j] - ref_BT[j])[mask_BT[j]].sum()) for j in (i, i + 1)]
        if cfg.loss == "ipo":
            ratios = [r / mask_BT[j].sum() for r, j in zip(ratios, (i, i + 1), strict=True)]
            losses.append((ratios[0] - ratios[1] - 1 / (2 * cfg.beta)) ** 2)
            continue
        z = cfg.beta * (ratios[0] - ratios[1])
        s = cfg.label_smoothing
        losses.append((1 - s) * np.log1p(np.exp(-z)) + s * np.log1p(np.exp(z)))
    return np.mean(losses)


SETTINGS = [
    dpo.Settings(beta=0.5),
    dpo.Settings(beta=0.5, label_smoothing=0.2),
    dpo.Settings(beta=0.5, loss="ipo"),
]


def loss_of(logp_BT, ref_BT, mask_BT, total, cfg):
    batch = {"ref_log_prob": jnp.asarray(ref_BT), "response_mask": jnp.asarray(mask_BT)}
    return dpo.dpo_loss(Outputs(log_probs_BT=jnp.asarray(logp_BT)), batch, total, cfg=cfg)


@pytest.mark.parametrize("cfg", SETTINGS, ids=str)
def test_dpo_is_that_of_its_papers(cfg):
    logp_BT, ref_BT, mask_BT = drawn()
    loss, metrics = loss_of(logp_BT, ref_BT, mask_BT, denominators(mask_BT), cfg)
    np.testing.assert_allclose(loss, by_hand(logp_BT, ref_BT, mask_BT, cfg), rtol=1e-6)
    assert metrics["accuracy"].count == 3


@pytest.mark.parametrize("cfg", SETTINGS, ids=str)
def test_parts_of_a_mini_batch_add_up_and_fillers_are_nothing(cfg):
    columns = drawn()
    total = denominators(columns[-1])
    whole, _ = loss_of(*columns, total, cfg)
    filled = [np.pad(c[4:], [(0, 2), (0, 0)]) for c in columns]
    parts = [[c[:4] for c in columns], filled]
    found = sum(loss_of(*part, total, cfg)[0] for part in parts)
    np.testing.assert_allclose(found, whole, rtol=1e-6)


def test_garbage_under_the_mask_has_no_gradient():
    logp_BT, ref_BT, mask_BT = drawn()
    cfg = SETTINGS[0]
    grad = jax.grad(lambda x: loss_of(x, ref_BT, mask_BT, denominators(mask_BT), cfg)[0])(
        jnp.asarray(logp_BT)
    )
    assert np.isfinite(grad).all()
    assert not np.asarray(grad)[~mask_BT].any()
    assert (np.asarray(grad)[0][mask_BT[0]] < 0).all()  # the chosen answer becomes likelier
    assert (np.asarray(grad)[1][mask_BT[1]] > 0).all()


def test_a_reward_models_loss_is_bradley_terry():
    score_B = np.array([1.0, -0.5, 0.25, 2.0], np.float32)
    mask_BT = np.ones((4, 2), bool)
    cfg = reward_model.Settings(centre=0.1)
    outputs, batch = Outputs(scores_B=jnp.asarray(score_B)), {"response_mask": mask_BT}
    loss, metrics = reward_model.preference_loss(outputs, batch, denominators(mask_BT), cfg=cfg)
    margins, sums = score_B[::2] - score_B[1::2], score_B[::2] + score_B[1::2]
    wanted = np.mean(np.log1p(np.exp(-margins)) + 0.1 * sums**2)
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    assert float(metrics["accuracy"].sum) == 1.0
