# SPDX-License-Identifier: Apache-2.0
"""Bytes a device that programs need besides what they read and give: their temporaries.

By arithmetic, part by part, as the compiler for CPUs plans them: it writes attention scores out,
computes products of halves in float32, and copies the weights that a loop over layers reads. With
`fused_attention`, of a GPU, these parts are left out.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from hfjax.engine.pipeline import STAGES
from hfjax.mapping.memory import (
    F32,
    kv_bytes,
    layouts,
    leaves,
    shard_bytes,
    shard_size,
    shards_of,
    training_bytes,
)
from hfjax.models.llama import Head, ModelConfig
from meshes.layouts import (
    EMBED,
    HEADS,
    HYBRID,
    KV_HEADS,
    LAYERS,
    VOCAB,
    Layout,
    divisors,
    zero_axes,
)
from meshes.mesh import MeshShape

CHUNK = 128  # positions whose logits exist at a time, at most (hfjax.engine.scoring)


@dataclass(frozen=True)
class Activations:
    """Temporaries of a program, bytes a device; they add up, but for `layer` and `head`."""

    saved: int  # for the backward pass
    layer: int  # the most that one layer has live beside it
    head: int  # the same of the logits' chunk
    gradients: int = 0  # of one micro-batch, before they are added to the sums
    stages: int = 0  # rows that enter and leave a pipeline
    copies: int = 0  # of the layers' weights: the CPU compiler's, which loops read
    widened: int = 0  # weights in float32: the CPU compiler's, whose products are of float32

    @property
    def total(self) -> int:
        kept = self.saved + self.gradients + self.stages + self.copies + self.widened
        return kept + max(self.layer, self.head)


@dataclass(frozen=True)
class _Sizes:
    """Bytes of what one layer works on, a device."""

    residual: int  # x_BTD, in its part of the positions where they are split
    whole: int  # the same of all positions
    queries: int
    keys_values: int
    mlp: int
    scores: int  # float32, all of them

    @property
    def of(self) -> dict[str, int]:
        """Kept for a layer's backward pass, by remat; scores twice, in float32 and in halves."""
        norms = 4 * self.residual  # two in float32
        products = self.queries + self.keys_values
        return {
            "none": norms
            + 4 * self.residual
            + 2 * self.queries
            + self.keys_values
            + 6 * self.mlp
            + self.scores * 3 // 2,
            "dots": 2 * self.residual + products + 2 * self.mlp,
            "layer": self.residual,
        }


def _sizes(
    cfg: ModelConfig,
    layout: Layout,
    shape: MeshShape,
    rows: int,
    tokens: int,
    itemsize: int,
    sequence_parallel: bool,
) -> _Sizes:
    t, kv = (shape.over(layout.mesh_axes(axis)) for axis in (HEADS, KV_HEADS))
    a = rows * tokens * itemsize
    return _Sizes(
        residual=a * cfg.embed // (t if sequence_parallel else 1),
        whole=a * cfg.embed,
        queries=a * cfg.heads * cfg.head_dim // t,
        keys_values=2 * a * cfg.kv_heads * cfg.head_dim // kv,
        mlp=a * cfg.mlp // t,
        scores=F32 * rows * (cfg.heads // t) * tokens**2,
    )


@lru_cache(maxsize=65536)
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
    cpu: bool = True,
    backward: bool = True,
    trained: bool = True,
) -> Activations:
    """Temporaries of the program that adds up gradients, or of a scoring pass.

    `rows` of one replica's micro-batch, or of its pass; `micros` are in flight in a pipeline. With
    `fused_attention` there are no scores; only the `cpu` compiler has products in float32, and
    copies of weights. A role that is not `trained` reads weights in the dtype of computation,
    under ZeRO-3 too.
    """
    weights, state, _ = layouts(cfg, shape, zero, relay)
    p = shape.over(STAGES)
    if not backward:
        micros = math.gcd(p, rows)
        rows //= micros
    size = _sizes(cfg, weights, shape, rows, tokens, itemsize, sequence_parallel)
    if fused_attention:
        size = replace(size, scores=0)
    gathers = zero == 3 and shape.over(zero_axes(relay)) > 1
    read = F32 if gathers and trained else itemsize
    stacked = sum(shard_size(leaf, weights, shape) for leaf in leaves(cfg, head) if leaf.stacked)
    whole = shard_bytes(cfg, head, weights, shape, F32 if gathers else itemsize)
    inside = size.of[remat] * (cfg.layers // p)
    in_flight = micros * size.whole if p > 1 else 0
    ticks = (micros + p - 1) * size.whole if p > 1 else 0
    per_layer = _gathered_layer(cfg, head, state, shape, relay)
    logits = _logits(cfg, head, weights, shape, -(-rows * micros // p), tokens)
    return Activations(
        saved=inside + ticks if backward else 0,
        layer=_layer(size, F32 // itemsize if cpu else 1, backward=backward),
        head=(3 if backward else 2) * logits,
        gradients=whole + (stacked * itemsize if p > 1 else 0) if backward else 0,
        stages=(3 if backward else 2) * in_flight,
        copies=stacked * read if cpu else 0,
        widened=F32 * (per_layer + _head_size(cfg, head, weights, shape)) if cpu else 0,
    )


def _layer(size: _Sizes, wide: int, *, backward: bool) -> int:
    """Attention or MLP, whichever has more live; products are `wide` times the dtype's width."""
    if not backward:
        return max(3 * size.scores + size.whole, wide * (3 * size.mlp + 2 * size.whole))
    attention = 6 * size.scores + wide * (4 * size.queries + 2 * size.whole)
    return max(attention, wide * (5 * size.mlp + 3 * size.whole))


def _logits(
    cfg: ModelConfig, head: Head, layout: Layout, shape: MeshShape, rows: int, tokens: int
) -> int:
    """One chunk's, float32."""
    vocab = cfg.padded_vocab // shape.over(layout.mesh_axes(VOCAB))
    return F32 * rows * chunk_of(tokens)[0] * vocab if head == "lm" else 0


def chunk_of(tokens: int) -> tuple[int, int]:
    """Positions whose logits exist at a time, and how often."""
    chunks = -(-tokens // CHUNK)
    return -(-tokens // chunks), chunks


def _gathered_layer(
    cfg: ModelConfig, head: Head, state: Layout, shape: MeshShape, relay: str
) -> int:
    """Elements of one layer's weights as a device computes with them."""
    zero = shape.over(zero_axes(relay))
    stacked = (leaf for leaf in leaves(cfg, head) if leaf.stacked)
    sizes = (shard_size(x, state, shape) * (zero if EMBED in x.axes else 1) for x in stacked)
    return sum(sizes) * shape.over(STAGES) // cfg.layers


def _head_size(cfg: ModelConfig, head: Head, layout: Layout, shape: MeshShape) -> int:
    """Elements of the matrix that makes the logits."""
    vocab = cfg.padded_vocab // shape.over(layout.mesh_axes(VOCAB))
    return cfg.embed * vocab if head == "lm" else 0


def prefill_bytes(
    cfg: ModelConfig,
    shape: MeshShape,
    *,
    rows: int,
    tokens: int,
    relay: str = HYBRID,
    itemsize: int = 2,
    fused_attention: bool = False,
    cpu: bool = True,
) -> int:
    """Temporaries of the prompts' pass, `rows` of a replica of generation; caches are outputs."""
    layout = layouts(cfg, shape, 3, relay)[2]
    stages = shape.over(layout.mesh_axes(LAYERS))
    if stages > 1:
        rows //= divisors(rows, most=stages)[-1]
    size = _sizes(cfg, layout, shape, rows, tokens, itemsize, False)
    if fused_attention:
        size = replace(size, scores=0)
    if not cpu:
        return _layer(size, 1, backward=False) + 2 * size.whole
    weights = F32 * (_generating_layer(cfg, shape, relay) + _head_size(cfg, "lm", layout, shape))
    return _layer(size, F32 // itemsize, backward=False) + size.whole + weights


def decode_bytes(
    cfg: ModelConfig,
    shape: MeshShape,
    *,
    rows: int,
    slots: int,
    relay: str = HYBRID,
    itemsize: int = 2,
    cpu: bool = True,
) -> int:
    """Temporaries of a segment of tokens: logits and noise; on a CPU what it reads, in float32."""
    layout = layouts(cfg, shape, 3, relay)[2]
    vocab = cfg.padded_vocab // shape.over(layout.mesh_axes(VOCAB))
    logits = 3 * F32 * rows * vocab
    if not cpu:
        return logits
    stages = shape.over(layout.mesh_axes(LAYERS))
    micros = divisors(rows, most=stages)[-1] if stages > 1 else 1
    kv = kv_bytes(cfg, shape, rows=rows // micros, slots=slots, relay=relay, itemsize=F32)
    kv //= cfg.layers // stages
    layer = _generating_layer(cfg, shape, relay)
    return logits + kv + F32 * (layer + _head_size(cfg, "lm", layout, shape))


def _generating_layer(cfg: ModelConfig, shape: MeshShape, relay: str) -> int:
    """Elements of one layer's weights in the layout of generation."""
    layout = layouts(cfg, shape, 3, relay)[2]
    mine = cfg.layers // shape.over(layout.mesh_axes(LAYERS))
    found = (leaf for leaf in leaves(cfg, "lm") if leaf.stacked)
    return sum(shard_size(leaf, layout, shape) for leaf in found) // mine


def apply_bytes(
    cfg: ModelConfig, head: Head, shape: MeshShape, *, zero: int = 3, relay: str = HYBRID
) -> int:
    """Temporaries of the program that updates the state: the update, and copies of most leaves."""
    return training_bytes(cfg, head, shape, zero=zero, relay=relay).reduced * 5 // 3


def reduce_bytes(
    cfg: ModelConfig, head: Head, shape: MeshShape, *, zero: int = 3, relay: str = HYBRID
) -> int:
    """Temporaries of the sum over replicas: under ZeRO-1 gradients turned for reduce-scatters."""
    if zero > 1 or shape.over(zero_axes(relay)) == 1:
        return 0
    weights = layouts(cfg, shape, zero, relay)[0]
    sizes = [F32 * shard_size(leaf, weights, shape) for leaf in leaves(cfg, head)]
    return sum(sizes) - max(sizes)


def cast_bytes(
    cfg: ModelConfig,
    head: Head,
    shape: MeshShape,
    *,
    zero: int = 3,
    relay: str = HYBRID,
    itemsize: int = 2,
) -> int:
    """Temporaries of the weights' copy: under ZeRO-1 and 2 what is cast before it is gathered."""
    if shape.over(zero_axes(relay)) == 1:
        return 0
    weights, state, _ = layouts(cfg, shape, zero, relay)
    largest = max(shard_size(leaf, weights, shape) for leaf in leaves(cfg, head))
    return itemsize * largest + shard_bytes(cfg, head, state, shape, itemsize)


def relay_temporary_bytes(
    cfg: ModelConfig, shape: MeshShape, *, zero: int = 3, relay: str = HYBRID, itemsize: int = 2
) -> int:
    """Temporaries of the largest bucket: a gather of any dimension but the first is turned."""
    before, _, after = layouts(cfg, shape, zero, relay)
    turned = (
        shard_size(leaf, after, shape)
        for leaf in leaves(cfg, "lm")
        if shards_of(leaf, before, shape)[1:] != shards_of(leaf, after, shape)[1:]
    )
    return itemsize * max(turned, default=0)
