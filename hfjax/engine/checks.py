# SPDX-License-Identifier: Apache-2.0
"""Whether arrays are what they must be: equal wherever devices hold the same part, and finite.

Nothing else would show a flipped bit on one replica: each device goes on with its own copy. Every
device sums up the bits that it holds, so that only the sums are compared.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshes.layouts import replicated
from meshes.mesh import AXES, coordinates, shape_of

DIFFERS, CHANGED, NOT_FINITE = "differs", "has changed", "holds NaN or infinity"
GOLDEN = 0x9E3779B9  # 2**32 over the golden ratio: tells positions apart
MIX = ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1))  # Murmur3's fmix32: shift, then multiply


@dataclass(frozen=True)
class Fault:
    """What is wrong with an array, and on which devices: (process, name) of each.

    Where devices that hold the same part differ, these are the minority; without a majority all
    of them, and `others` is 0.
    """

    kind: str  # DIFFERS, CHANGED or NOT_FINITE
    array: str  # its name in the tree
    devices: tuple[tuple[int, str], ...]
    others: int = 0  # devices that agree on another content


class Check:
    """Compares the arrays of a tree, wherever its shards lie on one mesh, over all processes.

    With `frozen`, each call must find the bits that the first one found.
    """

    def __init__(self, mesh: Mesh, shardings: Any, *, frozen: bool = False) -> None:
        """`shardings` is a tree of NamedShardings as the arrays will have."""
        leaves = jax.tree_util.tree_leaves_with_path(shardings)
        names = (jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves)
        self._parts = {
            name: _parts(mesh, sharding) for name, (_, sharding) in zip(names, leaves, strict=True)
        }
        self._devices = [(device.process_index, str(device)) for device in mesh.devices.flat]
        self._frozen, self._first = frozen, None
        self._sums = partial(_all_sums, mesh, tuple(sharding.spec for _, sharding in leaves))

    def __call__(self, tree: Any) -> list[Fault]:
        """What is wrong; the same in every process, all of which must call this."""
        sums_NL2 = np.asarray(self._sums(jax.tree.leaves(tree)))
        found = []
        for at, (name, parts_N) in enumerate(self._parts.items()):
            sums_N, bad_N = sums_NL2[:, at].T
            if self._first is not None and (changed_N := sums_N != self._first[:, at]).any():
                found.append(Fault(CHANGED, name, self._named(changed_N)))
            else:
                found += [
                    Fault(DIFFERS, name, self._named(wrong_N), others)
                    for wrong_N, others in _minorities(sums_N, parts_N)
                ]
            if bad_N.any():
                found.append(Fault(NOT_FINITE, name, self._named(bad_N > 0)))
        if self._frozen and not found:
            self._first = sums_NL2[..., 0]
        return found

    def _named(self, mask_N: np.ndarray) -> tuple[tuple[int, str], ...]:
        return tuple(self._devices[n] for n in np.flatnonzero(mask_N))


@partial(jax.jit, static_argnums=(0, 1))  # of the module: compiled once for all models of a shape
def _all_sums(mesh: Mesh, specs: tuple[PartitionSpec, ...], leaves: list[jax.Array]) -> jax.Array:
    """(N, leaves, 2): the sums of every device's shards, in every process."""
    sums_NL2 = jax.shard_map(
        lambda shards: jnp.stack([_sums(x) for x in shards])[None],
        mesh=mesh,
        in_specs=(list(specs),),
        out_specs=PartitionSpec(AXES),
        check_vma=False,
    )(leaves)
    return jax.lax.with_sharding_constraint(sums_NL2, replicated(mesh))


def _sums(x: jax.Array) -> jax.Array:
    """(2,) of one device's shard: the sum of its bits, and 1 where any value is not finite.

    Each value's bits are mixed with its position, one to one: a change of one value changes the
    sum, and changes of several go unseen once in 2**32.
    """
    x = x.reshape(x.shape or (1,))
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    bits, stride = bits.astype(jnp.uint32), 1
    for dim in reversed(range(x.ndim)):
        position = jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim)
        bits += position * np.uint32(stride * GOLDEN % 2**32)
        stride *= x.shape[dim]
    for shift, factor in MIX:
        bits = (bits ^ (bits >> np.uint32(shift))) * np.uint32(factor)
    # one reduction of both reads x once, and needs no memory for what it reduces
    both = jax.lax.reduce(
        (bits, (~jnp.isfinite(x)).astype(jnp.uint32)),
        (np.uint32(0), np.uint32(0)),
        lambda a, b: (a[0] + b[0], jax.lax.max(a[1], b[1])),
        tuple(range(x.ndim)),
    )
    return jnp.stack(both)


def _parts(mesh: Mesh, sharding: NamedSharding) -> np.ndarray:
    """A number for each device of the mesh; devices of one number hold the same part."""
    shape = shape_of(mesh)
    split = [axis for entry in sharding.spec for axis in _axes(entry)]
    columns = [AXES.index(axis) for axis in split]
    sizes = [shape.sizes[column] for column in columns] or [1]
    coords = coordinates(shape)[:, columns] if columns else np.zeros((shape.devices, 1), int)
    return np.ravel_multi_index(tuple(coords.T), sizes)


def _minorities(sums_N: np.ndarray, parts_N: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
    """Masks of the devices that differ from a majority, with its size; of all, and 0, without."""
    for part in np.unique(parts_N):
        same_N = parts_N == part
        ((most, count),) = Counter(sums_N[same_N].tolist()).most_common(1)
        total = int(same_N.sum())
        if count == total:
            continue
        majority = 2 * count > total
        yield (same_N & (sums_N != most) if majority else same_N), (count if majority else 0)


def _axes(entry: Any) -> tuple[str, ...]:
    return entry if isinstance(entry, tuple) else (entry,) if entry else ()
