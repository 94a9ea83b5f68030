# SPDX-License-Identifier: Apache-2.0
"""What each of our programs moves: collectives a device, by arithmetic alone.

The formulas are read off the compiled programs, and held to them by tests and by
`python -m benchmarks.mapping compiled`. `rows` are those of one replica. A MeshShape has its six
axes, as RolePlacement.mesh_shape gives it. What is smaller than the activations of a token is left
out: the statistics of a softmax, the norm of a gradient, the tokens that were drawn.

The compiler is the CPU's. Under sequence parallelism it gathers positions before the products and
keeps the sums of partial products whole, where a GPU's may scatter them; and where a micro-batch's
activations (tokens x D) outgrow a matrix (D x H d) it gathers matrices instead, which is not
modelled.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from hfjax.engine.meter import RECEIVED
from hfjax.engine.pipeline import STAGES
from hfjax.mapping.memory import F32, Leaf, layouts, leaves, shard_size
from hfjax.mapping.temporaries import chunk_of
from hfjax.models.llama import Head, ModelConfig
from meshes.layouts import (
    BATCH,
    EMBED,
    HEADS,
    HYBRID,
    HYBRID_V,
    Layout,
    divisors,
    kept_axes,
    zero_axes,
)
from meshes.mesh import AXES, MeshShape

GATHER = "all-gather"
SCATTER = "reduce-scatter"
REDUCE = "all-reduce"
PERMUTE = "collective-permute"


@dataclass(frozen=True)
class Move:
    """One collective, and how often it runs."""

    kind: str  # as hfjax.engine.meter names it
    axes: tuple[str, ...]  # of the mesh, those of more than one device
    group: int  # devices
    bytes_received: float  # by a device, an execution
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
    run = _Training(cfg, head, shape, zero, relay, itemsize, sequence_parallel)
    return run.scoring(rows, tokens)


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
    run = _Training(cfg, head, shape, zero, relay, itemsize, sequence_parallel)
    return {
        "weights": run.gathered_once(),
        "accumulate": run.accumulate(rows, tokens, micros, remat),
        "reduce": run.reduce(),
        "apply": (),
    }


def weights_traffic(
    cfg: ModelConfig,
    head: Head,
    shape: MeshShape,
    *,
    zero: int = 3,
    relay: str = HYBRID,
    itemsize: int = 2,
) -> Moves:
    """What passes read, made from the master weights; as in each update."""
    return _Training(cfg, head, shape, zero, relay, itemsize, False).gathered_once()


def relay_traffic(
    cfg: ModelConfig, shape: MeshShape, *, zero: int = 3, relay: str = HYBRID, itemsize: int = 2
) -> Moves:
    """Weights from training to generation on one mesh.

    Of hybrid-v-permute, whose way the compiler finds, what hybrid-v would move.
    """
    before, _, after = layouts(cfg, shape, zero, relay)
    found = _Moves(shape)
    for leaf in leaves(cfg, "lm"):
        size = itemsize * shard_size(leaf, before, shape)
        for axes in _gathers(leaf, before, after, shape, whole=relay == HYBRID_V):
            size *= shape.over(axes)
            found.add(GATHER, axes, size)
    return found.all


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
    micros, stages = _micros(shape, rows, relay), shape.over(kept_axes(relay)[:1])
    return _generation(cfg, shape, rows // micros * tokens, micros + stages - 1, relay, itemsize)


def decode_traffic(
    cfg: ModelConfig,
    shape: MeshShape,
    *,
    rows: int,
    n: int = 1,
    relay: str = HYBRID,
    itemsize: int = 2,
) -> Moves:
    """One token of all n responses to `rows` prompts a replica of generation."""
    micros, ticks = _micros(shape, rows, relay), decode_ticks(shape, rows, relay)
    return _generation(cfg, shape, rows // micros * n, ticks, relay, itemsize)


def decode_ticks(shape: MeshShape, rows: int, relay: str = HYBRID) -> int:
    """Passes through a stage that a token of every row takes; 1 without stages."""
    return max(_micros(shape, rows, relay), shape.over(kept_axes(relay)[:1]))


def _micros(shape: MeshShape, rows: int, relay: str) -> int:
    """Micro-batches that follow one another through generation's stages."""
    stages = shape.over(kept_axes(relay)[:1])
    return divisors(rows, most=stages)[-1] if stages > 1 else 1


def _generation(
    cfg: ModelConfig, shape: MeshShape, tokens: int, ticks: int, relay: str, itemsize: int
) -> Moves:
    """`ticks` passes of `tokens` tokens through the layers of a stage, all of them without."""
    pipe, tensor = ((axis,) for axis in kept_axes(relay))
    x = tokens * cfg.embed * itemsize
    found = _Moves(shape)
    layers = cfg.layers // shape.over(pipe)
    found.add(REDUCE, tensor, x, (2 * layers + 1) * ticks)  # the embedding's too
    found.add(PERMUTE, pipe, x, ticks)
    return found.all


def _gathers(
    leaf: Leaf, before: Layout, after: Layout, shape: MeshShape, *, whole: bool
) -> list[tuple[str, ...]]:
    """Axes of each gather of a parameter, as hfjax.engine.hybrid makes them."""

    def real(layout: Layout, axis: str | None) -> tuple[str, ...]:
        axes = layout.mesh_axes(axis) if axis else ()
        return tuple(a for a in axes if shape.over((a,)) > 1)

    pairs = [(real(before, axis), real(after, axis)) for axis in leaf.axes]
    left = [b[len(a) :] if b[: len(a)] == a and not whole else b for b, a in pairs]
    return sorted((axes for axes in left if axes), key=lambda axes: AXES.index(axes[0]))


@dataclass
class _Moves:
    """Collects moves; those of one device are none."""

    shape: MeshShape
    found: list[Move] = field(default_factory=list)

    @property
    def all(self) -> Moves:
        return tuple(self.found)

    def add(self, kind: str, axes: tuple[str, ...], result_bytes: float, times: int = 1) -> None:
        group = self.shape.over(axes)
        if group > 1 and times:
            axes = tuple(axis for axis in axes if self.shape.over((axis,)) > 1)
            received = RECEIVED[kind](int(result_bytes), group)
            self.found.append(Move(kind, axes, group, received, times))


@dataclass(frozen=True)
class _Training:
    """Training and scoring of one model in one layout."""

    cfg: ModelConfig
    head: Head
    shape: MeshShape
    zero: int
    relay: str
    itemsize: int
    sequence_parallel: bool

    @property
    def weights(self) -> Layout:
        return layouts(self.cfg, self.shape, self.zero, self.relay)[0]

    @property
    def state(self) -> Layout:
        return layouts(self.cfg, self.shape, self.zero, self.relay)[1]

    @property
    def tensor(self) -> tuple[str, ...]:
        return self.weights.mesh_axes(HEADS)

    @property
    def shards(self) -> tuple[str, ...]:
        """Axes of ZeRO, where they shard anything."""
        axes = zero_axes(self.relay)
        return axes if self.shape.over(axes) > 1 else ()

    @property
    def stages(self) -> int:
        return self.shape.over(STAGES)

    def scoring(self, rows: int, tokens: int) -> Moves:
        micros = math.gcd(self.stages, rows)
        found = _Moves(self.shape)
        self._weights_gathered(found, self._ticks(micros))
        self._activations(found, rows // micros, micros, tokens, 2 * self._ticks(micros))
        self._positions(found, rows // micros, micros, tokens, 2 * self._ticks(micros), 1)
        self._between_stages(found, rows // micros, micros, tokens)
        return found.all

    def accumulate(self, rows: int, tokens: int, micros: int, remat: str) -> Moves:
        found = _Moves(self.shape)
        staged, again = self.stages > 1, remat == "layer"
        ticks = self._ticks(micros) if staged else micros
        # forward, once more of a whole stage, once more of each layer, and back; the compiler
        # merges the two in between where a stage has one layer, which is not modelled
        passes = 1 + staged + (again or bool(self.shards))
        reduces = 2 + 2 * staged + again + 5
        self._weights_gathered(found, passes * ticks)
        self._gradients_scattered(found, ticks, micros)
        each = (rows, micros) if staged else (rows, 1)
        times = 1 if staged else micros
        self._activations(found, *each, tokens, reduces * ticks // times, times, backward=True)
        gathers = (8 if staged else 6) * ticks
        self._positions(found, *each, tokens, gathers, 2 if staged else 3 * micros)
        self._between_stages(found, rows, micros, tokens, backward=True)
        return found.all

    def gathered_once(self) -> Moves:
        """What an update computes with, from the master weights (ZeRO-1 and 2)."""
        found = _Moves(self.shape)
        if self.zero < 3:
            for leaf in self._sharded():
                found.add(GATHER, self.shards, self.itemsize * self._whole(leaf))
        return found.all

    def reduce(self) -> Moves:
        """Gradients over the replicas, and over the stages what each of them has a copy of."""
        found = _Moves(self.shape)
        batch = self.weights.mesh_axes(BATCH)
        for leaf in leaves(self.cfg, self.head):
            held = F32 * shard_size(leaf, self.state, self.shape)
            sharded = self.shards if EMBED in leaf.axes else ()
            if self.zero == 1:
                found.add(SCATTER, sharded, held)
            across = () if leaf.stacked else STAGES
            rest = tuple(axis for axis in batch if axis not in sharded)
            found.add(REDUCE, (*rest, *across), held)
        return found.all

    def _ticks(self, micros: int) -> int:
        return micros + self.stages - 1

    def _sharded(self) -> list[Leaf]:
        """Parameters that ZeRO shards."""
        found = leaves(self.cfg, self.head) if self.shards else ()
        return [leaf for leaf in found if EMBED in leaf.axes]

    def _whole(self, leaf: Leaf) -> int:
        """Elements of a device's part when ZeRO's shards are gathered."""
        return shard_size(leaf, self.state, self.shape) * self.shape.over(self.shards)

    def _one(self, leaf: Leaf) -> int:
        """Layers of a stage, whose parameters move one after another; 1 of other parameters."""
        return self.cfg.layers // self.stages if leaf.stacked else 1

    def _weights_gathered(self, found: _Moves, times: int) -> None:
        """ZeRO-3: a layer's weights `times` times; the others once, the compiler keeps them."""
        for leaf in self._sharded() if self.zero == 3 else ():
            layers, size = self._one(leaf), self.itemsize * self._whole(leaf)
            runs = layers * times if leaf.stacked else 1
            found.add(GATHER, self.shards, size / layers, runs)

    def _gradients_scattered(self, found: _Moves, ticks: int, micros: int) -> None:
        """ZeRO-3 layer by layer, the others each micro-batch; a pipeline's come at its end."""
        at_end = 1 if self.stages > 1 else micros
        for leaf in self._sharded() if self.zero > 1 else ():
            held = F32 * shard_size(leaf, self.state, self.shape)
            if self.zero == 3 and leaf.stacked:
                found.add(SCATTER, self.shards, held / self._one(leaf), self._one(leaf) * ticks)
            else:
                found.add(SCATTER, self.shards, held, at_end)

    def _activations(
        self,
        found: _Moves,
        rows: int,
        micros: int,
        tokens: int,
        reduces: int,
        times: int = 1,
        *,
        backward: bool = False,
    ) -> None:
        """Partial sums over `tensor`: `reduces` times a layer, of the embedding and the logits."""
        width, tensor = self.cfg.embed, self.tensor
        x = rows * tokens * width * self.itemsize
        found.add(REDUCE, tensor, x, times * reduces * self.cfg.layers // self.stages)
        part = -(-rows * micros // self.stages) * width
        found.add(REDUCE, tensor, part * tokens * self.itemsize, times)
        if backward and self.head == "lm":
            chunk, chunks = chunk_of(tokens)
            found.add(REDUCE, tensor, part * chunk * F32, times * chunks)

    def _positions(
        self, found: _Moves, rows: int, micros: int, tokens: int, times: int, outside: int
    ) -> None:
        """Sequence parallel: positions gathered `times` times a layer, and `outside` of layers."""
        if not self.sequence_parallel:
            return
        x = tokens * self.cfg.embed * self.itemsize
        found.add(GATHER, self.tensor, rows * x, times * self.cfg.layers // self.stages)
        part = -(-rows * micros // self.stages)
        found.add(GATHER, self.tensor, part * x, outside)
        if self.stages > 1:
            found.add(GATHER, self.tensor, rows * micros * x, outside)

    def _between_stages(
        self, found: _Moves, rows: int, micros: int, tokens: int, *, backward: bool = False
    ) -> None:
        """Rows to the pipeline, from stage to stage, and back to all stages."""
        if self.stages == 1:
            return
        passes, ticks = 1 + backward, self._ticks(micros)
        x = tokens * self.cfg.embed * self.itemsize
        part = -(-rows * micros // self.stages)
        found.add(GATHER, STAGES, part * self.stages * x, passes)
        found.add(SCATTER, STAGES, part * x, passes)
        split = self.shape.over(self.tensor) if self.sequence_parallel else 1
        found.add(PERMUTE, STAGES, rows * x / split, passes * ticks)
        if backward:  # cotangents of what the tensor axes hold copies of
            found.add(REDUCE, self.tensor, rows * micros * x)
            found.add(REDUCE, self.tensor, part * x)
