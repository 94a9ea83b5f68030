# SPDX-License-Identifier: Apache-2.0
"""`hfjax calibrate`: times this host with all its devices busy, and writes its table of devices.

A child process measures (hfjax.mapping.probes); here seconds become rates, latencies and the fixed
costs of the engine, which no formula knows.
"""

import argparse
import datetime
import itertools
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from hfjax.controller.worker import COUNT_FLAG

DEADLINE_S = 900  # of the child
LEAST_S = 1e-9  # where a fit finds none: seconds must be above 0
NAME = re.compile(r"[A-Za-z0-9_-]+")
POOLED = ("all-gather", "all-reduce")  # kinds behind the one line a group size
Row = Mapping[str, Any]
Found = Mapping[str, Any]  # what the child measured, by name


def fitted(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """The x >= 0 with rows @ x nearest to seconds, in relative terms."""
    wanted = np.ones(len(seconds))
    matrix = np.asarray(rows, float) / np.asarray(seconds, float)[:, None]
    columns = matrix.shape[1]
    best, least = np.zeros(columns), math.inf
    for size in range(1, columns + 1):
        for kept in itertools.combinations(range(columns), size):
            part, *_ = np.linalg.lstsq(matrix[:, kept], wanted, rcond=None)
            error = float(((matrix[:, kept] @ part - wanted) ** 2).sum())
            if (part >= 0).all() and error < least:
                best, least = np.zeros(columns), error
                best[list(kept)] = part
    return best.tolist()


def line(rows: Sequence[Row]) -> tuple[float, float]:
    """Latency and bandwidth of {bytes, seconds}: seconds = latency_s + bytes / bytes_s."""
    latency_s, slope = fitted([(1.0, row["bytes"]) for row in rows], [r["seconds"] for r in rows])
    if not slope:
        largest = max(rows, key=lambda row: row["bytes"])
        slope = largest["seconds"] / largest["bytes"]
    return max(latency_s, LEAST_S), 1 / slope


def rates(rows: Sequence[Row], key: str) -> list[tuple[float, float]]:
    """(size, size a second), sizes rising; a larger thing takes no less time."""
    ordered = sorted(rows, key=lambda row: row[key])
    most = itertools.accumulate((row["seconds"] for row in ordered), max)
    return [(row[key], row[key] / seconds) for row, seconds in zip(ordered, most, strict=True)]


def decode_cost(rows: Sequence[Row]) -> tuple[float, float, float]:
    """Fixed seconds of a step, a layer and a hop of a ring, of {layers, hops, seconds}."""
    rows = [row for row in rows if row["seconds"] > 0]
    if not rows:
        return LEAST_S, LEAST_S, LEAST_S
    terms = [(1.0, row["layers"], row["hops"]) for row in rows]
    step_s, layer_s, hop_s = fitted(terms, [row["seconds"] for row in rows])
    return max(step_s, LEAST_S), max(layer_s, LEAST_S), max(hop_s, LEAST_S)


def train_cost(rows: Sequence[Row]) -> tuple[float, float, float]:
    """Fixed seconds of an update, a micro-batch and a layer of one: {layers, micros, seconds}."""
    terms = [(1.0, row["micros"], row["micros"] * row["layers"]) for row in rows]
    call_s, micro_s, layer_s = fitted(terms, [row["seconds"] for row in rows])
    return max(call_s, LEAST_S), max(micro_s, LEAST_S), max(layer_s, LEAST_S)


def infer_cost(rows: Sequence[Row]) -> tuple[float, float]:
    """Fixed seconds of a forward pass and of a layer of it: {layers, seconds}."""
    terms = [(1.0, row["layers"]) for row in rows]
    call_s, layer_s = fitted(terms, [row["seconds"] for row in rows])
    return max(call_s, LEAST_S), max(layer_s, LEAST_S)


def groups_of(rows: Sequence[Row], kinds: Sequence[str]) -> dict[int, tuple[float, float]]:
    """Latency and bandwidth by group size, of these kinds together."""
    sizes = sorted({row["group"] for row in rows})
    return {
        n: line([row for row in rows if row["group"] == n and row["kind"] in kinds]) for n in sizes
    }


def table(name: str, found: Found) -> str:
    """The TOML that load_devices reads, and under [measured] what it was made from."""
    return "\n".join((*_head(name, found), *_device(name, found), *_measured(name, found), ""))


def _head(name: str, found: Found) -> Iterator[str]:
    host, today = found["host"], datetime.date.today().isoformat()
    yield f"# `hfjax calibrate` on {platform.node()}, {today}: {host['devices']} x {host['kind']},"
    yield f"# all busy at once; {host['dtype']}, jax {host['jax']}, medians of {host['rounds']}."
    yield "# Units: seconds, bytes; of one device, while the others do the same."
    yield ""


def _device(name: str, found: Found) -> Iterator[str]:
    host = found["host"]
    devices, cpu = host["devices"], host["platform"] == "cpu"
    products, copies = rates(found["products"], "operations"), rates(found["copies"], "bytes")
    flops, memory_s = max(rate for _, rate in products), copies[-1][1]
    to_host = found["host_copy"]["bytes"] / found["host_copy"]["seconds"]
    groups = groups_of(found["collectives"], POOLED)
    latency_s, link = groups[max(groups)] if groups else (found["call"]["call_s"], to_host)
    whence = f"a group of {max(groups)}" if groups else "one device: as through the host"
    memory = host["memory_bytes"] or host_memory() // devices
    yield f"[device.{name}]"
    yield from _keys(
        ("flops", flops, "of matrix products, a second; the best of matmul"),
        ("memory_bytes", memory, "this host's / devices" if cpu else "bytes_limit"),
        ("memory_bytes_s", memory_s, "read and written in place; the largest of copy"),
        ("node", devices, "devices of this host"),
        ("link_bytes_s", link, f"received; {whence}"),
        ("link_latency_s", latency_s, f"{whence}"),
        ("network_bytes_s", link * devices, "not measured: as the links of all devices"),
        ("network_latency_s", latency_s, "not measured: as the link's"),
        ("host_bytes_s", to_host, "to host memory and back"),
        ("shares", devices if cpu else 1, "devices that share the cores"),
    )
    if cpu:
        fresh = found["fresh"]["bytes"] / found["fresh"]["seconds"]
        yield from _keys(("fresh_bytes_s", fresh, "copied into memory that is new"))
    yield f"matmul = {_pairs(products, flops)}  # operations of a product, share of flops"
    yield f"copy = {_pairs(copies, memory_s)}  # bytes read and written, share of memory_bytes_s"
    if groups:
        yield f"\n[device.{name}.collective]  # devices of a group: latency_s, bytes_s received;"
        yield f"# {' and '.join(POOLED)}, all groups of that size at once"
        yield from (f"{n} = {_list(pair)}" for n, pair in groups.items())
    step_s, layer_s, hop_s = decode_cost(found["decode"])
    yield f"\n[device.{name}.profile]  # of a decode step with nothing to compute"
    yield from _keys(
        ("step_s", step_s, "a token"),
        ("layer_s", layer_s, "a layer of it"),
        ("collective_s", hop_s, "a hop of a ring between two devices" if groups else "not found"),
    )


def _measured(name: str, found: Found) -> Iterator[str]:
    host = found["host"]
    yield f"\n[measured.{name}]"
    yield from _keys(
        ("dtype", host["dtype"], "computed with"),
        ("call_s", found["call"]["call_s"], "a program that does nothing"),
    )
    products = [_list(pair) for pair in rates(found["products"], "operations")]
    yield f"matmul = [{', '.join(products)}]  # operations of a product, operations a second"
    copies = [_list(pair) for pair in rates(found["copies"], "bytes")]
    yield f"copy = [{', '.join(copies)}]  # bytes read and written, bytes a second"
    kinds = dict.fromkeys(row["kind"] for row in found["collectives"])
    for kind in kinds:
        yield f"\n[measured.{name}.{kind}]  # devices of a group: latency_s, bytes_s received"
        lines = groups_of(found["collectives"], (kind,))
        yield from (f"{n} = {_list(pair)}" for n, pair in lines.items())
    step_s, layer_s, hop_s = decode_cost(found["decode"])
    call_s = statistics.median(row["call_s"] for row in found["decode"] if not row["hops"])
    yield f"\n[measured.{name}.decode]  # of a generation with nothing to compute"
    yield from _keys(
        ("call_s", max(call_s - step_s, LEAST_S), "prefill, and the programs' calls"),
        ("step_s", step_s, "a token"),
        ("layer_s", layer_s, "a layer of it"),
        *([("hop_s", hop_s, "of a ring between two devices")] if kinds else []),
    )
    call_s, layer_s = infer_cost(found["infer"])
    yield f"\n[measured.{name}.infer]  # of a scoring pass"
    yield from _keys(("call_s", call_s, "a pass"), ("layer_s", layer_s, "a layer of it"))
    call_s, micro_s, layer_s = train_cost(found["train"])
    yield f"\n[measured.{name}.train]  # of an update"
    yield from _keys(
        ("call_s", call_s, "an update"),
        ("micro_s", micro_s, "a micro-batch, forward and backward"),
        ("layer_s", layer_s, "a layer of it"),
    )


def _keys(*lines: tuple[str, Any, str]) -> Iterator[str]:
    for key, value, comment in lines:
        yield f"{f'{key} = {_spelled(value)}':32}  # {comment}"


def _pairs(points: Sequence[tuple[float, float]], peak: float) -> str:
    return f"[{', '.join(_list((size, rate / peak)) for size, rate in points)}]"


def _list(values: Sequence[float]) -> str:
    return f"[{', '.join(map(_spelled, values))}]"


def _spelled(value: Any) -> str:
    if isinstance(value, float):
        assert 0 < value < math.inf, value
        return repr(float(f"{value:.4g}"))
    return json.dumps(value)


def host_memory() -> int:
    """Bytes of this host's memory, or of the container's where that is less."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else ""
    return min(whole, int(text)) if text.isdecimal() else whole


def measure(devices: int = 0, size: str = "", tell: Callable[[str], None] = print) -> Found:
    """What a child process finds; `devices` simulated ones, 0: those that there are."""
    environment = dict(os.environ)
    if devices:
        flags = [f for f in environment.get("XLA_FLAGS", "").split() if COUNT_FLAG not in f]
        environment["XLA_FLAGS"] = " ".join((*flags, f"{COUNT_FLAG}={devices}"))
    command = [sys.executable, "-m", "hfjax.mapping.probes", str(devices), size]
    found: dict[str, Any] = {}
    begin_s = time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
        timer = threading.Timer(DEADLINE_S, child.kill)
        timer.start()
        try:
            assert child.stdout is not None
            for text in child.stdout:
                if text.startswith("{"):
                    row = json.loads(text)
                    found[row["name"]] = row["value"]
                    tell(f"{time.monotonic() - begin_s:6.1f} s  {row['name']}")
            status = child.wait()
        finally:
            timer.cancel()
            child.kill()
            child.wait()
        errors.seek(0)
        if status:
            late = f" after {DEADLINE_S} s, its deadline" if status < 0 else ""
            raise RuntimeError(f"calibration ended with {status}{late}\n{errors.read()[-4000:]}")
    if refused := found.get("refused"):
        raise ValueError(
            f"--devices {devices}: this host has {refused['found']} of {refused['platform']}, and "
            "only CPU devices can be simulated; leave --devices out"
        )
    return found


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def main(arguments: Sequence[str], size: str = "") -> None:
    """Measures, and writes the table to --out, or to standard output."""
    parser = _Parser(prog="hfjax calibrate", add_help=False, allow_abbrev=False)
    parser.add_argument("--out")
    parser.add_argument("--name")
    parser.add_argument("--devices", type=int, default=None)
    options = parser.parse_args(arguments)
    if options.devices is not None and options.devices < 1:
        raise ValueError(f"--devices {options.devices}: simulate at least 1")
    if options.name is not None and not NAME.fullmatch(options.name):
        raise ValueError(f"--name {options.name!r}: use letters, digits, '-' and '_'")
    out = Path(options.out) if options.out else None
    if out and out.suffix != ".toml":
        raise ValueError(f"--out {out}: write a name that ends in .toml")
    if out and (out.exists() or not out.parent.is_dir()):
        why = "exists: remove it" if out.exists() else f"{out.parent} is no directory: make it"
        raise ValueError(f"--out {out}: {why}, or choose another")
    found = measure(options.devices or 0, size, lambda text: print(text, file=sys.stderr))
    text = table(options.name or default_name(found["host"]), found)
    if out:
        out.write_text(text)
        print(f"wrote {out}", file=sys.stderr)
    else:
        print(text)


def default_name(host: Row) -> str:
    """Of a device: cpu8 of eight that are simulated, nvidia-h200."""
    if host["platform"] == "cpu":
        return f"cpu{host['devices']}"
    return re.sub(r"[^a-z0-9]+", "-", host["kind"].lower()).strip("-")
