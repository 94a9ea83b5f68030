# SPDX-License-Identifier: Apache-2.0
"""Seconds of matrix products, copies and collectives, on all devices of this process at once.

Small things are repeated inside one program, so that a program's call does not count. Programs that
are compared take turns, and the median of their rounds counts.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hfjax.engine.meter import RECEIVED
from hfjax.engine.offload import to_device, to_host

GROUPS, GROUP = "groups", "group"  # mesh axes of collectives, all groups busy at once
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is timed; of each device."""

    products: tuple[int, ...]  # sides of square matrices, rising
    operations: float  # of a program of products, at least
    copies: tuple[int, ...]  # bytes of an array, rising
    messages: tuple[int, ...]  # bytes received in a collective, rising
    moved: float  # bytes received in a program of collectives
    repeats: int  # of small things in one program, at most
    rounds: int  # timed runs of a program, of which the median counts
    layers: tuple[int, ...] = (2, 10)  # depths of the model, rising
    tokens: int = 96  # steps of decoding


SIZES = {
    "cpu": Size(
        products=(32, 64, 128, 256, 512, 1024),
        operations=2e8,
        copies=(2**14, 2**17, 2**20, 2**23, 2**25),
        messages=(2**10, 2**15, 2**20, 2**22),
        moved=2**24,
        repeats=50,
        rounds=7,
    ),
    "gpu": Size(
        products=(256, 512, 1024, 2048, 4096, 8192),
        operations=4e12,
        copies=(2**16, 2**20, 2**24, 2**28, 2**30),
        messages=(2**10, 2**16, 2**20, 2**24, 2**28),
        moved=2**31,
        repeats=200,
        rounds=9,
        tokens=192,
    ),
    "tiny": Size(
        products=(8, 16),
        operations=1e5,
        copies=(2**10, 2**12),
        messages=(2**8, 2**12),
        moved=2**14,
        repeats=4,
        rounds=2,
        layers=(2,),
        tokens=4,
    ),
}


def medians(runs: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """Median seconds of each run; they take turns after two that compile and warm up."""
    found: list[list[float]] = [[] for _ in runs]
    for number in range(rounds + 2):
        for run, seconds in zip(runs, found, strict=True):
            begin_s = time.perf_counter()
            jax.block_until_ready(run())
            if number > 1:
                seconds.append(time.perf_counter() - begin_s)
    return [statistics.median(seconds) for seconds in found]


class Chain:
    """A program whose result is its next argument, donated: no buffer is new."""

    def __init__(self, program: Callable[[Any], Any], state: Any) -> None:
        self._program, self._state = program, state

    def __call__(self) -> Any:
        self._state = self._program(self._state)
        return self._state


class Probe:
    """Products, copies and collectives on all devices."""

    def __init__(self, devices: Sequence[jax.Device], dtype: Any, size: Size) -> None:
        self.devices, self.dtype, self.size = devices, jnp.dtype(dtype), size

    def mesh(self, group: int = 1) -> Mesh:
        return Mesh(np.asarray(self.devices).reshape(-1, group), (GROUPS, GROUP))

    def array(self, mesh: Mesh, shape: tuple[int, ...], scale: float = 1.0) -> jax.Array:
        """Random numbers, an array of this shape on each device."""
        placed = NamedSharding(mesh, PartitionSpec((GROUPS, GROUP)))
        whole = (len(self.devices) * shape[0], *shape[1:])
        part = np.random.default_rng(0).normal(size=shape, scale=scale).astype(self.dtype)
        return jax.make_array_from_callback(whole, placed, partial(_same, part))

    def repeated(self, body: Callable[..., Any], times: int, mesh: Mesh, **options: Any) -> Any:
        """body(x, *others) `times` times on every device, each after the other."""
        spec = PartitionSpec((GROUPS, GROUP))

        def local(x: jax.Array, *others: jax.Array) -> jax.Array:
            def step(_: jax.Array, x: jax.Array) -> jax.Array:
                return body(x, *others)

            return lax.fori_loop(0, times, step, x)

        mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return jax.jit(mapped, **options)

    def call(self) -> Row:
        """Seconds of a program that does nothing."""
        mesh = self.mesh()
        nothing = self.repeated(jnp.negative, 1, mesh, donate_argnums=0)
        run = Chain(nothing, self.array(mesh, (1,)))
        return {"call_s": medians([run], 5 * self.size.rounds)[0]}

    def products(self) -> list[Row]:
        """Seconds of a product of each side."""
        mesh, runs, times = self.mesh(), [], []
        for side in self.size.products:
            times.append(min(4000, max(2, round(self.size.operations / (2 * side**3)))))
            x, w = (self.array(mesh, (side, side), scale) for scale in (1.0, side**-0.5))
            runs.append(partial(self.repeated(jnp.matmul, times[-1], mesh), x, w))
        found = medians(runs, self.size.rounds)
        return [
            {"operations": 2 * side**3, "seconds": seconds / n}
            for side, n, seconds in zip(self.size.products, times, found, strict=True)
        ]

    def copies(self) -> list[Row]:
        """Seconds in which an array of each size is read and written where it lies."""
        mesh, runs, times = self.mesh(), [], []
        for size in self.size.copies:
            times.append(max(1, min(self.size.repeats, self.size.copies[-1] // size)))
            program = self.repeated(jnp.negative, times[-1], mesh, donate_argnums=0)
            runs.append(Chain(program, self.array(mesh, (size // self.dtype.itemsize,))))
        found = medians(runs, self.size.rounds)
        return [
            {"bytes": 2 * size, "seconds": seconds / n}
            for size, n, seconds in zip(self.size.copies, times, found, strict=True)
        ]

    def fresh(self) -> Row:
        """Seconds in which the largest array is read, and written into memory that is new."""
        mesh, size = self.mesh(), self.size.copies[-1]
        run = partial(self.repeated(jnp.negative, 1, mesh), self.array(mesh, (size // 4,)))
        return {"bytes": 2 * (size // 4) * self.dtype.itemsize, "seconds": self.one(run)}

    def host(self) -> Row:
        """Seconds of the largest array to host memory and back."""
        mesh, size = self.mesh(), self.size.copies[-1]
        run = Chain(_there_and_back, self.array(mesh, (size // self.dtype.itemsize,)))
        return {"bytes": 2 * size, "seconds": self.one(run)}

    def one(self, run: Callable[[], Any]) -> float:
        """Of few rounds: new memory is slow."""
        return medians([run], min(3, self.size.rounds))[0]

    def collectives(self, kind: str, group: int) -> list[Row]:
        """Seconds of a collective in every group of this size, for each size of a message."""
        mesh, runs, rows, times = self.mesh(group), [], [], []
        for message in self.size.messages:
            length = self._length(kind, group, message)
            result = length if kind in ("all-reduce", "collective-permute") else length * group
            result = length // group if kind == "reduce-scatter" else result
            received = RECEIVED[kind](result * self.dtype.itemsize, group)
            times.append(int(max(2, min(self.size.repeats, self.size.moved // received))))
            body = partial(BODIES[kind], group)
            program = self.repeated(body, times[-1], mesh, donate_argnums=0)
            runs.append(Chain(program, self.array(mesh, (length,))))
            rows.append({"kind": kind, "group": group, "bytes": received})
        found = medians(runs, self.size.rounds)
        return [
            row | {"seconds": seconds / n}
            for row, seconds, n in zip(rows, found, times, strict=True)
        ]

    def _length(self, kind: str, group: int, message: int) -> int:
        """Numbers of what a device gives, a multiple of the group, so that it receives so much."""
        factor = RECEIVED[kind](group, group)
        if kind == "all-gather":
            factor *= group
        if kind == "reduce-scatter":
            factor /= group
        wanted = message / self.dtype.itemsize / factor * group
        return max(1, round(wanted / group)) * group


def _same(part: np.ndarray, _: Any) -> np.ndarray:
    return part


def _there_and_back(x: jax.Array) -> jax.Array:
    return to_device(to_host(x))


def _gather(group: int, x: jax.Array) -> jax.Array:
    """The neighbour's part: that of its own would need no collective."""
    whole = lax.all_gather(x, GROUP, tiled=True)
    at = (lax.axis_index(GROUP) + 1) % group
    return lax.dynamic_slice_in_dim(whole, at * len(x), len(x))


def _reduce(group: int, x: jax.Array) -> jax.Array:
    return lax.psum(x, GROUP) * jnp.asarray(1 / group, x.dtype)


def _scatter(group: int, x: jax.Array) -> jax.Array:
    part = lax.psum_scatter(x, GROUP, tiled=True) * jnp.asarray(1 / group, x.dtype)
    return lax.dynamic_update_slice_in_dim(x, part, 0, axis=0)


def _permute(group: int, x: jax.Array) -> jax.Array:
    return lax.ppermute(x, GROUP, [(i, (i + 1) % group) for i in range(group)])


BODIES: dict[str, Callable[..., jax.Array]] = {
    "all-gather": _gather,
    "all-reduce": _reduce,
    "reduce-scatter": _scatter,
    "collective-permute": _permute,
}
