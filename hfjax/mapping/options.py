# SPDX-License-Identifier: Apache-2.0
"""The ways a role may run on some devices, priced: layouts, micro-batches, waves of generation.

Dropped are only ways that another one beats in every call's seconds and in memory.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from typing import Any

import numpy as np

from hfjax.mapping.cost import Engine, columns_s
from hfjax.mapping.devices import Cluster, Device, Profile, slowest
from hfjax.mapping.pricing import MOST_TENSOR, RoleCosts
from hfjax.mapping.work import USABLE, Call, Kind, Option, Problem
from meshes.layouts import divisors
from meshes.mesh import MeshShape

ALIKE = 0.02  # ways closer than this in seconds and bytes are one
QUICKEST = 2  # layouts of their own that scoring may have
WAVES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
REMATS = ("none", "layer")


@dataclass(frozen=True, kw_only=True)
class Pricer:
    """Prices options of a problem's roles; with `one_layout` a model scores as it trains."""

    problem: Problem
    profile: Profile
    itemsize: int = 2
    one_layout: bool = False

    def options(self, role: str, device: Device, devices: int) -> tuple[Option, ...]:
        """Every way worth a look; empty where none fits a device's memory."""
        return _options(self, role, device, devices)

    def price(self, role: str, device: Device, option: Option) -> Option:
        """The option with its seconds and bytes; layouts as a placement file writes them."""
        return self.costs(role, device).priced(option)

    def costs(self, role: str, device: Device) -> RoleCosts:
        """The role's costs under any option."""
        return RoleCosts(self.problem, role, device, self.profile, self.itemsize)

    def columns_s(
        self, cluster: Cluster, call: Call, sends: Sequence[int], receives: Sequence[int]
    ) -> float:
        """Seconds in which a call's columns reach another pool; counts of each kind of device."""
        kinds = [device for device, _ in cluster]
        used = [d for d, *counts in zip(kinds, sends, receives, strict=True) if any(counts)]
        engine = Engine(device=slowest(used), profile=self.profile, itemsize=self.itemsize)
        return columns_s(engine, call.bytes_out, sum(sends), sum(receives))

    def __hash__(self) -> int:
        return id(self)


@cache
def _options(pricer: Pricer, role: str, device: Device, devices: int) -> tuple[Option, ...]:
    return tuple(_Ways(pricer, role, device).options(devices))


class _Ways:
    """The ways of one role on devices of one kind."""

    def __init__(self, pricer: "Pricer", role: str, device: Device) -> None:
        self.one_layout, self.costs = pricer.one_layout, pricer.costs(role, device)
        self.model, self.work, self.cfg = self.costs.model, self.costs.work, self.costs.cfg
        self.calls, self.device = self.costs.calls, device
        self.limit = USABLE * device.memory_bytes
        # hfjax's sequence parallel gains nothing where the compiler keeps all-reduces whole, and
        # loses where a micro-batch is large: it is Megatron's alone here
        self.megatron = self.costs.engine.profile.megatron
        self.generates = any(call.kind is Kind.GENERATE for call in self.calls)

    def options(self, devices: int) -> list[Option]:
        """What fits a device by itself."""
        found: list[Option] = []
        own = self.quickest(devices)
        for _, bases in groupby(self.bases(devices), key=lambda o: _stages(o)):
            ways = [self.costs.priced(way) for base in bases for way in self.updates(base)]
            ways = pareto([way for way in ways if self.fits(way)])
            ways = pareto([*ways, *self.apart(ways, own)])
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
                    if self.cfg.embed % shape.fsdp and not self.megatron:  # which pads
                        continue
                    where: Any = {"train" if self.model.trained else "infer": shape, "zero": zero}
                    yield Option(**where, sequence_parallel=t > 1 and self.megatron)

    def tensors(self) -> list[int]:
        """Tensor parallel sizes, powers of two, that divide what they split."""
        sizes = (self.cfg.heads, self.cfg.mlp)
        most = min(MOST_TENSOR, self.device.node)
        return [t for t in divisors(math.gcd(*sizes), most) if t & (t - 1) == 0]

    def updates(self, option: Option) -> Iterator[Option]:
        """Micro-batches and rematerialisation of a trained role."""
        if option.train is None:
            yield option
            return
        shape, batch = option.train, self.work.rows // self.work.updates
        unit = shape.data * shape.fsdp * self.model.rows_together
        sizes = [n for n in divisors(batch) if n % unit == 0] or [0]  # 0: all, filled up
        tried: list[Option] = []
        for remat in REMATS:
            for micro in sizes:
                way = replace(option, remat=remat, micro_sequences=micro)
                size = self.costs.update_bytes(way)
                if size > self.limit:
                    break
                seconds = {-1: self.costs.update_seconds(way)}
                tried.append(replace(way, seconds=seconds, working_bytes=size))
        yield from pareto(tried)

    def apart(self, ways: Sequence[Option], own: Sequence[MeshShape]) -> list[Option]:
        """The same ways to train, scoring in a layout of its own where that takes less."""
        numbers = [call.number for call in self.calls if call.kind is Kind.INFER]
        found: list[Option] = []
        for shape in own if ways else ():
            first = replace(ways[0], infer=shape)
            calls = (call for call in self.calls if call.kind is Kind.INFER)
            took = {call.number: self.costs.seconds(first, call) for call in calls}
            took[numbers[0]] += self.costs.move_seconds(first)
            for way in ways:
                each = replace(way, infer=shape)
                if sum(took.values()) < sum(way.seconds[number] for number in numbers):
                    resident, working = self.costs.bytes(each)
                    each = replace(each, resident_bytes=resident, working_bytes=working)
                    each = replace(each, seconds=dict(way.seconds) | took)
                    found += [each] if self.fits(each) else []
        return found

    def quickest(self, devices: int) -> list[MeshShape]:
        """Layouts in which a pass takes least, one for each number of stages times tensor parts."""
        found: dict[int, tuple[float, MeshShape]] = {}
        call = next((call for call in self.calls if call.kind is Kind.INFER), None)
        if self.one_layout or not self.model.trained or call is None:
            return []
        for base in self.bases(devices):
            shape = base.train or base.infer
            assert shape is not None
            if shape.fsdp > 1:
                continue
            took = self.costs.seconds(replace(base, train=None, infer=shape), call)
            parts = shape.pipe * shape.tensor
            found[parts] = min(found.get(parts, (math.inf, shape)), (took, shape), key=_first)
        return [shape for _, shape in sorted(found.values(), key=_first)[:QUICKEST]]

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
                relays = [self.costs.relay_seconds(way) for way in placed]
                kept = [self.costs.bytes(way) for way in ways]
                weights = self.costs.generation_weights(placed[0])
                for waves in self.waves(placed[0]):
                    first = replace(placed[0], waves=waves)
                    cache = self.costs.generation_working(first)
                    if cache + min(resident for resident, _ in kept) > self.limit:
                        continue
                    own_s = self.costs.decode_seconds(first)
                    for way, relay, held in zip(placed, relays, kept, strict=True):
                        resident, working = self.with_generation(way, held, weights, cache)
                        if resident + working <= self.limit:
                            seconds = dict(way.seconds) | dict.fromkeys(numbers, own_s)
                            seconds[numbers[0]] += relay  # the others' weights are there
                            found.append(
                                replace(
                                    way,
                                    waves=waves,
                                    seconds=seconds,
                                    resident_bytes=resident,
                                    working_bytes=working,
                                )
                            )
        return pareto(found)

    def with_generation(
        self, way: Option, held: tuple[float, float], weights: float, cache: float
    ) -> tuple[float, float]:
        """Resident and working bytes of a way that generates too, of those that it has without."""
        resident, working = held
        if self.megatron:
            own = self.costs.infer_weights(way) if way.infer else 0.0
            return resident, max(working - own, cache) + max(own, weights)
        return max(resident, self.costs.held(way).optimizer + weights), max(working, cache)

    def waves(self, option: Option) -> Iterable[int]:
        """Numbers of waves that shrink the cache; one where the engine has no waves."""
        if not self.costs.engine.profile.waves:
            return (1,)
        prompts = self.costs.prompts(option)
        widths = {math.ceil(prompts / waves) for waves in WAVES}
        return sorted({math.ceil(prompts / width) for width in widths})


def _first(pair: tuple[float, MeshShape]) -> float:
    return pair[0]


def _stages(option: Option) -> tuple[int, int]:
    shape = option.train or option.infer
    assert shape is not None
    return shape.pipe, shape.tensor


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
