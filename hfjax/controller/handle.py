# SPDX-License-Identifier: Apache-2.0
"""Role handles: a method call becomes rows for each process and columns that are futures."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np

from hfjax.batch import Batch, Future, Metrics, Piece, take
from hfjax.controller.calls import CallRecord, Calls, PendingCall
from hfjax.controller.pool import LocalPool, LocalRuntime, Pool, Runtime
from hfjax.controller.protocol import Method, Ranks, methods_of
from hfjax.controller.ray_pool import RayRuntime
from hfjax.controller.worker import BUILD, Call
from hfjax.engine.exchange import Exchange
from meshes.mesh import MeshShape
from meshes.placement import Placement, RolePlacement

RUNTIMES: dict[str, Callable[..., Runtime]] = {"local": LocalRuntime, "ray": RayRuntime}
DRIVER = "driver"  # the pool of roles that live beside the controller
SEND, RECEIVE = "send_weights", "receive_weights"  # methods of a role and of its second copy
NO_COPY = "this role does not generate; remove generate_pool, and relay 'two-copies' with it"
IN_FLIGHT = 2  # buckets of weights on their way between pools
Split = tuple[Callable[..., Any], Callable[..., Any], Exchange]  # of a role and its second copy


class Reply:
    """Values of a method without columns, of the processes that answer, still on their way."""

    def __init__(self, calls: Calls, call: PendingCall, ranks: Sequence[int]) -> None:
        self._calls, self._call, self._ranks = calls, call, ranks

    @property
    def done(self) -> bool:
        """Whether all processes have answered."""
        return self._calls.seen(self._call)

    def result(self, timeout_s: float | None = None) -> list[Any]:
        """The values in the protocol's order, waiting for all processes."""
        infos = self._calls.finish(self._call, timeout_s)
        return [infos[rank].value for rank in self._ranks]


class RoleHandle:
    """A role as the controller sees it; its attributes are the role's declared methods.

    `handle.name(batch, **kwargs)` gives a Batch of the written columns as futures, or Metrics where
    a method writes none, or, for a method without columns, a Reply. With runtime 'ray' it returns
    at once; a role in this process (beside the controller, or runtime 'local') computes first.
    `group=k` says how many neighbouring rows stay together where these are not the run's.
    """

    def __init__(
        self,
        role: str,
        builder: Callable[..., Any],
        pool: Pool,
        ranks: Ranks,
        models: "Models",
    ) -> None:
        self.role, self.pool, self.ranks, self.models = role, pool, ranks, models
        self.second_copy: SecondCopy | None = None
        self.n_calls = 0  # any of them may have changed the weights
        self.methods = handle_methods(builder)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        second = self.__dict__.get("second_copy")
        if second and name in second.handle.methods:
            return partial(second.call, name)
        if name.startswith("_") or name not in self.methods:
            raise AttributeError(
                f"role {self.role!r} has no method {name!r}; it has {', '.join(self.methods)}"
            )
        declared = self.methods[name]
        return partial(self._call if declared.takes_batch else self._command, name, declared)

    def _call(
        self,
        name: str,
        declared: Method,
        batch: Batch,
        /,
        *,
        group: int | None = None,
        **kwargs: Any,
    ) -> Any:
        models = self.models
        models.calls.check()
        self.n_calls += 1
        columns = self._columns(name, declared, batch)
        n_rows, group = len(batch), models.group if group is None else group
        rows, answers = declared.protocol.split(self.ranks, n_rows, group)
        pieces, values = self._distributed(columns, rows)
        calls = [
            Call(
                role=self.role,
                method=name,
                step=models.step,
                kwargs=kwargs,
                columns=pieces[rank],
                rows=rows[rank],
                answers=answers[rank],
                n_rows=n_rows,
                group=group,
                writes=declared.writes,
            )
            for rank in range(self.pool.processes)
        ]
        inputs = [c.calls for c in columns.values() if isinstance(c, Future)]
        refs, call = self.send(calls, values, frozenset().union(*inputs))
        metrics = Metrics(lambda timeout_s: models.calls.finish(call, timeout_s)[0].metrics)
        if not declared.writes:
            return metrics
        written = {}
        for index, column in enumerate(declared.writes):
            made = [
                Piece(mine[index], held, np.arange(len(held)))
                for mine, held in zip(refs, answers, strict=True)
                if len(held)
            ]
            made_by = frozenset({call.number})
            written[column] = Future(made, n_rows, models.calls.fetch, made_by)
        return Batch(written, metrics=metrics)

    def _command(self, name: str, declared: Method, /, *args: Any, **kwargs: Any) -> Reply:
        models = self.models
        models.calls.check()
        self.n_calls += 1
        ranks, protocol = range(self.pool.processes), declared.protocol
        for value in (*args, *kwargs.values()) if protocol.apart else ():
            if not isinstance(value, list | tuple) or len(value) != len(ranks):
                raise ValueError(
                    f"{self.role}.{name} is {protocol.name}: give each argument as a list with one "
                    f"value for each of the {len(ranks)} processes"
                )

        def own(value: Any, rank: int) -> Any:
            return value[rank] if protocol.apart else value

        calls = [
            Call(
                self.role,
                name,
                models.step,
                tuple(own(value, rank) for value in args),
                {key: own(value, rank) for key, value in kwargs.items()},
            )
            for rank in ranks
        ]
        _, pending = self.send(calls, [[] for _ in ranks], frozenset())
        return Reply(models.calls, pending, protocol.replies(self.ranks))

    def send(
        self, calls: list[Call], values: list[list[Any]], inputs: frozenset[int]
    ) -> tuple[list[list[Any]], PendingCall]:
        """Sends a call to each process with the values that follow it; refs of what they give."""
        refs = self.pool.call(list(zip(calls, values, strict=True)))
        infos = [mine[-1] for mine in refs]
        first = calls[0]
        pending = self.models.calls.submit(
            first.role, first.method, first.step, self.pool, inputs, infos
        )
        return refs, pending

    def _columns(self, name: str, declared: Method, batch: Batch) -> dict[str, Any]:
        if not len(batch):
            raise ValueError(f"{self.role}.{name} was given a batch without rows")
        missing = [column for column in declared.reads if column not in batch]
        if missing:
            raise KeyError(
                f"{self.role}.{name} reads column {missing[0]!r}, which the batch lacks; "
                f"it has {', '.join(batch.names)}"
            )
        optional = [column for column in declared.optional if column in batch]
        return {column: batch.column(column) for column in (*declared.reads, *optional)}

    def _distributed(
        self, columns: Mapping[str, Any], rows: list[np.ndarray]
    ) -> tuple[list[dict[str, list[Piece]]], list[list[Any]]]:
        """For each process: where its rows stand in which values, and the refs of those values.

        Futures go as refs, so their payload moves from worker to worker; rows that several
        processes hold are stored once.
        """
        pieces: list[dict[str, list[Piece]]] = [{} for _ in rows]
        values: list[list[Any]] = [[] for _ in rows]
        holders = Counter(mine.tobytes() for mine in rows)
        for name, column in columns.items():
            stored: dict[bytes, Any] = {}
            for rank, mine in enumerate(rows):
                if isinstance(column, Future):
                    parts = column.take(mine).pieces
                    pieces[rank][name] = [part.unbound() for part in parts]
                    values[rank] += [part.ref for part in parts]
                    continue
                key, every = mine.tobytes(), range(len(mine))
                if key not in stored:
                    part = take(column, mine)
                    stored[key] = self.models.runtime.share(part) if holders[key] > 1 else part
                pieces[rank][name] = [Piece(None, every, every)]
                values[rank].append(stored[key])
        if self.pool.here:
            values = [self.models.calls.fetch(mine) for mine in values]
        return pieces, values


class SecondCopy:
    """Where the weights of a role generate in another pool (relay "two-copies").

    Before a call they are sent there if the role was called since, bucket by bucket, from worker
    to worker; a bucket waits until the one before the last has arrived.
    """

    def __init__(self, first: RoleHandle, handle: RoleHandle, exchange: Exchange) -> None:
        self.first, self.handle, self.exchange = first, handle, exchange
        self._calls = -1  # of the first copy when weights were last sent

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """A method of the second copy, with the newest weights."""
        self.handle.models.calls.check()
        if self._calls != self.first.n_calls:
            self._renew()
        return getattr(self.handle, name)(*args, **kwargs)

    def _renew(self) -> None:
        arrived: list[tuple[list[Any], frozenset[int]]] = [([], frozenset())] * IN_FLIGHT
        for bucket in range(len(self.exchange.buckets)):
            after, inputs = arrived[bucket]
            parcels, sent = self._transfer(bucket, after, inputs)
            arrived.append(self._received(bucket, parcels, sent))
        self._calls = self.first.n_calls

    def _transfer(
        self, bucket: int, after: list[Any], inputs: frozenset[int]
    ) -> tuple[dict[int, list[Any]], frozenset[int]]:
        """Refs of the parcels that each process of the first pool writes."""
        first, ranks = self.first, range(self.first.pool.processes)
        counts = [len(self.exchange.parcels(bucket, writer=rank)) for rank in ranks]
        names = [tuple(f"parcel {k}" for k in range(count)) for count in counts]
        step = first.models.step
        calls = [Call(first.role, SEND, step, (bucket,), writes=mine) for mine in names]
        refs, pending = first.send(calls, [after for _ in ranks], inputs)
        parcels = {rank: mine[:-1] for rank, mine in enumerate(refs)}
        return parcels, frozenset({pending.number})

    def _received(
        self, bucket: int, parcels: dict[int, list[Any]], sent: frozenset[int]
    ) -> tuple[list[Any], frozenset[int]]:
        """Refs that are there when every process of the second pool has taken its parcels."""
        handle, waiting = self.handle, {rank: iter(mine) for rank, mine in parcels.items()}
        refs = [(parcel, next(waiting[parcel.writer])) for parcel in self.exchange.parcels(bucket)]
        ranks = range(handle.pool.processes)
        values = [[ref for parcel, ref in refs if rank in parcel.readers] for rank in ranks]
        call = Call(handle.role, RECEIVE, handle.models.step, (bucket,))
        replies, pending = handle.send([call for _ in ranks], values, sent)
        return [mine[-1] for mine in replies], frozenset({pending.number})


class Models:
    """All roles of a run, as attributes by name; also a context manager that ends the pools."""

    def __init__(self, runtime: Runtime, deadline_s: float, group: int) -> None:
        self.runtime, self.group = runtime, group
        self.handles: dict[str, RoleHandle] = {}
        self.calls = Calls(runtime, deadline_s, self.shutdown)
        self.step = 0  # the caller counts; calls, errors and records carry it
        self.memory: dict[str, Any] = {}  # what an algorithm keeps between steps, as JSON has it
        self.rollout_agrees = False  # log-probs while sampling are training's to rounding
        self.more_texts: Callable[[], Batch]  # of the pretraining loss
        self.more_prompts: Callable[[], Batch]  # the next batch of prompts, where a run has them

    def __getattr__(self, name: str) -> RoleHandle:
        handles = self.__dict__.get("handles", {})
        if name not in handles:
            raise AttributeError(f"no role {name!r}; this run has {', '.join(handles)}")
        return handles[name]

    def __enter__(self) -> "Models":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.shutdown()

    @property
    def waits(self) -> bool:
        """Whether any call is under way."""
        return bool(self.calls.open)

    def drain(self, step: float = math.inf) -> list[CallRecord]:
        """Waits for every call up to a step; their records since the last drain, in call order."""
        return self.calls.drain(step)

    def shutdown(self) -> None:
        """Ends every pool and its processes; safe to repeat."""
        for handle in self.handles.values():
            if isinstance(handle.pool, LocalPool):
                handle.pool.worker.close()
        self.runtime.close()


def start(
    placement: Placement,
    builders: Mapping[str, Callable[..., Any]],
    *,
    runtime: str = "ray",
    deadline_s: float = 1800.0,
    start_deadline_s: float = 180.0,
    group: int = 1,
    log_to_driver: bool = True,
) -> Models:
    """Starts the pools of a placement and builds every role in its pool.

    A builder is a role class or a partial of one, called with a RoleContext; a class with
    `on_driver = True` is built beside the controller and needs no placement. `deadline_s` bounds
    each call, `start_deadline_s` the start of processes; `group` rows stay on one replica.
    """
    if runtime not in RUNTIMES:
        raise ValueError(f"runtime={runtime!r} is unknown; use {' or '.join(RUNTIMES)}")
    on_driver = [role for role, builder in builders.items() if _on_driver(builder)]
    placement.check([role for role in builders if role not in on_driver])
    splits = {role: _split(placement, role, builders[role]) for role in placement.roles}
    limits = {"deadline_s": deadline_s, "start_deadline_s": start_deadline_s}
    options = {"log_to_driver": log_to_driver, **limits} if runtime == "ray" else {}
    world = RUNTIMES[runtime](placement.platform, **options)
    models = Models(world, deadline_s, group)
    try:
        for role in on_driver:  # first: what it refuses shall cost no process
            pool = LocalPool(DRIVER)
            models.handles[role] = RoleHandle(
                role, builders[role], pool, Ranks(MeshShape()), models
            )
            pool.build(role, builders[role], None)
        pools = world.open(list(placement.pools.values()))
        _place(models, builders, placement, pools, splits)
    except BaseException:
        models.shutdown()
        raise
    return models


def _place(
    models: Models,
    builders: Mapping[str, Callable[..., Any]],
    placement: Placement,
    pools: Mapping[str, Pool],
    splits: Mapping[str, Split | None],
) -> None:
    """Builds the placed roles, with their second copies; pools work side by side."""

    def build(role: str, builder: Callable[..., Any], where: RolePlacement) -> RoleHandle:
        pool = pools[where.pool]
        own = where.scoring is not where
        infer = Ranks(where.scoring.mesh_shape, pool.processes) if own else None
        ranks = Ranks(
            *(where.mesh_shape, pool.processes, where.train_batch, where.generate_batch), infer
        )
        handle = RoleHandle(role, builder, pool, ranks, models)
        infos = pool.build(role, builder, where)
        models.calls.submit(role, BUILD, 0, pool, frozenset(), infos)
        return handle

    for role, where in placement.roles.items():
        second, split = placement.rollout(role), splits[role]
        builder = split[0] if split else builders[role]
        handle = models.handles[role] = build(role, builder, where)
        if split and second:
            handle.second_copy = SecondCopy(handle, build(role, split[1], second), split[2])
    models.drain()


def _split(placement: Placement, role: str, builder: Callable[..., Any]) -> Split | None:
    """Builders of a role and of its second copy; None of a role that has no such copy."""
    second, where = placement.rollout(role), placement.roles[role]
    if second is None:
        return None
    two_copies = getattr(_unwrapped(builder)[0], "two_copies", None)
    if two_copies is None:
        raise ValueError(f"[{role}] generate_pool: {NO_COPY}")
    processes = tuple(placement.pools[each.pool].processes for each in (where, second))
    return two_copies(builder, where, second, processes)


def handle_methods(builder: Callable[..., Any]) -> dict[str, Method]:
    """The declared methods of a role, with the columns that its settings add."""
    role_class, settings = _unwrapped(builder)
    declared = methods_of(role_class).items()
    return {name: _with_extra(method, settings) for name, method in declared}


def _unwrapped(builder: Callable[..., Any]) -> tuple[Any, Mapping[str, Any]]:
    """The role class behind a builder, and the settings bound to it."""
    if isinstance(builder, partial):
        return builder.func, builder.keywords
    return builder, {}


def _on_driver(builder: Callable[..., Any]) -> bool:
    return getattr(_unwrapped(builder)[0], "on_driver", False)


def _with_extra(declared: Method, settings: Mapping[str, Any]) -> Method:
    """The method with the columns that the role's setting adds to its reads."""
    extra: Iterable[str] = settings.get(declared.extra, ()) if declared.extra else ()
    reads = dict.fromkeys((*declared.reads, *extra))
    return Method(declared.protocol, tuple(reads), declared.optional, declared.writes)
