# SPDX-License-Identifier: Apache-2.0
"""Packed rows: what a prefix's rows share is computed once, and no number is another for it."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfjax.controller.protocol import Shard
from hfjax.engine import passes
from hfjax.engine.microbatch import cut_micros
from hfjax.engine.packing import IDS, MASK, PREFIX_LENGTH, packing_of, prefix_slots, response_slots
from hfjax.engine.passes import Passes
from hfjax.engine.scoring import Scorer, score_tokens, values_of
from hfjax.metrics import finalize
from hfjax.models.attention import Prefix
from meshes.mesh import MeshShape
from tests.fixtures import slow_but
from tests.hfjax.engine.cases import (
    CFG,
    COLUMNS,
    LOSSES,
    SHAPES,
    assert_close,
    host_params,
    lay_out,
    make_trainer,
    place_params,
    replicas_of,
)

ONE = MeshShape()


def grouped(groups=4, n=4, prompt=9, response=11, seed=3):
    """Prompts of different lengths, n responses of different lengths to each, one not trained."""
    rng = np.random.default_rng(seed)
    T, B = prompt + response, groups * n
    prompt_length = np.repeat(rng.integers(2, prompt + 1, groups), n)
    length = prompt_length + rng.integers(1, response + 1, B)
    length[0], prompt_length[:n] = T, prompt
    at = np.arange(T)
    ids = rng.integers(1, CFG.vocab, (B, T))
    prompts = np.repeat(ids[::n], n, axis=0)
    ids = np.where(at < prompt_length[:, None], prompts, ids)
    mask = (at >= prompt_length[:, None]) & (at < length[:, None])
    mask[1] = False
    mask[2, prompt + 1] = False  # a hole, as a tool's answer
    return {
        "input_ids": np.where(at < length[:, None], ids, 0).astype(np.int32),
        "length": length.astype(np.int32),
        "response_mask": mask,
        "advantages": rng.standard_normal((B, T)).astype(np.float32),
        "old_log_probs": -4 + 0.3 * rng.standard_normal((B, T)).astype(np.float32),
        "row_id": np.arange(1, B + 1, dtype=np.int32),
    }


def packing(rows, n):
    found = packing_of(rows, n)
    assert found is not None
    return found


# --- on the host ----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 4])
def test_packed_columns_come_back_in_their_places(n):
    rows = grouped()
    cut = packing(rows, n)
    R = cut.longest + 2
    packed = cut.packed(rows, R)
    assert packed[IDS].shape == (16 // n, cut.slots + n * R)
    assert packed["row_id"].shape == (16,)
    pairs = cut.packed(rows | {"pairs": np.stack([rows["advantages"]] * 2, axis=-1)}, R)["pairs"]
    np.testing.assert_array_equal(pairs[..., 1], packed["advantages"])
    for name in ("advantages", MASK):
        back = cut.unpacked(packed[name], rows[IDS].shape[1])
        np.testing.assert_array_equal(
            np.where(rows[MASK], back, 0), np.where(rows[MASK], rows[name], 0)
        )
    np.testing.assert_array_equal(packed[MASK].sum(), rows[MASK].sum())
    shared = packed[IDS][:, : cut.slots]
    for group, start in enumerate(packed[PREFIX_LENGTH]):
        np.testing.assert_array_equal(shared[group, :start], rows[IDS][group * n, :start])
        assert not shared[group, start:].any()


def test_rows_that_share_no_prefix_or_train_their_first_token_are_not_packed():
    rows = grouped()
    assert packing_of(rows, 3) is None  # 16 rows
    rows["input_ids"][5, 1] += 1
    assert packing_of(rows, 4) is None
    assert packing(rows, 1).n == 1
    rows["response_mask"][7, 0] = True
    assert packing_of(rows, 1) is None


def test_rows_without_a_trained_token_are_packed_somehow():
    rows = grouped()
    rows["response_mask"][:] = False
    cut = packing(rows, 4)
    assert (cut.slots, cut.longest) == (1, 1)


# --- on the devices -------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_packed_rows_have_the_scores_of_whole_ones(n, dtype):
    rows = grouped()
    params = jax.tree.map(lambda p: p.astype(dtype), host_params())
    values = host_params(head="value")
    cut = packing(rows, n)
    packed = cut.packed(rows, 13)
    prefix = Prefix(length_B=jnp.asarray(packed[PREFIX_LENGTH]), slots=cut.slots, n=n)
    score = jax.jit(partial(score_tokens, CFG, chunk=5))
    value = jax.jit(partial(values_of, CFG))
    whole = *score(params, rows[IDS]), value(values, rows[IDS])
    ids = packed[IDS]
    ours = *score(params, ids, prefix=prefix), value(values, ids, prefix=prefix)
    limit = 2e-5 if dtype == jnp.float32 else 0.05
    for expected, found in zip(whole, ours, strict=True):
        assert found.shape == (16, 13)
        back = cut.unpacked(np.asarray(found), rows[IDS].shape[1])
        np.testing.assert_allclose(back[rows[MASK]], expected[rows[MASK]], atol=limit)


CUTS = {
    "whole": {},
    "4 rows": {"micro_sequences": 4},
    "2 rows": {"micro_sequences": 2},  # of a group of four
    "pairs": {"group": 2},
    "140 tokens": {"micro_tokens": 140},
    "pairs, 140 tokens": {"micro_tokens": 140, "group": 2},
}


@pytest.fixture(scope="module")
def unpacked():
    """Gradients of whole rows on one device, by head."""
    found = {}
    for head in ("lm", "value"):
        trainer = trainer_of(head, ONE)
        micros = cut_micros(grouped(), replicas=1, bucket=4)
        assert PREFIX_LENGTH not in micros[0]
        found[head] = trainer.gradients(place_params(host_params(head=head), ONE, head), micros)
    return found


def trainer_of(head, shape, **options):
    entropies = {"with_entropy": True} if head == "lm" else {}
    return make_trainer(
        LOSSES[head], shape, head=head, columns=COLUMNS, chunk=8, **entropies, **options
    )


def check(found, expected):
    assert_close(found[:2], expected[:2])
    assert finalize(found[2]) == pytest.approx(finalize(expected[2]), abs=1e-5)


@pytest.mark.parametrize("cut", slow_but(CUTS, "4 rows", "140 tokens"))
@pytest.mark.parametrize("head", ["lm", "value"])
def test_no_gradient_depends_on_the_packing(unpacked, head, cut):
    micros = cut_micros(grouped(), replicas=1, bucket=1, shared=4, **CUTS[cut])
    assert any(PREFIX_LENGTH in stack for stack in micros)
    trainer = trainer_of(head, ONE)
    check(
        trainer.gradients(place_params(host_params(head=head), ONE, head), micros), unpacked[head]
    )


LAYOUTS = {
    "data 2 x tensor 4": {},
    "fsdp 4 x tensor 2": {"sequence_parallel": True},
    "fsdp 4 x tensor 2, remat": {"remat": "dots"},
}


@pytest.mark.parametrize("name", slow_but(LAYOUTS, "fsdp 4 x tensor 2"))
def test_no_gradient_of_packed_rows_depends_on_the_layout(unpacked, name):
    shape = SHAPES[name.split(",")[0]]
    micros = cut_micros(grouped(), replicas=shape.data * shape.fsdp, bucket=2, shared=4)
    assert micros[0][IDS].shape[1] == 4
    trainer = trainer_of("lm", shape, **LAYOUTS[name])
    check(trainer.gradients(place_params(host_params(), shape), micros), unpacked["lm"])


def test_a_cut_packs_what_takes_fewest_slots():
    rows = grouped()

    def shapes(**options):
        return [x[IDS].shape for x in cut_micros(rows, replicas=1, bucket=4, **options)]

    assert shapes() == [(1, 16, 20)]
    assert shapes(shared=4) == [(1, 4, 16 + 4 * 12)]
    assert shapes(shared=4, micro_sequences=2) == [(8, 1, 16 + 2 * 12)]
    assert shapes(shared=1) == [(1, 16, 20)]  # 16 + 12 are more
    wide = cut_micros(rows, replicas=1, bucket=20, shared=4)
    assert wide[0][IDS].shape == (1, 16, 20)  # (20 + 4 x 20) / 4 are more
    # three replicas: groups of two fill up with fewer rows than groups of four
    (stack,) = cut_micros(rows, replicas=3, bucket=1, shared=4)
    assert stack[IDS].shape[1] == 9
    rows["input_ids"][6:8, 1] += 1
    assert shapes(shared=4) == [(1, 8, 16 + 2 * 12)]


def test_widths_differ_in_few_steps():
    def units(slots):
        return sorted({slots(tokens, 32, 2000) / 32 for tokens in range(1, 2001)})

    assert units(prefix_slots) == [1, 2, 4, 8, 16, 32, 62.5]
    assert units(response_slots) == [
        *(1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 62.5)
    ]


def test_packing_compiles_hardly_more_programs():
    whole, packed, rng = set(), set(), np.random.default_rng(0)
    for _ in range(60):
        T, prompt = 1024, int(rng.integers(100, 200))
        length = prompt + np.minimum(np.exp(rng.normal(4.5, 0.8, 32)), 800).astype(int)
        at = np.arange(T)
        rows = {
            "input_ids": np.ones((32, T), np.int32),
            "length": length,
            "response_mask": (at >= prompt) & (at < length[:, None]),
        }
        for shared, shapes in ((0, whole), (8, packed)):
            for stack in cut_micros(rows, replicas=1, bucket=32, shared=shared):
                shapes.add((stack[IDS].shape, stack[MASK].shape))
    assert len(packed) <= len(whole)


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize(("groups", "n"), [(4, 4), (3, 4), (6, 1)])
@pytest.mark.parametrize("tokens", [50, 10_000])
def test_a_pass_over_responses_says_what_one_over_whole_rows_says(
    replicas, groups, n, tokens, monkeypatch
):
    monkeypatch.setattr(passes, "PASS_TOKENS", tokens)
    rows = grouped(groups, n)
    shard = Shard(rows, np.arange(groups * n), groups * n, n, 0)
    shape = MeshShape(data=replicas)
    scorer = Scorer(CFG, replicas_of(shape), chunk=6)
    compute = partial(scorer.log_probs, place_params(host_params(), shape))
    seen = []

    def watched(ids, prefix=None):
        seen.append(ids.shape)
        return compute(ids, prefix)

    over = Passes(*lay_out(shape))
    expected = over.over(shard, (IDS,), compute)
    found = over.over_responses(shard, 1, watched)
    # whole, or 16 + n x 12 where that is less: of four, or of two where a pass holds no four
    width = {1: 20, 4: 64}[n] if tokens > 60 else {1: 20, 4: 40}[n]
    assert {width for _, width in seen} == {width}
    assert all(count * width <= tokens * replicas for count, width in seen)
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours * rows[MASK], theirs * rows[MASK])


def test_whole_rows_are_passed_over_where_packed_ones_take_more(monkeypatch):
    rows, calls = grouped(), []
    shard = Shard(rows, np.arange(16), 16, 4, 0)
    over = Passes(*lay_out(ONE))

    def compute(ids, prefix=None):
        calls.append((ids.shape, prefix))
        return jnp.ones(ids.shape)

    over.over_responses(shard, 20, compute)
    assert calls == [((16, 20), None)]
    # another process's rows share nothing: none is packed
    monkeypatch.setattr(passes, "_largest", lambda every: [[1, *rest] for _, *rest in every])
    over.over_responses(shard, 1, compute)
    assert calls[1:] == [((16, 20), None)]


def test_a_token_sees_no_other_response_and_no_filler():
    """By poking every token of a packed row: only its own response, behind it, is another."""
    rows = grouped(groups=1, n=3)
    cut = packing(rows, 3)
    cut = replace(cut, slots=cut.slots + 2)
    packed = cut.packed(rows, 12)
    prefix = Prefix(length_B=jnp.asarray(packed[PREFIX_LENGTH]), slots=cut.slots, n=3)
    params = jax.device_put(host_params())
    score = jax.jit(lambda ids: score_tokens(CFG, params, ids, prefix=prefix)[1])
    ids = packed[IDS]
    before = np.asarray(score(ids))
    for slot in range(ids.shape[1]):
        poked = ids.copy()
        poked[0, slot] = (poked[0, slot] + 7) % CFG.vocab
        changed = np.abs(np.asarray(score(poked)) - before) > 0
        expected = np.zeros_like(changed)
        if slot < cut.starts_G[0]:
            expected[:] = True
        elif slot >= cut.slots:
            response, at = divmod(slot - cut.slots, 12)
            expected[response, at + 1 :] = True
        np.testing.assert_array_equal(changed, expected)
