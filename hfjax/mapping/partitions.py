# SPDX-License-Identifier: Apache-2.0
"""What can be placed where: set partitions of roles, and allocations of devices to their sets."""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from hfjax.mapping.devices import slowest
from meshes.layouts import divisors

Cluster = Sequence[tuple[Any, int]]  # devices of a kind, and how many there are
Sets = tuple[tuple[str, ...], ...]
WHOLE = 4  # parts up to which all allocations are made at once


def set_partitions(roles: Sequence[str]) -> list[Sets]:
    """All ways to share roles between pools (Bell's numbers), those with fewer pools first."""
    found: list[list[list[str]]] = [[]]
    for role in roles:
        found = [
            [*sets[:i], [*sets[i], role], *sets[i + 1 :]] if i < len(sets) else [*sets, [role]]
            for sets in found
            for i in range(len(sets) + 1)
        ]
    return sorted((tuple(map(tuple, sets)) for sets in found), key=len)


@lru_cache(maxsize=512)
def compositions(total: int, parts: int) -> np.ndarray:
    """Ways to write `total` as so many numbers above 0, a row each, large first parts first."""
    if parts == 1:
        return np.full((min(total, 1), 1), total, np.int16)
    blocks = []
    for first in range(total - parts + 1, 0, -1):
        rest = compositions(total - first, parts - 1)
        blocks.append(np.concatenate([np.full((len(rest), 1), first, np.int16), rest], axis=1))
    return np.concatenate(blocks) if blocks else np.zeros((0, parts), np.int16)


def blocks(total: int, parts: int) -> Iterator[np.ndarray]:
    """The rows of `compositions`, in their order, in pieces that fit memory."""
    if parts <= WHOLE:
        yield compositions(total, parts)
        return
    for first in range(total - parts + 1, 0, -1):
        for rest in blocks(total - first, parts - 1):
            yield np.concatenate([np.full((len(rest), 1), first, np.int16), rest], axis=1)


def processes_of(counts: Sequence[int], cluster: Cluster) -> int:
    """SPMD processes of a pool: equal ones, as few as its machines allow; each lies in one."""
    kinds = zip(counts, cluster, strict=True)
    machines = sum(math.ceil(count / device.node) for count, (device, _) in kinds)
    devices = sum(counts)
    return next(n for n in divisors(devices) if n >= min(machines, devices))


def packs(pools: Sequence[Sequence[int]], cluster: Cluster) -> bool:
    """Whether the processes of pools find a machine each: the largest first, where one fits.

    `pools` are counts of each kind. A kind's machines are full, but for the last one.
    """
    sizes = [sum(counts) // processes_of(counts, cluster) for counts in pools]
    for kind, (device, total) in enumerate(cluster):
        room = [device.node] * (total // device.node) + [total % device.node]
        for size, counts in sorted(zip(sizes, pools, strict=True), key=lambda each: -each[0]):
            number, rest = divmod(counts[kind], size)
            if rest:
                return False
            for _ in range(number):
                at = next((i for i, left in enumerate(room) if left >= size), None)
                if at is None:
                    return False
                room[at] -= size
    return True


class Grants:
    """What a pool may be given of a cluster, by number: a count of each kind of device."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.kinds = tuple(device for device, _ in cluster)
        self.most = tuple(count for _, count in cluster)
        self.total = sum(self.most)
        shape = [count + 1 for count in self.most]
        self.counts = np.stack(np.unravel_index(np.arange(math.prod(shape)), shape), axis=-1)
        self.devices = self.counts.sum(axis=1)
        self._steps = np.array([math.prod(shape[i + 1 :]) for i in range(len(shape))])

    def __len__(self) -> int:
        return len(self.counts)

    def kinds_of(self, grant: int) -> tuple[int, ...]:
        """Which kinds of device are in it."""
        return tuple(int(kind) for kind in np.flatnonzero(self.counts[grant]))

    def device(self, grant: int) -> Any:
        """What a pool with these devices runs as: the slowest of them."""
        return slowest([self.kinds[kind] for kind in self.kinds_of(grant)])

    def allocations(self, parts: int, *, every: bool) -> Iterator[np.ndarray]:
        """Grants to so many pools, a row an allocation: `every` device is used, or at most all.

        Rows come in the order in which ties are broken: more devices to earlier pools first.
        """
        spare = 0 if every else 1
        if len(self.most) == 1:
            for rows in blocks(self.total + spare, parts + spare):
                yield rows[:, :parts]
            return
        columns = []
        for count in self.most:
            weak = np.concatenate(list(blocks(count + parts + spare, parts + spare))) - 1
            columns.append(weak[:, :parts].astype(np.int64))
        yield from self._mixed(columns)

    def _mixed(self, columns: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
        """Rows of all kinds together, without those that leave a pool nothing."""
        rest = columns[-1] * self._steps[-1]
        for kind in range(len(columns) - 2, 0, -1):
            more = columns[kind] * self._steps[kind]
            rest = (more[:, None] + rest[None]).reshape(-1, rest.shape[1])
        for first in columns[0]:
            rows = rest + first * self._steps[0]
            yield rows[(rows > 0).all(axis=1)]
