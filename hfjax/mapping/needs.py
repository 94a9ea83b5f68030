# SPDX-License-Identifier: Apache-2.0
"""How many devices would do, where a placement does not fit those that there are."""

from collections.abc import Sequence

from hfjax.mapping.partitions import Cluster, Grants, Sets
from hfjax.mapping.pools import Options, Pools
from hfjax.mapping.work import Problem


def get_min_alloc(pools: Pools, roles: tuple[str, ...], start: int = 1) -> int | None:
    """The first grant from `start`, of one kind a number of devices, that can hold the roles."""
    for grant in range(max(1, start), len(pools.grants)):
        if len(pools.quickest(roles, grant).seconds):
            return grant
    return None


class Needs:
    """Of the kind with the most memory; made as it is asked for."""

    def __init__(
        self,
        problem: Problem,
        cluster: Cluster,
        options: Options,
        pools: Pools,
        usable: float,
        further: int,
    ) -> None:
        self._cluster, self._options, self._usable = cluster, options, usable
        self._device = max((device for device, _ in cluster), key=lambda d: d.memory_bytes)
        self._limit = max(further, pools.grants.total)
        grants = Grants([(self._device, self._limit)])
        self._pools = Pools(problem, grants, options, usable=usable)
        self._found: dict[tuple[str, ...], int | None] = {}

    def fewest(self, sets: Sets) -> int | None:
        """The fewest devices on which a partition fits; None: more than were looked at."""
        each = [self._of(roles) for roles in sets]
        return None if None in each else sum(n for n in each if n)

    def _of(self, roles: tuple[str, ...]) -> int | None:
        if roles not in self._found:
            start: int | None = 1
            if len(roles) > 1:
                alone = [self._of((role,)) for role in roles]
                start = None if None in alone else max(n for n in alone if n)
            found = None if start is None else get_min_alloc(self._pools, roles, start)
            self._found[roles] = found
        return self._found[roles]

    def why(self, sets: Sets) -> str:
        """Why no allocation of the cluster to these sets fits."""
        fewest, name = self.fewest(sets), self._device.name
        if fewest is None:
            return f"does not fit {self._limit} x {name} either"
        if fewest > sum(count for _, count in self._cluster):
            return f"needs {fewest} x {name}"
        return "no allocation of all devices fits memory and machines"

    def refusal(self, partitions: Sequence[Sets]) -> str:
        """Why nothing fits, with the smallest number of devices that would do."""
        have = " + ".join(f"{count} x {device.name}" for device, count in self._cluster)
        name, room = self._device.name, self._usable * self._device.memory_bytes
        never = [role for role in self._pools.roles if self._of((role,)) is None]
        if never:
            return f"devices = {have}: " + "; ".join(self._never(role, room) for role in never)
        fits = [(n, sets) for sets in partitions if (n := self.fewest(sets)) is not None]
        alone = ", ".join(f"{role} alone {self._of((role,))}" for role in self._pools.roles)
        if not fits:
            return f"devices = {have}: no placement fits {self._limit} x {name} either ({alone})"
        fewest, sets = min(fits, key=lambda each: (each[0], len(each[1])))
        placed = ", ".join(f"{'+'.join(roles)} on {self._of(roles)}" for roles in sets)
        return (
            f"devices = {have}: no placement fits their memory, {room / 1e9:.4g} GB usable a "
            f"device; use {fewest} x {name} or more ({placed}; {alone})"
        )

    def _never(self, role: str, room: float) -> str:
        """What a role that never fits needs at the least."""
        least: float | None = None
        for n in range(1, self._limit + 1):
            for option in self._options(role, self._device, n):
                needs = option.resident_bytes + option.working_bytes
                least = needs if least is None else min(least, needs)
        where = f"up to {self._limit} x {self._device.name}"
        if least is None:
            return (
                f"{role} has no layout on {where} that its sizes allow and {room / 1e9:.4g} GB "
                "usable a device hold"
            )
        return f"{role} needs {least / 1e9:.4g} GB a device on {where}, {room / 1e9:.4g} usable"
