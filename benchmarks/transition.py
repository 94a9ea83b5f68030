# SPDX-License-Identifier: Apache-2.0
"""The 3D-HybridEngine against its baselines: bytes, memory and seconds from training to generation.

    python -m benchmarks.transition table2 [--models 7b ...] [--devices 8 ...]
    python -m benchmarks.transition seconds [--processes 2]
    python -m benchmarks.transition zero
    python -m benchmarks.transition compile70b

`table2` compiles the relay of HybridFlow's figure 14 ahead of time for simulated devices, holds no
array, and puts what a device receives and holds beside the paper's Table 2. `seconds` moves real
weights between simulated devices, `zero` holds a training state in every stage of ZeRO, and
`compile70b` compiles everything the 70B actor runs. Exit status 1 where a bound of table2 fails.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax.experimental import multihost_utils

from benchmarks import holding
from benchmarks.figure14 import HALF, PROCESS_FLAGS, SETUPS, Rig, Setup, children, host, joined
from benchmarks.two_copies import Sender
from hfjax.engine.meter import Traffic, memory, meter
from hfjax.models.llama import ModelConfig, Params, abstract_params, init_params
from meshes.layouts import (
    DS_CHAT,
    HYBRID,
    HYBRID_V_PERMUTE,
    ON_ONE_POOL,
    SHARED,
    TWO_COPIES,
    either,
    shardings,
)
from meshes.mesh import PIPE_MICRO, TENSOR_MICRO
from meshes.placement import RolePlacement

MODULE = "benchmarks.transition"
BOUND = 0.005  # of the bytes received against Table 2, relative
ROUNDS = 20  # of `seconds`, after one that compiles
Row = dict[str, Any]

TIMED = Setup(  # 111 million parameters; every axis that changes is split
    cfg=ModelConfig(
        layers=8,
        embed=1024,
        heads=16,
        kv_heads=8,
        head_dim=64,
        mlp=2816,
        vocab=8192,
        rope_theta=1e4,
    ),
    p=2,
    t=4,
    p_g=1,
    t_g=2,
    devices=(8,),
)


def formulas(place: RolePlacement, M: int) -> tuple[float, float, float]:
    """Table 2 of HybridFlow for M bytes: received, peak, redundant; hybrid-v for the permutes."""
    kept, group = place.p_g * place.t_g, place.base.pipe * place.base.tensor
    if place.relay in (HYBRID, SHARED):
        return M * (group - kept) / (kept * group), M / kept, 0.0
    group = place.base.devices if place.relay == DS_CHAT else group  # t p d, all devices
    return M * (group - 1) / group, M, M / group


def measure(setup: Setup, devices: int, mode: str) -> Row:
    """A row of table2: one mode, compiled for `devices` and metered."""
    rig = Rig(setup, devices, mode, HALF)  # weights to train with in generation's dtype
    names, matrices = list(rig.shapes), rig.matrices()
    traffic = traffic_of(rig, rig.compiled(matrices))
    programs = rig.compiled(names)
    M, whole = (
        sum(rig.shapes[name].size for name in part) * jnp.dtype(HALF).itemsize
        for part in (matrices, names)
    )
    received, _, redundant = formulas(rig.placement, M)
    place, relay = rig.placement, rig.relay(names)
    arrays, temporaries = peak(programs, rig.bytes(rig.train, names), releases=relay.contained)
    return {
        "mode": mode,
        "received": traffic.bytes_received,
        "formula": received,
        "apart": traffic_of(rig, programs).bytes_received - traffic.bytes_received,
        "peak": arrays,
        "temporaries": temporaries,
        "peak_formula": formulas(place, whole)[1],
        "bucket": relay.bucket_bytes,
        "redundant": rig.redundant_bytes(matrices),
        "redundant_formula": redundant,
        "collectives": described(traffic),
        "holds": holds(mode, traffic, received),
    }


def traffic_of(rig: Rig, programs: Sequence[jax.stages.Compiled]) -> Traffic:
    """The collectives of all buckets; all of them must carry the dtype that the relay has."""
    found = [meter(program, mesh=rig.mesh).collectives for program in programs]
    traffic = Traffic(tuple(one for each in found for one in each))
    assert set(traffic.element_types()) <= {"f16"}, traffic.element_types()
    return traffic


def peak(programs: Sequence[jax.stages.Compiled], held: int, *, releases: bool) -> tuple[int, int]:
    """Most bytes a device holds while the buckets move: in arrays, and with the temporaries."""
    arrays = most = held
    for each in map(memory, programs):
        arrays = max(arrays, held + each.output_bytes)
        most = max(most, held + each.output_bytes + each.temp_bytes)
        held += each.output_bytes - (each.argument_bytes if releases else 0)
    return arrays, most


def described(traffic: Traffic) -> str:
    """What moves, in short: times, kind, axes and the size of a group."""
    found: Counter[str] = Counter()
    for one in traffic.collectives:
        found[f"{one.kind} {'*'.join(one.axes)}={one.group_size}"] += one.trips
    return ", ".join(f"{times} {what}" for what, times in found.items()) or "none"


def holds(mode: str, traffic: Traffic, formula: float) -> bool:
    """Bytes as in Table 2; under hybrid nothing but all-gathers inside micro-DP groups."""
    if mode == HYBRID_V_PERMUTE:  # whatever the compiler does: the paper has no number
        return True
    if abs(traffic.bytes_received - formula) > BOUND * formula:
        return False
    axes = {axis for one in traffic.collectives for axis in one.axes}
    gathers = set(traffic.by_kind()) <= {"all-gather"}
    return mode != HYBRID or (gathers and axes <= {PIPE_MICRO, TENSOR_MICRO})


COLUMNS = (  # of table2: heading, key; bytes as GB
    ("received", "received"),
    ("Table 2", "formula"),
    ("apart", "apart"),
    ("peak", "peak"),
    ("w/temps", "temporaries"),
    ("Table 2", "peak_formula"),
    ("bucket", "bucket"),
    ("redund.", "redundant"),
    ("Table 2", "redundant_formula"),
)


def cases_of(models: Sequence[str], sizes: Sequence[int]) -> list[tuple[str, int]]:
    """Models and cluster sizes asked for; no sizes are all of them."""
    known = {n for name in models for n in SETUPS[name].devices}
    if strange := [n for n in sizes if n not in known]:
        legal = "; ".join(f"{name} {either(SETUPS[name].devices)}" for name in models)
        raise ValueError(f"--devices {strange[0]}: the cluster sizes are {legal}")
    return [(name, n) for name in models for n in SETUPS[name].devices if not sizes or n in sizes]


def table2(cases: Sequence[tuple[str, int]]) -> bool:
    """Prints a line a mode, as each case's process hands its rows in; whether all bounds hold."""
    print(header())
    fine = True
    for name, devices in cases:
        command = ["table2", "--models", name, "--devices", str(devices)]
        for row in map(json.loads, children(MODULE, command, devices).splitlines()):
            print(line(name, SETUPS[name], devices, row), flush=True)
            fine &= row["holds"]
    return fine


def header() -> str:
    """What table2 shows, and its columns."""
    headings = "".join(f"{heading:>9}" for heading, _ in COLUMNS)
    return (
        "Relay of Llama 2 and CodeLlama shapes from p-t-d to p_g-t_g-d_g, compiled ahead of time "
        f"for simulated devices; {host()}\nGB a device, float16 standing for bfloat16. received, "
        "redundant: the layers' matrices; apart: received of embeddings, head and norms; peak, "
        "bucket: everything\n"
        f"{'model':6}{'devices':>7}  {'layout':19}{'mode':17}{headings}{'ratio':>8}  collectives"
    )


def line(name: str, setup: Setup, devices: int, row: Row) -> str:
    """One mode of a setup in the table; the ratio is of bytes received to Table 2."""
    place = setup.placed(devices, row["mode"])
    base, d_g = place.base, devices // (place.base.data * place.p_g * place.t_g)
    before = f"zero {base.fsdp}" if base.fsdp > 1 else f"{base.pipe}-{base.tensor}-{base.data}"
    layout = f"{before} > {place.p_g}-{place.t_g}-{d_g}"
    cells = "".join(f"{row[key] / 1e9:9.3f}" for _, key in COLUMNS)
    ratio = f"{row['received'] / row['formula']:.4f}" if row["formula"] else "-"
    fails = "" if row["holds"] else "  FAILS"
    return (
        f"{name:6}{devices:7}  {layout:19}{row['mode']:17}{cells}{ratio:>8}  "
        f"{row['collectives']}{fails}"
    )


class Mover:
    """One mode's weights on the devices, moved to generation and back."""

    def __init__(self, setup: Setup, devices: int, mode: str) -> None:
        self.rig = rig = Rig(setup, devices, mode, jnp.float32)
        names = list(rig.shapes)
        self.relay = rig.relay(names)
        self.received = sum(meter(one, mesh=rig.mesh).bytes_received for one in rig.compiled(names))
        _, axes = abstract_params(setup.cfg, "lm")
        placed = shardings(rig.mesh, rig.before, axes)
        self.weights = flatten_dict(init_params(setup.cfg, "lm", jax.random.key(0), placed))

    def there(self) -> tuple[Params, float]:
        """The weights to generate with, and the seconds it took to move them.

        What the engine does: training shards go as their bucket has moved, or all of them stay.
        """
        start_s = time.perf_counter()
        moved = self.relay.to_generate(self.weights, release=self.relay.contained)
        jax.block_until_ready(moved)
        return moved, time.perf_counter() - start_s

    def back(self, moved: Params) -> float:
        """Seconds back where the layouts contain one another; else the copy is dropped."""
        if not self.relay.contained:
            return 0.0
        start_s = time.perf_counter()
        self.weights = jax.block_until_ready(self.relay.to_train(moved, release=True))
        return time.perf_counter() - start_s

    def round(self) -> tuple[float, float]:
        """Seconds there and back."""
        multihost_utils.sync_global_devices("round")
        moved, there_s = self.there()
        return there_s, self.back(moved)


def seconds(setup: Setup, devices: int, processes: int, folder: Path, rounds: int = ROUNDS) -> str:
    """The table of every mode's seconds, the modes taking turns; `folder` is in shared memory."""
    movers: dict[str, Mover | Sender] = {m: Mover(setup, devices, m) for m in ON_ONE_POOL}
    hybrid = movers[HYBRID]
    movers[TWO_COPIES] = Sender(setup, devices, processes, folder)
    for mover in movers.values():
        mover.round()
    found = [{mode: mover.round() for mode, mover in movers.items()} for _ in range(rounds)]
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(hybrid.weights))
    lines = [
        f"{count / 1e6:.0f} M parameters, float32, p-t-d {setup.p}-{setup.t}-1 to p_g-t_g "
        f"{setup.p_g}-{setup.t_g}; {devices} simulated devices in processes: {processes}; they "
        f"share cores and memory, so a link costs what a copy costs: read the ratios; {host()}\n"
        f"two-copies: from tensor {setup.t} on {devices // 2} devices to the {devices // 2} others",
        f"{'mode':17}{'MB received':>12}{'there ms':>10}{'quartiles':>15}{'/ hybrid':>10}"
        f"{'back ms':>9}   median of {rounds}, interleaved; ratio: median of the rounds' ratios",
    ]
    for mode, mover in movers.items():
        there, back = zip(*(each[mode] for each in found), strict=True)
        ratio = statistics.median(each[mode][0] / each[HYBRID][0] for each in found)
        low, middle, high = statistics.quantiles(there, n=4)
        quartiles = f"{low * 1e3:.0f}-{high * 1e3:.0f}"
        lines.append(
            f"{mode:17}{mover.received / 1e6:12.1f}{middle * 1e3:10.1f}{quartiles:>15}{ratio:10.2f}"
            f"{statistics.median(back) * 1e3:9.1f}"
        )
    return "\n".join(lines)


def own_part(options: argparse.Namespace) -> None:
    """What a process does that has the devices: prints a table, or rows of one as JSON."""
    if options.part == "table2":
        (name,), (devices,) = options.models, options.devices
        for mode in ON_ONE_POOL:
            print(json.dumps(measure(SETUPS[name], devices, mode)), flush=True)
    elif options.part == "seconds":
        folder = Path(options.folder)
        print(seconds(TIMED, TIMED.devices[0], options.processes, folder))
    elif options.part == "zero":
        print(holding.zero(holding.HELD, 8))
    else:
        print(holding.compiled(SETUPS["70b"], 128, holding.WORK))


def main(arguments: Sequence[str] | None = None) -> int:
    """Starts the processes of one part and prints its table; 1 when a bound fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transition")
    parser.add_argument("part", choices=("table2", "seconds", "zero", "compile70b"))
    parser.add_argument("--models", nargs="+", choices=list(SETUPS), help="of table2")
    parser.add_argument("--devices", nargs="+", type=int, help="of table2: cluster sizes")
    parser.add_argument("--processes", type=int, default=1, help="of seconds: 1, 2, 4 or 8")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    for flag in PROCESS_FLAGS:
        parser.add_argument(flag, type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if joined(options):
        own_part(options)
        return 0
    if options.part != "table2" and (options.models or options.devices):
        parser.error(f"--models and --devices belong to table2, not to {options.part}")
    if options.processes not in ((1, 2, 4, 8) if options.part == "seconds" else (1,)):
        parser.error(f"--processes {options.processes}: only seconds, in 1, 2, 4 or 8")
    if options.part == "table2":
        try:
            cases = cases_of(options.models or list(SETUPS), options.devices or [])
        except ValueError as problem:
            parser.error(str(problem))
        return 0 if table2(cases) else 1
    devices = 128 if options.part == "compile70b" else 8
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        command = [options.part, "--folder", folder]
        print(children(MODULE, command, devices, options.processes), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
