# SPDX-License-Identifier: Apache-2.0
"""Weights as each replica of the batch sees them: gradients move when told to, and only then.

Left to the compiler, the gradient of a weight that several replicas share is reduced where it
arises: in every layer of every micro-batch. Here a forward pass gets its weights stacked, a copy a
replica (on its own devices, so nothing is copied), and is mapped over the stack. Gradients are then
stacked too, and stay where they are until `reduce` or `scatter` (ZeRO, arXiv 1910.02054 §5).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hfjax.models.llama import Params, Run
from meshes.layouts import (
    BATCH,
    EMBED,
    LAYERS,
    Axes,
    Layout,
    batch_sharding,
    check,
    is_axes,
    shardings,
    state_layout,
)
from meshes.mesh import DATA, FSDP

OVER = (DATA, FSDP)  # mesh axes of the replicas, outer to inner


@dataclass(frozen=True)
class _Leaf:
    """One parameter: where it lies as a weight, in the optimizer's state, and stacked."""

    weight: PartitionSpec
    state: PartitionSpec
    stacked: PartitionSpec  # the weight, with the stack's axis
    scattered: PartitionSpec  # the state, with a stack over `data`
    at: int  # position of the stack's axis: after `layers`, which are scanned
    gathered: bool  # fsdp shards the weight itself (ZeRO-3)
    shard: int | None  # dimension that fsdp shards in the state, the stack's axis counted


class Replicas:
    """Moves between weights in `layout`, stacked weights and gradients, and the state's layout."""

    def __init__(self, mesh: Mesh, layout: Layout, shapes: Any, axes: Any, dtype: Any) -> None:
        """`shapes` and `axes` of the parameters (abstract_params), `dtype` of computation."""
        sharded = mesh.shape[FSDP] > 1
        layout = layout if sharded else Layout(layout.name, {**layout.rules, EMBED: None})
        state = state_layout(layout) if sharded else layout
        for each in (layout, state):
            check(mesh, each, shapes, axes)
        self.mesh, self.layout, self.dtype = mesh, layout, jnp.dtype(dtype)
        self.count = mesh.shape[DATA] * mesh.shape[FSDP]
        self.row_sharding = batch_sharding(mesh, layout)
        self.weight_shardings = shardings(mesh, layout, axes)
        self.state_shardings = shardings(mesh, state, axes)
        self._leaves = jax.tree.map(partial(_leaf, layout, state), axes, is_leaf=is_axes)
        flat = jax.tree_util.tree_leaves_with_path(self._leaves)
        self._by_name: dict[str, _Leaf] = {path[-1].key: leaf for path, leaf in flat}
        self.gathers = any(leaf.gathered for leaf in self._by_name.values())
        self._inner = Layout(layout.name, {**layout.rules, BATCH: None})
        self._same = self.gathers or (not sharded and self.dtype == jnp.float32)
        # cast before it moves: half the bytes in half precision
        self._as_weights = jax.jit(self._cast, out_shardings=self.weight_shardings)

    def weights(self, params: Params) -> Params:
        """What a pass reads, from the float32 master weights; the same arrays where it can be.

        ZeRO-3 computes with the master's own shards, cast layer by layer; ZeRO-1 and 2, and
        computation in another dtype, with a copy that is gathered once for many passes.
        """
        return params if self._same else self._as_weights(params)

    def run(self) -> Run:
        """How the model's forward pass runs, over stacked weights."""
        return Run(
            each=partial(jax.vmap, spmd_axis_name=OVER),
            weights=self.gather,
            gathers=self.gathers,
            constrain=self._constrain,
            rows=self._rows,
            merge=lambda x_Rb: x_Rb.reshape(-1, *x_Rb.shape[2:]),
        )

    def _cast(self, params: Params) -> Params:
        cast = jax.tree.map(lambda p: p.astype(self.dtype), params)
        return jax.lax.with_sharding_constraint(cast, self.state_shardings)

    def stack(self, weights: Params) -> Params:
        """A weight for each replica to differentiate by; nothing moves."""
        return self._moved(lambda x, leaf: jnp.expand_dims(x, leaf.at), "weight", "stacked")(
            weights
        )

    def gather(self, stacked: Params) -> Params:
        """What a layer computes with: whole but for `tensor`, in the dtype of computation.

        Weights that fsdp shards (ZeRO-3) are gathered. In the backward pass their gradients are
        reduce-scattered in float32.
        """
        return {name: self._gather_one(name)(x) for name, x in stacked.items()}

    def scatter(self, stacked: Params) -> Params:
        """Gradients reduce-scattered over fsdp, and still stacked over `data` (ZeRO-2)."""

        def local(x: jax.Array, leaf: _Leaf) -> jax.Array:
            return x if leaf.gathered else _scatter(x, leaf)

        return self._moved(local, "stacked", "scattered")(stacked)

    def reduce(self, grads: Params, *, scattered: bool) -> Params:
        """The sum of stacked or scattered gradients over replicas, in the state's layout."""

        def local(x: jax.Array, leaf: _Leaf) -> jax.Array:
            whole = not scattered and not leaf.gathered
            x = _scatter(x, leaf) if whole else x
            over = OVER if leaf.shard is None else (DATA,)
            return jax.lax.psum(jnp.squeeze(x, leaf.at), over)

        return self._moved(local, "scattered" if scattered else "stacked", "state")(grads)

    def gradient_shardings(self, *, scattered: bool) -> Any:
        """Where gradients lie while they are added up."""
        field = "scattered" if scattered else "stacked"
        return jax.tree.map(
            lambda leaf: NamedSharding(self.mesh, getattr(leaf, field)), self._leaves
        )

    def _gather_one(self, name: str) -> Callable[[jax.Array], jax.Array]:
        leaf = self._by_name[name]
        if not leaf.gathered:
            return lambda x: x.astype(self.dtype)
        before = PartitionSpec(*leaf.stacked[leaf.at :])  # of one layer
        assert leaf.shard is not None
        dim = leaf.shard - leaf.at
        after = PartitionSpec(OVER, *before[1:dim], None, *before[dim + 1 :])

        def local(x: jax.Array) -> jax.Array:
            return jax.lax.all_gather(x.astype(self.dtype), FSDP, axis=dim, tiled=True)

        def back(g: jax.Array) -> jax.Array:
            g = g.astype(jnp.float32)
            return jax.lax.psum_scatter(g, FSDP, scatter_dimension=dim, tiled=True)

        @jax.custom_vjp
        def gather(x: jax.Array) -> jax.Array:
            return self._manual(local, before, after)(x)

        def backward(_: None, g: jax.Array) -> tuple[jax.Array]:
            return (self._manual(back, after, before)(g),)

        gather.defvjp(lambda x: (gather(x), None), backward)
        return gather

    def _constrain(self, x: jax.Array, axes: Axes) -> jax.Array:
        sharding = NamedSharding(self.mesh, self._inner.spec(axes))
        return jax.lax.with_sharding_constraint(x, sharding)

    def _rows(self, x_B: jax.Array) -> jax.Array:
        """(B, ...) -> (R, B / R, ...)."""
        x_Rb = x_B.reshape(self.count, -1, *x_B.shape[1:])
        return jax.lax.with_sharding_constraint(x_Rb, NamedSharding(self.mesh, PartitionSpec(OVER)))

    def _moved(self, local: Callable[[jax.Array, _Leaf], jax.Array], a: str, b: str) -> Callable:
        """`local` on every leaf's shards, which lie as its field `a` says and go as `b` says."""

        def specs(field: str) -> Params:
            return jax.tree.map(lambda leaf: getattr(leaf, field), self._leaves)

        def all_leaves(tree: Params) -> Params:
            return jax.tree.map(local, tree, self._leaves)

        return self._manual(all_leaves, specs(a), specs(b))

    def _manual(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=(in_specs,), out_specs=out_specs, check_vma=False
        )


def _leaf(layout: Layout, state: Layout, axes: Axes) -> _Leaf:
    weight, held = layout.spec(axes), state.spec(axes)
    at = 1 if axes[:1] == (LAYERS,) else 0
    gathered = any(FSDP in _names(entry) for entry in weight)
    dims = [i for i, entry in enumerate(held) if FSDP in _names(entry)]
    over = (DATA,) if gathered else OVER
    return _Leaf(
        weight=weight,
        state=held,
        stacked=PartitionSpec(*weight[:at], over, *weight[at:]),
        scattered=PartitionSpec(*held[:at], (DATA,) if dims else OVER, *held[at:]),
        at=at,
        gathered=gathered,
        shard=dims[0] + 1 if dims else None,
    )


def _scatter(x: jax.Array, leaf: _Leaf) -> jax.Array:
    if leaf.shard is None:
        return x
    return jax.lax.psum_scatter(x, FSDP, scatter_dimension=leaf.shard, tiled=True)


def _names(entry: Any) -> tuple[str, ...]:
    return entry if isinstance(entry, tuple) else (entry,) if entry else ()
