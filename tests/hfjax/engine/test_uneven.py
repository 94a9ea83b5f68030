# SPDX-License-Identifier: Apache-2.0
"""Rows over replicas and micro-batches: fillers are never counted, metrics are of the whole."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfjax.engine.microbatch import cut_micros
from hfjax.metrics import Max, Mean, Total, finalize
from hfjax.rl import aggregate
from meshes.mesh import MeshShape
from tests.hfjax.engine.cases import (
    COLUMNS,
    assert_close,
    host_params,
    lm_loss,
    make_batch,
    make_trainer,
    place_params,
)

trainer_of = partial(make_trainer, columns=COLUMNS, chunk=8, with_entropy=True)
slow = pytest.mark.slow


def found(batch, replicas, micro=0, loss=lm_loss):
    """Loss, gradients and metrics; `micro` rows a micro-batch on each replica, 0: all at once."""
    shape = MeshShape(data=replicas)
    micros = cut_micros(batch, replicas=replicas, micro_sequences=micro * replicas)
    trainer = trainer_of(loss, shape)
    loss, grads, metrics = trainer.gradients(place_params(host_params(), shape), micros)
    return loss, grads, finalize(metrics)


def assert_same(ours, theirs):
    assert_close(ours[:2], theirs[:2])
    assert ours[2] == pytest.approx(theirs[2], abs=1e-5)
    assert np.isfinite([ours[0], *ours[2].values()]).all()
    assert all(np.isfinite(np.asarray(g)).all() for g in jax.tree.leaves(ours[1]))


@pytest.mark.parametrize("rows", [6, pytest.param(1, marks=slow), pytest.param(5, marks=slow)])
def test_rows_that_four_replicas_do_not_divide_train_as_on_one(rows):
    batch = make_batch(rows=rows + 1)  # its last row is left out whole
    batch = {name: x[:rows] for name, x in batch.items()}
    ours = found(batch, 4)
    assert_same(ours, found(batch, 1))
    assert ours[2]["tokens"] == batch["response_mask"].sum()


@pytest.fixture(scope="module")
def whole():
    """All rows at once on one device."""
    return found(make_batch(), 1)


@pytest.mark.parametrize(
    ("replicas", "micro"),
    [
        (4, 1),
        *(pytest.param(*case, marks=slow) for case in [(2, 1), (2, 2), (2, 4), (4, 2)]),
    ],
)
def test_replicas_and_micro_batches_change_no_number(replicas, micro, whole):
    """Of eight rows of different lengths; on one replica, test_train has each cut."""
    assert_same(found(make_batch(), replicas, micro), whole)


def counted_loss(outputs, batch, denominators):
    """Its metrics count tokens that are clipped (a positive advantage), and the largest column."""
    mask = batch["response_mask"]
    metrics = {
        "clip": Mean.of(jnp.where(batch["advantages"] > 0, 1.0, 0.0), mask),
        "top": Max(jnp.where(mask, batch["old_log_probs"], -jnp.inf).max()),
        "tokens": Total(mask.sum(dtype=jnp.float32)),
    }
    return aggregate(outputs.log_probs_BT, mask, denominators), metrics


@pytest.mark.parametrize(("replicas", "micro"), [(2, 1), pytest.param(1, 1, marks=slow)])
def test_metrics_of_unequal_ranks_are_of_all_tokens(replicas, micro):
    """3 of 12 tokens clipped on one, 3 of 4 on the other: 6/16; no mean of means, 0.5, of maxima.

    Once as two replicas, once as two micro-batches.
    """
    batch = make_batch(rows=2)
    tokens, clipped, top = np.array([12, 4]), np.array([3, 3]), np.array([1, 9], np.float32)
    at = np.arange(batch["input_ids"].shape[1])[None] - 2
    mask = (at >= 0) & (at < tokens[:, None])
    batch |= {
        "prompt_length": np.full(2, 2, np.int32),
        "length": (2 + tokens).astype(np.int32),
        "response_mask": mask,
        "advantages": np.where(mask & (at < clipped[:, None]), np.float32(1), np.float32(-1)),
        "old_log_probs": np.where(at == 1, top[:, None], np.float32(-1)),
    }
    *_, metrics = found(batch, replicas, micro, counted_loss)
    assert metrics == {"clip": 0.375, "top": 9, "tokens": 16}
