# SPDX-License-Identifier: Apache-2.0
"""Layouts: strict tables from a parameter's logical axes to mesh axes, checked before compiling."""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshes.mesh import (
    AXES,
    DATA,
    FSDP,
    PIPE,
    PIPE_MICRO,
    TENSOR,
    TENSOR_MICRO,
    MeshShape,
    shape_of,
)

LAYERS = "layers"
EMBED = "embed"
HEADS = "heads"
KV_HEADS = "kv_heads"
HEAD_DIM = "head_dim"
MLP = "mlp"
VOCAB = "vocab"
NORM = "norm"
BATCH = "batch"
SEQUENCE = "sequence"  # positions of the residual stream
LOGICAL = (LAYERS, EMBED, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB, NORM, BATCH, SEQUENCE)

HYBRID = "hybrid"  # HybridFlow: generation groups keep the outer halves
HYBRID_V = "hybrid-v"  # consecutive groups; gathered over all of p and t, then cut (§5.4)
HYBRID_V_PERMUTE = "hybrid-v-permute"  # the same layouts, moved as the compiler likes
DS_CHAT = "ds-chat"  # ZeRO-3 over all devices, then tensor parallel (DeepSpeed-Chat)
SHARED = "shared"  # one layout for both (NeMo-Aligner)
TWO_COPIES = "two-copies"  # generation on a pool of its own, every weight sent there (OpenRLHF)
RELAYS = (HYBRID, HYBRID_V, HYBRID_V_PERMUTE, DS_CHAT, SHARED, TWO_COPIES)
ON_ONE_POOL = RELAYS[:-1]  # modes that compile to programs of one mesh
ZERO = (1, 2, 3)  # stages of ZeRO over the mesh axis `fsdp`

Rule = str | tuple[str, ...] | None
Axes = tuple[str | None, ...]

# What a user writes for both halves of a split axis.
SETTING_OF = {PIPE_MICRO: PIPE, TENSOR_MICRO: TENSOR}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Layout:
    """A rule for every logical axis: one mesh axis, several (outer to inner), or None (replicated).

    Activations name batch, heads, mlp or vocab and leave the model width None: `embed` is
    sharded over an axis that the batch uses too.
    """

    name: str
    rules: Mapping[str, Rule]

    def __post_init__(self) -> None:
        for logical in self.rules:
            if logical not in LOGICAL:
                raise ValueError(_unknown(self.name, "logical", logical, LOGICAL))
        missing = [logical for logical in LOGICAL if logical not in self.rules]
        if missing:
            raise ValueError(
                f"layout {self.name!r} has no rule for {', '.join(missing)}; "
                "map each to mesh axes, or to None to replicate it"
            )
        for logical in LOGICAL:
            for axis in self.mesh_axes(logical):
                if axis not in AXES:
                    raise ValueError(_unknown(self.name, "mesh", axis, AXES))

    def mesh_axes(self, logical: str) -> tuple[str, ...]:
        """Mesh axes that shard a logical axis, outer to inner; empty when it is replicated."""
        if logical not in self.rules:
            raise ValueError(_unknown(self.name, "logical", logical, LOGICAL))
        rule = self.rules[logical]
        if rule is None:
            return ()
        return (rule,) if isinstance(rule, str) else tuple(rule)

    def spec(self, axes: Sequence[str | None]) -> PartitionSpec:
        """The PartitionSpec of an array with these logical axes; a None entry is not sharded."""
        entries = [() if logical is None else self.mesh_axes(logical) for logical in axes]
        used = [axis for entry in entries for axis in entry]
        for axis in used:
            if used.count(axis) > 1:
                raise ValueError(
                    f"layout {self.name!r} would shard two dimensions of {tuple(axes)} over "
                    f"mesh axis {axis!r}; write None for one of them"
                )
        return PartitionSpec(*(entry or None for entry in entries))


def train_layout(
    shape: MeshShape,
    *,
    kv_heads: int,
    zero: int = 3,
    relay: str = "hybrid",
    sequence_parallel: bool = False,
) -> Layout:
    """3D parallel training and scoring; `data` shards the batch only, `fsdp` what `zero` says.

    Stages of ZeRO (arXiv 1910.02054 §5): 1 the optimizer's state, 2 the gradients too, 3 the
    weights too, which is FSDP. This is the layout of the weights; state_layout gives the state's.
    With `sequence_parallel` the tensor axes split positions between the matrix products
    (arXiv 2205.05198 §4.2.2).
    """
    if zero not in ZERO:
        raise ValueError(f"zero = {zero}: stages of ZeRO are {either(ZERO)}")
    tensor = () if relay == DS_CHAT else (TENSOR, TENSOR_MICRO)
    return Layout(
        "train",
        {
            LAYERS: (PIPE, PIPE_MICRO),
            EMBED: zero_axes(relay) if zero == 3 else None,
            HEADS: tensor,
            KV_HEADS: _kv_axes(tensor, shape, kv_heads),
            HEAD_DIM: None,
            MLP: tensor,
            VOCAB: tensor,
            NORM: None,
            BATCH: train_batch(relay),
            SEQUENCE: tensor if sequence_parallel else None,
        },
    )


def state_layout(weights: Layout, relay: str = "hybrid") -> Layout:
    """Where master weights, moments and reduced gradients lie, for any stage of ZeRO."""
    return Layout(f"{weights.name} state", {**weights.rules, EMBED: zero_axes(relay)})


def zero_axes(relay: str = "hybrid") -> tuple[str, ...]:
    """Mesh axes over which ZeRO shards; under ds-chat generation's tensor axis is one of them."""
    return (FSDP, TENSOR) if relay == DS_CHAT else (FSDP,)


def train_batch(relay: str = "hybrid") -> tuple[str, ...]:
    """Mesh axes that split the rows while training or scoring."""
    return (DATA, *zero_axes(relay))


def generate_batch(relay: str = "hybrid") -> tuple[str, ...]:
    """Mesh axes that split the rows while generating."""
    kept = kept_axes(relay)
    return tuple(axis for axis in AXES if axis not in kept)


def kept_axes(relay: str = "hybrid") -> tuple[str, str]:
    """The halves of p and t that shard weights in generation: of sizes p_g and t_g.

    HybridFlow keeps the outer halves (§5.3), HybridFlow-V the inner ones: consecutive devices.
    """
    return (PIPE_MICRO, TENSOR_MICRO) if relay in (HYBRID_V, HYBRID_V_PERMUTE) else (PIPE, TENSOR)


def generate_layout(shape: MeshShape, *, kv_heads: int, relay: str = "hybrid") -> Layout:
    """Generation: the weights leave `fsdp` and the dropped halves, which go to the batch.

    With relay "hybrid" each device's shard contains its training shard, so moving there is
    all-gathers over fsdp and inside micro-DP groups, and nothing else (HybridFlow §5.3).
    """
    pipe, tensor = kept_axes(relay)
    return Layout(
        "generate",
        {
            LAYERS: pipe,
            EMBED: None,
            HEADS: tensor,
            KV_HEADS: _kv_axes((tensor,), shape, kv_heads),
            HEAD_DIM: None,
            MLP: tensor,
            VOCAB: tensor,
            NORM: None,
            BATCH: generate_batch(relay),
            SEQUENCE: None,
        },
    )


def shardings(mesh: Mesh, layout: Layout, axes_tree: Any) -> Any:
    """A tree of NamedSharding from a tree whose leaves are tuples of logical axes."""
    return jax.tree.map(
        lambda axes: NamedSharding(mesh, layout.spec(axes)), axes_tree, is_leaf=is_axes
    )


def batch_sharding(mesh: Mesh, layout: Layout) -> NamedSharding:
    """Sharding of arrays whose first dimension is rows of the batch."""
    return NamedSharding(mesh, layout.spec((BATCH,)))


def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding of arrays that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def is_axes(node: Any) -> bool:
    """Whether a node of an axes tree is a leaf: a plain tuple of logical axes."""
    return type(node) is tuple and all(entry is None or isinstance(entry, str) for entry in node)


def check(mesh: Mesh | MeshShape, layout: Layout, shapes_tree: Any, axes_tree: Any) -> None:
    """Raises one ValueError with every axis that does not divide, its numbers and a legal choice.

    `shapes_tree` has arrays or ShapeDtypeStructs where `axes_tree` has tuples of logical axes.
    """
    shape = shape_of(mesh) if isinstance(mesh, Mesh) else mesh
    sizes = _logical_sizes(shapes_tree, axes_tree)
    for logical in sizes:
        layout.mesh_axes(logical)  # an unknown axis is refused before anything is counted
    problems = _indivisible(shape, layout, sizes)
    if problems:
        raise ValueError(f"layout {layout.name!r} on mesh {shape}: " + "; ".join(problems))
    _warn_replicated_kv(shape, layout, sizes)


def _kv_axes(candidates: tuple[str, ...], shape: MeshShape, kv_heads: int) -> tuple[str, ...]:
    """The outer part of `candidates` whose product divides kv_heads; the rest replicates.

    Training stops where generation stops: were `tensor` skipped and `tensor_micro` used, a
    device's training shard would not lie inside its generation shard.
    """
    for count in range(len(candidates), 0, -1):
        if kv_heads % math.prod(getattr(shape, axis) for axis in candidates[:count]) == 0:
            return candidates[:count]
    return ()


def _logical_sizes(shapes_tree: Any, axes_tree: Any) -> dict[str, set[int]]:
    """Every size each logical axis has in the tree."""
    sizes: dict[str, set[int]] = {}

    def add(path: Any, axes: Axes, leaf: Any) -> None:
        if len(axes) != len(leaf.shape):
            raise ValueError(
                f"parameter {jax.tree_util.keystr(path)} has shape {tuple(leaf.shape)} "
                f"but logical axes {axes}"
            )
        for logical, size in zip(axes, leaf.shape, strict=True):
            if logical is not None:
                sizes.setdefault(logical, set()).add(size)

    jax.tree_util.tree_map_with_path(add, axes_tree, shapes_tree, is_leaf=is_axes)
    return sizes


def _indivisible(shape: MeshShape, layout: Layout, sizes: Mapping[str, set[int]]) -> list[str]:
    """One message a setting: which sizes it does not divide and which values divide them all."""
    mapped: dict[str, list[tuple[str, int, int]]] = {}  # setting -> (logical, size, divisor)
    for logical in LOGICAL:
        axes = layout.mesh_axes(logical)
        values = sizes.get(logical, ())
        if axes and values:
            divisor = math.prod(getattr(shape, axis) for axis in axes)
            setting = SETTING_OF.get(axes[0], axes[0])
            mapped.setdefault(setting, []).extend((logical, v, divisor) for v in sorted(values))
    problems = []
    for setting, dims in mapped.items():
        bad = [(logical, size, divisor) for logical, size, divisor in dims if size % divisor]
        if bad:
            # kv heads that divide already do so by their own rule: they need not divide more.
            common = math.gcd(*(size for name, size, n in dims if name != KV_HEADS or size % n))
            legal = either(divisors(common, most=shape.devices))
            wrong = ", ".join(f"{logical}={size}" for logical, size, _ in bad)
            problems.append(f"{setting}={bad[0][2]} does not divide {wrong}; use {setting} {legal}")
    return problems


def _warn_replicated_kv(shape: MeshShape, layout: Layout, sizes: Mapping[str, set[int]]) -> None:
    heads = math.prod(getattr(shape, axis) for axis in layout.mesh_axes(HEADS))
    kv = math.prod(getattr(shape, axis) for axis in layout.mesh_axes(KV_HEADS))
    if KV_HEADS in sizes and kv < heads:
        _warn_once(
            f"layout {layout.name!r}: tensor={heads} does not divide "
            f"kv_heads={min(sizes[KV_HEADS])}: sharded {kv} ways, {heads // kv} copies of each"
        )


@cache
def _warn_once(message: str) -> None:
    log.warning(message)


def divisors(whole: int, most: int | None = None) -> list[int]:
    """The legal sizes of an axis that must divide `whole`, up to `most`."""
    return [n for n in range(1, (most or whole) + 1) if whole % n == 0]


def either(choices: Iterable[object]) -> str:
    """Choices as a message spells them: `1, 2 or 4`."""
    words = [str(choice) for choice in choices]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _unknown(layout: str, kind: str, axis: str, legal: Sequence[str]) -> str:
    return f"layout {layout!r}: unknown {kind} axis {axis!r}; use one of {', '.join(legal)}"
