# SPDX-License-Identifier: Apache-2.0
"""Meshes: device order, group shapes of the paper, refusals."""

import jax
import numpy as np
import pytest

from meshes.mesh import AXES, TENSOR, MeshShape, coordinates, make_mesh, shape_of


def test_mesh_keeps_device_order_and_all_axes() -> None:
    shape = MeshShape(data=2, tensor=2, tensor_micro=2)
    mesh = make_mesh(jax.devices(), shape)
    assert mesh.axis_names == AXES
    assert list(mesh.devices.flat) == jax.devices()
    assert shape_of(mesh) == shape


def test_device_count_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ValueError, match=r"3 \* 1 \* 1 \* 1 \* 2 \* 1 = 6 devices, but 8 were"):
        make_mesh(jax.devices(), MeshShape(data=3, tensor=2))


@pytest.mark.parametrize("size", [0, -1, 2.0, True])
def test_axis_sizes_are_positive_whole_numbers(size: object) -> None:
    with pytest.raises(ValueError, match="mesh axis tensor"):
        MeshShape(tensor=size)  # pyright: ignore[reportArgumentType]


def test_shards_over_some_axes() -> None:
    shape = MeshShape(data=2, fsdp=3, pipe=1, pipe_micro=2, tensor=5, tensor_micro=7)
    assert (shape.over(("data", "fsdp")), shape.over(("pipe_micro", "tensor_micro"))) == (6, 14)


def _groups(shape: MeshShape, *axes: str) -> set[tuple[int, ...]]:
    """Ranks (counted from 1, as in the paper) that differ only along `axes`."""
    place = coordinates(shape)
    fixed = [i for i, axis in enumerate(AXES) if axis not in axes]
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, where in enumerate(place):
        groups.setdefault(tuple(where[fixed]), []).append(rank + 1)
    return {tuple(group) for group in groups.values()}


def test_groups_of_figure_8b() -> None:
    # HybridFlow figure 8(b): 8 devices, train 1-4-2, generate 1-2-2-2.
    shape = MeshShape(data=2, tensor=2, tensor_micro=2)
    assert _groups(shape, TENSOR) == {(1, 3), (2, 4), (5, 7), (6, 8)}
    assert _groups(shape, "tensor_micro") == {(1, 2), (3, 4), (5, 6), (7, 8)}
    assert _groups(shape, TENSOR, "tensor_micro") == {(1, 2, 3, 4), (5, 6, 7, 8)}
    assert _groups(shape, "data") == {(1, 5), (2, 6), (3, 7), (4, 8)}


def test_coordinates_match_the_mesh() -> None:
    shape = MeshShape(data=2, fsdp=2, tensor_micro=2)
    mesh = make_mesh(jax.devices(), shape)
    for device, where in zip(jax.devices(), coordinates(shape), strict=True):
        assert mesh.devices[tuple(where)] == device
    assert np.unique(coordinates(shape), axis=0).shape == (8, 6)
