# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of one run: whole or invisible, checked before they are used, the best kept.

checkpoints/step_00000006/actor/...      written by the processes of the actor's pool
                          meta.json      step, data cursor, controllers
                          manifest.json  format, roles, checksums of the above; written last
checkpoints/step_00000008.tmp/...        being written, or left by a run that was killed
"""

import json
import logging
import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from hfjax.engine.checkpoint import CHECKSUMS, file_sum, finish_save, sync, verify_role
from hfjax.files import read_json

META, MANIFEST = "meta.json", "manifest.json"
FORMAT = 1
TMP = ".tmp"

log = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of one run, kept by its driver: begin, let the roles save, commit."""

    def __init__(self, root: str | Path, keep_last: int = 2, keep_best: str = "") -> None:
        """Nothing is written yet. `keep_best`: a metric's name, after a '-' if lower is better."""
        if type(keep_last) is not int or keep_last < 1:
            raise ValueError(f"keep_last = {keep_last!r}: must be a whole number, 1 or more")
        self.root = Path(root).absolute()
        self.keep_last = keep_last
        self.metric, self.sign = keep_best.removeprefix("-"), -1 if keep_best[:1] == "-" else 1

    def make_root(self) -> None:
        """Creates `root` and writes a probe there, so that a full or foreign disk shows at once."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.root) as probe:
                probe.write(b"probe")
        except OSError as error:
            raise ValueError(
                f"checkpoint directory {self.root} cannot be written ({error}); "
                "choose another run directory with `out`"
            ) from error

    def path(self, step: int) -> Path:
        """Where the whole checkpoint of a step is, or will be."""
        return self.root / f"step_{step:08d}"

    def begin(self, step: int) -> Path:
        """An empty directory for this step's roles; what a killed run left there is removed."""
        tmp = self._tmp(step)
        if tmp.exists():
            shutil.rmtree(tmp)
        tmp.mkdir(parents=True)
        return tmp

    def discard(self, step: int) -> None:
        """Removes what was begun of a step; nobody writes there any more."""
        shutil.rmtree(self._tmp(step), ignore_errors=True)

    def commit(
        self, step: int, meta: dict[str, Any], roles: Mapping[str, Mapping[str, list[int]]]
    ) -> Path:
        """Makes the step visible, then deletes what is neither best nor of the last `keep_last`.

        `roles` have what all processes of each gave when they had written.
        """
        tmp, final = self._tmp(step), self.path(step)
        for role, sums in roles.items():
            finish_save(tmp / role, sums)
            verify_role(tmp / role, contents=False)  # of every process, also on another host
        text = json.dumps(meta, indent=1, sort_keys=True, allow_nan=False)
        (tmp / META).write_text(text + "\n")
        files = {name: file_sum(tmp / name) for name in (META, *map(_checksums, roles))}
        manifest = {"format": FORMAT, "step": step, "roles": sorted(roles), "files": files}
        synced = {tmp / role / name for role, sums in roles.items() for name in sums}
        _sync_tree(tmp, synced)
        (tmp / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        sync(tmp / MANIFEST)
        sync(tmp)
        if final.exists():  # the same step again, after resuming from an older one
            self._hide(final)
        tmp.rename(final)
        sync(self.root)
        try:
            self._tidy(step)
        except (OSError, ValueError) as error:  # it stays whole all the same
            log.warning("an old checkpoint in %s could not be deleted: %s", self.root, error)
        return final

    def _tidy(self, newest: int) -> None:
        """Deletes what is neither best nor of the last `keep_last`, and what was left begun.

        Also what is newer: a resume went on from an older one, as those are damaged.
        """
        steps = [step for step in self.steps() if step <= newest]
        kept = {*steps[-self.keep_last :], self.best(steps)}
        for step, whole in self._found():
            if whole and step not in kept and (step > newest or step in steps):
                self._hide(self.path(step))
        for left in self.root.glob(f"step_*{TMP}"):
            shutil.rmtree(left)

    def steps(self) -> list[int]:
        """Steps with a whole checkpoint, ascending; contents of arrays are not looked at."""
        return [step for step, done in self._found() if done and not self.problem(step)]

    def best(self, among: Collection[int] | None = None) -> int | None:
        """The first step with the best value of the metric to keep; None where none has one."""
        values = {}
        for step in (self.steps() if among is None else among) if self.metric else ():
            value = self.load_meta(step).get("metrics", {}).get(self.metric)
            if isinstance(value, int | float) and math.isfinite(value):
                values[step] = self.sign * value
        return max(values, key=lambda step: (values[step], -step), default=None)

    def latest(
        self, *, contents: bool = True, tell: Callable[[str], object] = log.info
    ) -> int | None:
        """The newest step with a whole checkpoint, every byte of it read, which is told before.

        Newer ones that are not are named in the log; where all are damaged that is an error. Not
        `contents`: only sizes of arrays are looked at.
        """
        left_out: list[tuple[int, str]] = []
        newest = None
        for step, done in reversed(self._found()):
            problem = self.problem(step) if done else "incomplete"
            if contents and not problem:
                tell(f"verifying the checkpoint of step {step}: {self._bytes(step) / 1e9:.3f} GB")
                problem = self.problem(step, contents=True)
            if not problem:
                newest = step
                break
            left_out.append((step, problem))
        damaged = [f"step {step} is {why}" for step, why in left_out if why != "incomplete"]
        if newest is None and damaged:
            raise ValueError(
                f"no checkpoint in {self.root} is whole: {'; '.join(damaged)}; put a copy back, or "
                "choose another directory with `out`"
            )
        for step, problem in reversed(left_out):
            log.warning(
                "checkpoint of step %d in %s is %s and ignored; %s is used",
                *(step, self.root, problem, "none" if newest is None else f"that of step {newest}"),
            )
        return newest

    def problem(self, step: int, *, contents: bool = False) -> str:
        """Why the checkpoint of a step cannot be used; empty if it can."""
        path = self.path(step)
        if not (path / MANIFEST).exists():
            return f"damaged ({MANIFEST} is missing)"
        try:
            manifest = read_json(path / MANIFEST)
            written, roles, files = manifest["format"], manifest["roles"], manifest["files"]
            if written != FORMAT:
                return f"of format {written}, this hfjax reads {FORMAT},"
            for name in (META, *map(_checksums, roles)):
                if file_sum(path / name) != files[name]:
                    return f"damaged ({name} is not as it was written)"
            for role in roles:
                verify_role(path / role, contents=contents)
        except FileNotFoundError as error:
            return f"damaged ({Path(error.filename).relative_to(path)} is missing)"
        except ValueError as error:
            told = str(error).removeprefix("checkpoint ").removeprefix(f"{path}/")
            return f"damaged ({told})"
        except (OSError, LookupError, TypeError, RecursionError) as error:
            return f"damaged ({MANIFEST}: {type(error).__name__}: {error})"
        return ""

    def load_meta(self, step: int) -> dict[str, Any]:
        """What was given to commit, of whatever length."""
        try:
            return read_json(self.path(step) / META, most_bytes=sys.maxsize)
        except ValueError as error:
            raise ValueError(f"checkpoint file {error}") from error

    def _bytes(self, step: int) -> int:
        files = (path for path in self.path(step).rglob("*") if path.is_file())
        return sum(path.stat().st_size for path in files)

    def _tmp(self, step: int) -> Path:
        return self.path(step).with_name(self.path(step).name + TMP)

    def _found(self) -> list[tuple[int, bool]]:
        """(step, whether it was committed) of every checkpoint directory, ascending."""
        found = []
        for path in self.root.glob("step_*"):
            if match := re.fullmatch(rf"step_(\d+)({re.escape(TMP)})?", path.name):
                found.append((int(match[1]), match[2] is None))
        return sorted(found)

    def _hide(self, path: Path) -> None:
        """Renames a checkpoint before it is deleted: a half deleted one must not look whole."""
        path.rename(
            Path(tempfile.mkdtemp(prefix="step_old_", suffix=TMP, dir=self.root)) / path.name
        )


def _checksums(role: str) -> str:
    return f"{role}/{CHECKSUMS}"


def _sync_tree(root: Path, synced: Collection[Path]) -> None:
    """Forces a directory and all below it to disk, but for the files that are there already."""
    for folder, _, files in os.walk(root):
        for name in files:
            if Path(folder) / name not in synced:
                sync(Path(folder) / name)
        sync(Path(folder))
