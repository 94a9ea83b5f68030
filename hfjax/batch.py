# SPDX-License-Identifier: Apache-2.0
"""Batch: a table of named columns on the host, in which a column may still be a future."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Values = np.ndarray | list  # a column at hand; read-only by convention: roles share it
Fetch = Callable[[Sequence[Any], float | None], list[Any]]


class Piece(NamedTuple):
    """Part of a column: row `rows[i]` stands at index `at[i]` of the values behind `ref`."""

    ref: Any
    rows: np.ndarray | range
    at: np.ndarray | range

    def unbound(self) -> "Piece":
        """The same without its ref, and small to send where it is a run of neighbours."""
        return Piece(None, _run(self.rows), _run(self.at))


class Future:
    """A column that one or several processes are still computing; held as pieces, never as rows.

    `fetch(refs, timeout_s)` brings values to the driver; `calls` numbers the calls it comes from.
    """

    def __init__(
        self, pieces: Sequence[Piece], rows: int, fetch: Fetch, calls: frozenset[int] = frozenset()
    ) -> None:
        self.pieces, self.calls = tuple(pieces), calls
        self._rows, self._fetch = rows, fetch
        self._values: Values | None = None

    def __len__(self) -> int:
        return self._rows

    def result(self, timeout_s: float | None = None) -> Values:
        """The values, waiting for them; TimeoutError after `timeout_s`, if that is given."""
        if self._values is None:
            values = self._fetch([piece.ref for piece in self.pieces], timeout_s)
            self._values = frozen(assemble(self.pieces, values, self._rows))
        return self._values

    def take(self, rows: np.ndarray) -> "Future":
        """The future of these rows, in this order; nothing is waited for or moved.

        One piece stays even when no row is left: its consumer needs the dtype and trailing shape.
        """
        owner = np.full(self._rows, -1)
        at = np.zeros(self._rows, np.int64)
        for number, piece in enumerate(self.pieces):
            owner[piece.rows] = number
            at[piece.rows] = piece.at
        taken = []
        for number, piece in enumerate(self.pieces):
            here = np.flatnonzero(owner[rows] == number)
            if len(here):
                taken.append(Piece(piece.ref, here, at[rows][here]))
        none = np.zeros(0, np.int64)
        taken = taken or [Piece(self.pieces[0].ref, none, none)]
        return Future(taken, len(rows), self._fetch, self.calls)


Column = np.ndarray | list | Future


def _run(rows: np.ndarray | range) -> np.ndarray | range:
    run = range(rows[0], rows[0] + len(rows)) if len(rows) else range(0)
    return run if np.array_equal(rows, run) else rows


def assemble(pieces: Sequence[Piece], values: Sequence[Values], rows: int) -> Values:
    """One column of `rows` rows from pieces and the values behind their refs.

    A single piece that is the whole column in order is returned as it is, without a copy.
    """
    first = values[0]
    whole = all(np.array_equal(index, range(rows)) for index in pieces[0][1:])
    if whole and len(pieces) == 1 and len(first) == rows:
        return first
    if isinstance(first, list):
        column: list[Any] = [None] * rows
        for piece, part in zip(pieces, values, strict=True):
            for row, index in zip(piece.rows, piece.at, strict=True):
                column[row] = part[index]
        return column
    kinds = {(np.shape(part)[1:], np.asarray(part).dtype.str) for part in values}
    if len(kinds) > 1:
        raise ValueError(f"processes answered with different shapes or dtypes: {sorted(kinds)}")
    out = np.empty((rows, *first.shape[1:]), first.dtype)
    for piece, part in zip(pieces, values, strict=True):
        out[np.asarray(piece.rows, int)] = np.asarray(part)[np.asarray(piece.at, int)]
    return out


def frozen(values: Values) -> Values:
    """A view that refuses writes (as Ray's arrays do): roles in this process share the buffer."""
    if isinstance(values, np.ndarray):
        values = values.view()
        values.flags.writeable = False
    return values


def take(column: Column, rows: np.ndarray) -> Column:
    """These rows of a column, in this order; a future stays one."""
    if isinstance(column, Future):
        return column.take(rows)
    if isinstance(column, list):
        return [column[row] for row in rows]
    return column[rows]


class Metrics(Mapping[str, Any]):
    """Named numbers that may still be on their way: reading one, or result(), waits for all.

    `|` takes either side's names, the right side's values where both have one.
    """

    def __init__(
        self, *sources: Mapping[str, Any] | Callable[[float | None], Mapping[str, Any]]
    ) -> None:
        self._sources = sources

    def __or__(self, other: Mapping[str, Any]) -> "Metrics":
        return Metrics(*self._sources, *_sources_of(other))

    def __ror__(self, other: Mapping[str, Any]) -> "Metrics":
        return Metrics(*_sources_of(other), *self._sources)

    def __getitem__(self, name: str) -> Any:
        return self.result()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.result())

    def __len__(self) -> int:
        return len(self.result())

    def result(self, timeout_s: float | None = None) -> dict[str, Any]:
        """All metrics, waiting for the calls that compute them."""
        merged: dict[str, Any] = {}
        for source in self._sources:
            merged |= source if isinstance(source, Mapping) else source(timeout_s)
        return merged


def _sources_of(metrics: Mapping[str, Any]) -> tuple[Any, ...]:
    return metrics._sources if isinstance(metrics, Metrics) else (metrics,)


class Batch:
    """Named columns of equally many rows: arrays (rows first), lists of objects, or futures.

    `batch["x"]` waits for a future, `batch.column("x")` does not. Rows are left-aligned
    sequences; a batch is never changed in place (`|=` makes a new one).
    """

    def __init__(
        self,
        columns: Mapping[str, Any] | None = None,
        /,
        *,
        metrics: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> None:
        """Columns from a mapping, from keywords, or both; device arrays come to the host."""
        given = {**(columns or {}), **named}
        self._columns: dict[str, Column] = {k: _as_column(k, v) for k, v in given.items()}
        self.metrics = Metrics(*(() if metrics is None else _sources_of(metrics)))
        lengths = {name: len(column) for name, column in self._columns.items()}
        self._rows = next(iter(lengths.values()), 0)
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns differ in their number of rows: {lengths}")

    def __len__(self) -> int:
        return self._rows

    __iter__ = None  # len() counts rows, so iterating over names would mislead

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def __getitem__(self, name: str) -> Any:
        column = self.column(name)
        return column.result() if isinstance(column, Future) else column

    def __repr__(self) -> str:
        return f"Batch({len(self)} rows: {', '.join(self._columns)})"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._columns)

    def column(self, name: str) -> Column:
        """A column as it is: values, or a future that nobody has waited for."""
        if name not in self._columns:
            raise KeyError(f"no column {name!r} in the batch; it has {', '.join(self.names)}")
        return self._columns[name]

    def resolved(self) -> dict[str, Any]:
        """All columns on the host; a door at which the driver waits."""
        return {name: self[name] for name in self._columns}

    def __or__(self, other: "Batch | Mapping[str, Any]") -> "Batch":
        """Both batches' columns; where both have one, the right side's."""
        other = other if isinstance(other, Batch) else Batch(other)
        if self._columns and other._columns and len(self) != len(other):
            raise ValueError(
                f"batches of {len(self)} and {len(other)} rows do not join; "
                "select the same rows of both first"
            )
        return Batch(self._columns | other._columns, metrics=self.metrics | other.metrics)

    def columns(self, *names: str) -> "Batch":
        """Only these columns."""
        return Batch({name: self.column(name) for name in names}, metrics=self.metrics)

    def renamed(self, **names: str) -> "Batch":
        """Columns under other names, as renamed(values="cost_values"); the rest as they are."""
        columns = {names.get(name, name): column for name, column in self._columns.items()}
        return Batch(columns, metrics=self.metrics)

    def select(self, rows: Any) -> "Batch":
        """These rows, by number (repeats allowed) or by a bool mask; futures stay futures."""
        wanted = np.asarray(rows)
        if wanted.dtype == bool:
            if len(wanted) != len(self):
                raise ValueError(f"a mask of {len(wanted)} rows for a batch of {len(self)}")
            wanted = np.flatnonzero(wanted)
        wanted = wanted.astype(np.int64)
        if len(wanted) and not (wanted.min() >= 0 and wanted.max() < len(self)):
            raise ValueError(f"rows {wanted.min()} to {wanted.max()} of a batch of {len(self)}")
        return Batch({k: take(v, wanted) for k, v in self._columns.items()}, metrics=self.metrics)

    def split(self, parts: int) -> list["Batch"]:
        """Contiguous parts; their sizes differ by at most one row."""
        return [self.select(rows) for rows in np.array_split(np.arange(len(self)), parts)]

    @staticmethod
    def concat(batches: Sequence["Batch"]) -> "Batch":
        """Rows of all batches, one after the other; waits for futures.

        Narrower columns are filled with zeros at the end of their rows: lengths and masks say
        what is valid, nothing else does.
        """
        names = {batch.names for batch in batches}
        if len({frozenset(each) for each in names}) > 1:
            raise ValueError(f"batches with different columns do not join: {sorted(names)}")
        columns = {name: _concat([b[name] for b in batches]) for name in batches[0].names}
        metrics = Metrics()
        for batch in batches:
            metrics |= batch.metrics
        return Batch(columns, metrics=metrics)

    def pad_to(self, multiple: int) -> tuple["Batch", np.ndarray]:
        """The batch with its last row repeated up to a multiple, and which rows are real."""
        total = -(-len(self) // multiple) * multiple
        rows = np.minimum(np.arange(total), len(self) - 1)
        return self.select(rows), np.arange(total) < len(self)


def _as_column(name: str, value: Any) -> Column:
    if isinstance(value, Future | list):
        return value
    array = np.asarray(value)
    if array.ndim == 0:
        raise ValueError(f"column {name!r} is {type(value).__name__}: give an array or a list")
    return array


def _concat(parts: Sequence[Values]) -> Values:
    if isinstance(parts[0], list):
        return [item for part in parts for item in part]
    arrays = [np.asarray(part) for part in parts]
    widest = tuple(np.max([array.shape[1:] for array in arrays], axis=0).astype(int))
    filled = [
        np.pad(a, [(0, 0), *((0, w - s) for w, s in zip(widest, a.shape[1:], strict=True))])
        for a in arrays
    ]
    return np.concatenate(filled)
