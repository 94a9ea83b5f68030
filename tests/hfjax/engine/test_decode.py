# SPDX-License-Identifier: Apache-2.0
"""Generation against hand-written next-token tables and teacher forcing, on one device and on 8."""

import itertools
import logging
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfjax.engine.decode import Decoder, Sampling
from hfjax.engine.scoring import score_tokens
from hfjax.models.llama import ModelConfig, abstract_params, hidden_states, init_params, lm_logits
from meshes.layouts import batch_sharding, generate_layout, shardings
from meshes.mesh import MeshShape, make_mesh

SIZES = {"layers": 2, "embed": 40, "heads": 8, "kv_heads": 4, "head_dim": 6, "mlp": 56}
TINY = ModelConfig(**SIZES, vocab=96, rope_theta=1e4)
ONE = MeshShape()
NEVER = -30.0  # a logit that is never drawn

# Programs are compiled a Sampling and a shape: tests share these two where they can.
PROMPTS = [[5, 9, 2], [7], [11, 3, 8, 90, 41], [1, 2, 3, 4, 5, 6, 7, 8]]
PROMPTS += [[60, 61], [95, 2, 2, 17], [33] * 6, [0]]
STOPS = (2, 3, 14, 15, 26, 53, 58, 79, 92)
RANDOM = {"n": 2, "max_new_tokens": 8, "stop_ids": STOPS, "top_p": 0.95}
GREEDY = {"max_new_tokens": 8, "stop_ids": (1, 2, 9), "greedy": True}


class Rig:
    """A decoder on a mesh with its parameters; prompts in as lists, arrays out on the host."""

    def __init__(self, cfg, params, shape=ONE, *, relay="hybrid", segment=8, micros=None):
        self.mesh = make_mesh(jax.devices()[: shape.devices], shape)
        self.layout = generate_layout(shape, kv_heads=cfg.kv_heads, relay=relay)
        self.cfg = cfg
        self.decoder = Decoder(cfg, self.mesh, self.layout, segment=segment, micros=micros)
        self.params = self.place(params)

    def place(self, params):
        _, axes = abstract_params(self.cfg, "lm")
        return jax.device_put(params, shardings(self.mesh, self.layout, axes))

    def put(self, x):
        return jax.device_put(np.asarray(x, np.int32), batch_sharding(self.mesh, self.layout))

    def arguments(self, prompts, n, *, width=8, fill=0, row_ids=None):
        """prompt_ids_BP, prompt_length_B, row_id_Bn on the mesh."""
        ids = np.full((len(prompts), width), fill)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = prompt
        if row_ids is None:
            row_ids = np.arange(len(prompts) * n)
        lengths = [len(prompt) for prompt in prompts]
        return self.put(ids), self.put(lengths), self.put(np.reshape(row_ids, (-1, n)))

    def __call__(self, prompts, *, limits=None, key=0, params=None, **settings):
        where = {
            name: settings.pop(name) for name in ("width", "fill", "row_ids") & settings.keys()
        }
        sampling = Sampling(**settings)
        if limits is None:
            limits = np.full((len(prompts), sampling.n), sampling.max_new_tokens)
        out = self.decoder.generate(
            self.params if params is None else self.place(params),
            *self.arguments(prompts, sampling.n, **where),
            jax.random.key(key) if isinstance(key, int) else key,
            sampling,
            self.put(limits),
        )
        return jax.device_get(out)


def responses(out):
    """The trained tokens of each row, and their log-probs."""
    rows = zip(out.input_ids_BT, out.response_mask_BT, out.log_probs_BT, strict=True)
    return [(ids[mask].tolist(), logp[mask]) for ids, mask, logp in rows]


def tokens(out):
    return [ids for ids, _ in responses(out)]


score = jax.jit(partial(score_tokens, TINY, with_entropy=False))


@jax.jit
def logits_of(params, ids_BT):
    return lm_logits(TINY, params, hidden_states(TINY, params, ids_BT))


def assert_scored_alike(out, params, temperature):
    logp_BT, _ = score(params, out.input_ids_BT, temperature=temperature)
    wanted_BT = np.where(out.response_mask_BT, logp_BT, 0)
    np.testing.assert_allclose(out.log_probs_BT, wanted_BT, atol=1e-5)


def zero_params(cfg):
    shapes, _ = abstract_params(cfg, "lm")
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)


TABLE = ModelConfig(**{**SIZES, "layers": 1, "embed": 16}, vocab=16, rope_theta=1e4, norm_eps=1e-9)


def table_params(table_VV):
    """Weights of TABLE whose logits after token i are table_VV[i].

    The hidden state is 4 x one-hot(i): embedding the identity, attention and MLP nothing.
    """
    params = zero_params(TABLE)
    params["layers"]["attn_norm"][:] = params["layers"]["mlp_norm"][:] = 1
    params["final_norm"][:] = 1
    params["embed"][:] = np.eye(16)
    params["lm_head"][:] = np.asarray(table_VV) / 4
    return params


def path_params(*paths):
    """Each step of a path puts 30 on the next id."""
    table_VV = np.zeros((16, 16))
    for path in paths:
        for here, there in itertools.pairwise(path):
            table_VV[here, there] = 30
    return table_params(table_VV)


@pytest.fixture(scope="module")
def table():
    return Rig(TABLE, zero_params(TABLE))


@pytest.fixture(scope="module")
def tiny_params():
    """Random weights, large enough that attention matters and sampling is not uniform."""
    params = init_params(TINY, "lm", jax.random.key(1))
    return jax.tree.map(lambda x: 8 * x if x.std() > 0 else x, params)


@pytest.fixture(scope="module")
def tiny(tiny_params):
    return Rig(TINY, tiny_params)


@pytest.fixture(scope="module")
def usual(tiny):
    return tiny(PROMPTS, **RANDOM)


# What a response is


@pytest.mark.parametrize("pad", [2, 0])
def test_stop_id_belongs_to_the_response_and_nothing_after_it(table, pad):
    out = table([[6, 2, 3], [3]], fill=pad, params=path_params([3, 4, 5, 2]), **GREEDY)
    assert tokens(out) == [[4, 5, 2], [4, 5, 2]]
    assert out.response_mask_BT[0].nonzero()[0].tolist() == [3, 4, 5]
    assert out.input_ids_BT[0].tolist() == [6, 2, 3, 4, 5, 2] + [0] * 10
    assert out.length_B.tolist() == [6, 4]
    assert out.prompt_length_B.tolist() == [3, 1]
    assert out.truncated_B.tolist() == [False, False]
    assert not out.log_probs_BT[~out.response_mask_BT].any()


def test_what_lies_behind_a_prompt_does_not_matter(tiny, usual):
    """Stop ids inside prompts included: PROMPTS hold several."""
    jax.tree.map(np.testing.assert_array_equal, tiny(PROMPTS, fill=2, **RANDOM), usual)


@pytest.mark.parametrize("filler", [0, 15])
def test_row_that_never_stops_ends_at_its_own_limit_and_is_truncated(table, filler):
    path = path_params([3, 4, 3])
    out = table([[3], [3]], fill=filler, limits=[[3], [6]], params=path, **GREEDY)
    assert tokens(out) == [[4, 3, 4], [4, 3, 4, 3, 4, 3]]
    assert out.truncated_B.tolist() == [True, True]


def test_limits_row_by_row_zero_included(tiny, usual):
    limits = [[0, 1], [2, 7], [8, 99], [0, 0], [1, 2], [3, 4], [5, 6], [7, 8]]
    out = tiny(PROMPTS, limits=limits, **RANDOM)
    for limit, short, long in zip(np.ravel(limits), tokens(out), tokens(usual), strict=True):
        assert short == long[:limit]
    assert out.truncated_B[[0, 6, 7]].all()
    assert (out.length_B - out.prompt_length_B)[[0, 6, 7]].tolist() == [0, 0, 0]
    of_prompts = tiny(PROMPTS, limits=[0, 1, 2, 3, 4, 5, 6, 7], **RANDOM)
    for row, (short, long) in enumerate(zip(tokens(of_prompts), tokens(usual), strict=True)):
        assert short == long[: row // 2]


def test_limit_reached_by_a_stop_id_is_not_truncated(table):
    path = path_params([3, 4, 2])
    out = table([[3], [3]], limits=[[2], [1]], params=path, **GREEDY)
    assert tokens(out) == [[4, 2], [4]]
    assert out.truncated_B.tolist() == [False, True]


def test_every_stop_id_stops(table):
    out = table([[3], [5]], params=path_params([3, 4, 9], [5, 6, 1]), **GREEDY)
    assert tokens(out) == [[4, 9], [6, 1]]
    assert not out.truncated_B.any()


def test_ignore_eos_runs_through_stop_ids(table):
    path = path_params([3, 4, 9, 3])
    out = table([[3], [9]], params=path, **GREEDY, ignore_eos=True, min_new_tokens=3)
    assert tokens(out) == [[4, 9, 3, 4, 9, 3, 4, 9], [3, 4, 9, 3, 4, 9, 3, 4]]
    assert out.truncated_B.all()
    assert out.truncated_log_probs_BT is None  # nothing was forbidden


def test_response_of_a_bare_stop_id_has_one_token(table):
    table_VV = np.full((16, 16), NEVER)
    table_VV[3, [2, 4]] = 0
    table_VV[4, 2] = 0
    out = table([[3]], params=table_params(table_VV), n=64, max_new_tokens=4, stop_ids=(2,))
    drawn = tokens(out)
    assert {tuple(ids) for ids in drawn} == {(2,), (4, 2)}
    assert not out.truncated_B.any()
    np.testing.assert_allclose([logp[0] for _, logp in responses(out)], np.log(0.5), atol=1e-5)
    assert out.length_B.tolist() == [1 + len(ids) for ids in drawn]


def test_min_new_tokens_forbids_stop_ids_and_leaves_the_normaliser(table):
    # After 3 and 4 the stop id 2 has probability 1/2, and 3 and 4 have 1/4 each.
    table_VV = np.full((16, 16), NEVER)
    table_VV[[3, 4], 2] = np.log(0.5)
    table_VV[[3, 4], 3] = table_VV[[3, 4], 4] = np.log(0.25)
    settings = {"n": 200, "max_new_tokens": 6, "min_new_tokens": 2, "stop_ids": (2,)}
    out = table([[3]], params=table_params(table_VV), **settings)
    for row, (ids, logp) in enumerate(responses(out)):
        filtered = out.truncated_log_probs_BT[row][out.response_mask_BT[row]]
        assert 2 not in ids[:2]
        np.testing.assert_allclose(logp[:2], np.log(0.25), atol=1e-5)
        np.testing.assert_allclose(filtered[:2], np.log(0.5), atol=1e-5)
        np.testing.assert_allclose(filtered[2:], logp[2:], atol=1e-6)
    assert min(len(ids) for ids in tokens(out)) == 3


# Log-probs


def test_log_probs_of_rows_kept_from_stopping_are_those_of_scoring(tiny):
    """Both over the whole vocabulary, the forbidden ids included; what was drawn from is apart."""
    settings = {"n": 3, "max_new_tokens": 7, "min_new_tokens": 3, "stop_ids": STOPS}
    out = tiny(PROMPTS, key=2, **settings)
    assert_scored_alike(out, tiny.params, 1.0)
    gap_BT = np.where(out.response_mask_BT, out.truncated_log_probs_BT - out.log_probs_BT, 0)
    early_BT = out.response_mask_BT & (out.response_mask_BT.cumsum(-1) <= 3)
    assert (gap_BT[early_BT] > 0).all()
    np.testing.assert_allclose(gap_BT[~early_BT], 0, atol=1e-5)


def test_greedy_responses_do_not_depend_on_the_key(tiny):
    settings = {"max_new_tokens": 8, "stop_ids": STOPS}
    one, other = (tokens(tiny(PROMPTS, key=key, greedy=True, **settings)) for key in (1, 2))
    assert one == other
    assert tokens(tiny(PROMPTS, key=1, **settings)) != tokens(tiny(PROMPTS, key=2, **settings))


def test_decode_agrees_with_teacher_forcing(tiny_params):
    rig = Rig(TINY, tiny_params, segment=4)
    settings = {"n": 3, "max_new_tokens": 7, "temperature": 0.7, "stop_ids": STOPS}
    out = rig(PROMPTS, key=2, **settings)
    drawn = tokens(out)
    assert any(len(ids) == 1 and ids[0] in STOPS for ids in drawn)
    assert out.truncated_B.any()
    assert len({ids[-1] for ids in drawn if ids[-1] in STOPS}) > 1
    assert out.truncated_log_probs_BT is None
    assert_scored_alike(out, rig.params, 0.7)


def test_prompt_alone_or_beside_a_longer_one_gives_the_same_response(tiny):
    short, long = [5, 9, 2, 44, 17], list(range(40, 63))
    settings = {"max_new_tokens": 16, "temperature": 0.0}
    alone = tiny([short], **settings)
    beside = tiny([long, short], width=32, **settings)
    assert tokens(alone)[0] == tokens(beside)[1]
    np.testing.assert_allclose(responses(alone)[0][1], responses(beside)[1][1], atol=1e-5)
    # Temperature 0 takes the likeliest token and reports log-probs at temperature 1.
    assert_scored_alike(beside, tiny.params, 1.0)
    best_BT = np.argmax(logits_of(tiny.params, beside.input_ids_BT), axis=-1)
    mask_BT = beside.response_mask_BT
    np.testing.assert_array_equal(best_BT[:, :-1][mask_BT[:, 1:]], beside.input_ids_BT[mask_BT])


def test_temperature_is_in_the_draw_and_in_the_log_probs(table):
    table_VV = np.full((16, 16), NEVER)
    table_VV[3, [7, 8, 9]] = 2, 1, 0
    settings = {"params": table_params(table_VV), "max_new_tokens": 1, "temperature": 0.5}
    out = table([[3]], n=2000, **settings)
    drawn = np.array(tokens(out))[:, 0]
    # softmax(4, 2, 0) = 0.86681, 0.11731, 0.01588
    for token, share, logp in ((7, 0.867, -0.14293), (8, 0.117, -2.14293), (9, 0.016, -4.14293)):
        assert abs(np.mean(drawn == token) - share) < 4 * np.sqrt(share * (1 - share) / 2000)
        np.testing.assert_allclose(out.log_probs_BT[drawn == token, 1], logp, atol=1e-5)
    greedy = table([[3]], greedy=True, **settings)
    assert tokens(greedy) == [[7]]
    np.testing.assert_allclose(greedy.log_probs_BT[0, 1], -0.14293, atol=1e-5)


def test_bfloat16_weights_give_float32_log_probs(tiny_params):
    rig = Rig(TINY, jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny_params))
    out = rig(PROMPTS, n=2, max_new_tokens=6)
    assert out.log_probs_BT.dtype == np.float32
    logp_BT, _ = score(rig.params, out.input_ids_BT, temperature=1.0)
    gap_BT = np.where(out.response_mask_BT, logp_BT - out.log_probs_BT, 0)
    assert np.abs(gap_BT).mean() < 0.05


# Noise


def test_samples_sharing_a_prompt_equal_repeated_prompts(tiny, usual):
    alone = tiny([p for p in PROMPTS for _ in range(2)], **{**RANDOM, "n": 1})
    assert tokens(usual) == tokens(alone)
    np.testing.assert_allclose(usual.log_probs_BT, alone.log_probs_BT, atol=1e-5)


def test_draw_depends_on_the_row_id_not_on_its_place(tiny, usual):
    row_ids = np.arange(16).reshape(8, 2)
    reverse = tiny(PROMPTS[::-1], row_ids=row_ids[::-1, ::-1], **RANDOM)
    assert tokens(reverse)[::-1] == tokens(usual)
    other = tokens(tiny(PROMPTS, row_ids=row_ids + 16, **RANDOM))
    assert sum(a == b for a, b in zip(other, tokens(usual), strict=True)) < 8


def test_replicas_do_not_repeat_each_other():
    cfg = ModelConfig(**SIZES, vocab=1000, rope_theta=1e4)
    seed = partial(jax.random.fold_in, jax.random.key(0))
    prompts, limits = [[3], [3], [0], [0]], [[8, 8], [8, 8], [0, 0], [0, 0]]  # two rows of padding
    drawn = {}
    for replicas in (1, 2, 4):
        rig = Rig(cfg, zero_params(cfg), MeshShape(data=replicas))
        step_1, again, step_2 = (
            tokens(rig(prompts, n=2, limits=limits, max_new_tokens=8, key=seed(step)))
            for step in (1, 1, 2)
        )
        assert step_1 == again
        assert step_1[4:] == [[]] * 4
        drawn[replicas] = [tuple(ids) for ids in step_1[:4] + step_2[:4]]
        assert len(set(drawn[replicas])) == 8
    assert drawn[1] == drawn[2] == drawn[4]


# Meshes


MESHES = {  # with another segment length each, which must not matter either
    "data": (MeshShape(data=8), 8),
    "data and tensor": (MeshShape(data=2, tensor=4), 8),
    "tensor beyond the kv heads": (MeshShape(tensor=8), 8),
    "fsdp and micro": (MeshShape(fsdp=2, tensor=2, tensor_micro=2), 5),
}


@pytest.mark.parametrize("name", MESHES)
def test_same_tokens_on_every_mesh(name, tiny_params, usual):
    shape, segment = MESHES[name]
    rig = Rig(TINY, tiny_params, shape, segment=segment)
    out = rig(PROMPTS, **RANDOM)
    assert_same(rig, usual, out)
    if name == "data and tensor":
        assert_sends_activations_only(rig)


def assert_same(rig, usual, out, **settings):
    """The same responses and log-probs, up to a row's first tie of two tokens."""
    for row in range(len(usual.length_B)):
        length = min(usual.length_B[row], out.length_B[row])
        differs = usual.input_ids_BT[row, :length] != out.input_ids_BT[row, :length]
        if differs.any():
            length = int(differs.argmax())
            assert tie_margin(rig, usual, row, length, **settings) < 1e-4
        else:
            assert usual.length_B[row] == out.length_B[row]
        for column in ("log_probs_BT", "truncated_log_probs_BT"):
            a, b = getattr(usual, column), getattr(out, column)
            assert (a is None) == (b is None)
            if a is not None:
                np.testing.assert_allclose(a[row, :length], b[row, :length], atol=1e-5)


def tie_margin(rig, out, row, at, *, greedy=False):
    """How far apart the two best noisy logits were where row `row` drew its token `at`."""
    ids_1T = out.input_ids_BT[row : row + 1, :at]
    logits_V = lm_logits(rig.cfg, rig.params, hidden_states(rig.cfg, rig.params, ids_1T))[0, -1]
    key = jax.random.fold_in(jax.random.key(0), row)
    key = jax.random.fold_in(key, at - int(out.prompt_length_B[row]))
    noise_V = jax.random.gumbel(key, logits_V.shape, jnp.float32)
    best = np.sort(logits_V if greedy else logits_V + noise_V)
    return best[-1] - best[-2]


def assert_sends_activations_only(rig):
    """No weight, cache or vocabulary-wide array crosses devices in a segment; caches stay put."""
    sampling = Sampling(**RANDOM)
    prompts, responses, _ = rig.decoder._begin(
        rig.params,
        *rig.arguments(PROMPTS, 2),
        np.zeros(2, np.uint32),
        rig.put(np.full((8, 2), 8)),
        sampling=sampling,
        slots=8,
    )
    arguments = (rig.params, prompts, responses, np.int32(8))
    program = rig.decoder._continue.lower(*arguments, sampling=sampling).compile()
    sent = re.findall(r"= (.*) (?:all-\w+|collective-\w+|reduce-scatter)\(", program.as_text())
    shapes = [shape for result in sent for shape in re.findall(r"\[([\d,]*)\]", result)]
    elements = [math.prod(int(size) for size in shape.split(",") if size) for shape in shapes]
    rows = 8 * 2 // 2  # of one replica
    assert max(elements) == rows * TINY.embed < rows * TINY.vocab
    donated_bytes = program.memory_analysis().alias_size_in_bytes
    assert donated_bytes > sum(x.nbytes for x in jax.tree.leaves(responses.cache)) / 8


def test_phantom_columns_are_neither_drawn_nor_counted():
    drawn = []
    for tensor, multiple in ((1, 1), (4, 4)):
        cfg = ModelConfig(**SIZES, vocab=11, vocab_multiple=multiple, rope_theta=1e4)
        rig = Rig(cfg, zero_params(cfg), MeshShape(tensor=tensor))
        out = rig([[3]], n=5000, max_new_tokens=1)
        np.testing.assert_allclose(out.log_probs_BT[:, 1], -2.39790, atol=1e-5)
        drawn.append(out.input_ids_BT[:, 1])
    assert set(drawn[0]) == set(range(11))
    np.testing.assert_array_equal(*drawn)


# Shapes and programs


@pytest.fixture(scope="module")
def in_buckets():
    """Three response buckets: 4, 8 and 11."""
    paths = [3, 4, 5, 2], [7, 8, 9, 10, 11, 2], [12, 13, 12]
    rig = Rig(TABLE, path_params(*paths), segment=4)
    return partial(rig, max_new_tokens=11, stop_ids=(2,), greedy=True), rig.decoder


def test_rows_are_as_wide_as_the_bucket_in_use(in_buckets):
    generate, _ = in_buckets
    for prompt, width in (([3], 4), ([7], 8), ([12], 11)):
        out = generate([prompt])
        assert out.input_ids_BT.shape == (1, 8 + width)
    assert tokens(out) == [[13, 12] * 5 + [13]]


def test_no_more_programs_than_buckets(in_buckets, caplog):
    generate, decoder = in_buckets
    for prompt in ([12], [7], [3]):
        generate([prompt])
    assert decoder.programs == 3
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        for prompt, limit in (([12], 5), ([1, 12], 11), ([1, 2, 3, 12], 1), ([13], 9)):
            assert len(tokens(generate([prompt], limits=[[limit]]))[0]) == limit
    assert not [r for r in caplog.records if r.getMessage().startswith("Compiling")]
    assert decoder.programs == 3


def test_a_cache_of_full_size_is_not_copied_for_the_last_segment(monkeypatch):
    """Segments end at 2, 4, 6 and 8, buckets are 2, 4 and 7: the last segment has its room."""
    rig = Rig(TABLE, path_params([12, 13, 12]), segment=2)
    grown, grow = [], rig.decoder._grow

    def growing(responses, slots):
        grown.append(slots)
        return grow(responses, slots=slots)

    monkeypatch.setattr(rig.decoder, "_grow", growing)
    assert len(tokens(rig([[12]], max_new_tokens=7, greedy=True))[0]) == 7
    assert grown == [4, 7]


# Refusals


def test_wrong_inputs_are_refused(tiny_params):
    rig = Rig(TINY, tiny_params, MeshShape(data=4))
    prompts = PROMPTS[:4]
    with pytest.raises(ValueError, match="3 prompts do not divide over 4 replicas; pad them to 4"):
        rig.decoder.generate(
            rig.params,
            jnp.zeros((3, 8), jnp.int32),
            jnp.ones(3, jnp.int32),
            jnp.zeros((3, 1), jnp.int32),
            jax.random.key(0),
            Sampling(max_new_tokens=2),
        )
    with pytest.raises(ValueError, match=r"row_id_Bn has shape \(4, 2\).*n=1"):
        rig.decoder.generate(
            rig.params,
            *rig.arguments(prompts, 2, row_ids=np.arange(8)),
            jax.random.key(0),
            Sampling(max_new_tokens=2),
        )
    with pytest.raises(ValueError, match="rbg"):
        rig(prompts, max_new_tokens=2, key=jax.random.key(0, impl="rbg"))
    with pytest.raises(ValueError, match=r"stop_ids \[96\].*96"):
        rig(prompts, max_new_tokens=2, stop_ids=(2, 96))
