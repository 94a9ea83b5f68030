# SPDX-License-Identifier: Apache-2.0
"""Forward passes over host rows: onto the replicas of a mesh and back, a bounded part at a time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from hfjax.controller.protocol import Shard, rows_per_replica
from hfjax.engine.packing import IDS, MASK, PREFIX_LENGTH, packing_of, prefix_slots, response_slots
from hfjax.engine.pipeline import STAGES
from hfjax.models.attention import Prefix
from meshes.layouts import BATCH, Layout, batch_sharding, divisors
from meshes.mesh import shape_of

PASS_TOKENS = 16_384  # padded tokens a replica in one pass: bounds its activations

Compute = Callable[..., jax.Array | tuple[jax.Array, ...]]


class Passes:
    """Moves rows between a process's Shard and arrays whose rows are split over `replicas`.

    Replica r owns the rows [r * per, (r + 1) * per) of the batch, as the protocols say; rows that
    do not exist are fillers, and are dropped on the way back.
    """

    def __init__(self, mesh: Mesh, layout: Layout) -> None:
        self.replicas = shape_of(mesh).over(layout.mesh_axes(BATCH))
        self.sharding = batch_sharding(mesh, layout)
        self.packs = shape_of(mesh).over(STAGES) == 1  # a pipeline's rows stay whole

    def over(self, shard: Shard, names: tuple[str, ...], compute: Compute) -> list[np.ndarray]:
        """compute(*columns) for all rows: host arrays for shard.rows, of each array it gives.

        Passes have one shape, at most PASS_TOKENS a replica (or one row, if that is wider).
        """
        columns = [shard.columns[name] for name in names]
        return self._over(columns, shard, 1, compute)

    def over_responses(self, shard: Shard, bucket: int, compute: Compute) -> list[np.ndarray]:
        """compute(input_ids, prefix) for all rows: what it says of response tokens, 0 elsewhere.

        Rows are packed (hfjax.engine.packing), as many as share a prompt or fewer, if that takes no
        more slots; else they stay whole, and `prefix` is None. All processes decide alike.
        """
        if not self.packs:
            return self.over(shard, (IDS,), lambda ids_BT: compute(ids_BT, None))
        T = shard.columns[IDS].shape[1]
        found = {n: packing_of(shard.columns, n) for n in divisors(shard.group)}
        mine = [(0, p.slots, p.longest) if p else (1, 1, 1) for p in found.values()]
        best, least = None, float(T)
        for (n, packing), (misfits, P, R) in zip(found.items(), _largest(mine), strict=True):
            P, R = prefix_slots(P, bucket, T), response_slots(R, bucket, T)
            bounded = n == 1 or P + n * R <= PASS_TOKENS
            if packing and not misfits and bounded and P / n + R <= least:
                best, least = (replace(packing, slots=P), R), P / n + R
        if best is None:
            return self.over(shard, (IDS,), lambda ids_BT: compute(ids_BT, None))
        packing, R = best
        rows = packing.packed({name: shard.columns[name] for name in (IDS, MASK)}, R)

        def packed(ids_BW: jax.Array, length_B: jax.Array) -> Any:
            return compute(ids_BW, Prefix(length_B=length_B, slots=packing.slots, n=packing.n))

        columns = self._over([rows[IDS], rows[PREFIX_LENGTH]], shard, packing.n, packed)
        return [packing.unpacked(x_BR, T) for x_BR in columns]

    def _over(
        self, values: Sequence[np.ndarray], shard: Shard, n: int, compute: Compute
    ) -> list[np.ndarray]:
        """What compute(*values) gives for all rows; `values` have one for every n of them."""
        per = rows_per_replica(shard.n_rows, self.replicas, shard.group) // n
        width = max(1, min(per, PASS_TOKENS // values[0].shape[1]))
        first_rows, held = np.arange(self.replicas)[:, None] * per, shard.rows[::n] // n
        done: list[tuple[np.ndarray, list[jax.Array]]] = []
        for start in range(0, per, width):
            offsets = start + np.arange(width)
            rows = np.where(offsets < per, first_rows + offsets, -1).reshape(-1)
            arrays = [self._place(each, held, rows, shard.n_rows // n) for each in values]
            at = (rows[:, None] * n + np.arange(n)).reshape(-1)
            done.append((at, jax.tree.leaves(compute(*arrays))))
        return [
            _collected([(rows, arrays[k]) for rows, arrays in done], shard.rows)
            for k in range(len(done[0][1]))
        ]

    def waves(self, shard: Shard, sequences: int = 0) -> list[np.ndarray]:
        """Numbers of the prompts that are taken at a time, `group` rows each; of fillers below 0.

        At most `sequences` rows over all replicas (0: all), the prompts of each replica in equal
        parts; the last part is filled up, so that all have one shape.
        """
        replicas, n = self.replicas, shard.group
        mine = rows_per_replica(shard.n_rows, replicas, n) // n
        most = sequences // (replicas * n) if sequences else max(mine, 1)
        if most < 1:
            raise ValueError(
                f"generate_sequences = {sequences} holds no prompt of {n} rows on each of "
                f"{replicas} replicas; use a multiple of {replicas * n}"
            )
        parts = max(1, -(-mine // most))
        width = -(-mine // parts)
        first, offsets = np.arange(replicas)[:, None] * mine, np.arange(parts * width)
        prompts = np.where(offsets < mine, first + offsets, -1)
        return [part.reshape(-1) for part in np.split(prompts, parts, axis=1)]

    def placer(self, shard: Shard, prompts: np.ndarray) -> Callable[..., jax.Array]:
        """A function placing values of prompts, a row for every `group` of the shard's."""
        n = shard.group
        held = shard.rows[::n] // n

        def place(values: np.ndarray, filler: int = 0) -> jax.Array:
            return self._place(values, held, prompts, shard.n_rows // n, filler)

        return place

    def collect(
        self, shard: Shard, parts: Sequence[tuple[np.ndarray, Mapping[str, jax.Array]]]
    ) -> dict[str, np.ndarray]:
        """Host columns for shard.rows from arrays over the rows of such prompts, in their order.

        Columns are as wide as the widest part's; narrower ones end with zeros.
        """
        n = shard.group
        rows = [(prompts[:, None] * n + np.arange(n)).reshape(-1) for prompts, _ in parts]
        return {
            name: _collected(
                [(at, arrays[name]) for at, (_, arrays) in zip(rows, parts, strict=True)],
                shard.rows,
            )
            for name in parts[0][1]
        }

    def _place(
        self,
        values: np.ndarray,
        held: np.ndarray,
        rows: np.ndarray,
        n_rows: int,
        filler: int = 0,
    ) -> jax.Array:
        """An array of the rows `rows`; `values` are those of the rows `held`, ascending.

        Of rows that exist, 0 to n_rows - 1, this process must hold those of its own devices.
        """

        def part(index: Any) -> np.ndarray:
            wanted = rows[index[0]]
            here = np.isin(wanted, held)
            if len(missing := wanted[~here & (wanted >= 0) & (wanted < n_rows)]):
                raise ValueError(f"rows {missing[:8]} belong to this process, which lacks them")
            picked = np.full((len(wanted), *values.shape[1:]), filler, values.dtype)
            picked[here] = values[np.searchsorted(held, wanted[here])]
            return picked[(slice(None), *index[1:])]

        shape = (len(rows), *values.shape[1:])
        return jax.make_array_from_callback(shape, self.sharding, part)


def _largest(numbers: Sequence[Sequence[int]]) -> list[list[int]]:
    """Of each number the largest that a process gives."""
    every = np.array(numbers, np.int32)[None]
    if jax.process_count() > 1:
        every = np.asarray(multihost_utils.process_allgather(every[0]))
    return every.max(axis=0).tolist()


def _collected(parts: list[tuple[np.ndarray, jax.Array]], held: np.ndarray) -> np.ndarray:
    """The rows `held` from arrays whose rows are numbered `rows`; reads this process's shards."""
    shape = np.max([array.shape[1:] for _, array in parts], axis=0).astype(int)
    out = np.zeros((len(held), *shape), parts[0][1].dtype)
    if not len(held):
        return out
    for rows, array in parts:
        for shard in array.addressable_shards:
            if shard.index[1:] and shard.data.shape[1:] != array.shape[1:]:
                raise ValueError(f"columns of rows must be whole, got sharding {array.sharding}")
            numbers = rows[shard.index[0]]
            at = np.minimum(np.searchsorted(held, numbers), len(held) - 1)
            here = held[at] == numbers
            wide = tuple(slice(size) for size in array.shape[1:])
            out[at[here], *wide] = np.asarray(shard.data)[here]
    return out
