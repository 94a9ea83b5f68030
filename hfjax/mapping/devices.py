# SPDX-License-Identifier: Apache-2.0
"""Accelerators and engine profiles, read from TOML; what a pool of devices is capable of."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from meshes.layouts import either
from meshes.toml import checked_table, did_you_mean, spelled, toml_file

MOST_DEVICES = 4096  # of a kind
DEVICES = Path(__file__).with_name("devices.toml")
Curve = tuple[tuple[float, float], ...]  # (size, share of the peak), sizes rising


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What an engine adds to the device's own time."""

    name: str
    step_s: float  # a pass of one stage: of a token, of a micro-batch
    layer_s: float  # launches of a layer: it takes no less
    collective_s: float  # a hop of a ring
    megatron: bool = False  # pipelines and memory as Megatron has them
    fused_attention: bool = False  # scores never reach memory
    kv_cache: bool = True  # without one a token takes a pass over all before it
    waves: bool = False  # rows that the KV cache has no room for wait for their turn


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, or one simulated device of a host; units as in devices.toml."""

    name: str
    flops: float
    memory_bytes: float
    memory_bytes_s: float
    node: int
    link_bytes_s: float
    link_latency_s: float
    network_bytes_s: float
    network_latency_s: float
    host_bytes_s: float
    fresh_bytes_s: float | None = None  # into memory that is new; None: as into any other
    shares: int = 1  # devices that share a host's cores: measured with all of them busy
    link_share: float = 1.0
    network_share: float = 1.0
    matmul: Curve = ((1.0, 1.0),)
    copy: Curve = ((1.0, 1.0),)
    collective: Mapping[int, tuple[float, float]] | None = None  # size: (latency_s, bytes_s)
    profile: Profile | None = None  # measured here

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) in (int, float) and not 0 < value < math.inf:
                raise ValueError(f"device {self.name}: {field.name} = {value!r}: must be above 0")

    def __hash__(self) -> int:
        return hash((self.name, self.flops, self.memory_bytes, self.memory_bytes_s))

    def product_s(self, operations: float) -> float:
        """Seconds of one matrix product of so many operations."""
        return operations / (self.flops * on_curve(self.matmul, operations))

    def fresh_s(self, size: float) -> float:
        """Seconds in which the system hands out so many bytes of new memory."""
        return size / self.fresh_bytes_s if self.fresh_bytes_s else 0.0

    def copy_s(self, size: float) -> float:
        """Seconds in which so many bytes of device memory are read or written."""
        return size / (self.memory_bytes_s * on_curve(self.copy, size))


Cluster = tuple[tuple[Device, int], ...]


def on_curve(curve: Curve, size: float) -> float:
    """A curve's value, log-log between its points and flat outside."""
    if size <= curve[0][0]:
        return curve[0][1]
    for (low, a), (high, b) in itertools.pairwise(curve):
        if size < high:
            part = math.log(size / low) / math.log(high / low)
            return a * (b / a) ** part
    return curve[-1][1]


def slowest(devices: Sequence[Device]) -> Device:
    """What a pool of several kinds runs as: the least of each rate and memory, the most latency."""
    first, *rest = sorted(dict.fromkeys(devices), key=lambda d: d.name)
    if not rest:
        return first
    kinds = [first, *rest]
    least = ("flops", "memory_bytes", "memory_bytes_s", "node", "link_bytes_s", "network_bytes_s")
    least = (*least, "host_bytes_s", "link_share", "network_share")
    most = ("link_latency_s", "network_latency_s", "shares")
    values: dict[str, Any] = {name: min(getattr(d, name) for d in kinds) for name in least}
    values |= {name: max(getattr(d, name) for d in kinds) for name in most}
    for name, rate in (("matmul", "flops"), ("copy", "memory_bytes_s")):  # of the slower kind
        values[name] = getattr(min(kinds, key=lambda d, rate=rate: getattr(d, rate)), name)
    fresh = [d.fresh_bytes_s for d in kinds if d.fresh_bytes_s]
    values |= {"fresh_bytes_s": min(fresh, default=None), "collective": None, "profile": None}
    return replace(first, name="+".join(d.name for d in kinds), **values)


def parse_devices(text: str, *files: str | Path) -> Cluster:
    """`8xa100-80g+8xh100` as devices and counts, machines of one kind together."""
    known = load_devices(*files)
    found: dict[str, int] = {}
    for part in text.split("+"):
        count, x, name = part.strip().partition("x")
        if not x or not (count.isascii() and count.isdecimal()) or int(count) < 1:
            raise ValueError(
                f"devices={text}: {part!r} is no COUNTxDEVICE; write 16xa100-80g, or "
                "8xa100-80g+8xh100"
            )
        if name not in known:
            near = did_you_mean(name, known)
            legal = either(known)
            raise ValueError(f"devices={text}: device {name!r} is unknown{near}; use {legal}")
        found[name] = found.get(name, 0) + int(count)
        if found[name] > MOST_DEVICES:
            raise ValueError(f"devices={text}: plans are made for up to {MOST_DEVICES} of a kind")
    return tuple((known[name], count) for name, count in found.items())


def load_devices(*files: str | Path) -> dict[str, Device]:
    """Devices by name: those that come with hfjax, then those of the files."""
    tables: dict[str, Any] = {}
    for file in (DEVICES, *files):
        found = _read(file).get("device", {})
        tables |= checked_table(f"{file}: device", found, None)
    return {name: _device(name, tables) for name in tables}


def load_profile(name: str) -> Profile:
    """An engine profile by name."""
    tables = _read(DEVICES)["profile"]
    if name not in tables:
        near = did_you_mean(name, tables)
        raise ValueError(f"profile={name}: unknown{near}; use {either(tables)}")
    return Profile(name=name, **tables[name])


def _device(name: str, tables: Mapping[str, Any]) -> Device:
    where = f"device.{name}"
    table = checked_table(where, tables[name], None)
    seen = [name]
    while like := table.pop("like", ""):
        if like not in tables or like in seen:
            legal = either(each for each in tables if each not in seen)
            raise ValueError(f"[{where}] like = {spelled(like)}: is no other device; use {legal}")
        seen.append(like)
        table = checked_table(f"device.{like}", tables[like], None) | table
    own = [field for field in fields(Device) if field.name != "name"]
    required = [field.name for field in own if field.default is MISSING]
    table = checked_table(where, table, [field.name for field in own], required=required)
    for key, value in table.items():
        if key in ("matmul", "copy"):
            table[key] = tuple(_numbers(where, key, pair, 2) for pair in _list(where, key, value))
        elif key == "collective":
            pairs = checked_table(f"{where}.{key}", value, None).items()
            table[key] = {int(n): _numbers(where, f"{key}.{n}", pair, 2) for n, pair in pairs}
        elif key == "profile":
            keys = tuple(field.name for field in fields(Profile) if field.name != "name")
            costs = checked_table(f"{where}.{key}", value, keys, required=keys[:3])
            table[key] = Profile(name=name, **costs)
        else:
            (table[key],) = _numbers(where, key, [value], 1)
    for key in ("node", "shares"):
        if table.get(key, 1) % 1:
            raise ValueError(f"[{where}] {key} = {table[key]}: must be a whole number")
        table[key] = int(table.get(key, 1))
    return Device(name=name, **table)


def _list(where: str, key: str, value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"[{where}] {key} = {spelled(value)}: must be a list of [size, share]")
    return value


def _numbers(where: str, key: str, value: Any, count: int) -> tuple[float, ...]:
    """So many numbers."""
    if not isinstance(value, list) or len(value) != count:
        raise ValueError(f"[{where}] {key} = {spelled(value)}: must be {count} numbers in a list")
    if any(type(number) not in (int, float) for number in value):
        shown = spelled(value[0] if count == 1 else value)
        raise ValueError(f"[{where}] {key} = {shown}: must be a number")
    return tuple(value)


@cache
def _read(file: str | Path) -> dict[str, Any]:
    try:
        return toml_file(file)
    except ValueError as error:
        raise ValueError(f"devices file {error}") from error
