# SPDX-License-Identifier: Apache-2.0
"""Weights from the training pool to a generation pool of its own, through host memory.

Each part of a parameter is written once, by one process that holds it in training, and read by the
processes that need it to generate: nothing is gathered, nothing passes through the controller.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from hfjax.models.llama import Params
from meshes.layouts import Layout, is_axes
from meshes.mesh import AXES, MeshShape, coordinates

BUCKET_BYTES = 2**28  # of whole parameters that are on their way at a time; none is split

Box = tuple[tuple[int, int], ...]  # start and stop of each dimension of the whole parameter


@dataclass(frozen=True)
class Side:
    """One of the two pools: where its processes hold which part of a parameter."""

    shape: MeshShape
    layout: Layout
    processes: int

    def holders(self, axes: tuple[str | None, ...], sizes: Sequence[int]) -> dict[Box, list[int]]:
        """Each distinct part of a parameter of these sizes, and the processes that hold it."""
        found: dict[Box, list[int]] = {}
        per_process = self.shape.devices // self.processes
        for device, at in enumerate(coordinates(self.shape)):
            place: dict[str, int] = dict(zip(AXES, at.tolist(), strict=True))
            spans = map(partial(self._span, place), axes, sizes)
            mine = found.setdefault(tuple(spans), [])
            if device // per_process not in mine:
                mine.append(device // per_process)
        return found

    def _span(self, place: Mapping[str, int], logical: str | None, size: int) -> tuple[int, int]:
        """The part of one dimension that a device holds."""
        index, parts = 0, 1
        for axis in self.layout.mesh_axes(logical) if logical else ():
            index = index * getattr(self.shape, axis) + place[axis]
            parts *= getattr(self.shape, axis)
        return index * size // parts, (index + 1) * size // parts


@dataclass(frozen=True)
class Piece:
    """A part of one parameter: where it lies in the whole, and in the shard it is cut from."""

    leaf: int
    shard: Box
    box: Box


@dataclass(frozen=True)
class Parcel:
    """What one process writes for the same readers: arrays, in order."""

    writer: int
    readers: tuple[int, ...]
    pieces: tuple[Piece, ...]


class Exchange:
    """Who sends which parts of which parameters to whom, in buckets; made of numbers alone.

    Vocabularies may be padded differently on the two sides: rows that only one has do not move.
    """

    def __init__(
        self,
        trains: Side,
        generates: Side,
        shapes: tuple[Any, Any],
        axes: Any,
        dtype: Any,
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """`shapes` of the parameters on either side, `dtype` of generation."""
        self.dtype = jnp.dtype(dtype)
        self._bits = np.dtype(f"u{self.dtype.itemsize}")
        names = jax.tree.leaves(axes, is_leaf=is_axes)
        both = [[tuple(leaf.shape) for leaf in jax.tree.leaves(each)] for each in shapes]
        self._sizes = both[1]
        leaves = range(len(names))
        cells = {
            i: list(_cells(i, trains, generates, names[i], (both[0][i], both[1][i])))
            for i in leaves
        }
        self.buckets: list[list[Parcel]] = [
            _parcels([cell for i in bucket for cell in cells[i]])
            for bucket in self._cut(leaves, bucket_bytes)
        ]

    def leaves(self, bucket: int) -> list[int]:
        """Parameters of a bucket, by their place in the tree."""
        pieces = (piece for parcel in self.buckets[bucket] for piece in parcel.pieces)
        return list(dict.fromkeys(piece.leaf for piece in pieces))

    def parcels(
        self, bucket: int, *, writer: int | None = None, reader: int | None = None
    ) -> list[Parcel]:
        """Those of a bucket that a process writes, or reads, in the order of every process."""
        return [
            parcel
            for parcel in self.buckets[bucket]
            if writer in (None, parcel.writer) and (reader is None or reader in parcel.readers)
        ]

    def nbytes(self, parcels: Sequence[Parcel]) -> int:
        """Of what is in them."""
        boxes = (piece.box for parcel in parcels for piece in parcel.pieces)
        return sum(_elements(box) for box in boxes) * self.dtype.itemsize

    def pack(self, bucket: int, writer: int, weights: Params) -> list[list[np.ndarray]]:
        """The arrays of each parcel that `writer` sends, cut on the host from its own shards.

        As contiguous unsigned integers: only of dtypes that NumPy has is a buffer sent as it is.
        """
        leaves = jax.tree.leaves(weights)

        @cache
        def shards(leaf: int) -> dict[Box, jax.Array]:
            cast = leaves[leaf].astype(self.dtype)  # before it moves
            return {_box(s.index, cast.shape): s.data for s in cast.addressable_shards}

        @cache
        def on_host(leaf: int, shard: Box) -> np.ndarray:
            return np.asarray(shards(leaf)[shard])

        def cut(piece: Piece) -> np.ndarray:
            part = on_host(piece.leaf, piece.shard)[_within(piece.box, piece.shard)]
            return np.ascontiguousarray(part).view(self._bits)

        mine = self.parcels(bucket, writer=writer)
        return [[cut(piece) for piece in parcel.pieces] for parcel in mine]

    def unpack(
        self,
        bucket: int,
        reader: int,
        values: Sequence[Sequence[np.ndarray]],
        placed: Sequence[NamedSharding],
        held: dict[int, jax.Array],
    ) -> None:
        """Puts a bucket's parameters, from the parcels for `reader`, in the place of those `held`.

        The old arrays are deleted before the new ones come.
        """
        pieces: dict[int, list[tuple[Box, np.ndarray]]] = {}
        for parcel, arrays in zip(self.parcels(bucket, reader=reader), values, strict=True):
            for piece, array in zip(parcel.pieces, arrays, strict=True):
                pieces.setdefault(piece.leaf, []).append((piece.box, array.view(self.dtype)))
        for leaf in self.leaves(bucket):
            if leaf in held:
                held.pop(leaf).delete()
            sizes, parts = self._sizes[leaf], pieces.get(leaf, [])

            def shard(index: Any, sizes: Any = sizes, parts: Any = parts) -> np.ndarray:
                return self._shard(_box(index, sizes), parts)

            held[leaf] = jax.make_array_from_callback(sizes, placed[leaf], shard)

    def _shard(self, box: Box, pieces: Sequence[tuple[Box, np.ndarray]]) -> np.ndarray:
        """A device's part, put together; what nobody sent is padding."""
        shard = np.zeros([stop - start for start, stop in box], self.dtype)
        for where, array in pieces:
            if _overlap(where, box) == where:
                shard[_within(where, box)] = array
        return shard

    def _cut(self, leaves: Sequence[int], limit: int) -> Iterator[list[int]]:
        """Leaves in order, at most `limit` bytes together."""
        bucket: list[int] = []
        for leaf in leaves:
            size = sum(math.prod(self._sizes[i]) for i in [*bucket, leaf]) * self.dtype.itemsize
            if bucket and size > limit:
                yield bucket
                bucket = []
            bucket.append(leaf)
        if bucket:
            yield bucket


def _cells(
    leaf: int,
    trains: Side,
    generates: Side,
    axes: tuple[str | None, ...],
    sizes: tuple[Sequence[int], Sequence[int]],
) -> Iterator[tuple[int, tuple[int, ...], Piece]]:
    """Writer, readers and piece for each overlap of a training part with a generation part."""
    sources = trains.holders(axes, sizes[0])
    targets = generates.holders(axes, sizes[1])
    for (source, holders), (target, readers) in itertools.product(sources.items(), targets.items()):
        if box := _overlap(source, target):
            writer = holders[leaf % len(holders)]  # replicas take turns
            yield writer, tuple(readers), Piece(leaf, source, box)


def _parcels(cells: Sequence[tuple[int, tuple[int, ...], Piece]]) -> list[Parcel]:
    """One for each writer and set of readers."""
    found: dict[tuple[int, tuple[int, ...]], list[Piece]] = {}
    for writer, readers, piece in cells:
        found.setdefault((writer, readers), []).append(piece)
    return [Parcel(*ends, tuple(pieces)) for ends, pieces in found.items()]


def _overlap(one: Box, other: Box) -> Box | None:
    pairs = zip(one, other, strict=True)
    box = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in pairs)
    return box if all(start < stop for start, stop in box) else None


def _within(box: Box, outer: Box) -> tuple[slice, ...]:
    pairs = zip(box, outer, strict=True)
    return tuple(slice(start - o[0], stop - o[0]) for (start, stop), o in pairs)


def _box(index: Sequence[slice], sizes: Sequence[int]) -> Box:
    spans = (part.indices(size) for part, size in zip(index, sizes, strict=True))
    return tuple((start, stop) for start, stop, _ in spans)


def _elements(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)
