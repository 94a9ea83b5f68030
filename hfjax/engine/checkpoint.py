# SPDX-License-Identifier: Apache-2.0
"""A role's arrays on disk (Orbax): written beside what follows, read on any mesh, damage named.

Each process writes its shards; when all have, one of them, or the driver, puts them together.
On several hosts the directory must be one that all of them see.
"""

import asyncio
import ctypes
import dataclasses
import json
import logging
import os
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding

from meshes.layouts import replicated

CHECKSUMS = "checksums.json"  # of a role's other files; written last
BLOCK_BYTES = 1 << 20
READERS = 8  # threads that sum files
Sums = dict[str, list[int]]  # file below a role's directory -> bytes, CRC-32


def start_save(path: str | Path, state: Any, shapes: Any = None) -> Future[Sums]:
    """Copies a tree of arrays and writes it, bit for bit, in a thread of its own.

    Every process of the mesh calls it, and may donate the arrays when it returns. The future gives
    the sums of the large files that this process wrote, or raises what writing them raised; the
    sums of all are for finish_save. With `shapes`, a tree like `state`, what lies beyond them is
    left out: padding that is there for one mesh only.
    """
    path = Path(path).absolute()
    if shapes is not None:
        state = jax.tree.map(lambda x, to: x if x.shape == to.shape else _cut(x, to), state, shapes)
    arrays = {name: _kept(x) for name, x in _flat(state).items()}
    writer = ThreadPoolExecutor(1, thread_name_prefix="save")
    begun = writer.submit(_begin, path, arrays)
    wait([begun])  # the arrays are on the host
    done = writer.submit(_written, path, begun)
    writer.shutdown(wait=False)
    return done


def finish_save(path: str | Path, sums: Mapping[str, list[int]]) -> None:
    """Puts what all processes wrote under `path` together; one caller, when all have written."""
    path = Path(path).absolute()
    _handler().finalize(epath.Path(path))
    rest = [name for name in _files(path) if name not in sums]
    every = {**sums, **_sums(path, rest)}
    (path / CHECKSUMS).write_text(json.dumps(every, indent=1, sort_keys=True) + "\n")


def save_role(path: str | Path, state: Any, shapes: Any = None) -> None:
    """start_save and finish_save of a mesh that one process holds; returns when all is written."""
    finish_save(path, start_save(path, state, shapes).result())


def restore_role(
    path: str | Path,
    abstract: Any,
    shapes: Any = None,
    *,
    whole: bool = True,
    verify: bool = True,
) -> Any:
    """The tree saved at `path`, laid out as `abstract` says.

    `abstract` is a tree of ShapeDtypeStructs with shardings, on any mesh, all of whose processes
    call this. Names, dtypes and shapes (those of `shapes`, where they are given: `abstract` is
    filled up with zeros beyond them) must be the saved ones: nothing is cast or cut. Without
    `whole`, `abstract` may be a part of what was saved, and only that part is read. Not `verify`:
    the caller knows that the files' contents are whole, and only their sizes are looked at.
    """
    path = Path(path).absolute()
    check_role(path, abstract if shapes is None else shapes, whole=whole)
    share = slice(jax.process_index(), None, jax.process_count())
    verify_role(path, contents=verify, share=share)
    wanted = _flat(abstract)
    how = ocp.checkpoint_utils.construct_restore_args(wanted)
    how = {name: dataclasses.replace(each, strict=False) for name, each in how.items()}  # fill up
    args = ocp.args.PyTreeRestore(wanted, restore_args=how, partial_restore=True)
    try:
        arrays = _handler().restore(epath.Path(path), args=args)
    except Exception as error:
        raise ValueError(f"checkpoint {path} cannot be read: {error}") from error
    return jax.tree.unflatten(jax.tree.structure(abstract), [arrays[name] for name in wanted])


def check_role(path: str | Path, shapes: Any, *, whole: bool = True) -> None:
    """Refuses a checkpoint of other names, shapes or dtypes than the tree's; no array is read."""
    path = Path(path).absolute()
    if not path.is_dir():
        raise ValueError(f"no checkpoint at {path}")
    try:
        metadata: Any = _handler().metadata(epath.Path(path))
        saved = metadata.tree
    except Exception as error:
        raise ValueError(f"checkpoint {path} cannot be read: {error}") from error
    wanted = _flat(shapes)
    _check_same(path, saved if whole else {n: saved[n] for n in wanted if n in saved}, wanted)


def _handler() -> ocp.PyTreeCheckpointHandler:
    # float32 weights and moments hardly compress; zstd would only cost time
    return ocp.PyTreeCheckpointHandler(use_compression=False)


# Orbax logs through absl; its failures are raised too, and what it warns of is not wrong here.
logging.getLogger("absl").addFilter(lambda record: f"{os.sep}orbax{os.sep}" not in record.pathname)


def _begin(path: Path, arrays: dict[str, Any]) -> Iterable[Any]:
    """Orbax's futures of the writing; the arrays are on the host when it returns."""
    path.mkdir(parents=True, exist_ok=True)
    save = _handler().async_save(epath.Path(path), args=ocp.args.PyTreeSave(arrays))
    return asyncio.run(save) or ()


def _written(path: Path, begun: Future[Iterable[Any]]) -> Sums:
    for future in begun.result():
        future.result()
    own = f"ocdbt.process_{jax.process_index()}/"
    names = [name for name in _files(path) if name.startswith(own)]
    for name in names:
        sync(path / name)
    _trim()
    return _sums(path, names)


def _trim() -> None:
    """Gives memory that is free back to the system: glibc keeps what each save has taken."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _kept(x: jax.Array) -> jax.Array:
    """What may be read on after `x` is donated; from a device it is copied anyway."""
    on_host = next(iter(x.devices())).platform == "cpu"
    return jax.device_put(x, x.sharding, may_alias=False) if on_host else x


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


def verify_role(path: str | Path, *, contents: bool = True, share: slice = slice(None)) -> None:
    """Refuses missing, cut and changed files: Orbax would restore flipped bits without a word.

    Not `contents`: only sizes are looked at. `share` of the files' names in order: a process's.
    """
    path = Path(path)
    try:
        sums = json.loads((path / CHECKSUMS).read_text())
        names = sorted({*sums, *_files(path)})[share]
        sizes = {name: int(sums[name][0]) for name in names if name in sums}
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise ValueError(f"checkpoint {path} is damaged: {CHECKSUMS}: {error}") from None
    for name in names:
        if not (path / name).is_file():
            raise ValueError(f"checkpoint {path} is damaged: {name} is missing")
        if sizes.get(name) != (path / name).stat().st_size:
            raise ValueError(f"checkpoint {path} is damaged: {name} is not as it was written")
    found = _sums(path, names if contents else [])
    for name in found:
        if found[name] != sums[name]:
            raise ValueError(f"checkpoint {path} is damaged: {name} is not as it was written")


def _files(path: Path) -> list[str]:
    """Files below `path`, without the checksums themselves."""
    names = (file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    return sorted(name for name in names if name != CHECKSUMS)


def _sums(path: Path, names: Iterable[str]) -> Sums:
    """Bytes and CRC-32 of files below `path`."""
    names = list(names)
    with ThreadPoolExecutor(READERS) as readers:
        found = readers.map(lambda name: file_sum(path / name), names)
        return dict(zip(names, found, strict=True))


def file_sum(file: Path) -> list[int]:
    """Bytes and CRC-32 of a file."""
    size = crc = 0
    block = memoryview(bytearray(BLOCK_BYTES))
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(block):
            size, crc = size + count, zlib.crc32(block[:count], crc)
    return [size, crc]


def sync(path: Path) -> None:
    """Forces a file, or the names in a directory, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
