# SPDX-License-Identifier: Apache-2.0
"""Seconds of the engine's calls as hfjax.mapping predicts them, beside those measured here.

The table of devices is one that `hfjax calibrate` wrote on the same host; the rows are those of
benchmarks.measured.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figure14 import host
from benchmarks.measured import CFG, DEVICES, LAYOUTS, ROUNDS
from hfjax.mapping.cost import Engine, generate_s, infer_s, relay_s, update_s
from hfjax.mapping.devices import load_devices, load_profile
from hfjax.mapping.pricing import engine_of
from hfjax.models.llama import ModelConfig
from meshes.mesh import MeshShape
from meshes.placement import RolePlacement

LEAST = 0.8  # rank correlation
ITEMSIZE = 4  # float32
NAMES = {"update": "train", "score": "infer", "generate": "generate", "relay": "relay"}
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Pair:
    """One thing predicted, and the quartiles of what was measured."""

    name: str
    predicted_s: float
    measured_s: tuple[float, float, float]

    @property
    def ratio(self) -> float:
        return self.predicted_s / self.measured_s[1]


def ranks(values: Sequence[float]) -> np.ndarray:
    """From 0; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return ((ends - counts + ends - 1) / 2)[inverse]


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation; 0 where one of the two has equal values only."""
    x, y = (ranks(values) - (len(values) - 1) / 2 for values in (a, b))
    size = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / size if size else 0.0


def host_engine(file: str | Path, devices: int) -> Engine:
    """The engine on the one device of a file of `hfjax calibrate`, of so many that share a host."""
    names = list(tomllib.loads(Path(file).read_text()).get("device", {}))
    if len(names) != 1:
        raise ValueError(f"--host {file}: holds {len(names)} devices; give a file of calibrate")
    device = load_devices(file)[names[0]]
    if device.shares != devices:
        raise ValueError(
            f"--host {file}: measured with {device.shares} devices; run hfjax calibrate --devices "
            f"{devices}"
        )
    return engine_of(device, load_profile("hfjax"), ITEMSIZE)


def predicted(engine: Engine, row: Row, cfg: ModelConfig) -> dict[str, float]:
    """Seconds of each call of a row of benchmarks.measured."""
    full, load, zero = MeshShape(**row["mesh"]), row["load"], row["zero"]
    place = placed(row, full)
    base, tokens = place.base, load["prompt"] + load["response"]
    keep = MeshShape(pipe=full.pipe, tensor=full.tensor)
    replicas = full.devices // keep.devices
    found = {
        "relay": relay_s(engine, cfg, full, relay="hybrid", zero=zero),
        "generate": generate_s(
            engine,
            cfg,
            keep,
            prompts=-(-load["rows"] // replicas),
            n=1,
            prompt_tokens=load["prompt"],
            response_tokens=load["response"],
        ),
    }
    if "update" in row:
        rows = -(-load["rows"] // load["micros"] // place.replicas)
        sizes: dict[str, Any] = {"rows": load["rows"], "tokens": tokens, "zero": zero}
        found["update"] = update_s(engine, cfg, "lm", base, micro=max(1, rows), **sizes)
        found["score"] = infer_s(engine, cfg, "lm", base, **sizes)
    return found


def placed(row: Row, full: MeshShape) -> RolePlacement:
    """The layout of a row as a placement file writes it."""
    base = MeshShape(
        data=full.data,
        fsdp=full.fsdp,
        pipe=full.pipe * full.pipe_micro,
        tensor=full.tensor * full.tensor_micro,
    )
    return RolePlacement("actor", "all", train=base, zero=row["zero"])


def pairs_of(rows: Sequence[Row], engine: Engine, cfg: ModelConfig = CFG) -> dict[str, list[Pair]]:
    """Pairs by call; `all` is the sum of a layout's calls, generation on whole models."""
    found: dict[str, list[Pair]] = {call: [] for call in (*NAMES, "all")}
    for row in rows:
        name = f"{row['layout']} {row.get('p_g', 1)}-{row['t_g']}"
        seconds = predicted(engine, row, cfg)
        for call, value in seconds.items():
            found[call].append(Pair(name, value, _three(row[call])))
        if "update" in row:
            sums = _three(sum(row[call][k] for call in NAMES) for k in range(3))
            found["all"].append(Pair(row["layout"], sum(seconds.values()), sums))
    return found


def _three(values: Iterable[float]) -> tuple[float, float, float]:
    low, middle, high = values
    return low, middle, high


def pairs_text(title: str, pairs: Sequence[Pair], spread: str = "quartiles") -> str:
    """A line a pair, in milliseconds."""
    head = f"measured ms ({spread})"
    lines = [f"{title:30}{'predicted ms':>14}{head:>28}{'ratio':>7}"]
    for pair in pairs:
        low, middle, high = (1e3 * s for s in pair.measured_s)
        text = f"{middle:,.1f} ({low:,.1f}-{high:,.1f})"
        lines.append(f"{pair.name:30}{1e3 * pair.predicted_s:14,.1f}{text:>28}{pair.ratio:7.2f}")
    return "\n".join(lines)


def order(pairs: Sequence[Pair]) -> float:
    """Rank correlation of what is predicted with the medians."""
    return spearman([p.predicted_s for p in pairs], [p.measured_s[1] for p in pairs])


def measured_rows(rounds: int) -> list[dict[str, Any]]:
    """The rows of benchmarks.measured, of a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.jsonl"
        command = [sys.executable, "-m", "benchmarks.measured", "--rounds", str(rounds)]
        subprocess.run([*command, "--out", str(out)], check=True, stdout=subprocess.DEVNULL)
        return read_rows(out)


def read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def report(rows: Sequence[Row], engine: Engine) -> bool:
    """Prints the tables; whether every call is ordered well enough."""
    found, fine = pairs_of(rows, engine), True
    layouts = {row["layout"] for row in rows}
    print(
        f"{len(layouts)} layouts of {DEVICES} simulated devices, {engine.device.name}; {host()}\n"
        f"quartiles of {rows[0]['rounds']} rounds, layouts taking turns\n"
    )
    for call, pairs in found.items():
        print(pairs_text(f"{NAMES.get(call, call)}, layout p_g-t_g", pairs) + "\n")
    for call, pairs in found.items():
        value = order(pairs)
        fine &= value >= LEAST
        print(f"rank correlation of {NAMES.get(call, call):9}{value:6.2f}  of {len(pairs)}")
    fine &= layouts >= set(LAYOUTS)
    return fine


def measured(options: argparse.Namespace) -> int:
    """Exit status 1 where a call's rank correlation is below LEAST."""
    engine = host_engine(options.host, DEVICES)
    rows = read_rows(options.rows) if options.rows else measured_rows(options.rounds or ROUNDS)
    return 0 if report(rows, engine) else 1
