# SPDX-License-Identifier: Apache-2.0
"""Losses and advantages against hand-made numbers, and loops written from the papers' formulas."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hfjax import rl
from hfjax.metrics import finalize, merge

quick = settings(max_examples=25, deadline=None)
small = st.floats(-3, 3, width=32)
B, T = 4, 6


def grids(elements=small):
    return arrays(np.float32, (B, T), elements=elements)


masks = arrays(bool, (B, T))


def f32(x) -> jax.Array:
    return jnp.asarray(np.asarray(x, np.float32))


def close(got, want, tol=1e-5):
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=tol, atol=tol)


# --- masks and whitening


@pytest.mark.parametrize("padding", [0.0, 1e6, np.nan])
def test_whitening_ignores_what_stands_under_the_mask(padding):
    """n-1: (1-2)/sqrt(2) = -0.70711; with padding counted it would be 0 and 1.41421."""
    x, mask = f32([[1, 3], [padding, padding]]), jnp.array([[True, True], [False, False]])
    close(rl.masked_whiten(x, mask), [[-0.70711, 0.70711], [0, 0]])


def test_whitening_of_fewer_than_two_tokens_is_zero():
    x = f32([[5, np.nan]])
    close(rl.masked_whiten(x, jnp.array([[True, False]])), [[0, 0]])
    close(rl.masked_whiten(x, jnp.array([[False, False]])), [[0, 0]])
    assert rl.masked_mean(x, jnp.array([[False, False]])) == 0


# --- token rewards and advantages


def test_score_lands_on_the_last_real_token_and_not_on_the_pad_after_it():
    stopped = [True, True, True, False, False]
    mask = jnp.array([stopped, [True] * 5, [False] * 5])
    rewards = rl.token_rewards(f32([2, 2, 2]), mask)
    close(rewards, [[0, 0, 2, 0, 0], [0, 0, 0, 0, 2], [0] * 5])
    _, returns = rl.gae(rewards, jnp.zeros((3, 5)), mask, 1.0, 1.0)
    close(returns, [[2, 2, 2, 0, 0], [2] * 5, [0] * 5])


def test_score_lands_after_a_hole_in_the_mask():
    close(rl.token_rewards(f32([3]), jnp.array([[True, False, True, False]])), [[0, 0, 3, 0]])


@pytest.mark.parametrize("leak", [100.0, np.nan])
def test_values_and_rewards_at_masked_positions_do_not_leak_into_advantages(leak):
    """delta_1 = 1, delta_0 = 0 + 0 - 0, A_0 = 0.95 * 1; a leaking 100 would give 5.7 and 6.0."""
    mask = jnp.array([[True, True, False]])
    for rewards in ([0, 1, 0], [0, 1, leak]):
        advantages, returns = rl.gae(f32([rewards]), f32([[0, 0, leak]]), mask, 1.0, 0.95)
        close(advantages, [[0.95, 1.0, 0]])
        close(returns, [[0.95, 1.0, 0]])


def gae_by_definition(rewards, values, gamma, lam):
    """The sum of eq. 16, sum over l of (gamma lam)^l delta_(t+l), over one unpadded row."""
    n, after = len(rewards), np.append(values[1:], 0.0)
    delta = rewards + gamma * after - values
    return [sum((gamma * lam) ** (s - t) * delta[s] for s in range(t, n)) for t in range(n)]


@quick
@given(grids(), grids(), masks, st.floats(0.5, 1), st.floats(0, 1))
def test_gae_is_the_papers_sum_over_the_unmasked_tokens(rewards, values, mask, gamma, lam):
    advantages, returns = rl.gae(rewards, values, mask, gamma, lam)
    for b in range(B):
        kept = mask[b]
        want = gae_by_definition(
            rewards[b, kept].astype(float), values[b, kept].astype(float), gamma, lam
        )
        close(advantages[b][kept], want, 1e-4)
        close(returns[b][kept], want + values[b, kept], 1e-4)
    assert not np.any(np.asarray(advantages)[~mask])
    assert not np.any(np.asarray(returns)[~mask])


def test_gae_compiles_once_for_a_shape():
    ones, mask = np.ones((3, 7), np.float32), np.ones((3, 7), bool)
    compiled = [rl.gae(ones, ones, mask, 1.0, lam) and rl.gae._cache_size() for lam in (0.9, 0.8)]
    assert compiled[0] == compiled[1]


# --- KL


def test_kl_of_equal_policies_is_exactly_zero_and_padding_changes_no_mean():
    logp, ref = f32([[-1, -0.5]]), f32([[-0.5, -1]])
    want = {"k1": [-0.5, 0.5], "k2": [0.125, 0.125], "k3": [0.148721, 0.106531]}
    for kind, values in want.items():
        assert not np.any(np.asarray(rl.kl_penalty(kind, logp, logp)))
        close(rl.kl_penalty(kind, logp, ref), [values])
        pad = np.full((1, 1000), np.nan, np.float32)
        mask = np.arange(1002)[None] < 2
        padded = [np.concatenate([x, pad], 1) for x in (logp, ref)]
        kl = rl.kl_penalty(kind, padded[0], padded[1], mask)
        close(rl.masked_mean(kl, mask), np.mean(values))
    with pytest.raises(ValueError, match="k1, k2, k3"):
        rl.kl_penalty("k4", logp, ref)


@quick
@given(grids(st.floats(-30, 0, width=32)), grids(st.floats(-30, 0, width=32)))
def test_k3_is_never_negative(logp, ref):
    near = ref + logp * np.float32(1e-7)
    assert np.all(np.asarray(rl.kl_k3(logp, ref)) >= 0)
    assert np.all(np.asarray(rl.kl_k3(near, ref)) >= 0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_loss_survives_policies_that_drifted_apart(kind, dtype):
    """logp -200 against ref 0: exp(200) is inf in float32, and inf * 0 is NaN in its gradient."""
    params, tx = jnp.array([-200.0], dtype), optax.adamw(1e-2)

    def loss(logp):
        return rl.kl_penalty(kind, logp, jnp.zeros((1,), dtype)).sum()

    value, grad = jax.value_and_grad(loss)(params)
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer power
        updates, _ = tx.update(grad, tx.init(params), params)
        after = optax.apply_updates(params, updates)
    assert np.isfinite(value)
    assert np.isfinite(grad.astype(jnp.float32)).all()
    assert np.isfinite(after.astype(jnp.float32)).all()
    if kind != "k1":  # the token that drifted furthest is still pulled back towards the reference
        assert grad[0] < 0


def test_k3_matches_its_formula_and_gradient_where_nothing_is_clamped():
    delta = np.linspace(-5, 5, 41)
    value, grad = jax.vmap(jax.value_and_grad(lambda d: rl.kl_k3(d, jnp.zeros_like(d))))(f32(delta))
    close(value, np.exp(-delta) + delta - 1)
    close(grad, 1 - np.exp(-delta))


def test_kl_in_reward_subtracts_the_penalty_at_each_token():
    mask = jnp.array([[True, True, False]])
    rewards = rl.kl_in_reward(f32([[0, 2, 9]]), f32([[0.5, -1, np.nan]]), mask, 0.1)
    close(rewards, [[-0.05, 2.1, 0]])


def test_adaptive_kl_moves_by_at_most_a_fifth_times_n_over_horizon():
    """0.2 (1 + 0.2 * 256 / 10000) = 0.201024, and 0.198976 on the way down."""
    adapted = partial(rl.adapted_kl_coef, sequences=256, target=6.0, horizon=10_000)
    assert adapted(0.2, 12.0) == pytest.approx(0.201024)
    assert adapted(0.2, 0.0) == pytest.approx(0.198976)
    assert adapted(adapted(0.2, 12.0), 12.0) == pytest.approx(0.201024 * 1.00512)
    assert adapted(0.2, float("nan")) == 0.2


# --- policy and value loss


def one_token(advantage, ratio, **clip):
    args = [f32([[x]]) for x in (np.log(ratio), 0.0, advantage)]
    loss, metrics = rl.policy_loss(*args, jnp.array([[True]]), **clip)
    return float(loss[0, 0]), finalize(metrics)


@pytest.mark.parametrize(
    ("advantage", "ratio", "want"),
    [(1, 1.1, -1.1), (1, 10, -1.2), (-1, 10, 3.0), (-1, 2, 2.0), (-1, 0.5, 0.8)],
)
def test_dual_clip_bounds_negative_advantages_only(advantage, ratio, want):
    loss, metrics = one_token(advantage, ratio, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    assert loss == pytest.approx(want, rel=1e-5)
    assert metrics["pg_clipfrac_lower"] == (want == 3.0)


def test_without_dual_clip_a_negative_advantage_is_unbounded():
    assert one_token(-1, 10, dual_clip=None)[0] == pytest.approx(10, rel=1e-5)
    assert one_token(0, 10, dual_clip=None)[0] == 0


@pytest.mark.parametrize(
    "wrong", [{"dual_clip": 1.0}, {"dual_clip": 0.5}, {"clip_low": 1.0}, {"clip_high": 0.0}]
)
def test_clip_settings_that_are_not_ppo_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        one_token(1, 1, **wrong)


def test_the_clipped_term_is_what_is_averaged_and_the_metric_sees_it():
    for clip_high, want in ((0.2, -1.2), (0.28, -1.28)):
        loss, metrics = one_token(1, 2, clip_high=clip_high)
        assert loss == pytest.approx(want)
        assert metrics["pg_clipfrac"] == 1
        assert metrics["ppo_kl"] == pytest.approx(-np.log(2))
        assert metrics["ppo_kl_k3"] == pytest.approx(2 - np.log(2) - 1)
    assert one_token(1, 1.1)[1]["pg_clipfrac"] == 0


@pytest.mark.parametrize(("new", "squared", "clipped"), [(1.0, 3.24, 1), (0.1, 3.61, 0)])
def test_value_loss_is_half_the_larger_square(new, squared, clipped):
    """old 0, return 2, clip 0.2: (0.2-2)^2 = 3.24 > (1-2)^2; unclipped (0.1-2)^2 = 3.61."""
    args = [f32([[x]]) for x in (new, 0, 2)]
    loss, metrics = rl.value_loss(*args, jnp.array([[True]]), clip=0.2)
    close(loss, [[squared / 2]])
    assert finalize(metrics)["vf_clipfrac"] == clipped
    with pytest.raises(ValueError, match="clip=0"):
        rl.value_loss(*args, jnp.array([[True]]), clip=0.0)


def policy_loss_by_definition(logp, old, advantage, low, high, c):
    """Equation 7 of PPO and the dual clip, a token at a time."""
    out = np.zeros_like(logp)
    for i in np.ndindex(logp.shape):
        r, a = np.exp(logp[i] - old[i]), advantage[i]
        objective = min(r * a, min(max(r, 1 - low), 1 + high) * a)
        out[i] = -max(objective, c * a) if a < 0 else -objective
    return out


@quick
@given(grids(), grids(), grids())
def test_policy_loss_is_the_papers(logp, old, advantage):
    loss, metrics = rl.policy_loss(
        logp, old, advantage, np.ones((B, T), bool), clip_low=0.1, clip_high=0.3, dual_clip=2.0
    )
    wide = [x.astype(np.float64) for x in (logp, old, advantage)]
    close(loss, policy_loss_by_definition(*wide, 0.1, 0.3, 2.0), 1e-4)
    assert finalize(metrics)["ppo_kl"] == pytest.approx(float((old - logp).mean()), abs=1e-5)


def test_entropy_of_known_distributions_with_a_phantom_column():
    logits = f32([[0, 0, 0, -1e30], np.log([0.5, 0.25, 0.25, 1e-30])])
    close(rl.entropy(logits), [np.log(3), 1.5 * np.log(2)])
    assert np.isfinite(jax.grad(lambda x: rl.entropy(x).sum())(logits)).all()


# --- aggregation


ROWS = f32([[4, 0, 0], [1, 1, 1]]), jnp.array([[True, False, False], [True] * 3])
WANT = {
    "token-mean": 1.75,
    "token-sum": 7.0,
    "seq-mean-token-sum": 3.5,
    "seq-mean-token-mean": 2.5,
    "seq-mean-token-sum-norm": 7 / (2 * 10),
}


@pytest.mark.parametrize("mode", rl.AGGREGATIONS)
@pytest.mark.parametrize("cut", [1, 2])
def test_loss_does_not_depend_on_how_the_mini_batch_is_cut(mode, cut):
    x, mask = ROWS
    whole = rl.denominators(mask)
    parts = [
        rl.aggregate(x[i : i + cut], mask[i : i + cut], whole, mode, length=10)
        for i in range(0, 2, cut)
    ]
    close(sum(parts), WANT[mode], 1e-6)


def test_aggregations_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="token-mean"):
        rl.check_aggregation("mean", None)
    with pytest.raises(ValueError, match="length > 0, got None"):
        rl.check_aggregation("seq-mean-token-sum-norm", None)


@pytest.mark.parametrize("mode", [m for m in rl.AGGREGATIONS if m.endswith("mean")])
def test_masked_rows_leave_the_denominator_and_an_empty_batch_is_zero(mode):
    """Rows of 2 and 4 tokens with loss 1, the second masked: 1, not 2/6 and not 1/2."""
    x = jnp.ones((2, 4))
    mask = jnp.array([[True, True, False, False], [False] * 4])
    close(rl.aggregate(x, mask, rl.denominators(mask), mode), 1.0)
    none, nan = jnp.zeros_like(mask), x * jnp.nan
    value, grad = jax.value_and_grad(rl.aggregate)(nan, none, rl.denominators(none), mode)
    assert value == 0
    assert not np.any(np.asarray(grad))


def actor_losses(logp, old, advantage, ref, mask, denominators):
    """A whole actor loss, surrogate and k3, in every mode of aggregation."""
    loss, _ = rl.policy_loss(logp, old, advantage, mask)
    loss += 0.1 * rl.kl_penalty("k3", logp, ref, mask)
    modes = [rl.aggregate(loss, mask, denominators, m, length=7.0) for m in rl.AGGREGATIONS]
    return jnp.stack(modes)


@jax.jit
def actor_losses_and_gradients(*args):
    return actor_losses(*args), jax.jacrev(actor_losses)(*args)


@quick
@given(grids(), grids(), grids(), masks, st.data())
def test_any_cut_into_micro_batches_gives_the_same_loss_and_gradients(
    logp, old, advantage, mask, data
):
    columns, whole = (logp, old, advantage, old[::-1], mask), rl.denominators(mask)
    losses, grads = actor_losses_and_gradients(*columns, whole)
    order = np.array(data.draw(st.permutations(range(B))))
    cuts = sorted(data.draw(st.sets(st.integers(1, B - 1))))
    total = 0.0
    for rows in np.split(order, cuts):
        part, part_grads = actor_losses_and_gradients(*(x[rows] for x in columns), whole)
        total += np.asarray(part)
        close(part_grads, np.asarray(grads)[:, rows], 1e-6)
    close(total, losses)


@jax.jit
@jax.value_and_grad
def everything(x, mask):
    whole = rl.denominators(mask)
    value, _ = rl.value_loss(x, 0.5 * x, x + 1.0, mask)
    advantages, returns = rl.gae(x, x, mask, 0.9, 0.8)
    return (
        actor_losses(x, 0.5 * x, x, -x, mask, whole).sum()
        + rl.aggregate(value, mask, whole)
        + jnp.sum(rl.masked_whiten(advantages, mask) * returns)
        + jnp.sum(rl.kl_in_reward(x, x, mask, 0.1))
    )


@quick
@given(grids(), masks, st.sampled_from([0.0, 1e30, np.nan, -np.inf]))
def test_garbage_under_the_mask_changes_neither_loss_nor_gradient(x, mask, garbage):
    value, grad = everything(np.where(mask, x, np.float32(garbage)), mask)
    want, want_grad = everything(np.where(mask, x, np.float32(0)), mask)
    assert value == want
    np.testing.assert_array_equal(grad, want_grad)
    assert np.isfinite(want)
    assert not np.any(np.asarray(grad)[~mask])


def test_the_loss_metric_adds_over_micro_batches_and_averages_over_mini_batches():
    """Mini-batch losses 1.75 and 4: their mean 2.875 however cut; an empty one is none."""
    x, mask = ROWS
    total = {}
    for rows in ([[0], [1]], [[0]], [[]]):
        rows = [np.array(part, int) for part in rows]
        whole = rl.denominators(mask[np.concatenate(rows)])
        for part in rows:
            loss = rl.aggregate(x[part], mask[part], whole)
            total = merge(total, {"pg_loss": rl.loss_metric(loss, mask[part], whole)})
    assert finalize(total)["pg_loss"] == pytest.approx((1.75 + 4) / 2)


# --- group advantages


def test_group_advantages_compare_the_responses_of_one_prompt_only():
    """(1-0.5)/sqrt(1/3) = 0.8660; a pair 1 apart gives 0.5/0.7071, wherever the pair lies."""
    scores = np.array([1, 1, 1, 1, 0, 0, 1, 1, 1, 0, 10, 9], np.float32)
    groups = np.repeat([7, 3, 5, 9], [4, 4, 2, 2])
    want = [0] * 4 + [-0.8660, -0.8660, 0.8660, 0.8660] + [0.7071, -0.7071] * 2
    for order in (np.arange(12), np.arange(12)[::-1], np.random.default_rng(0).permutation(12)):
        advantages, equal = rl.grpo_advantages(scores[order], groups[order])
        close(advantages, np.array(want)[order], 1e-4)
        assert finalize({"equal": equal}) == {"equal": 0.25}
    close(rl.grpo_advantages(scores, groups, normalize="none")[0][4:8], [-0.5, -0.5, 0.5, 0.5])


def test_a_group_of_one_is_refused_and_failed_rows_enter_no_statistic():
    with pytest.raises(ValueError, match=r"group 4 has one response.*n >= 2"):
        rl.grpo_advantages(np.array([5.0, 1.0, 0.0]), np.array([4, 2, 2]))
    with pytest.raises(ValueError, match="'std' or 'none'"):
        rl.grpo_advantages(np.zeros(2), np.zeros(2), normalize="batch")
    scores, groups = np.array([1.0, 0.0, np.nan, 2.0, np.nan]), np.array([0, 0, 0, 1, 1])
    advantages, equal = rl.grpo_advantages(scores, groups, valid_B=~np.isnan(scores))
    close(advantages, [0.7071, -0.7071, 0, 0, 0], 1e-4)
    assert equal == (1, 2)


@quick
@given(arrays(np.float32, 12, elements=small), st.integers(-8, 8), st.sampled_from(["std", "none"]))
def test_a_constant_added_to_a_groups_rewards_changes_no_advantage(scores, shift, normalize):
    scores = np.round(scores * 64) / 64  # so that adding the constant rounds nothing away
    groups = np.tile([0, 1, 2], 4)
    moved = scores + np.where(groups == 1, np.float32(shift), np.float32(0))
    before, _ = rl.grpo_advantages(scores, groups, normalize=normalize)
    after, _ = rl.grpo_advantages(moved, groups, normalize=normalize)
    close(after, before, 1e-5)
    spread = rl.over_tokens(before, np.tri(12, 5, dtype=bool))
    close(spread, before[:, None] * np.tri(12, 5), 1e-6)


def test_equal_scores_that_do_not_sum_exactly_still_give_zero():
    """0.1 * 3 / 3 is not 0.1 in binary; divided by eps = 1e-6 the rounding would show."""
    for score, n in itertools.product([0.1, 0.7, 1e6 + 0.1], [3, 5, 7]):
        advantages, equal = rl.grpo_advantages(np.full(n, score), np.zeros(n, int))
        assert not advantages.any()
        assert equal == (1, 1)


# --- ratios, returns, baselines -------------------------------------------------------------------


def test_gspo_has_the_rows_ratio_and_each_tokens_gradient():
    """arXiv 2507.18071 eq. 7 and 14, in NumPy; one row is clipped, the other is not."""
    mask_BT = np.array([[1, 1, 0, 1], [0, 1, 1, 0]], bool)
    logp_BT = np.array([[-1.0, -2.0, np.nan, -0.5], [np.nan, -1.0, -1.5, np.nan]], np.float32)
    old_BT = np.array([[-1.1, -1.9, np.nan, -0.7], [np.nan, -2.0, -2.5, np.nan]], np.float32)
    advantages_BT = np.where(mask_BT, np.array([[2.0], [1.0]], np.float32), np.float32(0))

    def loss(logp_BT):
        options = {"clip_low": 0.1, "clip_high": 0.2, "dual_clip": None, "ratio": "sequence"}
        loss_BT, _ = rl.policy_loss(logp_BT, old_BT, advantages_BT, mask_BT, **options)
        return loss_BT.sum(), loss_BT

    grads, loss_BT = jax.grad(loss, has_aux=True)(jnp.asarray(logp_BT))
    rows = zip(logp_BT, old_BT, mask_BT, strict=True)
    s = [np.exp(np.mean((logp - old)[mask])) for logp, old, mask in rows]
    assert 0.9 < s[0] < 1.2 < s[1]
    wanted = np.array([[-2 * s[0]] * 4, [-1.2] * 4]) * mask_BT
    np.testing.assert_allclose(loss_BT, wanted, rtol=1e-6)
    wanted = np.array([[-2 * s[0]] * 4, [0.0] * 4]) * mask_BT
    np.testing.assert_allclose(grads, wanted, rtol=1e-6)


def test_returns_step_over_masked_tokens():
    rewards_BT = np.array([[1.0, np.nan, 2.0, 4.0]], np.float32)
    mask_BT = np.array([[1, 0, 1, 1]], bool)
    wanted = [[1 + 0.5 * (2 + 0.5 * 4), 0, 2 + 0.5 * 4, 4]]
    np.testing.assert_allclose(rl.returns_to_go(rewards_BT, mask_BT, 0.5), wanted)


def test_leave_one_out_is_the_mean_of_the_others():
    score_B = np.array([1.0, 5.0, 3.0, 7.0, 2.0, 100.0], np.float32)
    group_B = np.array([0, 1, 0, 0, 1, 1])
    valid_B = np.array([1, 1, 1, 1, 1, 0], bool)
    found = rl.rloo_advantages(score_B, group_B, valid_B=valid_B)
    np.testing.assert_allclose(found, [1 - 5, 5 - 2, 3 - 4, 7 - 2, 2 - 5, 0])
    alone = rl.rloo_advantages(score_B[:1], group_B[:1])
    assert alone.tolist() == [0.0]


@given(st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=6), st.floats(-5, 5, width=32))
def test_a_constant_added_to_a_groups_rewards_changes_no_group_advantage(scores, constant):
    score_B, group_B = np.array(scores, np.float32), np.zeros(len(scores), int)
    for advantages in (rl.rloo_advantages, lambda *a: rl.grpo_advantages(*a, normalize="none")[0]):
        before = advantages(score_B, group_B)
        after = advantages(score_B + np.float32(constant), group_B)
        np.testing.assert_allclose(before, after, atol=1e-4)


def test_length_costs_from_where_it_is_said():
    found = rl.overlong_penalty(np.array([3, 10, 12, 14, 16]), start=10, buffer=4, factor=2.0)
    np.testing.assert_allclose(found, [0, 0, -1, -2, -3])


@pytest.mark.parametrize(
    ("mode", "wanted", "outside"),
    [
        ("token", [[2.0, 0.5, 0], [2.0, 1.0, 1.0]], 1 / 5),  # ratios 3, 1/2 and 2, 1, 1
        ("sequence", [[1.5, 1.5, 0], [2.0, 2.0, 2.0]], 0),
    ],
)
def test_what_was_sampled_elsewhere_is_weighed(mode, wanted, outside):
    mask_BT = np.array([[1, 1, 0], [1, 1, 1]], bool)
    ratio_BT = np.array([[3.0, 0.5, np.nan], [2.0, 1.0, 1.0]], np.float32)
    options = {"mode": mode, "cap": 2.0 + 1e-6}
    weights_BT, metrics = rl.rollout_weights(
        np.log(ratio_BT), np.zeros((2, 3), np.float32), mask_BT, **options
    )
    np.testing.assert_allclose(np.asarray(weights_BT) * mask_BT, wanted, rtol=1e-5)
    assert finalize(metrics)["rollout_is_ratio_fraction_high"] == pytest.approx(outside)


def test_rows_too_far_from_what_sampled_them_are_rejected():
    old_BT = np.log(np.array([[3.0, 1.0], [0.3, 1.0], [1.9, 1.0]], np.float32))
    mask_BT = np.ones((3, 2), bool)
    kept_B = rl.kept_rows(old_BT, np.zeros_like(old_BT), mask_BT, cap=2.0)
    assert kept_B.tolist() == [False, False, True]
