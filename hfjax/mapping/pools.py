# SPDX-License-Identifier: Apache-2.0
"""What roles cost together in one pool, for every number of devices it may be given.

Options of a role, and combinations of them in a pool, of which another is nowhere worse are left
out: seconds an iteration never fall where a call takes longer, so no best plan is lost.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hfjax.mapping.partitions import Grants
from hfjax.mapping.work import Option, Problem

Options = Callable[[str, Any, int], Sequence[Option]]  # of a role on n devices
Merge = tuple[int, ...]  # of a role's calls: the column of its pool into which each goes
BLOCK = 128  # rows compared with one another at once
GRAIN = 2.0**34  # parts of a second: sums and maxima of whole numbers of them are exact


@dataclass(frozen=True)
class Menu:
    """A role's options on some devices that no other option makes useless; a row each."""

    options: tuple[Option, ...]
    seconds: np.ndarray  # by the role's calls
    memory: np.ndarray  # bytes a device: resident, working

    @cached_property
    def total(self) -> np.ndarray:
        return self.seconds.sum(axis=1)


@dataclass(frozen=True)
class Combined:
    """Options together in a pool, a row each: a number a role, in the roles' order."""

    seconds: np.ndarray  # by column: calls that run as one are added
    memory: np.ndarray
    choice: np.ndarray


NOTHING = Combined(np.zeros((1, 1)), np.zeros((1, 2)), np.zeros((1, 0), int))


class Pools:
    """Menus of roles and combinations of sets of roles, each made once."""

    def __init__(
        self,
        problem: Problem,
        grants: Grants,
        options: Options,
        *,
        usable: float,
        one_layout: bool = False,
        alone: bool = False,
    ) -> None:
        """`one_layout`: a model scores as it trains. `alone`: seconds as if it had all cores."""
        self.grants, self._options = grants, options
        self.calls = {role: problem.of(role) for role in problem.models}
        self.roles = tuple(self.calls)
        self._one_layout, self._alone = one_layout, alone
        self.room = np.zeros(len(grants))
        for grant in range(1, len(grants)):
            self.room[grant] = usable * grants.device(grant).memory_bytes
        self._menus: dict[tuple[str, tuple[int, ...], int], Menu] = {}
        self._sums: dict[tuple[tuple[str, ...], int], Combined] = {}
        self._quickest: dict[tuple[tuple[str, ...], int], Combined] = {}
        self._combined: dict[tuple[tuple[str, ...], int, tuple[Merge, ...]], Combined] = {}
        self._fastest: dict[tuple[str, Merge, int], np.ndarray] = {}
        self.stages: dict[tuple[str, ...], np.ndarray] = {}  # for the paper's objective
        self._least: dict[tuple[str, ...], np.ndarray] = {}

    def auto_parallel(self, role: str, grant: int) -> Menu:
        """HybridFlow's algorithm 2, but all options that may be of use, not the cheapest alone."""
        kinds, n = self.grants.kinds_of(grant), int(self.grants.devices[grant])
        key = (role, kinds, n)
        if key not in self._menus:
            device = self.grants.device(grant)
            found = self._options(role, device, n)
            if self._one_layout:
                found = [o for o in found if o.train is None or o.infer is None]
            scale = n / device.shares if self._alone else 1.0
            self._menus[key] = self._menu(role, found, scale, self.room[grant])
        return self._menus[key]

    def _menu(self, role: str, found: Sequence[Option], scale: float, room: float) -> Menu:
        numbers = [call.number for call in self.calls[role]]
        rows = [[option.seconds[number] for number in numbers] for option in found]
        seconds = np.array(rows, float).reshape(len(found), len(numbers)) * scale
        seconds = np.round(seconds * GRAIN) / GRAIN
        memory = np.array([(o.resident_bytes, o.working_bytes) for o in found], float)
        memory = memory.reshape(len(found), 2)
        fits = np.flatnonzero(memory.sum(axis=1) <= room)
        kept = fits[undominated(np.concatenate([seconds, memory], axis=1)[fits])]
        return Menu(tuple(found[i] for i in kept), seconds[kept], memory[kept])

    def fastest(self, role: str, merge: Merge, width: int) -> np.ndarray:
        """By grant, the least seconds of a role in each column of its pool: (grants, width)."""
        key = (role, merge, width)
        if key not in self._fastest:
            found = np.full((len(self.grants), width), np.inf)
            for grant in range(1, len(self.grants)):
                menu = self.auto_parallel(role, grant)
                if menu.options:
                    found[grant] = merged(menu.seconds, merge, width).min(axis=0)
            self._fastest[key] = found
        return self._fastest[key]

    def least(self, roles: tuple[str, ...]) -> np.ndarray:
        """By grant, the least sum of all calls' seconds that fits; inf where nothing does."""
        if roles not in self._least:
            found = np.full(len(self.grants), np.inf)
            for grant in range(1, len(self.grants)):
                quickest = self.quickest(roles, grant).seconds
                found[grant] = quickest[0, 0] if len(quickest) else np.inf
            self._least[roles] = found
        return self._least[roles]

    def quickest(self, roles: tuple[str, ...], grant: int) -> Combined:
        """The combination of the least sum of seconds that fits, if any does."""
        key = (roles, grant)
        if key not in self._quickest:
            found = self._unhindered(roles, grant)
            if found is None:
                *rest, last = roles
                found = _product(self._summed(tuple(rest), grant), self._summed((last,), grant))
                found = _rows(found, np.flatnonzero(found.memory.sum(axis=1) <= self.room[grant]))
                found = _rows(found, np.argsort(found.seconds[:, 0], kind="stable")[:1])
            self._quickest[key] = found
        return self._quickest[key]

    def _summed(self, roles: tuple[str, ...], grant: int) -> Combined:
        """Combinations by the sum of their seconds, and memory."""
        if not roles:
            return NOTHING
        key = (roles, grant)
        if key not in self._sums:
            if len(roles) == 1:
                menu = self.auto_parallel(roles[0], grant)
                numbers = np.arange(len(menu.options))[:, None]
                found = Combined(menu.total[:, None], menu.memory, numbers)
            else:
                found = _product(self._summed(roles[:-1], grant), self._summed(roles[-1:], grant))
            self._sums[key] = _kept(found, self.room[grant])
        return self._sums[key]

    def _unhindered(self, roles: tuple[str, ...], grant: int) -> Combined | None:
        """Each role's option of the least sum, where these fit together."""
        menus = [self.auto_parallel(role, grant) for role in roles]
        if not all(menu.options for menu in menus):
            return None
        best = [int(np.argmin(menu.total)) for menu in menus]
        memory = np.array([menu.memory[i] for menu, i in zip(menus, best, strict=True)])
        together = np.array([memory[:, 0].sum(), memory[:, 1].max()])
        if together.sum() > self.room[grant]:
            return None
        total = sum(float(menu.total[i]) for menu, i in zip(menus, best, strict=True))
        return Combined(np.array([[total]]), together[None], np.array([best]))

    def choice(self, roles: tuple[str, ...], grant: int) -> tuple[Option, ...]:
        """Its options, one a role."""
        return self.chosen(roles, grant, self.quickest(roles, grant).choice[0])

    def chosen(self, roles: tuple[str, ...], grant: int, row: np.ndarray) -> tuple[Option, ...]:
        return tuple(
            self.auto_parallel(role, grant).options[int(i)]
            for role, i in zip(roles, row, strict=True)
        )

    def combined(
        self, roles: tuple[str, ...], grant: int, merges: tuple[Merge, ...], width: int
    ) -> Combined:
        """All combinations that fit and that no other makes useless, with seconds by column."""
        key = (roles, grant, merges)
        if key not in self._combined:
            menus = [self.auto_parallel(role, grant) for role in roles]
            found = self._combine(menus, merges, width, grant)
            self._combined[key] = _rows(found, undominated(found.seconds))
        return self._combined[key]

    def _combine(
        self, menus: Sequence[Menu], merges: Sequence[Merge], width: int, grant: int
    ) -> Combined:
        room = self.room[grant]
        found = Combined(np.zeros((1, width)), np.zeros((1, 2)), np.zeros((1, 0), int))
        for i, (menu, merge) in enumerate(zip(menus, merges, strict=True)):
            memory = _eased(menu.memory, [m.memory for j, m in enumerate(menus) if j != i], room)
            numbers = np.arange(len(menu.options))[:, None]
            own = _kept(Combined(merged(menu.seconds, merge, width), memory, numbers), room)
            found = _kept(_product(found, own), room) if i else own
        return found


def merged(seconds: np.ndarray, merge: Merge, width: int) -> np.ndarray:
    """Seconds of calls added into columns."""
    found = np.zeros((len(seconds), width))
    for call, column in enumerate(merge):
        found[:, column] += seconds[:, call]
    return found


def undominated(rows: np.ndarray) -> np.ndarray:
    """Rows, by number in order, of which no other is as small in every column; first of equals."""
    sorted_by = np.lexsort(rows.T[::-1])  # whatever dominates a row comes before it
    kept = np.zeros((0, rows.shape[1]))
    found = []
    for begin in range(0, len(rows), BLOCK):
        numbers = sorted_by[begin : begin + BLOCK]
        numbers = numbers[~_no_larger(kept, rows[numbers]).any(axis=0)]
        block = rows[numbers]
        numbers = numbers[~np.triu(_no_larger(block, block), 1).any(axis=0)]
        found.append(numbers)
        kept = np.concatenate([kept, rows[numbers]])
    return np.sort(np.concatenate([np.zeros(0, int), *found]))


def _no_larger(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Whether each row of `a` is no larger than each of `b` in any column."""
    found = np.ones((len(a), len(b)), bool)
    for column in range(a.shape[1]):
        found &= a[:, column, None] <= b[None, :, column]
    return found


def _eased(memory: np.ndarray, others: Sequence[np.ndarray], room: float) -> np.ndarray:
    """Memory of options as nothing where they fit beside whatever the other roles choose."""
    if not all(map(len, others)):
        return memory
    resident = sum(float(other[:, 0].max()) for other in others)
    working = max((float(other[:, 1].max()) for other in others), default=0.0)
    fits = memory[:, 0] + resident + np.maximum(memory[:, 1], working) <= room
    return np.where(fits[:, None], 0.0, memory)


def _product(a: Combined, b: Combined) -> Combined:
    """Every row of `a` with every row of `b`."""
    i, j = (x.ravel() for x in np.indices((len(a.memory), len(b.memory))))
    memory = np.stack(
        [a.memory[i, 0] + b.memory[j, 0], np.maximum(a.memory[i, 1], b.memory[j, 1])], axis=1
    )
    choice = np.concatenate([a.choice[i], b.choice[j]], axis=1)
    return Combined(a.seconds[i] + b.seconds[j], memory, choice)


def _kept(found: Combined, room: float) -> Combined:
    fits = np.flatnonzero(found.memory.sum(axis=1) <= room)
    table = np.concatenate([found.seconds, found.memory], axis=1)[fits]
    return _rows(found, fits[undominated(table)])


def _rows(found: Combined, rows: np.ndarray) -> Combined:
    return Combined(found.seconds[rows], found.memory[rows], found.choice[rows])
