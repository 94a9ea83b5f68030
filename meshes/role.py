# SPDX-License-Identifier: Apache-2.0
"""Where one role lives: its layouts, and how much of a batch is worked on at a time."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from meshes.layouts import (
    DS_CHAT,
    HYBRID,
    RELAYS,
    SHARED,
    TWO_COPIES,
    ZERO,
    divisors,
    either,
    generate_batch,
    kept_axes,
    train_batch,
)
from meshes.mesh import PIPE, PIPE_MICRO, TENSOR, TENSOR_MICRO, MeshShape
from meshes.toml import spelled

GENERATE_KEYS = (PIPE, TENSOR)
REMATS = ("none", "layer", "dots")  # nothing, whole layers, all but matrix products


@dataclass(frozen=True)
class RolePlacement:
    """Where a role lives; `train` if it is updated there, `infer` if it only computes.

    A role that is updated may have `infer` too: it scores in that layout then, another mesh over
    the same devices in the same order, whose `fsdp` always shards weights.
    `generate` holds only p_g (pipe) and t_g (tensor); the micro-DP size follows. With relay
    "two-copies" they are of `generate_pool`, and its data parallel size follows.
    """

    role: str
    pool: str
    train: MeshShape | None = None
    infer: MeshShape | None = None
    generate: MeshShape | None = None
    generate_pool: str | None = None  # of relay "two-copies": where a second copy generates
    zero: int = 3  # what `fsdp` shards: 1 optimizer state, 2 and gradients, 3 and weights
    sequence_parallel: bool = False  # tensor axes split positions between matrix products
    relay: str = HYBRID  # how weights move from training to generation
    offload: bool = False  # weights (of a trained role its moments) rest in host memory
    micro_sequences: int = 0  # rows of a training micro-batch over all replicas; 0: the run's
    remat: str = ""  # what the backward pass recomputes; empty: as the run says
    generate_sequences: int = 0  # responses that are generated at a time, over all replicas; 0: all

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ValueError("\n".join(f"[{self.role}] {problem}" for problem in problems))

    @property
    def base(self) -> MeshShape:
        """The training mesh as written, p and t whole; of a role that only computes `infer`."""
        shape = self.train or self.infer
        assert shape is not None
        return shape

    @property
    def scoring(self) -> "RolePlacement":
        """Where its forward passes run: a layout of their own, or this very placement."""
        if self.train is None or self.infer is None:
            return self
        options: dict[str, Any] = {"sequence_parallel": self.sequence_parallel}
        return RolePlacement(self.role, self.pool, infer=self.infer, **options)

    @property
    def mesh_shape(self) -> MeshShape:
        """The mesh of training and generation: p and t split into generation's part and micro."""
        base, p_g, t_g = self.base, self.p_g, self.t_g
        if self.relay == DS_CHAT:  # generation's tensor axis is a part of training's ZeRO axis
            return replace(base, fsdp=base.fsdp // t_g, tensor=t_g)
        pipe, tensor = kept_axes(self.relay)
        halves = {PIPE: base.pipe // p_g, PIPE_MICRO: base.pipe // p_g}
        halves |= {TENSOR: base.tensor // t_g, TENSOR_MICRO: base.tensor // t_g}
        return MeshShape(data=base.data, fsdp=base.fsdp, **(halves | {pipe: p_g, tensor: t_g}))

    @property
    def p_g(self) -> int:
        """Pipeline stages of generation."""
        return self._kept.pipe

    @property
    def t_g(self) -> int:
        """Tensor parallel size of generation."""
        return self._kept.tensor

    @property
    def _kept(self) -> MeshShape:
        if self.generate is None or self.relay in (SHARED, TWO_COPIES):
            return self.base
        return self.generate

    @property
    def train_batch(self) -> tuple[str, ...]:
        """Mesh axes that split the rows while training (or scoring)."""
        return train_batch(self.relay)

    @property
    def generate_batch(self) -> tuple[str, ...]:
        """Mesh axes that split the rows while generating."""
        return generate_batch(self.relay)

    @property
    def replicas(self) -> int:
        """Shards of the batch while training (or scoring)."""
        return self.mesh_shape.over(self.train_batch)

    @property
    def micro_replicas(self) -> int:
        """The micro-DP size d_g = p t / (p_g t_g), HybridFlow §5.1; 1 under ds-chat."""
        return max(1, self.base.pipe * self.base.tensor // (self.p_g * self.t_g))

    def _problems(self) -> Iterable[str]:
        if self.train is None and self.infer is None:
            yield (
                "has neither of train and infer; give train = { data = 2 } if the role is updated "
                "(infer too where it scores in another layout), infer = { data = 2 } if it only "
                "computes"
            )
            return
        if type(self.zero) is not int or self.zero not in ZERO:
            yield f"zero = {spelled(self.zero)}: stages of ZeRO over fsdp are {either(ZERO)}"
        if self.relay not in RELAYS:
            yield f"relay = {self.relay!r} is unknown; use {either(map(repr, RELAYS))}"
        for key in ("offload", "sequence_parallel"):
            if type(getattr(self, key)) is not bool:
                yield f"{key} = {spelled(getattr(self, key))}: must be true or false"
        yield from self._size_problems()
        base, where = self.base, "train" if self.train else "infer"
        if base.pipe > 1 and base.fsdp > 1 and self.zero == 2:
            yield "zero = 2 with pipe: a pipeline adds its gradients up first; use zero = 1 or 3"
        if (self.relay == TWO_COPIES) != (self.generate_pool is not None):
            yield (
                f"relay = {self.relay!r}, generate_pool = {spelled(self.generate_pool)}: "
                f"{TWO_COPIES!r} and a generate_pool go together; set both or neither"
            )
        if self.relay == TWO_COPIES:
            if self.generate_pool == self.pool:
                yield f"generate_pool = {spelled(self.pool)} is the role's own pool; name another"
            if self.train is None:
                yield f"relay = {self.relay!r}: only a role that is trained has a copy to send"
            return
        if self.relay == DS_CHAT:
            yield from self._ds_chat_problems(where)
            return
        for key in GENERATE_KEYS if self.generate else ():
            whole, kept = getattr(base, key), getattr(self.generate, key)
            if whole % kept:
                yield (
                    f"generate: {key} = {kept} does not divide {where}.{key} = {whole}; "
                    f"use {key} {either(divisors(whole))}"
                )

    def _size_problems(self) -> Iterable[str]:
        """Of how much is worked on at a time."""
        for key in ("micro_sequences", "generate_sequences"):
            if type(count := getattr(self, key)) is not int or count < 0:
                yield f"{key} = {spelled(count)}: must be a whole number of rows, 0 for all"
        if self.remat not in ("", *REMATS):
            yield f"remat = {spelled(self.remat)} is unknown; use {either(map(repr, REMATS))}"
        for key in ("micro_sequences", "remat") if self.train is None else ():
            if value := getattr(self, key):
                yield f"{key} = {spelled(value)}: only a role that is trained has it; remove it"
        if self.generate_sequences and not (self.train or self.generate):
            yield (
                f"generate_sequences = {spelled(self.generate_sequences)}: this role generates "
                "nothing; remove it"
            )

    def _ds_chat_problems(self, where: str) -> Iterable[str]:
        base, keep = self.base, self.generate or MeshShape()
        if base.pipe > 1 or base.tensor > 1 or self.zero != 3 or keep.pipe > 1:
            yield (
                f"relay = {DS_CHAT!r} trains with ZeRO-3 alone and generates with tensor alone; "
                f"use {where} = {{ fsdp = {base.devices} }}, generate = {{ tensor = 2 }}"
            )
        elif base.fsdp % keep.tensor:
            yield (
                f"generate: tensor = {keep.tensor} does not divide {where}.fsdp = {base.fsdp}; "
                f"use tensor {either(divisors(base.fsdp))}"
            )
