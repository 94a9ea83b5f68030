# SPDX-License-Identifier: Apache-2.0
"""Weights between two pools: whatever the layouts, each number is written once and arrives."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfjax.engine.exchange import Exchange, Side
from hfjax.models.llama import abstract_params
from meshes.layouts import generate_layout, shardings, train_layout
from meshes.mesh import MeshShape, make_mesh
from tests.hfjax.engine.cases import CFG, host_params

TRAINS = {
    "one": MeshShape(),
    "data 4": MeshShape(data=4),
    "fsdp 2, tensor 2": MeshShape(fsdp=2, tensor=2),
    "pipe 2, tensor 2": MeshShape(pipe=2, tensor=2),
}
GENERATES = {
    "data 4": MeshShape(data=4),
    "data 2, tensor 2": MeshShape(data=2, tensor=2),
    "tensor 4": MeshShape(tensor=4),
    "pipe 2, tensor 2": MeshShape(pipe=2, tensor=2),
}


def sides(trains, generates, processes=(1, 1)):
    kv = {"kv_heads": CFG.kv_heads}
    return (
        Side(trains, train_layout(trains, **kv), processes[0]),
        Side(generates, generate_layout(generates, **kv, relay="shared"), processes[1]),
    )


def exchange_of(trains, generates, dtype="float32", cfgs=(CFG, CFG), processes=(1, 1), **options):
    shapes, axes = zip(*(abstract_params(cfg, "lm") for cfg in cfgs), strict=True)
    return Exchange(*sides(trains, generates, processes), shapes, axes[0], dtype, **options)


def placed(side, devices, axes):
    return shardings(make_mesh(devices[: side.shape.devices], side.shape), side.layout, axes)


def moved(exchange, trains, generates, params):
    """What arrives on the last devices of what lies on the first."""
    _, axes = abstract_params(CFG, "lm")
    here, there = sides(trains, generates)
    devices = jax.devices()
    weights = jax.device_put(params, placed(here, devices, axes))
    target, treedef = jax.tree.flatten(placed(there, devices[4:], axes))
    leaves = {}
    for bucket in range(len(exchange.buckets)):
        for _ in range(2):  # the second time in the place of the first
            values = exchange.pack(bucket, 0, weights)
            exchange.unpack(bucket, 0, values, target, leaves)
    return treedef.unflatten([leaves[i] for i in range(len(target))]), treedef.unflatten(target)


@pytest.mark.parametrize("trains", TRAINS)
@pytest.mark.parametrize("generates", GENERATES)
def test_the_same_weights_arrive_in_the_other_layout(trains, generates):
    both = TRAINS[trains], GENERATES[generates]
    found, target = moved(exchange_of(*both), *both, host_params())
    jax.tree.map(np.testing.assert_array_equal, found, host_params())
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(target), strict=True)
    assert all(x.sharding.is_equivalent_to(sharding, x.ndim) for x, sharding in pairs)


def test_weights_are_cast_before_they_move():
    both = TRAINS["fsdp 2, tensor 2"], GENERATES["data 2, tensor 2"]
    found, _ = moved(exchange_of(*both, dtype="bfloat16"), *both, host_params())
    wanted = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), host_params())
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_paddings_of_the_vocabulary_may_differ():
    """Training pads 94 tokens to 96, generation does not: the last two rows stay."""
    real = replace(CFG, vocab=94)
    cfgs = replace(real, vocab_multiple=4), real
    both = TRAINS["one"], GENERATES["data 4"]
    exchange = exchange_of(*both, cfgs=cfgs)
    params = host_params(cfgs[0])
    found, _ = moved(exchange, *both, params)
    assert found["embed"].shape == (94, CFG.embed)
    np.testing.assert_array_equal(found["embed"], params["embed"][:94])


def test_padding_that_nobody_sends_is_zero():
    real = replace(CFG, vocab=94)
    cfgs = real, replace(real, vocab_multiple=4)
    both = TRAINS["one"], GENERATES["tensor 4"]
    found, _ = moved(exchange_of(*both, cfgs=cfgs), *both, host_params(real))
    assert found["embed"].shape == (96, CFG.embed)
    assert not np.asarray(found["embed"])[94:].any()


@pytest.mark.parametrize("processes", [(1, 1), (2, 1), (1, 4), (4, 2), (4, 4)])
@pytest.mark.parametrize("trains", ["data 4", "fsdp 2, tensor 2", "pipe 2, tensor 2"])
@pytest.mark.parametrize("generates", GENERATES)
def test_every_number_is_written_once_and_read_where_it_is_needed(trains, generates, processes):
    here, there = sides(TRAINS[trains], GENERATES[generates], processes)
    exchange = exchange_of(here.shape, there.shape, processes=processes)
    shapes, axes = abstract_params(CFG, "lm")
    sizes = [leaf.shape for leaf in jax.tree.leaves(shapes)]
    names = jax.tree.leaves(axes, is_leaf=lambda node: type(node) is tuple)
    written = [np.zeros(size, int) for size in sizes]
    read = [[np.zeros(size, bool) for size in sizes] for _ in range(processes[1])]
    for parcel in itertools.chain(*exchange.buckets):
        for piece in parcel.pieces:
            where = tuple(slice(*span) for span in piece.box)
            written[piece.leaf][where] += 1
            owners = here.holders(names[piece.leaf], sizes[piece.leaf])[piece.shard]
            assert parcel.writer in owners
            for reader in parcel.readers:
                read[reader][piece.leaf][where] = True
    assert all((leaf == 1).all() for leaf in written)
    for rank, leaves in enumerate(read):
        for leaf, size, name in zip(leaves, sizes, names, strict=True):
            needed = np.zeros(size, bool)
            for box, holders in there.holders(name, size).items():
                if rank in holders:
                    needed[tuple(slice(*span) for span in box)] = True
            np.testing.assert_array_equal(leaf, needed)


def test_replicas_take_turns_to_write():
    exchange = exchange_of(TRAINS["data 4"], GENERATES["data 4"], processes=(4, 1))
    assert {parcel.writer for parcel in itertools.chain(*exchange.buckets)} == {0, 1, 2, 3}


def test_buckets_bound_what_is_on_its_way():
    both = TRAINS["one"], GENERATES["data 4"]
    whole, cut = (exchange_of(*both, bucket_bytes=limit) for limit in (2**30, 8192))
    assert len(whole.buckets) == 1
    assert len(cut.buckets) > 3
    sizes = [leaf.size * 4 for leaf in jax.tree.leaves(abstract_params(CFG, "lm")[0])]
    assert max(map(cut.nbytes, cut.buckets)) == max(sizes)
    assert sum(map(cut.nbytes, cut.buckets)) == whole.nbytes(whole.buckets[0]) == sum(sizes)
