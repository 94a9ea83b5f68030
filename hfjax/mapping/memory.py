# SPDX-License-Identifier: Apache-2.0
"""Bytes a device holds of a model under a layout, by arithmetic alone.

Arrays are exact: they follow the tables of meshes.layouts and what hfjax.engine.replicas does with
them. Temporaries are what the programs keep for their backward pass and the largest that is live
beside it. A MeshShape has its six axes here, as RolePlacement.mesh_shape gives it, and `cfg` the
padded vocabulary of its layout.
"""

import math
from dataclasses import dataclass
from functools import cache, lru_cache

import jax

from hfjax.engine.passes import PASS_TOKENS
from hfjax.engine.pipeline import STAGES
from hfjax.models.llama import Head, ModelConfig, abstract_params
from meshes.layouts import (
    DS_CHAT,
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
from meshes.mesh import TENSOR, TENSOR_MICRO, MeshShape

CHUNK = 128  # positions whose logits exist at a time (hfjax.engine.scoring)
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


@dataclass(frozen=True)
class Activations:
    """Temporaries of a program, bytes a device."""

    saved: int  # for the backward pass
    layer: int  # the most that one layer has live beside it
    head: int  # the same of the logits' chunk
    weights: int  # gathered for a layer, or cast

    @property
    def total(self) -> int:
        return self.saved + max(self.layer, self.head) + self.weights


def activation_bytes(
    cfg: ModelConfig,
    head: Head,
    shape: MeshShape,
    *,
    rows: int,
    tokens: int,
    micros: int = 1,
    remat: str = "none",
    zero: int = 3,
    relay: str = HYBRID,
    sequence_parallel: bool = False,
    itemsize: int = 2,
    fused_attention: bool = False,
    backward: bool = True,
) -> Activations:
    """Temporaries of the program that adds up gradients, or of a scoring pass.

    `rows` of one replica's micro-batch, `micros` in flight in a pipeline.
    """
    t = 1 if relay == DS_CHAT else shape.over((TENSOR, TENSOR_MICRO))
    p = shape.over(STAGES)
    s = t if sequence_parallel else 1
    x = rows * tokens * cfg.embed * itemsize // s
    kv_shards = shape.over(layouts(cfg, shape, zero, relay)[0].mesh_axes(KV_HEADS))
    q = rows * tokens * cfg.heads * cfg.head_dim * itemsize // t
    kv = 2 * rows * tokens * cfg.kv_heads * cfg.head_dim * itemsize // kv_shards
    f = rows * tokens * cfg.mlp * itemsize // t
    scores = 0 if fused_attention else rows * (cfg.heads // t) * tokens**2
    inside = {  # what the backward pass of one layer reads
        "none": 4 * x + 3 * q + 2 * kv + 4 * f + scores * (F32 + itemsize),
        "dots": 3 * x + 2 * q + 2 * kv + 3 * f,
        "layer": x,
    }
    whole = inside["none"]
    layers = cfg.layers // p
    saved = 0
    if backward:
        saved = layers * inside[remat]
        if p > 1:
            saved += (micros + p - 1) * x + 2 * micros * x
    working = whole + scores * F32 + 2 * f if backward else 2 * x + 2 * q + kv + 2 * f
    working += 0 if backward else 2 * scores * F32
    chunk = rows * min(CHUNK, tokens)
    if p > 1:
        chunk = -(-rows * micros // p) * min(CHUNK, tokens)
    logits = 3 * chunk * cfg.padded_vocab // t * F32 if head == "lm" else 0
    return Activations(saved, working, logits, 0)


def apply_bytes(
    cfg: ModelConfig, head: Head, shape: MeshShape, *, zero: int = 3, relay: str = HYBRID
) -> int:
    """Temporaries of the program that updates the state, of gradients in its layout."""
    return training_bytes(cfg, head, shape, zero=zero, relay=relay).reduced


def pass_rows(rows: int, tokens: int) -> int:
    """Rows of one scoring pass, of a replica's `rows` (hfjax.engine.passes)."""
    return max(1, min(rows, PASS_TOKENS // tokens))


def relay_temporary_bytes(
    cfg: ModelConfig,
    shape: MeshShape,
    *,
    zero: int = 3,
    relay: str = HYBRID,
    itemsize: int = 2,
) -> int:
    """Temporaries of the largest bucket."""
    return BUCKET_BYTES
