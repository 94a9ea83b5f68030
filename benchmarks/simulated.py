# SPDX-License-Identifier: Apache-2.0
"""Published settings as problems of hfjax.mapping, and placements of them priced as it prices.

Everything here is SIMULATED: no device ran. One profile, `eager-2024`, and the devices' tables.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

import algorithms.ppo
import algorithms.remax
import algorithms.safe_rlhf
from hfjax.mapping.devices import Device, load_devices, load_profile
from hfjax.mapping.options import Pricer
from hfjax.mapping.partitions import Grants, Sets, compositions
from hfjax.mapping.plan import plan_class, planned
from hfjax.mapping.pools import Pools
from hfjax.mapping.prices import Objective, Partition, Terms
from hfjax.mapping.search import USABLE, Plan, PlanPool, search
from hfjax.mapping.simulate import d_cost, steady_s
from hfjax.mapping.work import Kind, Option, Problem, Workload

PROFILE = "eager-2024"
SIZES = {"7b": "llama2-7b", "13b": "llama2-13b", "34b": "codellama-34b", "70b": "llama2-70b"}
ALGORITHMS: Mapping[str, tuple[ModuleType, Mapping[str, Any]]] = {
    "ppo": (algorithms.ppo, {}),
    "remax": (algorithms.remax, {}),
    "safe-rlhf": (algorithms.safe_rlhf, {"cost_critic": False}),  # HybridFlow's five models
}
SIZES_FROM = {"7b": 8, "13b": 16, "34b": 32, "70b": 64}  # fewest GPUs of HybridFlow's figures 9-11
MOST = 128  # GPUs of HybridFlow §8.1 and of the relatives' measurements
MACHINE = 8
BATCH = 256  # plans priced at once
TOLERANCE = 0.25  # of a simulator that was not calibrated on the hardware


@dataclass(frozen=True)
class Setting:
    """An algorithm with models of such sizes, on devices of one kind."""

    algorithm: str
    actor: str
    critic: str = ""  # of the score models too; empty: actor
    device: str = "a100-80g"
    work: Workload = Workload()
    machines: bool = False  # pools of more than a machine are whole machines

    @property
    def name(self) -> str:
        return f"{self.actor}+{self.critic}" if self.critic else self.actor

    @property
    def on(self) -> Device:
        return load_devices()[self.device]

    @property
    def room(self) -> float:
        """Bytes of a device that are planned for."""
        return USABLE * self.on.memory_bytes

    @property
    def problem(self) -> Problem:
        """HybridFlow's dataflow: the actor does not score what it sampled."""
        return _problem(self)

    def pricer(self, objective: Objective) -> Pricer:
        """Options, made once."""
        return _pricer(self, objective == "paper")

    def options(self, objective: Objective) -> Any:
        """As the search asks for them."""
        pricer = self.pricer(objective)

        def options(role: str, device: Device, devices: int) -> Sequence[Option]:
            if self.machines and devices > device.node and devices % device.node:
                return ()
            return pricer.options(role, device, devices)

        return options

    def rate(self, seconds: float) -> float:
        """Tokens a second."""
        return self.work.tokens / seconds


@cache
def _problem(setting: Setting) -> Problem:
    algorithm, options = ALGORITHMS[setting.algorithm]
    models: Any = {"model": SIZES[setting.actor], "critic": SIZES[setting.critic or setting.actor]}
    config = plan_class(algorithm)(
        algorithm=algorithm.Settings(**options),
        dtype="float32",  # says only that rollout and training agree
        **models,
        **{name: getattr(setting.work, name) for name in Workload.__dataclass_fields__},
    )
    return planned(algorithm, config)


@cache
def _pricer(setting: Setting, one_layout: bool) -> Pricer:
    profile = load_profile(PROFILE)
    return Pricer(problem=setting.problem, profile=profile, one_layout=one_layout)


@cache
def best(setting: Setting, devices: int, objective: Objective) -> Plan | None:
    """What the search finds; None where nothing fits."""
    try:
        return search(
            setting.problem,
            ((setting.on, devices),),
            setting.options(objective),
            objective=objective,
            keep=1,
            further=devices,
        ).best
    except ValueError:
        return None


def placements(setting: Setting, objective: Objective, gpus: int = MOST) -> "Placements":
    """Of up to so many GPUs at the least; made once for a machine and once for all."""
    return _placements(setting, objective, MACHINE if gpus <= MACHINE else MOST)


@cache
def _placements(setting: Setting, objective: Objective, most: int) -> "Placements":
    return Placements(setting, objective, most)


class Placements:
    """Placements given by hand, priced with what the search is made of."""

    def __init__(self, setting: Setting, objective: Objective, most: int = MOST) -> None:
        self.setting, self.problem = setting, setting.problem
        self.terms = Terms(self.problem, objective, {}, None, False, 1)
        self.pools = Pools(
            self.problem,
            Grants([(setting.on, most)]),
            setting.options(objective),
            usable=USABLE,
            one_layout=objective == "paper",
        )

    def given(self, sets: Sets, devices: Sequence[int]) -> Plan | None:
        """On so many devices each, with the best options that fit."""
        return self._least(sets, np.array([devices]))

    def allocated(self, sets: Sets, devices: int) -> Plan | None:
        """With the best allocation of all devices."""
        return self._least(sets, compositions(devices, len(sets)).astype(int))

    def _least(self, sets: Sets, rows: np.ndarray) -> Plan | None:
        partition = Partition(self.pools, sets, self.terms)
        rows = rows[np.isfinite(partition.busiest(rows))]
        if not len(rows):
            return None
        bounds = partition.bound(rows)
        by_bound = np.argsort(bounds, kind="stable")
        rows, bounds = rows[by_bound], bounds[by_bound]
        least, found = np.inf, None
        for begin in range(0, len(rows), BATCH):
            if bounds[begin] >= least:
                break
            some, limit = rows[begin : begin + BATCH], least
            priced = partition.price(some, lambda values, _, limit=limit: values < limit)
            if len(priced.value) and priced.value.min() < least:
                i = int(np.lexsort((priced.busy, priced.value))[0])
                least, row = float(priced.value[i]), some[priced.row[i]]
                found = row, partition.options(row, priced.picks[i])
        return self._plan(partition, *found, least) if found else None

    def _plan(
        self, partition: Partition, row: np.ndarray, options: list[tuple[Option, ...]], value: float
    ) -> Plan:
        pools = tuple(
            PlanPool(roles, (int(count),), dict(zip(roles, each, strict=True)))
            for roles, count, each in zip(partition.sets, row, options, strict=True)
        )
        seconds = partition.steady_s(row, options)
        cost = d_cost(self.problem, partition.sets, partition.call_seconds(options))
        return Plan(pools, value, seconds, cost, ())


def colocate(problem: Problem) -> Sets:
    """One pool (DeepSpeed-Chat's)."""
    return (tuple(problem.models),)


def split(problem: Problem) -> Sets:
    """The actor's pair and the critic's (NeMo-Aligner's)."""
    first = tuple(role for role in problem.models if role in ("actor", "reference"))
    return first, tuple(role for role in problem.models if role not in first)


def standalone(problem: Problem) -> Sets:
    """A pool a model, large ones first (OpenRLHF's)."""
    order = ("actor", "critic", "reference", "reward", "cost")
    return tuple((role,) for role in order if role in problem.models)


def joined_s(problem: Problem, plan: Plan) -> float:
    """An iteration that begins when the one before has ended."""
    pool_of = {role: pool.name for pool in plan.pools for role in pool.roles}
    return steady_s(problem, pool_of, plan.call_seconds, joined=True)


def stage_seconds(plan: Plan, problem: Problem, kind: Kind, role: str = "") -> float:
    """Of a plan's calls of a kind, of one role or all."""
    calls = [c.number for c in problem.calls if c.kind is kind and role in ("", c.role)]
    return sum(plan.call_seconds[number] for number in calls)


def spelled(plan: Plan) -> str:
    """actor+reference 64 | critic 64."""
    return " | ".join(f"{'+'.join(pool.roles)} {sum(pool.devices)}" for pool in plan.pools)


def same_sets(a: Sets, b: Sets) -> bool:
    return {frozenset(roles) for roles in a} == {frozenset(roles) for roles in b}


def near(ours: float, theirs: float) -> bool:
    """Within TOLERANCE."""
    return abs(ours - theirs) <= TOLERANCE * abs(theirs)


def doubled(least: int) -> list[int]:
    """Numbers of GPUs from the fewest to 128."""
    return [n for n in (8, 16, 32, 64, MOST) if n >= least]
