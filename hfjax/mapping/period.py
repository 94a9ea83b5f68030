# SPDX-License-Identifier: Apache-2.0
"""When calls on pools begin and end, and how often a step can begin, in max-plus arithmetic.

A call starts when its pool's earlier calls have ended, its inputs have come, and the driver has
ended what comes before it in the program. All that is sums and maxima: an iteration takes the times
at which pools and driver are free to those after it by a matrix of longest paths, and the seconds
an iteration, in the long run, are the largest mean of the matrix's cycles (Baccelli et al.,
Synchronization and Linearity, theorem 3.23). They never fall where a call takes longer.

Seconds may be numbers, or arrays of them: then each element is a placement of its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hfjax.mapping.work import Call, Kind

Seconds = Any  # a float or an array; as a time, None is before everything
State = Sequence[Seconds]  # of each pool, then the driver
Moves = Mapping[tuple[int, int], Seconds]  # between calls, by position


@dataclass(frozen=True)
class Order:
    """What each call waits for, by position in call order; the driver is the last pool."""

    pools: int
    pool: tuple[int, ...]
    follows_pool: tuple[bool, ...]  # first of its pool in an iteration: waits for the one before
    follows_driver: tuple[bool, ...]  # no driver call before it in its iteration
    waits: tuple[tuple[int, ...], ...]  # positions of calls of its iteration
    crossing: tuple[tuple[int, int], ...]  # from call, to call: columns that go to another pool
    leads: tuple[int, ...]  # first of the calls with which a call runs as one: see `_leads`

    @property
    def driver(self) -> int:
        return self.pools


def order(calls: Sequence[Call], pool_of: Mapping[str, int], pools: int, moves: bool) -> Order:
    """The order of calls on pools by number; without `moves` crossing columns take no time.

    The driver's own reading and sending is part of its calls' seconds.
    """
    at = {call.number: position for position, call in enumerate(calls)}
    pool = tuple(pools if call.kind is Kind.DRIVER else pool_of[call.role] for call in calls)
    last: dict[int, int] = {}
    direct: list[set[int]] = []
    before: list[set[int]] = []  # all calls of the iteration that a call waits for
    first, free, waits, crossing = [], [], [], []
    for here, call in enumerate(calls):
        inputs = {at[number] for number in call.inputs}
        direct.append(inputs | {last[p] for p in (pool[here], pools) if p in last})
        implied = set().union(*(before[i] for i in direct[here]))
        across = {i for i in inputs if moves and pools not in (pool[i], pool[here])}
        across = sorted(i for i in across if pool[i] != pool[here])
        waits.append(tuple(sorted((direct[here] - implied).union(across))))
        crossing += [(i, here) for i in across]
        before.append(direct[here] | implied)
        first.append(pool[here] not in last)
        free.append(pools not in last)
        last[pool[here]] = here
    leads = _leads(pool, direct, before, set(crossing))
    return Order(pools, pool, tuple(first), tuple(free), tuple(waits), tuple(crossing), leads)


def _leads(
    pool: Sequence[int],
    direct: Sequence[set[int]],
    before: Sequence[set[int]],
    crossing: set[tuple[int, int]],
) -> tuple[int, ...]:
    """Runs of a pool's calls of which only the sum matters, as the first of each.

    A call runs as one with the one before it where whatever waits for that one waits for it too,
    and it waits for nothing that the first of them does not wait for.
    """
    leads: list[int] = []
    last: dict[int, int] = {}
    outside = [
        {i for i, d in enumerate(direct) if here in d and pool[i] != pool[here]}
        for here in range(len(pool))
    ]
    for here in range(len(pool)):
        leads.append(here)
        if pool[here] in last:
            earlier = last[pool[here]]
            lead = leads[earlier]
            came = {i for i in direct[here] if pool[i] != pool[here]}
            moved = {i for i in came if (i, here) in crossing and (i, lead) not in crossing}
            sent = {i for i in outside[earlier] if (earlier, i) in crossing}
            if outside[earlier] <= outside[here] and came <= before[lead] and not moved | sent:
                leads[here] = lead
        last[pool[here]] = here
    return tuple(leads)


def spans(
    rules: Order, seconds: Sequence[Seconds], state: State, moves: Moves | None = None
) -> tuple[list[Seconds], list[Seconds]]:
    """Starts and ends of an iteration's calls; None where nothing of the state leads there."""
    moves = moves or {}
    starts: list[Seconds] = []
    ends: list[Seconds] = []
    for here, took in enumerate(seconds):
        start = state[rules.pool[here]] if rules.follows_pool[here] else None
        if rules.follows_driver[here]:
            start = later(start, state[rules.driver])
        for there in rules.waits[here]:
            came = ends[there]
            if came is not None and (there, here) in moves:
                came = came + moves[there, here]
            start = later(start, came)
        starts.append(start)
        ends.append(None if start is None else start + took)
    return starts, ends


def after(rules: Order, ends: State, state: State) -> list[Seconds]:
    """When pools and driver are free again."""
    free = list(state)
    for pool, end in zip(rules.pool, ends, strict=True):
        free[pool] = end  # a pool's calls end in order
    return free


def makespan(rules: Order, seconds: Sequence[Seconds], moves: Moves | None = None) -> Seconds:
    """Seconds of one iteration alone."""
    _, ends = spans(rules, seconds, [0.0] * (rules.pools + 1), moves)
    return _largest(ends)


def returns(rules: Order, seconds: Sequence[Seconds]) -> Seconds:
    """The longest way from a pool's first call to its last: no iteration takes less."""
    ways = []
    for pool in range(rules.pools):
        _, ends = spans(rules, seconds, _only(rules, pool))
        ways.append(after(rules, ends, _only(rules, None))[pool])
    return _largest(ways)


def steady(rules: Order, seconds: Sequence[Seconds], moves: Moves | None = None) -> Seconds:
    """Seconds an iteration in the long run: the largest mean of a cycle of longest ways."""
    size = rules.pools + 1
    ways = []
    for pool in range(size):
        _, ends = spans(rules, seconds, _only(rules, pool), moves)
        ways.append(after(rules, ends, _only(rules, None)))
    return _largest(list(_cycles(ways, size)))


def later(a: Seconds, b: Seconds) -> Seconds:
    """The larger, where None is before everything."""
    if a is None or b is None:
        return b if a is None else a
    return np.maximum(a, b)


def _largest(values: Sequence[Seconds]) -> Seconds:
    found: Seconds = None
    for value in values:
        found = later(found, value)
    return 0.0 if found is None else found


def _only(rules: Order, pool: int | None) -> State:
    return [0.0 if i == pool else None for i in range(rules.pools + 1)]


def _cycles(ways: Sequence[State], size: int) -> Iterator[Seconds]:
    """Means of all cycles without a repeated pool, each from its lowest pool."""

    def visit(root: int, here: int, total: Seconds, seen: tuple[int, ...]) -> Iterator[Seconds]:
        for there in range(root, size):
            way = ways[here][there]
            if way is None or (there in seen and there != root):
                continue
            if there == root:
                yield (total + way) / len(seen)
            else:
                yield from visit(root, there, total + way, (*seen, there))

    for root in range(size):
        yield from visit(root, root, 0.0, (root,))
