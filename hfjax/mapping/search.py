# SPDX-License-Identifier: Apache-2.0
"""The best placement of a step on a cluster, exactly: HybridFlow's algorithms 1 and 2, bounded.

Every set partition of the roles, every allocation of devices to its pools and every combination of
options that fits is a plan. What a bound shows to be no better than the best so far is not priced.

Objectives: `time`, seconds an iteration in the long run with iterations overlapping; `cost`, those
times the devices used; `paper`, `d_cost` with each role's quickest option that fits its pool and
scores as it trains. Ties go to fewer pools, then fewer devices, then the earlier partition (roles
together in their order), more devices to its earlier pools, fewer busy seconds over all pools.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hfjax.mapping.needs import Needs
from hfjax.mapping.partitions import Cluster, Grants, Sets, packs, set_partitions
from hfjax.mapping.pools import Options, Pools
from hfjax.mapping.prices import Objective, Partition, Priced, Terms, Transfer
from hfjax.mapping.simulate import Played, d_cost
from hfjax.mapping.work import USABLE, Option, Problem

FURTHER = 256  # devices up to which a placement that fits is looked for
UNITS = {"time": "s a step", "cost": "device-seconds", "paper": "s of d_cost"}
BATCH = 16, 8, 4096  # plans priced at once: at first, growing by, at most
Key = tuple[float, int, int, int, int, float]  # value, pools, devices, partition, row, busy seconds


@dataclass(frozen=True)
class PlanPool:
    """A pool of a plan: its roles in order, devices of each kind, and an option a role."""

    roles: tuple[str, ...]
    devices: tuple[int, ...]
    options: Mapping[str, Option]

    @property
    def name(self) -> str:
        return "+".join(self.roles)


@dataclass(frozen=True)
class Plan:
    """A placement: its value is the objective's."""

    pools: tuple[PlanPool, ...]
    value: float
    seconds: float  # an iteration in the long run
    d_cost: float  # the paper's
    played: tuple[Played, ...]

    @property
    def devices(self) -> int:
        return sum(sum(pool.devices) for pool in self.pools)

    @property
    def sets(self) -> Sets:
        return tuple(pool.roles for pool in self.pools)

    @property
    def call_seconds(self) -> dict[int, float]:
        return {n: s for p in self.pools for o in p.options.values() for n, s in o.seconds.items()}


@dataclass(frozen=True)
class Rejected:
    """A set partition that has no plan among the best, and why."""

    sets: Sets
    why: str
    needs: int | None = None  # devices, the fewest that fit, where no allocation does
    value: float | None = None  # of its best plan, where that is known
    bound: float = np.inf  # no plan of it is better


@dataclass(frozen=True)
class Found:
    """The best plan of each of the best partitions, best first, and the others' reasons."""

    objective: Objective
    plans: tuple[Plan, ...]
    rejected: tuple[Rejected, ...]
    pairs: int  # set partitions with an allocation
    priced: int  # plans of these, with options, whose value was computed
    search_s: float

    @property
    def best(self) -> Plan:
        return self.plans[0]


def search(
    problem: Problem,
    cluster: Cluster,
    options: Options,
    *,
    objective: Objective = "time",
    driver_s: Mapping[int, float] | None = None,
    transfer_s: Transfer | None = None,
    joined: bool = False,
    usable: float = USABLE,
    keep: int = 3,
    further: int = FURTHER,
) -> Found:
    """The best plans, one a set partition, `keep` at most.

    `options(role, device, n)` gives a role's options on n devices. `driver_s` are seconds of the
    driver's calls by number, `transfer_s(call, from, to)` those of its columns between pools with
    such counts of each kind of device. Where `joined`, iterations do not overlap. All devices are
    used, but for the objective `cost` and where no placement on all of them fits.
    """
    began = time.perf_counter()
    grants = Grants(cluster)
    shares = {getattr(device, "shares", 1) for device, _ in cluster}
    if len(shares) > 1:
        raise ValueError(f"devices share cores by {sorted(shares)}: use devices of one host")
    terms = Terms(problem, objective, driver_s or {}, transfer_s, joined, *shares)
    paper = objective == "paper"
    alone = terms.shares > 1 and not paper
    pools = Pools(problem, grants, options, usable=usable, one_layout=paper, alone=alone)
    partitions = set_partitions(pools.roles)
    for every in (True, False) if objective != "cost" else (False,):
        hunt = _Hunt(pools, terms, keep)
        for number, sets in enumerate(partitions):
            hunt.through(number, sets, enum_alloc(grants, len(sets), every=every))
        if hunt.best:
            break
    needs = Needs(problem, cluster, options, pools, usable, further)
    if not hunt.best:
        raise ValueError(needs.refusal(partitions))
    kept = sorted(hunt.best.values(), key=lambda best: best.key)[:keep]
    chosen = {best.key[3] for best in kept}
    rejected = [
        hunt.rejected(i, sets, needs) for i, sets in enumerate(partitions) if i not in chosen
    ]
    plans = tuple(best.plan() for best in kept)
    took = time.perf_counter() - began
    return Found(objective, plans, tuple(rejected), hunt.pairs, hunt.priced, took)


def needs_of(problem: Problem, cluster: Cluster, options: Options) -> Needs:
    """How many devices of the cluster's kind would do."""
    pools = Pools(problem, Grants(cluster), options, usable=USABLE)
    return Needs(problem, cluster, options, pools, USABLE, FURTHER)


def enum_alloc(grants: Grants, pools: int, *, every: bool) -> Iterator[np.ndarray]:
    """Every allocation of the cluster to so many pools, many rows at a time."""
    return grants.allocations(pools, every=every)


@dataclass(frozen=True)
class _Best:
    """The best plan of a partition so far."""

    partition: Partition
    key: Key
    row: np.ndarray
    picks: np.ndarray

    def plan(self) -> Plan:
        part, terms = self.partition, self.partition.terms
        options = part.options(self.row, self.picks)
        took = part.call_seconds(options)
        counts = part.pools.grants.counts[self.row].tolist()
        placed = tuple(
            PlanPool(roles, tuple(count), dict(zip(roles, each, strict=True)))
            for roles, count, each in zip(part.sets, counts, options, strict=True)
        )
        value, devices = self.key[0], self.key[2]
        seconds = {"time": value, "cost": value / devices}.get(terms.objective)
        if seconds is None:
            seconds = part.steady_s(self.row, options)
        cost = d_cost(terms.problem, part.sets, took)
        return Plan(placed, value, seconds, cost, tuple(part.played(took, self.row)))


class _Hunt:
    """The best plan of each partition, and what bounds say of those that were not priced."""

    def __init__(self, pools: Pools, terms: Terms, keep: int) -> None:
        self.pools, self.terms, self.keep = pools, terms, keep
        self.best: dict[int, _Best] = {}
        self.pairs = self.priced = 0
        self._bounds: dict[int, float] = {}  # the least of a partition's plans left unpriced

    def through(self, number: int, sets: Sets, allocations: Iterator[np.ndarray]) -> None:
        """Finds a partition's best plan, if it can be among those that are kept."""
        partition = Partition(self.pools, sets, self.terms)
        self._bounds[number] = np.inf
        for rows in allocations:
            bounds = partition.busiest(rows)
            numbers = np.arange(self.pairs, self.pairs + len(rows))
            self.pairs += len(rows)
            some = self._alive(partition, number, rows, bounds, numbers)
            rows, numbers = rows[some], numbers[some]
            bounds = partition.bound(rows)
            some = self._alive(partition, number, rows, bounds, numbers)
            self._batches(partition, number, rows[some], bounds[some], numbers[some])

    def _batches(
        self,
        partition: Partition,
        number: int,
        rows: np.ndarray,
        bounds: np.ndarray,
        numbers: np.ndarray,
    ) -> None:
        """Prices rows, those of the least bounds first, while they may win."""
        by_bound = np.argsort(bounds, kind="stable")
        rows, bounds, numbers = rows[by_bound], bounds[by_bound], numbers[by_bound]
        size, more, most = BATCH
        while len(rows):
            batch, own = rows[:size], numbers[:size]
            placed = np.array([self._packs(row) for row in batch], bool)
            batch, own = batch[placed], own[placed]

            def alive(values: np.ndarray, which: np.ndarray, own: Any = (batch, own)) -> Any:
                return self._alive(partition, number, own[0][which], values, own[1][which])

            if len(batch):
                self._take(partition, number, batch, own, partition.price(batch, alive))
            rows, bounds, numbers = rows[size:], bounds[size:], numbers[size:]
            some = self._alive(partition, number, rows, bounds, numbers)
            rows, bounds, numbers = rows[some], bounds[some], numbers[some]
            size = min(size * more, most)

    def _packs(self, row: np.ndarray) -> bool:
        """Whether the pools of an allocation find machines."""
        grants = self.pools.grants
        return packs(grants.counts[row].tolist(), grants.cluster)

    def _take(
        self,
        partition: Partition,
        number: int,
        rows: np.ndarray,
        numbers: np.ndarray,
        priced: Priced,
    ) -> None:
        self.priced += int(np.isfinite(priced.value).sum())
        if not len(priced.value) or not np.isfinite(priced.value.min()):
            return
        devices = partition.devices(rows)[priced.row]
        order = (priced.busy, numbers[priced.row], devices, priced.value)
        i = int(np.lexsort(order)[0])
        value, row = float(priced.value[i]), int(numbers[priced.row[i]])
        size = len(partition.sets), int(devices[i]), number
        key = (value, *size, row, float(priced.busy[i]))
        if number not in self.best or key < self.best[number].key:
            self.best[number] = _Best(partition, key, rows[priced.row[i]], priced.picks[i])

    def _alive(
        self,
        partition: Partition,
        number: int,
        rows: np.ndarray,
        bounds: np.ndarray,
        numbers: np.ndarray,
    ) -> np.ndarray:
        """Which plans may still be better than their partition's best and the last that is kept."""
        limits = [best.key for best in self.best.values()]
        last = [sorted(limits)[self.keep - 1]] if len(limits) >= self.keep else []
        last += [self.best[number].key] if number in self.best else []
        alive = np.isfinite(bounds)
        if last:
            value, *rest = min(last)
            same = bounds == value
            alive &= (bounds < value) | same
            if same.any():
                mine = (len(partition.sets), partition.devices(rows[same]), number, numbers[same])
                alive[same] = _before(mine, rest)
        if not alive.all():
            self._bounds[number] = min(self._bounds[number], float(bounds[~alive].min()))
        return alive

    def rejected(self, number: int, sets: Sets, needs: Needs) -> Rejected:
        """Why a partition is not among the best."""
        best, bound = self.best.get(number), self._bounds[number]
        unit = UNITS[self.terms.objective]
        if best is None and not np.isfinite(bound):
            return Rejected(sets, needs.why(sets), needs.fewest(sets))
        if best and best.key[0] <= bound:
            return Rejected(
                sets, f"worse: {best.key[0]:.4g} {unit} at best", None, best.key[0], best.key[0]
            )
        return Rejected(sets, f"worse: {bound:.4g} {unit} or more", bound=bound)


def _before(mine: Sequence[Any], limits: Sequence[Any]) -> np.ndarray:
    """Which of `mine`, arrays or numbers, come before the limits in order of words."""
    found, same = np.False_, np.True_
    for values, limit in zip(mine, limits, strict=False):
        found = found | (same & np.less(values, limit))
        same = same & np.equal(values, limit)
    return np.asarray(found)
