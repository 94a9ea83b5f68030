# SPDX-License-Identifier: Apache-2.0
"""Table 3 of HybridFlow as numbers, written by hand, and a role with a method of each protocol.

Ranks are devices in the paper's order: those of a data parallel replica are neighbours, stage by
stage, tensor ranks innermost. A process owns neighbouring ranks; with as many processes as devices
a line of the table is the paper's own, rank by rank.
"""

from collections.abc import Sequence

import numpy as np

from hfjax.batch import Batch
from hfjax.controller.handle import Models, RoleHandle, start
from hfjax.controller.protocol import (
    ALL_TO_ALL,
    DP_PROTO,
    ONE_TO_ALL,
    THREE_D_ALL_MICRO_DP,
    THREE_D_PP_ONLY,
    THREE_D_PROTO,
    Answer,
    Protocol,
    Ranks,
    Rows,
    Shard,
    method,
)
from hfjax.controller.worker import RoleContext
from meshes.mesh import MeshShape, coordinates
from meshes.placement import Placement, Pool, RolePlacement


def mesh(p: int, t: int, d: int, p_g: int = 0, t_g: int = 0) -> MeshShape:
    """Training p-t-d, generation p_g-t_g (as training, if not given)."""
    p_g, t_g = p_g or p, t_g or t
    return MeshShape(data=d, pipe=p_g, pipe_micro=p // p_g, tensor=t_g, tensor_micro=t // t_g)


def last_rows_first(ranks: Ranks, n_rows: int, group: int) -> Rows:
    """The first process gets the upper half of the rows, the last one the lower half."""
    half = n_rows // 2
    middle = [np.arange(0)] * (ranks.processes - 2)
    if ranks.processes == 1:
        return [np.arange(n_rows)]
    return [np.arange(half, n_rows), *middle, np.arange(half)]


def of_the_last_rank(ranks: Ranks, n_rows: int, group: int) -> Rows:
    """All rows from the process that holds the mesh's last device: last stage, tensor, replica."""
    last = int(np.lexsort(coordinates(ranks.shape).T[::-1])[-1])
    holder = last * ranks.processes // ranks.shape.devices
    return [np.arange(n_rows if rank == holder else 0) for rank in range(ranks.processes)]


SWAPPED = Protocol("SWAPPED", distribute=last_rows_first, collect=last_rows_first)
LAST_RANK = Protocol("LAST_RANK", distribute=ONE_TO_ALL.distribute, collect=of_the_last_rank)

ALL, LOW4, HIGH4 = "01234567", "0123 0123 0123 0123", "4567 4567 4567 4567"
THREE_D, MICRO_DP = THREE_D_PROTO, THREE_D_ALL_MICRO_DP
# protocol, mesh, processes, rows given to each process, rows it answers for; - is none.
# Rows are 0 to 7; in meshes of three replicas, 0 to 5.
TABLE: list[tuple[Protocol, MeshShape, int, str, str]] = [
    # Pure data parallel: a replica is a rank, each answers for what it was given.
    (DP_PROTO, mesh(1, 1, 2), 1, ALL, ALL),
    (DP_PROTO, mesh(1, 1, 2), 2, "0123 4567", "0123 4567"),
    (DP_PROTO, mesh(1, 1, 4), 4, "01 23 45 67", "01 23 45 67"),
    (DP_PROTO, mesh(1, 1, 8), 1, ALL, ALL),
    (DP_PROTO, mesh(1, 1, 8), 2, "0123 4567", "0123 4567"),
    (DP_PROTO, mesh(1, 1, 8), 8, "0 1 2 3 4 5 6 7", "0 1 2 3 4 5 6 7"),
    # 3D: the same rows within a replica, heard from its last stage and first tensor rank.
    (THREE_D, mesh(2, 2, 2), 1, ALL, ALL),
    (THREE_D, mesh(2, 2, 2), 2, "0123 4567", "0123 4567"),
    (THREE_D, mesh(2, 2, 2), 4, "0123 0123 4567 4567", "- 0123 - 4567"),
    (THREE_D, mesh(2, 2, 2), 8, f"{LOW4} {HIGH4}", "- - 0123 - - - 4567 -"),
    (THREE_D, mesh(1, 4, 2), 2, "0123 4567", "0123 4567"),
    (THREE_D, mesh(1, 4, 2), 8, f"{LOW4} {HIGH4}", "0123 - - - 4567 - - -"),
    (THREE_D, mesh(1, 8, 1), 2, f"{ALL} {ALL}", f"{ALL} -"),
    (THREE_D, mesh(4, 2, 1), 2, f"{ALL} {ALL}", f"- {ALL}"),
    (THREE_D, mesh(4, 2, 1), 8, " ".join([ALL] * 8), f"- - - - - - {ALL} -"),
    (THREE_D, mesh(1, 2, 2), 1, ALL, ALL),
    (THREE_D, mesh(1, 2, 2), 4, "0123 0123 4567 4567", "0123 - 4567 -"),
    # Figure 5b: from an actor of 1-2-3 to a critic of 2-1-2.
    (THREE_D, mesh(1, 2, 3), 6, "01 01 23 23 45 45", "01 - 23 - 45 -"),
    (THREE_D, mesh(1, 2, 3), 2, "0123 2345", "0123 45"),
    # Generation: a replica of training becomes p t / (p_g t_g), and each has rows of its own.
    # Figure 8b, training 1-4-2, generation 1-2: its tensor groups are ranks 0 2, 1 3, 4 6, 5 7.
    (MICRO_DP, mesh(1, 4, 2, 1, 2), 1, ALL, ALL),
    (MICRO_DP, mesh(1, 4, 2, 1, 2), 2, "0123 4567", "0123 4567"),
    (MICRO_DP, mesh(1, 4, 2, 1, 2), 4, "0123 0123 4567 4567", "0123 - 4567 -"),
    (
        MICRO_DP,
        mesh(1, 4, 2, 1, 2),
        8,
        "01 23 01 23 45 67 45 67",
        "01 23 - - 45 67 - -",
    ),
    (MICRO_DP, mesh(1, 8, 1, 1, 2), 2, f"{ALL} {ALL}", f"{ALL} -"),
    (
        MICRO_DP,
        mesh(1, 8, 1, 1, 2),
        8,
        "01 23 45 67 01 23 45 67",
        "01 23 45 67 - - - -",
    ),
    (MICRO_DP, mesh(2, 2, 2, 1, 1), 2, "0123 4567", "0123 4567"),
    (MICRO_DP, mesh(2, 2, 2, 1, 1), 8, "0 1 2 3 4 5 6 7", "0 1 2 3 4 5 6 7"),
    (
        MICRO_DP,
        mesh(2, 2, 2, 2, 1),
        8,
        "01 23 01 23 45 67 45 67",
        "- - 01 23 - - 45 67",
    ),
    (
        MICRO_DP,
        mesh(2, 2, 2, 1, 2),
        8,
        "01 01 23 23 45 45 67 67",
        "01 - 23 - 45 - 67 -",
    ),
    (MICRO_DP, mesh(4, 2, 1, 2, 1), 2, f"{ALL} {ALL}", f"- {ALL}"),
    (
        MICRO_DP,
        mesh(4, 2, 1, 2, 1),
        8,
        "01 23 45 67 01 23 45 67",
        "- - - - 01 23 45 67",
    ),
    # Generation as training: the same as 3D.
    (MICRO_DP, mesh(1, 2, 2), 4, "0123 0123 4567 4567", "0123 - 4567 -"),
    # Everything everywhere. A table holds one answer a row: the first of equal ones.
    (ONE_TO_ALL, mesh(1, 2, 2), 1, ALL, ALL),
    (ONE_TO_ALL, mesh(2, 2, 2), 2, f"{ALL} {ALL}", f"{ALL} -"),
    (ONE_TO_ALL, mesh(2, 2, 2), 8, " ".join([ALL] * 8), f"{ALL} - - - - - - -"),
    # Protocols of one's own.
    (SWAPPED, mesh(1, 1, 8), 1, ALL, ALL),
    (SWAPPED, mesh(1, 1, 8), 2, "4567 0123", "4567 0123"),
    (SWAPPED, mesh(2, 2, 2), 4, "4567 - - 0123", "4567 - - 0123"),
    (LAST_RANK, mesh(2, 2, 2), 2, f"{ALL} {ALL}", f"- {ALL}"),
]

# Methods without rows, told "x" (each process its own with ALL_TO_ALL): protocol, mesh, processes,
# what each process is told, and the processes whose values come back, in order.
COMMANDS: list[tuple[Protocol, MeshShape, int, str, str]] = [
    (ONE_TO_ALL, mesh(2, 2, 2), 1, "x", "0"),
    (ONE_TO_ALL, mesh(2, 2, 2), 2, "x x", "0 1"),
    (ONE_TO_ALL, mesh(2, 2, 2), 8, "x x x x x x x x", "0 1 2 3 4 5 6 7"),
    (ALL_TO_ALL, mesh(1, 1, 4), 4, "a b c d", "0 1 2 3"),
    (ALL_TO_ALL, mesh(2, 2, 2), 1, "a", "0"),
    (ALL_TO_ALL, mesh(2, 2, 2), 2, "a b", "0 1"),
    # A value of each stage: from its tensor rank 0 in replica 0, of a process once.
    (THREE_D_PP_ONLY, mesh(1, 1, 8), 8, "x x x x x x x x", "0"),
    (THREE_D_PP_ONLY, mesh(1, 8, 1), 2, "x x", "0"),
    (THREE_D_PP_ONLY, mesh(2, 2, 2), 8, "x x x x x x x x", "0 2"),
    (THREE_D_PP_ONLY, mesh(2, 2, 2), 4, "x x x x", "0 1"),
    (THREE_D_PP_ONLY, mesh(2, 2, 2), 2, "x x", "0"),
    (THREE_D_PP_ONLY, mesh(2, 2, 2), 1, "x", "0"),
    (THREE_D_PP_ONLY, mesh(4, 2, 1), 8, "x x x x x x x x", "0 2 4 6"),
    (THREE_D_PP_ONLY, mesh(4, 2, 1, 2, 1), 8, "x x x x x x x x", "0 2 4 6"),
    (THREE_D_PP_ONLY, mesh(4, 2, 1), 2, "x x", "0 1"),
]


def rows_in(text: str) -> list[list[int]]:
    """The rows of each process."""
    return [[int(digit) for digit in part if digit != "-"] for part in text.split()]


class Listener:
    """A method of each protocol; it keeps what it was given and answers with its rank."""

    def __init__(self, context: RoleContext) -> None:
        self.rank, self.given = context.rank, []

    def _answer(self, shard: Shard) -> Answer:
        self.given.append(shard.rows.tolist())
        assert shard.columns["x"].tolist() == [10 * row for row in shard.rows]
        return Answer({"by": np.full(len(shard.rows), self.rank)}, shard.rows)

    @method(DP_PROTO, reads=("x",), writes=("by",))
    def dp(self, shard: Shard) -> Answer:
        return self._answer(shard)

    @method(THREE_D_PROTO, reads=("x",), writes=("by",))
    def three_d(self, shard: Shard) -> Answer:
        return self._answer(shard)

    @method(THREE_D_ALL_MICRO_DP, reads=("x",), writes=("by",))
    def micro_dp(self, shard: Shard) -> Answer:
        return self._answer(shard)

    @method(ONE_TO_ALL, reads=("x",), writes=("by",))
    def one_to_all(self, shard: Shard) -> Answer:
        return self._answer(shard)

    @method(SWAPPED, reads=("x",), writes=("by",))
    def swapped(self, shard: Shard) -> Answer:
        return self._answer(shard)

    @method(LAST_RANK, reads=("x",), writes=("by",))
    def last_rank(self, shard: Shard) -> Answer:
        return self._answer(shard)

    @method(ONE_TO_ALL)
    def tell_all(self, text: str) -> tuple[int, str]:
        return self.rank, text

    @method(ALL_TO_ALL)
    def tell_each(self, text: str) -> tuple[int, str]:
        return self.rank, text

    @method(THREE_D_PP_ONLY)
    def tell_stages(self, text: str) -> tuple[int, str]:
        return self.rank, text

    @method(ONE_TO_ALL)
    def taken(self) -> list[list[int]]:
        given, self.given = self.given, []
        return given


def listeners(shapes: Sequence[MeshShape], processes: int, runtime: str) -> Models:
    """A role for each mesh, m0 m1 ..., on one pool."""
    roles = {f"m{index}": shape for index, shape in enumerate(shapes)}
    table = {
        name: RolePlacement(
            *(name, "all"),
            train=MeshShape(
                data=s.data, pipe=s.pipe * s.pipe_micro, tensor=s.tensor * s.tensor_micro
            ),
            generate=MeshShape(pipe=s.pipe, tensor=s.tensor),
        )
        for name, s in roles.items()
    }
    pools = {"all": Pool("all", shapes[0].devices, processes)}
    placement = Placement(pools, table, "cpu")
    return start(placement, dict.fromkeys(roles, Listener), runtime=runtime, deadline_s=60)


def heard(role: RoleHandle, protocol: Protocol, n_rows: int) -> tuple[list, list]:
    """The rows that each process was given, and those it answered for, through the handle."""
    by = getattr(role, ROWS[protocol.name])(Batch(x=10 * np.arange(n_rows)))["by"]
    given = [rows for (rows,) in role.taken().result()]
    return given, [np.flatnonzero(by == rank).tolist() for rank in range(len(given))]


def told(role: RoleHandle, protocol: Protocol, texts: list[str]) -> tuple[list[str], list[int]]:
    """What each process that is heard was told, and their ranks, through the handle."""
    text = texts if protocol is ALL_TO_ALL else texts[0]
    replies = getattr(role, TELLS[protocol.name])(text).result()
    return [text for _, text in replies], [rank for rank, _ in replies]


ROWS = {"DP_PROTO": "dp", "3D_PROTO": "three_d", "3D_ALL_MICRO_DP": "micro_dp"}
ROWS |= {"ONE_TO_ALL": "one_to_all", "SWAPPED": "swapped", "LAST_RANK": "last_rank"}
TELLS = {"ONE_TO_ALL": "tell_all", "ALL_TO_ALL": "tell_each", "3D_PP_ONLY": "tell_stages"}
