# SPDX-License-Identifier: Apache-2.0
"""Seconds of the engine's calls under many layouts, which predictions of them are held against.

    python -m benchmarks.measured [--rounds 5] [--layouts data8 ...] [--out FILE.jsonl]

A small model on 8 simulated devices of this process: one update, one scoring pass, the relay to
generation and back, one generation. Layouts take turns; a line of JSON a layout goes to --out.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.figure14 import host
from benchmarks.gpu_check import likelihood_loss
from hfjax.controller.protocol import Shard
from hfjax.controller.worker import join
from hfjax.engine.decode import THREEFRY, Decoder
from hfjax.engine.hybrid import Relay, Weights
from hfjax.engine.passes import Passes
from hfjax.engine.replicas import Replicas
from hfjax.engine.sampling import Sampling
from hfjax.engine.scoring import Scorer
from hfjax.engine.train import OptimizerConfig, Trainer
from hfjax.models.llama import ModelConfig, abstract_params
from meshes.layouts import batch_sharding, divisors, generate_layout, train_layout
from meshes.mesh import MeshShape, make_mesh
from meshes.placement import RolePlacement

DEVICES, ROUNDS = 8, 5  # rounds after one that compiles
CALLS = ("update", "score", "relay", "generate", "back")
CFG = ModelConfig(  # 8 million parameters
    layers=8,
    embed=256,
    heads=8,
    kv_heads=4,
    head_dim=32,
    mlp=688,
    vocab=4096,
    rope_theta=1e4,
)


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is trained on, scored and generated; updates take `micros` micro-batches."""

    rows: int = 32
    prompt: int = 64
    response: int = 64
    micros: int = 4


LAYOUTS = {  # every way to write eight as data x fsdp x tensor x pipe; and one with ZeRO 1
    "data8": {"data": 8},
    "fsdp8": {"fsdp": 8},
    "zero1-8": {"fsdp": 8, "zero": 1},
    "data2-fsdp4": {"data": 2, "fsdp": 4},
    "data4-fsdp2": {"data": 4, "fsdp": 2},
    "data4-tensor2": {"data": 4, "tensor": 2},
    "data2-tensor4": {"data": 2, "tensor": 4},
    "tensor8": {"tensor": 8},
    "fsdp4-tensor2": {"fsdp": 4, "tensor": 2},
    "fsdp2-tensor4": {"fsdp": 2, "tensor": 4},
    "data2-fsdp2-tensor2": {"data": 2, "fsdp": 2, "tensor": 2},
    "pipe2-data4": {"pipe": 2, "data": 4},
    "pipe2-fsdp4": {"pipe": 2, "fsdp": 4},
    "pipe2-tensor4": {"pipe": 2, "tensor": 4},
    "pipe2-data2-fsdp2": {"pipe": 2, "data": 2, "fsdp": 2},
    "pipe2-tensor2-data2": {"pipe": 2, "tensor": 2, "data": 2},
    "pipe2-tensor2-fsdp2": {"pipe": 2, "tensor": 2, "fsdp": 2},
    "pipe4-data2": {"pipe": 4, "data": 2},
    "pipe4-fsdp2": {"pipe": 4, "fsdp": 2},
    "pipe4-tensor2": {"pipe": 4, "tensor": 2},
    "pipe8": {"pipe": 8},
}


class Turn:
    """One layout: its programs; arrays are there in its turn only."""

    def __init__(
        self, name: str, generate: MeshShape, load: Load, params: Any, cfg: ModelConfig
    ) -> None:
        sizes = dict(LAYOUTS[name])
        zero = sizes.pop("zero", 3)
        train = MeshShape(**sizes)
        place = RolePlacement("actor", "all", train=train, generate=generate, zero=zero)
        self.name, self.load, self._params = name, load, params
        self.shape, self.zero, self.generate = place.mesh_shape, zero, generate
        self.trains = generate.devices == 1  # the others only generate
        mesh = make_mesh(jax.devices(), self.shape)
        layout = train_layout(self.shape, kv_heads=cfg.kv_heads, zero=zero)
        after = generate_layout(self.shape, kv_heads=cfg.kv_heads)
        shapes, axes = abstract_params(cfg, "lm", jnp.float32)
        self._replicas = Replicas(mesh, layout, shapes, axes, "float32")
        self._relay = Relay(mesh, layout, after, shapes, axes, jnp.float32)
        self._trainer = Trainer(
            cfg, "lm", self._replicas, OptimizerConfig(), likelihood_loss, zero=zero
        )
        self._scorer = Scorer(cfg, self._replicas, with_entropy=False)
        self._passes = Passes(mesh, layout)
        self._decoder = Decoder(cfg, mesh, after)
        self._rows = batch_sharding(mesh, after)
        ids = np.random.default_rng(0).integers(
            0, cfg.vocab, (load.rows, load.prompt + load.response), np.int32
        )
        self._ids = ids
        mask = np.zeros(ids.shape, bool)
        mask[:, load.prompt :] = True
        cut = (load.micros, -1, ids.shape[1])
        self._stack = {"input_ids": ids.reshape(cut), "response_mask": mask.reshape(cut)}

    def round(self) -> dict[str, float]:
        """Seconds of each call."""
        state = self._trainer.init_state(
            jax.device_put(self._params, self._replicas.state_shardings)
        )
        held = Weights(self._replicas, jax.block_until_ready(state), self._relay)
        calls: dict[str, Callable[[], Any]] = {
            "update": partial(self._update, held),
            "score": partial(self._score, held),
            "relay": held.generate,
            "generate": partial(self._generate, held),
            "back": held.state,
        }
        found = {}
        for name in CALLS if self.trains else CALLS[2:]:
            if name == "relay":
                held.take(held.state())  # as after an update: no copy of the weights is left
            begin_s = time.perf_counter()
            jax.block_until_ready(calls[name]())
            found[name] = time.perf_counter() - begin_s
        return found

    def _update(self, held: Weights) -> Any:
        state, _ = self._trainer.update(held.state(), [self._stack])
        held.take(state)
        return state

    def _score(self, held: Weights) -> Any:
        rows = np.arange(self.load.rows)
        shard = Shard({"input_ids": self._ids}, rows, len(rows), 1, 0)
        return self._passes.over(
            shard, ("input_ids",), partial(self._scorer.log_probs, held.train())
        )

    def _generate(self, held: Weights) -> Any:
        load = self.load
        columns = (
            np.ascontiguousarray(self._ids[:, : load.prompt]),
            np.full(load.rows, load.prompt, np.int32),
            np.arange(load.rows, dtype=np.int32)[:, None],
        )
        ids, lengths, numbers = jax.device_put(columns, self._rows)
        sampling = Sampling(max_new_tokens=load.response, ignore_eos=True)
        key = jax.random.key(0, impl=THREEFRY)
        return self._decoder.generate(held.generate(), ids, lengths, numbers, key, sampling)


def turns(names: Sequence[str], load: Load, cfg: ModelConfig) -> Iterator[Turn]:
    """Every layout, with every t_g and p_g that it can keep."""
    shapes, _ = abstract_params(cfg, "lm", jnp.float32)
    draw = np.random.default_rng(0)
    params = jax.tree.map(lambda s: draw.normal(0, 0.02, s.shape).astype(np.float32), shapes)
    for name in names:
        t, p = (LAYOUTS[name].get(axis, 1) for axis in ("tensor", "pipe"))
        for t_g, p_g in itertools.product(divisors(t), divisors(p)):
            yield Turn(name, MeshShape(tensor=t_g, pipe=p_g), load, params, cfg)


def measured(
    names: Sequence[str], rounds: int, load: Load, cfg: ModelConfig
) -> Iterator[list[dict[str, Any]]]:
    """A row a layout, with quartiles of each call's seconds; after each round from the second."""
    each, begin_s = list(turns(names, load, cfg)), time.perf_counter()
    found: list[list[dict[str, float]]] = [[] for _ in each]
    for number in range(rounds + 1):
        for turn, seconds in zip(each, found, strict=True):
            one = turn.round()
            if number:  # the first compiled
                seconds.append(one)
            spent_s = time.perf_counter() - begin_s
            print(f"{spent_s:6.0f} s  round {number}  {turn.name}", file=sys.stderr, flush=True)
        if number > 1:
            yield [row_of(turn, seconds) for turn, seconds in zip(each, found, strict=True)]


def row_of(turn: Turn, seconds: Sequence[dict[str, float]]) -> dict[str, Any]:
    """One layout's sizes and quartiles."""
    keep = turn.generate
    row: dict[str, Any] = {"layout": turn.name, "zero": turn.zero}
    row |= {"p_g": keep.pipe, "t_g": keep.tensor}
    row |= {"mesh": asdict(turn.shape), "load": asdict(turn.load), "rounds": len(seconds)}
    quartiles = {c: statistics.quantiles([one[c] for one in seconds], n=4) for c in seconds[0]}
    return row | quartiles


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Medians in ms, and the quartiles."""
    lines = ["layout".ljust(20) + "p_g-t_g" + "".join(f"{call:>24}" for call in CALLS)]
    for row in rows:
        cells = ""
        for call in CALLS:
            low, middle, high = (1e3 * s for s in row.get(call, (0, 0, 0)))
            text = f"{middle:.1f} ({low:.0f}-{high:.0f})" if call in row else "-"
            cells += f"{text:>24}"
        lines.append(f"{row['layout']:20}{row['p_g']:5}-{row['t_g']}{cells}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.measured")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--micros", type=int, default=Load.micros)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if options.rounds < 2:
        parser.error(f"--rounds {options.rounds}: quartiles need at least 2")
    join(platform="cpu", devices=DEVICES, rank=0, processes=1, coordinator="")
    load = replace(Load(), micros=options.micros)
    rows: list[dict[str, Any]] = []
    for rows in measured(options.layouts, options.rounds, load, CFG):
        if options.out:
            options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(
        f"8 M parameters, float32; {load.rows} rows of {load.prompt} + {load.response} tokens, "
        f"{load.micros} micro-batches an update; {DEVICES} simulated devices; {host()}\n"
        f"ms, median and quartiles of {options.rounds}, layouts taking turns"
    )
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
