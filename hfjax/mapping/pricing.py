# SPDX-License-Identifier: Apache-2.0
"""What one role's calls cost on devices of one kind, under any option: seconds, and bytes held."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from hfjax.mapping.cost import (
    Engine,
    generate_s,
    infer_s,
    relay_s,
    replica_rows,
    update_s,
)
from hfjax.mapping.devices import Device, Profile
from hfjax.mapping.memory import (
    Held,
    generation_bytes,
    kv_bytes,
    pass_rows,
    training_bytes,
    weight_bytes,
)
from hfjax.mapping.temporaries import activation_bytes, decode_bytes, prefill_bytes
from hfjax.mapping.traffic import Move, weights_traffic
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
        took = infer_s(
            self.engine,
            self.cfg,
            self.head,
            shape,
            rows=call.rows,
            tokens=self.work.row_tokens,
            zero=option.zero,
            sequence=option.sequence_parallel,
            micro=pass_rows(replica_rows(call.rows, shape), self.work.row_tokens),
        )
        first = next(c.number for c in self.calls if c.kind is Kind.INFER)
        return took + (self.weights_seconds(option) if call.number == first else 0.0)

    def weights_seconds(self, option: Option) -> float:
        """What passes read, made anew after updates; of a role that generates, its relay's work."""
        if self.model.generates or option.train is None or self.engine.profile.megatron:
            return 0.0
        shape, size = self.meshed(option), self.engine.itemsize
        moves = weights_traffic(self.cfg, self.head, shape, zero=option.zero, itemsize=size)
        return self.engine.moved_s(moves, shape)

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
        """A generation without the relay, wave after wave."""
        work, shape = self.work, self.meshed(option)
        width, waves = self.wave(option)
        prompts = width * (shape.devices // (shape.pipe * shape.tensor))
        sizes = (work.n, work.prompt_tokens, work.response_tokens)
        return waves * _wave_s(self.engine, self.cfg, shape, prompts, *sizes)

    def wave(self, option: Option) -> tuple[int, int]:
        """A replica's prompts of a wave, and how many waves there are."""
        prompts = self.prompts(option)
        width = math.ceil(prompts / option.waves)
        return width, math.ceil(prompts / width)

    def relay_seconds(self, option: Option) -> float:
        """From training's layout to generation's."""
        if option.relay == SHARED:
            return 0.0
        return _relay_s(self.engine, self.cfg, self.meshed(option), option.relay, option.zero)

    def move_seconds(self, option: Option) -> float:
        """Weights from training's layout to that of scoring: a device's part from all others."""
        shape = option.infer
        assert shape is not None
        size = weight_bytes(self.cfg, self.head, shape, itemsize=self.engine.itemsize)
        axes = tuple(axis for axis in AXES if shape.over((axis,)) > 1)
        move = Move("all-to-all", axes, shape.devices, size)
        return self.engine.collective_s(move, shape)

    def bytes(self, option: Option) -> tuple[float, float]:
        """Resident between calls, and the most that a call needs besides."""
        shape, size = self.meshed(option), self.engine.itemsize
        if not self.model.trained:
            weights = weight_bytes(self.cfg, self.head, shape, zero=option.zero, itemsize=size)
            return weights, self.scoring_bytes(option, shape)
        held = self.held(option)
        working = [self.update_bytes(option), self.scoring_bytes(option, option.infer or shape)]
        own = self.infer_weights(option) if option.infer else 0.0
        if option.generate:
            working.append(self.generation_working(option))
            own = max(own, self.generation_weights(option))
        if self.engine.profile.megatron:  # and buffers of their own beside these
            return held.optimizer + held.weights + held.gradients, max(working) + own
        return held.optimizer + max(held.weights, own), max(working)

    def infer_weights(self, option: Option) -> float:
        """Weights in a layout of their own, which stay until the next update."""
        assert option.infer is not None
        size = self.engine.itemsize
        return weight_bytes(self.cfg, self.head, option.infer, itemsize=size)

    def scoring_bytes(self, option: Option, shape: MeshShape) -> float:
        """Temporaries of a forward pass."""
        rows = replica_rows(self.work.rows, shape)
        return activation_bytes(
            self.cfg,
            self.head,
            shape,
            rows=pass_rows(rows, self.work.row_tokens),
            tokens=self.work.row_tokens,
            zero=option.zero,
            sequence_parallel=option.sequence_parallel,
            itemsize=self.engine.itemsize,
            fused_attention=self.engine.profile.fused_attention,
            cpu=self.device.fresh_bytes_s is not None,
            backward=False,
            trained=self.model.trained,
        ).total

    def generation_weights(self, option: Option) -> float:
        """Weights to generate with, which stay until the next update; none where one layout is."""
        if option.relay == SHARED and self.engine.profile.megatron:
            return 0.0
        return generation_bytes(self.cfg, self.meshed(option), itemsize=self.engine.itemsize)

    def generation_working(self, option: Option) -> float:
        """Keys and values of a wave, its samples sharing a prompt's; and temporaries.

        vLLM's passes over prompts are bounded: they have no part here.
        """
        shape, work = self.meshed(option), self.work
        sizes: Any = {"rows": self.wave(option)[0], "itemsize": self.engine.itemsize}
        slots = work.prompt_tokens + work.n * work.response_tokens
        cache = kv_bytes(self.cfg, shape, slots=slots, **sizes)
        if self.engine.profile.megatron:
            return cache
        cpu = self.device.fresh_bytes_s is not None
        fused = self.engine.profile.fused_attention
        first = prefill_bytes(
            self.cfg, shape, tokens=work.prompt_tokens, fused_attention=fused, cpu=cpu, **sizes
        )
        sizes["rows"] *= work.n
        later = decode_bytes(self.cfg, shape, slots=slots, cpu=cpu, **sizes)
        return cache + max(first, later)

    def generating_bytes(self, option: Option) -> float:
        """What a generation needs where its weights are not there yet."""
        return self.generation_weights(option) + self.generation_working(option)

    def micro_rows(self, option: Option) -> tuple[int, int]:
        """A replica's rows of a micro-batch, and how many of them an update has."""
        assert option.train is not None
        mine = replica_rows(self.work.rows // self.work.updates, option.train)
        micro = option.micro_sequences // (option.train.data * option.train.fsdp) or mine
        return micro, math.ceil(mine / micro)

    def update_bytes(self, option: Option) -> float:
        """What an update needs beside what is resident."""
        held = self.held(option)
        assert option.train is not None
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
        if not self.engine.profile.megatron:
            return held.gradients + max(activations.total, held.reduced)
        stages = option.train.pipe
        between = micro * self.work.row_tokens * self.cfg.embed * self.engine.itemsize
        saved = activations.saved - (micros + stages - 1) * between * (stages > 1)
        flying = min(stages, micros)  # micro-batches that the first stage keeps; summed in place
        return saved * flying + max(activations.layer, activations.head)

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
    engine: Engine, cfg: ModelConfig, shape: MeshShape, prompts: int, n: int, old: int, new: int
) -> float:
    sizes = {"prompts": prompts, "n": n, "prompt_tokens": old, "response_tokens": new}
    return generate_s(engine, cfg, shape, **sizes)


@cache
def _relay_s(engine: Engine, cfg: ModelConfig, shape: MeshShape, relay: str, zero: int) -> float:
    return relay_s(engine, cfg, shape, relay=relay, zero=zero)
