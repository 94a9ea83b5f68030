# SPDX-License-Identifier: Apache-2.0
"""Moves the actor's weights from the training layout to the generation layout (HybridFlow §5.3)."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from hfjax.models.llama import Params
from meshes.layouts import Layout, check, shardings


class Relay:
    """Compiled move between two layouts of one mesh.

    Because a device's generation shard contains its training shard, the compiler needs all-gathers
    and nothing else: inside micro-DP groups, and over `fsdp` where the training layout shards.
    """

    def __init__(
        self,
        mesh: Mesh,
        train_layout: Layout,
        generate_layout: Layout,
        shapes: Any,
        axes: Any,
        dtype: Any,
    ) -> None:
        """`shapes` are the training parameters (ShapeDtypeStructs), `dtype` that of generation."""
        for layout in (train_layout, generate_layout):
            check(mesh, layout, shapes, axes)
        leaves, self._treedef = jax.tree.flatten(shapes)
        self._dtype = jnp.dtype(dtype)
        self._sizes = [leaf.shape for leaf in leaves]
        self._train = jax.tree.leaves(shardings(mesh, train_layout, axes))
        self._generate = jax.tree.leaves(shardings(mesh, generate_layout, axes))
        self._moved = [
            leaf.dtype != self._dtype or not before.is_equivalent_to(after, leaf.ndim)
            for leaf, before, after in zip(leaves, self._train, self._generate, strict=True)
        ]
        # nothing is donated: a shard that changes its size cannot give its buffer away
        self._move = jax.jit(self._cast, out_shardings=self._only_moved(self._generate))

    def to_generate(self, params: Params) -> Params:
        """The parameters in the generation layout and dtype.

        Where layout and dtype agree the arrays are the training ones, not copies: they live until
        the next update donates them, so generation weights are to be dropped before it.
        """
        leaves = self._treedef.flatten_up_to(params)
        moved = iter(self._move(self._only_moved(leaves)))
        results = [next(moved) if m else p for m, p in zip(self._moved, leaves, strict=True)]
        return self._treedef.unflatten(results)

    def bytes_moved(self) -> int:
        """Bytes a device has to receive: its generation shards less its training shards.

        The minimum, in the generation dtype, from shapes alone; a meter counts what is sent.
        """

        def count(leaf_shardings: list[Any]) -> int:
            pairs = zip(leaf_shardings, self._sizes, strict=True)
            return sum(math.prod(sharding.shard_shape(shape)) for sharding, shape in pairs)

        return (count(self._generate) - count(self._train)) * self._dtype.itemsize

    def _only_moved(self, leaves: list[Any]) -> list[Any]:
        return [leaf for moved, leaf in zip(self._moved, leaves, strict=True) if moved]

    def _cast(self, leaves: list[jax.Array]) -> list[jax.Array]:
        """Cast in the training layout: half the bytes move when generation is in half precision."""
        cast = [leaf.astype(self._dtype) for leaf in leaves]
        return jax.lax.with_sharding_constraint(cast, self._only_moved(self._train))
