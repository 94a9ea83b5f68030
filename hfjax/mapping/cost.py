# SPDX-License-Identifier: Apache-2.0
"""Seconds of training, scoring, generation and relay, from a model's sizes, a layout and a device.

Training and scoring are bound by products, generation by memory (HybridFlow §6), and everything by
launches: a device takes the longer of its own time and the engine's. Collectives are rings; between
machines the devices of a machine share its network.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hfjax.mapping.devices import Device, Profile
from hfjax.mapping.memory import F32, generation_bytes, kv_bytes, leaves, training_bytes
from hfjax.mapping.temporaries import (
    activation_bytes,
    apply_bytes,
    decode_bytes,
    prefill_bytes,
    reduce_bytes,
)
from hfjax.mapping.traffic import (
    Move,
    decode_traffic,
    forward_traffic,
    prefill_traffic,
    relay_traffic,
    update_traffic,
    weights_traffic,
)
from hfjax.models.llama import Head, ModelConfig
from meshes.mesh import AXES, PIPE, PIPE_MICRO, MeshShape

OPTIMIZER_BYTES = 28  # AdamW a parameter: float32 master, two moments and gradient in; three out
NORM_COPIES = 10  # values of model width a layer reads and writes beside its products
SCORE_COPIES = 6  # float32 reads and writes of attention scores that reach memory
LOGIT_COPIES = 3  # float32 reads and writes of logits on the way to log-probs
SEGMENT = 32  # tokens between two looks at whether any row still runs (hfjax.engine.decode)
SUM_COPIES = 3  # of gradients, a micro-batch: its own and the sum so far read, the new sum written
BACKWARD = 2  # a backward pass takes two forward passes
ORDERED = ("all-gather", "reduce-scatter")
ROUNDS = {"all-reduce": 2, "collective-permute": 0}  # of a ring; others have one


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A device, and what the engine that runs on it adds."""

    device: Device
    profile: Profile
    itemsize: int = 2  # bytes of what is computed with

    def moved_s(self, moves: Iterable[Move], shape: MeshShape) -> float:
        """Seconds of collectives, one after another."""
        return sum(move.times * self.collective_s(move, shape) for move in moves)

    def collective_s(self, move: Move, shape: MeshShape) -> float:
        """Seconds of one collective over mesh axes, all its groups at the same time."""
        device, size = self.device, move.group
        if size < 2:
            return 0.0
        if device.collective:
            near = min(device.collective, key=lambda n: abs(math.log(n / size)))
            latency_s, bytes_s = device.collective[near]
            return latency_s + move.bytes_received / bytes_s + self.ordered_s(move)
        inside = neighbours(shape, move.axes, device.node)
        link_s = move.bytes_received / (device.link_bytes_s * device.link_share)
        if inside >= size:
            return device.link_latency_s + link_s
        rings = min(device.node, shape.devices) / inside  # that share a machine's network
        network_bytes_s = device.network_bytes_s * device.network_share
        return device.network_latency_s + max(link_s, move.bytes_received * rings / network_bytes_s)

    def ordered_s(self, move: Move) -> float:
        """Seconds in which simulated devices put in order what a collective gathers or scatters.

        The CPU compiler makes its dimension the outermost, and copies the whole from or to the
        order of the arrays; the layers' dimension, which stages share, is the outermost already.
        """
        if self.device.shares < 2 or move.kind not in ORDERED or {PIPE, PIPE_MICRO} & {*move.axes}:
            return 0.0
        return self.device.copy_s(2 * move.bytes_received * move.group / (move.group - 1))

    def launch_s(self, layers: float) -> float:
        """Seconds in which a pass through so many layers is asked for, and no device works."""
        return self.profile.step_s + layers * self.profile.layer_s

    def hops_s(self, moves: Iterable[Move]) -> float:
        """The same of collectives: an all-reduce goes round a ring twice, a permute is one hop."""
        hops = sum(m.times * max(1, ROUNDS.get(m.kind, 1) * (m.group - 1)) for m in moves)
        return hops * self.profile.collective_s


def neighbours(shape: MeshShape, axes: Sequence[str], node: int) -> int:
    """Devices of a group over `axes` that stand in one machine; the last axis is the nearest."""
    found, stride = 1, 1
    for axis in reversed(AXES):
        size = getattr(shape, axis)
        if axis in axes:
            found *= min(size, max(1, node // stride))
        stride *= size
    return found


def layer_s(
    engine: Engine, cfg: ModelConfig, t: int, rows: float, tokens: int, *, sequence: bool = False
) -> tuple[float, float]:
    """Seconds of one layer forward on `rows` x `tokens`: its products, and its copies."""
    device, wide, size = engine.device, rows * tokens, engine.itemsize
    D, F, d = cfg.embed, cfg.mlp, cfg.head_dim
    H, K = cfg.heads / t, cfg.kv_heads / (t if cfg.kv_heads % t == 0 else 1)
    widths = (D * (H + 2 * K) * d, H * d * D, 2 * D * F / t, F / t * D)
    product = sum(device.product_s(2 * wide * width) for width in widths)
    fused = engine.profile.fused_attention
    seen = tokens / 2 if fused else tokens
    product += 2 * device.product_s(2 * rows * H * d * tokens * seen)
    held = wide * (NORM_COPIES * D / (t if sequence else 1) + 3 * F / t + 2 * (H + 2 * K) * d)
    copies = device.copy_s(held * size)
    if not fused:
        copies += device.copy_s(SCORE_COPIES * 4 * rows * H * tokens * tokens)
    return product, copies


def head_s(engine: Engine, cfg: ModelConfig, head: Head, shards: int, wide: float) -> float:
    """Seconds of the head on so many tokens: logits and their log-probs, or one number each."""
    width = cfg.padded_vocab / shards if head == "lm" else 1
    product = engine.device.product_s(2 * wide * cfg.embed * width)
    return product + engine.device.copy_s(LOGIT_COPIES * 4 * wide * width)


def replica_rows(rows: int, shape: MeshShape) -> int:
    """Rows of a replica while training or scoring; the last one's may be fillers."""
    return math.ceil(rows / (shape.data * shape.fsdp))


def infer_s(
    engine: Engine,
    cfg: ModelConfig,
    head: Head,
    shape: MeshShape,
    *,
    rows: int,
    tokens: int,
    zero: int = 3,
    sequence: bool = False,
    micro: int = 0,
) -> float:
    """Seconds of one forward pass over `rows`, `micro` a replica at a time (0: all)."""
    mine = replica_rows(rows, shape)
    micro = min(micro or mine, mine)
    p, t = shape.pipe, shape.tensor
    passes = math.ceil(mine / micro)
    options: dict[str, Any] = {"zero": zero, "sequence_parallel": sequence}
    options["itemsize"] = engine.itemsize
    moves = forward_traffic(cfg, head, shape, rows=micro, tokens=tokens, **options)
    moved, hops = engine.moved_s(moves, shape), engine.hops_s(moves)
    parts = math.gcd(p, micro)  # micro-batches that a pass is cut into
    ticks = passes * (parts + p - 1)
    if engine.profile.megatron:
        moved, hops = (x * (passes * parts + p - 1) / ticks for x in (moved, hops))
        ticks = passes * parts + p - 1
    product, copies = layer_s(engine, cfg, t, micro / parts, tokens, sequence=sequence)
    stage = cfg.layers / p
    heads = passes * head_s(engine, cfg, head, t, micro * tokens / p)
    if engine.profile.megatron:
        heads = ticks * head_s(engine, cfg, head, t, micro / parts * tokens)
    busy = ticks * stage * (product + copies) + heads + passes * moved
    if engine.device.fresh_bytes_s:
        new = activation_bytes(
            cfg, head, shape, rows=micro, tokens=tokens, backward=False, **options
        )
        busy += passes * engine.device.fresh_s(new.total)
    return max(busy, ticks * engine.launch_s(stage) + passes * hops)


def update_s(
    engine: Engine,
    cfg: ModelConfig,
    head: Head,
    shape: MeshShape,
    *,
    rows: int,
    tokens: int,
    micro: int,
    zero: int = 3,
    sequence: bool = False,
    remat: str = "none",
) -> float:
    """Seconds of one optimizer update from `rows`, `micro` rows of a replica at a time."""
    mine = replica_rows(rows, shape)
    micro = min(micro, mine)
    p, t = shape.pipe, shape.tensor
    micros = math.ceil(mine / micro)
    ticks = micros + p - 1
    product, copies = layer_s(engine, cfg, t, micro, tokens, sequence=sequence)
    again = {"none": 0.0, "layer": product + copies, "dots": copies}[remat]
    if p > 1 and not engine.profile.megatron:
        again += product + copies
    stage = cfg.layers / p
    layers = ticks * stage * ((1 + BACKWARD) * (product + copies) + again)
    share, turns = (1, ticks) if engine.profile.megatron else (p, micros)
    heads = (1 + BACKWARD) * turns * head_s(engine, cfg, head, t, micro * tokens / share)
    programs = update_traffic(
        cfg,
        head,
        shape,
        zero=zero,
        sequence_parallel=sequence,
        rows=micro,
        tokens=tokens,
        micros=micros,
        remat=remat,
        itemsize=engine.itemsize,
    )
    moves = [move for program in programs.values() for move in program]
    sizes: dict[str, Any] = {"zero": zero, "itemsize": engine.itemsize}
    held = training_bytes(cfg, head, shape, **sizes)
    optimizer = engine.device.copy_s(OPTIMIZER_BYTES / F32 * held.reduced)
    passes = ticks * (1 + BACKWARD + (again > 0))
    launch = passes * engine.launch_s(stage) + engine.hops_s(moves)
    busy = layers + heads + engine.moved_s(moves, shape)
    if not engine.profile.megatron:  # whose products add to the sums where they lie
        busy += micros * engine.device.copy_s(SUM_COPIES * held.gradients)
    if engine.device.fresh_bytes_s:
        sizes |= {"sequence_parallel": sequence, "remat": remat, "micros": micros}
        new = activation_bytes(cfg, head, shape, rows=micro, tokens=tokens, **sizes).total
        new += held.weights + held.gradients + held.reduced
        new += sum(f(cfg, head, shape, zero=zero) for f in (reduce_bytes, apply_bytes))
        busy += engine.device.fresh_s(new)
    return max(busy, launch) + optimizer


def generate_s(
    engine: Engine,
    cfg: ModelConfig,
    shape: MeshShape,
    *,
    prompts: int,
    n: int,
    prompt_tokens: int,
    response_tokens: int,
) -> float:
    """Seconds of a generation of which the KV cache holds every row.

    `shape` has all six axes; generation keeps `pipe` and `tensor`. The n samples of a prompt share
    its cache.
    """
    p, t, size = shape.pipe, shape.tensor, engine.itemsize
    mine = math.ceil(prompts / (shape.devices // (p * t)))
    rows = mine * n
    if not engine.profile.kv_cache:
        return _recomputed_s(engine, cfg, shape, rows, prompt_tokens, response_tokens)
    device, stage = engine.device, cfg.layers / p
    micro = math.ceil(rows / min(p, mine))  # a stage works on one of p parts at a time
    moves = decode_traffic(cfg, shape, rows=mine, n=n, itemsize=size)
    weights = generation_bytes(cfg, shape, itemsize=size)
    products, _ = layer_s(engine, cfg, t, micro, 1)
    ops = p * stage * products + p * device.product_s(2 * micro * cfg.embed * cfg.padded_vocab / t)
    logits = device.copy_s(p * micro * cfg.padded_vocab / t * F32 * LOGIT_COPIES)
    fixed = max(p * device.copy_s(weights), ops) + logits + engine.moved_s(moves, shape)
    token_s = kv_bytes(cfg, shape, rows=1, slots=1, itemsize=size)
    token_s /= device.memory_bytes_s * device.copy[-1][1]
    fixed += mine * prompt_tokens * token_s
    launch = p * engine.launch_s(stage) + engine.hops_s(moves)
    decode = _longer_s(fixed, rows * token_s, launch, response_tokens)
    prefill = _prefill_s(engine, cfg, shape, mine, prompt_tokens)
    if device.fresh_bytes_s:
        new = prefill_bytes(cfg, shape, rows=mine, tokens=prompt_tokens, itemsize=size)
        slots = prompt_tokens + n * response_tokens
        new += 2 * kv_bytes(cfg, shape, rows=mine, slots=slots, itemsize=size)  # grows by doubling
        segments = math.ceil(response_tokens / SEGMENT)
        new += segments * decode_bytes(cfg, shape, rows=rows, slots=slots, itemsize=size)
        prefill += device.fresh_s(new)
    return prefill + decode


def _longer_s(fixed: float, slope: float, least: float, steps: int) -> float:
    """The sum over so many steps of max(fixed + slope * step, least)."""
    at = 0.0
    if fixed < least:
        at = min((least - fixed) / slope if slope else math.inf, steps)
    return at * least + (steps - at) * (fixed + slope * (at + steps) / 2)


def _prefill_s(
    engine: Engine, cfg: ModelConfig, shape: MeshShape, prompts: int, tokens: int
) -> float:
    p, t = shape.pipe, shape.tensor
    micro = math.ceil(prompts / p)
    ticks = 2 * p - 1 if p > 1 else 1
    product, copies = layer_s(engine, cfg, t, micro, tokens)
    moves = prefill_traffic(cfg, shape, rows=prompts, tokens=tokens, itemsize=engine.itemsize)
    busy = ticks * cfg.layers / p * (product + copies) + engine.moved_s(moves, shape)
    return max(busy, ticks * engine.launch_s(cfg.layers / p) + engine.hops_s(moves))


def _recomputed_s(
    engine: Engine, cfg: ModelConfig, shape: MeshShape, rows: int, prompt: int, response: int
) -> float:
    """Every token by a pass over the whole row so far: Simpson's rule over the lengths."""
    lengths = (prompt, prompt + response // 2, prompt + response)
    a, b, c = (_prefill_s(engine, cfg, shape, rows, length) for length in lengths)
    return response * (a + 4 * b + c) / 6


def relay_s(
    engine: Engine,
    cfg: ModelConfig,
    shape: MeshShape,
    *,
    relay: str,
    zero: int,
) -> float:
    """Seconds from training's layout to generation's; `shape` has all six axes.

    Our engine makes what passes read anew after an update.
    """
    sizes: dict[str, Any] = {"relay": relay, "zero": zero, "itemsize": engine.itemsize}
    moves = relay_traffic(cfg, shape, **sizes)
    if not engine.profile.megatron:
        moves = (*weights_traffic(cfg, "lm", shape, **sizes), *moves)
    return engine.moved_s(moves, shape) + engine.hops_s(moves)


def sent_s(engine: Engine, cfg: ModelConfig, copies: int, senders: int, receivers: int) -> float:
    """Seconds in which a pool's weights reach `copies` in another, machines sharing networks."""
    device, whole = engine.device, parameters(cfg, "lm") * engine.itemsize
    machines = [math.ceil(n / device.node) for n in (senders, receivers)]
    slowest = max(whole / machines[0], whole * copies / machines[1])
    return device.network_latency_s + slowest / (device.network_bytes_s * device.network_share)


def columns_s(engine: Engine, size: float, senders: int, receivers: int) -> float:
    """Seconds in which a batch's columns reach another pool, each row going one way."""
    device = engine.device
    machines = math.ceil(min(senders, receivers) / device.node)
    bytes_s = machines * device.network_bytes_s * device.network_share
    return device.network_latency_s + size / bytes_s


def parameters(cfg: ModelConfig, head: Head) -> float:
    """Parameters of a model with its head."""
    return sum(math.prod(leaf.shape) for leaf in leaves(cfg, head))
