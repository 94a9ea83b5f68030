# SPDX-License-Identifier: Apache-2.0
"""The ways a role may run on some devices, priced: layouts, micro-batches, waves of generation.

Dropped are only ways that another one beats in every call's seconds and in memory.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np

from hfjax.engine.passes import PASS_TOKENS
from hfjax.mapping.cost import (
    Engine,
    generate_s,
    infer_s,
    relay_s,
    replica_rows,
    update_s,
)
from hfjax.mapping.devices import Device, Profile
from hfjax.mapping.memory import (
    activation_bytes,
    generation_bytes,
    kv_bytes,
    training_bytes,
    weight_bytes,
)
from hfjax.mapping.work import Call, Kind, Model, Option, Problem
from hfjax.models.llama import ModelConfig
from meshes.layouts import SHARED, divisors
from meshes.mesh import MeshShape
from meshes.placement import RolePlacement

USABLE = 0.9  # share of a device's memory to plan for; vLLM's gpu_memory_utilization
ALIKE = 0.02  # ways closer than this in seconds and bytes are one
WAVES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
REMATS = ("none", "layer")
MOST_TENSOR = 8  # more needs links between machines to be as fast as those inside


@dataclass(frozen=True, kw_only=True)
class Pricer:
    """Prices options of a problem's roles; `objective` "paper" has one layout a model."""

    problem: Problem
    profile: Profile
    itemsize: int = 2
    one_layout: bool = False

    def options(self, role: str, device: Device, devices: int) -> tuple[Option, ...]:
        """Every way worth a look; empty where none fits a device's memory."""
        return _options(self, role, device, devices)

    def price(self, role: str, device: Device, option: Option) -> Option:
        """The option with its seconds and bytes; layouts as a placement file writes them."""
        return _Role(self, role, device).priced(option)

    def __hash__(self) -> int:
        return id(self)


@lru_cache(maxsize=None)
def _options(pricer: Pricer, role: str, device: Device, devices: int) -> tuple[Option, ...]:
    return tuple(_Role(pricer, role, device).options(devices))


class _Role:
    """One role on devices of one kind."""

    def __init__(self, pricer: Pricer, role: str, device: Device) -> None:
        self.pricer, self.device = pricer, device
        self.model: Model = pricer.problem.models[role]
        self.calls: Sequence[Call] = pricer.problem.of(role)
        self.work = pricer.problem.work
        self.cfg, self.head = self.model.config, self.model.head
        self.engine = Engine(
            device=device, profile=device.profile or pricer.profile, itemsize=pricer.itemsize
        )
        self.limit = USABLE * device.memory_bytes
        self.generates = any(call.kind is Kind.GENERATE for call in self.calls)

    def options(self, devices: int) -> list[Option]:
        """What fits a device by itself."""
        found: list[Option] = []
        for _, bases in groupby(self.bases(devices), key=lambda o: _stages(o)):
            ways = [self.priced(way) for base in bases for way in self.updates(base)]
            ways = pareto([way for way in ways if self.fits(way)])
            found += self.generations(ways) if self.generates else ways
        return pareto(found)

    def fits(self, option: Option) -> bool:
        return option.resident_bytes + option.working_bytes <= self.limit

    def bases(self, devices: int) -> Iterator[Option]:
        """Layouts of training, or of inference alone."""
        for t in self.tensors():
            for p in divisors(self.cfg.layers, devices):
                if devices % (p * t):
                    continue
                d = devices // (p * t)
                shapes = [(MeshShape(data=d, pipe=p, tensor=t), 3)]
                if d > 1:
                    sharded = MeshShape(fsdp=d, pipe=p, tensor=t)
                    shapes += [(sharded, zero) for zero in ((1, 3) if self.model.trained else (3,))]
                for shape, zero in shapes:
                    if shape.fsdp > 1 and self.cfg.embed % shape.fsdp:
                        continue
                    where: Any = {"train" if self.model.trained else "infer": shape, "zero": zero}
                    yield Option(**where, sequence_parallel=t > 1)

    def tensors(self) -> list[int]:
        """Tensor parallel sizes that divide what they split."""
        sizes = (self.cfg.heads, self.cfg.mlp)
        most = min(MOST_TENSOR, self.device.node)
        return [t for t in divisors(math.gcd(*sizes), most) if t & (t - 1) == 0]

    def updates(self, option: Option) -> Iterator[Option]:
        """Micro-batches and rematerialisation of a trained role."""
        if option.train is None:
            yield option
            return
        shape = option.train
        mine = replica_rows(math.ceil(self.work.rows / self.work.updates), shape)
        replicas = shape.data * shape.fsdp
        tried: list[Option] = []
        for remat in REMATS:
            for micro in [2**k for k in range(mine.bit_length())]:
                way = replace(option, remat=remat, micro_sequences=micro * replicas)
                size = self.update_bytes(way)
                if size > self.limit:
                    break
                seconds = {-1: self.update_seconds(way)}
                tried.append(replace(way, seconds=seconds, working_bytes=size))
        yield from pareto(tried)

    def generations(self, ways: Sequence[Option]) -> list[Option]:
        """Each way to train, with each way to generate that keeps whole parts of its p and t."""
        found: list[Option] = []
        if not ways:
            return found
        shape = ways[0].train or ways[0].infer
        assert shape is not None
        numbers = [call.number for call in self.calls if call.kind is Kind.GENERATE]
        for t in divisors(shape.tensor):
            for p in divisors(shape.pipe):
                keep = MeshShape(pipe=p, tensor=t)
                placed = [replace(way, generate=keep) for way in ways]
                relays = [self.relay_seconds(way) for way in placed]
                for waves in self.waves(placed[0]):
                    first = replace(placed[0], waves=waves)
                    size = self.generation_bytes(first)
                    if size + min(way.resident_bytes for way in ways) > self.limit:
                        continue
                    own_s = self.decode_seconds(first)
                    for way, relay in zip(placed, relays, strict=True):
                        most = max(way.working_bytes, size)
                        if way.resident_bytes + most <= self.limit:
                            seconds = way.seconds | dict.fromkeys(numbers, own_s)
                            seconds[numbers[0]] += relay  # the others' weights are there
                            found.append(
                                replace(way, waves=waves, seconds=seconds, working_bytes=most)
                            )
        return pareto(found)

    def waves(self, option: Option) -> Iterable[int]:
        """Numbers of waves that shrink the cache; one where the engine has no waves."""
        if not self.engine.profile.waves:
            return (1,)
        prompts = self.prompts(option)
        return [waves for waves in WAVES if waves <= prompts]

    def prompts(self, option: Option) -> int:
        """Of a replica of generation."""
        shape = self.meshed(option)
        assert option.generate is not None
        replicas = shape.devices // option.generate.devices
        return math.ceil(self.work.prompts / replicas)

    def meshed(self, option: Option) -> MeshShape:
        """All six axes of the role's mesh."""
        place = RolePlacement(
            "role",
            "pool",
            train=option.train,
            infer=None if option.train else option.infer,
            generate=option.generate,
            zero=option.zero,
            relay=option.relay,
        )
        return place.mesh_shape

    def priced(self, option: Option) -> Option:
        """Seconds by call and bytes."""
        seconds = {call.number: self.seconds(option, call) for call in self.calls}
        resident, working = self.bytes(option)
        return replace(option, seconds=seconds, resident_bytes=resident, working_bytes=working)

    def seconds(self, option: Option, call: Call) -> float:
        if call.kind is Kind.TRAIN:
            return self.update_seconds(option)
        if call.kind is Kind.GENERATE:
            if option.generate is None:
                return 0.0  # not chosen yet
            first = next(c.number for c in self.calls if c.kind is Kind.GENERATE)
            relay_s = self.relay_seconds(option) if call.number == first else 0.0
            return self.decode_seconds(option) + relay_s
        shape = option.infer or option.train
        assert shape is not None
        return infer_s(
            self.engine,
            self.cfg,
            self.head,
            shape,
            rows=call.rows,
            tokens=self.work.row_tokens,
            zero=option.zero,
            sequence=option.sequence_parallel,
            micro=self.pass_rows(option),
        )

    def pass_rows(self, option: Option) -> int:
        """Rows of a scoring pass a replica."""
        return max(1, PASS_TOKENS // self.work.row_tokens)

    def update_seconds(self, option: Option) -> float:
        """All updates of a step."""
        known = option.seconds.get(-1)
        if known is not None:
            return known
        shape = option.train
        assert shape is not None
        one = update_s(
            self.engine,
            self.cfg,
            self.head,
            shape,
            rows=math.ceil(self.work.rows / self.work.updates),
            tokens=self.work.row_tokens,
            micro=option.micro_sequences // (shape.data * shape.fsdp),
            zero=option.zero,
            sequence=option.sequence_parallel,
            remat=option.remat,
        )
        return self.work.updates * self.work.epochs * one

    def decode_seconds(self, option: Option) -> float:
        """A generation without the relay."""
        assert option.generate is not None
        work = (self.work.n, self.work.prompt_tokens, self.work.response_tokens)
        prompts = math.ceil(self.prompts(option) / option.waves)
        return option.waves * _wave_s(self.engine, self.cfg, option.generate, prompts, *work)

    def relay_seconds(self, option: Option) -> float:
        """From training's layout to generation's."""
        if option.relay == SHARED:
            return 0.0
        return _relay_s(self.engine, self.cfg, self.meshed(option), option.relay, option.zero)

    def bytes(self, option: Option) -> tuple[float, float]:
        """Resident between calls, and the most that a call needs besides."""
        shape = self.meshed(option)
        scoring = activation_bytes(
            self.cfg,
            self.head,
            shape,
            rows=self.pass_rows(option),
            tokens=self.work.row_tokens,
            zero=option.zero,
            sequence_parallel=option.sequence_parallel,
            itemsize=self.pricer.itemsize,
            fused_attention=self.device.fused_attention,
            backward=False,
        ).total
        if not self.model.trained:
            options = {"zero": option.zero, "itemsize": self.pricer.itemsize}
            return weight_bytes(self.cfg, self.head, shape, **options), scoring
        held = self.held(option)
        keeps = self.engine.profile.holds_copies
        copies = held.weights + held.gradients
        resident = held.optimizer + (copies if keeps else 0)
        working = [self.update_bytes(option), scoring + (0 if keeps else held.weights)]
        if option.generate:
            working.append(self.generation_bytes(option))
        return resident, max(working)

    def held(self, option: Option) -> Any:
        assert option.train is not None
        return training_bytes(
            self.cfg,
            self.head,
            self.meshed(option),
            zero=option.zero,
            itemsize=self.pricer.itemsize,
        )

    def generation_bytes(self, option: Option) -> float:
        """Weights, and keys and values of a wave; its samples share a prompt's."""
        assert option.generate is not None
        prompts = math.ceil(self.prompts(option) / option.waves)
        slots = self.work.prompt_tokens + self.work.n * self.work.response_tokens
        return _generation_bytes(self.cfg, option.generate, prompts * slots, self.pricer.itemsize)

    def update_bytes(self, option: Option) -> float:
        """What an update needs beside what is resident."""
        shape, held = option.train, self.held(option)
        assert shape is not None
        replicas = shape.data * shape.fsdp
        mine = replica_rows(math.ceil(self.work.rows / self.work.updates), shape)
        micro = option.micro_sequences // replicas
        activations = activation_bytes(
            self.cfg,
            self.head,
            self.meshed(option),
            rows=micro,
            tokens=self.work.row_tokens,
            micros=math.ceil(mine / micro),
            remat=option.remat,
            zero=option.zero,
            sequence_parallel=option.sequence_parallel,
            itemsize=self.pricer.itemsize,
            fused_attention=self.device.fused_attention,
        ).total
        if self.engine.profile.holds_copies:
            return activations
        return held.weights + held.gradients + max(activations, held.reduced)


def _stages(option: Option) -> tuple[int, int]:
    shape = option.train or option.infer
    assert shape is not None
    return shape.pipe, shape.tensor


@lru_cache(maxsize=None)
def _wave_s(
    engine: Engine, cfg: ModelConfig, keep: MeshShape, prompts: int, n: int, old: int, new: int
) -> float:
    """A generation of one replica."""
    sizes = {"prompts": prompts, "n": n, "prompt_tokens": old, "response_tokens": new}
    return generate_s(engine, cfg, keep, **sizes)


@lru_cache(maxsize=None)
def _generation_bytes(cfg: ModelConfig, keep: MeshShape, slots: int, itemsize: int) -> float:
    """Of one device: weights, and keys and values of so many positions."""
    weights = generation_bytes(cfg, keep, itemsize=itemsize)
    return weights + kv_bytes(cfg, keep, rows=1, slots=slots, itemsize=itemsize)


@lru_cache(maxsize=None)
def _relay_s(engine: Engine, cfg: ModelConfig, shape: MeshShape, relay: str, zero: int) -> float:
    return relay_s(engine, cfg, shape, relay=relay, zero=zero)


def pareto(options: Sequence[Option]) -> list[Option]:
    """Options that no other one beats or equals in everything, to ALIKE; of equals the first."""

    def rough(number: float) -> int:
        return math.ceil(math.log(number) / math.log1p(ALIKE)) if number > 0 else -(10**6)

    if not options:
        return []
    numbers = sorted(options[0].seconds)
    exact = [(*(o.seconds[k] for k in numbers), o.resident_bytes, o.working_bytes) for o in options]
    order = sorted(range(len(options)), key=lambda i: (sum(exact[i][: len(numbers)]), i))
    keys = np.array([[rough(x) for x in exact[i]] for i in order])
    kept = np.zeros(0, int)
    for k in range(len(order)):
        if not (keys[kept] <= keys[k]).all(axis=1).any():
            kept = np.append(kept, k)
    return [options[order[k]] for k in kept]
