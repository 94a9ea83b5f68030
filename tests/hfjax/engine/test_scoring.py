# SPDX-License-Identifier: Apache-2.0
"""Scoring: chunks give the dense values; alignment, padding and layout change nothing."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfjax.engine.microbatch import place_rows
from hfjax.engine.scoring import (
    Scorer,
    log_softmax_at,
    score_tokens,
    scores_at_end,
    values_of,
)
from hfjax.models.llama import hidden_states, lm_logits
from tests.hfjax.engine.cases import (
    CFG,
    LOSSES,
    LUT,
    SHAPES,
    assert_close,
    host_params,
    lay_out,
    lut_params,
    make_batch,
    place_params,
    replicas_of,
)


def dense(cfg, params, tokens_BT, temperature):
    """The whole logits array at once, from the definition."""
    x_BTD = hidden_states(cfg, params, tokens_BT)
    logp_BTV = jax.nn.log_softmax(lm_logits(cfg, params, x_BTD)[:, :-1] / temperature)
    picked = jnp.take_along_axis(logp_BTV, tokens_BT[:, 1:, None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(logp_BTV) * logp_BTV, axis=-1)
    first = [(0, 0), (1, 0)]
    return jnp.pad(picked, first), jnp.pad(entropy, first)


def weighted_sum(score, weight_BT):
    """A scalar of both results, so that every gradient path is used."""

    def of(params, tokens_BT):
        logp_BT, entropy_BT = score(params, tokens_BT)
        return jnp.sum(weight_BT * (logp_BT + 0.3 * entropy_BT))

    return jax.jit(jax.grad(of))


def test_chunks_give_the_dense_values_and_gradients():
    params, tokens_BT = host_params(), make_batch(rows=3, width=17)["input_ids"]
    weight_BT = np.random.default_rng(0).standard_normal((3, 17)).astype(np.float32)

    def chunked(params, tokens_BT):
        return score_tokens(CFG, params, tokens_BT, 0.7, chunk=5)  # 17 = 3 x 5 + 2

    def whole(params, tokens_BT):
        return dense(CFG, params, tokens_BT, 0.7)

    assert_close(jax.jit(chunked)(params, tokens_BT), jax.jit(whole)(params, tokens_BT))
    ours = weighted_sum(chunked, weight_BT)(params, tokens_BT)
    assert_close(ours, weighted_sum(whole, weight_BT)(params, tokens_BT))
    assert all(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(ours))


def largest_vocabulary_array(score):
    """Most elements of any array with a vocabulary dimension, forward and backward."""
    text = str(
        jax.make_jaxpr(jax.value_and_grad(lambda p, t: score(p, t)[0].sum()))(
            host_params(), np.zeros((4, 32), np.int32)
        )
    )
    shapes = [tuple(map(int, m.split(","))) for m in re.findall(r"f32\[([\d,]+)\]", text)]
    return max(math.prod(shape) for shape in shapes if CFG.vocab in shape)


def test_no_array_of_rows_by_tokens_by_vocabulary_exists():
    whole = 4 * 32 * CFG.vocab
    assert largest_vocabulary_array(lambda p, t: dense(CFG, p, t, 1.0)) >= whole * 31 / 32
    chunked = largest_vocabulary_array(lambda p, t: score_tokens(CFG, p, t, 1.0, chunk=8))
    assert chunked <= whole / 2  # 8 of 32 positions at a time; the head itself is larger


def test_temperature_divides_the_logits():
    """Logits 2, 1, 0 at T = 0.5: logits/T = 4, 2, 0, so logp = x - log(e^4 + e^2 + 1)."""
    head_DV = np.full((16, 16), -30 / 4, np.float32)
    head_DV[3, [7, 8, 9]] = np.array([2, 1, 0]) / 4
    tokens_BT = np.array([[3, 7], [3, 8], [3, 9]], np.int32)
    logp_BT, entropy_BT = score_tokens(LUT, lut_params(lm_head=head_DV), tokens_BT, 0.5)
    assert_close(logp_BT[:, 1], np.array([-0.14293, -2.14293, -4.14293]))
    # 0.86681 * 0.14293 + 0.11731 * 2.14293 + 0.01588 * 4.14293
    assert_close(entropy_BT[:, 1], np.full(3, 0.44106))
    np.testing.assert_array_equal(logp_BT[:, 0], 0)


def test_padded_vocabulary_carries_no_probability():
    """Vocabulary 11 held as 12, all logits equal: log 11 = 2.39790, not log 12 = 2.48491."""
    cfg = dataclasses.replace(CFG, vocab=11, vocab_multiple=4)
    params = host_params(cfg) | {"lm_head": np.zeros((40, 12), np.float32)}
    tokens_BT = np.array([[3, 0, 10, 5]], np.int32)

    @jax.jit
    def score(params):
        return score_tokens(cfg, params, tokens_BT, 1.0)

    logp_BT, entropy_BT = score(params)
    assert_close(logp_BT[0, 1:], np.full(3, -2.39790))
    assert_close(entropy_BT[0, 1:], np.full(3, 2.39790))
    grads = jax.grad(lambda params: sum(a.sum() for a in score(params)))(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
    np.testing.assert_array_equal(grads["lm_head"][:, 11], 0)


HEADS = {
    "lm": lambda params, tokens_BT: score_tokens(CFG, params, tokens_BT, 1.0, chunk=4),
    "value": lambda params, tokens_BT: (values_of(CFG, params, tokens_BT),),
    "score": lambda params, tokens_BT: (
        scores_at_end(CFG, params, tokens_BT, np.array([5, 5], np.int32))[:, None],
    ),
}


@pytest.mark.parametrize("head", list(HEADS))
def test_a_row_scores_alike_alone_and_beside_longer_rows(head):
    rng = np.random.default_rng(3)
    row, params, score = rng.integers(0, 96, 5), host_params(head=head), jax.jit(HEADS[head])
    results = []
    for pad in (0, 1, 7, 64):
        tokens_BT = rng.integers(0, 96, (2, 5 + pad)).astype(np.int32)  # a neighbour, padding
        tokens_BT[0, :5] = row
        results.append([x[0, :5] for x in score(params, tokens_BT)])
    for result in results[1:]:
        assert_close(result, results[0])


def test_a_token_says_nothing_about_its_own_value_or_those_before():
    tokens_BT = make_batch(rows=1, width=10)["input_ids"]
    changed_BT = tokens_BT.copy()
    changed_BT[0, 4] = (changed_BT[0, 4] + 1) % 96
    params = host_params(head="value")
    values = jax.jit(HEADS["value"])
    before, after = (np.asarray(values(params, t)[0])[0] for t in (tokens_BT, changed_BT))
    assert before[0] == 0
    np.testing.assert_array_equal(before[:5], after[:5])  # columns 0 to 4: before token 4
    assert (np.abs(before[5:] - after[5:]) > 1e-4).all()
    score, params = jax.jit(HEADS["lm"]), host_params()
    scored = [np.asarray(score(params, t)) for t in (tokens_BT, changed_BT)]
    same = np.isclose(scored[0][:, 0], scored[1][:, 0], atol=1e-6)
    assert same[0].tolist() == [True] * 4 + [False] * 6  # log p(token 4) changes with the token
    assert same[1].tolist() == [True] * 5 + [False] * 5  # the entropy there does not


def test_the_score_is_that_of_the_last_token_whatever_follows():
    """Text 3, 2, 5, 7 with pad id = EOS id = 2 inside it; the score is 4 x weight[7]."""
    weight_D = np.arange(16, dtype=np.float32)
    params = lut_params("score", value_head=weight_D)
    alone = scores_at_end(LUT, params, np.array([[3, 2, 5, 7]], np.int32), np.array([4], np.int32))
    padded = np.array(
        [
            [3, 2, 5, 7, 2, 2, 2],
            [3, 2, 5, 7, 0, 0, 0],
            [3, 2, 5, 7, 7, 9, 1],
            [9, 2, 2, 2, 2, 2, 7],
        ],
        np.int32,
    )
    together = scores_at_end(LUT, params, padded, np.array([4, 4, 4, 7], np.int32))
    assert_close(alone, np.array([28.0]))
    assert_close(together, np.full(4, 28.0))


def test_bare_logits_have_the_same_log_probs_at_every_rank():
    logits_BnV = np.random.default_rng(0).standard_normal((2, 3, 5)).astype(np.float32)
    tokens_Bn = np.array([[0, 1, 2], [3, 4, 0]], np.int32)
    for dtype in (np.float32, jnp.bfloat16):
        given = jnp.asarray(logits_BnV).astype(dtype)
        logp_Bn = log_softmax_at(given, tokens_Bn, 2.0)
        assert logp_Bn.dtype == jnp.float32
        x = np.asarray(given.astype(jnp.float32), np.float64) / 2
        expected = x - np.log(np.exp(x).sum(-1, keepdims=True))
        assert_close(logp_Bn, np.take_along_axis(expected, tokens_Bn[..., None], -1)[..., 0], 1e-6)


@jax.jit
def expected_scores(params, tokens_BT, length_B):
    return {
        "lm": dense(CFG, params["lm"], tokens_BT, 0.8),
        "value": values_of(CFG, params["value"], tokens_BT),
        "score": scores_at_end(CFG, params["score"], tokens_BT, length_B),
    }


@pytest.mark.parametrize("name", list(SHAPES))
def test_scores_do_not_depend_on_the_layout(name):
    shape, batch = SHAPES[name], make_batch()
    mesh, layout = lay_out(shape)
    scorers = {
        head: Scorer(CFG, replicas_of(shape, head), temperature=0.8, chunk=6) for head in LOSSES
    }
    tokens_BT, length_B = (place_rows(mesh, layout, batch[k]) for k in ("input_ids", "length"))
    params = {head: host_params(head=head) for head in ("lm", "value", "score")}
    placed = {head: place_params(p, shape, head) for head, p in params.items()}
    logp_BT, entropy_BT = scorers["lm"].log_probs(placed["lm"], tokens_BT)
    results = {
        "lm": (logp_BT, entropy_BT),
        "value": scorers["value"].values(placed["value"], tokens_BT),
        "score": scorers["score"].scores(placed["score"], tokens_BT, length_B),
    }
    assert_close(results, expected_scores(params, batch["input_ids"], batch["length"]))
    assert len(logp_BT.sharding.device_set) == shape.devices
    assert logp_BT.sharding.shard_shape((8, 20)) == (8 // (shape.data * shape.fsdp), 20)


def test_scoring_collects_no_vocabulary():
    """With the vocabulary sharded, no collective carries logits: their sums only."""
    shape = SHAPES["data 2 x tensor 4"]
    mesh, layout = lay_out(shape)
    tokens_BT = place_rows(mesh, layout, make_batch()["input_ids"])
    scorer = Scorer(CFG, replicas_of(shape), chunk=5)
    text = scorer.log_probs.lower(place_params(host_params(), shape), tokens_BT).compile().as_text()
    gathers = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text)
    assert not [g for g in gathers if str(CFG.vocab) in g.split(",")], gathers
