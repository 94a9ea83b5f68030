# SPDX-License-Identifier: Apache-2.0
"""Runs that are to be hurt, for `benchmarks.faults`: started as a user does, watched, compared."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from benchmarks.faulty_ppo import FAULT, ROWS
from hfjax.controller.processes import children, end
from hfjax.engine.store import CheckpointStore
from hfjax.metrics import STEP
from meshes.mesh import MeshShape
from meshes.placement import Placement, Pool, RolePlacement

MARKER = "HFJAX_VICTIM"  # in the environment of a run and of all that it starts
STEPS, SAVE_EVERY = 6, 2
LONGEST_S = 600.0  # of a whole run
LEFT_S = 30.0  # after which no process of an ended run may be there
MEASURES = ("timing_s/", "timing_per_token_ms/", "perf/")  # of the machine, not of the run
ALGORITHM = str(Path(__file__).with_name("faulty_ppo.py"))
FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def placement(name: str) -> Placement:
    """Small ones of two devices: `one` pool, `two` pools, or two `processes` in a pool.

    `local` is one pool in the driver's own process.
    """
    pair, single = MeshShape(fsdp=2), MeshShape()
    if name == "two":
        pools = {"policy": Pool("policy", 1), "value": Pool("value", 1)}
        roles = {
            "actor": RolePlacement("actor", "policy", train=single),
            "critic": RolePlacement("critic", "value", train=single),
            "reference": RolePlacement("reference", "policy", infer=single),
        }
        return Placement(pools, roles, "cpu")
    pools = {"all": Pool("all", 2, {"local": 1, "one": 1, "processes": 2}[name])}
    roles = {
        "actor": RolePlacement("actor", "all", train=pair),
        "critic": RolePlacement("critic", "all", train=pair),
        "reference": RolePlacement("reference", "all", infer=pair),
    }
    return Placement(pools, roles, "cpu")


def settings(**over: Any) -> dict[str, Any]:
    """The embedded model, six short steps, a checkpoint every two."""
    table: dict[str, Any] = {
        "model": "embedded",
        "steps": STEPS,
        "save_every": SAVE_EVERY,
        "eval_every": 0,
        "tensorboard": False,
        "data": {"train": "sums", "prompts_per_step": 8, "max_prompt_tokens": 16},
        "rollout": {"n": 2, "max_new_tokens": 4},
        "reward": {"function": "benchmarks.faulty_ppo:reward", "workers": 1, "deadline_s": 5.0},
        "actor": {"minibatch_sequences": 8},
        "critic": {"minibatch_sequences": 8},
    }
    for name, value in over.items():
        both = isinstance(value, Mapping) and isinstance(table.get(name), Mapping)
        table[name] = table[name] | value if both else value
    return table


@dataclass
class Victim:
    """A run in `folder`, of one placement; it may be started several times."""

    folder: Path
    placed: str  # name of the placement
    over: Mapping[str, Any] = field(default_factory=dict)  # settings
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.process: Any = None
        self.marker = uuid.uuid4().hex
        self.starts = 0
        self.cluster: Any = None
        if self.placed == "local":
            self.over = {"runtime": "local", **self.over}
        (self.folder / "placement.toml").write_text(placement(self.placed).to_toml())

    @property
    def out(self) -> Path:
        return self.folder / "run"

    @property
    def mark(self) -> Path:
        """The file that says when the fault began."""
        return self.folder / "mark"

    def start(self, fault: Mapping[str, Any] | None = None, *, resume: bool = False) -> None:
        """`hfjax train` in a session of its own; its console goes to files."""
        given = self.folder / "given.toml"
        given.write_text(tomli_w.dumps(settings(**self.over)))
        cache = str(self.folder.parent / "compiled")
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "XLA_FLAGS": f"{FAST} --xla_force_host_platform_device_count=2",
            MARKER: self.marker,
            ROWS: str(self.folder / "rows.txt"),
            **self.told(fault),
            **self.environment,
        }
        command = [sys.executable, "-m", "hfjax.cli", "train", ALGORITHM, "--config", str(given)]
        command += ["--placement", str(self.folder / "placement.toml"), "--out", str(self.out)]
        self.starts += 1
        with self._console("out").open("w") as out, self._console("err").open("w") as err:
            self.process = subprocess.Popen(
                [*command, *(["--resume"] if resume else [])],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment,
                start_new_session=True,
            )

    def told(self, fault: Mapping[str, Any] | None) -> dict[str, str]:
        """The environment in which `benchmarks.faulty_ppo` does a fault."""
        return {FAULT: json.dumps({"mark": str(self.mark), **fault})} if fault else {}

    @contextmanager
    def on_cluster(self, nodes: int, fault: Mapping[str, Any] | None) -> Iterator[None]:
        """The run's workers are on a Ray cluster of so many nodes of one CPU, all on this host."""
        from ray.cluster_utils import Cluster

        before = dict(os.environ)
        os.environ |= {MARKER: self.marker, **self.told(fault)}
        try:
            self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
            for _ in range(nodes - 1):
                self.add_node()
            self.environment = {**self.environment, "RAY_ADDRESS": self.cluster.address}
            yield
        finally:
            os.environ.clear()
            os.environ |= before
            self.cluster.shutdown()

    def add_node(self) -> None:
        """One more node of the cluster."""
        self.cluster.add_node(num_cpus=1)
        self.cluster.wait_for_nodes()

    def lose_node(self) -> None:
        """The newest node of the cluster with its workers, without a word."""
        node = self.cluster.list_all_nodes()[-1]
        there = children(node.all_processes["raylet"][0].process.pid)
        self.cluster.remove_node(node, allow_graceful=False)
        end(there, 0)

    def _console(self, kind: str) -> Path:
        return self.folder / f"console_{self.starts}.{kind}"

    def console(self) -> str:
        """All that the last start has printed, errors last."""
        return self._console("out").read_text() + self._console("err").read_text()

    def said(self) -> str:
        """The first line of what it said at its end."""
        lines = [line for line in self._console("err").read_text().splitlines() if line.strip()]
        told = [line for line in lines if line.startswith("hfjax ")]
        rest = [line for line in self._console("out").read_text().splitlines() if line.strip()]
        return (told or lines[-1:] or rest[-1:] or [""])[0]

    def until(self, seen: Callable[[], Any], what: str, within_s: float = LONGEST_S) -> Any:
        """Waits until `seen` gives something true, while the run goes on."""
        ends_s = time.monotonic() + within_s
        while not (found := seen()):
            if self.process.poll() is not None:
                raise RuntimeError(f"the run ended before {what}: {self.console()[-3000:]}")
            if time.monotonic() > ends_s:
                raise RuntimeError(f"no {what} within {within_s:g} s: {self.console()[-3000:]}")
            time.sleep(0.005)
        return found

    def end(self, within_s: float = LONGEST_S) -> int | None:
        """Its exit status (a signal is negative); None where it does not end and is killed."""
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return None

    def finish(self, *, resume: bool = False) -> int | None:
        """Starts it undisturbed and waits for the end."""
        self.start(resume=resume)
        return self.end()

    def pids(self) -> dict[int, str]:
        """Every process of the run that is there, with its command; not those of a cluster."""
        found = {}
        for entry in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                if f"{MARKER}={self.marker}".encode() in (entry / "environ").read_bytes():
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    ours = not self.cluster or re.search("hfjax|^ray::RayProcess", command)
                    found |= {int(entry.name): command} if state != "Z" and ours else {}
        return found

    def workers(self) -> list[int]:
        """The processes of its pools, those started first at the front."""
        return sorted(
            pid for pid, title in self.pids().items() if title.startswith("ray::RayProcess")
        )

    def named(self, program: str) -> int:
        """The process that runs a program of Ray's."""
        return next(pid for pid, command in self.pids().items() if program in command.split(" ")[0])

    def left(self, within_s: float = LEFT_S) -> tuple[list[str], float]:
        """Programs that do not end within that time, and when the last went; ends them."""
        start_s = time.monotonic()
        while (found := self.pids()) and time.monotonic() - start_s < within_s:
            time.sleep(0.05)
        took_s = time.monotonic() - start_s
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return [command.split(" ")[0][-40:] for command in found.values()], took_s

    def records(self) -> list[dict[str, Any]]:
        """metrics.jsonl, without a half-written last line and without what measures the machine."""
        path = self.out / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [
            {name: x for name, x in json.loads(line).items() if not name.startswith(MEASURES)}
            for line in lines
        ]

    def last_step(self) -> int:
        """Of the records."""
        return max((record[STEP] for record in self.records()), default=0)

    def begun(self) -> bool:
        """Whether it is to be resumed, be it from its start."""
        files = self.out / "metrics.jsonl", *(self.out / "checkpoints").glob("step_*")
        return any(file.exists() for file in files)

    def saved(self) -> int:
        """The step of the newest whole checkpoint, 0 without one."""
        return max(CheckpointStore(self.out / "checkpoints").steps(), default=0)

    def saving(self, step: int = 0) -> list[Path]:
        """Checkpoints from `step` on that are being written."""
        found = (self.out / "checkpoints").glob("step_*.tmp")
        return [
            path
            for path in found
            if (match := re.fullmatch(r"step_(\d+)\.tmp", path.name)) and int(match[1]) >= step
        ]

    def arrays(self) -> dict[str, np.ndarray]:
        """Every array of the newest checkpoint, weights and moments, as its checksums vouch."""
        found = {}
        store = CheckpointStore(self.out / "checkpoints")
        folder = store.path(self.saved())
        for role in sorted(path for path in folder.iterdir() if path.is_dir()):
            found |= {f"{role.name}.{name}": x for name, x in restored(role).items()}
        return found

    def not_finite(self) -> list[str]:
        """Arrays of the newest checkpoint that hold a NaN or an infinity."""
        arrays = self.arrays().items()
        return [n for n, x in arrays if x.dtype.kind not in "iub" and not np.isfinite(x).all()]

    def rows(self) -> dict[int, list[str]]:
        """What the reward was given last for each step, by row."""
        found: dict[tuple[int, int], str] = {}
        for line in (self.folder / "rows.txt").read_text().splitlines():
            step, row, prompt = line.split(" ", 2)
            found[int(step), int(row)] = prompt
        by_step = itertools.groupby(sorted(found), key=lambda place: place[0])
        return {step: [found[place] for place in places] for step, places in by_step}


def restored(folder: Path) -> dict[str, np.ndarray]:
    """The arrays that a role saved, on the host."""
    import jax
    import orbax.checkpoint as ocp
    from etils import epath
    from jax.sharding import SingleDeviceSharding

    from hfjax.engine.checkpoint import restore_role

    metadata: Any = ocp.PyTreeCheckpointHandler().metadata(epath.Path(folder))
    here = SingleDeviceSharding(jax.devices("cpu")[0])
    wanted = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)
        for name, x in metadata.tree.items()
    }
    return {name: np.asarray(x) for name, x in restore_role(folder, wanted).items()}


def differences(one: Victim, other: Victim) -> list[str]:
    """What differs between two finished runs: records, samples, rows, arrays; bit for bit."""
    found = []
    ours, theirs = one.records(), other.records()
    steps = [record[STEP] for record in ours]
    if steps != [record[STEP] for record in theirs]:
        found.append(f"steps {steps}")
    for mine, known in zip(ours, theirs, strict=False):
        names = sorted(n for n in mine.keys() | known.keys() if mine.get(n) != known.get(n))
        if names:
            found.append(f"step {known[STEP]}: {', '.join(names[:3])}")
    samples = [(run.out / "samples.jsonl").read_bytes() for run in (one, other)]
    found += ["samples"] if samples[0] != samples[1] else []
    found += ["rows"] if one.rows() != other.rows() else []
    arrays, known = one.arrays(), other.arrays()
    same = arrays.keys() == known.keys()
    same = same and all(arrays[name].tobytes() == x.tobytes() for name, x in known.items())
    return found if same else [*found, "weights"]


def mount(*options: str) -> None:
    """Linux's, for root: small and read-only file systems."""
    subprocess.run(["mount", *options], check=True)


@contextmanager
def own_disk(folder: Path, megabytes: int) -> Iterator[None]:
    """`folder` as a file system of its own."""
    folder.mkdir(parents=True)
    mount("-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder))
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
