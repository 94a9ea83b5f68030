# SPDX-License-Identifier: Apache-2.0
"""What a set partition costs on its allocations, many at a time: bounds first, then exactly.

A bound takes for each call of a pool the least that any of its options takes, and no time for
columns that move: then no placement takes less than the busiest pool's sum, or than the longest
chain of calls from a pool's first to its last.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hfjax.mapping.partitions import Sets
from hfjax.mapping.period import makespan, order, returns, steady
from hfjax.mapping.pools import GRAIN, Combined, Merge, Pools
from hfjax.mapping.simulate import ITERATIONS, Played, call_seconds, period_s, play
from hfjax.mapping.work import Kind, Option, Problem

Objective = Literal["time", "cost", "paper"]
Counts = tuple[int, ...]  # devices of each kind
Transfer = Callable[[Any, Counts, Counts], float]  # of a call's columns, from pool to pool
Alive = Callable[[np.ndarray, np.ndarray], np.ndarray]  # of bounds and rows: which may win


@dataclass(frozen=True)
class Terms:
    """What is asked for."""

    problem: Problem
    objective: Objective
    driver_s: Mapping[int, float]  # seconds of the driver's calls by number
    transfer_s: Transfer | None
    joined: bool
    shares: int


@dataclass
class Table:
    """Combinations of a pool's roles by grant, one grant after another as they are asked for."""

    pools: Pools
    roles: tuple[str, ...]
    merges: tuple[Merge, ...]
    width: int

    def __post_init__(self) -> None:
        self.begins = np.full(len(self.pools.grants), -1)
        self.sizes = np.zeros(len(self.pools.grants), int)
        self._seconds: list[np.ndarray] = []
        self.seconds = np.zeros((0, self.width))
        self._rows = 0

    def ask(self, grants: np.ndarray) -> None:
        """Makes what these grants need."""
        fresh = [int(g) for g in np.unique(grants) if self.begins[g] < 0]
        for grant in fresh:
            found = self.made(grant)
            self.begins[grant], self.sizes[grant] = self._rows, len(found.seconds)
            self._rows += len(found.seconds)
            self._seconds.append(found.seconds)
        if fresh:
            self._seconds = [np.concatenate(self._seconds)]
            self.seconds = self._seconds[0]

    def fastest(self) -> np.ndarray:
        """By grant and column, the sum of the least that each role takes."""
        found = np.zeros((len(self.pools.grants), self.width))
        for role, merge in zip(self.roles, self.merges, strict=True):
            found += self.pools.fastest(role, merge, self.width)
        return found

    def made(self, grant: int) -> Combined:
        if self.width == 1:
            return self.pools.quickest(self.roles, grant)
        return self.pools.combined(self.roles, grant, self.merges, self.width)

    def options(self, grant: int, row: int) -> tuple[Option, ...]:
        choice = self.made(grant).choice[row - self.begins[grant]]
        return self.pools.chosen(self.roles, grant, choice)


@dataclass(frozen=True)
class Priced:
    """Plans, a row each: allocation, value, busy seconds of all pools, combination a pool."""

    row: np.ndarray
    value: np.ndarray
    busy: np.ndarray
    picks: np.ndarray


class Partition:
    """A set partition's bounds and prices; rows are grants, a column a pool."""

    def __init__(self, pools: Pools, sets: Sets, terms: Terms) -> None:
        self.pools, self.sets, self.terms = pools, sets, terms
        calls = terms.problem.calls
        number = {role: i for i, roles in enumerate(sets) for role in roles}
        self.rules = order(calls, number, len(sets), terms.transfer_s is not None)
        self.least = [pools.least(roles) for roles in sets]
        self.tables: list[Table] = []
        self._columns: list[tuple[int, int] | None] = [None] * len(calls)  # set, column by position
        for i, roles in enumerate(sets):
            self.tables.append(self._table(i, roles))
        self.fastest = [table.fastest() for table in self.tables]

    def _table(self, pool: int, roles: tuple[str, ...]) -> Table:
        calls, leads = self.terms.problem.calls, self.rules.leads
        mine = [i for i, call in enumerate(calls) if self.rules.pool[i] == pool]
        columns = {lead: n for n, lead in enumerate(dict.fromkeys(leads[i] for i in mine))}
        for lead, column in columns.items():
            self._columns[lead] = (pool, column)
        merges = tuple(
            tuple(columns[leads[i]] for i in mine if calls[i].role == role) for role in roles
        )
        return Table(self.pools, roles, merges, max(1, len(columns)))

    @property
    def names(self) -> tuple[str, ...]:
        """Of the pools: their roles'."""
        return tuple("+".join(roles) for roles in self.sets)

    def devices(self, rows: np.ndarray) -> np.ndarray:
        return self.pools.grants.devices[rows].sum(axis=1)

    def busiest(self, rows: np.ndarray) -> np.ndarray:
        """A bound: the busiest pool's seconds; inf where a pool cannot hold its roles."""
        found = self.least[0][rows[:, 0]]
        for i in range(1, len(self.sets)):
            np.maximum(found, self.least[i][rows[:, i]], out=found)
        return self._scaled(found, rows)

    def bound(self, rows: np.ndarray) -> np.ndarray:
        """A tighter bound: the longest chain too."""
        if self.terms.objective == "paper":
            return self.busiest(rows)
        seconds = [f[rows[:, i]] for i, f in enumerate(self.fastest)]
        return np.maximum(self.busiest(rows), self._chain(rows, seconds))

    def price(self, rows: np.ndarray, alive: Alive) -> Priced:
        """All plans on these rows that may win, exactly."""
        if self.terms.objective == "paper":
            return self._paper(rows)
        which = np.arange(len(rows))
        picks = np.zeros((len(rows), 0), int)
        for i, table in enumerate(self.tables):
            grants = rows[:, i]
            table.ask(grants)
            size = table.sizes[grants[which]]
            parent = np.repeat(np.arange(len(which)), size)
            within = np.arange(len(parent)) - np.repeat(np.cumsum(size) - size, size)
            own = table.begins[grants[which[parent]]] + within
            which, picks = which[parent], np.concatenate([picks[parent], own[:, None]], axis=1)
            if len(self.tables) > 1:
                chain = self._chain(rows[which], self._seconds(rows[which], picks))
                kept = alive(chain, which)
                which, picks = which[kept], picks[kept]
        seconds = self._seconds(rows[which], picks)
        busy = np.zeros(len(which))
        for each in seconds:
            busy += each.sum(axis=1)
        value = self._exactly(rows, which, seconds, picks, alive)
        return Priced(which, value, busy, picks)

    def options(self, row: np.ndarray, picks: np.ndarray) -> list[tuple[Option, ...]]:
        """The options of each pool's roles."""
        if self.terms.objective == "paper":
            choice = self.pools.choice
            return [choice(roles, int(g)) for roles, g in zip(self.sets, row, strict=True)]
        return [
            t.options(int(g), int(pick)) for t, g, pick in zip(self.tables, row, picks, strict=True)
        ]

    def steady_s(self, row: np.ndarray, options: Sequence[Sequence[Option]]) -> float:
        """Seconds an iteration of one plan."""
        took = self.call_seconds(options)
        if self.terms.shares > 1:
            return self._played_s(took, row, 0.0)
        seconds = [call_seconds(call, took) for call in self.terms.problem.calls]
        run = makespan if self.terms.joined else steady
        return float(np.ravel(run(self.rules, seconds, self._moves(row[None])))[0])

    def call_seconds(self, options: Sequence[Sequence[Option]]) -> dict[int, float]:
        """Seconds of all calls by number."""
        found = dict(self.terms.driver_s)
        for each in options:
            for option in each:
                found |= option.seconds
        return found

    def _seconds(self, rows: np.ndarray, picks: np.ndarray) -> list[np.ndarray]:
        """By pool, seconds of its columns: of its combination; where none is picked, the least."""
        done = picks.shape[1]
        return [
            t.seconds[picks[:, i]] if i < done else self.fastest[i][rows[:, i]]
            for i, t in enumerate(self.tables)
        ]

    def _by_call(self, seconds: Sequence[np.ndarray]) -> list[Any]:
        found = []
        for call, column in zip(self.terms.problem.calls, self._columns, strict=True):
            if call.kind is Kind.DRIVER:
                found.append(round(self.terms.driver_s.get(call.number, 0.0) * GRAIN) / GRAIN)
            else:
                found.append(seconds[column[0]][:, column[1]] if column else 0.0)
        return found

    def _chain(self, rows: np.ndarray, seconds: Sequence[np.ndarray]) -> np.ndarray:
        each = self._by_call(seconds)
        run = makespan if self.terms.joined else returns
        found = np.asarray(run(self.rules, each)) + np.zeros(len(rows))
        if self.terms.shares > 1:
            found = np.maximum(found, sum(s.sum(axis=1) for s in seconds))
        return self._scaled(found, rows)

    def _scaled(self, seconds: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return seconds * self.devices(rows) if self.terms.objective == "cost" else seconds

    def _exactly(
        self,
        rows: np.ndarray,
        which: np.ndarray,
        seconds: Sequence[np.ndarray],
        picks: np.ndarray,
        alive: Alive,
    ) -> np.ndarray:
        rows = rows[which]
        if self.terms.shares > 1:
            return self._shared(rows, which, self._chain(rows, seconds), picks, alive)
        run = makespan if self.terms.joined else steady
        found = np.asarray(run(self.rules, self._by_call(seconds), self._moves(rows)))
        return self._scaled(found + np.zeros(len(rows)), rows)

    def _shared(
        self,
        rows: np.ndarray,
        which: np.ndarray,
        bounds: np.ndarray,
        picks: np.ndarray,
        alive: Alive,
    ) -> np.ndarray:
        """Played one by one, the most promising first, while they may win; others inf."""
        found, best = np.full(len(rows), np.inf), np.inf
        for i in np.argsort(bounds, kind="stable"):
            if bounds[i] > best or not alive(bounds[i : i + 1], which[i : i + 1])[0]:
                continue
            times = int(self._scaled(np.ones(1), rows[i : i + 1])[0])
            took = self.call_seconds(self.options(rows[i], picks[i]))
            played_s = self._played_s(took, rows[i], float(bounds[i]) / times)
            found[i] = played_s * times
            best = min(best, found[i])
        return found

    def _played_s(self, took: Mapping[int, float], row: np.ndarray, least: float) -> float:
        return max(least, period_s(self.played(took, row)))

    def played(self, took: Mapping[int, float], row: np.ndarray) -> list[Played]:
        """The timeline of one plan; on shared cores with the iterations after it in their way."""
        names, grants, moved_s = self.names, self.pools.grants, self.terms.transfer_s
        counts = {n: tuple(grants.counts[g].tolist()) for n, g in zip(names, row, strict=True)}
        beyond = 2 if self.terms.shares > 1 and not self.terms.joined else 0
        found = play(
            self.terms.problem,
            {role: n for n, roles in zip(names, self.sets, strict=True) for role in roles},
            took,
            transfer_s=moved_s and (lambda call, a, b: moved_s(call, counts[a], counts[b])),
            iterations=ITERATIONS + beyond,
            joined=self.terms.joined,
            devices={name: sum(count) for name, count in counts.items()},
            shares=self.terms.shares,
        )
        return [one for one in found if one.iteration < ITERATIONS]

    def _moves(self, rows: np.ndarray) -> dict[tuple[int, int], np.ndarray]:
        """Seconds of columns that cross pools, by calls."""
        found: dict[tuple[int, int], np.ndarray] = {}
        if self.terms.transfer_s is None:
            return found
        counts = self.pools.grants.counts
        for a, b in self.rules.crossing:
            ends = rows[:, [self.rules.pool[a], self.rules.pool[b]]]
            pairs, back = np.unique(ends, axis=0, return_inverse=True)
            call = self.terms.problem.calls[a]
            took = [
                self.terms.transfer_s(call, tuple(counts[x].tolist()), tuple(counts[y].tolist()))
                for x, y in pairs
            ]
            seconds = np.round(np.array(took, float) * GRAIN) / GRAIN
            found[a, b] = seconds[back.reshape(-1)]
        return found

    def _paper(self, rows: np.ndarray) -> Priced:
        value = np.zeros(len(rows))
        stage_s = [self._stages(i) for i in range(len(self.sets))]
        for stage in range(3):
            value += np.max([s[rows[:, i], stage] for i, s in enumerate(stage_s)], axis=0)
        nothing = np.zeros((len(rows), len(self.sets)), int)
        return Priced(np.arange(len(rows)), value, np.zeros(len(rows)), nothing)

    def _stages(self, pool: int) -> np.ndarray:
        """By grant, seconds in the paper's stages of the pool's quickest options that fit."""
        roles = self.sets[pool]
        if roles not in self.pools.stages:
            found = np.full((len(self.pools.grants), 3), np.inf)
            kinds = {call.number: call.kind.value for call in self.terms.problem.calls}
            for grant in np.flatnonzero(np.isfinite(self.least[pool])):
                found[grant] = 0.0
                for option in self.pools.choice(roles, int(grant)):
                    for number, seconds in option.seconds.items():
                        found[grant, kinds[number]] += round(seconds * GRAIN) / GRAIN
            self.pools.stages[roles] = found
        return self.pools.stages[roles]
