# SPDX-License-Identifier: Apache-2.0
"""The relay: the same weights, the fewest bytes, shared buffers where nothing moves."""

import weakref
from dataclasses import replace
from itertools import chain, pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfjax.engine.hybrid import Moves, Relay, Weights
from hfjax.engine.meter import held_bytes, meter
from hfjax.engine.microbatch import cut_micros
from hfjax.engine.offload import HOST
from hfjax.engine.train import OptimizerConfig, Trainer
from hfjax.models.llama import abstract_params
from meshes.layouts import generate_layout, shardings, train_layout
from meshes.mesh import MeshShape, make_mesh
from tests.hfjax.engine.cases import (
    CFG,
    COLUMNS,
    host_params,
    lm_loss,
    make_batch,
    replicas_of,
)

SHAPES = {
    "tensor 4 to 2": MeshShape(data=2, tensor=2, tensor_micro=2),
    "tensor 4 to 1": MeshShape(data=2, tensor_micro=4),
    "fsdp 2, tensor 4 to 2": MeshShape(fsdp=2, tensor=2, tensor_micro=2),
    "pipe 2 to 1, tensor 4 to 2": MeshShape(pipe_micro=2, tensor=2, tensor_micro=2),
    "pipe 2, tensor 4 to 2": MeshShape(pipe=2, tensor=2, tensor_micro=2),
    "the same layout": MeshShape(data=4, tensor=2),
}
MODES = {  # a training group of 8: p = 2, t = 4, or ZeRO-3; generation p_g = 1, t_g = 2
    "hybrid": MeshShape(pipe_micro=2, tensor=2, tensor_micro=2),
    "hybrid-v": MeshShape(pipe=2, tensor=2, tensor_micro=2),
    "hybrid-v-permute": MeshShape(pipe=2, tensor=2, tensor_micro=2),
    "ds-chat": MeshShape(fsdp=4, tensor=2),
}


def make_relay(shape, dtype, source=jnp.float32, mode="hybrid", **options):
    mesh = make_mesh(jax.devices()[: shape.devices], shape)
    before = train_layout(shape, kv_heads=CFG.kv_heads, relay=mode)
    after = generate_layout(shape, kv_heads=CFG.kv_heads, relay=mode)
    shapes, axes = abstract_params(CFG, "lm", source)
    options |= {"by_compiler": mode == "hybrid-v-permute", "whole": mode == "hybrid-v"}
    relay = Relay(mesh, before, after, shapes, axes, dtype, **options)
    placed = jax.device_put(host_params(), shardings(mesh, before, axes))
    return relay, placed, shardings(mesh, after, axes)


def traffic_of(relay, params, *, back=False):
    programs = relay.lowered(params, back=back)
    mesh = jax.tree.leaves(params)[0].sharding.mesh
    return [meter(program.compile(), mesh=mesh) for program in programs]


def shard_bytes(params):
    """Bytes of the buffers on the first device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("name", list(SHAPES))
def test_weights_go_there_and_back_unchanged(name):
    relay, params, wanted = make_relay(SHAPES[name], jnp.float32, bucket_bytes=20_000)
    before = jax.tree.map(np.asarray, params)
    held = shard_bytes(params)
    moved = relay.to_generate(params, release=True)
    for host, after, sharding in zip(*map(jax.tree.leaves, (before, moved, wanted)), strict=True):
        np.testing.assert_array_equal(host, np.asarray(after))
        assert after.sharding.is_equivalent_to(sharding, after.ndim)
    assert relay.bytes_moved() == shard_bytes(moved) - held
    assert relay.contained
    again = relay.to_train(moved, release=True)
    for host, after, old in zip(*map(jax.tree.leaves, (before, again, params)), strict=True):
        np.testing.assert_array_equal(host, np.asarray(after))
        assert after.sharding.is_equivalent_to(old.sharding, after.ndim)


def test_only_one_bucket_lies_in_both_layouts(monkeypatch):
    """Before each bucket moves, the ones before it have left the training layout."""
    relay, params, _ = make_relay(SHAPES["tensor 4 to 1"], jnp.float32, bucket_bytes=20_000)
    leaves = jax.tree.leaves(params)
    seen = []

    def watched(program, bucket):
        def run(old):
            seen.append([i for i, leaf in enumerate(leaves) if leaf.is_deleted()])
            return program(old)

        return run

    pairs = zip(relay._there, relay._buckets, strict=True)
    monkeypatch.setattr(relay, "_there", [watched(*pair) for pair in pairs])
    relay.to_generate(params, release=True)
    gone = [sorted(chain(*relay._buckets[:k])) for k in range(len(relay._buckets))]
    assert seen == gone
    assert len(relay._buckets) > 3
    assert relay.bucket_bytes <= max(20_000, max(leaf.nbytes for leaf in leaves))


def test_buffers_are_shared_where_layouts_agree():
    relay, params, _ = make_relay(SHAPES["the same layout"], jnp.float32)
    moved = relay.to_generate(params, release=True)
    assert relay.bytes_moved() == 0
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (params, moved)), strict=True))
    relay, params, _ = make_relay(SHAPES["tensor 4 to 2"], jnp.float32)
    moved = relay.to_generate(params)
    assert moved["final_norm"] is params["final_norm"]  # replicated in both
    assert moved["layers"]["wq"] is not params["layers"]["wq"]


def test_generation_in_half_precision_moves_half_the_bytes():
    shape = SHAPES["tensor 4 to 2"]
    full, _, _ = make_relay(shape, jnp.float32)
    half, params, _ = make_relay(shape, jnp.bfloat16)
    assert half.bytes_moved() * 2 == full.bytes_moved()
    assert not half.contained  # float32 weights cannot come out of bfloat16 ones
    moved = half.to_generate(params)
    for before, after in zip(*map(jax.tree.leaves, (params, moved)), strict=True):
        assert after.dtype == jnp.bfloat16
        expected = np.asarray(before).astype(jnp.bfloat16)
        np.testing.assert_array_equal(np.asarray(after), expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("name", list(SHAPES))
def test_relay_is_all_gathers_over_the_dropped_axes(name, dtype):
    """Nothing else moves, at the fewest bytes, in the generation dtype; back, nothing moves.

    float16 stands for bfloat16, which CPU widens before it gathers.
    """
    shape = SHAPES[name]
    relay, params, _ = make_relay(shape, dtype)
    dropped = {a for a in ("fsdp", "pipe_micro", "tensor_micro") if getattr(shape, a) > 1}
    there = traffic_of(relay, params)
    for traffic in there:
        assert set(traffic.by_kind()) <= {"all-gather"}
        assert all(len(c.axes) == 1 and c.axes[0] in dropped for c in traffic.collectives)
        assert set(traffic.element_types()) <= {{jnp.float32: "f32", jnp.float16: "f16"}[dtype]}
    assert sum(traffic.bytes_received for traffic in there) == relay.bytes_moved()
    if relay.contained:
        moved = relay.to_generate(params)
        assert all(not traffic.collectives for traffic in traffic_of(relay, moved, back=True))


def test_the_outermost_axis_is_gathered_first():
    """What crosses the slowest links moves while it is smallest: fsdp, then pipe, then tensor."""
    shape = MeshShape(fsdp=2, pipe_micro=2, tensor_micro=2)
    relay, params, _ = make_relay(shape, jnp.float32)
    (traffic,) = traffic_of(relay, params)
    by_axis = {axes[0]: count for axes, count in traffic.by_axes().items()}
    layers = sum(leaf.nbytes for leaf in jax.tree.leaves(params["layers"]) if leaf.ndim > 2)
    flat = params["embed"].nbytes + params["lm_head"].nbytes
    norms = params["layers"]["attn_norm"].nbytes + params["layers"]["mlp_norm"].nbytes
    assert by_axis["fsdp"] == layers / 8 + flat / 4
    assert by_axis["pipe_micro"] == layers / 4 + norms / 2
    assert by_axis["tensor_micro"] == layers / 2 + flat / 2


@pytest.mark.parametrize("mode", list(MODES))
def test_every_mode_gives_the_same_weights(mode):
    relay, params, wanted = make_relay(MODES[mode], jnp.float32, mode=mode)
    moved = relay.to_generate(params)
    for host, after, sharding in zip(
        *map(jax.tree.leaves, (host_params(), moved, wanted)), strict=True
    ):
        np.testing.assert_array_equal(host, np.asarray(after))
        assert after.sharding.is_equivalent_to(sharding, after.ndim)
    assert relay.contained == (mode == "hybrid")


@pytest.mark.parametrize(
    ("mode", "received"),
    [
        ("hybrid", 1 / 2 - 1 / 8),  # M (tp - t_g p_g) / (t_g p_g tp)
        ("hybrid-v", 7 / 8),  # M (tp - 1) / tp
        ("ds-chat", 7 / 8),  # M (tpd - 1) / (tpd)
    ],
)
def test_bytes_of_layer_weights_are_those_of_the_paper(mode, received):
    """HybridFlow Table 2: M bytes of a weight that all the changing axes shard, one a bucket."""
    relay, params, _ = make_relay(MODES[mode], jnp.float32, mode=mode, bucket_bytes=1)
    leaves = jax.tree.leaves(params)
    checked = 0
    for bucket, traffic in zip(relay._buckets, traffic_of(relay, params), strict=True):
        (weight,) = (leaves[i] for i in bucket)
        if weight.ndim > 2:
            assert traffic.bytes_received == weight.nbytes * received
            checked += 1
    assert checked == 7  # wq, wk, wv, wo, w_gate, w_up, w_down


def test_hybrid_v_gathers_whole_groups_also_where_generation_keeps_all_of_tensor():
    """Table 2 counts (tp - 1) / tp with t_g = t too, as for 34B and 70B: p 2 to 1, t = t_g = 4."""
    shape = MeshShape(pipe=2, tensor_micro=4)
    relay, params, _ = make_relay(shape, jnp.float32, mode="hybrid-v", bucket_bytes=1)
    for traffic, bucket in zip(traffic_of(relay, params), relay._buckets, strict=True):
        (weight,) = (jax.tree.leaves(params)[i] for i in bucket)
        assert traffic.bytes_received == weight.nbytes * (7 / 8 if weight.ndim > 2 else 1 / 2)
    before = jax.tree.map(np.asarray, params)
    there = relay.to_generate(params)
    for moved in (there, relay.to_train(there)):  # these layouts contain one another
        jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, moved))


# --- one copy of the weights ----------------------------------------------------------------------


def make_weights(shape, *, dtype="float32", zero=3, mode="hybrid"):
    """An actor's weights on a mesh, and the trainer of their state."""
    replicas = replicas_of(shape, dtype=dtype, zero=zero, relay=mode)
    trainer = Trainer(CFG, "lm", replicas, OptimizerConfig(lr=0.1), lm_loss, columns=COLUMNS)
    after = generate_layout(shape, kv_heads=CFG.kv_heads, relay=mode)
    shapes, axes = abstract_params(CFG, "lm", replicas.weight_dtype)
    relay = Relay(replicas.mesh, replicas.layout, after, shapes, axes, jnp.dtype(dtype))
    state = trainer.init_state(jax.device_put(host_params(), replicas.state_shardings))
    return trainer, Weights(replicas, state, relay), relay


HOLDINGS = {  # layout, dtype of computation and generation, stage of ZeRO
    "float32": (SHAPES["tensor 4 to 2"], "float32", 3),
    "float32, fsdp": (SHAPES["fsdp 2, tensor 4 to 2"], "float32", 3),
    "float32, zero 1": (SHAPES["fsdp 2, tensor 4 to 2"], "float32", 1),
    "float32, pipe": (SHAPES["pipe 2 to 1, tensor 4 to 2"], "float32", 3),
    "bfloat16": (SHAPES["tensor 4 to 2"], "bfloat16", 3),
    "bfloat16, fsdp": (SHAPES["fsdp 2, tensor 4 to 2"], "bfloat16", 3),
    "bfloat16, zero 2": (SHAPES["fsdp 2, tensor 4 to 2"], "bfloat16", 2),
}


@pytest.mark.parametrize("name", list(HOLDINGS))
def test_no_weight_is_held_twice_while_generating(name):
    """Beside the generation shard there is the optimizer's state: moments, and a master in float32
    where generation's dtype is another, or ZeRO-1 and 2 gather what they train with.
    """
    shape, dtype, zero = HOLDINGS[name]
    _, weights, _ = make_weights(shape, dtype=dtype, zero=zero)
    device = jax.devices()[0]
    master_is_what_generates = dtype == "float32" and zero == 3
    before = jax.tree.map(np.asarray, weights.state().params)
    master, moments = (
        held_bytes(tree)[device] for tree in (weights.state().params, weights.state().opt_state)
    )
    weights.train()
    generate = weights.generate()
    everything = [weights._state.params, weights._train, generate]
    beside = held_bytes(everything)[device] - held_bytes(generate)[device]
    assert beside == (0 if master_is_what_generates else master)
    assert held_bytes(weights._state.opt_state)[device] == moments
    after = weights.state()
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, after.params))


def test_generation_follows_every_update():
    """Large updates between generations: the weights are the new ones each time, bit for bit."""
    trainer, weights, _ = make_weights(SHAPES["tensor 4 to 2"])
    micros = cut_micros(make_batch(), replicas=2)
    seen = []
    for _ in range(3):
        seen.append(np.asarray(weights.generate()["layers"]["wq"]))
        np.testing.assert_array_equal(seen[-1], np.asarray(weights.train()["layers"]["wq"]))
        weights.generate()
        state, _ = trainer.update(weights.state(), micros)
        weights.take(state)
    assert all(np.abs(a - b).max() > 0.05 for a, b in pairwise(seen))


def test_offloaded_moments_are_on_no_device_between_updates():
    trainer, weights, _ = make_weights(SHAPES["tensor 4 to 2"])
    micros = cut_micros(make_batch(), replicas=2)
    plain = trainer.update(weights.state(), micros)[0]
    expected = jax.tree.map(np.asarray, trainer.update(plain, micros)[0])
    _, weights, _ = make_weights(SHAPES["tensor 4 to 2"])
    state = weights.state()
    moments, masters = held_bytes(state.opt_state), held_bytes(state.params)
    weights = Weights(trainer.replicas, state, offload=True)
    for _ in range(2):
        assert held_bytes(weights._state) == {d: n + 8 for d, n in masters.items()}  # 2 counters
        assert held_bytes(weights._state, HOST) == moments
        weights.take(trainer.update(weights.state(), micros)[0])
    found = jax.tree.map(np.asarray, weights.state())
    jax.tree.map(np.testing.assert_array_equal, found, expected)


# --- a layout for scoring, of another mesh -------------------------------------------------------

SCORING = {  # training's mesh and stage of ZeRO, scoring's mesh and dtype
    "fsdp 4, tensor 2 data 2": (MeshShape(fsdp=4), 3, MeshShape(data=2, tensor=2), "float32"),
    "zero 1, data 4": (MeshShape(fsdp=4), 1, MeshShape(data=4), "float32"),
    "pipe 2 data 2, data 4": (MeshShape(data=2, pipe_micro=2), 3, MeshShape(data=4), "bfloat16"),
    "tensor 4 to 2, fsdp 4 pipe 2": (
        SHAPES["tensor 4 to 2"],
        3,
        MeshShape(fsdp=4, pipe=2),
        "float32",
    ),
}


@pytest.mark.parametrize("name", list(SCORING))
def test_weights_that_score_are_the_newest_in_a_layout_of_their_own(name):
    """After an update, and after generation took the place of the training weights."""
    shape, zero, other, dtype = SCORING[name]
    _, weights, relay = make_weights(shape, dtype=dtype, zero=zero)
    after = replicas_of(other, dtype=dtype)
    weights = Weights(weights._replicas, weights.state(), relay, Moves(weights._replicas, after))
    for _ in range(2):
        master = jax.tree.map(np.asarray, weights.state().params)
        expected = jax.tree.map(lambda x: np.asarray(jnp.asarray(x, dtype)), master)
        for prepared in (weights.train, weights.generate):
            prepared()
            found = weights.score()
            assert weights.score() is found
            same = jax.tree.map(np.array_equal, expected, jax.tree.map(np.asarray, found))
            assert all(jax.tree.leaves(same)), prepared
        for x, wanted in zip(*map(jax.tree.leaves, (found, after.weight_shardings)), strict=True):
            assert x.sharding.is_equivalent_to(wanted, x.ndim)
        state = weights.state()
        weights.take(replace(state, params=jax.tree.map(lambda x: x * 1.5, state.params)))


def test_weights_that_score_are_gone_before_an_update_and_before_generation():
    _, weights, relay = make_weights(MeshShape(fsdp=4))
    replicas, state = weights._replicas, weights.state()
    moves = Moves(replicas, replicas_of(MeshShape(data=2, tensor=2)))

    def held_after(weights, what):
        last = weakref.ref(weights.score()["layers"]["wq"])
        what(weights)
        return last() is not None

    weights = Weights(replicas, state, relay, moves)
    assert held_after(weights, Weights.score)
    assert not held_after(weights, Weights.state)
    assert not held_after(weights, Weights.generate)
    assert not held_after(
        Weights(replicas, weights.state(), None, moves, offload=True), Weights.train
    )
