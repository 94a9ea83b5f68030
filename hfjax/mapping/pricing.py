# SPDX-License-Identifier: Apache-2.0
"""What one role's calls cost on devices of one kind, under any option: seconds, and bytes held."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from hfjax.engine.passes import PASS_TOKENS
from hfjax.mapping.cost import (
    Engine,
    generate_s,
    infer_s,
    parameters,
    relay_s,
    replica_rows,
    update_s,
)
from hfjax.mapping.devices import Device, Profile
from hfjax.mapping.memory import (
    Held,
    generation_bytes,
    kv_bytes,
    training_bytes,
    weight_bytes,
)
from hfjax.mapping.temporaries import activation_bytes
from hfjax.mapping.traffic import Move
from hfjax.mapping.work import Call, Kind, Model, Option, Problem
from hfjax.models.llama import Head, ModelConfig
from meshes.layouts import SHARED
from meshes.mesh import AXES, MeshShape
from meshes.placement import RolePlacement

MOST_TENSOR = 8  # more needs links between machines to be as fast as those inside


def engine_of(device: Device, profile: Profile, itemsize: int) -> Engine:
    """Of the profile come how it works, and what it adds where the device has not measured."""
    if own := device.profile:
        seconds = {"step_s": own.step_s, "layer_s": own.layer_s}
        profile = replace(profile, **seconds, collective_s=own.collective_s)
    return Engine(device=device, profile=profile, itemsize=itemsize)


class RoleCosts:
    """One role on devices of one kind."""

    def __init__(
        self, problem: Problem, role: str, device: Device, profile: Profile, itemsize: int
    ) -> None:
        self.device, self.work = device, problem.work
        self.model: Model = problem.models[role]
        self.calls: Sequence[Call] = problem.of(role)
        self.cfg = replace(self.model.config, vocab_multiple=MOST_TENSOR)  # as the widest pads it
        self.head: Head = self.model.head
        self.engine = engine_of(device, profile, itemsize)

    def priced(self, option: Option) -> Option:
        """Seconds by call and bytes."""
        seconds = {call.number: self.seconds(option, call) for call in self.calls}
        resident, working = self.bytes(option)
        return replace(option, seconds=seconds, resident_bytes=resident, working_bytes=working)

    def seconds(self, option: Option, call: Call) -> float:
        if call.kind is Kind.TRAIN:
            return self.update_seconds(option)
        if call.kind is Kind.GENERATE:
            if option.generate is None:
                return 0.0  # not chosen yet
            first = next(c.number for c in self.calls if c.kind is Kind.GENERATE)
            relay_s = self.relay_seconds(option) if call.number == first else 0.0
            return self.decode_seconds(option) + relay_s
        shape = option.infer or option.train
        assert shape is not None
        return infer_s(
            self.engine,
            self.cfg,
            self.head,
            shape,
            rows=call.rows,
            tokens=self.work.row_tokens,
            zero=option.zero,
            sequence=option.sequence_parallel,
            micro=self.pass_rows(option),
        )

    def pass_rows(self, option: Option) -> int:
        """Rows of a scoring pass a replica."""
        return max(1, PASS_TOKENS // self.work.row_tokens)

    def update_seconds(self, option: Option) -> float:
        """All updates of a step."""
        known = option.seconds.get(-1)
        if known is not None:
            return known
        shape = option.train
        assert shape is not None
        one = update_s(
            self.engine,
            self.cfg,
            self.head,
            shape,
            rows=self.work.rows // self.work.updates,
            tokens=self.work.row_tokens,
            micro=self.micro_rows(option)[0],
            zero=option.zero,
            sequence=option.sequence_parallel,
            remat=option.remat,
        )
        return self.work.updates * self.work.epochs * one

    def decode_seconds(self, option: Option) -> float:
        """A generation without the relay."""
        assert option.generate is not None
        work = (self.work.n, self.work.prompt_tokens, self.work.response_tokens)
        prompts = math.ceil(self.prompts(option) / option.waves)
        return option.waves * _wave_s(self.engine, self.cfg, option.generate, prompts, *work)

    def relay_seconds(self, option: Option) -> float:
        """From training's layout to generation's."""
        if option.relay == SHARED:
            return 0.0
        return _relay_s(self.engine, self.cfg, self.meshed(option), option.relay, option.zero)

    def move_seconds(self, option: Option) -> float:
        """Weights from training's layout to that of scoring: a device's part from all others."""
        shape = option.infer
        assert shape is not None
        size = self.engine.itemsize * parameters(self.cfg, self.head) / (shape.pipe * shape.tensor)
        axes = tuple(axis for axis in AXES if shape.over((axis,)) > 1)
        move = Move("all-to-all", axes, shape.devices, size)
        return self.engine.collective_s(move, shape)

    def bytes(self, option: Option) -> tuple[float, float]:
        """Resident between calls, and the most that a call needs besides."""
        shape = self.meshed(option)
        scoring = self.scoring_bytes(option, shape)
        if not self.model.trained:
            size = self.engine.itemsize
            weights = weight_bytes(self.cfg, self.head, shape, zero=option.zero, itemsize=size)
            return weights, scoring
        held = self.held(option)
        keeps = self.engine.profile.megatron
        copies = held.weights + held.gradients
        resident = held.optimizer + (copies if keeps else 0)
        working = [self.update_bytes(option), scoring + (0 if keeps else held.weights)]
        if option.generate:
            working.append(self.generation_bytes(option))
        return resident, max(working)

    def infer_bytes(self, option: Option) -> float:
        """Weights in a layout of their own, and a pass over them."""
        shape = option.infer
        assert shape is not None
        size = self.engine.itemsize
        weights = weight_bytes(self.cfg, self.head, shape, itemsize=size)
        return weights + self.scoring_bytes(option, shape)

    def scoring_bytes(self, option: Option, shape: MeshShape) -> float:
        """Temporaries of a forward pass."""
        return activation_bytes(
            self.cfg,
            self.head,
            shape,
            rows=self.pass_rows(option),
            tokens=self.work.row_tokens,
            zero=option.zero,
            sequence_parallel=option.sequence_parallel,
            itemsize=self.engine.itemsize,
            fused_attention=self.engine.profile.fused_attention,
            cpu=self.device.fresh_bytes_s is not None,
            backward=False,
        ).total

    def generation_bytes(self, option: Option) -> float:
        """Weights, and keys and values of a wave; its samples share a prompt's."""
        assert option.generate is not None
        prompts = math.ceil(self.prompts(option) / option.waves)
        slots = self.work.prompt_tokens + self.work.n * self.work.response_tokens
        return _generation_bytes(self.cfg, option.generate, prompts * slots, self.engine.itemsize)

    def micro_rows(self, option: Option) -> tuple[int, int]:
        """A replica's rows of a micro-batch, and how many of them an update has."""
        assert option.train is not None
        mine = replica_rows(self.work.rows // self.work.updates, option.train)
        micro = option.micro_sequences // (option.train.data * option.train.fsdp) or mine
        return micro, math.ceil(mine / micro)

    def update_bytes(self, option: Option) -> float:
        """What an update needs beside what is resident."""
        shape, held = option.train, self.held(option)
        assert shape is not None
        micro, micros = self.micro_rows(option)
        activations = activation_bytes(
            self.cfg,
            self.head,
            self.meshed(option),
            rows=micro,
            tokens=self.work.row_tokens,
            micros=micros,
            remat=option.remat,
            zero=option.zero,
            sequence_parallel=option.sequence_parallel,
            itemsize=self.engine.itemsize,
            fused_attention=self.engine.profile.fused_attention,
            cpu=self.device.fresh_bytes_s is not None,
        )
        if self.engine.profile.megatron:
            return activations.total - activations.gradients  # added up where they arise
        return held.weights + held.gradients + max(activations.total, held.reduced)

    def held(self, option: Option) -> Held:
        assert option.train is not None
        return training_bytes(
            self.cfg,
            self.head,
            self.meshed(option),
            zero=option.zero,
            itemsize=self.engine.itemsize,
        )

    def prompts(self, option: Option) -> int:
        """Of a replica of generation."""
        shape = self.meshed(option)
        assert option.generate is not None
        replicas = shape.devices // option.generate.devices
        return math.ceil(self.work.prompts / replicas)

    def meshed(self, option: Option) -> MeshShape:
        """All six axes of the role's mesh."""
        place = RolePlacement(
            "role",
            "pool",
            train=option.train,
            infer=None if option.train else option.infer,
            generate=option.generate,
            zero=option.zero,
            relay=option.relay,
        )
        return place.mesh_shape


@cache
def _wave_s(
    engine: Engine, cfg: ModelConfig, keep: MeshShape, prompts: int, n: int, old: int, new: int
) -> float:
    """A generation of one replica."""
    sizes = {"prompts": prompts, "n": n, "prompt_tokens": old, "response_tokens": new}
    return generate_s(engine, cfg, keep, **sizes)


@cache
def _generation_bytes(cfg: ModelConfig, keep: MeshShape, slots: int, itemsize: int) -> float:
    """Of one device: weights, and keys and values of so many positions."""
    weights = generation_bytes(cfg, keep, itemsize=itemsize)
    return weights + kv_bytes(cfg, keep, rows=1, slots=slots, itemsize=itemsize)


@cache
def _relay_s(engine: Engine, cfg: ModelConfig, shape: MeshShape, relay: str, zero: int) -> float:
    return relay_s(engine, cfg, shape, relay=relay, zero=zero)
