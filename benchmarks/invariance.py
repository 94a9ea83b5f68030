# SPDX-License-Identifier: Apache-2.0
"""The first PPO step of one seed on many placements: same tokens, losses and gradients?

    python -m benchmarks.invariance [--model DIR] [--placements local:data8 ...] [--out DIR]

Each placement runs in a process of its own, on simulated CPU devices, in float32. Exit status 1
when a bound fails.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from meshes.layouts import TWO_COPIES
from meshes.mesh import MeshShape
from meshes.placement import Placement, Pool, RolePlacement

TIE = 1e-4  # nats between the two best tokens, noise included, below which rounding may choose
BOUND = 1e-5  # of losses, of gradient norms (relative) and of rollout_probs_diff_max
SEED, STEP = 0, 1
DEADLINE_S = 1800  # of one placement
LOSSES = ("actor/pg_loss", "critic/vf_loss")
NORMS = ("actor/grad_norm", "critic/grad_norm")
GAP = "training/rollout_probs_diff_max"
COLUMNS = ("input_ids", "prompt_length", "length", "row_id", "rollout_log_probs", "old_log_probs")
Step = dict[str, Any]  # columns and metrics of one step, and "seconds"


@dataclass(frozen=True)
class Case:
    """A runtime and a placement for it."""

    runtime: str
    placement: Placement

    @property
    def processes(self) -> int:
        """Of all pools; runtime local has one, the controller's own."""
        pools = self.placement.pools.values() if self.runtime == "ray" else ()
        return sum(pool.processes for pool in pools) or 1


@dataclass(frozen=True)
class Comparison:
    """How one placement's step differs from the first one's."""

    rows: int  # whose tokens differ
    ties: int  # of them, those that differ first at a tie
    loss: float  # largest difference of a loss
    norm: float  # largest relative difference of a gradient's norm
    gap: float  # training/rollout_probs_diff_max
    seconds: float

    @property
    def holds(self) -> bool:
        """A tie changes the data of the step, so its losses are bounded only where tokens agree."""
        same = self.rows > 0 or max(self.loss, self.norm) <= BOUND
        return same and self.rows == self.ties and self.gap <= BOUND


def one_pool(
    shape: MeshShape,
    *,
    processes: int = 1,
    generate: MeshShape | None = None,
    infer: MeshShape | None = None,
    **actor: Any,
) -> Placement:
    """All roles on one mesh; generation keeps `generate` of pipe and tensor, if given.

    Those that are updated score on the mesh `infer`, if given.
    """
    both: dict[str, Any] = {"train": shape, "infer": infer, "zero": actor.pop("zero", 3)}
    roles = {
        "actor": RolePlacement("actor", "all", generate=generate, **both, **actor),
        "critic": RolePlacement("critic", "all", **both),
        "reference": RolePlacement("reference", "all", infer=shape),
    }
    return Placement({"all": Pool("all", shape.devices, processes)}, roles, "cpu")


def two_pools(*, processes: int = 1) -> Placement:
    """Actor and reference on four devices in `processes` processes, the critic on four others."""
    shape = MeshShape(data=2, tensor=2)
    pools = {"policy": Pool("policy", 4, processes), "value": Pool("value", 4)}
    generate = MeshShape(tensor=1)
    roles = {
        "actor": RolePlacement("actor", "policy", train=shape, generate=generate),
        "critic": RolePlacement("critic", "value", train=MeshShape(fsdp=4)),
        "reference": RolePlacement("reference", "policy", infer=shape),
    }
    return Placement(pools, roles, "cpu")


def standalone() -> Placement:
    """Each role in a pool of its own, of another size and layout."""
    pools = {"policy": Pool("policy", 4), "value": Pool("value", 3), "frozen": Pool("frozen", 1)}
    generate = MeshShape(tensor=1)
    roles = {
        "actor": RolePlacement(
            *("actor", "policy"), train=MeshShape(fsdp=2, tensor=2), generate=generate
        ),
        "critic": RolePlacement("critic", "value", train=MeshShape(pipe=3)),
        "reference": RolePlacement("reference", "frozen", infer=MeshShape()),
    }
    return Placement(pools, roles, "cpu")


def two_copies(*, processes: int = 1) -> Placement:
    """All roles on four devices; the actor's second copy generates on four others."""
    train, generate = MeshShape(fsdp=2, tensor=2), MeshShape(tensor=2)
    pools = {name: Pool(name, 4, processes) for name in ("policy", "rollout")}
    where: Any = {"generate": generate, "generate_pool": "rollout", "relay": TWO_COPIES}
    roles = {
        "actor": RolePlacement("actor", "policy", train=train, **where),
        "critic": RolePlacement("critic", "policy", train=train),
        "reference": RolePlacement("reference", "policy", infer=train),
    }
    return Placement(pools, roles, "cpu")


DATA_8, DATA_2_TENSOR_4 = MeshShape(data=8), MeshShape(data=2, tensor=4)
ONE, TENSOR_2, PIPE_3 = MeshShape(), MeshShape(tensor=2), MeshShape(pipe=3)  # kept by generation
CASES = {  # runtime:mesh; the first is what the others are compared with
    "local:1": Case("local", one_pool(MeshShape())),
    "local:data8": Case("local", one_pool(DATA_8)),
    "local:data2-tensor4": Case("local", one_pool(DATA_2_TENSOR_4)),
    "local:data2-tensor4-generate2": Case("local", one_pool(DATA_2_TENSOR_4, generate=TENSOR_2)),
    "local:fsdp8": Case("local", one_pool(MeshShape(fsdp=8))),
    "local:fsdp4-tensor2": Case("local", one_pool(MeshShape(fsdp=4, tensor=2))),
    "local:zero1-8": Case("local", one_pool(MeshShape(fsdp=8), zero=1)),
    "local:pipe3-data2": Case("local", one_pool(MeshShape(data=2, pipe=3), generate=ONE)),
    "local:pipe3-tensor2-generate-pipe3": Case(
        "local", one_pool(MeshShape(pipe=3, tensor=2), generate=PIPE_3)
    ),
    "local:ds-chat8-generate2": Case(
        "local", one_pool(MeshShape(fsdp=8), generate=TENSOR_2, relay="ds-chat")
    ),
    "local:pipe3-data2-infer-data6": Case(
        "local", one_pool(MeshShape(data=2, pipe=3), infer=MeshShape(data=6), generate=ONE)
    ),
    "local:pools4+4": Case("local", two_pools()),
    "local:pools4+3+1": Case("local", standalone()),
    "local:two-copies4+4": Case("local", two_copies()),
    "ray:data8": Case("ray", one_pool(DATA_8)),
    "ray:data8-in-2": Case("ray", one_pool(DATA_8, processes=2)),
    "ray:data2-tensor4-in-2": Case("ray", one_pool(DATA_2_TENSOR_4, processes=2)),
    "ray:zero2-4-tensor2-in-2": Case(
        "ray", one_pool(MeshShape(fsdp=4, tensor=2), processes=2, zero=2)
    ),
    "ray:pipe3-fsdp2-in-2": Case(
        "ray", one_pool(MeshShape(fsdp=2, pipe=3), processes=2, generate=ONE)
    ),
    "ray:fsdp4-infer-data2-tensor2-in-2": Case(
        "ray", one_pool(MeshShape(fsdp=4), processes=2, infer=MeshShape(data=2, tensor=2))
    ),
    "ray:pools4+4-in-3": Case("ray", two_pools(processes=2)),
    "ray:two-copies4+4-in-4": Case("ray", two_copies(processes=2)),
}


def settings(model: str, init: str, out: str, placement: str, runtime: str) -> dict[str, Any]:
    """A small run: 32 sums x 4 responses, one update of each model on all rows in four parts."""
    training = {"optimizer": {"lr": 1e-4}, "micro_sequences": 32}
    return {
        "model": model,
        "init": init,
        "out": out,
        "placement": placement,
        "runtime": runtime,
        "steps": STEP,
        "seed": SEED,
        "tensorboard": False,
        "data": {"train": "sums", "prompts_per_step": 32, "max_prompt_tokens": 16},
        "rollout": {"n": 4, "max_new_tokens": 8},
        "reward": {"function": "hfjax.arithmetic:sum_reward"},
        "actor": training,
        "critic": training,
    }


def first_step(case: Case, folder: str | Path, *, model: str, init: str = "pretrained") -> Step:
    """Runs one step of PPO in `folder`; its columns and metrics."""
    from algorithms import ppo
    from hfjax.algorithm import config_class
    from hfjax.batch import Batch
    from hfjax.config import from_dict
    from hfjax.metrics import batch_metrics
    from hfjax.run import Run

    placement = Path(folder) / "placed.toml"
    placement.parent.mkdir(parents=True, exist_ok=True)
    placement.write_text(case.placement.to_toml())
    table = settings(model, init, str(Path(folder) / "run"), str(placement), case.runtime)
    config = from_dict(config_class(ppo), table, where="benchmarks.invariance")
    with Run(ppo, config) as run:
        run.models.step = STEP
        start_s = time.perf_counter()
        batch, metrics = ppo.step(run.models, Batch(run.plan.source.next_batch()), config.algorithm)
        record = dict(batch.metrics.result()) | dict(metrics.result())
        columns = batch.resolved()
        seconds = time.perf_counter() - start_s
    kept = {name: columns[name] for name in COLUMNS}
    return kept | record | batch_metrics(columns) | {"seconds": seconds}


def compare(step: Mapping[str, Any], first: Mapping[str, Any]) -> Comparison:
    """The differences of a step from the first placement's."""
    ids, base = step["input_ids"], first["input_ids"]
    width = max(ids.shape[1], base.shape[1])
    ids, base = (np.pad(x, ((0, 0), (0, width - x.shape[1]))) for x in (ids, base))
    differs = np.flatnonzero((ids != base).any(axis=1) | (step["length"] != first["length"]))
    return Comparison(
        rows=len(differs),
        ties=sum(margin(int(row), step, first) < TIE for row in differs),
        loss=max(abs(float(step[name]) - float(first[name])) for name in LOSSES),
        norm=max(abs(float(step[name]) / float(first[name]) - 1) for name in NORMS),
        gap=float(step[GAP]),
        seconds=float(step["seconds"]),
    )


def margin(row: int, step: Mapping[str, Any], first: Mapping[str, Any]) -> float:
    """How far apart log-prob + noise of the two tokens are where a row first differs, in nats.

    What stands before that token is the same in both, so both log-probs are of one distribution.
    """
    import jax

    ends = [int(each["length"][row]) for each in (step, first)]
    a, b = (each["input_ids"][row][: min(ends)] for each in (step, first))
    at = int(np.flatnonzero(a != b)[0]) if (a != b).any() else min(ends) - 1
    key = jax.random.key(SEED)
    for number in (STEP, int(step["row_id"][row]), at - int(step["prompt_length"][row])):
        key = jax.random.fold_in(key, number)
    tokens = [int(each["input_ids"][row, at]) for each in (step, first)]
    noise = jax.random.gumbel(key, (max(tokens) + 1,), np.float32)
    log_probs = [float(each["rollout_log_probs"][row, at]) for each in (step, first)]
    scores = [logp + float(noise[token]) for logp, token in zip(log_probs, tokens, strict=True)]
    return abs(scores[0] - scores[1])


def run_case(name: str, folder: Path, model: str, init: str) -> Step:
    """A placement's first step, in a process with the devices that it needs."""
    case = CASES[name]
    devices = case.placement.devices if case.runtime == "local" else 1
    flags = f"--xla_force_host_platform_device_count={devices}"
    found = folder / f"{name.replace(':', '-')}.npz"
    command = [sys.executable, "-m", "benchmarks.invariance", "--one", name, "--out", str(found)]
    done = subprocess.run(
        [*command, "--model", model, "--init", init],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    if done.returncode:
        raise RuntimeError(f"{name}: exit status {done.returncode}\n{done.stderr[-4000:]}")
    with np.load(found) as arrays:
        return {key: arrays[key] for key in arrays.files}


def table(rows: Sequence[tuple[str, Comparison]]) -> str:
    """One line a placement, under a header that names device and versions."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("jax", "jaxlib", "flax", "ray"))
    lines = [
        f"First PPO step, seed {SEED}, float32, against the first row; simulated devices of "
        f"{platform.machine()} CPU with {os.cpu_count()} cores; {versions}",
        f"{'placement':26}{'runtime':8}{'processes':>10}{'rows differ':>12}{'ties':>6}"
        f"{'loss diff':>11}{'grad_norm rel':>14}{'rollout diff':>13}{'seconds':>9}",
    ]
    for name, c in rows:
        case, (_, mesh) = CASES[name], name.split(":")
        lines.append(
            f"{mesh:26}{case.runtime:8}{case.processes:10}{c.rows:12}{c.ties:6}{c.loss:11.1e}"
            f"{c.norm:14.1e}{c.gap:13.1e}{c.seconds:9.1f}{'' if c.holds else '  FAILS'}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the placements asked for, each against the first of all; 1 when a bound fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.invariance")
    parser.add_argument("--model", default="embedded", help="embedded, or a directory")
    parser.add_argument("--init", default="pretrained", choices=("pretrained", "random"))
    parser.add_argument("--placements", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--one", choices=list(CASES), help="in this process, into the file --out")
    parser.add_argument("--out", help="with --one: the .npz file; else a directory to keep")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        if options.one:
            case = CASES[options.one]
            step = first_step(case, scratch, model=options.model, init=options.init)
            np.savez(options.out, **step)
            return 0
        folder = Path(options.out or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        base = next(iter(CASES))
        first = run_case(base, folder, options.model, options.init)
        rows = [(base, compare(first, first))]
        for name in options.placements:
            if name != base:
                step = run_case(name, folder, options.model, options.init)
                rows.append((name, compare(step, first)))
    print(table(rows))
    return 0 if all(row.holds for _, row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
