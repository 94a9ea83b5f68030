# SPDX-License-Identifier: Apache-2.0
"""Bytes a device holds of a model under a layout, by arithmetic alone.

Exact: it follows the tables of meshes.layouts and what hfjax.engine.replicas does with them; what
programs need besides is in temporaries.py. A MeshShape has its six axes here, as
RolePlacement.mesh_shape gives it, and `cfg` the padded vocabulary of its layout.
"""

import math
from dataclasses import dataclass
from functools import cache, lru_cache

import jax

from hfjax.engine.passes import PASS_TOKENS
from hfjax.models.llama import Head, ModelConfig, abstract_params
from meshes.layouts import (
    EMBED,
    HYBRID,
    KV_HEADS,
    LAYERS,
    Axes,
    Layout,
    generate_layout,
    is_axes,
    state_layout,
    train_layout,
    zero_axes,
)
from meshes.mesh import MeshShape

BUCKET_BYTES = 2**28  # of a relay (hfjax.engine.hybrid)
F32 = 4


@dataclass(frozen=True)
class Leaf:
    """One parameter."""

    name: str
    shape: tuple[int, ...]
    axes: Axes  # logical

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def stacked(self) -> bool:
        """Whether it is one of the layers'."""
        return self.axes[:1] == (LAYERS,)


@dataclass(frozen=True)
class Held:
    """Bytes a device that a trained role holds while it is updated."""

    weights: int  # a copy to compute with; 0 where passes read the master itself
    gradients: int  # float32 sums, as micro-batches add to them
    reduced: int  # their sum over the replicas, which stands beside them for a moment
    optimizer: int  # float32 master and two moments

    @property
    def master(self) -> int:
        """Of the optimizer's part: the float32 weights."""
        return self.optimizer // 3

    @property
    def total(self) -> int:
        """While gradients are added up."""
        return self.weights + self.gradients + self.optimizer


@cache
def leaves(cfg: ModelConfig, head: Head) -> tuple[Leaf, ...]:
    """Every parameter, in the order of abstract_params."""
    shapes, axes = abstract_params(cfg, head)
    named = jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_axes)
    pairs = zip(named, jax.tree.leaves(shapes), strict=True)
    return tuple(Leaf(path[-1].key, tuple(shape.shape), own) for (path, own), shape in pairs)


@lru_cache(maxsize=4096)
def layouts(
    cfg: ModelConfig, shape: MeshShape, zero: int = 3, relay: str = HYBRID
) -> tuple[Layout, Layout, Layout]:
    """Of training weights, of the training state, of generation, as hfjax.engine makes them."""
    weights = train_layout(shape, kv_heads=cfg.kv_heads, zero=zero, relay=relay)
    if shape.over(zero_axes(relay)) > 1:
        state = state_layout(weights, relay)
    else:
        weights = state = Layout(weights.name, {**weights.rules, EMBED: None})
    return weights, state, generate_layout(shape, kv_heads=cfg.kv_heads, relay=relay)


def shard_size(leaf: Leaf, layout: Layout, shape: MeshShape) -> int:
    """Elements of one device's part of a parameter."""
    over = (shape.over(layout.mesh_axes(axis)) for axis in leaf.axes if axis)
    return leaf.size // math.prod(over)


def shard_bytes(
    cfg: ModelConfig, head: Head, layout: Layout, shape: MeshShape, itemsize: int
) -> int:
    """One device's part of all parameters."""
    return itemsize * sum(shard_size(leaf, layout, shape) for leaf in leaves(cfg, head))


@lru_cache(maxsize=4096)
def training_bytes(
    cfg: ModelConfig,
    head: Head,
    shape: MeshShape,
    *,
    zero: int = 3,
    relay: str = HYBRID,
    itemsize: int = 2,
) -> Held:
    """What an update holds beside its temporaries (ZeRO, arXiv 1910.02054 §5)."""
    weights, state, _ = layouts(cfg, shape, zero, relay)
    whole, sharded = (shard_bytes(cfg, head, layout, shape, 1) for layout in (weights, state))
    return Held(
        weights=0 if reads_master(shape, zero, relay, itemsize) else itemsize * whole,
        gradients=F32 * (sharded if zero > 1 else whole),
        reduced=F32 * sharded,
        optimizer=3 * F32 * sharded,
    )


def reads_master(shape: MeshShape, zero: int, relay: str, itemsize: int) -> bool:
    """Whether passes of a trained role read the master weights: ZeRO-3, or float32 throughout."""
    sharded = shape.over(zero_axes(relay)) > 1
    return (sharded and zero == 3) or (not sharded and itemsize == F32)


def weight_bytes(
    cfg: ModelConfig,
    head: Head,
    shape: MeshShape,
    *,
    zero: int = 3,
    relay: str = HYBRID,
    itemsize: int = 2,
) -> int:
    """What a role that only infers holds, or one layout's weights in any dtype."""
    return shard_bytes(cfg, head, layouts(cfg, shape, zero, relay)[0], shape, itemsize)


def generation_bytes(
    cfg: ModelConfig, shape: MeshShape, *, relay: str = HYBRID, itemsize: int = 2
) -> int:
    """Weights in the layout of generation: Table 2's M / (t_g p_g)."""
    return shard_bytes(cfg, "lm", layouts(cfg, shape, 3, relay)[2], shape, itemsize)


def relay_peak_bytes(
    cfg: ModelConfig, shape: MeshShape, *, relay: str = HYBRID, itemsize: int = 2
) -> int:
    """Most that weights take while they move: those of generation and one bucket in both layouts.

    Of a relay whose generation shards contain the training shards (hybrid); others keep both.
    """
    after = generation_bytes(cfg, shape, relay=relay, itemsize=itemsize)
    generate = layouts(cfg, shape, 3, relay)[2]
    sizes = (itemsize * shard_size(leaf, generate, shape) for leaf in leaves(cfg, "lm"))
    return after + max(BUCKET_BYTES, *sizes) if shape.devices > 1 else after


def kv_bytes(
    cfg: ModelConfig,
    shape: MeshShape,
    *,
    rows: int,
    slots: int,
    relay: str = HYBRID,
    itemsize: int = 2,
) -> int:
    """Keys and values of `rows` rows of one replica of generation, `slots` positions each."""
    layout = layouts(cfg, shape, 3, relay)[2]
    heads = cfg.kv_heads // shape.over(layout.mesh_axes(KV_HEADS))
    layers = cfg.layers // shape.over(layout.mesh_axes(LAYERS))
    return 2 * itemsize * layers * rows * slots * heads * cfg.head_dim


def relay_argument_bytes(
    cfg: ModelConfig, shape: MeshShape, *, zero: int = 3, relay: str = HYBRID, itemsize: int = 2
) -> int:
    """Training weights that a relay reads: those whose layout or dtype changes."""
    before, _, after = layouts(cfg, shape, zero, relay)
    read = F32 if reads_master(shape, zero, relay, itemsize) else itemsize
    return read * sum(
        shard_size(leaf, before, shape)
        for leaf in leaves(cfg, "lm")
        if read != itemsize or shards_of(leaf, before, shape) != shards_of(leaf, after, shape)
    )


def shards_of(leaf: Leaf, layout: Layout, shape: MeshShape) -> list[int]:
    """Parts of each dimension."""
    return [shape.over(layout.mesh_axes(axis)) if axis else 1 for axis in leaf.axes]


def pass_rows(rows: int, tokens: int) -> int:
    """Rows of one scoring pass, of a replica's `rows` (hfjax.engine.passes)."""
    return max(1, min(rows, PASS_TOKENS // tokens))
