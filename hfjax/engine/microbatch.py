# SPDX-License-Identifier: Apache-2.0
"""Cuts a mini-batch of host rows into micro-batches, and puts rows onto a mesh."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from hfjax.engine.packing import IDS, Packing, packing_of, prefix_slots, response_slots
from meshes.layouts import BATCH, Layout, divisors

Rows = Mapping[str, np.ndarray]
Stack = dict[str, np.ndarray]  # columns (M, mb, ...): M micro-batches of one shape

BUCKET_TOKENS = 128  # widths are multiples of it: each is compiled once


def place_rows(mesh: Mesh, layout: Layout, array: np.ndarray, axis: int = 0) -> jax.Array:
    """A global array with dimension `axis` sharded over the layout's batch axes.

    Every process of the mesh calls it with the whole array; each copies out its own rows.
    """
    sharding = NamedSharding(mesh, layout.spec((*(None,) * axis, BATCH)))
    # a copy: on CPU the device array could alias host memory that is written to later
    return jax.make_array_from_callback(array.shape, sharding, lambda at: array[at].copy())


def cut_micros(
    rows: Rows,
    *,
    replicas: int,
    micro_sequences: int = 0,
    micro_tokens: int = 0,
    bucket: int = BUCKET_TOKENS,
    group: int = 1,
    shared: int = 0,
) -> list[Stack]:
    """Stacks of micro-batches by one of the two limits, or the whole mini-batch as one.

    Both limits count over all `replicas` together; `group` consecutive rows (a pair of responses,
    say) stay side by side. Rows added to fill a shape up are zeros with a False mask. Rows are
    packed (hfjax.engine.packing) if that takes no more slots: up to `shared` consecutive ones, if
    they have one prefix; 0: never.
    """
    ids_BT, unit = rows[IDS], replicas * group
    B, T = ids_BT.shape
    if micro_sequences:
        check_micro_sequences(micro_sequences, B, unit)
    if micro_tokens:
        longest = bucketed(int(rows["length"].max()), bucket, T)
        check_micro_tokens(micro_tokens, longest, unit)
    best, least = None, math.inf
    for packing in _packings(rows, shared, bucket):
        width = partial(_width, packing, bucket=bucket, T=T)
        if micro_tokens:
            parts = _by_tokens(packing, width, micro_tokens, replicas, group)
        else:
            parts = _evenly(packing, width, micro_sequences, replicas, group)
        slots = sum(at.size * packing.width(R) for at, R in parts)
        if parts and slots <= least:  # of equals the last: it shares more, no head reads a prefix
            best, least = (packing, parts), slots
    assert best is not None  # whole rows were checked
    packing, parts = best
    return [_stack(rows, packing, at, R) for at, R in parts]


Parts = list[tuple[np.ndarray, int]]  # for each stack the packed rows (M, mb), fillers -1; R


def _packings(rows: Rows, shared: int, bucket: int) -> list[Packing]:
    """Rows that stay whole; then those that may be packed, each alone and more and more of them."""
    T = rows[IDS].shape[1]
    found = [Packing(0, 1, np.zeros(len(rows[IDS]), int), rows["length"])]
    for n in divisors(shared):
        packing = packing_of(rows, n)
        if packing:
            found.append(replace(packing, slots=prefix_slots(packing.slots, bucket, T)))
    return found


def _width(packing: Packing, tokens: int, *, bucket: int, T: int) -> int:
    return (response_slots if packing.slots else bucketed)(tokens, bucket, T)


def _evenly(
    packing: Packing,
    width: Callable[[int], int],
    micro_sequences: int,
    replicas: int,
    group: int,
) -> Parts:
    """One stack, whose micro-batches have one shape; none where packed rows would be parted."""
    n, G = packing.n, len(packing.lengths_G)
    unit = replicas * math.lcm(n, group)  # rows
    mb = micro_sequences or -(-G * n // unit) * unit
    if mb % unit:
        return []
    at = np.arange(-(-G * n // mb) * mb // n)
    at = np.where(at < G, at, -1).reshape(-1, mb // n)
    return [(at, width(packing.longest))]


def _by_tokens(
    packing: Packing, width: Callable[[int], int], micro_tokens: int, replicas: int, group: int
) -> Parts:
    """Rows in order of falling length, so that short rows do not pay for long ones.

    Each micro-batch is a stack of its own (M = 1) and its rows follow from its width: there are
    no more shapes to compile than widths. None where the longest rows do not fit.
    """
    together = math.lcm(packing.n, group) // packing.n  # packed rows that are not parted
    longest = packing.lengths_G.reshape(-1, together).max(axis=1)
    order = np.argsort(-longest, kind="stable")
    rest = (order[:, None] * together + np.arange(together)).reshape(-1)
    parts, unit = [], replicas * together
    while len(rest):
        R = width(int(longest[rest[0] // together]))
        mb = micro_tokens // packing.width(R) // unit * unit
        if not mb:
            return []
        at = np.full(mb, -1)
        at[: len(rest)] = rest[:mb]
        parts.append((at[None], R))
        rest = rest[mb:]
    return parts


def _stack(rows: Rows, packing: Packing, at_Mb: np.ndarray, R: int) -> Stack:
    """The columns of a stack: packed rows by number, zeros for fillers."""
    at = at_Mb.reshape(-1)
    rows_of = (at[:, None] * packing.n + np.arange(packing.n)).reshape(-1)
    mine = replace(packing, starts_G=_taken(packing.starts_G, at))
    columns = mine.packed({name: _taken(x, rows_of) for name, x in rows.items()}, R)
    M = len(at_Mb)
    return {name: x.reshape(M, len(x) // M, *x.shape[1:]) for name, x in columns.items()}


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


def bucketed(length: int, bucket: int, width: int) -> int:
    """At least one bucket: a mini-batch of empty rows still has a shape."""
    return min(max(-(-length // bucket), 1) * bucket, width)


def _taken(column: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """These rows; zeros where there are none, below 0."""
    here = (rows >= 0).reshape(-1, *(1,) * (column.ndim - 1))
    return np.where(here, column[np.maximum(rows, 0)], column.dtype.type(0))
