# SPDX-License-Identifier: Apache-2.0
"""Ends a run before harm is saved: weights that went wrong, updates refused again and again."""

import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hfjax.batch import Batch
from hfjax.controller.handle import Models, Reply, RoleHandle, own
from hfjax.controller.worker import RoleError, describe
from hfjax.engine.checks import CHANGED, DIFFERS, Fault

log = logging.getLogger(__name__)

CHECK = "check_weights"  # the method of roles that have weights
MAX_REFUSED = 10  # steps in a row with a non-finite update, after which a run ends
MOST_NAMED = 4  # faults, and devices of a fault, that a message names
REFUSED = re.compile(r"(.+)/(pretrain_)?skipped")  # metric of a trained role
AFTER = "this step is not saved; --resume goes on from the last checkpoint"


class Guard:
    """Checks the weights of a run's roles, and counts the updates that they refuse."""

    def __init__(self, models: Models, every: int, out: Path) -> None:
        """Weights are checked in the first step and every so many; 0: only before they are saved.

        `out` is where a batch goes that could not be trained on.
        """
        self.models, self.every, self.out = models, every, out
        self.last = -1  # step of the last check
        self.waiting: dict[int, list[tuple[RoleHandle, Reply]]] = {}  # of checks, by step
        self.refused = 0  # steps in a row

    def ask(self, step: int) -> None:
        """Sends the check of the weights as they are after the calls so far, if it is its turn."""
        if self.every and (self.last < 0 or step % self.every == 0):
            self._ask(step)

    def judge(self, step: int) -> None:
        """Waits for the step's check, if there was one; RoleError where weights are wrong."""
        told = [
            _told(handle, step, fault)
            for handle, reply in self.waiting.pop(step, [])
            for fault in dict.fromkeys(fault for found in reply.result() for fault in found)
        ]
        if told:
            more = f"\nand {len(told) - MOST_NAMED} more" if len(told) > MOST_NAMED else ""
            raise RoleError("\n".join(told[:MOST_NAMED]) + f"{more}\n{AFTER}")

    def check(self, step: int) -> None:
        """Before a save: the step's check, now if it was not asked for."""
        if self.last != step:
            self._ask(step)
        self.judge(step)

    def watch(self, step: int, record: Mapping[str, float], batch: Batch) -> None:
        """Warns of refused updates; RoleError, and the batch in a file, after MAX_REFUSED steps.

        The weights are still finite then: those of the last update that was not refused.
        """
        roles = list(dict.fromkeys(_refusing(record)))
        self.refused = self.refused + 1 if roles else 0
        if not roles:
            return
        named = " and ".join(roles)
        log.warning("step %d: %s had updates that were not finite; they were left out", step, named)
        if self.refused >= MAX_REFUSED:
            raise RoleError(
                f"role {roles[0]!r}: {MAX_REFUSED} steps in a row, up to {step}, had updates that "
                f"were not finite; {self._dump(step, record, batch)}: look at its rewards and "
                f"advantages, at learning rate and coefficients; {AFTER}"
            )

    def _ask(self, step: int) -> None:
        self.models.step = self.last = step
        handles = list(self.models.handles.values())
        handles += [handle.second_copy.handle for handle in handles if handle.second_copy]
        self.waiting[step] = [(h, own(h, CHECK)()) for h in handles if CHECK in h.methods]

    def _dump(self, step: int, record: Mapping[str, float], batch: Batch) -> str:
        """Says where columns went by name, texts as NumPy has them, and the metrics as JSON."""
        columns = {name: _plain(column) for name, column in batch.resolved().items()}
        file = self.out / f"refused_step_{step:08d}.npz"
        columns["metrics"] = np.array(json.dumps(dict(record), default=float))
        try:
            np.savez_compressed(file, allow_pickle=False, **columns)
        except OSError as error:  # must not hide what it is about
            return f"the batch of the last could not be written to {file} ({error})"
        return f"the batch of the last is in {file} (np.load)"


def _refusing(record: Mapping[str, float]) -> Iterator[str]:
    """Roles with more updates left out than had nothing to train on."""
    for name, skipped in record.items():
        empty = record.get(f"{name.removesuffix('skipped')}empty", 0.0)
        if (found := REFUSED.fullmatch(name)) and skipped > empty:
            yield found[1]


def _told(handle: RoleHandle, step: int, fault: Fault) -> str:
    """Role, array, devices, ranks and hosts of what a check found."""
    hosts, pool = handle.pool.hosts, handle.pool.name
    names = [f"{name} (rank {rank} on host {hosts[rank]})" for rank, name in fault.devices]
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    devices = ", ".join(names[:MOST_NAMED]) + more
    rank = fault.devices[0][0]
    where = describe(handle.role, CHECK, step, pool, rank, hosts[rank])
    if fault.kind == DIFFERS and fault.others:
        why = f"differs from {fault.others} other device(s) that hold the same part and agree"
    elif fault.kind == DIFFERS:
        why = "should hold the same part and do not; there is no majority to say who is wrong"
    elif fault.kind == CHANGED:
        why = "has changed since the first check, though these weights are frozen"
    else:
        why = fault.kind
    return f"{where}: {fault.array} on {devices} {why}"


def _plain(column: Any) -> np.ndarray:
    """An array that needs no pickle: of objects that are no texts, their JSON."""
    if isinstance(column, np.ndarray) and column.dtype != object:
        return column
    return np.array([x if isinstance(x, str) else json.dumps(x, default=str) for x in column])
