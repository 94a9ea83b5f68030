# SPDX-License-Identifier: Apache-2.0
"""The filtered distributions against NumPy, and what settings refuse."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfjax.engine.sampling import Sampling, draw
from hfjax.models.llama import K_MASK

SAMPLES = 4000
VOCAB = 12


def draws(logits_V, **settings):
    """Tokens of SAMPLES rows at response position 0, with both log-probs."""
    sampling = Sampling(max_new_tokens=8, **settings)
    logits_BnV = jnp.broadcast_to(jnp.asarray(logits_V, jnp.float32), (1, SAMPLES, len(logits_V)))
    key_Bn = jax.random.split(jax.random.key(7), (1, SAMPLES))
    return jax.device_get(
        jax.jit(partial(draw, sampling=sampling))(logits_BnV, key_Bn, jnp.int32(0))
    )


def filtered_distribution(logits_V, temperature, top_k, top_p, min_p, forbidden):
    """The filters of Sampling, a token at a time from the likeliest down."""
    z_V = np.array(logits_V, np.float64) / temperature
    order = [i for i in sorted(range(len(z_V)), key=lambda i: -z_V[i]) if i not in forbidden]
    order = order[: top_k or None]
    weight = {i: np.exp(z_V[i] - z_V[order[0]]) for i in order}
    total, mass, kept = sum(weight.values()), 0.0, []
    for i in order:
        if mass / total >= top_p:
            break
        mass += weight[i]
        kept.append(i)
    kept = [i for i in kept if weight[i] >= min_p * weight[kept[0]]]
    p_V = np.zeros(len(z_V))
    p_V[kept] = [weight[i] for i in kept]
    return p_V / p_V.sum()


FILTERS = {
    "top_k": {"top_k": 5},
    "top_k of one": {"top_k": 1},
    "top_p": {"top_p": 0.7},
    "top_p of the first token": {"top_p": 0.01},
    "min_p": {"min_p": 0.15},
    "all": {"top_k": 9, "top_p": 0.9, "min_p": 0.1, "temperature": 1.3},
    "top_k beyond the vocabulary": {"top_k": 50, "temperature": 0.8},
    "with forbidden stops": {"top_k": 4, "min_new_tokens": 1, "stop_ids": (6, 9)},
}


@pytest.mark.parametrize("name", FILTERS)
def test_filters_against_numpy(name):
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **FILTERS[name]}
    logits_V = np.random.default_rng(5).normal(size=VOCAB) * 1.5
    logits_V[6] = logits_V.max() + 0.3  # forbidden in the last case, the likeliest in the others
    phantoms_V = np.concatenate([logits_V, np.full(3, K_MASK)])
    token_Bn, logp_Bn, filtered_Bn = draws(phantoms_V, **settings)
    rules = [settings[rule] for rule in ("temperature", "top_k", "top_p", "min_p")]
    p_V = filtered_distribution(logits_V, *rules, settings.get("stop_ids", ()))
    full_V = filtered_distribution(logits_V, settings["temperature"], 0, 1.0, 0.0, ())
    share_V = np.bincount(token_Bn[0], minlength=VOCAB) / SAMPLES
    assert len(share_V) == VOCAB
    assert not share_V[p_V == 0].any()
    assert np.all(np.abs(share_V - p_V) <= 4.5 * np.sqrt(p_V * (1 - p_V) / SAMPLES))
    np.testing.assert_allclose(filtered_Bn, np.log(p_V[token_Bn]), atol=1e-5)
    np.testing.assert_allclose(logp_Bn, np.log(full_V[token_Bn]), atol=1e-5)


@pytest.mark.parametrize("settings", [{"top_k": 2}, {"top_p": 0.5}], ids=str)
def test_ties_at_the_cut_are_kept_across_the_two_zeros(settings):
    # Shares 0.45 and three of 0.17: both filters cut among the three, one of which is -0.0.
    logits_V = [1.0, 0.0, -0.0, 0.0, -2.0, -3.0]
    token_Bn, _, filtered_Bn = draws(logits_V, **settings)
    assert set(token_Bn[0]) == {0, 1, 2, 3}
    wanted_V = np.array(logits_V) - np.log(np.e + 3)
    np.testing.assert_allclose(filtered_Bn, wanted_V[token_Bn], atol=1e-5)


def test_a_filter_changes_no_draw_that_it_allows():
    logits_V = np.linspace(-2, 2, VOCAB)
    free_Bn, _, none = draws(logits_V)
    kept_Bn, _, _ = draws(logits_V, top_k=8)
    assert none is None
    allowed_Bn = free_Bn >= VOCAB - 8
    np.testing.assert_array_equal(kept_Bn[allowed_Bn], free_Bn[allowed_Bn])


@pytest.mark.parametrize(
    "settings",
    [
        {"n": 0},
        {"temperature": -0.5},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": 2.0},
        {"max_new_tokens": 0},
        {"min_new_tokens": 9},
        {"stop_ids": (-1,)},
        {"stop_ids": [2]},
    ],
    ids=str,
)
def test_wrong_settings_are_refused_by_name(settings):
    ((name, value),) = settings.items()
    with pytest.raises(ValueError, match=f"{name}=.*must be") as refusal:
        Sampling(**{"max_new_tokens": 8, **settings})
    assert str(value) in str(refusal.value)


@pytest.mark.parametrize("vocab", [1, 7, 4096])
@pytest.mark.parametrize("position", [0, 1000])
def test_what_is_drawn_is_the_argmax_with_the_noise_of_jax_random_bit_for_bit(vocab, position):
    logits_BnV = jnp.round(3 * jax.random.normal(jax.random.key(1), (3, 2, vocab)))  # with ties
    key_Bn = jax.random.split(jax.random.key(2), (3, 2))
    for sampling in (Sampling(max_new_tokens=8), Sampling(max_new_tokens=8, greedy=True)):
        found_Bn, *_ = draw(logits_BnV, key_Bn, jnp.int32(position), sampling)
        for row in np.ndindex(3, 2):
            key = jax.random.fold_in(key_Bn[row], position)
            noise_V = 0 if sampling.greedy else jax.random.gumbel(key, (vocab,), jnp.float32)
            assert found_Bn[row] == jnp.argmax(logits_BnV[row] + noise_V)


def test_logits_that_are_no_numbers_give_a_token_of_the_vocabulary():
    tokens, *_ = draws([np.nan] * VOCAB)
    assert ((tokens >= 0) & (tokens < VOCAB)).all()
