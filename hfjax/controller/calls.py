# SPDX-License-Identifier: Apache-2.0
"""Calls in flight: waiting under deadlines, and which of several failures the user sees."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from hfjax.controller.pool import InputLost, Pool, ProcessDied, Runtime
from hfjax.controller.worker import CallInfo, RoleError, describe

log = logging.getLogger(__name__)

POLL_S = 1.0
GRACE_S = 10.0  # for the cause to show up after what failed for want of a peer or an input
FIRST_S = 2.0  # for the death of rank 0 to show up, without which none lives, and for older calls


@dataclass(frozen=True)
class CallRecord:
    """One finished call: for timing metrics and the timeline."""

    number: int
    step: int
    role: str
    method: str
    pool: str
    start_s: float  # time.time() of the first process that began
    end_s: float  # of the last that ended
    compiles: int  # of the process that compiled most
    inputs: frozenset[int]  # numbers of the calls whose columns it read
    infos: tuple[CallInfo, ...] = ()  # of its processes, without their values


@dataclass
class PendingCall:
    """A call whose processes have not all reported yet."""

    number: int
    step: int
    role: str
    method: str
    pool: Pool
    inputs: frozenset[int]
    infos: list[Any]  # a ref for each rank
    done: dict[int, CallInfo] = field(default_factory=dict)

    def where(self, rank: int) -> str:
        pool = self.pool
        return describe(self.role, self.method, self.step, pool.name, rank, pool.hosts[rank])

    def record(self) -> CallRecord:
        infos = self.done.values()
        return CallRecord(
            self.number,
            self.step,
            self.role,
            self.method,
            self.pool.name,
            min(info.start_s for info in infos),
            max(info.end_s for info in infos),
            max(info.compiles for info in infos),
            self.inputs,
            tuple(replace(info, metrics={}, value=None) for info in infos),
        )


@dataclass(frozen=True)
class Failure:
    call: PendingCall
    rank: int
    error: Exception

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Causes before consequences: exceptions, deaths, what lost a peer or its input.

        The death of rank 0, where a pool's processes meet, ends the others; a death ends the oldest
        of its process's calls first.
        """
        lost = isinstance(self.error, InputLost)
        if isinstance(self.error, ProcessDied) and not lost:
            return 1, min(self.rank, 1), self.call.number, self.rank
        lost |= isinstance(self.error, RoleError) and self.error.collective
        return (2 if lost else 0), 0, self.call.number, self.rank

    @property
    def patience_s(self) -> float:
        """How long its cause may take to show up."""
        return (0.0, FIRST_S, GRACE_S)[self.order[0]]

    def may_follow(self, call: PendingCall, rank: int) -> bool:
        """Whether what is still to be heard of a call may be the cause; rank 0's death has none."""
        mine = call.pool is self.call.pool and rank == self.rank
        return self.order[:2] != (1, 0) or (mine and call.number < self.call.number)


class Calls:
    """Everything the driver has asked for and not yet seen the end of; use it from one thread.

    A call may take `deadline_s` from when it could begin: its inputs done, no earlier call of
    its pool open. The first failure ends all pools (`end`) and is what every later use raises.
    """

    def __init__(self, runtime: Runtime, deadline_s: float, end: Callable[[], None]) -> None:
        self.runtime, self.deadline_s, self._end = runtime, deadline_s, end
        self.failure: Exception | None = None
        self.open: dict[int, PendingCall] = {}
        self.records: list[CallRecord] = []
        self._begun: dict[int, float] = {}  # call number -> when it could begin
        self._warned: set[str] = set()  # a warning is passed on once, whichever ranks repeat it
        self._next = 0

    def submit(
        self,
        role: str,
        method: str,
        step: int,
        pool: Pool,
        inputs: frozenset[int],
        infos: Sequence[Any],
    ) -> PendingCall:
        """Enters a call that was just sent; notices failures of earlier ones."""
        call = PendingCall(self._next, step, role, method, pool, inputs, list(infos))
        self._next += 1
        self.open[call.number] = call
        self._poll([], 0)
        return call

    def check(self) -> None:
        """Raises the failure that ended the pools, if there was one."""
        if self.failure is not None:
            raise self.failure

    def fetch(self, refs: Sequence[Any], timeout_s: float | None = None) -> list[Any]:
        """Values of refs; while it waits, a failure anywhere ends the wait."""
        self._wait(refs, timeout_s)
        try:
            return self.runtime.get(refs)
        except (RoleError, ProcessDied) as error:  # its own report may come a moment later
            self._poll([], GRACE_S)
            if isinstance(error, ProcessDied):
                self._stop(RoleError(f"{self._oldest()}a column is lost: {error}"))
            raise error

    def seen(self, call: PendingCall) -> bool:
        """Whether every process has reported of a call; does not wait."""
        self.check()
        self._poll([], 0)
        return call.number not in self.open

    def finish(self, call: PendingCall, timeout_s: float | None = None) -> list[CallInfo]:
        """What each process reports of a call, by rank."""
        self._wait(call.infos, timeout_s)
        return [call.done[rank] for rank in range(call.pool.processes)]

    def drain(self, step: float = math.inf) -> list[CallRecord]:
        """Waits for every call up to a step; their records since the last time, in call order."""
        awaited = [call for call in self.open.values() if call.step <= step]
        self._wait([ref for call in awaited for ref in call.infos], None)
        records = sorted(self.records, key=lambda record: record.number)
        self.records = [record for record in records if record.step > step]
        return [record for record in records if record.step <= step]

    def _wait(self, refs: Sequence[Any], timeout_s: float | None) -> None:
        self.check()
        until = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        waiting = self._poll(refs, 0)
        while waiting:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no result within {timeout_s:g} s")
            waiting = self._poll(waiting, min(POLL_S, left))
            self._check_deadlines()

    def _poll(self, refs: Sequence[Any], timeout_s: float) -> list[Any]:
        """Waits until something is ready, settles reports; the refs that are not ready."""
        reports = self._reports()
        awaited = [*refs, *(call.infos[rank] for call, rank in reports)]
        try:
            ready = self.runtime.ready(awaited, timeout_s)
        except ProcessDied as error:  # what all pools need
            self._stop(RoleError(f"{self._oldest()}{error}"))
        failures = self._settle(
            [report for report, done in zip(reports, ready[len(refs) :], strict=True) if done]
        )
        if failures:
            self._fail(failures)
        for call in self._runnable():
            self._begun.setdefault(call.number, time.monotonic())
        return [ref for ref, done in zip(refs, ready, strict=False) if not done]

    def _reports(self) -> list[tuple[PendingCall, int]]:
        return [
            (call, rank)
            for call in self.open.values()
            for rank in range(call.pool.processes)
            if rank not in call.done
        ]

    def _settle(self, reports: Sequence[tuple[PendingCall, int]]) -> list[Failure]:
        failures = []
        for call, rank in reports:
            try:
                (call.done[rank],) = self.runtime.get([call.infos[rank]])
            except Exception as error:
                failures.append(Failure(call, rank, error))
            else:
                self._pass_warnings_on(call, rank)
            if len(call.done) == call.pool.processes:
                del self.open[call.number]
                self._begun.pop(call.number, None)
                self.records.append(call.record())
        return failures

    def _pass_warnings_on(self, call: PendingCall, rank: int) -> None:
        for text in call.done[rank].warnings:
            if text not in self._warned:
                self._warned.add(text)
                log.warning("%s: %s", call.where(rank), text)

    def _runnable(self) -> list[PendingCall]:
        """The oldest open call of each pool, where its inputs are done."""
        first: dict[str, PendingCall] = {}
        for call in self.open.values():
            first.setdefault(call.pool.name, call)
        return [call for call in first.values() if not call.inputs & self.open.keys()]

    def _check_deadlines(self) -> None:
        for number, begun in self._begun.items():
            if time.monotonic() - begun > self.deadline_s:
                self._stop(RoleError(self._stuck(self.open[number])))

    def _stuck(self, call: PendingCall) -> str:
        """Names the ranks that did not answer; first those that do not even say where they are."""
        late = [rank for rank in range(call.pool.processes) if rank not in call.done]
        stands = {rank: call.pool.probe(rank) for rank in late}
        late.sort(key=lambda rank: (bool(stands[rank]), "in meet\n" in (stands[rank] or "")))
        after = "" if stands[late[0]] else self._follower(call)
        lines = [f"{call.where(late[0])}: not finished after deadline_s={self.deadline_s:g}{after}"]
        for rank in late:
            place = stands[rank]
            told = f"is in\n{place.rstrip()}" if place else "does not respond (stopped or hung)"
            lines.append(f"rank {rank} on host {call.pool.hosts[rank]} {told}")
        return "\n".join(lines)

    def _fail(self, failures: list[Failure]) -> None:
        """Waits a little for the cause where all that is seen is a consequence, then stops."""
        begun = time.monotonic()
        while time.monotonic() - begun < min(failure.patience_s for failure in failures):
            first = min(failures, key=lambda failure: failure.order)
            seen = {(f.call.number, f.rank) for f in failures}
            open_reports = [
                (call, rank)
                for call, rank in self._reports()
                if (call.number, rank) not in seen and first.may_follow(call, rank)
            ]
            if not open_reports:
                break
            try:
                ready = self.runtime.ready([c.infos[rank] for c, rank in open_reports], POLL_S)
            except ProcessDied as error:  # what all pools need
                self._stop(RoleError(f"{self._oldest()}{error}"))
            failures += self._settle([r for r, d in zip(open_reports, ready, strict=True) if d])
        first = min(failures, key=lambda failure: failure.order)
        error = first.error
        if not isinstance(error, RoleError):
            died = isinstance(error, ProcessDied) and not isinstance(error, InputLost)
            ended = f"the process died{self._follower(first.call)}" if died else "the call failed"
            error = RoleError(f"{first.call.where(first.rank)}: {ended}: {error}")
        self._stop(error)

    def _follower(self, first: PendingCall) -> str:
        """A process that dies or stops keeps what it has just answered: the next call may be it."""
        for call in self.open.values():
            if call.pool is first.pool and call.number > first.number:
                return f" (or in role {call.role!r}, {call.method}, which followed)"
        return ""

    def _oldest(self) -> str:
        """What was waited for, where it has begun."""
        call = next(iter(self.open.values()), None)
        return f"role {call.role!r}, {call.method} at step {call.step}: " if call else ""

    def _stop(self, error: Exception) -> NoReturn:
        self.failure = error
        self.open.clear()
        self._begun.clear()
        self._end()
        raise error from None
