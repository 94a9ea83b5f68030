# SPDX-License-Identifier: Apache-2.0
"""The 3D-HybridEngine: weights from the training layout to those of other calls (§5.3).

HybridFlow (arXiv 2409.19256). Where a device's generation shard contains its training shard the
way there is all-gathers over the axes that generation drops, the way back a slice without any.
A layout for scoring may be of another mesh: the way there is the compiler's, and there is no back.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hfjax.engine.offload import to_device, to_host
from hfjax.engine.replicas import Replicas
from hfjax.engine.train import TrainState
from hfjax.models.llama import Params
from meshes.layouts import Layout, check, is_axes
from meshes.mesh import AXES

BUCKET_BYTES = 2**28  # generation shards that move at a time; a parameter is never split


@dataclass(frozen=True)
class _Leaf:
    """One parameter's two layouts: mesh axes of each of its dimensions, outer to inner."""

    before: tuple[tuple[str, ...], ...]
    after: tuple[tuple[str, ...], ...]
    whole: bool  # gather over every training axis, also those that generation keeps, then cut

    @property
    def contained(self) -> bool:
        """Whether each device's generation shard holds its training shard."""
        return all(_begins(b, a) for b, a in zip(self.before, self.after, strict=True))

    def gathers(self) -> list[tuple[int, tuple[str, ...]]]:
        """(dimension, axes) to gather over, the outermost axis first: it moves the least then.

        Where generation shards a dimension by an inner axis, all of its axes are gathered, and the
        shard is cut out of the whole afterwards.
        """
        found = self._by_dim(lambda b, a: b[len(a) :] if self._keeps(b, a) else b)
        return sorted(found, key=lambda gather: AXES.index(gather[1][0]))

    def cuts(self) -> list[tuple[int, tuple[str, ...]]]:
        """(dimension, axes) to slice by after the gathers."""
        return self._by_dim(lambda b, a: () if self._keeps(b, a) else a)

    def cuts_back(self) -> list[tuple[int, tuple[str, ...]]]:
        """(dimension, axes) to slice by on the way back, of a leaf that is contained."""
        return self._by_dim(lambda b, a: b[len(a) :])

    def _keeps(self, before: tuple[str, ...], after: tuple[str, ...]) -> bool:
        return _begins(before, after) and not self.whole

    def _by_dim(self, axes_of: Callable) -> list[tuple[int, tuple[str, ...]]]:
        pairs = zip(self.before, self.after, strict=True)
        found = [(dim, axes_of(b, a)) for dim, (b, a) in enumerate(pairs)]
        return [(dim, axes) for dim, axes in found if axes]


class Relay:
    """Compiled moves between two layouts of one mesh, a bucket of parameters at a time.

    With `by_compiler` the way is left to XLA, which may permute shards instead of gathering; with
    `whole` each parameter is gathered over all axes that shard it in training, then cut, as
    HybridFlow-V does also where its groups happen to be HybridFlow's (Table 2).
    """

    def __init__(
        self,
        mesh: Mesh,
        train_layout: Layout,
        generate_layout: Layout,
        shapes: Any,
        axes: Any,
        dtype: Any,
        *,
        by_compiler: bool = False,
        whole: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """`shapes` are the training weights (ShapeDtypeStructs), `dtype` that of generation."""
        for layout in (train_layout, generate_layout):
            check(mesh, layout, shapes, axes)
        self._mesh, self._dtype, self._by_compiler = mesh, jnp.dtype(dtype), by_compiler
        self._shapes, self._treedef = jax.tree.flatten(shapes)
        names = jax.tree.leaves(axes, is_leaf=is_axes)
        self._leaves = [
            _Leaf(
                tuple(_sharding_axes(mesh, train_layout, name) for name in leaf),
                tuple(_sharding_axes(mesh, generate_layout, name) for name in leaf),
                whole,
            )
            for leaf in names
        ]
        self._train = [NamedSharding(mesh, train_layout.spec(leaf)) for leaf in names]
        self._generate = [NamedSharding(mesh, generate_layout.spec(leaf)) for leaf in names]
        self._buckets = list(self._cut_into_buckets(bucket_bytes))
        # Nothing is donated: a shard that changes its size cannot give its buffer away.
        self._there = [self._compiled(k, self._to_generate, self._generate) for k in self._buckets]
        self._back = [self._compiled(k, self._to_train, self._train) for k in self._buckets]

    @property
    def contained(self) -> bool:
        """Whether training weights can be sliced back out of those of generation, bit-equal."""
        same = all(shape.dtype == self._dtype for shape in self._shapes)
        return same and all(leaf.contained for leaf in self._leaves)

    @property
    def bucket_bytes(self) -> int:
        """Generation shards, in bytes a device, of the largest bucket."""
        return max((self._bytes(bucket, self._generate) for bucket in self._buckets), default=0)

    def bytes_moved(self) -> int:
        """Bytes a device has to receive: its generation shards less its training shards.

        The minimum, in the generation dtype, from shapes alone; a meter counts what is sent.
        """
        every = range(len(self._shapes))
        return self._bytes(every, self._generate) - self._bytes(every, self._train)

    def to_generate(self, weights: Params, *, release: bool = False) -> Params:
        """The weights in the generation layout and dtype.

        Where layout and dtype agree the arrays are the training ones, not copies. With `release`
        the others are deleted bucket by bucket: at most one bucket lies in both layouts.
        """
        return self._move(self._there, weights, release)

    def to_train(self, weights: Params, *, release: bool = False) -> Params:
        """The training weights, sliced out of those of generation where they contain them."""
        assert self.contained, "these layouts do not contain one another: keep the training weights"
        return self._move(self._back, weights, release)

    def lowered(self, weights: Params, *, back: bool = False) -> list[Any]:
        """The move of each bucket, lowered for a meter; `weights` may be ShapeDtypeStructs."""
        leaves = self._treedef.flatten_up_to(weights)
        programs = self._back if back else self._there
        pairs = zip(self._buckets, programs, strict=True)
        return [program.lower([leaves[i] for i in bucket]) for bucket, program in pairs]

    def _move(self, programs: list[Callable], weights: Params, release: bool) -> Params:
        leaves = list(self._treedef.flatten_up_to(weights))
        for bucket, program in zip(self._buckets, programs, strict=True):
            old = [leaves[i] for i in bucket]
            new = program(old)
            if release:
                jax.block_until_ready(new)  # the next bucket's buffers come after this one's
                for array in old:
                    array.delete()
            for i, array in zip(bucket, new, strict=True):
                leaves[i] = array
        return self._treedef.unflatten(leaves)

    def _cut_into_buckets(self, limit: int) -> Iterator[list[int]]:
        """Indices of the parameters that move, in order, at most `limit` bytes together."""
        bucket: list[int] = []
        for i, shape in enumerate(self._shapes):
            same = self._train[i].is_equivalent_to(self._generate[i], len(shape.shape))
            if same and shape.dtype == self._dtype:
                continue
            if bucket and self._bytes([*bucket, i], self._generate) > limit:
                yield bucket
                bucket = []
            bucket.append(i)
        if bucket:
            yield bucket

    def _compiled(
        self, bucket: list[int], move: Callable[..., Any], shardings: list[NamedSharding]
    ) -> Any:
        return jax.jit(partial(move, bucket), out_shardings=[shardings[i] for i in bucket])

    def _to_generate(self, bucket: list[int], weights: list[jax.Array]) -> list[jax.Array]:
        """Cast in the training layout: half the bytes move when generation is in half precision."""
        weights = [weight.astype(self._dtype) for weight in weights]
        if self._by_compiler:
            before = [self._train[i] for i in bucket]
            return jax.lax.with_sharding_constraint(weights, before)

        def local(weights: list[jax.Array]) -> list[jax.Array]:
            return [_gathered(x, self._leaves[i]) for i, x in zip(bucket, weights, strict=True)]

        return self._manual(bucket, local, self._train, self._generate)(weights)

    def _to_train(self, bucket: list[int], weights: list[jax.Array]) -> list[jax.Array]:
        def local(weights: list[jax.Array]) -> list[jax.Array]:
            return [_sliced(x, self._leaves[i]) for i, x in zip(bucket, weights, strict=True)]

        return self._manual(bucket, local, self._generate, self._train)(weights)

    def _manual(
        self,
        bucket: list[int],
        local: Callable[..., Any],
        before: list[NamedSharding],
        after: list[NamedSharding],
    ) -> Callable[..., Any]:
        in_specs: list[PartitionSpec] = [before[i].spec for i in bucket]
        out_specs = [after[i].spec for i in bucket]
        return jax.shard_map(
            local, mesh=self._mesh, in_specs=(in_specs,), out_specs=out_specs, check_vma=False
        )

    def _bytes(self, bucket: Any, shardings: list[NamedSharding]) -> int:
        sizes = (math.prod(shardings[i].shard_shape(self._shapes[i].shape)) for i in bucket)
        return sum(sizes) * self._dtype.itemsize


class Moves:
    """Copies of master weights in a layout for scoring, of another mesh over the same devices.

    They are cast before they move, a parameter at a time: the compiler may take any way, at worst
    through the whole parameter on every device.
    """

    def __init__(self, before: Replicas, after: Replicas) -> None:
        """The devices of both meshes stand in one order."""

        def move(x: jax.Array, state: NamedSharding) -> jax.Array:
            return jax.lax.with_sharding_constraint(x.astype(after.dtype), state)

        def compiled(state: NamedSharding, weight: NamedSharding) -> Any:
            return jax.jit(partial(move, state=state), out_shardings=weight)

        self._moves = jax.tree.map(compiled, before.state_shardings, after.weight_shardings)

    def __call__(self, params: Params) -> Params:
        """`params` in the layout and dtype for scoring; they stay where they are too."""
        return jax.tree.map(lambda move, x: jax.block_until_ready(move(x)), self._moves, params)


class Weights:
    """What one model holds: the training state, and copies of its weights where passes need them.

    Copies are made when asked for and dropped when the state changes, those for scoring when others
    are made for generation too. The actor's generation
    weights take the place of the training ones where they contain them, the master included where
    it is the same arrays (float32 generation); these are sliced back, bit-equal, when needed.
    """

    def __init__(
        self,
        replicas: Replicas,
        state: TrainState,
        relay: Relay | None = None,
        scoring: Moves | None = None,
        *,
        offload: bool = False,
    ) -> None:
        """`relay` None: a model that never generates; `scoring` None: it scores as it trains.

        `offload`: moments rest in host memory, and copies for scoring are not kept.
        """
        self._replicas, self._relay, self._scoring = replicas, relay, scoring
        self._offload = offload
        self.take(state)

    def take(self, state: TrainState) -> None:
        """A new training state; all copies are stale."""
        if self._offload:
            state = replace(state, opt_state=to_host(state.opt_state))
        self._state, self._train, self._generate, self._score = state, None, None, None
        self._master_away = False

    def state(self) -> TrainState:
        """The training state, master weights in place, to update or save; copies are dropped."""
        if self._master_away:
            self.train()
        self._train = self._generate = self._score = None
        if self._offload:
            self._state = replace(self._state, opt_state=to_device(self._state.opt_state))
        return self._state

    def train(self) -> Params:
        """The weights in the training layout, as its passes read them."""
        if self._train is None and self._generate is not None:
            assert self._relay is not None
            self._train = self._relay.to_train(self._generate, release=True)
            self._generate = None
            if self._master_away:
                self._state = replace(self._state, params=self._train)
                self._master_away = False
        if self._train is None:
            self._train = self._replicas.weights(self._state.params)
        return self._train

    def score(self) -> Params:
        """The weights in the layout that scores."""
        if self._scoring is None:
            return self.train()
        if self._score is not None:
            return self._score
        if self._master_away:
            self.train()
        found = self._scoring(self._state.params)
        self._score = None if self._offload else found
        return found

    def generate(self) -> Params:
        """The weights in the generation layout and dtype."""
        assert self._relay is not None, "this model was built without a relay"
        if self._generate is None:
            self._score = None
            weights, release = self.train(), self._relay.contained
            generate = self._relay.to_generate(weights, release=release)
            self._generate = jax.block_until_ready(generate)
            if release:
                self._master_away = weights is self._state.params
                self._train = None
                if self._master_away:
                    self._state = replace(self._state, params=None)
        return self._generate


def _sharding_axes(mesh: Mesh, layout: Layout, logical: str | None) -> tuple[str, ...]:
    """Mesh axes that really shard a dimension: those of size 1 are left out."""
    axes = layout.mesh_axes(logical) if logical else ()
    return tuple(axis for axis in axes if mesh.shape[axis] > 1)


def _begins(axes: tuple[str, ...], start: tuple[str, ...]) -> bool:
    return axes[: len(start)] == start


def _gathered(x: jax.Array, leaf: _Leaf) -> jax.Array:
    for dim, axes in leaf.gathers():
        x = jax.lax.all_gather(x, axes, axis=dim, tiled=True)
    for dim, axes in leaf.cuts():
        x = _slice(x, dim, axes)
    return x


def _sliced(x: jax.Array, leaf: _Leaf) -> jax.Array:
    for dim, axes in leaf.cuts_back():
        x = _slice(x, dim, axes)
    return x


def _slice(x: jax.Array, dim: int, axes: tuple[str, ...]) -> jax.Array:
    """This device's part of a dimension that `axes` shard."""
    size = x.shape[dim] // math.prod(jax.lax.axis_size(axis) for axis in axes)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * size, size, dim)
