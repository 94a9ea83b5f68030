# SPDX-License-Identifier: Apache-2.0
"""Generation in stages against generation in one: tokens, caches, ticks, and what a tick sends."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

from hfjax.engine.decode import Sampling
from hfjax.engine.meter import held_bytes, memory, meter
from meshes.mesh import MeshShape
from tests.fixtures import slow_but
from tests.hfjax.engine.cases import CFG, host_params
from tests.hfjax.engine.test_decode import PROMPTS, STOPS, TABLE, Rig, assert_same, path_params

FOUR = replace(CFG, layers=4)
SAMPLED = {
    "n": 2,
    "max_new_tokens": 8,
    "stop_ids": STOPS,
    "min_new_tokens": 2,
    "top_k": 60,
    "top_p": 0.95,
    "min_p": 0.001,
}
GREEDY = {"max_new_tokens": 8, "stop_ids": tuple(range(0, 96, 5)), "greedy": True}
LIMITS = [[8, 8], [8, 3], [8, 8], [0, 1], [8, 8], [2, 8], [8, 8], [5, 8]]
PIPE_2 = MeshShape(pipe=2)
DATA_PIPE_TENSOR = MeshShape(data=2, pipe=2, tensor=2)
CASES = {  # mesh, relay, model, micro-batches wished for, tokens a segment
    "pipe 2": (PIPE_2, "hybrid", CFG, None, 8),
    "one micro-batch": (PIPE_2, "hybrid", CFG, 1, 8),
    "more micro-batches than stages": (PIPE_2, "hybrid", CFG, 4, 3),
    "pipe 2, tensor 2": (MeshShape(pipe=2, tensor=2), "hybrid", CFG, None, 8),
    "data 2, pipe 2, tensor 2": (DATA_PIPE_TENSOR, "hybrid", CFG, None, 8),
    "micro-DP": (MeshShape(data=2, pipe=2, tensor_micro=2), "hybrid", CFG, None, 8),
    "hybrid-v": (MeshShape(pipe=2, pipe_micro=2, tensor_micro=2), "hybrid-v", CFG, None, 8),
    "pipe 4": (MeshShape(pipe=4), "hybrid", FOUR, None, 8),
    "fewer micro-batches than stages": (MeshShape(pipe=4), "hybrid", FOUR, 2, 8),
}


@cache
def params_of(cfg):
    return host_params(cfg)


@cache
def alone(cfg):
    """One device, no stages."""
    return Rig(cfg, params_of(cfg))


@cache
def usual(cfg, greedy):
    return generate(alone(cfg), greedy)


def generate(rig, greedy):
    limits = [[limit] for limit, _ in LIMITS] if greedy else LIMITS
    return rig(PROMPTS, limits=limits, **(GREEDY if greedy else SAMPLED))


def begun(rig, sampling, *, prompts=PROMPTS, limit=8, slots=8):
    """Prompts and responses after prefill, with every other argument that it takes."""
    arguments = (
        rig.params,
        *rig.arguments(prompts, sampling.n),
        np.zeros(2, np.uint32),
        rig.put(np.broadcast_to(limit, (len(prompts), sampling.n))),
    )
    prompts, responses, _ = rig.decoder._begin(*arguments, sampling=sampling, slots=slots)
    return prompts, responses, arguments


QUICK = ("more micro-batches than stages", "data 2, pipe 2, tensor 2", "hybrid-v")


@pytest.mark.parametrize("name", slow_but(CASES, *QUICK))
def test_stages_draw_what_one_device_draws(name):
    compare(name, greedy=False)


@pytest.mark.parametrize("name", slow_but(["pipe 2", "micro-DP", "hybrid-v", "pipe 4"], "micro-DP"))
def test_stages_find_the_likeliest_tokens(name):
    compare(name, greedy=True)


def compare(name, *, greedy):
    shape, relay, cfg, micros, segment = CASES[name]
    rig = Rig(cfg, params_of(cfg), shape, relay=relay, micros=micros, segment=segment)
    wanted = usual(cfg, greedy)
    lengths = wanted.length_B - wanted.prompt_length_B
    assert {0, 8} < set(lengths.tolist())
    assert not wanted.truncated_B.all()
    assert_same(rig, wanted, generate(rig, greedy), greedy=greedy)


def test_rows_that_no_wished_for_number_divides():
    rig = Rig(CFG, params_of(CFG), PIPE_2)
    out, wanted = (each(PROMPTS[:3], n=2, max_new_tokens=4) for each in (rig, alone(CFG)))
    assert_same(rig, wanted, out)


def test_micro_batches_divide_the_rows_of_a_replica():
    def micros(shape, rows, wished=None):
        return Rig(FOUR, params_of(FOUR), shape, micros=wished).decoder._model.micros_of(rows)

    assert [micros(MeshShape(pipe=4), rows) for rows in (8, 6, 5, 2, 1)] == [4, 3, 1, 2, 1]
    assert micros(MeshShape(data=2, pipe=4), 8) == 4
    assert micros(MeshShape(data=2, pipe=4), 4) == 2
    assert micros(MeshShape(pipe=4), 16, wished=8) == 8
    with pytest.raises(ValueError, match="micros=0 must be at least 1"):
        micros(PIPE_2, 8, wished=0)


TICKS = {  # stages, micro-batches, ticks of 7 tokens and of 2
    "as many micro-batches as stages": (2, 2, 7 * 2 + 1, 2 * 2 + 1),
    "more": (2, 4, 7 * 4 + 1, 2 * 4 + 1),
    "fewer": (4, 2, 6 * 4 + 2 + 3, 1 * 4 + 2 + 3),  # rounds of 4 ticks, two of them empty
    "one": (2, 1, 6 * 2 + 1 + 1, 1 * 2 + 1 + 1),
}


@pytest.mark.parametrize("name", slow_but(TICKS, "more"))
def test_ticks_and_caches_of_a_segment(name):
    stages, micros, whole, short = TICKS[name]
    cfg = FOUR if stages == 4 else CFG
    rig = Rig(cfg, params_of(cfg), MeshShape(pipe=stages), micros=micros)
    ticked = jax.jit(rig.decoder._model.segment, static_argnums=4)

    def segment(sampling, end, **options):
        prompts, responses, _ = begun(rig, sampling, **options)
        return ticked(rig.params, prompts, responses, np.int32(end), sampling)

    free = Sampling(n=2, max_new_tokens=8)
    responses, ticks = segment(free, 8)
    assert ticks == whole  # tokens 1 to 7: prefill drew the first
    assert responses.columns.length_Bn.tolist() == [[8, 8]] * 8
    assert segment(free, 3)[1] == short
    assert segment(free, 1)[1] == 0
    assert segment(free, 8, limit=3)[1] == short
    assert_same_caches(rig, alone(cfg), free)


def test_stages_leave_together_when_the_last_row_ends():
    cfg = replace(TABLE, layers=2)
    params = path_params([3, 4, 5, 6, 2], [7, 8, 2])  # 4 tokens, and 2
    params["layers"] = {name: np.repeat(x, 2, axis=0) for name, x in params["layers"].items()}
    rig = Rig(cfg, params, PIPE_2)
    sampling = Sampling(max_new_tokens=8, stop_ids=(2,), greedy=True)
    ticked = jax.jit(rig.decoder._model.segment, static_argnums=4)
    for long, positions in ((None, 1), (0, 3), (1, 3), (7, 3)):
        # rows 0, 2, 4, 6 are micro-batch 0, which ends a tick before the other
        prompts = [[3] if row == long else [7] for row in range(8)]
        prompts, responses, _ = begun(rig, sampling, prompts=prompts)
        responses, ticks = ticked(rig.params, prompts, responses, np.int32(8), sampling)
        assert ticks == positions * 2 + 1 - (long == 0)
        lengths = [4 if row == long else 2 for row in range(8)]
        assert responses.columns.length_Bn[:, 0].tolist() == lengths


def assert_same_caches(rig, one, sampling):
    """Every slot is written by its own unit, and by no empty one; two remain unwritten."""
    caches = []
    for each in (rig, one):
        prompts, responses, _ = begun(each, sampling, slots=8)
        args = each.params, prompts, responses, np.int32(7)
        responses, _ = each.decoder._continue(*args, sampling=sampling)
        caches.append(jax.device_get((prompts.cache, responses.cache)))
    for a, b in zip(*map(jax.tree.leaves, caches), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
    for _, own in caches:
        assert not own.k_LBKdS[..., 6:].any()
        assert own.k_LBKdS[..., 5].any(axis=(2, 3, 4)).all()


def test_an_empty_unit_writes_nothing():
    """Left after two ticks, the second stage has had one unit, of the first micro-batch.

    With biases what an empty unit would write is not zero.
    """
    cfg = replace(CFG, qkv_bias=True)
    rig = Rig(cfg, params_of(cfg), PIPE_2)
    sampling = Sampling(max_new_tokens=8)
    prompts, responses, _ = begun(rig, sampling, limit=[[2], [1]] * 4)
    args = rig.params, prompts, responses, np.int32(8)
    responses, ticks = jax.jit(rig.decoder._model.segment, static_argnums=4)(*args, sampling)
    assert ticks == 2
    k_LBnKdS = np.asarray(responses.cache.k_LBKdS)
    assert k_LBnKdS[1, ::2, ..., 0].any(axis=(1, 2, 3)).all()
    assert not k_LBnKdS[1, 1::2].any()


def test_a_tick_sends_an_activation_and_three_numbers_a_row():
    rig = Rig(CFG, params_of(CFG), DATA_PIPE_TENSOR)
    sampling = Sampling(**SAMPLED)
    prompts, responses, arguments = begun(rig, sampling)
    args = rig.params, prompts, responses, np.int32(8)
    traffic = meter(
        rig.decoder._continue.lower(*args, sampling=sampling).compile(), mesh=rig.mesh, trips=1
    )
    rows = 8 // 2 // 2 * 2  # of a replica, of a micro-batch, samples
    activation = rows * CFG.embed * 4
    sent = [(c.kind, c.axes, c.result_bytes, c.conditional) for c in traffic.collectives]
    along = {axes: [one for one in sent if one[1] == axes] for axes in traffic.by_axes()}
    assert set(along) == {("data",), ("pipe",), ("tensor",)}
    moved = [one for one in along["pipe",] if one[0] == "collective-permute"]
    assert moved == [("collective-permute", ("pipe",), activation, False)]
    drawn = [one for one in along["pipe",] if one[0] == "all-reduce"]
    assert sum(one[2] for one in drawn) == 3 * 4 * rows  # token and two log-probs
    assert len(moved + drawn) == len(along["pipe",])
    # one layer a stage: attention and MLP; embedding and head in branches of one stage each
    large = [one for one in along["tensor",] if one[2] > 4 * 4 * rows]  # four numbers a row
    whole, branch = (("all-reduce", ("tensor",), activation, branch) for branch in (False, True))
    assert sorted(large) == [whole, whole, branch]
    assert all(one[3] for one in along["tensor",] if one not in large)
    assert sum(one[2] for one in along["data",]) <= 4  # does any row run?

    # Prefill: M + p - 1 ticks.
    traffic = meter(
        rig.decoder._begin.lower(*arguments, sampling=sampling, slots=8).compile(), mesh=rig.mesh
    )
    [moved] = [c for c in traffic.collectives if c.kind == "collective-permute"]
    assert (moved.axes, moved.trips) == (("pipe",), 3)
    assert moved.result_bytes == 2 * 8 * CFG.embed * 4  # prompts, width
    assert "pipe" not in {a for c in traffic.collectives if c.kind == "all-gather" for a in c.axes}


def test_a_stage_holds_its_layers_caches_and_no_copy():
    rig = Rig(FOUR, params_of(FOUR), PIPE_2)
    sampling = Sampling(n=2, max_new_tokens=512, greedy=True)
    temporary, cached = [], []
    for slots in (256, 512):
        prompts, responses, _ = begun(rig, sampling, slots=slots)
        for held in (prompts.cache, responses.cache):
            total = sum(x.nbytes for x in jax.tree.leaves(held))
            assert set(held_bytes(held).values()) == {total // 2}
        args = rig.params, prompts, responses, np.int32(8)
        compiled = rig.decoder._continue.lower(*args, sampling=sampling).compile()
        needs = memory(compiled)
        cached.append(held_bytes(responses.cache)[rig.mesh.devices.flat[0]])
        assert needs.alias_bytes > cached[-1]  # donated: written where they lie
        temporary.append(needs.temp_bytes)
    # of what a slot adds: one layer of two, one micro-batch of two, and its scores
    assert (temporary[1] - temporary[0]) / (cached[1] - cached[0]) < 0.3
