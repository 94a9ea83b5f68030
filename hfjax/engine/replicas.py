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

from hfjax.engine.pipeline import STAGES, Body, pipeline
from hfjax.models.llama import Params, Run
from meshes.layouts import (
    BATCH,
    EMBED,
    HYBRID,
    LAYERS,
    SEQUENCE,
    Axes,
    Layout,
    batch_sharding,
    check,
    is_axes,
    shardings,
    state_layout,
    zero_axes,
)
from meshes.mesh import AXES, shape_of


@dataclass(frozen=True)
class _Leaf:
    """One parameter: where it lies as a weight, in the optimizer's state, and stacked."""

    weight: PartitionSpec
    state: PartitionSpec
    stacked: PartitionSpec  # the weight, with the stack's axis
    scattered: PartitionSpec  # the state, with a stack over `data`
    at: int  # position of the stack's axis: after `layers`, which are scanned
    across: tuple[str, ...]  # the stages, where the stack is over them too
    gathered: bool  # fsdp shards the weight itself (ZeRO-3)
    shard: int | None  # dimension that fsdp shards in the state, the stack's axis counted


class Replicas:
    """Moves between weights in `layout`, stacked weights and gradients, and the state's layout."""

    def __init__(
        self,
        mesh: Mesh,
        layout: Layout,
        shapes: Any,
        axes: Any,
        dtype: Any,
        *,
        relay: str = HYBRID,
    ) -> None:
        """`shapes` and `axes` of the parameters (abstract_params), `dtype` of computation."""
        self._batch, self._zero = layout.mesh_axes(BATCH), zero_axes(relay)
        shape = shape_of(mesh)
        sharded = shape.over(self._zero) > 1
        layout = layout if sharded else Layout(layout.name, {**layout.rules, EMBED: None})
        state = state_layout(layout, relay) if sharded else layout
        for each in (layout, state):
            check(mesh, each, shapes, axes)
        self.mesh, self.layout, self.dtype = mesh, layout, jnp.dtype(dtype)
        self.count = shape.over(self._batch)
        self.row_sharding = batch_sharding(mesh, layout)
        self.weight_shardings = shardings(mesh, layout, axes)
        self.state_shardings = shardings(mesh, state, axes)
        self.stages = shape.over(STAGES)
        across = STAGES if self.stages > 1 else ()
        self._over = (*self._batch, *across)
        self._leaves = jax.tree.map(
            partial(_leaf, layout, state, across, self._zero), axes, is_leaf=is_axes
        )
        flat = jax.tree_util.tree_leaves_with_path(self._leaves)
        self._by_name: dict[str, _Leaf] = {path[-1].key: leaf for path, leaf in flat}
        self.gathers = any(leaf.gathered for leaf in self._by_name.values())
        self._inner = Layout(layout.name, {**layout.rules, BATCH: None})
        self._same = self.gathers or (not sharded and self.dtype == jnp.float32)
        # ZeRO-3 casts layer by layer, where the weights are used
        self.weight_dtype = jnp.dtype(jnp.float32) if self.gathers else self.dtype
        # cast before it moves: half the bytes in half precision
        self._as_weights = jax.jit(self._cast, out_shardings=self.weight_shardings)

    def weights(self, params: Params) -> Params:
        """What a pass reads, from the float32 master weights; the same arrays where it can be.

        ZeRO-3 computes with the master's own shards, cast layer by layer; ZeRO-1 and 2, and
        computation in another dtype, with a copy that is gathered once for many passes.
        """
        return params if self._same else self._as_weights(params)

    def lowered(self, params: Params) -> jax.stages.Lowered | None:
        """The program of `weights`, for a meter; None where they are the same arrays."""
        return None if self._same else self._as_weights.lower(params)

    def run(self, rows: int, micros: int = 1) -> Run:
        """How the model's forward pass of `rows` rows runs, over stacked weights.

        Pipelined, the rows of each replica are `micros` micro-batches, one after another. Outside
        of the layers they are spread over the stages: each embeds its part, and computes its part
        of the logits.
        """
        mine = rows // self.count

        def split(x_B: jax.Array) -> jax.Array:
            """(B, ...) -> (R p, c, ...), c rows for each stage of each replica."""
            x_Rb = _filled(x_B.reshape(self.count, mine, *x_B.shape[1:]), self.stages)
            x_Nc = x_Rb.reshape(self.count * self.stages, -1, *x_B.shape[1:])
            sharding = NamedSharding(self.mesh, PartitionSpec(self._over))
            return jax.lax.with_sharding_constraint(x_Nc, sharding)

        def merge(x_Nc: jax.Array) -> jax.Array:
            x_Rb = x_Nc.reshape(self.count, -1, *x_Nc.shape[2:])
            return x_Rb[:, :mine].reshape(rows, *x_Nc.shape[2:])

        through = partial(self._through_stages, mine, micros)
        return Run(
            rows=split,
            each=self._each,
            merge=merge,
            weights=self.gather,
            gathers=self.gathers,
            constrain=self._constrain,
            layers=through if self.stages > 1 else jax.lax.scan,
        )

    def _through_stages(
        self, rows: int, micros: int, body: Body, x_NcTD: jax.Array, layers: Params
    ) -> tuple[jax.Array, None]:
        """Rows from all stages to the pipeline, and from its end back to all stages."""
        T, D = x_NcTD.shape[2:]
        spread, copies = PartitionSpec(self._over), PartitionSpec(STAGES, None, self._batch)

        def enter(x_1cTD: jax.Array) -> jax.Array:
            x_bTD = jax.lax.all_gather(x_1cTD[0], STAGES, axis=0, tiled=True)[:rows]
            return x_bTD.reshape(1, micros, 1, rows // micros, T, D)

        def leave(x_1M1bTD: jax.Array) -> jax.Array:
            last = jax.lax.axis_index(STAGES) == self.stages - 1
            x_1bTD = jnp.where(last, x_1M1bTD, 0.0).reshape(1, rows, T, D)
            x_1bTD = _filled(x_1bTD, self.stages)
            return jax.lax.psum_scatter(x_1bTD, STAGES, scatter_dimension=1, tiled=True)

        x_pMRbTD = self._manual(enter, spread, copies)(x_NcTD)
        x_pMRbTD = pipeline(self.mesh, micros, fence=self.gathers)(body, x_pMRbTD, layers)
        return self._manual(leave, copies, spread)(x_pMRbTD), None

    def _scattered(self, x: jax.Array, leaf: _Leaf) -> jax.Array:
        if leaf.shard is None:
            return x
        return jax.lax.psum_scatter(x, self._zero, scatter_dimension=leaf.shard, tiled=True)

    def _each(self, function: Callable) -> Callable:
        """`function` for every replica; inside a stage, for every replica there."""
        inside = bool(jax.sharding.get_abstract_mesh().manual_axes)
        return jax.vmap(function, spmd_axis_name=self._batch if inside else self._over)

    def _cast(self, params: Params) -> Params:
        cast = jax.tree.map(lambda p: p.astype(self.dtype), params)
        return jax.lax.with_sharding_constraint(cast, self.state_shardings)

    def stack(self, weights: Params) -> Params:
        """A weight for each replica to differentiate by; nothing moves."""

        def local(x: jax.Array, leaf: _Leaf) -> jax.Array:
            return jnp.expand_dims(x, leaf.at)

        return self._moved(local, "weight", "stacked")(weights)

    def gather(self, stacked: Params) -> Params:
        """What a layer computes with: whole but for `tensor`, in the dtype of computation.

        Weights that fsdp shards (ZeRO-3) are gathered. In the backward pass their gradients are
        reduce-scattered in float32.
        """
        return {name: self._gather_one(name)(x) for name, x in stacked.items()}

    def scatter(self, stacked: Params) -> Params:
        """Gradients reduce-scattered over fsdp, and still stacked over `data` (ZeRO-2)."""

        def local(x: jax.Array, leaf: _Leaf) -> jax.Array:
            return x if leaf.gathered else self._scattered(x, leaf)

        return self._moved(local, "stacked", "scattered")(stacked)

    def reduce(self, grads: Params, *, scattered: bool) -> Params:
        """The sum of stacked or scattered gradients over replicas, in the state's layout."""

        def local(x: jax.Array, leaf: _Leaf) -> jax.Array:
            whole = not scattered and not leaf.gathered
            x = self._scattered(x, leaf) if whole else x
            over = tuple(a for a in self._batch if leaf.shard is None or a not in self._zero)
            return jax.lax.psum(jnp.squeeze(x, leaf.at), (*over, *leaf.across))

        return self._moved(local, "scattered" if scattered else "stacked", "state")(grads)

    def join_micros(self, x_MB: jax.Array) -> jax.Array:
        """(M, B, ...) -> (M * B, ...), the rows of each replica together, micro by micro."""
        M, B = x_MB.shape[:2]
        x_RMb = x_MB.reshape(M, self.count, B // self.count, *x_MB.shape[2:]).swapaxes(0, 1)
        return x_RMb.reshape(M * B, *x_MB.shape[2:])

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
        after = PartitionSpec(
            (*self._batch, *leaf.across), *before[1:dim], None, *before[dim + 1 :]
        )

        def local(x: jax.Array) -> jax.Array:
            return jax.lax.all_gather(x.astype(self.dtype), self._zero, axis=dim, tiled=True)

        def back(g: jax.Array) -> jax.Array:
            g = g.astype(jnp.float32)
            return jax.lax.psum_scatter(g, self._zero, scatter_dimension=dim, tiled=True)

        @jax.custom_vjp
        def gather(x: jax.Array) -> jax.Array:
            return self._manual(local, before, after)(x)

        def backward(_: None, g: jax.Array) -> tuple[jax.Array]:
            return (self._manual(back, after, before)(g),)

        gather.defvjp(lambda x: (gather(x), None), backward)
        return gather

    def _constrain(self, x: jax.Array, axes: Axes) -> jax.Array:
        """The layout of an activation within `each`; positions that do not divide stay together."""
        split = shape_of(self.mesh).over(self._inner.mesh_axes(SEQUENCE))
        named = zip(axes, x.shape, strict=True)
        spec = self._inner.spec([None if a == SEQUENCE and n % split else a for a, n in named])
        manual = jax.sharding.get_abstract_mesh().manual_axes
        return jax.lax.with_sharding_constraint(
            x, spec if manual else NamedSharding(self.mesh, spec)
        )

    def _moved(self, local: Callable[[jax.Array, _Leaf], jax.Array], a: str, b: str) -> Callable:
        """`local` on every leaf's shards, which lie as its field `a` says and go as `b` says."""

        def specs(field: str) -> Params:
            return jax.tree.map(lambda leaf: getattr(leaf, field), self._leaves)

        def all_leaves(tree: Params) -> Params:
            return jax.tree.map(local, tree, self._leaves)

        return self._manual(all_leaves, specs(a), specs(b))

    def _manual(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """shard_map over all axes, or over those that are left inside a pipeline's stage."""
        outer = jax.sharding.get_abstract_mesh().manual_axes
        where: Any = {"axis_names": set(AXES) - set(outer)} if outer else {"mesh": self.mesh}
        return jax.shard_map(
            function, in_specs=(in_specs,), out_specs=out_specs, check_vma=False, **where
        )


def _leaf(
    layout: Layout, state: Layout, across: tuple[str, ...], zero: tuple[str, ...], axes: Axes
) -> _Leaf:
    """`across`: the stages, where each of them works with a copy of what is not in layers."""
    weight, held = layout.spec(axes), state.spec(axes)
    at = 1 if axes[:1] == (LAYERS,) else 0
    across = () if at else across
    gathered = any(_names(entry) == zero for entry in weight)
    dims = [i for i, entry in enumerate(held) if _names(entry) == zero]
    batch = layout.mesh_axes(BATCH)
    outer = tuple(axis for axis in batch if axis not in zero)
    stack = (*(outer if gathered else batch), *across)
    parts = (*(outer if dims else batch), *across)
    return _Leaf(
        weight=weight,
        state=held,
        stacked=PartitionSpec(*weight[:at], stack, *weight[at:]),
        scattered=PartitionSpec(*held[:at], parts, *held[at:]),
        at=at,
        across=across,
        gathered=gathered,
        shard=dims[0] + 1 if dims else None,
    )


def _filled(x_Rb: jax.Array, multiple: int) -> jax.Array:
    """Rows of zeros added to those of each replica, up to a multiple."""
    missing = -x_Rb.shape[1] % multiple
    return jnp.pad(x_Rb, [(0, 0), (0, missing)] + [(0, 0)] * (x_Rb.ndim - 2))


def _names(entry: Any) -> tuple[str, ...]:
    return entry if isinstance(entry, tuple) else (entry,) if entry else ()
