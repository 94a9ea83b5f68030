# SPDX-License-Identifier: Apache-2.0
"""An algorithm's dataflow: its own step function, run on columns that stand for values.

No model, pool or device is needed. A role's call gives futures that know which call they come from;
where the algorithm's arithmetic reads one, it gets zeros of that column's shape.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from hfjax.batch import Batch, Future, Metrics, Piece
from hfjax.controller.handle import handle_methods
from hfjax.controller.protocol import Method

CONTROLLER = "controller"  # the role of the algorithm's own arithmetic
WIDTH = 4  # tokens of a row
ROW_COLUMNS: dict[str, Any] = {  # a number a row; others are a number a token
    **dict.fromkeys(("length", "prompt_length"), np.int32),
    "truncated": np.bool_,
    **dict.fromkeys(("score", "cost"), np.float32),
}
TOKEN_COLUMNS = {"input_ids": np.int32, "response_mask": np.bool_}  # others are float32
TEXTS = ("response",)


@dataclass(frozen=True)
class Node:
    """One call, or a stretch of the controller's arithmetic."""

    number: int
    role: str
    method: str
    inputs: frozenset[int]  # numbers of the calls whose columns it reads
    reads: tuple[str, ...]
    writes: tuple[str, ...]


class Recorder:
    """The calls so far, and what the controller has read since its last stretch of arithmetic."""

    def __init__(self, given: Batch) -> None:
        """`given` are the columns that a step begins with."""
        self.nodes: list[Node] = []
        self.given = given
        self._inputs = [given.column(name) for name in given.names]  # no call made these
        self._rows = len(given)
        self._read: list[tuple[str, int, int]] = []  # a column, the call that wrote it, its rows
        self._arithmetic: int | None = None

    def call(self, role: str, method: str, declared: Method, *args: Any, **kwargs: Any) -> Any:
        """Enters a role's call; columns, or metrics, that stand for what it gives."""
        if not declared.takes_batch:
            return self._enter(role, method, frozenset(), (), ())
        (batch,) = args
        optional = tuple(name for name in declared.optional if name in batch)
        reads = (*declared.reads, *optional)
        inputs = frozenset().union(*(self._sources(name, batch.column(name)) for name in reads))
        number = self._enter(role, method, inputs, reads, declared.writes)
        if not declared.writes:
            return Metrics({})
        rows, made_by = len(batch), frozenset({number})
        every = range(rows)
        pieces = {name: [Piece((name, number, rows), every, every)] for name in declared.writes}
        return Batch({name: Future(p, rows, self._fetch, made_by) for name, p in pieces.items()})

    def texts(self) -> Batch:
        """Whole rows, as a pretraining loss reads them."""
        names = ("input_ids", "length", "response_mask")
        columns = {name: zeros(name, self._rows) for name in names}
        self._inputs += columns.values()
        return Batch(columns)

    def _enter(
        self,
        role: str,
        method: str,
        inputs: frozenset[int],
        reads: Sequence[str],
        writes: Sequence[str],
    ) -> int:
        number = len(self.nodes)
        self.nodes.append(Node(number, role, method, inputs, tuple(reads), tuple(writes)))
        return number

    def _sources(self, name: str, column: Any) -> frozenset[int]:
        """The calls behind a column; the arithmetic's columns are those that nobody wrote."""
        if isinstance(column, Future):
            return column.calls
        if any(column is each for each in self._inputs):
            return frozenset()
        if self._read:
            names, calls, _ = zip(*dict.fromkeys(self._read), strict=True)
            before = () if self._arithmetic is None else (self._arithmetic,)
            inputs = frozenset((*calls, *before))
            self._arithmetic = self._enter(CONTROLLER, "arithmetic", inputs, names, ())
            self._read = []
        return frozenset() if self._arithmetic is None else frozenset({self._arithmetic})

    def _fetch(self, refs: Sequence[Any], timeout_s: float | None = None) -> list[Any]:
        self._read += refs
        return [zeros(name, rows) for name, _, rows in refs]


class SymbolicModels:
    """Role handles whose calls are only entered."""

    def __init__(
        self, builders: Mapping[str, Any], recorder: Recorder, *, agrees: bool = False
    ) -> None:
        self.memory: dict[str, Any] = {}
        self.rollout_agrees = agrees
        self.more_prompts = lambda: recorder.given
        self.more_texts = recorder.texts
        self.step = 2 if agrees else 1  # the first scores what was sampled all the same
        for role, builder in builders.items():
            setattr(self, role, SymbolicHandle(role, handle_methods(builder), recorder))


class SymbolicHandle:
    """A role's declared methods, each entering a call."""

    def __init__(self, role: str, methods: Mapping[str, Method], recorder: Recorder) -> None:
        for name, declared in methods.items():
            setattr(self, name, partial(recorder.call, role, name, declared))


def trace(
    step: Any, builders: Mapping[str, Any], cfg: Any, given: Batch, *, agrees: bool = False
) -> list[Node]:
    """The calls of one step of an algorithm that begins with the columns `given`, in order.

    Where rollout and training agree it is a step that does not score what was sampled.
    """
    recorder = Recorder(given)
    step(SymbolicModels(builders, recorder, agrees=agrees), given, cfg)
    return recorder.nodes


def zeros(name: str, rows: int) -> Any:
    """A column that stands for one of this name."""
    if name in TEXTS:
        return [""] * rows
    if name in ROW_COLUMNS:
        return np.zeros(rows, ROW_COLUMNS[name])
    return np.zeros((rows, WIDTH), TOKEN_COLUMNS.get(name, np.float32))


def depths(nodes: Sequence[Node]) -> list[int]:
    """How many calls must have ended before each can begin: those of one depth may overlap."""
    found: list[int] = []
    for node in nodes:
        found.append(1 + max((found[i] for i in node.inputs), default=-1))
    return found


def text(nodes: Sequence[Node]) -> str:
    """A line a call: its depth, role, method, and the calls that it waits for."""
    rows = [("call", "depth", "role", "method", "waits for", "for columns")]
    for node, depth in zip(nodes, depths(nodes), strict=True):
        waits = " ".join(map(str, sorted(node.inputs))) or "-"
        cells = (str(node.number), str(depth), node.role, node.method, waits)
        rows.append((*cells, " ".join(node.reads)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
