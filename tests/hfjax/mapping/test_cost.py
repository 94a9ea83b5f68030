# SPDX-License-Identifier: Apache-2.0
"""Seconds by hand: on a device whose every product and copy gets the peak, and engines of zero."""

import math
from dataclasses import replace
from typing import Any

import pytest

from hfjax.mapping.cost import (
    BACKWARD,
    LOGIT_COPIES,
    Engine,
    generate_s,
    infer_s,
    neighbours,
    parameters,
    relay_s,
    update_s,
)
from hfjax.mapping.devices import Device, Profile, load_devices
from hfjax.mapping.memory import kv_bytes
from hfjax.mapping.traffic import Move
from hfjax.models.shapes import SHAPES
from meshes.layouts import DS_CHAT, HYBRID, HYBRID_V
from meshes.mesh import DATA, PIPE, TENSOR, MeshShape
from meshes.placement import RolePlacement

NONE = Profile(name="none", step_s=0.0, layer_s=0.0, collective_s=0.0, fused_attention=True)
FLAT = ((1.0, 1.0),)
CFG = SHAPES["llama2-7b"]
HUGE = 1e30


def ideal(**values: Any) -> Engine:
    """An A100 that always gets its peak; rates given are changed."""
    peak = {"matmul": FLAT, "copy": FLAT, "link_share": 1.0, "network_share": 1.0}
    latency = {"link_latency_s": 1e-30, "network_latency_s": 1e-30}
    device = replace(load_devices()["a100-80g"], **(peak | latency | values))
    return Engine(device=device, profile=NONE)


def products(cfg: Any, rows: int, tokens: int) -> float:
    """Operations of a forward pass: matrices, the causal half of attention, logits."""
    matrices = parameters(cfg, "lm") - cfg.embed * (cfg.vocab + 1) - 2 * cfg.layers * cfg.embed
    attention = cfg.layers * 2 * rows * tokens * tokens * cfg.heads * cfg.head_dim
    return 2 * rows * tokens * matrices + attention


def test_a_forward_pass_takes_its_products_over_the_peak() -> None:
    engine = ideal(memory_bytes_s=HUGE)
    took = infer_s(engine, CFG, "lm", MeshShape(), rows=4, tokens=2048)
    assert took == pytest.approx(products(CFG, 4, 2048) / 312e12, rel=1e-6)


@pytest.mark.parametrize(("remat", "passes"), [("none", 1 + BACKWARD), ("layer", 2 + BACKWARD)])
def test_an_update_takes_three_forward_passes_and_one_more_with_remat(
    remat: str, passes: int
) -> None:
    engine = ideal(memory_bytes_s=HUGE)
    options: Any = {"rows": 4, "tokens": 2048, "micro": 2, "remat": remat}
    took = update_s(engine, CFG, "value", MeshShape(), **options)
    forward = infer_s(engine, CFG, "value", MeshShape(), rows=4, tokens=2048, micro=2)
    assert took == pytest.approx(passes * forward, rel=1e-3)


def test_a_pipeline_pays_for_the_ticks_in_which_stages_wait() -> None:
    engine = ideal(memory_bytes_s=HUGE, link_bytes_s=HUGE, network_bytes_s=HUGE)
    engine = replace(engine, profile=replace(NONE, megatron=True))
    options: Any = {"rows": 8, "tokens": 512, "micro": 1}
    alone = update_s(engine, CFG, "value", MeshShape(), **options)
    staged = update_s(engine, CFG, "value", MeshShape(pipe=4), **options)
    assert staged == pytest.approx(alone / 4 * (8 + 4 - 1) / 8, rel=1e-3)


def test_decoding_reads_the_weights_and_the_cache_once_a_token() -> None:
    engine = ideal(flops=HUGE)
    took = generate_s(
        engine, CFG, MeshShape(data=4), prompts=64, n=1, prompt_tokens=16, response_tokens=16
    )
    lengths = 16 * 16 + 16 * 16 / 2  # over the tokens, the row's length so far
    cache = 16 * lengths * kv_bytes(CFG, MeshShape(), rows=1, slots=1)
    weights = 16 * parameters(CFG, "lm") * 2
    assert took == pytest.approx((weights + cache) / 2039e9, rel=0.02)


def test_an_engine_that_is_slow_to_ask_sets_the_pace_of_decoding() -> None:
    slow = replace(NONE, step_s=1e-3, layer_s=1e-3)
    engine = replace(ideal(flops=HUGE, memory_bytes_s=HUGE), profile=slow)
    took = generate_s(
        engine, CFG, MeshShape(), prompts=1, n=1, prompt_tokens=1, response_tokens=100
    )
    assert took == pytest.approx(101 * (1 + CFG.layers) * 1e-3, rel=1e-6)


def test_samples_of_a_prompt_share_its_pass_and_its_cache() -> None:
    engine = ideal(flops=HUGE)
    sizes: Any = {"prompt_tokens": 64, "response_tokens": 16}
    alone = generate_s(engine, CFG, MeshShape(), prompts=8, n=1, **sizes)
    both = generate_s(engine, CFG, MeshShape(), prompts=8, n=2, **sizes)
    cache = 8 * 16 * 16 / 2 * kv_bytes(CFG, MeshShape(), rows=1, slots=1)
    logits = 8 * 16 * CFG.vocab * 4 * LOGIT_COPIES
    assert both - alone == pytest.approx((cache + logits) / 2039e9, rel=1e-3)


@pytest.mark.parametrize(
    ("shape", "axes", "node", "expected"),
    [
        (MeshShape(data=2, tensor=8), (TENSOR,), 8, 8),
        (MeshShape(data=2, tensor=8), (DATA,), 8, 1),
        (MeshShape(data=8, tensor=2), (DATA,), 8, 4),
        (MeshShape(data=2, pipe=4, tensor=4), (PIPE,), 8, 2),
        (MeshShape(data=2, pipe=4, tensor=4), (PIPE, TENSOR), 8, 8),
    ],
)
def test_how_many_of_a_group_stand_in_one_machine(
    shape: MeshShape, axes: tuple[str, ...], node: int, expected: int
) -> None:
    assert neighbours(shape, axes, node) == expected


def test_groups_that_leave_a_machine_share_its_network() -> None:
    engine = ideal()
    shape = MeshShape(data=2, tensor=8)  # eight groups of two, every one across both machines
    took = engine.collective_s(Move("all-gather", (DATA,), 2, 1e9), shape)
    assert took == pytest.approx(8 * 1e9 / 25e9)
    whole = MeshShape(data=16)  # one ring: a machine's network is crossed once
    took = engine.collective_s(Move("all-gather", (DATA,), 16, 1e9), whole)
    assert took == pytest.approx(1e9 / 25e9)
    inside = engine.collective_s(Move("all-gather", (TENSOR,), 8, 1e9), shape)
    assert inside == pytest.approx(1e9 / 300e9)


def test_a_measured_collective_takes_latency_and_bytes_over_bandwidth() -> None:
    engine = ideal(collective={2: (1e-3, 1e9), 8: (2e-3, 2e9)})
    shape = MeshShape(data=4, tensor=2)
    took = engine.collective_s(Move("all-gather", (TENSOR,), 2, 5e8), shape)
    assert took == pytest.approx(1e-3 + 0.5)


def relayed(mode: str) -> float:
    base = MeshShape(fsdp=16) if mode == DS_CHAT else MeshShape(data=2, tensor=8)
    place = RolePlacement(
        "actor", "all", train=base, generate=MeshShape(tensor=2), relay=mode, zero=3
    )
    return relay_s(ideal(), CFG, place.mesh_shape, relay=mode, zero=3)


def test_the_relay_moves_what_table_2_says() -> None:
    size = 2 * (parameters(CFG, "lm") - CFG.embed * (2 * CFG.layers + 1))  # norms never move
    assert relayed(HYBRID) == pytest.approx(size * (8 - 2) / (2 * 8) / 300e9, rel=0.01)
    assert relayed(HYBRID_V) > relayed(HYBRID)
    assert relayed(DS_CHAT) == pytest.approx(size * 15 / 16 / 25e9, rel=0.02)


def test_simulated_devices_order_what_they_gather_but_along_layers() -> None:
    """The layers' dimension is the first: parts of it follow one another."""
    links: Any = {"memory_bytes_s": 1e9, "collective": {8: (1e-9, 1e9)}}
    alone, shared = (links | {"shares": shares} for shares in (1, 8))
    for base, copies in ((MeshShape(pipe=2, data=4), 0), (MeshShape(fsdp=8), 2)):
        place = RolePlacement("actor", "all", train=base, generate=MeshShape())
        sizes: Any = {"relay": HYBRID, "zero": 3}
        slow, quick = (
            relay_s(ideal(**each), CFG, place.mesh_shape, **sizes) for each in (shared, alone)
        )
        moved = 2 * (parameters(CFG, "lm") - CFG.embed * (2 * CFG.layers + 1))
        assert slow - quick == pytest.approx(copies * moved / 1e9, rel=0.01, abs=1e-6)


def test_weights_that_are_gathered_once_are_gathered_anew_before_generation() -> None:
    took = [relay_s(ideal(), CFG, MeshShape(fsdp=8), relay=HYBRID, zero=z) for z in (1, 3)]
    assert took[0] == pytest.approx(took[1], rel=0.01)


def test_every_micro_batch_adds_its_gradients_to_the_sums() -> None:
    engine = ideal(flops=HUGE, memory_bytes_s=1e12)
    options: Any = {"rows": 8, "tokens": 16}
    many, few = (
        update_s(engine, CFG, "value", MeshShape(), **options, micro=micro) for micro in (1, 2)
    )
    added_s = 3 * 4 * parameters(CFG, "value") / 1e12
    assert many - few == pytest.approx(4 * added_s, rel=1e-3)
    fused = replace(engine, profile=replace(NONE, megatron=True))
    assert update_s(fused, CFG, "value", MeshShape(), **options, micro=1) < many - 7 * added_s


@pytest.mark.parametrize("name", ["flops", "memory_bytes_s", "link_bytes_s", "network_bytes_s"])
def test_a_faster_device_is_never_slower(name: str) -> None:
    device: Device = load_devices()["a100-80g"]
    shape = MeshShape(data=2, pipe=2, tensor=4)
    times = []
    for factor in (0.5, 1, 2):
        faster = replace(device, **{name: factor * getattr(device, name)})
        engine = Engine(device=faster, profile=NONE)
        times.append(
            update_s(engine, CFG, "lm", shape, rows=16, tokens=1024, micro=2)
            + infer_s(engine, CFG, "lm", shape, rows=16, tokens=1024)
            + generate_s(
                *(engine, CFG, shape), prompts=16, n=2, prompt_tokens=64, response_tokens=64
            )
        )
    assert times[0] >= times[1] >= times[2]
    assert all(math.isfinite(t) for t in times)
