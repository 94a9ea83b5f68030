# SPDX-License-Identifier: Apache-2.0
"""Rows and answering processes of each protocol, against table3.py, and what holds for any mesh."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import table3
from table3 import COMMANDS, TABLE, rows_in

from hfjax.controller.protocol import (
    DP_PROTO,
    ONE_TO_ALL,
    THREE_D_ALL_MICRO_DP,
    THREE_D_PROTO,
    Protocol,
    Ranks,
    method,
    methods_of,
    rows_of_replica,
)
from meshes.mesh import MeshShape

EVERY = (DP_PROTO, THREE_D_PROTO, THREE_D_ALL_MICRO_DP, ONE_TO_ALL)
SHAPES = (
    MeshShape(data=8),
    MeshShape(data=2, tensor=4),
    MeshShape(data=2, tensor=2, tensor_micro=2),
    MeshShape(pipe=2, pipe_micro=2, tensor_micro=2),
    MeshShape(fsdp=2, pipe=2, pipe_micro=2),
    MeshShape(tensor=8),
)


def named(value: Any) -> str:
    """A protocol's name."""
    return value.name if isinstance(value, Protocol) else str(value)


def both(protocol: Protocol, ranks: Ranks, n_rows: int, group: int = 1) -> tuple[list, list]:
    rows, answers = protocol.split(ranks, n_rows, group)
    return [r.tolist() for r in rows], [r.tolist() for r in answers]


@pytest.mark.parametrize(
    ("n_rows", "replicas", "group", "right"),
    [
        (8, 4, 1, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (5, 4, 1, [[0, 1], [2, 3], [4], []]),
        (1, 4, 1, [[0], [], [], []]),
        (6, 2, 3, [[0, 1, 2], [3, 4, 5]]),
        # Three prompts of two samples on two replicas: the first takes two prompts.
        (6, 2, 2, [[0, 1, 2, 3], [4, 5]]),
        (3, 2, 4, [[0, 1, 2], []]),
    ],
)
def test_chunks_are_contiguous_and_keep_groups_whole(
    n_rows: int, replicas: int, group: int, right: list
) -> None:
    assert [list(rows) for rows in rows_of_replica(n_rows, replicas, group)] == right


@pytest.mark.parametrize(("protocol", "shape", "processes", "given", "answered"), TABLE, ids=named)
def test_rows_of_every_process_are_those_of_table_3(
    protocol: Protocol, shape: MeshShape, processes: int, given: str, answered: str
) -> None:
    n_rows = 6 if shape.data == 3 else 8
    found = both(protocol, Ranks(shape, processes), n_rows)
    assert found == (rows_in(given), rows_in(answered))


@pytest.mark.parametrize(("protocol", "shape", "processes", "texts", "heard"), COMMANDS, ids=named)
def test_replies_of_methods_without_rows_are_those_of_table_3(
    protocol: Protocol, shape: MeshShape, processes: int, texts: str, heard: str
) -> None:
    assert protocol.replies(Ranks(shape, processes)) == [int(rank) for rank in heard.split()]


ONE_PROCESS = [shape for _, shape, processes, *_ in TABLE + COMMANDS if processes == 1]


@pytest.mark.parametrize("shape", sorted(set(ONE_PROCESS), key=str), ids=str)
def test_one_process_is_given_and_answers_what_the_table_says(shape: MeshShape) -> None:
    with table3.listeners([shape], 1, "local") as models:
        for protocol, other, processes, given, answered in TABLE:
            if (other, processes) == (shape, 1):
                wanted = rows_in(given), rows_in(answered)
                assert table3.heard(models.m0, protocol, 8) == wanted, protocol.name
        for protocol, other, processes, texts, heard in COMMANDS:
            if (other, processes) == (shape, 1):
                wanted = texts.split(), [int(rank) for rank in heard.split()]
                assert table3.told(models.m0, protocol, texts.split()) == wanted, protocol.name


@pytest.mark.parametrize("protocol", EVERY, ids=lambda protocol: protocol.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_row_is_answered_once_by_a_process_that_holds_it(
    protocol: Protocol, shape: MeshShape
) -> None:
    for processes, (n_rows, group) in product((1, 2, 4, 8), ((8, 1), (5, 1), (1, 1), (12, 3))):
        rows, answers = both(protocol, Ranks(shape, processes), n_rows, group)
        assert sorted(row for mine in answers for row in mine) == list(range(n_rows))
        for held, answered in zip(rows, answers, strict=True):
            assert held == sorted(set(held))
            assert set(answered) <= set(held)


def test_rows_of_a_forward_pass_go_by_the_mesh_that_scores() -> None:
    """Training splits rows over four devices in two processes; scoring is a pipeline over both."""
    ranks = Ranks(MeshShape(data=4), 2, own_infer=Ranks(MeshShape(pipe=2, tensor=2), 2))
    every, half = list(range(8)), list(range(4))
    assert both(THREE_D_PROTO, ranks, 8) == ([every, every], [[], every])
    assert both(DP_PROTO, ranks, 8) == ([half, list(range(4, 8))],) * 2


def test_methods_are_declared_on_the_class_and_inherited() -> None:
    class Base:
        @method(THREE_D_PROTO, reads=("x",), writes=("y",))
        def double(self) -> None: ...

        def helper(self) -> None: ...

    class Child(Base):
        @method(ONE_TO_ALL)
        def save(self) -> None: ...

    found = methods_of(Child)
    assert set(found) == {"double", "save"}
    assert found["double"].writes == ("y",)
    assert found["double"].takes_batch
    assert not found["save"].takes_batch


def test_rows_are_row_numbers() -> None:
    (rows,) = THREE_D_PROTO.distribute(Ranks(MeshShape(data=2)), 3, 1)
    assert rows.dtype == np.int64


def every_other(ranks: Ranks, n_rows: int, group: int) -> list[np.ndarray]:
    return [np.arange(rank, n_rows, ranks.processes) for rank in range(ranks.processes)]


def every_row(ranks: Ranks, n_rows: int, group: int) -> list[np.ndarray]:
    return [np.arange(n_rows)] * ranks.processes


def of_first(ranks: Ranks, n_rows: int, group: int) -> list[np.ndarray]:
    return [np.arange(n_rows if rank == 0 else 0) for rank in range(ranks.processes)]


@pytest.mark.parametrize(
    ("distribute", "collect", "message"),
    [
        (every_other, of_first, r"rank 0 answers for \[1 3\], not given to it"),
        (
            ONE_TO_ALL.distribute,
            ONE_TO_ALL.distribute,
            r"rows \[0 1 2 3\] are answered \[2 2 2 2\]",
        ),
        (every_other, lambda *_: [np.arange(0)] * 2, r"rows \[0 1 2 3\] are answered \[0 0 0 0\]"),
        (every_other, lambda *_: [np.arange(4)], r"rows for 2 and 1"),
        (lambda *_: [np.array([1, 0])] * 2, every_other, r"rank 0 is given \[1 0\], which must"),
        (lambda *_: [np.arange(5)] * 2, every_other, r"rank 0 is given \[0 1 2 3 4\]"),
    ],
)
def test_a_protocol_that_loses_or_repeats_rows_is_refused(
    distribute: Any, collect: Any, message: str
) -> None:
    """Their columns would hold what the memory held before."""
    protocol = Protocol("MINE", distribute, collect)
    with pytest.raises(ValueError, match=f"protocol MINE for 4 rows in 2 process.*{message}"):
        protocol.split(Ranks(MeshShape(data=2), 2), 4, 1)
