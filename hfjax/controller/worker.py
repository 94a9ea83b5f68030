# SPDX-License-Identifier: Apache-2.0
"""One SPMD process of a pool: the environment before JAX, its roles, and the calls they get.

This module does not import JAX at the top: platform and simulated devices are set before.
"""

import functools
import logging
import math
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hfjax.batch import Piece, assemble, frozen
from hfjax.controller.protocol import Answer, Shard

if TYPE_CHECKING:
    import jax

    from meshes.placement import RolePlacement

BUILD = "build"  # the method name under which errors and records show a role's construction
COUNT_FLAG = "--xla_force_host_platform_device_count"
PLATFORMS = {"cpu": "cpu", "gpu": "cuda,cpu"}  # platform -> JAX_PLATFORMS
MEETING = "hfjax call"  # one name for all: JAX keeps each that it was ever given
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
# How long a collective between CPU processes waits for a peer; JAX's own limits are 30 to 100 s.
COLLECTIVE_FLAGS = (
    "--xla_cpu_collective_timeout_seconds",
    "--xla_cpu_collective_call_terminate_timeout_seconds",
)
# Of malloc, read when a process starts: XLA asks for a program's arrays anew, and the kernel fills
# what it gives page by page. With pages of 2 MB an update on a CPU takes a sixth less time.
HUGE_PAGES = "glibc.malloc.hugetlb"
PROGRAMS_BYTES = 4 << 30  # of compiled programs, the longest unused go first
KEPT_S = 0.1  # what was compiled faster is not kept
LATER_S = 60  # by which the limits of JAX come after the controller's deadline
# What a collective says when another process is gone: a consequence, never the cause.
COLLECTIVE = re.compile(
    r"gloo|nccl|coordination service|connection (closed|reset|refused)|heartbeat|"
    r"UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED",
    re.IGNORECASE,
)


class RoleError(RuntimeError):
    """A failure in a worker, with the role, rank, method, step and host it happened at.

    `refusal`: its cause was a ValueError, the user's to mend.
    """

    def __init__(self, message: str, *, collective: bool = False, refusal: bool = False) -> None:
        super().__init__(message)
        self.collective, self.refusal = collective, refusal

    def __reduce__(self) -> Any:
        kind = {"collective": self.collective, "refusal": self.refusal}
        return functools.partial(RoleError, **kind), self.args


@dataclass(frozen=True)
class RoleContext:
    """What a role is built with; devices are those of the whole pool, by process."""

    role: str
    placement: Any  # the RolePlacement; None for a role beside the controller
    devices: tuple[Any, ...]  # jax devices
    rank: int = 0
    processes: int = 1
    local: bool = True  # the role lives in the controller's process


@dataclass(frozen=True)
class Call:
    """One method call as one process gets it; the values of `columns` follow it, in order.

    Of a method without columns, what follows are more arguments, and `writes` names what it gives.
    """

    role: str
    method: str
    step: int
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, Sequence[Piece]] | None = None  # refs left out; None: no batch
    rows: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    answers: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    n_rows: int = 0
    group: int = 1
    writes: tuple[str, ...] = ()


@dataclass(frozen=True)
class CallInfo:
    """What one process reports of one call."""

    rank: int
    start_s: float  # time.time() of the host
    end_s: float
    compiles: int
    metrics: Mapping[str, Any]
    value: Any = None  # of a method without columns
    warnings: tuple[str, ...] = ()  # logged since the process's last report
    rows: int = 0  # that this process was given
    tokens: int = 0  # of the rows that it was given or made, prompts included
    bytes_in: int = 0  # of the columns or weights that it read
    bytes_out: int = 0  # of those that it wrote


def describe(role: str, method: str, step: int, pool: str, rank: int, host: str) -> str:
    """Where a failure happened, as every error of the controller begins."""
    return f"role {role!r}, {method} at step {step} (rank {rank} of pool {pool!r} on host {host})"


def worker_environment(
    platform: str, devices: int, *, deadline_s: float = 1800.0
) -> dict[str, str]:
    """Environment of a process with `devices` devices; only 'cpu' simulates them.

    Its collectives wait longer than `deadline_s`, in which the controller ends a late call.
    """
    if platform != "cpu":
        return {"JAX_PLATFORMS": PLATFORMS[platform]}
    given = os.environ.get("XLA_FLAGS", "").split()
    flags = [flag for flag in given if not flag.startswith(COUNT_FLAG)]
    named = {flag.partition("=")[0] for flag in flags}
    limits = [f"{name}={_limit_s(deadline_s)}" for name in COLLECTIVE_FLAGS if name not in named]
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if HUGE_PAGES not in tunables:
        tunables = ":".join(filter(None, (tunables, f"{HUGE_PAGES}=1")))
    return {
        "GLIBC_TUNABLES": tunables,
        "JAX_PLATFORMS": PLATFORMS[platform],
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "XLA_FLAGS": " ".join([*flags, *limits, f"{COUNT_FLAG}={devices}"]),
    }


def _limit_s(deadline_s: float) -> int:
    """Of JAX's own waits: the controller decides first, and names who is late."""
    return min(int(deadline_s) + LATER_S, 1 << 30)


def join(
    *,
    platform: str,
    devices: int,
    rank: int,
    processes: int,
    coordinator: str,
    deadline_s: float = 1800.0,
    start_deadline_s: float = 180.0,
) -> tuple["jax.Device", ...]:
    """Makes this process one of `processes` of `devices` devices each; all devices, by process."""
    environment = worker_environment(platform, devices, deadline_s=deadline_s)
    os.environ |= environment
    import jax

    # JAX_* variables are read when jax is first imported, which may have happened.
    jax.config.update("jax_platforms", environment["JAX_PLATFORMS"])
    keep_programs()
    if processes > 1:
        if platform == "cpu":
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        # Where heartbeats fail first, JAX ends the processes that are well.
        jax.distributed.initialize(
            *(coordinator, processes, rank),
            initialization_timeout=math.ceil(start_deadline_s),
            heartbeat_timeout_seconds=_limit_s(deadline_s),
        )
    found = len(jax.local_devices())
    if found != devices or jax.default_backend() != platform:
        packages = {d.name: d.version for d in distributions() if d.name.startswith("jax")}
        installed = ", ".join(f"{name} {version}" for name, version in sorted(packages.items()))
        advice = {
            "cpu": "was JAX used earlier in this process?",
            "gpu": "install the extra cuda12 or cuda13, or set platform = 'cpu' in the placement",
        }[platform]
        raise RuntimeError(
            f"{devices} {platform} devices were asked for, {found} of {jax.default_backend()!r} "
            f"found (XLA_FLAGS={os.environ.get('XLA_FLAGS', '')!r}; installed: {installed}): "
            f"{advice}"
        )
    return tuple(sorted(jax.devices(), key=lambda device: (device.process_index, device.id)))


def keep_programs() -> None:
    """What is compiled from here on is kept on this host for later runs, unless JAX knows where.

    An entry that a killed process has left unfinished is removed: JAX would stumble over it again
    and again.
    """
    import jax

    if "JAX_COMPILATION_CACHE_DIR" in os.environ or jax.config.values["jax_compilation_cache_dir"]:
        return
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hfjax/programs"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for entry in folder.glob("*-cache"):
            if not entry.with_name(entry.name.removesuffix("-cache") + "-atime").exists():
                entry.unlink(missing_ok=True)
    except (OSError, RuntimeError):  # no home, or none that can be written to
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", PROGRAMS_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", KEPT_S)


def meet(name: str, limit_s: float) -> None:
    """Waits until every process of the pool is here.

    Lateness shows here, by rank: in a reduce-scatter on CPU a peer gives up after 30 s, whatever
    its settings.
    """
    from jax._src.distributed import global_state

    client: Any = global_state.client
    client.wait_at_barrier(name, int(limit_s * 1000))


class _Warnings(logging.Handler):
    """Keeps what a process logs at WARNING and above, until it is taken to the driver."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._kept: dict[str, None] = {}  # each text once

    def emit(self, record: logging.LogRecord) -> None:
        self._kept[f"{record.name}: {record.getMessage()}"] = None

    def taken(self) -> tuple[str, ...]:
        """The texts since the last time."""
        kept, self._kept = tuple(self._kept), {}
        return kept


class Worker:
    """Hosts all roles of a pool in one process and runs their calls one after the other."""

    def __init__(
        self,
        pool: str,
        devices: Sequence[Any] = (),
        *,
        rank: int = 0,
        processes: int = 1,
        local: bool = True,
        limit_s: int = 0,
    ) -> None:
        """Before each call the processes meet, if `limit_s` says how long they may wait."""
        self.pool, self.devices, self.rank = pool, tuple(devices), rank
        self.processes, self.local, self.limit_s = processes, local, limit_s
        self.host = socket.gethostname()
        self.roles: dict[str, Any] = {}
        self._warnings = _Warnings()
        if not local:  # where they would be seen by nobody
            logging.getLogger().addHandler(self._warnings)

    def build(
        self, role: str, builder: Callable[[RoleContext], Any], placement: "RolePlacement | None"
    ) -> CallInfo:
        """Makes a role; `builder` takes its RoleContext."""
        with self._named(role, BUILD, 0):
            compiles, start_s = _compiles(), time.time()
            context = RoleContext(
                role, placement, self.devices, self.rank, self.processes, self.local
            )
            self.roles[role] = builder(context)
            end_s, compiles = time.time(), _compiles() - compiles
            return CallInfo(
                self.rank, start_s, end_s, compiles, {}, warnings=self._warnings.taken()
            )

    def call(self, call: Call, *values: Any) -> tuple[Any, ...]:
        """Runs a role's method: one value for each written column, then a CallInfo."""
        with self._named(call.role, call.method, call.step):
            if self.limit_s and self.processes > 1:
                meet(MEETING, self.limit_s)
            compiles, start_s = _compiles(), time.time()
            function = getattr(self.roles[call.role], call.method)
            columns: list[Any] = []
            metrics: Mapping[str, Any] = {}
            value, size = None, {}
            if call.columns is None:
                value = function(*call.args, *values, **call.kwargs)
                columns, value = (value, None) if call.writes else ([], value)
                size = {"bytes_in": _nbytes(values), "bytes_out": _nbytes(columns)}
            else:
                shard = _shard(call, values)
                answer = function(shard, **call.kwargs)
                columns, metrics = _answered(call, answer), answer.metrics
                size = _sizes(shard, columns, answer)
            end_s = time.time()
            compiles, warnings = _compiles() - compiles, self._warnings.taken()
            info = CallInfo(self.rank, start_s, end_s, compiles, metrics, value, warnings, **size)
            return (*columns, info)

    def close(self) -> None:
        """Lets roles that hold processes or files of their own end them."""
        for role in self.roles.values():
            if close := getattr(role, "close", None):
                close()
        self.roles.clear()

    @contextmanager
    def _named(self, role: str, method: str, step: int) -> Iterator[None]:
        """Adds where a failure happened; through Ray only text of the traceback survives."""
        try:
            yield
        except Exception as error:
            where = describe(role, method, step, self.pool, self.rank, self.host)
            text = f"{where}: {type(error).__name__}: {error}"
            refusal = method == BUILD and isinstance(error, ValueError)
            if not self.local and (not refusal or os.environ.get("HFJAX_TRACEBACK")):
                text += f"\n\n{traceback.format_exc()}"
            foreign = type(error).__module__.partition(".")[0] in ("jax", "jaxlib")
            collective = foreign and COLLECTIVE.search(str(error)) is not None
            raise RoleError(text, collective=collective, refusal=refusal) from error


def _shard(call: Call, values: Sequence[Any]) -> Shard:
    columns: dict[str, Any] = {}
    start = 0
    for name, pieces in (call.columns or {}).items():
        parts = values[start : start + len(pieces)]
        start += len(pieces)
        try:
            columns[name] = frozen(assemble(pieces, parts, len(call.rows)))
        except ValueError as error:
            raise ValueError(f"column {name!r}: {error}") from error
    return Shard(columns, call.rows, call.n_rows, call.group, call.step)


def _sizes(shard: Shard, columns: list[Any], answer: Answer) -> dict[str, int]:
    """What a call read and gave, for the timeline; of texts, bytes are not counted."""
    lengths = answer.columns.get("length", shard.columns.get("length", ()))
    return {
        "rows": len(answer.rows),
        "tokens": int(np.sum(lengths)),
        "bytes_in": _nbytes(shard.columns.values()),
        "bytes_out": _nbytes(columns),
    }


def _nbytes(values: Iterable[Any]) -> int:
    """Bytes of arrays, also of those in lists, as parcels of weights are."""
    return sum(_nbytes(x) if isinstance(x, list) else getattr(x, "nbytes", 0) for x in values)


def _answered(call: Call, answer: Answer) -> list[Any]:
    """The declared columns, cut to the rows this process answers for."""
    if set(answer.columns) != set(call.writes):
        raise ValueError(
            f"{call.method} declares writes={call.writes} but answered {tuple(answer.columns)}"
        )
    local = np.full(call.n_rows, -1)
    local[answer.rows] = np.arange(len(answer.rows))
    at = local[call.answers]
    if (at < 0).any():
        missing = call.answers[at < 0]
        raise ValueError(f"{call.method} gave no answer for rows {missing[:8]} of this process")
    every = np.array_equal(at, np.arange(len(answer.rows)))
    columns: list[Any] = []
    for name in call.writes:
        values = answer.columns[name]
        if len(values) != len(answer.rows):
            raise ValueError(
                f"{call.method} answered {len(values)} rows of {name!r} for {len(answer.rows)}"
            )
        if not isinstance(values, list):
            columns.append(np.asarray(values) if every else np.asarray(values)[at])
        else:
            columns.append(values if every else [values[index] for index in at])
    return columns


_counted = {"compiles": 0}


@functools.cache
def _listen_to_compiles() -> None:
    import jax.monitoring

    def count(event: str, duration_secs: float, **kwargs: Any) -> None:
        _counted["compiles"] += event == COMPILE_EVENT

    jax.monitoring.register_event_duration_secs_listener(count)


def _compiles() -> int:
    """Programs this process has compiled since it was first asked; 0 where JAX is not in use."""
    if "jax" not in sys.modules:
        return 0
    _listen_to_compiles()
    return _counted["compiles"]
