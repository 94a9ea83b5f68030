# SPDX-License-Identifier: Apache-2.0
"""Transfer protocols: which rows each process gets, which processes answer, and who declares it.

A protocol is data on a role's method (HybridFlow Table 3): two pure functions of where the
processes stand on the role's mesh. Rows are split over batch replicas in contiguous chunks.

A protocol of one's own is a Protocol with two such functions. Here each process gets every k-th row
of k processes, and answers for what it got:

    def every_kth(ranks: Ranks, n_rows: int, group: int) -> Rows:
        return [np.arange(rank, n_rows, ranks.processes) for rank in range(ranks.processes)]

    EVERY_KTH = Protocol("EVERY_KTH", distribute=every_kth, collect=every_kth)

    class Judge:
        @method(EVERY_KTH, reads=("x",), writes=("score",))
        def judge(self, shard: Shard) -> Answer: ...

`ranks.shape` and meshes.mesh.coordinates say where on the mesh a device lies.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from meshes.layouts import generate_batch, train_batch
from meshes.mesh import AXES, PIPE, PIPE_MICRO, MeshShape, coordinates

MARK = "__hfjax_method__"


class Ranks(NamedTuple):
    """Where a pool's processes stand on a role's mesh: process i owns k neighbouring devices."""

    shape: MeshShape
    processes: int = 1
    train_batch: tuple[str, ...] = train_batch()  # mesh axes that split the rows
    generate_batch: tuple[str, ...] = generate_batch()
    own_infer: "Ranks | None" = None  # on the mesh of a layout that is for scoring alone

    @property
    def scoring(self) -> "Ranks":
        """Where the processes stand on the mesh that scores."""
        return self.own_infer or self

    def replica_of_process(self, axes: tuple[str, ...], devices: np.ndarray) -> list[np.ndarray]:
        """For each process, the replicas over `axes` that its devices (a bool mask) touch."""
        coords, sizes = coordinates(self.shape), self.shape.sizes
        columns = [AXES.index(axis) for axis in axes]
        replica = np.asarray(
            np.ravel_multi_index(tuple(coords[:, columns].T), [sizes[c] for c in columns])
        )
        split = np.split(np.arange(self.shape.devices), self.processes)
        return [np.unique(replica[mine[devices[mine]]]) for mine in split]


Rows = list[np.ndarray]  # ascending global row numbers, for each process


def everyone(ranks: Ranks) -> list[int]:
    """Every process, by rank."""
    return list(range(ranks.processes))


@dataclass(frozen=True)
class Protocol:
    """`distribute` and `collect` give rows for each process from (ranks, rows, group).

    Both are pure: every call asks them. Rows of a process ascend; `group` neighbouring rows are
    samples of one prompt, which generation needs in one process. Each row must be collected from
    exactly one process, one that was given it. Of methods without columns, which have no rows,
    `replies` names the processes whose values come back, in order; `apart`: each argument is a
    sequence with one value for each process.
    """

    name: str
    distribute: Callable[[Ranks, int, int], Rows]
    collect: Callable[[Ranks, int, int], Rows]
    replies: Callable[[Ranks], list[int]] = everyone
    apart: bool = False

    def split(self, ranks: Ranks, n_rows: int, group: int) -> tuple[Rows, Rows]:
        """Rows given to each process and rows it answers for; refuses what loses or repeats any."""
        rows, answers = (f(ranks, n_rows, group) for f in (self.distribute, self.collect))
        where = f"protocol {self.name} for {n_rows} rows in {ranks.processes} process(es)"
        if {len(rows), len(answers)} != {ranks.processes}:
            raise ValueError(f"{where}: it gives rows for {len(rows)} and {len(answers)}")
        for rank, (given, answered) in enumerate(zip(rows, answers, strict=True)):
            if (np.diff(given) <= 0).any() or not np.isin(given, np.arange(n_rows)).all():
                raise ValueError(f"{where}: rank {rank} is given {given[:8]}, which must ascend")
            if not np.isin(answered, given).all():
                wrong = np.setdiff1d(answered, given)[:8]
                raise ValueError(f"{where}: rank {rank} answers for {wrong}, not given to it")
        count = np.bincount(np.concatenate(answers), minlength=n_rows)
        if (count != 1).any():
            wrong = np.flatnonzero(count != 1)[:8]
            raise ValueError(f"{where}: rows {wrong} are answered {count[wrong]} times, not once")
        return rows, answers


def rows_per_replica(n_rows: int, replicas: int, group: int) -> int:
    """Rows in a replica's chunk: a multiple of `group`, to keep a prompt's samples together."""
    groups = -(-n_rows // group)
    return -(-groups // replicas) * group


def rows_of_replica(n_rows: int, replicas: int, group: int) -> list[range]:
    """The rows of each replica; the last ones may have fewer, or none."""
    per = rows_per_replica(n_rows, replicas, group)
    return [range(min(r * per, n_rows), min((r + 1) * per, n_rows)) for r in range(replicas)]


def over_replicas(
    name: str,
    axes_of: Callable[[Ranks], tuple[str, ...]],
    mesh_of: Callable[[Ranks], Ranks] = lambda ranks: ranks,
) -> Protocol:
    """Rows split over the replicas that some mesh axes make, repeated inside each replica.

    `mesh_of` says on which of the role's meshes. A replica's answer comes from the device at its
    last pipeline stage and first tensor rank, (p=-1, t=0) in the paper, so from the first process
    that holds it there.
    """

    def rows(ranks: Ranks, n_rows: int, group: int, devices: np.ndarray) -> Rows:
        axes = axes_of(ranks)
        replicas = ranks.shape.over(axes)
        chunks = [np.array(r, np.int64) for r in rows_of_replica(n_rows, replicas, group)]
        held = ranks.replica_of_process(axes, devices)
        return [np.concatenate([chunks[r] for r in mine] or [chunks[0][:0]]) for mine in held]

    def distribute(ranks: Ranks, n_rows: int, group: int) -> Rows:
        ranks = mesh_of(ranks)
        return rows(ranks, n_rows, group, np.ones(ranks.shape.devices, bool))

    def collect(ranks: Ranks, n_rows: int, group: int) -> Rows:
        ranks = mesh_of(ranks)
        leads = np.ones(ranks.shape.devices, bool)
        for index, axis in enumerate(AXES):
            if axis not in axes_of(ranks):
                at = ranks.shape.sizes[index] - 1 if axis in (PIPE, PIPE_MICRO) else 0
                leads &= coordinates(ranks.shape)[:, index] == at
        return rows(ranks, n_rows, group, leads)

    return Protocol(name, distribute, collect)


def _all_rows(ranks: Ranks, n_rows: int, group: int) -> Rows:
    return [np.arange(n_rows)] * ranks.processes


def _rows_from_first(ranks: Ranks, n_rows: int, group: int) -> Rows:
    return [np.arange(n_rows if rank == 0 else 0) for rank in range(ranks.processes)]


def _stage_leads(ranks: Ranks) -> list[int]:
    """The processes that hold (t=0, d=0) of a pipeline stage, in the order of stages, each once."""
    coords = coordinates(ranks.shape)
    stage = coords[:, AXES.index(PIPE)] * ranks.shape.pipe_micro + coords[:, AXES.index(PIPE_MICRO)]
    others = [index for index, axis in enumerate(AXES) if axis not in (PIPE, PIPE_MICRO)]
    leads = np.flatnonzero((coords[:, others] == 0).all(axis=1))
    per_process = ranks.shape.devices // ranks.processes
    in_order = leads[np.argsort(stage[leads])] // per_process
    return list(dict.fromkeys(in_order.tolist()))


DP_PROTO = over_replicas("DP_PROTO", lambda ranks: ranks.train_batch)
# Of forward passes, which run in the layout `infer` where a trained role has one of its own.
THREE_D_PROTO = over_replicas(
    "3D_PROTO", lambda ranks: ranks.train_batch, mesh_of=lambda ranks: ranks.scoring
)
THREE_D_ALL_MICRO_DP = over_replicas("3D_ALL_MICRO_DP", lambda ranks: ranks.generate_batch)
# The paper gathers from all ranks. A table can hold one answer a row, and all are equal here: it
# is process 0's. Values of methods without columns (save, load) do come from every process.
ONE_TO_ALL = Protocol("ONE_TO_ALL", _all_rows, _rows_from_first)
THREE_D_PP_ONLY = Protocol("3D_PP_ONLY", _all_rows, _rows_from_first, replies=_stage_leads)
ALL_TO_ALL = Protocol("ALL_TO_ALL", _all_rows, _rows_from_first, apart=True)


@dataclass
class Shard:
    """The rows of a batch that one process holds, on the host."""

    columns: dict[str, Any]  # name -> np.ndarray or list, len(rows) each; arrays are read-only
    rows: np.ndarray  # their numbers in the whole batch, ascending
    n_rows: int  # rows of the whole batch
    group: int  # rows that stay on one replica: the samples of a prompt
    step: int


@dataclass
class Answer:
    """What a role's method gives back for the rows its process holds."""

    columns: dict[str, Any]  # name -> np.ndarray or list, len(rows) each
    rows: np.ndarray
    metrics: Mapping[str, Any] = field(default_factory=dict)  # global numbers; rank 0's count


@dataclass(frozen=True)
class Method:
    """How a role's method is called: its protocol and its columns."""

    protocol: Protocol
    reads: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()  # read where the batch has them
    writes: tuple[str, ...] = ()
    extra: str = ""  # the role's setting that lists more columns to read

    @property
    def takes_batch(self) -> bool:
        return bool(self.reads or self.optional or self.writes)


F = TypeVar("F", bound=Callable[..., Any])


def method(
    protocol: Protocol,
    *,
    reads: tuple[str, ...] = (),
    optional: tuple[str, ...] = (),
    writes: tuple[str, ...] = (),
    extra: str = "",
) -> Callable[[F], F]:
    """Declares a role's method as callable from the controller.

    With columns, it runs as `role.name(shard, **kwargs) -> Answer` on the rows its process gets;
    without, as `role.name(*args, **kwargs)` in every process, and gives any value that can be sent.
    """

    if (reads or optional or writes) and (protocol.apart or protocol.replies is not everyone):
        raise ValueError(f"{protocol.name} is for methods without columns")

    def mark(function: F) -> F:
        setattr(function, MARK, Method(protocol, reads, optional, writes, extra))
        return function

    return mark


def methods_of(role_class: type) -> dict[str, Method]:
    """The declared methods of a role class, by name."""
    members = inspect.getmembers(role_class, inspect.isfunction)
    return {name: getattr(m, MARK) for name, m in members if getattr(m, MARK, None) is not None}
