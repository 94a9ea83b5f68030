# SPDX-License-Identifier: Apache-2.0
"""What each of our programs moves: collectives a device, by arithmetic alone.

Derived from the compiled programs and held to them by the tests. `rows` are those of one replica
(of its micro-batch). A MeshShape has its six axes, as RolePlacement.mesh_shape gives it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from hfjax.engine.meter import RECEIVED
from hfjax.engine.pipeline import STAGES
from hfjax.mapping.memory import CHUNK, F32, Leaf, layouts, leaves, shard_size
from hfjax.models.llama import Head, ModelConfig
from meshes.layouts import BATCH, DS_CHAT, EMBED, HYBRID, LAYERS, Layout, kept_axes, zero_axes
from meshes.mesh import TENSOR, TENSOR_MICRO, MeshShape

GATHER, SCATTER, REDUCE, PERMUTE = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "collective-permute",
)


@dataclass(frozen=True)
class Move:
    """One collective, and how often it runs."""

    kind: str  # as hfjax.engine.meter names it
    axes: tuple[str, ...]  # of the mesh
    group: int  # devices
    bytes_received: float  # a device and execution, by ring algorithms
    times: int = 1

    @property
    def total_bytes(self) -> float:
        return self.times * self.bytes_received


Moves = tuple[Move, ...]


def received_bytes(moves: Iterable[Move]) -> float:
    """By one device, of all moves."""
    return sum(move.total_bytes for move in moves)


def forward_traffic(
    cfg: ModelConfig,
    head: Head,
    shape: MeshShape,
    *,
    rows: int,
    tokens: int,
    zero: int = 3,
    relay: str = HYBRID,
    sequence_parallel: bool = False,
    itemsize: int = 2,
) -> Moves:
    """A scoring pass over `rows` rows a replica."""
    return _Pass(cfg, head, shape, zero, relay, sequence_parallel, itemsize).scoring(rows, tokens)


def update_traffic(
    cfg: ModelConfig,
    head: Head,
    shape: MeshShape,
    *,
    rows: int,
    tokens: int,
    micros: int,
    remat: str = "none",
    zero: int = 3,
    relay: str = HYBRID,
    sequence_parallel: bool = False,
    itemsize: int = 2,
) -> dict[str, Moves]:
    """An optimizer update from `micros` micro-batches of `rows` rows a replica, by program."""
    run = _Pass(cfg, head, shape, zero, relay, sequence_parallel, itemsize)
    return {
        "accumulate": run.accumulate(rows, tokens, micros, remat),
        "reduce": run.reduce(),
        "apply": (),
    }


def relay_traffic(
    cfg: ModelConfig, shape: MeshShape, *, zero: int = 3, relay: str = HYBRID, itemsize: int = 2
) -> Moves:
    """Weights from training to generation."""
    before, _, after = layouts(cfg, shape, zero, relay)
    moves = []
    for leaf in leaves(cfg, "lm"):
        size = itemsize * shard_size(leaf, before, shape)
        for axes in _gathers(leaf, before, after, shape):
            size *= shape.over(axes)
            moves.append(_move(GATHER, axes, shape, size))
    return tuple(moves)


def prefill_traffic(
    cfg: ModelConfig,
    shape: MeshShape,
    *,
    rows: int,
    tokens: int,
    relay: str = HYBRID,
    itemsize: int = 2,
) -> Moves:
    """Prompts of `rows` rows a replica of generation, and their first token."""
    return _generation(cfg, shape, rows, tokens, relay, itemsize)


def decode_traffic(
    cfg: ModelConfig, shape: MeshShape, *, rows: int, relay: str = HYBRID, itemsize: int = 2
) -> Moves:
    """One token of `rows` rows a replica of generation."""
    return _generation(cfg, shape, rows, 1, relay, itemsize)


def _generation(
    cfg: ModelConfig, shape: MeshShape, rows: int, tokens: int, relay: str, itemsize: int
) -> Moves:
    pipe, tensor = ((axis,) for axis in kept_axes(relay))
    stages = shape.over(pipe)
    x = -(-rows // stages) * tokens * cfg.embed * itemsize  # of one of the parts under way
    layers = cfg.layers // stages
    moves = []
    if shape.over(tensor) > 1:
        moves.append(_move(REDUCE, tensor, shape, x, stages * 2 * layers + 1))
    if stages > 1:
        moves.append(_move(PERMUTE, pipe, shape, x, stages))
    return tuple(moves)


def _move(
    kind: str, axes: tuple[str, ...], shape: MeshShape, result_bytes: float, times: int = 1
) -> Move:
    group = shape.over(axes)
    received = RECEIVED[kind](result_bytes, group)  # pyright: ignore
    axes = tuple(axis for axis in axes if shape.over((axis,)) > 1)
    return Move(kind, axes, group, received, times)


def _gathers(leaf: Leaf, before: Layout, after: Layout, shape: MeshShape) -> list[tuple[str, ...]]:
    found = []
    for axis in leaf.axes:
        if axis is None:
            continue
        b, a = before.mesh_axes(axis), after.mesh_axes(axis)
        left = tuple(x for x in b if x not in a and shape.over((x,)) > 1)
        if left:
            found.append(left)
    return found


@dataclass(frozen=True)
class _Pass:
    cfg: ModelConfig
    head: Head
    shape: MeshShape
    zero: int
    relay: str
    sequence_parallel: bool
    itemsize: int

    @property
    def layouts(self) -> tuple[Layout, Layout, Layout]:
        return layouts(self.cfg, self.shape, self.zero, self.relay)

    @property
    def tensor(self) -> tuple[str, ...]:
        return () if self.relay == DS_CHAT else (TENSOR, TENSOR_MICRO)

    @property
    def stages(self) -> int:
        return self.shape.over(STAGES)

    @property
    def gathers(self) -> bool:
        return self.zero == 3 and self.shape.over(zero_axes(self.relay)) > 1

    def scoring(self, rows: int, tokens: int) -> Moves:
        p = self.stages
        micros = _gcd(p, rows)
        return self._layers(rows, tokens, micros, 1, 2, 0) + self._pipe(rows, tokens, micros, 1)

    def accumulate(self, rows: int, tokens: int, micros: int, remat: str) -> Moves:
        times = 2 if remat == "layer" or self.gathers else 1
        reduces = {"layer": 3, "dots": 2, "none": 2}[remat] + 5
        if self.stages > 1:
            times, reduces = times + 1, reduces + 2
            moves = self._layers(rows * micros, tokens, micros, times, reduces, 1)
            return moves + self._pipe(rows * micros, tokens, micros, 2)
        return self._layers(rows, tokens, 1, times, reduces, 1) * micros

    def reduce(self) -> Moves:
        weights, state, _ = self.layouts
        batch, zero = weights.mesh_axes(BATCH), zero_axes(self.relay)
        moves = []
        for leaf in leaves(self.cfg, self.head):
            size = F32 * shard_size(leaf, weights, self.shape)
            across = () if leaf.axes[:1] == (LAYERS,) or self.stages == 1 else STAGES
            held = F32 * shard_size(leaf, state, self.shape)
            sharded = EMBED in leaf.axes and self.shape.over(zero) > 1
            if sharded and self.zero == 1:
                moves.append(_move(SCATTER, zero, self.shape, held))
            size = held if sharded else size
            over = tuple(a for a in batch if not sharded or a not in zero)
            moves.append(_move(REDUCE, (*over, *across), self.shape, size))
        return tuple(move for move in moves if move.group > 1)

    def _layers(
        self, rows: int, tokens: int, micros: int, gathers: int, reduces: int, backward: int
    ) -> Moves:
        cfg, shape, p = self.cfg, self.shape, self.stages
        ticks = micros + p - 1 if p > 1 else 1
        layers = cfg.layers // p * ticks
        x = rows // micros * tokens * cfg.embed * self.itemsize
        outside = -(-rows // p) * tokens * cfg.embed
        moves = []
        if shape.over(self.tensor) > 1:
            moves.append(_move(REDUCE, self.tensor, shape, x, reduces * layers))
            moves.append(_move(REDUCE, self.tensor, shape, outside * self.itemsize))
            if backward and self.head == "lm":
                moves.append(_move(REDUCE, self.tensor, shape, outside * F32))
        if self.gathers:
            zero = zero_axes(self.relay)
            for leaf in leaves(cfg, self.head):
                if EMBED not in leaf.axes:
                    continue
                times = layers if leaf.stacked else 1
                n = cfg.layers // p if leaf.stacked else 1
                shard = shard_size(leaf, self.layouts[0], shape) // n
                whole = shard * shape.over(zero) * self.itemsize
                moves.append(
                    _move(GATHER, zero, shape, whole, times * (gathers if leaf.stacked else 1))
                )
                if backward:
                    moves.append(_move(SCATTER, zero, shape, shard * F32, times))
        elif backward and self.zero == 2 and shape.over(zero_axes(self.relay)) > 1:
            state = self.layouts[1]
            for leaf in leaves(cfg, self.head):
                if EMBED in leaf.axes:
                    held = F32 * shard_size(leaf, state, shape)
                    moves.append(_move(SCATTER, zero_axes(self.relay), shape, held))
        return tuple(moves)

    def _pipe(self, rows: int, tokens: int, micros: int, passes: int) -> Moves:
        p = self.stages
        if p == 1:
            return ()
        x = rows * tokens * self.cfg.embed * self.itemsize
        return (
            _move(GATHER, STAGES, self.shape, x, passes),
            _move(SCATTER, STAGES, self.shape, x / p, passes),
            _move(PERMUTE, STAGES, self.shape, x / micros, passes * (micros + p - 1)),
        )


def _gcd(a: int, b: int) -> int:
    while b:
        a, b = b, a % b
    return a


__all__ = ["CHUNK", "Move"]
