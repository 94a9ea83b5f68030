# SPDX-License-Identifier: Apache-2.0
"""Cuts a mini-batch of host rows into micro-batches, and puts rows onto a mesh."""

from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from meshes.layouts import BATCH, Layout

Rows = Mapping[str, np.ndarray]
Stack = dict[str, np.ndarray]  # columns (M, mb, ...): M micro-batches of one shape

BUCKET_TOKENS = 128  # widths are multiples of it: each is compiled once
WIDTH_COLUMN = "input_ids"  # its second dimension is the T that per-token columns share


def place_rows(mesh: Mesh, layout: Layout, array: np.ndarray, axis: int = 0) -> jax.Array:
    """A global array with dimension `axis` sharded over the layout's batch axes.

    Every process of the mesh calls it with the whole array; each copies out its own rows.
    """
    sharding = NamedSharding(mesh, layout.spec((*(None,) * axis, BATCH)))
    # a copy: on CPU the device array could alias host memory that is written to later
    return jax.make_array_from_callback(array.shape, sharding, lambda at: array[at].copy())


def trim(rows: Rows, bucket: int) -> Stack:
    """Rows cut to the smallest multiple of `bucket` tokens that holds the longest of them."""
    width = rows[WIDTH_COLUMN].shape[1]
    return _narrow(rows, _bucketed(int(rows["length"].max()), bucket, width), width)


def cut_micros(
    rows: Rows,
    *,
    replicas: int,
    micro_sequences: int = 0,
    micro_tokens: int = 0,
    bucket: int = BUCKET_TOKENS,
    group: int = 1,
) -> list[Stack]:
    """Stacks of micro-batches by one of the two limits, or the whole mini-batch as one.

    Both limits count over all `replicas` together; `group` consecutive rows (a pair of responses,
    say) stay side by side. Rows added to fill a shape up are zeros with a False mask.
    """
    if micro_tokens:
        return _cut_by_tokens(rows, micro_tokens, replicas * group, group, bucket)
    if micro_sequences:
        return _cut_by_sequences(rows, micro_sequences, replicas * group, bucket)
    B = len(rows[WIDTH_COLUMN])
    mb = -(-B // (replicas * group)) * replicas * group
    return [{k: _fill(v, mb)[None] for k, v in trim(rows, bucket).items()}]


def legal_micro_sequences(B: int, unit: int) -> list[int]:
    """Rows of a micro-batch that cut B rows without a rest, `unit` of them staying together."""
    return [n for n in range(unit, B + 1, unit) if B % n == 0]


def check_micro_sequences(micro_sequences: int, B: int, unit: int, where: str = "") -> None:
    """Refuses a cut of B rows that leaves a rest, or splits what stays together."""
    legal = legal_micro_sequences(B, unit)
    if micro_sequences not in legal:
        rest = f"{B} = {B // micro_sequences} x {micro_sequences} + {B % micro_sequences}"
        choice = f"use one of {legal}" if legal else f"use mini-batches of a multiple of {unit}"
        raise ValueError(
            f"{where}micro_sequences={micro_sequences} must divide the {B} rows of a mini-batch "
            f"({rest}) and be a multiple of {unit} (replicas x rows that stay together); {choice}"
        )


def check_micro_tokens(micro_tokens: int, longest: int, unit: int, where: str = "") -> None:
    """Refuses a limit under which the fewest rows, of `longest` tokens, fit no micro-batch."""
    if micro_tokens < unit * longest:
        raise ValueError(
            f"{where}micro_tokens={micro_tokens} holds no micro-batch: the longest row takes "
            f"{longest} tokens and {unit} rows (replicas x rows that stay together) are the "
            f"fewest; use at least {unit} x {longest} = {unit * longest}"
        )


def _cut_by_sequences(rows: Rows, micro_sequences: int, unit: int, bucket: int) -> list[Stack]:
    """One stack of all micro-batches: they have one shape."""
    B = len(rows[WIDTH_COLUMN])
    check_micro_sequences(micro_sequences, B, unit)
    M = B // micro_sequences
    return [{k: v.reshape(M, -1, *v.shape[1:]) for k, v in trim(rows, bucket).items()}]


def _cut_by_tokens(
    rows: Rows, micro_tokens: int, unit: int, group: int, bucket: int
) -> list[Stack]:
    """Rows in order of falling length, so that short rows do not pay for long ones.

    Each micro-batch is a stack of its own (M = 1) and its rows follow from its width: there are
    no more shapes to compile than buckets in T.
    """
    width = rows[WIDTH_COLUMN].shape[1]
    longest = rows["length"].reshape(-1, group).max(axis=1)
    order = np.argsort(-longest, kind="stable")
    rest = (order[:, None] * group + np.arange(group)).reshape(-1)
    stacks = []
    while len(rest):
        T = _bucketed(int(longest[rest[0] // group]), bucket, width)
        check_micro_tokens(micro_tokens, T, unit)
        mb = micro_tokens // T // unit * unit
        taken, rest = rest[:mb], rest[mb:]
        micro = _narrow({k: v[taken] for k, v in rows.items()}, T, width)
        stacks.append({k: _fill(v, mb)[None] for k, v in micro.items()})
    return stacks


def _bucketed(length: int, bucket: int, width: int) -> int:
    """At least one bucket: a mini-batch of empty rows still has a shape."""
    return min(max(-(-length // bucket), 1) * bucket, width)


def _narrow(rows: Rows, T: int, width: int) -> Stack:
    """Per-token columns cut to T; a column is per-token when it is as wide as input_ids."""
    return {k: v[:, :T] if v.shape[1:2] == (width,) else v for k, v in rows.items()}


def _fill(column: np.ndarray, mb: int) -> np.ndarray:
    """Rows of zeros below, up to mb."""
    return np.pad(column, [(0, mb - len(column))] + [(0, 0)] * (column.ndim - 1))
