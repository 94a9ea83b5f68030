# SPDX-License-Identifier: Apache-2.0
"""Resource pools in this process, and what every runtime's pools can do.

A runtime makes all pools of a placement; a pool sends calls to its processes and gives refs at
once.
"""

import socket
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hfjax.controller.worker import Call, Worker
from meshes import placement as spec


class ProcessDied(RuntimeError):
    """A process of a pool is gone; the message is Ray's account of it."""


class InputLost(ProcessDied):
    """A call failed for want of what a process that is gone should have given it."""


class Pool(Protocol):
    """Processes that see the same calls in the same order; results are refs, one list each."""

    name: str
    processes: int
    hosts: list[str]  # of each rank
    here: bool  # its process is the controller's

    def build(self, role: str, builder: Callable[..., Any], placement: Any) -> list[Any]: ...

    def call(self, calls: Sequence[tuple[Call, Sequence[Any]]]) -> list[list[Any]]: ...

    def probe(self, rank: int) -> str | None: ...


class Runtime(Protocol):
    """Where pools live and how the driver waits for refs and reads them."""

    def open(self, pools: Sequence[spec.Pool]) -> dict[str, Pool]: ...

    def ready(self, refs: Sequence[Any], timeout_s: float) -> list[bool]: ...

    def get(self, refs: Sequence[Any]) -> list[Any]: ...

    def share(self, value: Any) -> Any: ...

    def close(self) -> None: ...


class LocalPool:
    """A pool in this process: calls run at once, refs are their values."""

    processes = 1
    here = True

    def __init__(self, name: str, devices: Sequence[Any] = ()) -> None:
        self.name, self.hosts = name, [socket.gethostname()]
        self.worker = Worker(name, devices)

    def build(self, role: str, builder: Callable[..., Any], placement: Any) -> list[Any]:
        return [self.worker.build(role, builder, placement)]

    def call(self, calls: Sequence[tuple[Call, Sequence[Any]]]) -> list[list[Any]]:
        return [list(self.worker.call(call, *values)) for call, values in calls]

    def probe(self, rank: int) -> str | None:
        return None


class LocalRuntime:
    """Pools as slices of this process's devices, for notebooks, debuggers and fast tests.

    Calls are synchronous, so no deadline can interrupt them, and errors pass through.
    """

    def __init__(self, platform: str | None = None) -> None:
        self.platform = platform  # that JAX must have here; None: whatever it has
        self.pools: dict[str, LocalPool] = {}

    def open(self, pools: Sequence[spec.Pool]) -> dict[str, Pool]:
        import jax

        asked, devices = sum(pool.devices for pool in pools), jax.devices()
        if self.platform not in (None, found := jax.default_backend()):
            raise ValueError(
                f"the placement says platform = '{self.platform}', JAX in this process is on "
                f"'{found}'; set JAX_PLATFORMS before JAX starts, or use runtime='ray'"
            )
        for pool in pools:
            if pool.processes > 1:
                raise ValueError(
                    f"[pool.{pool.name}] processes={pool.processes}: runtime 'local' has one "
                    "process; use processes=1 or runtime='ray'"
                )
        if asked > len(devices):
            named = ", ".join(f"{pool.name} {pool.devices}" for pool in pools)
            raise ValueError(
                f"pools ask for {asked} devices ({named}), this process has {len(devices)} "
                f"({devices[0].platform}); to simulate them set JAX_PLATFORMS=cpu "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={asked} before JAX starts"
            )
        start = 0
        for pool in pools:
            self.pools[pool.name] = LocalPool(pool.name, devices[start : start + pool.devices])
            start += pool.devices
        return dict(self.pools)

    def ready(self, refs: Sequence[Any], timeout_s: float) -> list[bool]:
        return [True] * len(refs)

    def get(self, refs: Sequence[Any]) -> list[Any]:
        return list(refs)

    def share(self, value: Any) -> Any:
        return value

    def close(self) -> None:
        for pool in self.pools.values():
            pool.worker.close()
        self.pools.clear()
