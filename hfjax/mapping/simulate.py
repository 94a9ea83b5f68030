# SPDX-License-Identifier: Apache-2.0
"""Plays a step's calls on pools: when each runs, what an iteration takes, which pools idle.

Each pool runs its calls strictly in call order. The driver is one thread: what comes after one of
its calls in the program is not asked for before that call has ended, in the next iteration either.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hfjax.mapping.period import Order, after, makespan, order, spans, steady
from hfjax.mapping.work import Call, Kind, Problem
from hfjax.timeline import CONTROLLER, Bar, Timeline, busy_s, picture

ITERATIONS = 6
Transfer = Callable[[Call, str, str], float]  # seconds of a call's columns from pool to pool


@dataclass(frozen=True)
class Played:
    """One call of one iteration on its pool."""

    call: Call
    iteration: int
    pool: str
    start_s: float
    end_s: float

    @property
    def bar(self) -> Bar:
        name = f"{self.call.role}.{self.call.method}"
        return Bar(name, self.pool, 0, self.start_s, self.end_s, self.iteration + 1)


def play(
    problem: Problem,
    pool_of: Mapping[str, str],
    seconds: Mapping[int, float],
    *,
    transfer_s: Transfer | None = None,
    iterations: int = ITERATIONS,
    joined: bool = False,
    devices: Mapping[str, int] | None = None,
    shares: int = 1,
) -> list[Played]:
    """Iterations one after another, overlapping where the dataflow lets them, from time 0.

    `pool_of` a role; `seconds` by call number (a driver call that has none takes none). Where
    `joined`, an iteration begins when everything of the one before has ended. With `shares` above
    1, seconds were measured with so many devices of a host busy: pools that run at the same time
    share its cores, a pool of n `devices` running alone is shares/n times as fast.
    """
    names = tuple(dict.fromkeys(pool_of.values()))
    number = {role: names.index(pool) for role, pool in pool_of.items()}
    rules = order(problem.calls, number, len(names), transfer_s is not None)
    where = [(*names, CONTROLLER)[pool] for pool in rules.pool]
    took = [call_seconds(call, seconds) for call in problem.calls]
    moves = {
        (a, b): transfer_s(problem.calls[a], where[a], where[b]) if transfer_s else 0.0
        for a, b in rules.crossing
    }
    if shares > 1:
        on = [(devices or {}).get(name, shares) for name in names]
        every = _shared(rules, took, moves, iterations, joined, on, shares)
    else:
        every = _alone(rules, took, moves, iterations, joined)
    return [
        Played(call, iteration, where[i], starts[i], ends[i])
        for iteration, (starts, ends) in enumerate(every)
        for i, call in enumerate(problem.calls)
    ]


def call_seconds(call: Call, seconds: Mapping[int, float]) -> float:
    """Of one call; the driver's default is none."""
    return seconds.get(call.number, 0.0) if call.kind is Kind.DRIVER else seconds[call.number]


Spans = list[tuple[list[float], list[float]]]  # starts and ends by position, an iteration


def _alone(
    rules: Order,
    took: Sequence[float],
    moves: Mapping[tuple[int, int], float],
    iterations: int,
    joined: bool,
) -> Spans:
    """Pools that share nothing."""
    free, found = [0.0] * (rules.pools + 1), []
    for _ in range(iterations):
        starts, ends = spans(rules, took, free, moves)
        free = after(rules, ends, free)
        if joined:
            free = [max(end for end in free)] * len(free)
        found.append(([float(s) for s in starts], [float(e) for e in ends]))
    return found


def _shared(
    rules: Order,
    took: Sequence[float],
    moves: Mapping[tuple[int, int], float],
    iterations: int,
    joined: bool,
    devices: Sequence[int],
    shares: int,
) -> Spans:
    """Pools that share a host's cores by their numbers of devices, from event to event."""
    size, now = len(took), 0.0
    starts, ends = ([[math.inf] * size for _ in range(iterations)] for _ in range(2))
    left = [list(took) for _ in range(iterations)]
    queues = [
        [(k, i) for k in range(iterations) for i in range(size) if rules.pool[i] == pool]
        for pool in range(rules.pools + 1)
    ]
    drivers = [i for i in range(size) if rules.pool[i] == rules.driver]

    def ready(k: int, i: int) -> float:
        """When the call may start, its pool aside; inf: not known yet."""
        times = [ends[k][j] + moves.get((j, i), 0.0) for j in rules.waits[i]]
        if k and joined:
            times += ends[k - 1]
        elif k and drivers and rules.follows_driver[i]:
            times.append(ends[k - 1][drivers[-1]])
        return max(times, default=0.0)

    while any(queues):
        heads = [queue[0] for queue in queues if queue]
        for k, i in heads:
            if starts[k][i] == math.inf and ready(k, i) <= now:
                starts[k][i] = now
        running = [(k, i) for k, i in heads if starts[k][i] < math.inf]
        busy = sum(devices[rules.pool[i]] for _, i in running if rules.pool[i] != rules.driver)
        rates = [1.0 if rules.pool[i] == rules.driver else shares / busy for _, i in running]
        done_s = [left[k][i] / rate for (k, i), rate in zip(running, rates, strict=True)]
        coming = [ready(k, i) for k, i in heads if starts[k][i] == math.inf]
        until = min([*(now + s for s in done_s), *coming])
        for (k, i), rate, s in zip(running, rates, done_s, strict=True):
            left[k][i] -= rate * (until - now)
            if now + s <= until:
                ends[k][i] = until
                queues[rules.pool[i]].pop(0)
        now = until
    return list(zip(starts, ends, strict=True))


def period_s(played: Sequence[Played]) -> float:
    """Seconds from the end of one iteration to that of the next: the mean after the first."""
    ends: dict[int, float] = {}
    for one in played:
        ends[one.iteration] = max(ends.get(one.iteration, 0.0), one.end_s)
    first, last = min(ends), max(ends)
    if first == last:
        return ends[last]
    return (ends[last] - ends[first]) / (last - first)


def steady_s(
    problem: Problem,
    pool_of: Mapping[str, str],
    seconds: Mapping[int, float],
    *,
    transfer_s: Transfer | None = None,
    joined: bool = False,
) -> float:
    """What `period_s` comes to after many iterations, exactly; of pools that share no cores."""
    names = tuple(dict.fromkeys(pool_of.values()))
    number = {role: names.index(pool) for role, pool in pool_of.items()}
    rules = order(problem.calls, number, len(names), transfer_s is not None)
    where = [(*names, CONTROLLER)[pool] for pool in rules.pool]
    moves = {
        (a, b): transfer_s(problem.calls[a], where[a], where[b]) if transfer_s else 0.0
        for a, b in rules.crossing
    }
    took = [call_seconds(call, seconds) for call in problem.calls]
    return float((makespan if joined else steady)(rules, took, moves))


def d_cost(
    problem: Problem, sets: Collection[Collection[str]], seconds: Mapping[int, float]
) -> float:
    """HybridFlow algorithm 1, lines 25-34: sum in a set, most of the sets, sum of the stages.

    A driver's call costs nothing here, and neither does moving columns; no stage overlaps another.
    """
    total = 0.0
    for stage in (Kind.GENERATE, Kind.INFER, Kind.TRAIN):
        calls = [call for call in problem.calls if call.kind is stage]
        total += max(
            sum(seconds[call.number] for call in calls if call.role in group) for group in sets
        )
    return total


def idle_shares(played: Sequence[Played]) -> dict[str, float]:
    """The share of time in which a pool runs nothing, from the second iteration to the last.

    Between their beginnings, so that what overlaps from the iterations beside them is there.
    """
    begins: dict[int, float] = {}
    for one in played:
        begins[one.iteration] = min(begins.get(one.iteration, math.inf), one.start_s)
    if len(begins) > 2:
        begin, end = begins[min(begins) + 1], begins[max(begins)]
    else:
        begin, end = 0.0, max(one.end_s for one in played)
    found: dict[str, float] = {}
    for pool in dict.fromkeys(one.pool for one in played if one.pool != CONTROLLER):
        cut = [
            Bar("", pool, 0, max(begin, one.start_s), min(end, one.end_s))
            for one in played
            if one.pool == pool and one.end_s > begin and one.start_s < end
        ]
        found[pool] = 1 - busy_s(cut) / (end - begin) if end > begin else 0.0
    return found


def picture_of(played: Sequence[Played], iteration: int | None = None) -> str:
    """A line a pool, a letter a call: one iteration, by default the last but one.

    Bars of the iterations beside it are drawn where they reach into it.
    """
    last = max(one.iteration for one in played)
    k = max(0, last - 1) if iteration is None else iteration
    mine = [one for one in played if one.iteration == k]
    begin, end = min(one.start_s for one in mine), max(one.end_s for one in mine)
    shown = [
        Bar(b.name, b.pool, 0, max(begin, b.begin_s), min(end, b.end_s), b.step)
        for b in (one.bar for one in played)
        if b.end_s > begin and b.begin_s < end and b.end_s > b.begin_s
    ]
    return picture(shown)


def write_trace(path: str | Path, played: Sequence[Played]) -> None:
    """trace.json of the simulation, each bar labelled as simulated."""
    Path(path).unlink(missing_ok=True)
    Timeline(path).write_bars([one.bar for one in played], simulated=True)
