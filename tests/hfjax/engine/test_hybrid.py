# SPDX-License-Identifier: Apache-2.0
"""The relay: the same weights, the fewest bytes, shared buffers where nothing moves."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfjax.engine.hybrid import Relay
from hfjax.models.llama import abstract_params
from meshes.layouts import generate_layout, shardings, train_layout
from meshes.mesh import MeshShape, make_mesh
from tests.hfjax.engine.cases import CFG, host_params, place_params

SHAPES = {
    "tensor 4 to 2": MeshShape(data=2, tensor=2, tensor_micro=2),
    "tensor 4 to 1": MeshShape(data=2, tensor_micro=4),
    "fsdp 2, tensor 4 to 2": MeshShape(fsdp=2, tensor=2, tensor_micro=2),
    "the same layout": MeshShape(data=4, tensor=2),
}


def make_relay(shape, dtype, source=jnp.float32):
    mesh = make_mesh(jax.devices()[: shape.devices], shape)
    before = train_layout(shape, kv_heads=CFG.kv_heads)
    after = generate_layout(shape, kv_heads=CFG.kv_heads)
    shapes, axes = abstract_params(CFG, "lm", source)
    return Relay(mesh, before, after, shapes, axes, dtype), shardings(mesh, after, axes)


def shard_bytes(params):
    """Bytes of the buffers on the first device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("name", list(SHAPES))
def test_weights_arrive_unchanged_in_the_generation_layout(name):
    params = place_params(host_params(), SHAPES[name])
    relay, wanted = make_relay(SHAPES[name], jnp.float32)
    moved = relay.to_generate(params)
    for before, after, sharding in zip(*map(jax.tree.leaves, (params, moved, wanted)), strict=True):
        np.testing.assert_array_equal(np.asarray(before), np.asarray(after))
        assert after.sharding.is_equivalent_to(sharding, after.ndim)
        back = jax.device_put(after, before.sharding)
        np.testing.assert_array_equal(np.asarray(before), np.asarray(back))
    assert relay.bytes_moved() == shard_bytes(moved) - shard_bytes(params)


def test_buffers_are_shared_where_layouts_agree():
    params = place_params(host_params(), SHAPES["the same layout"])
    relay, _ = make_relay(SHAPES["the same layout"], jnp.float32)
    moved = relay.to_generate(params)
    assert relay.bytes_moved() == 0
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (params, moved)), strict=True))
    params = place_params(host_params(), SHAPES["tensor 4 to 2"])
    relay, _ = make_relay(SHAPES["tensor 4 to 2"], jnp.float32)
    moved = relay.to_generate(params)
    assert moved["final_norm"] is params["final_norm"]  # replicated in both
    assert moved["layers"]["wq"] is not params["layers"]["wq"]


def test_generation_in_half_precision_moves_half_the_bytes():
    shape = SHAPES["tensor 4 to 2"]
    full, _ = make_relay(shape, jnp.float32)
    half, _ = make_relay(shape, jnp.bfloat16)
    assert half.bytes_moved() * 2 == full.bytes_moved()
    params = place_params(host_params(), shape)
    moved = half.to_generate(params)
    for before, after in zip(*map(jax.tree.leaves, (params, moved)), strict=True):
        assert after.dtype == jnp.bfloat16
        expected = np.asarray(before).astype(jnp.bfloat16)
        np.testing.assert_array_equal(np.asarray(after), expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_relay_is_all_gathers_inside_groups_of_the_dropped_axis(dtype):
    """One all-gather of 2 devices a sharded parameter, in the generation dtype, nothing else.

    float16 stands for bfloat16, which CPU widens before it gathers.
    """
    shape = SHAPES["tensor 4 to 2"]
    relay, _ = make_relay(shape, dtype)
    leaves = jax.tree.leaves(place_params(host_params(), shape))
    text = relay._move.lower(relay._only_moved(leaves)).compile().as_text()
    kinds = re.findall(
        r"\b(all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\(", text
    )
    assert set(kinds) == {"all-gather"}
    gathers = re.findall(r"= (\w+)\[([\d,]+)\]\S* all-gather\((.*)", text)
    short = {jnp.float32: "f32", jnp.float16: "f16"}[dtype]
    assert [kind for kind, _, _ in gathers] == [short] * len(gathers)
    # embed, lm_head, wq, wk, wv, wo, w_gate, w_up, w_down
    assert len(gathers) == 9
    received = sum(np.prod([int(n) for n in size.split(",")]) for _, size, _ in gathers) / 2
    assert received * jnp.dtype(dtype).itemsize == relay.bytes_moved()
