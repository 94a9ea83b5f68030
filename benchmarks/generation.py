# SPDX-License-Identifier: Apache-2.0
"""HybridFlow's figure 15: what t_g costs generation, trained as 1-8-2 on 16 devices, p_g = 1.

    python -m benchmarks.generation seconds
    python -m benchmarks.generation compiled

`seconds` generates with a small model on simulated devices and compares the tokens of all t_g; exit
status 1 where they differ. `compiled` compiles the paper's 7B and 13B ahead of time, holds no
array, and says what a device holds, reads and receives. Neither gives the paper's latencies.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from benchmarks import figure14, holding
from benchmarks.figure14 import HALF, SETUPS, Rig, Setup
from benchmarks.invariance import SEED, STEP, TIE, margin
from benchmarks.transition import Mover, described
from hfjax.engine.decode import Decoder
from hfjax.engine.meter import Traffic, memory, meter
from hfjax.engine.sampling import Sampling
from meshes.layouts import HYBRID, KV_HEADS

MODULE = "benchmarks.generation"
DEVICES = 16
T_G = (1, 2, 4, 8)
ROUNDS = 5  # of `seconds`, after one that compiles
DEVICE_BYTES, READ_BYTES_PER_S = 80e9, 2039e9  # of an A100's memory
STATE_BYTES = 38  # a parameter, the four models of PPO together; the header says which
FAILS = "FAILS: no tie"
Row = dict[str, Any]
Columns = Mapping[str, np.ndarray]  # of a batch, as margin reads them


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is generated."""

    prompts: int
    tokens: int  # of a prompt, and new ones in its response


LIGHT, FULL = Load(prompts=32, tokens=32), Load(prompts=1024, tokens=1024)
SIZES = {"layers": 8, "embed": 384, "heads": 8, "kv_heads": 8, "head_dim": 48, "mlp": 1024}
SMALL = replace(  # 20 million parameters
    SETUPS["7b"], cfg=replace(SETUPS["7b"].cfg, **SIZES, vocab=8192)
)


def cases(setup: Setup) -> Iterator[Setup]:
    """The setup with every t_g that divides t."""
    return (replace(setup, t_g=t_g) for t_g in T_G if setup.t % t_g == 0)


def held(rig: Rig, load: Load) -> Row:
    """Bytes a device: the weights, and a sequence's keys and values; replicas and their share."""
    place, cfg = rig.placement, rig.cfg
    replicas, shards = (
        place.mesh_shape.over(axes)
        for axes in (place.generate_batch, rig.after.mesh_axes(KV_HEADS))
    )
    slot = 2 * cfg.layers * cfg.kv_heads // shards * cfg.head_dim * np.dtype(rig.dtype).itemsize
    return {
        "t_g": place.t_g,
        "d_g": place.micro_replicas,
        "replicas": replicas,
        "share": math.ceil(load.prompts / replicas),
        "weights": rig.bytes(rig.generate, list(rig.shapes)),
        "cache": slot * 2 * load.tokens,
    }


class Turn:
    """One t_g: its weights in training, the relay, the decoder."""

    def __init__(self, setup: Setup, devices: int, load: Load) -> None:
        self._mover = Mover(setup, devices, HYBRID)
        rig = self._mover.rig
        self.held = held(rig, load)
        self._decoder = Decoder(rig.cfg, rig.mesh, rig.after, segment=load.tokens)
        self._sampling = Sampling(max_new_tokens=load.tokens, ignore_eos=True)
        self._key = jax.random.fold_in(jax.random.key(SEED), STEP)
        shape = (load.prompts, load.tokens)
        self._prompt_ids = jax.random.randint(self._key, shape, 0, rig.cfg.vocab, jnp.int32)
        self._lengths = jnp.full(load.prompts, load.tokens, jnp.int32)
        self._row_ids = jnp.arange(load.prompts, dtype=jnp.int32)

    def round(self) -> tuple[float, float, Columns]:
        """Seconds of the relay and of generation, and what was sampled."""
        moved, relay_s = self._mover.there()
        rows = (self._prompt_ids, self._lengths, self._row_ids[:, None])
        start_s = time.perf_counter()
        found = self._decoder.generate(unflatten_dict(moved), *rows, self._key, self._sampling)
        jax.block_until_ready(found)
        took_s = time.perf_counter() - start_s
        self._mover.back(moved)
        columns = {
            "input_ids": found.input_ids_BT,
            "length": found.length_B,
            "prompt_length": found.prompt_length_B,
            "row_id": self._row_ids,
            "rollout_log_probs": found.log_probs_BT,
        }
        return relay_s, took_s, jax.device_get(columns)


def seconds(setup: Setup, devices: int, load: Load, rounds: int = ROUNDS) -> Iterator[Row]:
    """A row of every t_g, the layouts taking turns; compared with the last."""
    turns = [Turn(each, devices, load) for each in cases(setup)]
    sampled = [turn.round()[2] for turn in turns]
    found = [[turn.round()[:2] for turn in turns] for _ in range(rounds)]
    for i, turn in enumerate(turns):
        relay, took = zip(*(each[i] for each in found), strict=True)
        low, middle, high = statistics.quantiles(took, n=4)
        differ, ties = differences(sampled[i], sampled[-1])
        yield turn.held | {
            "relay_s": statistics.median(relay),
            "low": low,
            "seconds": middle,
            "high": high,
            "ratio": statistics.median(each[i][1] / each[-1][1] for each in found),
            "tokens_per_s": load.prompts * load.tokens / middle,
            "caches": turn.held["share"] * turn.held["cache"],
            "differ": differ,
            "text": "" if differ == ties else FAILS,
        }


def differences(found: Columns, wanted: Columns) -> tuple[int, int]:
    """Rows with other tokens, and those of them whose first two were all but tied."""
    rows = np.flatnonzero((found["input_ids"] != wanted["input_ids"]).any(-1))
    return len(rows), sum(margin(int(row), found, wanted) < TIE for row in rows)


def compiled(setup: Setup, devices: int, load: Load) -> Iterator[Row]:
    """A row of every t_g, its prefill and decoding compiled for one wave."""
    for each in cases(setup):
        rig = Rig(each, devices, HYBRID, HALF)
        row = waves(rig, devices, load)
        programs = holding.generation(rig, row["replicas"] * row["rows"], load.tokens)
        prefill, segment = (lowered.compile() for _, lowered in programs)
        traffic = a_step(segment, rig)
        yield row | {
            "times": sum(one.trips for one in traffic.collectives),
            "received": traffic.bytes_received,
            "prefill": memory(prefill).temp_bytes,
            "segment": memory(segment).temp_bytes,
            "bound_s": read_bytes(rig, row, load) / READ_BYTES_PER_S,
            "text": described(traffic),
        }


def waves(rig: Rig, devices: int, load: Load) -> Row:
    """`held`, with the sequences that fit beside the states, and the equal waves that makes."""
    row, count = held(rig, load), sum(leaf.size for leaf in rig.shapes.values())
    free = DEVICE_BYTES - STATE_BYTES * count / devices - row["weights"]
    fit = int(free // row["cache"])
    if fit < 1:
        raise ValueError(
            f"t_g={row['t_g']} leaves {free:.0f} bytes, a sequence takes {row['cache']}; "
            "use a larger t_g, or more devices"
        )
    waves = math.ceil(row["share"] / fit)
    return row | {"fit": fit, "waves": waves, "rows": math.ceil(row["share"] / waves)}


def a_step(segment: jax.stages.Compiled, rig: Rig) -> Traffic:
    """What a further step of decoding moves: two steps less one."""
    once, twice = (meter(segment, mesh=rig.mesh, trips=n).collectives for n in (1, 2))
    pairs = zip(once, twice, strict=True)
    more = (replace(two, trips=two.trips - one.trips) for one, two in pairs)
    return Traffic(tuple(one for one in more if one.trips))


def read_bytes(rig: Rig, row: Row, load: Load) -> float:
    """Weights (not the table of embeddings) and filled slots that decoding reads on a device."""
    steps = range(1, load.tokens)  # prefill gives the first token
    table = [name for name in rig.shapes if name[-1] == "embed"]
    weights = row["weights"] - rig.bytes(rig.generate, table)
    filled = sum((load.tokens + t) / (2 * load.tokens) for t in steps)  # of a whole cache
    return row["waves"] * len(steps) * weights + row["share"] * filled * row["cache"]


BOTH = (("t_g", "t_g", 1, 0), ("d_g", "d_g", 1, 0))  # heading, key, unit, decimals
COLUMNS = {
    "seconds": (
        *BOTH,
        ("relay ms", "relay_s", 1e-3, 1),
        ("seconds", "seconds", 1, 3),
        ("quartile", "low", 1, 3),
        ("quartile", "high", 1, 3),
        ("/ t_g 8", "ratio", 1, 2),
        ("tokens/s", "tokens_per_s", 1, 0),
        ("KV MB", "caches", 1e6, 2),
        ("wts. MB", "weights", 1e6, 2),
        ("differ", "differ", 1, 0),
    ),
    "compiled": (
        *BOTH,
        ("weights", "weights", 1e9, 2),
        ("KV/seq.", "cache", 1e9, 3),
        ("fit", "fit", 1, 0),
        ("of", "share", 1, 0),
        ("waves", "waves", 1, 0),
        ("times", "times", 1, 0),
        ("rec. MB", "received", 1e6, 1),
        ("prefill", "prefill", 1e9, 2),
        ("segment", "segment", 1e9, 2),
        ("bound s", "bound_s", 1, 1),
    ),
}
ABOUT = {
    "seconds": f"""\
20 M parameters, float32; {LIGHT.prompts} prompts of {LIGHT.tokens} tokens, {LIGHT.tokens} new ones
each, sampled; median of {ROUNDS} rounds in which layouts take turns; / t_g 8: the rounds' ratios.
These devices share cores and one memory: a collective is copies and waiting, and weights that n
devices hold are read n times over one bus. So the ratios are what dividing the work and collectives
cost here, not the paper's latencies. KV, wts.: of a device; differ: rows unlike those of t_g 8.""",
    "compiled": f"""\
{FULL.prompts} prompts of {FULL.tokens} tokens, {FULL.tokens} new ones each; GB a device; float16
standing for bfloat16. fit: a replica's sequences in 80 GB less weights and {STATE_BYTES} bytes a
parameter / {DEVICES} (assumed: PPO's four models in one place hold 40, the actor's own 2 lie in the
weights); temporaries are not taken off. of: the sequences it is given, in equal waves.
times, rec.: collectives of one step of decoding, and bytes received. prefill, segment: temporaries
of a wave; without fused attention an upper bound. bound, A100 memory 2039 GB/s: computed, not
measured: decoding's reads of weights and filled KV slots in all waves, no collective, launch or
arithmetic; so what the paper gains with a smaller t_g is not in it.""",
}
PARTS: dict[str, Any] = {
    "seconds": (seconds, LIGHT, {"small": SMALL}),
    "compiled": (compiled, FULL, {name: SETUPS[name] for name in ("7b", "13b")}),
}


def table(part: str) -> bool:
    """Prints a line a row that the child hands in; whether all tokens agreed."""
    print(f"1-8-2 to p_g = 1 on {DEVICES} simulated devices; {figure14.host()}\n{ABOUT[part]}")
    print("model " + "".join(f"{name:>10}" for name, *_ in COLUMNS[part]), flush=True)
    fine = True
    for row in map(json.loads, figure14.children(MODULE, [part], DEVICES).splitlines()):
        cells = "".join(f"{row[key] / unit:10.{n}f}" for _, key, unit, n in COLUMNS[part])
        print(f"{row['model']:6}{cells}  {row['text']}".rstrip(), flush=True)
        fine &= row["text"] != FAILS
    return fine


def main(arguments: Sequence[str] | None = None) -> int:
    """Starts the process of one part and prints its table; 1 where tokens differ."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    parser.add_argument("part", choices=list(COLUMNS))
    for flag in (*figure14.PROCESS_FLAGS, "--processes"):
        parser.add_argument(flag, type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not figure14.joined(options):
        return 0 if table(options.part) else 1
    make, load, setups = PARTS[options.part]
    for name, setup in setups.items():
        for row in make(setup, DEVICES, load):
            print(json.dumps(row | {"model": name}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
