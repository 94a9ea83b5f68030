# SPDX-License-Identifier: Apache-2.0
"""Iterations of other systems' configurations, SIMULATED with the same cost model.

Their layouts, modes and placement as HybridFlow §8.1 and their code describe them, on the dataflow
of the paper; micro-batches, waves and tensor parallel sizes of generation are the best that fit.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.simulated import MACHINE, PROFILE, Setting, split
from hfjax.mapping.cost import replica_rows, sent_s
from hfjax.mapping.devices import load_profile
from hfjax.mapping.options import REMATS, WAVES, Pricer
from hfjax.mapping.pricing import RoleCosts
from hfjax.mapping.simulate import steady_s
from hfjax.mapping.work import Kind, Option
from meshes.layouts import DS_CHAT, SHARED, divisors
from meshes.mesh import MeshShape

ROLLOUT = "rollout"  # vLLM's engines, on devices of their own
SCRIPT = {"actor": 4, "critic": 4, "reference": 2, "reward": 2, ROLLOUT: 4}  # of 16 devices
TENSORS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Iteration:
    """Seconds of an iteration that begins when the one before has ended, and what they are."""

    seconds: float
    calls: Mapping[int, float]
    layouts: Mapping[str, Option]

    def share(self, setting: Setting, kind: Kind) -> float:
        """Of the iteration that calls of a kind take; of those that nothing runs beside."""
        numbers = [call.number for call in setting.problem.calls if call.kind is kind]
        return sum(self.calls[number] for number in numbers) / self.seconds


def ds_chat(setting: Setting, devices: int) -> Iteration | None:
    """Every model ZeRO-3 over all devices, generation tensor parallel inside a machine."""
    pricer, ways = setting.pricer("time"), {}
    for role, model in setting.problem.models.items():
        shape = MeshShape(fsdp=devices)
        if model.config.embed % devices:
            return None
        costs = pricer.costs(role, setting.on)
        base = Option(train=shape) if model.trained else Option(infer=shape)
        found = list(updates(costs, base, ("layer",)))
        ways[role] = list(_ds_generations(costs, found, devices)) if model.generates else found
    return _together(setting, [ways])


def _ds_generations(costs: RoleCosts, ways: Iterable[Option], devices: int) -> Iterable[Option]:
    """ZeRO-3's seconds and bytes stay; generation has its own parts of the ZeRO axis."""
    for way in ways:
        for t in (t for t in TENSORS if devices % t == 0 and costs.cfg.heads % t == 0):
            keep = replace(way, generate=MeshShape(tensor=t), relay=DS_CHAT)
            yield from _waved(costs, way, keep)


def _waved(costs: RoleCosts, way: Option, keep: Option, sent: float = 0.0) -> Iterable[Option]:
    """`way` with the generations of `keep` in each number of waves."""
    numbers = [call.number for call in costs.calls if call.kind is Kind.GENERATE]
    relay = costs.relay_seconds(keep) + sent
    for waves in (waves for waves in WAVES if waves <= costs.prompts(keep)):
        keep = replace(keep, waves=waves)
        seconds = dict(way.seconds) | dict.fromkeys(numbers, costs.decode_seconds(keep))
        seconds[numbers[0]] += relay
        working = max(way.working_bytes, costs.generating_bytes(keep))
        yield replace(keep, seconds=seconds, working_bytes=working)


def nemo_aligner(setting: Setting, devices: int, *, kv_cache: bool = False) -> Iteration | None:
    """Two halves, 3D layouts with all of a machine's tensor parallelism, the same to generate.

    Without KV cache, as HybridFlow says of it. A half's models have the fewest stages that fit.
    """
    if setting.algorithm == "remax":
        return None
    profile = replace(load_profile(PROFILE), kv_cache=kv_cache)
    pricer = replace(setting.pricer("time"), profile=profile)
    half = devices // 2
    pools = [_staged(setting, pricer, roles, half) for roles in split(setting.problem)]
    if not all(pools):
        return None
    return _together(setting, [pool for pool in pools if pool])


def _staged(
    setting: Setting, pricer: Pricer, roles: Sequence[str], devices: int
) -> Mapping[str, list[Option]] | None:
    """Ways to run roles together with the fewest stages; None where no number of them fits."""
    t = min(MACHINE, devices)
    layers = {setting.problem.models[role].config.layers for role in roles}
    for p in divisors(devices // t):
        if any(count % p for count in layers):
            continue
        ways = {}
        for role in roles:
            ways[role] = list(_shared(setting, pricer, role, MeshShape(pipe=p, tensor=t), devices))
        if fitted(ways, setting.room):
            return ways
    return None


def _shared(
    setting: Setting, pricer: Pricer, role: str, part: MeshShape, devices: int
) -> Iterable[Option]:
    """One layout for everything."""
    costs, model = pricer.costs(role, setting.on), setting.problem.models[role]
    d = devices // part.devices
    where: Any = {"infer": replace(part, data=d)}
    if model.trained:
        where = {"train": replace(part, fsdp=d), "zero": 1}
        if model.config.embed % d:
            where = {"train": replace(part, data=d)}
    for way in updates(costs, Option(**where, sequence_parallel=True), REMATS):
        if not model.generates:
            yield way
            continue
        keep = replace(way, generate=part, relay=SHARED)
        if pricer.profile.kv_cache:
            yield from _waved(costs, way, keep)
            continue
        numbers = [call.number for call in costs.calls if call.kind is Kind.GENERATE]
        seconds = dict.fromkeys(numbers, costs.decode_seconds(keep))
        yield replace(keep, seconds=dict(way.seconds) | seconds)


def openrlhf(setting: Setting, devices: int) -> Iteration | None:
    """Every model ZeRO-3 on its own devices, vLLM's engines on theirs, weights sent there."""
    shares = allocation(setting, devices)
    if shares is None:
        return None
    pools = []
    for role, model in setting.problem.models.items():
        n = shares[role]
        if model.config.embed % n:
            return None
        costs = setting.pricer("time").costs(role, setting.on)
        base = Option(train=MeshShape(fsdp=n)) if model.trained else Option(infer=MeshShape(fsdp=n))
        pools.append({role: list(updates(costs, base, ("layer",)))})
    pools.append({ROLLOUT: list(_engines(setting, shares))})
    return _together(setting, pools)


def allocation(setting: Setting, devices: int) -> dict[str, int] | None:
    """The shares of the script for 70B, scaled; None where a model would get less than one device.

    Safe-RLHF's cost model halves the reward model's share (or has one device of vLLM's, where that
    cannot be halved); without a critic the actor has its share too.
    """
    if devices % 8:
        return None
    found = {role: share * devices // 16 for role, share in SCRIPT.items()}
    roles = setting.problem.models
    if "critic" not in roles:
        found["actor"] += found.pop("critic")
    if "cost" in roles:
        half = found["reward"] // 2
        found |= (
            {"reward": half, "cost": half} if half else {"cost": 1, ROLLOUT: found[ROLLOUT] - 1}
        )
    return found


def _engines(setting: Setting, shares: Mapping[str, int]) -> Iterable[Option]:
    """Generation on its own devices, in engines of any tensor parallel size."""
    costs = setting.pricer("time").costs("actor", setting.on)
    for t in (t for t in TENSORS if shares[ROLLOUT] % t == 0):
        copies = shares[ROLLOUT] // t
        sent = sent_s(costs.engine, costs.cfg, copies, shares["actor"], shares[ROLLOUT])
        shape = MeshShape(data=copies, tensor=t)
        keep = Option(infer=shape, generate=MeshShape(tensor=t), relay=SHARED)
        yield from _waved(costs, Option(), keep, sent)


def updates(costs: RoleCosts, base: Option, remats: Sequence[str]) -> Iterable[Option]:
    """A layout with each micro-batch; a role that only computes has none."""
    shape = base.train
    if shape is None:
        yield costs.priced(base)
        return
    rows = -(-costs.work.rows // costs.work.updates)
    replicas = shape.data * shape.fsdp
    for remat in remats:
        for k in range(replica_rows(rows, shape).bit_length()):
            yield costs.priced(replace(base, remat=remat, micro_sequences=2**k * replicas))


def fitted(ways: Mapping[str, Sequence[Option]], room: float) -> dict[str, Option] | None:
    """Each role's quickest way that leaves room for what all hold between calls.

    A role's ways hold the same between calls.
    """
    resident = sum(options[0].resident_bytes for options in ways.values())
    found = {}
    for role, options in ways.items():
        some = [option for option in options if resident + option.working_bytes <= room]
        if not some:
            return None
        found[role] = min(some, key=lambda option: sum(option.seconds.values()))
    return found


def _together(
    setting: Setting, pools: Sequence[Mapping[str, Sequence[Option]]]
) -> Iteration | None:
    """An iteration on these pools."""
    layouts: dict[str, Option] = {}
    pool_of: dict[str, str] = {}
    for number, ways in enumerate(pools):
        found = fitted(ways, setting.room)
        if found is None:
            return None
        layouts |= found
        pool_of |= dict.fromkeys(ways, f"pool {number}")
    problem = setting.problem
    if ROLLOUT in pool_of:
        calls = tuple(
            replace(call, role=ROLLOUT) if call.kind is Kind.GENERATE else call
            for call in problem.calls
        )
        problem = replace(problem, calls=calls)
    seconds: dict[int, float] = {}
    for role, option in layouts.items():
        mine = [call.number for call in problem.of(role)]
        seconds |= {number: option.seconds[number] for number in mine}
    took = steady_s(problem, pool_of, seconds, joined=True)
    return Iteration(took, seconds, layouts)


System = Callable[[Setting, int], Iteration | None]
SYSTEMS: Mapping[str, System] = {
    "DS-Chat": ds_chat,
    "OpenRLHF": openrlhf,
    "NeMo-Aligner": nemo_aligner,
    "NeMo, KV cache": partial(nemo_aligner, kv_cache=True),
}
