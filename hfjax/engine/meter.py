# SPDX-License-Identifier: Apache-2.0
"""Counts, in compiled programs, the bytes each collective moves, and the memory arrays hold."""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from hfjax.engine.hlo import Instruction, Module, groups, results
from hfjax.engine.offload import DEVICE

# bytes a device receives in a ring of n, from the b bytes of its result; it sends as many
RECEIVED: dict[str, Callable[[int, int], float]] = {
    "all-gather": lambda b, n: b * (n - 1) / n,
    "reduce-scatter": lambda b, n: b * (n - 1),
    "all-reduce": lambda b, n: 2 * b * (n - 1) / n,
    "all-to-all": lambda b, n: b * (n - 1) / n,
    "collective-permute": lambda b, n: b * (n > 1),
}
# what XLA's CPU compiler carries in a wider type (jax 0.10.2), as HLO and StableHLO write it
WIDENED = {"f32": ("bfloat16", r"(?:\b|x)bf16[\[>]"), "f16": ("float8", r"(?:\b|x)f8\w+[\[>]")}

Trips = int | Mapping[str, int] | None


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective instruction, on one path to it from the program's entry."""

    name: str  # of the instruction in the compiled text
    kind: str
    element_types: tuple[str, ...]  # HLO's names: f32, bf16
    result_bytes: int  # a device and execution, all results added
    group_size: int  # 2 for a permute, 1 for one in which nothing moves
    groups: int  # pairs of a permute that differ
    axes: tuple[str, ...]  # of the mesh, 'fsdp[2 of 4]' is a part of one; '?' without a mesh
    trips: int  # executions a run of the program
    conditional: bool  # in a branch that a run may not take

    @property
    def bytes_received(self) -> float:
        """Bytes a device receives an execution, by ring algorithms; of a permute, a target."""
        return RECEIVED[self.kind](self.result_bytes, self.group_size)

    @property
    def bytes_sent(self) -> float:
        """Bytes a device sends an execution: rings pass on as much as they receive."""
        return self.bytes_received


@dataclass(frozen=True)
class Traffic:
    """The collectives of a program; bytes are those of one device and one run."""

    collectives: tuple[Collective, ...]

    @property
    def bytes_received(self) -> float:
        return sum(one.trips * one.bytes_received for one in self.collectives)

    @property
    def bytes_sent(self) -> float:
        return sum(one.trips * one.bytes_sent for one in self.collectives)

    @property
    def is_bound(self) -> bool:
        """Some collectives stand in branches: all are counted, a run moves at most this."""
        return any(one.conditional for one in self.collectives)

    def by_kind(self) -> dict[str, float]:
        """Bytes received, by kind of collective."""
        return self._sums(lambda one: one.kind)

    def by_axes(self) -> dict[tuple[str, ...], float]:
        """Bytes received, by the mesh axes a collective runs over."""
        return self._sums(lambda one: one.axes)

    def element_types(self) -> tuple[str, ...]:
        """What is carried, in HLO's names."""
        return tuple(sorted({t for one in self.collectives for t in one.element_types}))

    def __str__(self) -> str:
        """A table, equal rows added: times, and bytes received in all of them; ? in branches."""
        if not self.collectives:
            return "no collectives"
        times: Counter[tuple[str, ...]] = Counter()
        for one in self.collectives:
            times[_row(one)] += one.trips
        received = self._sums(_row)
        rows = [("collective", "over", "type", "result_bytes", "times", "received")]
        rows += [(*row, f"{times[row]:,}", f"{received[row]:,.0f}") for row in times]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
        most = "at most " if self.is_bound else ""
        lines.append(f"a device receives {most}{self.bytes_received:,.0f} bytes")
        return "\n".join(line.rstrip() for line in lines)

    def _sums(self, key: Callable[[Collective], Any]) -> dict[Any, float]:
        sums: dict[Any, float] = {}
        for one in self.collectives:
            sums[key(one)] = sums.get(key(one), 0) + one.trips * one.bytes_received
        return sums


def meter(program: Any, *args: Any, mesh: Mesh | None = None, trips: Trips = None) -> Traffic:
    """What a compiled program, or a jitted function of `args` (shapes will do), moves.

    `trips` says how often loops run whose end depends on data: one number for all of them, or
    numbers by a loop's op_name, which the refusal prints, or by its instruction's name. Loops
    of a known length need none.

    Counted is what this backend's compiler made. On CPU it keeps gradients of sharded batches
    as all-reduces where a GPU may reduce-scatter, and carries bfloat16 as float32: a program
    that may have been widened is refused; count it with float16 in place of bfloat16.
    """
    source = ""
    if isinstance(program, jax.stages.Compiled):
        compiled = program
    else:
        lowered = program.lower(*args)
        source, compiled = lowered.as_text(), lowered.compile()
    executable: Any = compiled.runtime_executable()
    devices = executable.local_devices()  # in the program's order
    if mesh is not None and list(mesh.local_devices) != devices:
        raise ValueError(
            f"the mesh holds devices {[d.id for d in mesh.local_devices]}, the program runs on "
            f"{[d.id for d in devices]}: give the mesh it was compiled for, in the same order"
        )
    text = str(compiled.as_text())
    traffic = count(text, mesh, trips)
    if devices[0].platform == "cpu":
        _refuse_widened(traffic, text + source)
    return traffic


def count(text: str, mesh: Mesh | None = None, trips: Trips = None) -> Traffic:
    """`meter` of the text of an optimized HLO module, which is trusted in its types."""
    module = Module(text)
    if mesh is not None and mesh.size != module.partitions:
        raise ValueError(f"a program for {module.partitions} devices, a mesh of {mesh.size}")
    found = []
    for instruction, times, conditional in _Walk(module, trips).found:
        rows = groups(instruction, module.partitions)
        types, result_bytes = results(instruction)
        found.append(
            Collective(
                name=instruction.name,
                kind=instruction.kind,
                element_types=types,
                result_bytes=result_bytes,
                group_size=rows.shape[1] if len(rows) else 1,
                groups=len(rows),
                axes=("?",) if mesh is None else _mesh_axes(instruction, rows, mesh),
                trips=times,
                conditional=conditional,
            )
        )
    return Traffic(tuple(found))


def held_bytes(tree: Any, memory_kind: str = DEVICE) -> dict[jax.Device, int]:
    """Bytes of the tree's buffers on each device of this process, shared buffers once.

    Deleted arrays and those of NumPy hold none; `memory_kind` HOST counts what is offloaded.
    """
    sizes: dict[tuple[jax.Device, int], int] = {}
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and not leaf.is_deleted():
            there = leaf.sharding.memory_kind == memory_kind
            sizes |= _buffers(leaf) if there else {}
    held: dict[jax.Device, int] = {}
    for (device, _), size in sizes.items():
        held[device] = held.get(device, 0) + size
    return held


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device while a program runs, as its compiler planned them."""

    argument_bytes: int
    output_bytes: int
    alias_bytes: int  # outputs that lie in donated arguments
    temp_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes


def memory(compiled: jax.stages.Compiled) -> Memory:
    """What a compiled program needs on a device; on CPU, temporaries hold bfloat16 widened."""
    stats: Any = compiled.memory_analysis()
    return Memory(
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        temp_bytes=stats.temp_size_in_bytes,
    )


class _Walk:
    """Every collective, its executions a run, and whether branches decide about them."""

    def __init__(self, module: Module, trips: Trips) -> None:
        self.found: list[tuple[Instruction, int, bool]] = []
        self._module = module
        self._trips = trips
        self._reached: set[str] = set()
        self._loops: dict[str, str] = {}  # those of unknown length: name to op_name
        self._missing: dict[str, None] = {}  # op_names of those that hold collectives
        self._enter(module.entry, 1, conditional=False)
        self._check_trips()
        for name in module.computations.keys() - self._reached:
            for instruction in module.computations[name]:
                if instruction.kind:
                    raise instruction.refusal(f"nothing calls computation {name}")

    def _enter(self, name: str, times: int, *, conditional: bool) -> None:
        self._reached.add(name)
        for instruction in self._module.computations[name]:
            if instruction.kind:
                self.found.append((instruction, times, conditional))
                continue
            before = len(self.found)
            trips = self._trips_of(instruction)
            branch = conditional or instruction.op == "conditional"
            for attribute, callee in self._module.called(instruction):
                # a loop's condition is asked once more than it says yes
                runs = (trips or 0) + (attribute == "condition")
                self._enter(callee, times * runs, conditional=branch)
            if trips is None and len(self.found) > before:
                self._missing[instruction.op_name] = None

    def _trips_of(self, instruction: Instruction) -> int | None:
        if instruction.op != "while":
            return 1
        if instruction.known_trips is not None:
            return instruction.known_trips
        self._loops[instruction.name] = instruction.op_name
        if isinstance(self._trips, Mapping):
            return self._trips.get(instruction.name, self._trips.get(instruction.op_name))
        return self._trips

    def _check_trips(self) -> None:
        given = self._trips if isinstance(self._trips, Mapping) else {"every loop": self._trips}
        for name, trips in given.items():
            if trips is not None and (type(trips) is not int or trips < 0):
                raise ValueError(f"trips of {name} = {trips!r}: must be a whole number, 0 or more")
        names = {*self._loops, *self._loops.values()}
        if isinstance(self._trips, Mapping) and (strange := given.keys() - names):
            raise ValueError(
                f"trips names {sorted(strange)}; the loops of unknown length are {sorted(names)}"
            )
        if self._missing:
            wanted = ", ".join(f"{name!r}: N" for name in self._missing)
            raise ValueError(
                "these loops hold collectives and end when data say so; give the times they run, "
                f"trips={{{wanted}}}, or trips=N for all of them"
            )


def _row(one: Collective) -> tuple[str, ...]:
    over = f"{'*'.join(one.axes)}={one.group_size}"
    types = "+".join(one.element_types)
    return (one.kind + "?" * one.conditional, over, types, f"{one.result_bytes:,}")


def _mesh_axes(instruction: Instruction, rows: np.ndarray, mesh: Mesh) -> tuple[str, ...]:
    """Axes along which the places of a group differ; places count the mesh row-major.

    The partitioner likes to split an axis: then its name says how much of it a group holds.
    """
    places = np.stack(np.unravel_index(rows, mesh.devices.shape), axis=-1)
    distinct = 1 + (np.diff(np.sort(places, axis=1), axis=1) > 0).sum(axis=1)  # a group and axis
    counts = distinct.max(axis=0, initial=1).tolist()
    named = zip(mesh.shape.items(), counts, strict=True)
    if instruction.kind == "collective-permute":
        return tuple(axis for (axis, _), count in named if count > 1)
    if np.prod(counts) != rows.shape[1]:  # places differ, so each group is a whole grid
        sizes = ", ".join(f"{axis}={n}" for axis, n in mesh.shape.items())
        raise instruction.refusal(f"its groups are no product of axes {sizes}")
    parts = ((axis, n, count) for (axis, n), count in named if count > 1)
    return tuple(axis if n == count else f"{axis}[{count} of {n}]" for axis, n, count in parts)


def _refuse_widened(traffic: Traffic, text: str) -> None:
    for wide, (narrow, pattern) in WIDENED.items():
        if wide in traffic.element_types() and re.search(pattern, text):
            raise ValueError(
                f"the program has {narrow} in it, which the CPU compiler moves as {wide}, and "
                f"some collectives carry {wide}: their bytes cannot be trusted; compile it with "
                "a type of the same size that is not widened (float16 in its place, int8 for "
                "float8), or for a GPU"
            )


def _buffers(array: jax.Array) -> dict[tuple[jax.Device, int], int]:
    """Bytes by device and address.

    Shards are asked of an alias with a sharding spelled differently, which device_put makes
    without a copy: an array keeps its shards once asked, and jax.live_arrays() would list them.
    """
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    sharding = array.sharding
    if isinstance(sharding, SingleDeviceSharding):
        grid, names, spec = np.array(list(sharding.device_set)), (), PartitionSpec()
    elif isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        grid, names, spec = sharding.mesh.devices[None], sharding.mesh.axis_names, sharding.spec
    else:
        raise ValueError(f"held_bytes knows named and single-device shardings, not {sharding}")
    mesh = Mesh(grid, ("alias", *names))
    alias = jax.device_put(array, NamedSharding(mesh, spec, memory_kind=sharding.memory_kind))
    shards = [shard.data for shard in alias.addressable_shards]
    return {(d, s.unsafe_buffer_pointer()): s.nbytes for s in shards for d in s.devices()}
