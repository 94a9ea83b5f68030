# SPDX-License-Identifier: Apache-2.0
"""What `hfjax calibrate` times, in a child process: this host, and the fixed seconds of our engine.

The engine works with a model so small, on rows so few, that nothing else counts.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from hfjax import rl
from hfjax.engine.decode import THREEFRY, Decoder
from hfjax.engine.meter import meter
from hfjax.engine.replicas import Replicas
from hfjax.engine.sampling import Sampling
from hfjax.engine.scoring import Scorer
from hfjax.engine.train import OptimizerConfig, Outputs, Trainer
from hfjax.mapping.host_probes import BODIES, SIZES, Chain, Probe, Row, Size, medians
from hfjax.models.llama import ModelConfig, abstract_params
from meshes.layouts import generate_layout, shardings, train_layout
from meshes.mesh import TENSOR, MeshShape, make_mesh

PROMPT = 8  # tokens of the engine's rows


class Engine:
    """Our own engine with a model so small that only its fixed seconds count."""

    def __init__(self, probe: Probe, layers: int, tensor: int) -> None:
        self._size, self.layers = probe.size, layers
        replicas = len(probe.devices) // tensor
        shape = MeshShape(data=replicas, tensor=tensor)
        self._cfg = ModelConfig(
            layers=layers,
            embed=16,
            heads=2,
            kv_heads=2,
            head_dim=8,
            mlp=32,
            vocab=64,
            rope_theta=1e4,
        )
        self._mesh, self._dtype = make_mesh(list(probe.devices), shape), probe.dtype
        self._layout = generate_layout(shape, kv_heads=2)
        self._train_layout = train_layout(shape, kv_heads=2)
        self._abstract, self._axes = abstract_params(self._cfg, "lm", self._dtype)
        self._replicas = replicas

    def decoding(self) -> "Decoding":
        """Generation by this model."""
        placed = shardings(self._mesh, self._layout, self._axes)
        params = jax.tree.map(_filled, self._abstract, placed)
        return Decoding(self._cfg, self._mesh, self._layout, params, self._replicas, self._size)

    def passes(self, *micros: int) -> list[Callable[[], Any]]:
        """A scoring pass, then an update from so many micro-batches, for each number."""
        replicas = Replicas(
            self._mesh, self._train_layout, self._abstract, self._axes, str(self._dtype)
        )
        scorer = Scorer(self._cfg, replicas, with_entropy=False)
        ids = np.ones((self._replicas, PROMPT), np.int32)
        tokens = jax.device_put(ids, replicas.row_sharding)
        trainer = Trainer(self._cfg, "lm", replicas, OptimizerConfig(), _likelihood)
        master, _ = abstract_params(self._cfg, "lm", jnp.float32)
        runs: list[Callable[[], Any]] = []
        for number in micros:
            params = jax.tree.map(_filled, master, replicas.state_shardings)
            if not runs:
                runs.append(partial(scorer.log_probs, replicas.weights(params), tokens))
            stack = {
                "input_ids": np.broadcast_to(ids, (number, *ids.shape)),
                "response_mask": np.ones((number, *ids.shape), bool),
            }
            update = partial(_updated, trainer, [stack])
            runs.append(Chain(update, trainer.init_state(jax.tree.map(jnp.copy, params))))
        return runs


class Decoding:
    """Generation of few or many tokens by one compiled program."""

    def __init__(
        self, cfg: ModelConfig, mesh: Mesh, layout: Any, params: Any, rows: int, size: Size
    ) -> None:
        self._params, self._mesh, self._rows = params, mesh, rows
        self.few, self.many = 2, size.tokens
        self._sampling = Sampling(max_new_tokens=size.tokens, ignore_eos=True)
        self._decoder = Decoder(cfg, mesh, layout, segment=size.tokens)

    def generate(self, tokens: int) -> Any:
        """So many tokens a row: one in prefill, a step for each further one."""
        rows = jnp.arange(self._rows, dtype=jnp.int32)[:, None]
        prompts = jnp.ones((self._rows, PROMPT), jnp.int32)
        lengths, limits = (jnp.full(self._rows, n, jnp.int32) for n in (PROMPT, tokens))
        key = jax.random.key(0, impl=THREEFRY)
        arguments = (prompts, lengths, rows, key, self._sampling, limits)
        return self._decoder.generate(self._params, *arguments)

    def hops(self, layers: int) -> tuple[int, int]:
        """Of the rings between devices that share a layer, in a step: outside of layers, in one."""
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self._params
        )
        lowered = self._decoder.lowered(abstract, self._rows, PROMPT, self._sampling)
        program = lowered["segment"].compile()
        once, twice = (meter(program, mesh=self._mesh, trips=n).collectives for n in (1, 2))
        found = [0, 0]
        for one, two in zip(once, twice, strict=True):
            if TENSOR in one.axes:
                inside = two.trips - one.trips == layers
                found[inside] += (two.trips > one.trips) * hops_of(one.kind, one.group_size)
        return found[0], found[1]


def hops_of(kind: str, group: int) -> int:
    """Of a ring; an all-reduce goes round twice."""
    return (2 if kind == "all-reduce" else 1) * (group - 1)


def _filled(leaf: Any, sharding: NamedSharding) -> jax.Array:
    return jax.device_put(np.full(leaf.shape, 0.01).astype(leaf.dtype), sharding)


def _likelihood(
    outputs: Outputs, batch: Mapping[str, jax.Array], total: rl.Denominators
) -> tuple[jax.Array, dict[str, Any]]:
    return rl.aggregate(-outputs.log_probs_BT, batch["response_mask"], total), {}


def _updated(trainer: Trainer, micros: Sequence[Any], state: Any) -> Any:
    return trainer.update(state, micros)[0]


def decoding(probe: Probe) -> list[Row]:
    """Seconds of a step at each depth, on whole models and on pairs of devices; and of a call."""
    tensors = (1, 2) if len(probe.devices) % 2 == 0 else (1,)
    cases = [(layers, t) for t in tensors for layers in probe.size.layers]
    each = [Engine(probe, *case).decoding() for case in cases]
    runs = [partial(one.generate, n) for one in each for n in (one.few, one.many)]
    seconds = medians(runs, probe.size.rounds)
    shallow = probe.size.layers[0]
    outside, inside = each[cases.index((shallow, 2))].hops(shallow) if 2 in tensors else (0, 0)
    rows = []
    for i, ((layers, t), one) in enumerate(zip(cases, each, strict=True)):
        few_s, many_s = seconds[2 * i : 2 * i + 2]
        hops = (outside + layers * inside) * (t > 1)
        step_s = (many_s - few_s) / (one.many - one.few)
        rows.append({"layers": layers, "hops": hops, "seconds": step_s, "call_s": few_s})
    return rows


def passes(probe: Probe) -> tuple[list[Row], list[Row]]:
    """Seconds of scoring passes at each depth, and of updates at each depth and of more micros."""
    cases = [(n, (1,)) for n in probe.size.layers[:-1]] + [(probe.size.layers[-1], (1, 4))]
    runs = [run for n, micros in cases for run in Engine(probe, n, 1).passes(*micros)]
    seconds = iter(medians(runs, probe.size.rounds))
    infer, train = [], []
    for n, micros in cases:
        infer.append({"layers": n, "seconds": next(seconds)})
        train += [{"layers": n, "micros": m, "seconds": next(seconds)} for m in micros]
    return infer, train


def measured(devices: Sequence[jax.Device], size: Size) -> Iterator[tuple[str, Any]]:
    """What was found, by name, as it is found."""
    platform = devices[0].platform
    probe = Probe(devices, "float32" if platform == "cpu" else "bfloat16", size)
    stats = devices[0].memory_stats() or {}
    yield (
        "host",
        {
            "platform": platform,
            "kind": devices[0].device_kind,
            "devices": len(devices),
            "dtype": str(probe.dtype),
            "memory_bytes": stats.get("bytes_limit", 0),
            "jax": jax.__version__,
            "rounds": size.rounds,
        },
    )
    yield "call", probe.call()
    yield "products", probe.products()
    yield "copies", probe.copies()
    yield "fresh", probe.fresh()
    yield "host_copy", probe.host()
    groups = [n for n in (2**k for k in range(1, 11)) if len(devices) % n == 0]
    yield (
        "collectives",
        [row for kind in BODIES for n in groups for row in probe.collectives(kind, n)],
    )
    yield "decode", decoding(probe)
    yield "infer", (pair := passes(probe))[0]
    yield "train", pair[1]


def main(arguments: Sequence[str]) -> None:
    """Prints a line of JSON for each thing measured; `arguments`: devices wished for, size."""
    wished, name = int(arguments[0]), arguments[1]
    devices = jax.devices()
    if wished and wished != len(devices):
        found = {"found": len(devices), "platform": devices[0].platform}
        print(json.dumps({"name": "refused", "value": found}), flush=True)
        return
    size = SIZES[name or ("cpu" if devices[0].platform == "cpu" else "gpu")]
    for what, value in measured(devices, size):
        print(json.dumps({"name": what, "value": value}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
