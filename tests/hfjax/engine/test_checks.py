# SPDX-License-Identifier: Apache-2.0
"""One bit on one device is found and named, whatever the layout; nothing else is."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfjax.engine.checks import CHANGED, DIFFERS, NOT_FINITE, Check, Fault
from meshes.layouts import replicated, shardings, train_layout
from meshes.mesh import MeshShape, make_mesh
from tests.fixtures import damaged

AXES = {"norm": ("layers", "norm"), "w_up": ("layers", "embed", "mlp")}
TWO, MIXED = MeshShape(data=2), MeshShape(data=2, fsdp=2, tensor=2)
Change = Callable[[np.ndarray], None]


def placed(shape: MeshShape) -> tuple[Any, Any]:
    """Weights of two dtypes and a counter on a mesh, and their shardings."""
    mesh = make_mesh(jax.devices()[: shape.devices], shape)
    where = shardings(mesh, train_layout(shape, kv_heads=4), AXES) | {"updates": replicated(mesh)}
    rng = np.random.default_rng(0)
    tree = {
        "norm": rng.standard_normal((2, 40)).astype(jnp.bfloat16),
        "w_up": rng.standard_normal((2, 40, 56)).astype(np.float32),
        "updates": np.int32(7),
    }
    return jax.device_put(tree, where), where


def checked(shape: MeshShape, *changes: tuple[str, int, Change], **options: Any) -> list[Fault]:
    """What a check says of weights after these changes, each of one array on one device."""
    tree, where = placed(shape)
    check = Check(where["norm"].mesh, where, **options)
    assert check(tree) == []
    for name, device, change in changes:
        tree[name] = damaged(tree[name], device, change)
    found = check(tree)
    assert check(tree) == found
    return found


def flip(bit: int) -> Change:
    """One bit of the last value."""

    def change(values: np.ndarray) -> None:
        values.reshape(-1)[-1:].view(f"u{values.itemsize}")[0] ^= 1 << bit

    return change


def swap(values: np.ndarray) -> None:
    """Two neighbours."""
    flat = values.reshape(-1)
    flat[[3, 4]] = flat[[4, 3]]


def negate_two(values: np.ndarray) -> None:
    """Two sign bits, whose sum is the same."""
    values.reshape(-1)[[3, 4]] *= -1


def fill(value: float) -> Change:
    """One number anywhere."""

    def change(values: np.ndarray) -> None:
        values.reshape(-1)[5] = value

    return change


def on(*devices: int) -> tuple[tuple[int, str], ...]:
    return tuple((0, str(jax.devices()[device])) for device in devices)


@pytest.mark.parametrize("change", [flip(0), flip(31), swap, negate_two])
@pytest.mark.parametrize("device", [0, 5])
def test_the_device_that_differs_from_a_majority_is_named(change: Change, device: int) -> None:
    found = checked(MeshShape(data=8), ("w_up", device, change))
    assert found == [Fault(DIFFERS, "w_up", on(device), others=7)]


def test_of_two_that_differ_both_are_named() -> None:
    """Where fsdp and tensor cut an array in four, a part is on two devices of eight."""
    assert checked(TWO, ("w_up", 1, flip(7))) == [Fault(DIFFERS, "w_up", on(0, 1))]
    assert checked(MIXED, ("w_up", 6, flip(7))) == [Fault(DIFFERS, "w_up", on(2, 6))]
    assert checked(MIXED, ("norm", 6, flip(7))) == [Fault(DIFFERS, "norm", on(6), others=7)]
    assert checked(MIXED, ("updates", 0, flip(0))) == [Fault(DIFFERS, "updates", on(0), others=7)]


def test_parts_of_one_array_are_not_compared_with_one_another() -> None:
    shape = MeshShape(fsdp=4, tensor=2)
    assert checked(shape, ("w_up", 3, flip(7))) == []
    assert checked(shape, ("norm", 3, flip(7))) == [Fault(DIFFERS, "norm", on(3), others=7)]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["norm", "w_up"])
def test_what_is_not_finite_is_found_on_the_device_that_holds_it(name: str, value: float) -> None:
    both = [(name, device, fill(value)) for device in (0, 1)]
    assert checked(TWO, *both) == [Fault(NOT_FINITE, name, on(0, 1))]
    assert checked(MeshShape(), both[0]) == [Fault(NOT_FINITE, name, on(0))]
    assert checked(TWO, both[1]) == [
        Fault(DIFFERS, name, on(0, 1)),
        Fault(NOT_FINITE, name, on(1)),
    ]


def test_frozen_arrays_must_stay_what_they_were() -> None:
    """So one device is enough to find a flipped bit, and two to say which of them is wrong."""
    assert checked(MeshShape(), ("w_up", 0, flip(7))) == []
    found = checked(MeshShape(), ("w_up", 0, flip(7)), frozen=True)
    assert found == [Fault(CHANGED, "w_up", on(0))]
    assert checked(TWO, ("w_up", 1, flip(7)), frozen=True) == [Fault(CHANGED, "w_up", on(1))]
