# SPDX-License-Identifier: Apache-2.0
"""The search finds what trying everything finds, says why the rest was rejected, and is quick."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import comb
from random import Random
from typing import Any

import numpy as np
import pytest

from hfjax.mapping.devices import slowest
from hfjax.mapping.partitions import Grants, Sets, packs, set_partitions
from hfjax.mapping.pools import undominated
from hfjax.mapping.prices import Objective
from hfjax.mapping.search import Found, Plan, search
from hfjax.mapping.simulate import d_cost, period_s, play, steady_s
from hfjax.mapping.work import USABLE, Option, Problem
from tests.hfjax.mapping.steps import (
    DRIVER,
    GB,
    GENERATE,
    INFER,
    PPO,
    SAFE,
    TRAIN,
    A,
    C,
    Options,
    a_device,
    a_problem,
    random_options,
    random_problem,
    scaling_options,
)

STIRLING = {3: (1, 3, 1), 4: (1, 7, 6, 1), 5: (1, 15, 25, 10, 1)}


@dataclass
class Everything:
    """All plans of a problem, by loops."""

    problem: Problem
    cluster: Sequence[tuple[Any, int]]
    options: Options
    objective: Objective
    driver_s: dict[int, float]
    transfer_s: Callable[..., float] | None = None
    joined: bool = False

    def best(self, *, every: bool) -> dict[int, tuple]:
        """By partition: value, pools, devices, partition, counts in order of ties, busy seconds."""
        found: dict[int, tuple] = {}
        for number, sets in enumerate(set_partitions(tuple(self.problem.models))):
            for counts in self.allocations(len(sets), every):
                devices = sum(map(sum, counts))
                order = tuple(-count[kind] for kind in range(len(self.cluster)) for count in counts)
                for plan in product(*(map(self.fitting, sets, counts))):
                    value, busy = self.value(sets, counts, plan)
                    key = (value, len(sets), devices, number, order, busy)
                    found[number] = min(found.get(number, key), key)
        return found

    def allocations(self, pools: int, every: bool) -> Iterator[tuple[tuple[int, ...], ...]]:
        some = list(product(*(range(count + 1) for _, count in self.cluster)))[1:]
        for counts in product(some, repeat=pools):
            used = [sum(column) for column in zip(*counts, strict=True)]
            most = [count for _, count in self.cluster]
            if used == most or (not every and all(map(int.__le__, used, most))):
                yield counts

    def fitting(self, roles: tuple[str, ...], counts: tuple[int, ...]) -> list[tuple[Option, ...]]:
        device = slowest([d for (d, _), n in zip(self.cluster, counts, strict=True) if n])
        menus = [self.options(role, device, sum(counts)) for role in roles]
        if self.objective == "paper":
            menus = [[o for o in menu if o.infer is None] for menu in menus]
        found = [
            each
            for each in product(*menus)
            if sum(o.resident_bytes for o in each) + max(o.working_bytes for o in each)
            <= USABLE * device.memory_bytes
        ]
        if self.objective == "paper":
            return sorted(found, key=lambda e: sum(s for o in e for s in o.seconds.values()))[:1]
        return found

    def value(self, sets: Sets, counts: Sequence[Any], plan: Any) -> tuple[float, float]:
        took = {n: s for each in plan for option in each for n, s in option.seconds.items()}
        busy = sum(took.values())
        if self.objective == "paper":
            return d_cost(self.problem, sets, took), 0.0
        pool_of = {role: str(i) for i, roles in enumerate(sets) for role in roles}
        moved = self.transfer_s
        seconds = steady_s(
            self.problem,
            pool_of,
            took | self.driver_s,
            transfer_s=moved and (lambda call, a, b: moved(call, counts[int(a)], counts[int(b)])),
            joined=self.joined,
        )
        return seconds * (sum(map(sum, counts)) if self.objective == "cost" else 1), busy


def key_of(plan: Plan, problem: Problem, objective: str) -> tuple:
    """A found plan as `Everything` names it."""
    counts = [pool.devices for pool in plan.pools]
    order = tuple(-count[kind] for kind in range(len(counts[0])) for count in counts)
    number = set_partitions(tuple(problem.models)).index(plan.sets)
    busy = 0.0 if objective == "paper" else sum(plan.call_seconds.values())
    return (plan.value, len(plan.pools), plan.devices, number, order, busy)


def check(everything: Everything, found: Found, keep: int) -> None:
    """The plans are the best of the best partitions; the others' reasons are true."""
    best = everything.best(every=everything.objective != "cost")
    best = best or everything.best(every=False)
    expected = sorted(best.values())[:keep]
    plans = [key_of(plan, everything.problem, everything.objective) for plan in found.plans]
    assert plans == expected
    assert len(found.plans) + len(found.rejected) == len(
        set_partitions(tuple(everything.problem.models))
    )
    numbers = {sets: i for i, sets in enumerate(set_partitions(tuple(everything.problem.models)))}
    for one in found.rejected:
        truth = best.get(numbers[one.sets])
        if truth is None:
            assert not np.isfinite(one.bound)
        else:
            assert one.bound <= truth[0]
            assert one.value in (None, truth[0])
            assert one.why.startswith("worse")


def try_all(
    random: Random, roles: int, cluster: Any, objective: Objective, most: int, joined: bool = False
) -> None:
    problem = random_problem(random, roles)
    options = random_options(problem, random, most)
    driver_s = {c.number: random.randint(0, 40) / 16 for c in problem.calls if c.kind is DRIVER}
    moved = random.choice([None, lambda call, a, b: (call.number + sum(a) + 2 * sum(b)) / 32])
    given = {"driver_s": driver_s, "transfer_s": moved, "joined": joined}
    everything = Everything(problem, cluster, options, objective, **given)
    try:
        found = search(
            problem, cluster, options, objective=objective, usable=USABLE, further=24, **given
        )
    except ValueError:
        assert not everything.best(every=False)
    else:
        check(everything, found, 3)


@pytest.mark.parametrize("objective", ["time", "cost", "paper"])
@pytest.mark.parametrize("seed", range(20))
def test_the_search_finds_what_trying_everything_finds(objective: Objective, seed: int) -> None:
    random = Random(seed)
    roles = random.randint(1, 3)
    count = random.randint(1, 7 if roles < 3 else 5)
    try_all(random, roles, [(a_device(), count)], objective, 4, joined=seed % 5 == 4)


@pytest.mark.parametrize("objective", ["time", "cost", "paper"])
@pytest.mark.parametrize("seed", range(5))
def test_so_it_does_on_devices_of_two_kinds(objective: Objective, seed: int) -> None:
    random = Random(100 + seed)
    kinds = a_device("a"), a_device("b", 40 * GB)
    cluster = [(kinds[0], random.randint(1, 3)), (kinds[1], random.randint(1, 3))]
    try_all(random, random.randint(2, 3), cluster, objective, 3)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["time", "cost", "paper"])
@pytest.mark.parametrize(("count", "most"), [(16, 2), (11, 3), (7, 4)])
@pytest.mark.parametrize("seed", range(3))
def test_so_it_does_with_four_models(
    objective: Objective, count: int, most: int, seed: int
) -> None:
    try_all(Random(200 + seed), 4, [(a_device(), count)], objective, most)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["time", "paper"])
@pytest.mark.parametrize("count", [8, 12, 16])
def test_so_it_does_for_ppo(objective: Objective, count: int) -> None:
    """With options that scale as layouts do."""
    problem = a_problem(*PPO)
    options = scaling_options(problem, dict.fromkeys(problem.models, 1.0), any_n=False)

    def few(role: str, device: Any, n: int) -> Sequence[Option]:
        return options(role, device, n)[::5]

    cluster = [(a_device(), count)]
    everything = Everything(problem, cluster, few, objective, {5: 0.0})
    check(everything, search(problem, cluster, few, objective=objective, usable=USABLE), 3)


@pytest.mark.parametrize("seed", range(6))
def test_on_a_shared_host_no_plan_takes_less_when_it_is_played(seed: int) -> None:
    random = Random(300 + seed)
    problem = random_problem(random, 2)
    options = random_options(problem, random, 3)
    device = a_device(memory_bytes=1e15, shares=4)
    cluster = [(device, 4)]
    try:
        found = search(problem, cluster, options, further=4)
    except ValueError:
        return
    everything = Everything(problem, cluster, options, "time", {})
    played = []
    for sets in set_partitions(tuple(problem.models)):
        for counts in everything.allocations(len(sets), every=True):
            pool_of = {role: str(i) for i, roles in enumerate(sets) for role in roles}
            on = {str(i): n for i, (n,) in enumerate(counts)}
            for plan in product(*(map(everything.fitting, sets, counts))):
                took = {n: s for each in plan for o in each for n, s in o.seconds.items()}
                shared = play(problem, pool_of, took, iterations=8, devices=on, shares=4)
                shared = [one for one in shared if one.iteration < 6]
                work = sum(
                    took[c.number] * on[pool_of[c.role]] / 4
                    for c in problem.calls
                    if c.kind is not DRIVER
                )
                played.append(max(work, period_s(shared)))
    assert found.best.value == pytest.approx(min(played), rel=1e-6)


def test_on_a_shared_host_the_value_is_the_timelines() -> None:
    """Colocated, the host never waits; apart, it does while the driver works."""
    problem = a_problem(*PPO)
    options = scaling_options(problem, dict.fromkeys(problem.models, 1.0), any_n=False)
    found = search(
        problem, [(a_device(memory_bytes=1e15, shares=8), 8)], options, driver_s={5: 9.0}
    )
    assert len(found.plans[1].pools) > 1
    for plan in found.plans:
        assert plan.value == pytest.approx(period_s(plan.played), rel=1e-3)


def test_the_numbers_of_partitions_and_allocations_are_the_papers() -> None:
    assert [len(set_partitions("abcde"[:k])) for k in range(1, 6)] == [1, 2, 5, 15, 52]
    for (k, devices), pairs in {(3, 128): 8_383, (4, 128): 382_271, (4, 16): 1_191}.items():
        grants = Grants([(a_device(), devices)])
        rows = [
            sum(len(rows) for rows in grants.allocations(len(sets), every=True))
            for sets in set_partitions("abcd"[:k])
        ]
        parts = enumerate(STIRLING[k])
        assert sum(rows) == pairs == sum(s * comb(devices - 1, j) for j, s in parts)
    some = list(Grants([(a_device(), 5)]).allocations(3, every=False))
    assert sum(map(len, some)) == comb(5, 3)
    assert len(set_partitions("abcde")) == sum(STIRLING[5])


def test_undominated_rows_are_those_that_no_other_beats_everywhere() -> None:
    rows = np.random.default_rng(0).integers(0, 7, (400, 3)).astype(float)
    beaten = {
        i
        for i in range(len(rows))
        for j in range(len(rows))
        if (rows[j] <= rows[i]).all() and ((rows[j] < rows[i]).any() or j < i)
    }
    assert undominated(rows).tolist() == [i for i in range(len(rows)) if i not in beaten]


def equal_options(problem: Problem, resident_bytes: float = 0.0) -> Options:
    """One option a role and count: a second a call whatever the devices."""

    def options(role: str, device: Any, n: int) -> Sequence[Option]:
        seconds = dict.fromkeys((call.number for call in problem.of(role)), 1.0)
        return (Option(seconds=seconds, resident_bytes=resident_bytes / n),)

    return options


def test_ties_go_to_fewer_pools_then_to_more_devices_for_the_first() -> None:
    """A reads what C wrote, C what A wrote: apart or together, an iteration takes 3."""
    problem = a_problem((A, GENERATE, set()), (C, INFER, {0}), (A, TRAIN, {1}))
    cluster = [(a_device(), 4)]
    found = search(problem, cluster, equal_options(problem))
    assert [(plan.value, plan.sets) for plan in found.plans] == [(3, ((A, C),)), (3, ((A,), (C,)))]
    assert [pool.devices for pool in found.plans[1].pools] == [(3,), (1,)]
    again = search(problem, cluster, equal_options(problem))
    assert (again.plans, again.rejected) == (found.plans, found.rejected)
    cheap = search(problem, cluster, equal_options(problem), objective="cost").best
    assert (cheap.value, cheap.seconds, cheap.devices) == (3, 3, 1)


def test_a_mixed_cluster_pool_runs_as_its_slowest_device() -> None:
    """Memory of 40 GB on b: a model of 60 GB a device lives on a's devices alone."""
    problem = a_problem((A, GENERATE, set()))
    cluster = [(a_device("a"), 2), (a_device("b", 40 * GB), 2)]
    seconds = {"a": 4.0, "b": 3.0, "a+b": 2.0}

    def options(role: str, device: Any, n: int) -> Sequence[Option]:
        return (Option(seconds={0: seconds[device.name] / n}, resident_bytes=60 * GB),)

    found = search(problem, cluster, options)
    assert (found.best.pools[0].devices, found.best.value) == ((2, 0), 2.0)


def test_a_partition_that_does_not_fit_says_how_many_devices_would() -> None:
    """90 GB a model, over a pool's devices; 72 usable each: two together need three, apart four."""
    problem = a_problem((A, GENERATE, set()), (C, INFER, {0}))
    options = equal_options(problem, 90 * GB)
    found = search(problem, [(a_device(), 3)], options)
    assert found.best.sets == ((A, C),)
    (other,) = found.rejected
    assert (other.needs, other.why) == (4, "needs 4 x a")


def test_where_nothing_fits_the_error_says_how_many_devices_would() -> None:
    problem = a_problem((A, GENERATE, set()), (C, INFER, {0}))
    with pytest.raises(ValueError, match=r"2 x a: .* 72 GB usable .* use 3 x a or more") as error:
        search(problem, [(a_device(), 2)], equal_options(problem, 90 * GB))
    assert "actor+critic on 3; actor alone 2, critic alone 2" in str(error.value)


def test_a_model_that_never_fits_is_named() -> None:
    problem = a_problem((A, GENERATE, set()), (C, INFER, {0}))

    def options(role: str, device: Any, n: int) -> Sequence[Option]:
        if role == C:
            return ()
        return (Option(seconds={0: 1.0}, resident_bytes=100 * GB),)

    with pytest.raises(ValueError, match="actor needs 100 GB a device on up to 9 x a, 72 usable"):
        search(problem, [(a_device(), 2)], options, further=9)
    with pytest.raises(ValueError, match="critic has no layout on up to 9 x a"):
        search(problem, [(a_device(), 2)], options, further=9)


def test_devices_stay_idle_only_where_not_all_can_be_used() -> None:
    """Layouts for one and for two devices, none for three."""
    problem = a_problem((A, GENERATE, set()))

    def options(role: str, device: Any, n: int) -> Sequence[Option]:
        return (Option(seconds={0: float(n)}),) if n < 3 else ()

    assert search(problem, [(a_device(), 2)], options).best.devices == 2
    assert search(problem, [(a_device(), 3)], options).best.devices == 1


def test_a_model_without_calls_still_takes_memory() -> None:
    """90 GB each, 72 usable a device."""
    problem = a_problem((A, GENERATE, set()))
    problem = replace(problem, models={A: problem.models[A], C: problem.models[A]})
    options = equal_options(problem, 90 * GB)
    found = search(problem, [(a_device(), 3)], options)
    assert (found.best.value, found.best.sets, found.rejected[0].needs) == (1, ((A, C),), 4)


def test_the_papers_objective_and_time_differ_where_training_overlaps_generation() -> None:
    problem = a_problem(*PPO)
    options = scaling_options(problem, dict.fromkeys(problem.models, 1.0), any_n=False)
    found = {
        o: search(problem, [(a_device(), 24)], options, objective=o) for o in ("time", "paper")
    }
    assert found["paper"].best.d_cost <= found["time"].best.d_cost
    assert found["time"].best.seconds < found["paper"].best.seconds
    best = found["time"].best
    assert period_s(best.played) == pytest.approx(best.seconds)
    assert best.d_cost == pytest.approx(d_cost(problem, best.sets, best.call_seconds))


@pytest.mark.parametrize(
    ("step", "devices", "pairs"),
    [
        (PPO, 128, 382_271),
        pytest.param(SAFE, 128, 13_870_306, marks=pytest.mark.slow),
    ],
)
def test_of_a_large_cluster_few_plans_are_priced(step: Any, devices: int, pairs: int) -> None:
    problem = a_problem(*step)
    sizes = dict.fromkeys(problem.models, 1.0)
    options = scaling_options(problem, sizes, any_n=False)
    found = search(problem, [(a_device(), devices)], options)
    assert found.pairs == pairs
    assert found.priced < pairs / 50


@pytest.mark.parametrize(
    ("pools", "total", "fits"),
    [
        ([(8,)], 8, True),
        ([(9,)], 9, False),  # three processes of three, and machines of eight and one
        ([(12,), (4,)], 16, False),  # two processes of six leave two and two
        ([(12,), (2,), (2,)], 16, True),
        ([(8,), (4,), (5,)], 17, False),
        ([(16,), (1,)], 17, True),
        ([(4,), (4,), (8,)], 16, True),
    ],
)
def test_a_process_lies_in_one_machine(pools: Any, total: int, fits: bool) -> None:
    assert packs(pools, [(a_device(node=8), total)]) is fits


def test_no_plan_has_a_pool_that_finds_no_machines() -> None:
    problem = a_problem(*PPO)
    sizes = dict.fromkeys(problem.models, 1.0)
    for total in (9, 12, 17):
        cluster = [(a_device(node=8), total)]
        found = search(problem, cluster, scaling_options(problem, sizes, any_n=True))
        for plan in found.plans:
            assert packs([pool.devices for pool in plan.pools], cluster)
