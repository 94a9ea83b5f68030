# SPDX-License-Identifier: Apache-2.0
"""Bytes of arrays by arithmetic; the compiled programs' own are in test_verify.py."""

import jax
import jax.numpy as jnp
import pytest

from hfjax.engine.replicas import Replicas
from hfjax.engine.sampling import Sampling
from hfjax.mapping.memory import (
    generation_bytes,
    kv_bytes,
    pass_rows,
    relay_peak_bytes,
    training_bytes,
    weight_bytes,
)
from hfjax.mapping.programs import Programs
from hfjax.mapping.temporaries import activation_bytes
from hfjax.models.llama import Head, abstract_params
from meshes.layouts import generate_layout, train_layout
from meshes.mesh import MeshShape, make_mesh
from meshes.placement import RolePlacement
from tests.fixtures import tiny_config

CFG = tiny_config()
PARAMETERS = sum(leaf.size for leaf in jax.tree.leaves(abstract_params(CFG, "lm")[0]))
MESHES = [
    MeshShape(data=8),
    MeshShape(fsdp=4, tensor=2),
    MeshShape(data=2, fsdp=2, pipe_micro=2),
    MeshShape(pipe=2, tensor=2, tensor_micro=2),
    MeshShape(tensor=8),  # more than kv heads
]


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("head", ["lm", "value"])
def test_weights_and_state_are_the_shards_of_the_engine(
    shape: MeshShape, zero: int, head: Head
) -> None:
    shapes, axes = abstract_params(CFG, head)
    layout = train_layout(shape, kv_heads=CFG.kv_heads, zero=zero)
    mesh = make_mesh(jax.devices(), shape)
    replicas = Replicas(mesh, layout, shapes, axes, jnp.float16)

    def shards(placed: object) -> int:
        pairs = zip(jax.tree.leaves(shapes), jax.tree.leaves(placed), strict=True)
        return sum(int(jnp.prod(jnp.array(s.shard_shape(x.shape)))) for x, s in pairs)

    held = training_bytes(CFG, head, shape, zero=zero)
    assert held.master == 4 * shards(replicas.state_shardings)
    weights = shards(replicas.weight_shardings)
    assert held.weights == (0 if replicas.gathers else 2 * weights)
    assert weight_bytes(CFG, head, shape, zero=zero) == 2 * weights


def test_float32_computes_with_the_master_where_it_is_whole() -> None:
    alone = training_bytes(CFG, "lm", MeshShape(data=8), itemsize=4)
    assert (alone.weights, alone.gradients, alone.optimizer) == (
        0,
        4 * PARAMETERS,
        12 * PARAMETERS,
    )
    assert training_bytes(CFG, "lm", MeshShape(fsdp=8), zero=1, itemsize=4).weights > 0


def test_keys_and_values_are_those_that_a_decoder_makes() -> None:
    place = RolePlacement(
        "actor", "all", train=MeshShape(data=2, tensor=4), generate=MeshShape(tensor=2)
    )
    shape, rows, width, new, n = place.mesh_shape, 3, 5, 7, 2
    programs = Programs(CFG, "lm", place)
    prompts = rows * shape.over(place.generate_batch)
    sampling = Sampling(max_new_tokens=new, n=n, ignore_eos=True)
    lowered = programs.generation(prompts, width, sampling)["segment"]
    caches = [
        x for x in jax.tree.leaves(lowered.args_info) if x.dtype == jnp.float16 and len(x.shape) > 4
    ]
    whole = sum(2 * int(jnp.prod(jnp.array(x.shape))) for x in caches)
    predicted = kv_bytes(CFG, shape, rows=rows, slots=width + n * new)
    assert whole == predicted * shape.devices


def test_generation_holds_table_2_and_a_relay_at_most_a_bucket_more() -> None:
    shape = MeshShape(data=2, tensor=2, tensor_micro=2)
    norms = (2 * CFG.layers + 1) * CFG.embed
    held = generation_bytes(CFG, shape)
    assert held == 2 * ((PARAMETERS - norms) // 2 + norms)
    layout = generate_layout(shape, kv_heads=CFG.kv_heads)
    assert layout.mesh_axes("mlp") == ("tensor",)
    assert held < relay_peak_bytes(CFG, shape)


def test_what_is_recomputed_is_not_kept() -> None:
    def saved(remat: str, **over: bool) -> int:
        shape = MeshShape(tensor=4)
        run = activation_bytes(CFG, "lm", shape, rows=2, tokens=32, remat=remat, **over)
        return run.saved

    assert saved("none") > saved("dots") > saved("layer")
    assert saved("none") > saved("none", fused_attention=True)
    assert saved("layer") == 4 * saved("layer", sequence_parallel=True)


def test_passes_are_those_of_the_engine() -> None:
    assert [pass_rows(rows, 2048) for rows in (4, 100)] == [4, 8]
    assert pass_rows(7, 10**6) == 1
