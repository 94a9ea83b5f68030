# SPDX-License-Identifier: Apache-2.0
"""The set-ups of HybridFlow's figure 14 on simulated devices, and processes that hold them."""

import argparse
import math
import os
import platform
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding

from hfjax.controller.worker import join
from hfjax.engine.hybrid import Relay
from hfjax.models.llama import ModelConfig, Params, abstract_params
from hfjax.models.shapes import SHAPES
from meshes.layouts import (
    DS_CHAT,
    HYBRID_V,
    HYBRID_V_PERMUTE,
    either,
    generate_layout,
    train_layout,
)
from meshes.mesh import MeshShape, make_mesh
from meshes.placement import RolePlacement

DEADLINE_S = 900  # of one child
HALF = jnp.float16  # stands for bfloat16, which XLA's CPU compiler would move as float32
PROCESS_FLAGS = ("--own", "--rank", "--port")  # of a child: its devices, its place, the meeting


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A model and its groups: p-t-d to train, p_g-t_g to generate; d is what devices leave."""

    cfg: ModelConfig
    p: int
    t: int
    p_g: int
    t_g: int
    devices: tuple[int, ...]  # cluster sizes

    def placed(self, devices: int, mode: str) -> RolePlacement:
        """The actor on `devices`; under ds-chat ZeRO-3 takes the place of p-t-d."""
        d, rest = divmod(devices, self.p * self.t)
        if rest:
            raise ValueError(
                f"devices={devices} is no multiple of p t = {self.p} * {self.t}; "
                f"use devices {either(self.devices)}"
            )
        train = MeshShape(data=d, pipe=self.p, tensor=self.t)
        train = MeshShape(fsdp=devices) if mode == DS_CHAT else train
        generate = MeshShape(pipe=self.p_g, tensor=self.t_g)
        return RolePlacement("actor", "all", train=train, generate=generate, relay=mode)


# Figure 14 gives p, t, p_g, t_g; not the cluster sizes: powers of two from the fewest GPUs that
# figures 9 to 12 show and p t divides. Its 34B model is not named: CodeLlama's shape.
SETUPS = {
    "7b": Setup(cfg=SHAPES["llama2-7b"], p=1, t=8, p_g=1, t_g=2, devices=(8, 16, 32, 64, 128)),
    "13b": Setup(cfg=SHAPES["llama2-13b"], p=1, t=8, p_g=1, t_g=4, devices=(16, 32, 64, 128)),
    "34b": Setup(cfg=SHAPES["codellama-34b"], p=4, t=8, p_g=1, t_g=8, devices=(32, 64, 128)),
    "70b": Setup(cfg=SHAPES["llama2-70b"], p=8, t=8, p_g=1, t_g=8, devices=(64, 128)),
}


class Rig:
    """One mode of a setup on the first devices, and relays of any part of its parameters."""

    def __init__(self, setup: Setup, devices: int, mode: str, dtype: Any) -> None:
        self.cfg, self.mode, self.dtype = setup.cfg, mode, dtype
        self.placement = setup.placed(devices, mode)
        shape = self.placement.mesh_shape
        self.mesh = make_mesh(jax.devices()[: shape.devices], shape)
        options: Any = {"kv_heads": setup.cfg.kv_heads, "relay": mode}
        self.before, self.after = train_layout(shape, **options), generate_layout(shape, **options)
        shapes, axes = abstract_params(setup.cfg, "lm", dtype)
        self.shapes: dict[Any, Any] = dict(flatten_dict(shapes))
        self.axes: dict[Any, Any] = dict(flatten_dict(axes))
        self.train, self.generate = (
            {name: NamedSharding(self.mesh, layout.spec(self.axes[name])) for name in self.axes}
            for layout in (self.before, self.after)
        )

    def relay(self, names: Sequence[Any]) -> Relay:
        """As the actor makes it, of these parameters."""
        shapes, axes = ({name: tree[name] for name in names} for tree in (self.shapes, self.axes))
        options = {"by_compiler": self.mode == HYBRID_V_PERMUTE, "whole": self.mode == HYBRID_V}
        return Relay(self.mesh, self.before, self.after, shapes, axes, self.dtype, **options)

    def abstract(self, names: Sequence[Any]) -> Params:
        """Training weights without arrays."""
        return {
            name: jax.ShapeDtypeStruct(
                self.shapes[name].shape, self.dtype, sharding=self.train[name]
            )
            for name in names
        }

    def compiled(self, names: Sequence[Any]) -> list[jax.stages.Compiled]:
        """The relay's programs, a bucket each."""
        return [one.compile() for one in self.relay(names).lowered(self.abstract(names))]

    def matrices(self) -> list[Any]:
        """What Table 2 speaks of: parameters of layers that every changing axis shards."""
        place = self.placement
        wanted = (place.base.fsdp * place.base.pipe * place.base.tensor, place.p_g * place.t_g)
        sides = (self.train, self.generate)
        return [
            name
            for name, leaf in self.shapes.items()
            if name[0] == "layers"
            and tuple(leaf.size // elements(side[name], leaf) for side in sides) == wanted
        ]

    def bytes(self, sharding: Mapping[Any, NamedSharding], names: Sequence[Any]) -> int:
        """A device's shards of these parameters."""
        itemsize = jnp.dtype(self.dtype).itemsize
        return sum(elements(sharding[name], self.shapes[name]) for name in names) * itemsize

    def redundant_bytes(self, names: Sequence[Any]) -> int:
        """Training shards that reach out of their device's generation shard: the worst device."""
        outside: Counter[jax.Device] = Counter()
        for name in names:
            shape = self.shapes[name].shape
            after = self.generate[name].devices_indices_map(shape)
            size = self.bytes(self.train, [name])
            for device, index in self.train[name].devices_indices_map(shape).items():
                outside[device] += 0 if lies_in(index, after[device], shape) else size
        return max(outside.values(), default=0)


def elements(sharding: NamedSharding, leaf: Any) -> int:
    """Of one shard."""
    return math.prod(sharding.shard_shape(leaf.shape))


def lies_in(inner: Sequence[slice], outer: Sequence[slice], shape: Sequence[int]) -> bool:
    """Whether one device's part of an array is within another."""
    found = zip(inner, outer, shape, strict=True)
    ranges = ((i.indices(size), o.indices(size)) for i, o, size in found)
    return all(o[0] <= i[0] and i[1] <= o[1] for i, o in ranges)


def children(module: str, arguments: Sequence[str], devices: int, processes: int = 1) -> str:
    """What rank 0 of `processes` processes prints, each with its share of simulated devices."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", module, *arguments]
    own = ["--own", str(devices // processes), "--port", str(port), "--processes", str(processes)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        started = [
            subprocess.Popen(
                [*command, *own, "--rank", str(rank)],
                stdout=out if rank == 0 else subprocess.DEVNULL,
                stderr=errors,
            )
            for rank in range(processes)
        ]
        try:
            codes = [each.wait(timeout=DEADLINE_S) for each in started]
        finally:
            for each in started:
                each.kill()
        out.seek(0)
        errors.seek(0)
        if any(codes):
            what = " ".join(arguments)
            raise RuntimeError(f"{what}: exit status {codes}\n{errors.read()[-4000:]}")
        return "".join(line for line in out if not line.startswith("[Gloo]"))


def joined(options: argparse.Namespace) -> bool:
    """Whether this process is one of `children`; its devices are then there."""
    if options.own:
        where = f"localhost:{options.port}"
        ranks = {"rank": options.rank, "processes": options.processes}
        join(platform="cpu", devices=options.own, coordinator=where, **ranks)
    return bool(options.own)


def host() -> str:
    """Where the numbers were made."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("jax", "jaxlib", "flax"))
    return f"{platform.machine()} CPU with {os.cpu_count()} cores; {versions}"
