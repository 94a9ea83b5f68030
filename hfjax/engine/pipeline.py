# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: micro-batches pass through stages of layers (GPipe, arXiv 1811.06965)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from hfjax.models.llama import Params
from meshes.mesh import PIPE, PIPE_MICRO, shape_of

STAGES = (PIPE, PIPE_MICRO)

Body = Callable[[jax.Array, Params], tuple[jax.Array, None]]


def pipeline(mesh: Mesh, micros: int, *, fence: bool) -> Callable[[Body, jax.Array, Params], Any]:
    """Runs a body over stacked layers as lax.scan does, a stage's layers on its own devices.

    Takes and gives x_pMRbTD, M = `micros`, a copy a stage: the first stage reads its own, the last
    writes the result. In tick t stage s works on micro-batch t - s and hands it to stage s + 1:
    M + p - 1 ticks, of which each stage idles p - 1. Only what enters a stage is kept for the
    backward pass; the rest is computed again there. With `fence` gathered weights live a tick.
    """
    stages = shape_of(mesh).over(STAGES)
    forward = [(s, (s + 1) % stages) for s in range(stages)]

    def stage(body: Body, layers: Params, x_pMRbTD: jax.Array) -> jax.Array:
        x_MRbTD = x_pMRbTD[0]
        rank = jax.lax.axis_index(STAGES)

        @jax.checkpoint
        def work(layers: Params, x_RbTD: jax.Array) -> jax.Array:
            if fence:  # or the compiler gathers once, before the first tick, and keeps them all
                layers, x_RbTD = jax.lax.optimization_barrier((layers, x_RbTD))
            return jax.lax.scan(body, x_RbTD, layers)[0]

        def tick(state: tuple[jax.Array, jax.Array], t: jax.Array) -> tuple[Any, None]:
            arrived, done = state
            first = jnp.take(x_MRbTD, jnp.clip(t, 0, micros - 1), axis=0)
            x = work(layers, jnp.where(rank == 0, first, arrived))
            at = jnp.clip(t - (stages - 1), 0, micros - 1)
            kept = jnp.where(t >= stages - 1, x, jnp.take(done, at, axis=0))
            done = jax.lax.dynamic_update_index_in_dim(done, kept, at, axis=0)
            return (jax.lax.ppermute(x, STAGES, forward), done), None

        empty = jnp.zeros_like(x_MRbTD)
        ticks = jnp.arange(micros + stages - 1)
        (_, done), _ = jax.lax.scan(tick, (empty[0], empty), ticks)
        return done[None]

    def layers_over(body: Body, x_pMRbTD: jax.Array, layers: Params) -> jax.Array:
        return jax.shard_map(
            partial(stage, body),
            mesh=mesh,
            in_specs=(PartitionSpec(STAGES), PartitionSpec(STAGES)),
            out_specs=PartitionSpec(STAGES),
            axis_names=set(STAGES),
            check_vma=False,
        )(layers, x_pMRbTD)

    return layers_over
