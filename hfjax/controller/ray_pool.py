# SPDX-License-Identifier: Apache-2.0
"""Resource pools as Ray actors, one SPMD process each; Ray is imported when a runtime is made."""

import importlib
import logging
import os
import random
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

from hfjax.controller import loopback, probe, processes, reaper
from hfjax.controller.pool import InputLost, Pool, ProcessDied
from hfjax.controller.processes import account, own_sigterm, within
from hfjax.controller.resources import bundle_of, check_feasible, request, total
from hfjax.controller.worker import (
    LATER_S,
    Call,
    CallInfo,
    RoleError,
    Worker,
    join,
    worker_environment,
)
from meshes import placement as spec

RESERVE_TIMEOUT_S = 20  # for the placement group: others may hold what the cluster has
PROBE_TIMEOUT_S = 3
KILL_TIMEOUT_S = 5
CLOSE_TIMEOUT_S = 20  # for Ray to end its processes
COORDINATOR_PORTS = range(20_000, 32_768)  # above those of Ray's workers, below ephemeral ones


class RayProcess:
    """The body of a pool's actor; it becomes an SPMD process when it joins."""

    def hello(self) -> dict[str, Any]:
        """Where this process is and how to reach it."""
        import ray

        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent to all of a job: the driver decides
        address = ray.util.get_node_ip_address()
        self.reserved = reserve_port(address)
        return {
            "address": address,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "space": processes.space(),
            "probe": probe.listen(address),
            "coordinator": f"{address}:{self.reserved.getsockname()[1]}",
        }

    def join(self, pool: str, **world: Any) -> None:
        self.reserved.close()
        loopback.bind_here(world["coordinator"])
        devices = join(**world)
        rank, processes = world["rank"], world["processes"]
        limit_s = int(world["deadline_s"]) + LATER_S if world["platform"] == "cpu" else 0
        self.worker = Worker(
            pool, devices, rank=rank, processes=processes, local=False, limit_s=limit_s
        )

    def build(self, role: str, builder: bytes, placement: Any) -> CallInfo:
        def unpacked(context: Any) -> Any:  # so that a builder that cannot load names its role
            from ray import cloudpickle

            return cloudpickle.loads(builder)(context)

        return self.worker.build(role, unpacked, placement)

    def call(self, call: Call, *values: Any) -> Any:
        result = self.worker.call(call, *values)
        return result if call.writes else result[0]


def reserve_port(address: str = "") -> socket.socket:
    """A bound socket for the coordinator: JAX dies of SIGSEGV when its port is taken meanwhile.

    It lies below the ports that outgoing connections use, which change hands at any time.
    """
    for port in random.sample(COORDINATOR_PORTS, 100):
        reserved = socket.socket()
        try:
            reserved.bind((address, port))
        except OSError:
            reserved.close()
            continue
        return reserved
    raise RuntimeError(f"no free port among 100 tried in {COORDINATOR_PORTS}")


class RayPool:
    """A pool whose processes are Ray actors, in rank order."""

    here = False

    def __init__(self, name: str, actors: Sequence[Any], hellos: Sequence[dict[str, Any]]) -> None:
        self.name, self.processes = name, len(actors)
        self.actors, self.hellos = actors, hellos
        self.hosts = [hello["host"] for hello in hellos]

    def build(self, role: str, builder: Callable[..., Any], placement: Any) -> list[Any]:
        packed = _packed(builder)
        return [actor.build.remote(role, packed, placement) for actor in self.actors]

    def call(self, calls: Sequence[tuple[Call, Sequence[Any]]]) -> list[list[Any]]:
        refs = []
        for actor, (call, values) in zip(self.actors, calls, strict=True):
            count = len(call.writes) + 1
            result = actor.call.options(num_returns=count).remote(call, *values)
            refs.append([result] if count == 1 else list(result))
        return refs

    def probe(self, rank: int) -> str | None:
        hello = self.hellos[rank]
        return probe.ask(hello["address"], hello["probe"], PROBE_TIMEOUT_S)


class RayRuntime:
    """Pools as Ray actors, all reserved together; until it closes, this process's JAX is CPU only.

    JAX_PLATFORMS is put back then; a JAX that was first imported meanwhile stays on the CPU.
    Uses the session that is open, else the cluster at RAY_ADDRESS, else a private one on this
    host. `platform` None takes GPUs where the cluster has any.
    """

    def __init__(
        self,
        platform: str | None = None,
        *,
        deadline_s: float = 1800.0,
        start_deadline_s: float = 180.0,
        log_to_driver: bool = True,
    ) -> None:
        """`deadline_s` bounds values on their way, `start_deadline_s` the processes' start."""
        self.platform, self.log_to_driver = platform, log_to_driver
        self.deadline_s, self.start_deadline_s = deadline_s, start_deadline_s
        self.pools: dict[str, RayPool] = {}
        self._actors: list[Any] = []
        self._hellos: list[dict[str, Any]] = []
        self._group: Any = None
        self._owns_session = False
        self._started: dict[int, str] = {}  # Ray's own processes, of a session of its own
        self._reaper: Any = None  # of such a session
        self._session = ExitStack()  # ends after it
        self._scope = ExitStack()
        self._scope.enter_context(_cpu_only())

    def open(self, pools: Sequence[spec.Pool]) -> dict[str, Pool]:
        self._session.enter_context(loopback.staying_here())
        import ray

        if not ray.is_initialized():
            self._init(sum(pool.processes for pool in pools))
        if self.platform is None:
            self.platform = "gpu" if ray.cluster_resources().get("GPU") else "cpu"
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        check_feasible(pools, self.platform, nodes)
        self._reserve(pools)
        bundle = 0
        for pool in pools:
            self._actors += [self._actor(pool, bundle + index) for index in range(pool.processes)]
            bundle += pool.processes
        greetings = [actor.hello.remote() for actor in self._actors]
        self._hellos = self._wait("start", pools, greetings)
        self._join(pools)
        return dict(self.pools)

    def ready(self, refs: Sequence[Any], timeout_s: float) -> list[bool]:
        """Which refs are done; waits up to `timeout_s` for the first to be."""
        import ray

        for pid, name in self._started.items():
            if name in processes.DAEMONS and not processes.alive(pid):
                raise ProcessDied(f"Ray's {name} on this host (pid {pid}) is gone")
        remote = list(dict.fromkeys(ref for ref in refs if isinstance(ref, ray.ObjectRef)))
        if not remote:
            return [True] * len(refs)
        timeout_s = timeout_s if all(isinstance(ref, ray.ObjectRef) for ref in refs) else 0
        ray.wait(remote, num_returns=1, timeout=timeout_s, fetch_local=False)
        done, _ = ray.wait(remote, num_returns=len(remote), timeout=0, fetch_local=False)
        finished = set(done)
        return [not isinstance(ref, ray.ObjectRef) or ref in finished for ref in refs]

    def get(self, refs: Sequence[Any]) -> list[Any]:
        """Values of refs that are ready; raises the worker's own RoleError, or ProcessDied."""
        import ray
        from ray import exceptions

        remote = [ref for ref in refs if isinstance(ref, ray.ObjectRef)]
        try:
            values = iter(ray.get(remote, timeout=self.deadline_s))
        except exceptions.RayTaskError as error:
            if isinstance(error.cause, exceptions.RayError):
                raise InputLost(account(str(error))) from None
            raise (error.cause if isinstance(error.cause, RoleError) else error) from None
        except exceptions.GetTimeoutError:
            message = f"its result did not arrive within deadline_s={self.deadline_s:g}"
            raise ProcessDied(message) from None
        except exceptions.RayError as error:  # of an actor, a node, an object, or out of memory
            raise ProcessDied(account(str(error))) from None
        return [next(values) if isinstance(ref, ray.ObjectRef) else ref for ref in refs]

    def share(self, value: Any) -> Any:
        import ray

        return ray.put(value)

    def close(self) -> None:
        """Ends every process of every pool and gives the reservation back."""
        self._scope.close()
        within(CLOSE_TIMEOUT_S, self._end_actors)
        space = processes.space()
        here = [hello["pid"] for hello in self._hellos if hello["space"] == space]
        processes.end(here, KILL_TIMEOUT_S)
        self.pools, self._actors, self._hellos, self._group = {}, [], [], None
        if self._owns_session:
            self._owns_session = False
            self._end_session()
        self._session.close()

    def _end_session(self) -> None:
        """Also where it is too broken to end itself: the next one must not join it."""
        import ray

        started, self._started = self._started, {}
        # None heeds SIGTERM, and Ray waits a second for each in turn.
        processes.end([p for p, name in started.items() if name not in processes.DAEMONS], 0)
        within(CLOSE_TIMEOUT_S, ray.shutdown)
        processes.end(started.keys() & processes.children(os.getpid()).keys(), 0)
        self._reap()
        if ray.is_initialized():
            within(CLOSE_TIMEOUT_S, ray.shutdown)

    def _reap(self) -> None:
        """Also where the session did not begin."""
        if self._reaper:
            within(CLOSE_TIMEOUT_S, partial(reaper.finish, self._reaper))
            self._reaper = None

    def _end_actors(self) -> None:
        """A session of the run's own ends with its reservations."""
        import ray

        if not ray.is_initialized():
            return
        for actor in self._actors:
            ray.kill(actor)
        if self._group is not None and not self._owns_session:
            ray.util.remove_placement_group(self._group)

    def _init(self, cpus: int) -> None:
        import ray

        # A failure is reported once, by the driver, not again when its refs are dropped.
        os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
        # Ray's default of 15 starves the workers wherever anything else runs.
        os.environ.setdefault("RAY_worker_niceness", "0")
        address = os.environ.get("RAY_ADDRESS") or "local"
        package = os.path.dirname(ray.__file__)
        before = processes.children(os.getpid(), package)
        if address == "local" and sys.platform == "linux":
            self._reaper = reaper.start()
            self._session.callback(self._reap)
        with own_sigterm():
            ray.init(
                address=address,
                num_cpus=cpus if address == "local" else None,
                include_dashboard=False if address == "local" else None,
                namespace=f"hfjax-{uuid.uuid4().hex}",
                log_to_driver=self.log_to_driver,
                logging_level=logging.ERROR,
            )
        self._owns_session = True
        if address == "local":
            now = processes.children(os.getpid(), package)
            self._started = {pid: name for pid, name in now.items() if pid not in before}

    def _reserve(self, pools: Sequence[spec.Pool]) -> None:
        import ray

        platform = str(self.platform)
        bundles = [bundle_of(pool, platform) for pool in pools for _ in range(pool.processes)]
        self._group = ray.util.placement_group(bundles, strategy="PACK")
        limit_s = min(RESERVE_TIMEOUT_S, self.start_deadline_s)
        if not self._group.wait(limit_s):
            free = {k: v for k, v in ray.available_resources().items() if k in ("CPU", "GPU")}
            raise ValueError(
                f"{request(pools, platform)}: not free within {limit_s:g} s; the cluster "
                f"has {total(ray.cluster_resources())}, now available {total(free)}; "
                "end other jobs or give the pools less"
            )

    def _actor(self, pool: spec.Pool, bundle: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        platform = str(self.platform)
        devices = pool.devices // pool.processes
        actor = ray.remote(RayProcess).options(
            num_cpus=1,
            num_gpus=devices if platform == "gpu" else 0,
            max_restarts=0,
            max_task_retries=0,
            runtime_env={
                "env_vars": _python_path()
                | worker_environment(platform, devices, deadline_s=self.deadline_s)
            },
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle
            ),
        )
        return actor.remote()

    def _join(self, pools: Sequence[spec.Pool]) -> None:
        """Gives ranks, neighbours on one host next to each other, and makes the worlds."""
        hellos, joins, start = self._hellos, [], 0
        for pool in pools:
            members = range(start, start + pool.processes)
            order = sorted(members, key=lambda i: (hellos[i]["address"], i))
            mine = [hellos[i] for i in order]
            self.pools[pool.name] = RayPool(pool.name, [self._actors[i] for i in order], mine)
            joins += [
                actor.join.remote(
                    pool.name,
                    platform=self.platform,
                    devices=pool.devices // pool.processes,
                    rank=rank,
                    processes=pool.processes,
                    coordinator=mine[0]["coordinator"],
                    deadline_s=self.deadline_s,
                    start_deadline_s=self.start_deadline_s,
                )
                for rank, actor in enumerate(self.pools[pool.name].actors)
            ]
            start += pool.processes
        self._wait("join", pools, joins)

    def _wait(self, what: str, pools: Sequence[spec.Pool], refs: list[Any]) -> list[Any]:
        """Values of a call to every process, in the pools' order; an error says which it was."""
        import ray
        from ray import exceptions

        hosts = [f" on host {host}" for pool in self.pools.values() for host in pool.hosts]
        hosts = hosts or [""] * len(refs)  # not known yet
        ranks = [f"rank {r} of pool {p.name!r}" for p in pools for r in range(p.processes)]
        limit_s = self.start_deadline_s
        ends_s = time.monotonic() + limit_s
        waiting = dict(zip(refs, map("".join, zip(ranks, hosts, strict=True)), strict=True))
        while waiting:
            left_s = max(0.0, ends_s - time.monotonic())
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=left_s)
            if not done:
                late = ", ".join(waiting.values())
                raise RoleError(
                    f"{late}: did not {what} within start_deadline_s={limit_s:g}; "
                    "raise it, or look at what holds that host up"
                )
            try:
                self.get(done)
            except exceptions.RayTaskError as error:
                told = f"{type(error.cause).__name__}: {error.cause}\n\n{error}"
                raise RoleError(f"{waiting[done[0]]}: did not {what}: {told}") from None
            except ProcessDied as error:
                raise RoleError(f"{waiting[done[0]]}: did not {what}: {error}") from None
            del waiting[done[0]]
        return self.get(refs)


@contextmanager
def _cpu_only() -> Iterator[None]:
    """JAX of this process, and of those that it starts, sees no accelerator."""
    jax, before = sys.modules.get("jax"), os.environ.get("JAX_PLATFORMS")
    configured = jax.config.jax_platforms if jax else None
    os.environ["JAX_PLATFORMS"] = "cpu"
    if jax:
        jax.config.update("jax_platforms", "cpu")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("JAX_PLATFORMS", None)
        else:
            os.environ["JAX_PLATFORMS"] = before
        if jax:
            jax.config.update("jax_platforms", configured)


def _python_path() -> dict[str, str]:
    """Lets workers import what the driver can: paths that are not part of the Python they share."""
    shared = tuple(os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix))
    paths = [os.path.abspath(path) for path in sys.path]
    own = [path for path in paths if not os.path.realpath(path).startswith(shared)]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(own))}


def _packed(builder: Callable[..., Any]) -> bytes:
    """A builder for another process; code that workers cannot import travels by value."""
    cloudpickle: Any = importlib.import_module("ray.cloudpickle")  # its stubs hide dumps
    modules = {module for module in _modules(builder) if not _importable(module)}
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(builder)
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _modules(value: Any) -> Iterator[ModuleType]:
    """Modules of a builder, of its arguments, and of theirs where they are partials."""
    if isinstance(value, partial):
        for part in (value.func, *value.args, *value.keywords.values()):
            yield from _modules(part)
        return
    name = value.__module__ if callable(value) else type(value).__module__
    if name in sys.modules and name != "__main__":
        yield sys.modules[name]


def _importable(module: ModuleType) -> bool:
    """Whether an import in another process with the same path gives this very module."""
    top = module.__name__.partition(".")[0]
    if top in sys.builtin_module_names:
        return True
    found = PathFinder.find_spec(top)
    return found is not None and (
        found.submodule_search_locations is not None or found.origin == module.__file__
    )
