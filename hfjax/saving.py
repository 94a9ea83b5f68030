# SPDX-License-Identifier: Apache-2.0
"""Checkpoints while a run goes on: begun after a step, committed when all processes have written.

What cannot be written is said, with path and reason, and ends the run or not as on_save_error says;
the checkpoints before it stay as they are.
"""

import copy
import difflib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from hfjax.controller.handle import Models, Reply
from hfjax.engine.store import CheckpointStore
from hfjax.metrics import stage

WRITTEN = "written"  # the method of trained roles that says whether a process has written

MEND = "mend that and --resume, or set on_save_error to 'continue'"

log = logging.getLogger(__name__)


OnError = Literal["stop", "continue"]


class SaveError(RuntimeError):
    """A checkpoint or a record could not be written."""


@contextmanager
def recording(on_error: OnError) -> Iterator[None]:
    """A file of the run that cannot be written ends it or is said, as `on_error` has it."""
    try:
        yield
    except OSError as error:
        told = f"{error.filename or 'a file of the run'} could not be written: {error.strerror}"
        if on_error == "stop":
            raise SaveError(f"{told}; {MEND}") from error
        log.warning("%s; the run goes on, and tries again with the next step", told)


def check_best(config: Any, held_out: Any) -> None:
    """Refuses a metric without a name, and one of evaluations that checkpoints would be without."""
    name = config.keep_best.removeprefix("-")
    if config.keep_best and not name:
        raise ValueError("keep_best=-: put a metric's name after the '-', as -actor/loss")
    if not name.startswith("val-"):
        return
    if held_out is None:
        raise ValueError(
            f"keep_best={config.keep_best}: val-* are metrics of evaluations; set data.eval, or "
            "use a metric of the steps, as critic/score/mean"
        )
    every, saves = config.eval_every, config.save_every
    if saves > 0 and (every <= 0 or saves % every):
        raise ValueError(
            f"keep_best={config.keep_best}, eval_every={every}, save_every={saves}: checkpoints "
            "are to fall on steps that are evaluated; save_every must be a multiple of eval_every, "
            f"as eval_every={saves}, save_every={saves}"
        )


@dataclass
class Pending:
    """A checkpoint that is being written, with what the driver adds to it."""

    step: int
    meta: dict[str, Any]
    asked: dict[str, Reply] = field(default_factory=dict)  # by role


class Saves:
    """The checkpoints of a run that is under way; at most one is being written."""

    def __init__(
        self,
        store: CheckpointStore,
        models: Models,
        roles: Sequence[str],
        newest: int,
        on_error: OnError,
        records: Callable[[], None],
    ) -> None:
        """`newest` is the step that the run goes on from; `records` writes its records down."""
        self._records = records
        self.store, self.models, self.roles, self.on_error = store, models, roles, on_error
        self.newest = newest  # the last step with a whole checkpoint
        self.pending: Pending | None = None

    def begin(self, step: int, meta: dict[str, Any], record: Mapping[str, Any]) -> dict[str, float]:
        """Copies every trained role's state, which is written while the run goes on; seconds.

        Waits for the checkpoint before. `meta` is what the driver needs to go on after this step,
        `record` holds its metrics.
        """
        start_s = time.perf_counter()
        self.finish()
        try:
            folder = self.store.begin(step)
        except OSError as error:
            self._fail(step, str(error))
        else:
            asked = [getattr(self.models, r).save(path=str(folder / r)) for r in self.roles]
            for reply in asked:
                reply.result()
            self.pending = Pending(step, copy.deepcopy(meta) | self._valued(step, record))
        return {"timing_s/save_checkpoint": time.perf_counter() - start_s}

    def poll(self) -> None:
        """Commits what all processes have written; waits for nobody."""
        for _ in range(2):  # what was answered since the last step may be old: asked again
            if self.pending is None:
                return
            asked = self.pending.asked
            if not asked:
                asked |= {r: getattr(self.models, r).written(wait=False) for r in self.roles}
            if not all(reply.done for reply in asked.values()):
                return
            found = {role: reply.result() for role, reply in asked.items()}
            asked.clear()
            if all(each is not None for values in found.values() for each in values):
                with stage("commit_checkpoint"):
                    self._commit(found)

    def finish(self) -> None:
        """Waits until what was begun is written, and commits it."""
        if self.pending is not None:
            asked = {role: getattr(self.models, role).written(wait=True) for role in self.roles}
            self._commit({role: reply.result() for role, reply in asked.items()})

    def _commit(self, found: Mapping[str, list[Any]]) -> None:
        """`found` has each process's sums, or why it could not write."""
        pending, self.pending = self.pending, None
        assert pending is not None
        errors = [f"{role}: {x}" for role, each in found.items() for x in each if type(x) is str]
        if not errors:
            sums = {
                role: {k: v for x in each for k, v in x.items()} for role, each in found.items()
            }
            try:
                self._records()  # before: no checkpoint stands without its record
                self.store.commit(pending.step, pending.meta, sums)
            except Exception as error:  # Orbax raises errors of the disk as others, too
                errors = [f"{type(error).__name__}: {error}"]
        if errors:
            self._fail(pending.step, errors[0])
        else:
            self.newest = pending.step

    def _fail(self, step: int, reason: str) -> None:
        self.store.discard(step)
        kept = self.store.steps()
        told = (
            f"checkpoint of step {step} could not be written to {self.store.path(step)}: {reason}; "
            + (f"step {kept[-1]} stays the newest" if kept else "there is none before it")
        )
        if self.on_error == "stop":
            raise SaveError(f"{told}; {MEND}")
        log.warning("%s; the run goes on without it", told)

    def _valued(self, step: int, record: Mapping[str, Any]) -> dict[str, Any]:
        """The value of the metric whose best is kept, if the step has one."""
        name = self.store.metric
        if not name:
            return {}
        if name not in record:
            near = difflib.get_close_matches(name, record, 1, 0)
            log.warning("keep_best=%s: step %d has no such metric (nearest: %s)", name, step, *near)
        value = record.get(name, math.nan)
        return {"metrics": {name: float(value) if math.isfinite(value) else None}}
