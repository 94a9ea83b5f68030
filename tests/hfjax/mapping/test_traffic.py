# SPDX-License-Identifier: Apache-2.0
"""Collectives by arithmetic; whole layouts against compiled programs are in test_verify.py."""

import jax
import jax.numpy as jnp
import pytest

from hfjax.engine.hybrid import Relay
from hfjax.engine.meter import meter
from hfjax.mapping.programs import Programs
from hfjax.mapping.traffic import (
    decode_ticks,
    decode_traffic,
    forward_traffic,
    prefill_traffic,
    received_bytes,
    relay_traffic,
    update_traffic,
)
from hfjax.models.llama import abstract_params
from meshes.layouts import HYBRID_V, generate_layout, train_layout
from meshes.mesh import FSDP, TENSOR, MeshShape, make_mesh
from meshes.placement import RolePlacement
from tests.fixtures import tiny_config

CFG = tiny_config()
RUN = {"rows": 2, "tokens": 16}


def test_one_device_moves_nothing() -> None:
    alone = MeshShape()
    assert not any(update_traffic(CFG, "lm", alone, micros=2, **RUN).values())
    assert not forward_traffic(CFG, "lm", alone, **RUN)
    assert not relay_traffic(CFG, alone) + prefill_traffic(CFG, alone, **RUN)
    assert not decode_traffic(CFG, alone, rows=2)


@pytest.mark.parametrize(
    "shape",
    [
        MeshShape(tensor=2, tensor_micro=2, data=2),
        MeshShape(fsdp=2, tensor=2, pipe_micro=2),
        MeshShape(fsdp=4, tensor_micro=2),
    ],
    ids=str,
)
def test_the_relay_moves_the_least_that_is_missing(shape: MeshShape) -> None:
    layouts = (f(shape, kv_heads=CFG.kv_heads) for f in (train_layout, generate_layout))
    shapes, axes = abstract_params(CFG, "lm")
    mesh = make_mesh(jax.devices(), shape)
    relay = Relay(mesh, *layouts, shapes, axes, jnp.float16)
    assert received_bytes(relay_traffic(CFG, shape)) == relay.bytes_moved()


def test_the_paper_of_hybridflow_v_gathers_everything() -> None:
    shape = MeshShape(data=2, tensor=2, tensor_micro=2)
    less, more = (received_bytes(relay_traffic(CFG, shape, relay=r)) for r in ("hybrid", HYBRID_V))
    assert more == pytest.approx(3 * less)  # M 3/4 against M (4 - 2) / (2 4)


def test_stages_of_zero_move_gradients_as_their_paper_says() -> None:
    """ZeRO-1 once an update, ZeRO-2 a micro-batch, ZeRO-3 weights too (arXiv 1910.02054 §7)."""
    shape, micros = MeshShape(fsdp=4), 3

    def moved(zero: int) -> dict[str, float]:
        found = update_traffic(CFG, "lm", shape, micros=micros, remat="none", zero=zero, **RUN)
        return {name: received_bytes(moves) for name, moves in found.items()}

    one, two, three = (moved(zero) for zero in (1, 2, 3))
    norms = two["reduce"]
    assert one["accumulate"] == 0
    assert two["accumulate"] == pytest.approx(micros * (one["reduce"] - norms))
    assert one["weights"] == two["weights"] == (one["reduce"] - norms) / 2
    assert three["weights"] == 0
    assert three["accumulate"] > two["accumulate"]


def test_a_pipeline_of_generation_has_as_many_ticks_as_micro_batches_or_stages() -> None:
    shape = MeshShape(pipe=4, data=2)
    assert [decode_ticks(shape, rows) for rows in (1, 4, 6, 8)] == [4, 4, 4, 4]
    assert decode_ticks(MeshShape(data=8), 8) == 1
    x = 2 * CFG.embed
    (move,) = decode_traffic(CFG, shape, rows=8)
    assert (move.bytes_received, move.times) == (2 * x, 4)


def test_moves_are_named_and_counted_as_the_meter_does() -> None:
    place = RolePlacement("actor", "all", train=MeshShape(fsdp=2, tensor=4))
    programs, micros = Programs(CFG, "lm", place), 2
    rows = RUN["rows"] * place.replicas
    lowered = programs.training(micros, rows, RUN["tokens"], remat="layer")["accumulate"]
    compiled = meter(lowered.compile(), mesh=programs.mesh).by_axes()
    moves = update_traffic(CFG, "lm", place.mesh_shape, micros=micros, remat="layer", **RUN)
    for axes in ((FSDP,), (TENSOR,)):
        mine = received_bytes(m for m in moves["accumulate"] if m.axes == axes)
        assert mine == pytest.approx(compiled[axes], rel=0.05)
