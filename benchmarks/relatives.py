# SPDX-License-Identifier: Apache-2.0
"""Step times measured in 2024 under a known plan, and the same plan SIMULATED.

The Heuristic: every call on all GPUs, tensor 8, a stage a machine, sequence parallel, everything
rematerialised. Where a stage a machine does not divide the layers, the most stages that do, and
replicas of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from benchmarks.simulated import MACHINE, MOST, Setting, best
from hfjax.mapping.options import WAVES
from hfjax.mapping.pricing import RoleCosts
from hfjax.mapping.search import Plan
from hfjax.mapping.work import Option, Workload
from meshes.layouts import SHARED, divisors
from meshes.mesh import MeshShape

DEVICE = "a800-80g"
TOKENS = 131_072  # a batch, whatever its lengths
PROMPT = 128
UPDATES = 4
LENGTHS = (128, 384, 896)
GPUS = (8, 16, 32, 64, MOST)
SECONDS_WITHIN, DECODE_WITHIN = 0.2, 0.25
GAIN = 1.26  # ReaL's over the Heuristic, on average (arXiv 2406.14088)
PAIRS = (
    *(("7b", "7b"), ("13b", "7b"), ("34b", "7b"), ("70b", "7b"), ("7b", "13b")),
    *(("7b", "34b"), ("7b", "70b"), ("13b", "13b"), ("34b", "34b"), ("70b", "70b")),
)


@dataclass(frozen=True)
class Measured:
    """A published measurement: models of one size, seconds of the Heuristic and of ReaL's plan."""

    size: str
    gpus: int
    length: int
    heuristic_s: float
    real_s: float


MEASURED = (
    Measured("7b", 8, 128, 31.3, 23.3),
    Measured("7b", 8, 896, 63.4, 37.4),
    Measured("7b", 16, 128, 24.0, 14.6),
    Measured("7b", 16, 896, 58.2, 34.3),
    Measured("13b", 32, 128, 27.1, 23.7),
    Measured("13b", 32, 896, 67.8, 42.9),
    Measured("70b", 128, 128, 47.6, 38.4),
    Measured("70b", 128, 896, 144.0, 118.7),
)


@dataclass(frozen=True)
class Simulated:
    """Seconds of a step by call, and bytes of the fullest device."""

    calls: Mapping[int, float]
    bytes: float
    fits: bool

    @property
    def seconds(self) -> float:
        """All calls one after another."""
        return sum(self.calls.values())


class _Costs(RoleCosts):
    """Scoring in as many passes as there are stages."""

    def pass_rows(self, option: Option) -> int:
        shape = option.infer or option.train
        assert shape is not None
        return max(1, self.work.rows // (shape.pipe * shape.data * shape.fsdp))


def setting_of(actor: str, critic: str, length: int) -> Setting:
    """Of so many new tokens."""
    sizes: Any = {"prompt_tokens": PROMPT, "response_tokens": length, "updates": UPDATES}
    work = Workload(prompts=TOKENS // (PROMPT + length), **sizes)
    return Setting("ppo", actor, critic, DEVICE, work, machines=True)


@cache
def heuristic(setting: Setting, gpus: int) -> Simulated:
    """The Heuristic's step on so many GPUs."""
    calls: dict[int, float] = {}
    resident, working = 0.0, 0.0
    costs = _costs(setting)
    options = {role: _option(own, gpus) for role, own in costs.items()}
    for role, own in costs.items():
        resident += own.bytes(options[role])[0]
    for role, own in costs.items():
        option = options[role]
        if own.model.generates:
            option = _waved(own, option, setting.room - resident)
        priced = own.priced(option)
        calls |= priced.seconds
        working = max(working, priced.working_bytes)
    return Simulated(calls, resident + working, resident + working <= setting.room)


def _costs(setting: Setting) -> dict[str, RoleCosts]:
    pricer = setting.pricer("time")
    return {
        role: _Costs(setting.problem, role, setting.on, pricer.profile, pricer.itemsize)
        for role in setting.problem.models
    }


def _option(costs: RoleCosts, gpus: int) -> Option:
    tensor = min(MACHINE, gpus)
    machines = gpus // tensor
    pipe = [p for p in divisors(costs.cfg.layers, machines) if machines % p == 0][-1]
    shape = MeshShape(data=machines // pipe, pipe=pipe, tensor=tensor)
    if not costs.model.trained:
        return Option(infer=shape, sequence_parallel=True)
    rows = costs.work.rows // UPDATES
    micro = max(1, rows // shape.data // (2 * pipe)) * shape.data
    option = Option(train=shape, sequence_parallel=True, remat="layer", micro_sequences=micro)
    keep = MeshShape(pipe=pipe, tensor=tensor)
    return replace(option, generate=keep, relay=SHARED) if costs.model.generates else option


def _waved(costs: RoleCosts, option: Option, room: float) -> Option:
    """In as few waves as the KV cache's memory allows; all, where it never does."""
    tried = [replace(option, waves=n) for n in WAVES if n <= costs.prompts(option)]
    return next((each for each in tried if costs.generating_bytes(each) <= room), tried[-1])


def quickest(setting: Setting, gpus: int) -> Plan | None:
    """Our best plan."""
    return best(setting, gpus, "time")


def decode_s(short: float, long: float) -> float:
    """Of a token: batches have the same number of tokens, whatever their lengths."""
    return (long - short) / (LENGTHS[-1] - LENGTHS[0])
