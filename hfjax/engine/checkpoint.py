# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: the roles' arrays (Orbax) and the driver's JSON in a directory, whole or invisible.

    checkpoints/step_00000006/actor/...      written by the processes of the actor's pool
                              meta.json      step, data cursor, controllers; written last
    checkpoints/step_00000008.tmp/...        being written, or left by a run that was killed

On several hosts the directory must be one that all of them see.
"""

import dataclasses
import json
import logging
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding

from meshes.layouts import replicated

META = "meta.json"
TMP = ".tmp"
CHECKSUMS = "checksums_"  # + process number
BLOCK_BYTES = 1 << 24

log = logging.getLogger(__name__)


def save_role(path: str | Path, state: Any, shapes: Any = None) -> None:
    """Writes a tree of arrays bit for bit and returns when it is written.

    Every process of the mesh calls it. With `shapes`, a tree like `state`, what lies beyond them
    is left out: padding that is there for one mesh only.
    """
    path = Path(path).absolute()
    if shapes is not None:
        state = jax.tree.map(lambda x, to: x if x.shape == to.shape else _cut(x, to), state, shapes)
    with _quiet(), _checkpointer() as writer:
        writer.save(path, args=ocp.args.PyTreeSave(_flat(state)))
    _write_checksums(path)


def restore_role(path: str | Path, abstract: Any, shapes: Any = None, *, whole: bool = True) -> Any:
    """The tree saved at `path`, laid out as `abstract` says.

    `abstract` is a tree of ShapeDtypeStructs with shardings, on any mesh, all of whose processes
    call this. Names, dtypes and shapes (those of `shapes`, where they are given: `abstract` is
    filled up with zeros beyond them) must be the saved ones: nothing is cast or cut. Without
    `whole`, `abstract` may be a part of what was saved, and only that part is read.
    """
    path = Path(path).absolute()
    check_role(path, abstract if shapes is None else shapes, whole=whole)
    _verify_checksums(path)
    wanted = _flat(abstract)
    how = ocp.checkpoint_utils.construct_restore_args(wanted)
    how = {name: dataclasses.replace(each, strict=False) for name, each in how.items()}  # fill up
    args = ocp.args.PyTreeRestore(wanted, restore_args=how, partial_restore=True)
    with _quiet(), _checkpointer() as reader:
        try:
            arrays = reader.restore(path, args=args)
        except Exception as error:
            raise ValueError(f"checkpoint {path} cannot be read: {error}") from error
    return jax.tree.unflatten(jax.tree.structure(abstract), [arrays[name] for name in wanted])


def check_role(path: str | Path, shapes: Any, *, whole: bool = True) -> None:
    """Refuses a checkpoint of other names, shapes or dtypes than the tree's; no array is read."""
    path = Path(path).absolute()
    if not path.is_dir():
        raise ValueError(f"no checkpoint at {path}")
    with _quiet(), _checkpointer() as reader:
        try:
            metadata: Any = reader.metadata(path).item_metadata
            saved = metadata.tree
        except Exception as error:
            raise ValueError(f"checkpoint {path} cannot be read: {error}") from error
    wanted = _flat(shapes)
    _check_same(path, saved if whole else {n: saved[n] for n in wanted if n in saved}, wanted)


class CheckpointStore:
    """The checkpoints of one run, kept by its driver: begin, let the roles save, commit."""

    def __init__(self, root: str | Path, keep_last: int = 2) -> None:
        """Nothing is written yet."""
        if type(keep_last) is not int or keep_last < 1:
            raise ValueError(f"keep_last = {keep_last!r}: must be a whole number, 1 or more")
        self.root = Path(root).absolute()
        self.keep_last = keep_last

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

    def commit(self, step: int, meta: dict[str, Any]) -> Path:
        """Makes the step visible, then deletes what is older than the last `keep_last`."""
        tmp, final = self._tmp(step), self.path(step)
        (tmp / META).write_text(json.dumps(meta, indent=1, sort_keys=True) + "\n")
        _sync_tree(tmp)
        if final.exists():  # the same step again, after resuming from an older one
            self._hide(final)
        tmp.rename(final)
        _sync(self.root)
        for old in self.steps()[: -self.keep_last]:
            self._hide(self.path(old))
        for left in self.root.glob(f"step_*{TMP}"):
            shutil.rmtree(left)
        return final

    def steps(self) -> list[int]:
        """Steps with a whole checkpoint, ascending."""
        return [step for step, whole in self._found() if whole]

    def latest(self) -> int | None:
        """The newest step with a whole checkpoint; newer incomplete ones are named in the log."""
        steps = self.steps()
        newest = steps[-1] if steps else None
        for step, whole in self._found():
            if not whole and (newest is None or step > newest):
                log.warning(
                    "checkpoint of step %d in %s is incomplete and ignored; resuming from %s",
                    *(step, self.root, "the start" if newest is None else f"step {newest}"),
                )
        return newest

    def load_meta(self, step: int) -> dict[str, Any]:
        """What was given to commit."""
        path = self.path(step) / META
        try:
            return json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"checkpoint file {path} cannot be read: {error}") from error

    def _tmp(self, step: int) -> Path:
        return self.path(step).with_name(self.path(step).name + TMP)

    def _found(self) -> list[tuple[int, bool]]:
        """(step, whole) of every checkpoint directory, ascending."""
        found = []
        for path in self.root.glob("step_*"):
            if match := re.fullmatch(rf"step_(\d+)({re.escape(TMP)})?", path.name):
                found.append((int(match[1]), match[2] is None and (path / META).is_file()))
        return sorted(found)

    def _hide(self, path: Path) -> None:
        """Renames a checkpoint before it is deleted: a half deleted one must not look whole."""
        path.rename(
            Path(tempfile.mkdtemp(prefix="step_old_", suffix=TMP, dir=self.root)) / path.name
        )


@contextmanager
def _checkpointer() -> Iterator[ocp.Checkpointer]:
    # float32 weights and moments hardly compress; zstd would only cost time
    handler = ocp.PyTreeCheckpointHandler(use_compression=False)
    with ocp.Checkpointer(handler) as checkpointer:
        yield checkpointer


@contextmanager
def _quiet() -> Iterator[None]:
    """Orbax logs through absl, its errors excepted silent here: failures are raised anyway."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _cut(x: jax.Array, to: jax.ShapeDtypeStruct) -> jax.Array:
    """The corner of a padded array, on every device: its cut axis need not divide any more."""
    sharding: Any = x.sharding
    return _corner(x, to.shape, replicated(sharding.mesh))


@partial(jax.jit, static_argnums=(1, 2))
def _corner(x: jax.Array, shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(jax.lax.slice(x, (0,) * x.ndim, shape), sharding)


def _flat(tree: Any) -> dict[str, Any]:
    """Leaves by dotted path: the file then knows names, not Python classes."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    flat = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    assert len(flat) == len(leaves), "two leaves of one name"
    return flat


def _check_same(path: Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuses to cast, cut or pad: Orbax would do the first two without a word."""
    problems = [f"lacks {name}" for name in wanted if name not in saved]
    problems += [f"has {name}, which this run has not" for name in saved if name not in wanted]
    for name in wanted.keys() & saved.keys():
        was = (tuple(saved[name].shape), np.dtype(saved[name].dtype))
        now = (tuple(wanted[name].shape), np.dtype(wanted[name].dtype))
        if was != now:
            problems.append(f"{name}: saved {was[1]}{list(was[0])}, here {now[1]}{list(now[0])}")
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(
            f"checkpoint {path} does not fit this run: {'; '.join(problems[:5])}{more}; "
            "use the model and optimizer settings that wrote it, or another `out`"
        )


def _write_checksums(path: Path) -> None:
    """Each process sums the files it wrote: Orbax would restore flipped bits without a word."""
    own = jax.process_index()
    sums = {}
    for file in _files(path):
        match = re.match(r"ocdbt\.process_(\d+)/", file)
        if own == (int(match[1]) if match else 0):
            sums[file] = _crc32(path / file)
    (path / f"{CHECKSUMS}{own}.json").write_text(json.dumps(sums, indent=1) + "\n")


def _verify_checksums(path: Path) -> None:
    """Refuses missing, cut and changed files; each process reads its share of them."""
    try:
        lists = [json.loads(file.read_text()) for file in path.glob(f"{CHECKSUMS}*.json")]
    except ValueError as error:
        raise ValueError(f"checkpoint {path} is damaged: {error}") from error
    sums = {name: crc for each in lists for name, crc in each.items()}
    names = sorted({*sums, *_files(path)})
    for name in names[jax.process_index() :: jax.process_count()]:
        file = path / name
        if not file.is_file():
            raise ValueError(f"checkpoint {path} is damaged: {name} is missing")
        if name not in sums or _crc32(file) != sums[name]:
            raise ValueError(f"checkpoint {path} is damaged: {name} is not as it was written")


def _files(path: Path) -> list[str]:
    """Files below `path`, without the checksums themselves."""
    names = (file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    return sorted(name for name in names if not name.startswith(CHECKSUMS))


def _crc32(file: Path) -> int:
    crc = 0
    with file.open("rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
    return crc


def _sync_tree(root: Path) -> None:
    """Forces a directory and all below it to disk."""
    for folder, _, files in os.walk(root):
        for name in files:
            _sync(Path(folder) / name)
        _sync(Path(folder))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
