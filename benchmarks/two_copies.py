# SPDX-License-Identifier: Apache-2.0
"""Weights from one half of the devices to the other, which generates: two copies, in seconds."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from benchmarks.figure14 import Setup
from hfjax.engine.exchange import Exchange, Side
from hfjax.models.llama import abstract_params, init_params
from meshes.layouts import TWO_COPIES, generate_layout, shardings, train_layout
from meshes.mesh import MeshShape, make_mesh
from meshes.placement import Placement, Pool, RolePlacement

Values = list[list[np.ndarray]]  # arrays of each parcel


def two_pools(setup: Setup, devices: int, processes: int) -> Placement:
    """The actor on half of the devices, tensor parallel; its second copy on the others."""
    half = devices // 2
    train = MeshShape(data=half // setup.t, tensor=setup.t)
    where: Any = {"generate_pool": "rollout", "relay": TWO_COPIES}
    keep = MeshShape(pipe=setup.p_g, tensor=setup.t_g)
    actor = RolePlacement("actor", "policy", train=train, generate=keep, **where)
    each = max(1, processes // 2)
    return Placement({n: Pool(n, half, each) for n in ("policy", "rollout")}, {"actor": actor})


class Sender:
    """Sends all weights from pool to pool; `folder` lies in memory that the processes share.

    Between processes the parcels are files there, as Ray's object store on one host has them.
    """

    def __init__(self, setup: Setup, devices: int, processes: int, folder: Path) -> None:
        placement = two_pools(setup, devices, processes)
        trains, generates = placement.roles["actor"], placement.rollout("actor")
        assert generates is not None
        shapes = trains.mesh_shape, generates.mesh_shape
        options: Any = {"kv_heads": setup.cfg.kv_heads}
        layouts = train_layout(shapes[0], **options), generate_layout(shapes[1], **options)
        parameters, axes = abstract_params(setup.cfg, "lm")

        def exchange(*counts: int) -> Exchange:
            sides = [Side(*side) for side in zip(shapes, layouts, counts, strict=True)]
            return Exchange(sides[0], sides[1], (parameters, parameters), axes, jnp.float32)

        each, half = placement.pools["policy"].processes, devices // 2
        self.exchange = exchange(each, each)
        self.received = received(exchange(1, half), half)
        groups = jax.devices()[:half], jax.devices()[half:devices]
        meshes = list(map(make_mesh, groups, shapes))
        before, after = map(partial(shardings, axes_tree=axes), meshes, layouts)
        rank = jax.process_index()
        self.writer = rank if rank < each else None
        self.reader = rank - processes + each if rank >= processes - each else None
        self.folder = folder if processes > 1 else None
        self.targets: list[Any] = jax.tree.leaves(after)
        self.arrays: dict[int, jax.Array] = {}
        if self.writer is not None:
            self.weights = init_params(setup.cfg, "lm", jax.random.key(0), before)

    def round(self) -> tuple[float, float]:
        """Seconds there; nothing goes back, the training copy stayed."""
        multihost_utils.sync_global_devices("round")
        start_s = time.perf_counter()
        for bucket in range(len(self.exchange.buckets)):
            sent: Values = []
            if self.writer is not None:
                sent = self.exchange.pack(bucket, self.writer, self.weights)
            values = self._through_files(bucket, sent) if self.folder else sent
            if self.reader is not None:
                where = (self.reader, values, self.targets, self.arrays)
                self.exchange.unpack(bucket, *where)
        jax.block_until_ready(self.arrays)
        multihost_utils.sync_global_devices("arrived")
        return time.perf_counter() - start_s, 0.0

    def _through_files(self, bucket: int, sent: Values) -> Values:
        """Writes what this process sends; what it reads, when all have written."""
        assert self.folder is not None
        parcels = list(enumerate(self.exchange.buckets[bucket]))
        mine = [k for k, parcel in parcels if parcel.writer == self.writer]
        for k, arrays in zip(mine, sent, strict=True):
            for index, array in enumerate(arrays):
                np.save(self.folder / f"{bucket}-{k}-{index}.npy", array)
        multihost_utils.sync_global_devices("written")
        return [
            [
                np.load(self.folder / f"{bucket}-{k}-{index}.npy", mmap_mode="r")
                for index in range(len(parcel.pieces))
            ]
            for k, parcel in parcels
            if self.reader in parcel.readers
        ]


def received(exchange: Exchange, devices: int) -> int:
    """Bytes of the device that receives most; every reader of the exchange is a device."""
    buckets = range(len(exchange.buckets))
    return max(
        sum(exchange.nbytes(exchange.parcels(bucket, reader=device)) for bucket in buckets)
        for device in range(devices)
    )
