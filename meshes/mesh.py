# SPDX-License-Identifier: Apache-2.0
"""One device mesh a pool, its axes split so that training and generation are sub-products of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

DATA = "data"
FSDP = "fsdp"
PIPE = "pipe"  # p_g: the half of p that generation keeps
PIPE_MICRO = "pipe_micro"  # p / p_g: the half it gives to the batch
TENSOR = "tensor"  # t_g
TENSOR_MICRO = "tensor_micro"  # t / t_g
AXES = (DATA, FSDP, PIPE, PIPE_MICRO, TENSOR, TENSOR_MICRO)  # outer to inner


@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Sizes of the six axes; pipe * pipe_micro is the paper's p, tensor * tensor_micro its t."""

    data: int = 1
    fsdp: int = 1
    pipe: int = 1
    pipe_micro: int = 1
    tensor: int = 1
    tensor_micro: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if type(size) is not int or size < 1:
                raise ValueError(
                    f"mesh axis {field.name} = {size!r}: must be a whole number, 1 or more"
                )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Axis sizes in the order of AXES."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def devices(self) -> int:
        return math.prod(self.sizes)

    def over(self, axes: Sequence[str]) -> int:
        """Devices along `axes`: the shards of what is split over them."""
        return math.prod(getattr(self, axis) for axis in axes)

    def __str__(self) -> str:
        parts = [f"{axis} {size}" for axis, size in zip(AXES, self.sizes, strict=True) if size > 1]
        return " x ".join(parts) or "1 device"


def make_mesh(devices: Sequence[jax.Device], shape: MeshShape) -> Mesh:
    """The mesh of `shape` over `devices` in the order given; all six axes are always present."""
    if len(devices) != shape.devices:
        product = " * ".join(map(str, shape.sizes))
        raise ValueError(
            f"mesh {' * '.join(AXES)} = {product} = {shape.devices} devices, but {len(devices)} "
            f"were given; choose sizes whose product is {len(devices)}"
        )
    grid = np.empty(len(devices), dtype=object)
    grid[:] = list(devices)
    return Mesh(grid.reshape(shape.sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def shape_of(mesh: Mesh) -> MeshShape:
    """The MeshShape a mesh was made from."""
    return MeshShape(**{axis: mesh.shape[axis] for axis in AXES})


def coordinates(shape: MeshShape) -> np.ndarray:
    """Mesh coordinates of each device, (devices, 6), row-major.

    Process i of k a process owns rows [i*k, (i+1)*k).
    """
    return np.stack(np.unravel_index(np.arange(shape.devices), shape.sizes), axis=-1)
