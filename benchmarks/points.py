# SPDX-License-Identifier: Apache-2.0
"""HybridFlow's published points (arXiv 2409.19256 §8) beside what the simulator says of them.

A verdict is computed: the same winner, or a number within TOLERANCE of theirs.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.figure14 import SETUPS
from benchmarks.scaling import efficiencies
from benchmarks.simulated import (
    ALGORITHMS,
    MOST,
    SIZES_FROM,
    Setting,
    best,
    colocate,
    doubled,
    near,
    placements,
    same_sets,
    spelled,
    split,
    stage_seconds,
    standalone,
)
from benchmarks.systems import SYSTEMS, allocation
from hfjax.mapping.cost import Engine, relay_s, sent_s
from hfjax.mapping.devices import load_profile
from hfjax.mapping.partitions import Sets
from hfjax.mapping.search import Plan
from hfjax.mapping.work import Kind, Model, Option
from meshes.layouts import DS_CHAT, HYBRID
from meshes.mesh import MeshShape
from meshes.placement import RolePlacement

PAPER_SHARES = (1 / 2, 1 / 4, 1 / 8, 1 / 8)  # standalone at 128: 64, 32, 16, 16
FIGURE_15 = 16  # GPUs
T_G = (1, 2, 4, 8)
MIXED = Setting("ppo", "13b", "70b")


@dataclass(frozen=True)
class Point:
    """What was published, what is simulated, and what parts them."""

    name: str
    theirs: str
    ours: str
    matched: bool
    why: str = ""

    @property
    def verdict(self) -> str:
        return "matched" if self.matched else f"not matched: {self.why}"


def number(name: str, theirs: float, ours: float, why: str, unit: str = "%") -> Point:
    """A point of one number; `why` says what parts them, where something does."""
    a, b = (f"{value:.1f}{unit}" for value in (theirs, ours))
    return Point(name, a, b, near(ours, theirs), f"{why}; {ours / theirs:.2f} x theirs")


def share(name: str, theirs: float, ours: float, why: str) -> Point:
    """A percentage of a whole, whose rest must be near too: 99 % is not 81 %."""
    point = number(name, theirs, ours, why)
    return replace(point, matched=point.matched and near(100 - ours, 100 - theirs))


def points() -> Iterable[Point]:
    """All of them, in the paper's order but placements first."""
    yield from winners()
    yield from figure_15()
    yield from figure_14()
    yield from shares()
    efficiency = statistics.mean(e for _, _, e in efficiencies())
    yield number("strong scaling, mean", 66.8, 100 * efficiency, "see benchmarks.scaling")


def winners() -> Iterable[Point]:
    """Which placement is the best, by the paper's objective."""
    small = Setting("ppo", "13b")
    for gpus in (16, 24, 32, 64):
        yield winner(small, gpus, "colocate", colocate(small.problem), [gpus])
    alone = standalone(small.problem)
    yield winner(small, MOST, "standalone", alone, shared(alone, MOST))
    for gpus in (32, 48, 64):
        yield winner(MIXED, gpus, "colocate", colocate(MIXED.problem), [gpus])
    gains = list(colocate_gains(MIXED, (32, 48, 64)))
    ours = 100 * statistics.mean(gains) if gains else 0.0
    why = f"{len(gains)} of the 6 others fit, each with its best allocation"
    yield number("13B+70B, 32 to 64: colocate's throughput over others'", 44.8, ours, why)
    sets: Sets = (("actor", "reference", "reward"), ("critic",))
    yield winner(MIXED, MOST, "actor, ref, RM | critic", sets, [64, 64])


def winner(setting: Setting, gpus: int, name: str, sets: Sets, devices: Sequence[int]) -> Point:
    """Their best placement beside that of the search."""
    where = f"{setting.name.upper()} on {gpus}, best placement"
    room = placements(setting, "paper", gpus)
    found, given = best(setting, gpus, "paper"), room.given(sets, devices)
    theirs = f"{name} {' | '.join(map(str, devices))}"
    if found is None:
        return Point(where, theirs, "does not fit", False, "memory")
    same = {frozenset(p.roles): sum(p.devices) for p in found.pools}
    wanted = {frozenset(roles): n for roles, n in zip(sets, devices, strict=True)}
    ours = f"{spelled(found)}: {found.value:.1f} s"
    later = best(setting, gpus, "time")
    if later:
        ours += f" (time: {spelled(later)})"
    if given is None:
        return Point(where, theirs, ours, False, "theirs does not fit")
    why = f"theirs takes {given.value:.1f} s, {given.value / found.value - 1:.1%} more"
    if same_sets(found.sets, sets):
        why = f"the same sets; {why}"
    return Point(where, theirs, ours, same == wanted, why)


def shared(sets: Sets, gpus: int) -> list[int]:
    """The paper's shares of standalone; more roles halve the last."""
    return [max(1, int(gpus * share)) for share in PAPER_SHARES[: len(sets)]]


def given_placements(setting: Setting, gpus: int) -> dict[str, tuple[Sets, list[int]]]:
    """The three that are given by hand."""
    problem = setting.problem
    return {
        "colocate": (colocate(problem), [gpus]),
        "split": (split(problem), [gpus // 2] * 2),
        "standalone": (standalone(problem), shared(standalone(problem), gpus)),
    }


def colocate_gains(setting: Setting, sizes: Sequence[int]) -> Iterable[float]:
    """How much faster colocate is than split and standalone, as these fit best."""
    room, problem = placements(setting, "paper"), setting.problem
    for gpus in sizes:
        base = room.given(colocate(problem), [gpus])
        for sets in (split(problem), standalone(problem)):
            other = room.allocated(sets, gpus)
            if base and other:
                yield other.value / base.value - 1


class Figure15:
    """All models of a size colocated on 16 GPUs, trained as 1-8-2, KV cache in the rest."""

    def __init__(self, size: str) -> None:
        self.setting = Setting("ppo", size)
        pricer = self.setting.pricer("time")
        roles = self.setting.problem.models
        self.costs = {role: pricer.costs(role, self.setting.on) for role in roles}
        each = [own.bytes(self._option(own.model))[0] for own in self.costs.values()]
        self.resident_bytes = sum(each)

    def _option(self, model: Model) -> Option:
        """Optimizer states are sharded over the replicas, as Megatron's."""
        d = FIGURE_15 // 8
        if not model.trained:
            return Option(infer=MeshShape(data=d, tensor=8), sequence_parallel=True)
        more: Any = {"zero": 1, "remat": "layer", "micro_sequences": d, "sequence_parallel": True}
        return Option(train=MeshShape(fsdp=d, tensor=8), **more)

    def generation(self, t_g: int) -> tuple[int, float] | None:
        """Waves that the memory for keys and values makes, and seconds of all of them."""
        costs = self.costs["actor"]
        option = replace(self._option(costs.model), generate=MeshShape(tensor=t_g))
        for waves in range(1, costs.prompts(option) + 1):
            option = replace(option, waves=waves)
            if self.resident_bytes + costs.generating_bytes(option) <= self.setting.room:
                return waves, costs.decode_seconds(option)
        return None


def figure_15() -> Iterable[Point]:
    """The tensor parallel size of generation for 7B."""
    figure = Figure15("7b")
    seconds = {t: found[1] for t in T_G if (found := figure.generation(t))}
    least = min(seconds, key=lambda t: seconds[t])
    yield Point(
        "figure 15, 7B: best t_g", "2", str(least), least == 2, f"{seconds[least]:.1f} s at {least}"
    )
    ours = 100 * (1 - seconds[2] / seconds[8])
    yield share("figure 15, 7B: t_g = 2 against 8, less", 60.3, ours, "of the seconds")


def transitions(size: str, gpus: int) -> dict[str, float]:
    """Seconds from training to generation: HybridFlow's layouts, and the baselines'."""
    setting, setup = Setting("ppo", size), SETUPS[size]
    engine = Engine(device=setting.on, profile=load_profile("eager-2024"))
    shape = setup.placed(gpus, HYBRID).mesh_shape
    whole = MeshShape(fsdp=gpus)
    ds = RolePlacement("a", "a", train=whole, generate=MeshShape(tensor=8), relay=DS_CHAT)
    shares = allocation(setting, gpus)
    assert shares is not None
    own = MeshShape(fsdp=shares["actor"])
    gathered = RolePlacement("a", "a", train=own, generate=MeshShape(), relay=DS_CHAT).mesh_shape
    t = min(8, shares["rollout"])
    sent = sent_s(engine, setup.cfg, shares["rollout"] // t, 1, shares["rollout"])
    return {
        "HybridFlow": relay_s(engine, setup.cfg, shape, relay=HYBRID, zero=3),
        "DS-Chat": relay_s(engine, setup.cfg, ds.mesh_shape, relay=DS_CHAT, zero=3),
        "OpenRLHF": relay_s(engine, setup.cfg, gathered, relay=DS_CHAT, zero=3) + sent,
    }


def figure_14() -> Iterable[Point]:
    """How much less a transition takes than the baselines'."""
    less: dict[str, list[float]] = {"DS-Chat": [], "OpenRLHF": []}
    saved = []
    for size, setup in SETUPS.items():
        for gpus in setup.devices:
            took = transitions(size, gpus)
            ours = took["HybridFlow"]
            for name, found in less.items():
                found.append(100 * (1 - ours / took[name]))
                saved.append(took[name] - ours)
    why = "the engine's reload and synchronisation are not modelled"
    mean = statistics.mean([*less["DS-Chat"], *less["OpenRLHF"]])
    yield share("figure 14: transition less, mean", 55.2, mean, why)
    yield number("the same", 11.7, statistics.mean(saved), why, " s")
    yield share("against OpenRLHF, up to", 89.1, max(less["OpenRLHF"]), why)
    yield share("against DS-Chat, up to", 71.2, max(less["DS-Chat"]), why)


def shares() -> Iterable[Point]:
    """Of generation in an iteration of NeMo-Aligner's, of the actor in one of HybridFlow's."""
    for system, why in (
        ("NeMo-Aligner", "without a KV cache every token takes a pass over all before it"),
        ("NeMo, KV cache", "with a KV cache"),
    ):
        found = []
        for algorithm in ALGORITHMS:
            for size, least in SIZES_FROM.items():
                setting = Setting(algorithm, size)
                each = [SYSTEMS[system](setting, gpus) for gpus in doubled(least)]
                found += [it.share(setting, Kind.GENERATE) for it in each if it]
        name = f"{system}: generation's share, up to"
        yield share(name, 81.2, 100 * max(found, default=0.0), why)
    plans = [
        (setting, found)
        for setting in (Setting(algorithm, size) for algorithm in ALGORITHMS for size in SIZES_FROM)
        for gpus in doubled(SIZES_FROM[setting.actor])
        if (found := best(setting, gpus, "paper"))
    ]
    generates, learns = (
        100 * statistics.mean(actor_share(setting, found, kind) for setting, found in plans)
        for kind in (Kind.GENERATE, Kind.TRAIN)
    )
    why = f"generation {generates:.1f}%, training {learns:.1f}%, mean of all settings"
    name = "HybridFlow: actor's generation and training, share"
    yield share(name, 58.9, generates + learns, why)


def actor_share(setting: Setting, plan: Plan, kind: Kind) -> float:
    """Of an iteration, by the paper's objective."""
    return stage_seconds(plan, setting.problem, kind, "actor") / plan.d_cost
