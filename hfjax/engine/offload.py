# SPDX-License-Identifier: Apache-2.0
"""Arrays that rest in host memory between the calls that need them."""

from typing import Any

import jax

HOST = "pinned_host"  # XLA's name of page-locked host memory; on CPU it is apart from `device` too
DEVICE = "device"


def to_host(tree: Any) -> Any:
    """The same arrays in host memory, sharded as they were; those on the devices are deleted."""
    return _moved(tree, HOST)


def to_device(tree: Any) -> Any:
    """The arrays back on their devices; those in host memory are deleted."""
    return _moved(tree, DEVICE)


def _moved(tree: Any, kind: str) -> Any:
    def there(x: jax.Array) -> Any:
        return x.sharding.with_memory_kind(kind)

    leaves, treedef = jax.tree.flatten(tree)
    away = [x for x in leaves if x.sharding.memory_kind != kind]
    moved = iter(jax.block_until_ready(jax.device_put(away, [there(x) for x in away])))
    result = [x if x.sharding.memory_kind == kind else next(moved) for x in leaves]
    for x in away:
        x.delete()
    return treedef.unflatten(result)
