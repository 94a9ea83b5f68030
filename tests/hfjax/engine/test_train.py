# SPDX-License-Identifier: Apache-2.0
"""Updates: no number depends on the cut or the layout; bad batches change nothing."""

import logging
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hfjax.engine.microbatch import cut_micros, place_rows
from hfjax.engine.scoring import Scorer, score_tokens
from hfjax.engine.train import LEAST_EPS, MOST, OptimizerConfig, Outputs
from hfjax.metrics import Max, Mean, finalize
from hfjax.rl import Denominators, aggregate
from meshes.mesh import MeshShape
from tests.fixtures import slow_but
from tests.hfjax.engine.cases import (
    CFG,
    COLUMNS,
    LOSSES,
    LUT,
    SHAPES,
    assert_close,
    host_params,
    lay_out,
    lm_loss,
    make_batch,
    make_trainer,
    place_params,
)

ONE = MeshShape()
trainer_of = partial(make_trainer, columns=COLUMNS, chunk=8, with_entropy=True)


@pytest.fixture(scope="module")
def lm():
    """One trainer on one device, with the gradients of the whole mini-batch in one piece."""
    trainer, params = trainer_of(lm_loss, ONE), place_params(host_params(), ONE)
    micros = cut_micros(make_batch(), replicas=1)
    return trainer, params, trainer.gradients(params, micros)


def host(state):
    return jax.tree.map(np.asarray, state)


def assert_same_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


# --- gradients ------------------------------------------------------------------------------------


def test_gradients_are_those_of_the_loss(lm):
    """Against jax.grad of the loss over the mini-batch, no scan, no micro-batches, no mesh."""
    _, params, (loss, grads, _) = lm
    batch = make_batch()
    tokens, sequences = batch["response_mask"].sum(), batch["response_mask"].any(1).sum()

    @jax.jit
    @jax.value_and_grad
    def plain(params):
        outputs = Outputs(*score_tokens(CFG, params, batch["input_ids"], 1.0))
        return lm_loss(outputs, batch, Denominators(jnp.int32(tokens), jnp.int32(sequences)))[0]

    expected_loss, expected = plain(params)
    assert_close((loss, grads), (expected_loss, expected))
    assert all(np.abs(leaf).max() > 1e-4 for leaf in jax.tree.leaves(grads))


CUTS = {
    "1 row": {"micro_sequences": 1},
    "2 rows": {"micro_sequences": 2},
    "4 rows": {"micro_sequences": 4},
    "60 tokens": {"micro_tokens": 60, "bucket": 10},
    "pairs, 80 tokens": {"micro_tokens": 80, "bucket": 10, "group": 2},
    "whole, in threes": {"group": 3},  # 8 rows filled up to 9
}


@pytest.mark.parametrize("cut", slow_but(CUTS, "2 rows", "60 tokens"))
def test_no_number_depends_on_the_cut(lm, cut):
    trainer, params, (loss, grads, metrics) = lm
    micros = cut_micros(make_batch(), replicas=1, **CUTS[cut])
    ours = trainer.gradients(params, micros)
    assert_close(ours[:2], (loss, grads))
    assert finalize(ours[2]) == pytest.approx(finalize(metrics), abs=1e-5)
    assert finalize(metrics)["tokens"] == make_batch()["response_mask"].sum()


@pytest.mark.parametrize("head", slow_but(["lm", "score"], "lm"))
def test_no_number_depends_on_the_layout(head):
    results = {}
    names = SHAPES if head == "lm" else ("one device", "fsdp 4 x tensor 2")
    for name in names:
        shape = SHAPES[name]
        trainer = trainer_of(LOSSES[head], shape, head=head)
        params = place_params(host_params(head=head), shape, head)
        micros = cut_micros(make_batch(), replicas=shape.data * shape.fsdp)
        results[name] = trainer.gradients(params, micros)
    loss, grads, metrics = results.pop("one device")
    assert np.abs(np.asarray(grads["embed"])).max() > 1e-4
    for ours in results.values():
        assert_close(ours[:2], (loss, grads))
        assert finalize(ours[2]) == pytest.approx(finalize(metrics), abs=1e-5)


def given_loss(outputs, batch, denominators, mode):
    """A loss of the stated size a token, with a gradient proportional to it."""
    logp_BT = outputs.log_probs_BT
    per_token = batch["token_loss"] * jnp.exp(logp_BT - jax.lax.stop_gradient(logp_BT))
    return aggregate(per_token, batch["response_mask"], denominators, mode), {}


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        pytest.param("token-mean", 1.75, marks=pytest.mark.slow),  # (4 + 3 * 1) / 4
        ("seq-mean-token-mean", 2.5),  # (4 + 1) / 2
        pytest.param("seq-mean-token-sum", 3.5, marks=pytest.mark.slow),  # (4 + 3) / 2
    ],
)
def test_a_long_row_weighs_the_same_in_every_cut(mode, expected):
    """Row A: 1 token with loss 4; row B: 3 tokens with loss 1."""
    mask = np.zeros((2, 6), bool)
    mask[0, 2], mask[1, 2:5] = True, True
    batch = {
        "input_ids": np.arange(12, dtype=np.int32).reshape(2, 6),
        "length": np.array([3, 5], np.int32),
        "response_mask": mask,
        "token_loss": np.where(mask, [[4.0], [1.0]], np.nan).astype(np.float32),
    }
    alone = [cut_micros({k: v[i : i + 1] for k, v in batch.items()}, replicas=2) for i in (0, 1)]
    cuts = {
        (1, 1): cut_micros(batch, replicas=1, micro_sequences=1),
        (2, 1): cut_micros(batch, replicas=1, micro_sequences=2),
        (2, 2): cut_micros(batch, replicas=2, micro_sequences=2),
        (1, 2): alone[0] + alone[1],  # a row and a dummy row each
    }
    loss_fn, results = partial(given_loss, mode=mode), {}
    trainers = {
        data: make_trainer(loss_fn, MeshShape(data=data), cfg=LUT, columns=("token_loss",))
        for data in (1, 2)
    }
    for (micro, data), micros in cuts.items():
        shape = MeshShape(data=data)
        params = place_params(host_params(LUT), shape, cfg=LUT)
        results[micro, data] = trainers[data].gradients(params, micros)
    for loss, grads, _ in results.values():
        assert float(loss) == pytest.approx(expected, abs=1e-6)
        assert_close(grads, results[1, 1][1], 1e-6)


def test_what_stands_under_the_mask_changes_nothing(lm):
    trainer, params, expected = lm
    batch, rng = make_batch(), np.random.default_rng(9)
    empty = np.arange(20)[None] >= batch["length"][:, None]
    garbage = rng.integers(0, 96, empty.shape).astype(np.int32)
    batch["input_ids"] = np.where(empty, garbage, batch["input_ids"])
    for name, value in (("advantages", np.nan), ("old_log_probs", np.inf)):
        batch[name] = np.where(batch["response_mask"], batch[name], np.float32(value))
    ours = trainer.gradients(params, cut_micros(batch, replicas=1))
    # the entropy bonus is masked by the loss, the rest exactly 0
    assert_same_bits(ours, expected)


@pytest.mark.parametrize("head", ["lm", "value"])
def test_a_dummy_row_changes_no_gradient(head):
    """3 real rows filled up to the 4 that data = 4 needs, against the 3 alone."""
    batch = {k: v[:3] for k, v in make_batch().items()}
    results = []
    for shape in (ONE, MeshShape(data=4)):
        trainer = trainer_of(LOSSES[head], shape, head=head)
        micros = cut_micros(batch, replicas=shape.data * shape.fsdp)
        assert micros[0]["input_ids"].shape == (1, 4 if shape.data == 4 else 3, 20)
        params = place_params(host_params(head=head), shape, head)
        results.append(trainer.gradients(params, micros)[:2])
    assert_close(results[1], results[0], 2e-6)


@pytest.mark.parametrize("head", ["lm", "value"])
def test_dummy_rows_are_finite_in_bfloat16(head):
    """A row of zeros, which attends to nothing that is trained."""
    shape = MeshShape(data=4)
    batch = {k: v[:3] for k, v in make_batch().items()}
    trainer = trainer_of(LOSSES[head], shape, head=head, compute_dtype="bfloat16")
    params = place_params(host_params(head=head), shape, head)
    loss, grads, _ = trainer.gradients(params, cut_micros(batch, replicas=4))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((loss, grads)))


def test_half_precision_keeps_float32_gradients(lm):
    _, params, (_, grads, _) = lm
    trainer = trainer_of(lm_loss, ONE, compute_dtype="bfloat16", remat="layer")
    _, ours, _ = trainer.gradients(params, cut_micros(make_batch(), replicas=1, micro_sequences=2))
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(grads), strict=True):
        assert x.dtype == jnp.float32
        cosine = jnp.vdot(x, y) / (jnp.linalg.norm(x.ravel()) * jnp.linalg.norm(y.ravel()))
        assert cosine > 0.98
    assert np.unique(np.asarray(ours["embed"])).size > 256  # sums are not rounded to bf16 again


def test_an_unset_head_or_missing_column_is_refused():
    trainer = trainer_of(lm_loss, ONE)
    batch = {k: v for k, v in make_batch().items() if k != "advantages"}
    with pytest.raises(ValueError, match="'advantages' is missing; the batch has input_ids"):
        trainer.gradients(place_params(host_params(), ONE), cut_micros(batch, replicas=1))
    with pytest.raises(ValueError, match="float32"):
        trainer.init_state(jax.tree.map(lambda p: p.astype(jnp.bfloat16), host_params()))


def bare_loss(outputs, batch, denominators):
    return aggregate(-outputs.log_probs_BT, batch["response_mask"], denominators), {"kl": 1.0}


def absent_loss(outputs, batch, denominators):
    return aggregate(batch["values"], batch["response_mask"], denominators), {}


@pytest.mark.parametrize(
    ("loss", "kind", "message"),
    [
        (bare_loss, TypeError, r"metric 'kl' is of type float; give a Mean.*rl.loss_metric"),
        (absent_loss, KeyError, r"reads column 'values'; it has .*add it to the columns"),
    ],
)
def test_a_loss_is_told_what_is_wrong_with_it(loss, kind, message):
    trainer = trainer_of(loss, ONE)
    micros = cut_micros(make_batch(), replicas=1)
    with pytest.raises(kind, match=message):
        trainer.gradients(place_params(host_params(), ONE), micros)


# --- updates --------------------------------------------------------------------------------------


def ratio_loss(outputs, batch, denominators):
    mask = batch["response_mask"]
    delta = jnp.where(mask, outputs.log_probs_BT - batch["old_log_probs"], 0.0)
    off = jnp.abs(jnp.exp(delta) - 1).max()  # 0 where masked
    metrics = {"off": Max(off), "kl": Mean.of(delta**2 / 2, mask)}
    return aggregate(-jnp.exp(delta), mask, denominators), metrics


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_ratio_is_one_before_any_update(compute_dtype):
    """Learning rate 0, 2 epochs of 4 mini-batches, old log-probs from the whole batch at once."""
    batch = make_batch(rows=16, vocab=LUT.vocab)
    mesh, layout = lay_out(ONE, LUT)
    optimizer = OptimizerConfig(lr=0.0)
    trainer = make_trainer(
        *(ratio_loss, ONE),
        cfg=LUT,
        optimizer=optimizer,
        compute_dtype=compute_dtype,
        temperature=0.7,
        columns=COLUMNS,
    )
    state = trainer.init_state(place_params(host_params(LUT), ONE, cfg=LUT))
    before = host(state.params)
    scorer = Scorer(LUT, trainer.replicas, temperature=0.7)
    weights = trainer.replicas.weights(state.params)
    # in bf16 one micro-batch shape is promised, so the old ones are scored in it
    rows = 16 if compute_dtype == "float32" else 4
    scored = [
        scorer.log_probs(weights, place_rows(mesh, layout, batch["input_ids"][i : i + rows]))
        for i in range(0, 16, rows)
    ]
    batch["old_log_probs"] = np.concatenate([np.asarray(logp) for logp, _ in scored])
    off, kl = [], []
    for micro in (1, 2, 4) if compute_dtype == "float32" else (4,):
        for _epoch in range(2):
            for start in range(0, 16, 4):
                rows = {k: v[start : start + 4] for k, v in batch.items()}
                micros = cut_micros(rows, replicas=1, micro_sequences=micro)
                state, metrics = trainer.update(state, micros)
                values = finalize(metrics)
                off.append(values["off"])
                kl.append(values["kl"])
    assert max(off) <= (1e-5 if compute_dtype == "float32" else 1e-6)
    assert max(kl) <= 1e-9
    assert_same_bits(state.params, before)
    assert int(state.updates) == len(off)
    assert int(state.skipped) == 0


def test_first_update_is_adam_of_the_clipped_gradient():
    """Adam's first step: m/(1-b1) = g, v/(1-b2) = g^2, so p - lr * (g/(|g| + eps) + decay * p)."""
    optimizer = OptimizerConfig(lr=1e-3, weight_decay=0.1, grad_clip=0.5, eps=1e-2, warmup_steps=2)
    trainer = trainer_of(lm_loss, ONE, optimizer=optimizer)
    params = place_params(host_params(), ONE)
    micros = cut_micros(make_batch(), replicas=1, micro_sequences=4)
    _, grads, _ = trainer.gradients(params, micros)
    norm = np.sqrt(sum(np.sum(np.asarray(g, np.float64) ** 2) for g in jax.tree.leaves(grads)))
    assert norm > 0.5
    before = host(params)
    state, metrics = trainer.update(trainer.init_state(params), micros)

    def stepped(p, g):
        g = np.asarray(g) * (0.5 / norm)
        return p - 0.5e-3 * (g / (np.abs(g) + 1e-2) + 0.1 * p)

    assert_close(state.params, jax.tree.map(stepped, before, grads), 1e-6)
    values = finalize(metrics)
    assert values["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert values["lr"] == pytest.approx(0.5e-3)
    assert (values["skipped"], values["empty"]) == (0, 0)


def test_state_stays_in_its_shards():
    shape = SHAPES["fsdp 4 x tensor 2"]
    trainer = trainer_of(lm_loss, shape)
    state = trainer.init_state(place_params(host_params(), shape))
    wq, micros = state.params["layers"]["wq"], cut_micros(make_batch(), replicas=4)
    for _ in range(2):
        for leaf, declared in zip(
            jax.tree.leaves(state), jax.tree.leaves(trainer.abstract_state()), strict=True
        ):
            assert (leaf.shape, leaf.dtype) == (declared.shape, declared.dtype)
            assert leaf.sharding.is_equivalent_to(declared.sharding, leaf.ndim)
        state, _ = trainer.update(state, micros)
    assert wq.is_deleted()  # donated
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.shape == wq.shape]
    assert len(moments) == 2
    assert moments[0].sharding.shard_shape(wq.shape) == (2, 10, 4, 6)


def test_a_non_finite_row_skips_the_update():
    """One replica only holds the bad number; afterwards training goes on."""
    shape = MeshShape(data=2)
    trainer = trainer_of(lm_loss, shape)
    state = trainer.init_state(place_params(host_params(), shape))
    good = cut_micros(make_batch(), replicas=2, micro_sequences=4)
    state, _ = trainer.update(state, good)
    for skips, bad in enumerate((np.nan, np.inf), 1):
        before, batch = host(state), make_batch()
        batch["advantages"][0, batch["prompt_length"][0]] = bad
        state, metrics = trainer.update(state, cut_micros(batch, replicas=2, micro_sequences=4))
        assert_same_bits((state.params, state.opt_state), (before.params, before.opt_state))
        assert (int(state.updates), int(state.skipped)) == (1, skips)
        values = finalize(metrics)
        assert not np.isfinite(values["loss"])
        assert not np.isfinite(values["grad_norm"])
        assert (values["skipped"], values["empty"]) == (1, 0)
    before = host(state.params)
    state, metrics = trainer.update(state, good)
    assert (int(state.updates), int(state.skipped)) == (2, 2)
    assert np.isfinite(finalize(metrics)["loss"])
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(state.params), strict=True):
        assert np.isfinite(new).all()
        assert (old != np.asarray(new)).any()


def test_an_all_masked_mini_batch_changes_nothing(lm, caplog):
    trainer, _, _ = lm
    state = trainer.init_state(place_params(host_params(seed=5), ONE))
    before, batch = host(state), make_batch()
    batch["response_mask"] = np.zeros_like(batch["response_mask"])
    with caplog.at_level(logging.WARNING):
        state, metrics = trainer.update(state, cut_micros(batch, replicas=1))
    assert_same_bits((state.params, state.opt_state), (before.params, before.opt_state))
    assert (int(state.updates), int(state.skipped)) == (0, 1)
    values = finalize(metrics)
    assert (values["loss"], values["skipped"], values["empty"]) == (0, 1, 1)
    assert "no trained token" in caplog.text


def test_shapes_are_compiled_once():
    """The loss is traced once a micro-batch shape, whatever the number of micro-batches."""
    traces = []

    def traced(outputs, batch, denominators):
        traces.append(batch["input_ids"].shape)
        return given_loss(outputs, batch, denominators, "token-mean")

    trainer = make_trainer(traced, ONE, cfg=LUT, columns=("token_loss",))
    params = place_params(host_params(LUT), ONE, cfg=LUT)
    for seed in range(6):
        batch = make_batch(rows=4 + seed, seed=seed, vocab=LUT.vocab)
        batch["token_loss"] = batch.pop("advantages")
        trainer.gradients(params, cut_micros(batch, replicas=1, micro_tokens=40, bucket=10))
    assert sorted(traces) == [(2, 20), (4, 10)]


# --- settings and cuts ----------------------------------------------------------------------------


def rates(count, **settings):
    optimizer = OptimizerConfig(lr=1.0, **settings)
    return [float(optimizer.lr_at(np.int32(done))) for done in range(count)]


def test_learning_rates():
    assert rates(3) == [1, 1, 1]
    assert rates(4, warmup_steps=2) == [0.5, 1, 1, 1]
    linear = rates(7, schedule="linear", warmup_steps=2, total_steps=6)
    assert linear == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25, 0])
    cosine = rates(5, schedule="cosine", total_steps=4)  # (1 + cos(pi k / 4)) / 2
    assert cosine == pytest.approx([1, 0.853553, 0.5, 0.146447, 0], abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr": -1.0}, r"lr=-1.0 must lie in \[0, 1000\]"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"lr": 1e39}, "lr=1e"),
        ({"lr": 20.0, "weight_decay": 0.1}, "weight_decay=0.1 must be at most 1 / lr, with lr=20"),
        ({"beta2": 1.0}, r"beta2=1.0 must lie in \[0, 1\)"),
        ({"beta1": 1 - 1e-9}, "beta1=0.999999999 must .* in float32"),
        ({"eps": 0.0}, "eps=0.0 must lie in"),
        ({"eps": 1e-40}, "eps=1e-40 must lie in"),
        ({"grad_clip": -1.0}, "grad_clip=-1.0"),
        ({"schedule": "step"}, "schedule='step' must be one of .*'cosine'"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        (
            {"schedule": "linear", "warmup_steps": 5, "total_steps": 5},
            "total_steps=5 must exceed warmup_steps=5",
        ),
    ],
)
def test_bad_settings_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        OptimizerConfig(**settings)


@pytest.mark.parametrize("beta2", [0.0, 0.5, 0.999])
def test_the_wildest_settings_keep_weights_finite(beta2):
    """With every gradient whose norm is finite: large, tiny, zero, and large again."""
    wild = {"lr": MOST, "weight_decay": 1 / MOST, "eps": LEAST_EPS, "grad_clip": 0.0}
    tx = OptimizerConfig(**wild, beta1=0.9999999, beta2=beta2).transform()
    params = np.float32([0, 1e-45, -1, 1e30])
    state = tx.init(params)
    for size in (1e-45, 1.8e19, 0, 1e-20, 1e-38, 1.8e19):
        grads = np.float32(size) * np.float32([1, 0.1, -0.1, 0])
        assert np.isfinite(optax.tree_utils.tree_norm(grads))
        with jax.numpy_dtype_promotion("standard"):
            updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((params, state)))


def test_a_schedule_without_an_end_is_refused():
    with pytest.raises(ValueError, match="total_steps=0 must exceed warmup_steps=0"):
        trainer_of(lm_loss, ONE, optimizer=OptimizerConfig(schedule="cosine"))


def test_cuts_that_do_not_divide_are_refused():
    batch = make_batch()
    with pytest.raises(ValueError, match=r"8 = 2 x 3 \+ 2.*use one of \[2, 4, 8\]"):
        cut_micros(batch, replicas=2, micro_sequences=3)
    with pytest.raises(ValueError, match="use mini-batches of a multiple of 3"):
        cut_micros(batch, replicas=3, micro_sequences=3)
    with pytest.raises(ValueError, match="use at least 2 x 20 = 40"):
        cut_micros(batch, replicas=2, micro_tokens=39)


def test_cuts_keep_every_row_once_and_pairs_together():
    batch = make_batch(rows=10) | {"row_id": np.arange(1, 11, dtype=np.int32)}
    micros = cut_micros(batch, replicas=1, micro_tokens=80, bucket=8, group=2)
    row_ids = np.concatenate([m["row_id"].reshape(-1) for m in micros])
    assert sorted(row_ids[row_ids > 0]) == list(range(1, 11))
    pairs = row_ids.reshape(-1, 2)
    assert (pairs[:, 1] - pairs[:, 0] == (pairs[:, 0] > 0)).all()
    for micro in micros:
        M, mb, T = micro["input_ids"].shape
        assert M == 1
        assert mb * T <= 80
        assert not micro["response_mask"][micro["row_id"] == 0].any()
    tokens = sum(m["response_mask"].sum() for m in micros)
    assert tokens == batch["response_mask"].sum()


def test_width_follows_the_longest_row_in_buckets():
    batch = make_batch(rows=4, width=40)
    batch["length"] = np.array([9, 3, 5, 7], np.int32)
    for bucket, width in ((4, 12), (16, 16), (32, 32), (64, 40)):
        (stack,) = cut_micros(batch, replicas=1, micro_sequences=2, bucket=bucket)
        assert stack["advantages"].shape == (2, 2, width)
        assert stack["length"].shape == (2, 2)
