# SPDX-License-Identifier: Apache-2.0
"""Rows and answering processes of each protocol, worked out by hand from the paper's Table 3."""

from itertools import product

import numpy as np
import pytest

from hfjax.controller.protocol import (
    ALL_TO_ALL,
    DP_PROTO,
    ONE_TO_ALL,
    THREE_D_ALL_MICRO_DP,
    THREE_D_PP_ONLY,
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


def both(protocol: Protocol, ranks: Ranks, n_rows: int, group: int = 1) -> tuple[list, list]:
    rows = protocol.distribute(ranks, n_rows, group)
    answers = protocol.collect(ranks, n_rows, group)
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


def test_data_parallel_scatters_over_processes() -> None:
    # Eight replicas of one row; two processes of four devices: rows 0-3 and 4-7, all answer.
    rows, answers = both(DP_PROTO, Ranks(MeshShape(data=8), 2), 8)
    assert rows == answers == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_3d_broadcasts_inside_a_replica_and_hears_its_last_stage() -> None:
    # (p, t, d) = (2, 2, 2) in four processes of two devices. Device order: data, pipe, tensor, so
    # process 0 is replica 0 stage 0, process 1 is replica 0 stage 1 (both tensor ranks), and so on.
    rows, answers = both(THREE_D_PROTO, Ranks(MeshShape(data=2, pipe=2, tensor=2), 4), 4)
    assert rows == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert answers == [[], [0, 1], [], [2, 3]]


def test_3d_with_tensor_ranks_over_processes_hears_tensor_rank_0() -> None:
    # One replica over two processes: process 1 holds tensor ranks 2 and 3 and stays silent.
    rows, answers = both(THREE_D_PROTO, Ranks(MeshShape(tensor=2, tensor_micro=2), 2), 3)
    assert rows == [[0, 1, 2], [0, 1, 2]]
    assert answers == [[0, 1, 2], []]


def test_micro_dp_gives_each_generation_replica_its_own_rows() -> None:
    # Figure 8b: train 1-4-2, generate 1-2-2-2. Training replica 0 is devices 0-3; its micro-DP
    # groups are neighbours (0, 1) and (2, 3), so devices 0 and 2 are generation replica 0.
    shape = MeshShape(data=2, tensor=2, tensor_micro=2)
    rows, answers = both(THREE_D_ALL_MICRO_DP, Ranks(shape, 4), 8)
    assert rows == [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]]
    # (p=-1, t=0) of both generation replicas are devices 0 and 1, in the first process.
    assert answers == [[0, 1, 2, 3], [], [4, 5, 6, 7], []]
    single, _ = both(THREE_D_ALL_MICRO_DP, Ranks(shape, 8), 8)
    assert single[:4] == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_micro_dp_over_pipeline_stages_hears_the_last_one() -> None:
    # pipe 2 (kept) x pipe_micro 2: devices 0..3 are (stage, micro) 00 01 10 11; generation
    # replica = micro; its last stage is on devices 2 and 3.
    rows, answers = both(THREE_D_ALL_MICRO_DP, Ranks(MeshShape(pipe=2, pipe_micro=2), 4), 4)
    assert rows == [[0, 1], [2, 3], [0, 1], [2, 3]]
    assert answers == [[], [], [0, 1], [2, 3]]


def test_one_to_all_sends_everything_everywhere_and_hears_process_0() -> None:
    rows, answers = both(ONE_TO_ALL, Ranks(MeshShape(data=4), 2), 3)
    assert rows == [[0, 1, 2], [0, 1, 2]]
    assert answers == [[0, 1, 2], []]


@pytest.mark.parametrize(
    ("shape", "processes", "right"),
    [
        # Device order: data, pipe, pipe_micro, tensor. One device a process: stage s of replica 0
        # at tensor rank 0 is device 2 s.
        (MeshShape(data=2, pipe=2, tensor=2), 8, [0, 2]),
        (MeshShape(data=2, pipe=2, tensor=2), 4, [0, 1]),  # a stage a process
        (MeshShape(data=2, pipe=2, tensor=2), 2, [0]),  # both stages of replica 0 in one
        (MeshShape(pipe=2, pipe_micro=2), 4, [0, 1, 2, 3]),
        (MeshShape(data=8), 8, [0]),
    ],
)
def test_pp_only_hears_a_process_a_stage(
    shape: MeshShape, processes: int, right: list[int]
) -> None:
    assert THREE_D_PP_ONLY.replies(Ranks(shape, processes)) == right
    assert ONE_TO_ALL.replies(Ranks(shape, processes)) == list(range(processes))
    assert ALL_TO_ALL.replies(Ranks(shape, processes)) == list(range(processes))


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
