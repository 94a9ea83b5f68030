# SPDX-License-Identifier: Apache-2.0
"""ZeRO and FSDP: gradients and updates of one device, and the collectives each stage may use."""

import dataclasses

import jax
import numpy as np
import pytest

from hfjax.engine.meter import memory, meter
from hfjax.engine.microbatch import cut_micros, place_rows
from hfjax.engine.scoring import Scorer
from meshes.mesh import MeshShape
from tests.fixtures import slow_but
from tests.hfjax.engine.cases import (
    CFG,
    COLUMNS,
    LOSSES,
    assert_close,
    host_params,
    lm_loss,
    make_batch,
    make_trainer,
    place_params,
    replicas_of,
)

ONE = MeshShape()
DATA_TENSOR, PIPE_TENSOR = MeshShape(data=2, tensor=4), MeshShape(pipe=2, tensor=4)
LAYOUTS = {  # shape and stage
    "data 8": (MeshShape(data=8), 3),
    "zero 1 over 8": (MeshShape(fsdp=8), 1),
    "zero 2 over 8": (MeshShape(fsdp=8), 2),
    "zero 3 over 8": (MeshShape(fsdp=8), 3),
    "zero 1, data 2, tensor 2": (MeshShape(data=2, fsdp=2, tensor=2), 1),
    "zero 2, data 2, tensor 2": (MeshShape(data=2, fsdp=2, tensor=2), 2),
    "zero 3, data 2, tensor 2": (MeshShape(data=2, fsdp=2, tensor_micro=2), 3),
    "pipe 2": (MeshShape(pipe=2), 3),
    "pipe 2, tensor 2, data 2": (MeshShape(data=2, pipe_micro=2, tensor=2), 3),
    "pipe 2, fsdp 2, tensor 2": (MeshShape(fsdp=2, pipe=2, tensor=2), 3),
    "zero 1, pipe 2, fsdp 2": (MeshShape(fsdp=2, pipe=2), 1),
    "tensor 8 over 4 kv heads": (MeshShape(tensor=4, tensor_micro=2), 3),
}
OPTIONS = {"columns": COLUMNS, "chunk": 8, "with_entropy": True}
CUTS = (0, 8)  # rows a micro-batch; 0: all 16


def batch():
    return make_batch(rows=16)


@pytest.fixture(scope="module")
def one_device():
    """Gradients on one device, by head."""
    found = {}
    for head in LOSSES:
        trainer = make_trainer(LOSSES[head], ONE, head=head, **OPTIONS)
        params = place_params(host_params(head=head), ONE, head)
        found[head] = trainer.gradients(params, cut_micros(batch(), replicas=1))[:2]
    return found


QUICK = ("zero 2 over 8", "zero 3, data 2, tensor 2", "zero 1, pipe 2, fsdp 2")


@pytest.mark.parametrize("name", slow_but(LAYOUTS, *QUICK))
def test_no_stage_of_zero_changes_a_gradient(name, one_device):
    shape, zero = LAYOUTS[name]
    head = "value" if zero == 2 else "lm"
    trainer = make_trainer(LOSSES[head], shape, head=head, zero=zero, **OPTIONS)
    params = place_params(host_params(head=head), shape, head)
    for rows in CUTS:
        micros = cut_micros(batch(), replicas=shape.data * shape.fsdp, micro_sequences=rows)
        loss, grads, _ = trainer.gradients(params, micros)
        assert_close((loss, grads), one_device[head])
        same = jax.tree.map(
            lambda g, p: g.sharding.is_equivalent_to(p.sharding, g.ndim), grads, params
        )
        assert all(jax.tree.leaves(same))


def of_two_kv_heads(shape):
    """Loss, gradients and log-probs of a model whose eight heads read two key-value heads."""
    cfg, rows = dataclasses.replace(CFG, kv_heads=2), batch()
    trainer = make_trainer(lm_loss, shape, cfg=cfg, **OPTIONS)
    replicas = replicas_of(shape, cfg=cfg)
    params = place_params(host_params(cfg), shape, cfg=cfg)
    loss, grads, _ = trainer.gradients(params, cut_micros(rows, replicas=shape.data))
    tokens_BT = place_rows(replicas.mesh, replicas.layout, rows["input_ids"])
    return loss, grads, Scorer(cfg, replicas, chunk=8).log_probs(params, tokens_BT)[0]


@pytest.fixture(scope="module")
def two_kv_heads():
    """On one device."""
    return of_two_kv_heads(ONE)


@pytest.mark.parametrize(
    "shape",
    [
        MeshShape(tensor=8),
        pytest.param(MeshShape(tensor=2, tensor_micro=2), marks=pytest.mark.slow),  # halves
        pytest.param(MeshShape(data=2, tensor=4), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_more_tensor_ranks_than_kv_heads_give_the_logits_and_gradients_of_one_device(
    shape, two_kv_heads
):
    """The gradient of a copied head is the sum over all that read it, on each of its copies."""
    found = of_two_kv_heads(shape)
    assert_close(found, two_kv_heads)
    for name in ("wk", "wv"):
        whole = np.asarray(two_kv_heads[1]["layers"][name])
        assert np.abs(whole).max() > 1e-3
        for copy in found[1]["layers"][name].addressable_shards:
            np.testing.assert_allclose(np.asarray(copy.data), whole[copy.index], atol=1e-5)


@pytest.mark.slow
def test_four_stages_of_a_layer_each_give_the_gradients_of_one_device():
    cfg = dataclasses.replace(CFG, layers=4)
    found = []
    for shape, rows in ((ONE, 0), (MeshShape(pipe=2, pipe_micro=2), 2), (MeshShape(pipe=4), 8)):
        trainer = make_trainer(lm_loss, shape, cfg=cfg, **OPTIONS)
        params = place_params(host_params(cfg), shape, cfg=cfg)
        micros = cut_micros(batch(), replicas=1, micro_sequences=rows)
        found.append(trainer.gradients(params, micros)[:2])
    assert_close(found[1], found[0])
    assert_close(found[2], found[0])


STEPPED = ("data 8", "zero 1 over 8", "zero 2, data 2, tensor 2", "pipe 2, fsdp 2, tensor 2")


@pytest.mark.parametrize("name", slow_but(STEPPED, "zero 2, data 2, tensor 2"))
def test_one_step_moves_every_weight_as_on_one_device(name, one_device):
    """Of SGD from gradients of one's own; of AdamW, whose first step is g / |g|, from the same."""
    shape, zero = LAYOUTS[name]
    loss, grads = jax.tree.map(np.asarray, one_device["lm"])
    stepped = []
    for place, stage in ((ONE, 3), (shape, zero)):
        trainer = make_trainer(lm_loss, place, zero=stage, **OPTIONS)
        placed = trainer.replicas.state_shardings
        state = trainer.init_state(jax.device_put(host_params(), placed))
        state, _ = trainer._apply(state, jax.device_put(grads, placed), loss, np.int32(1))
        stepped.append(jax.tree.map(np.asarray, state.params))
    assert_close(stepped[1], stepped[0], 1e-6)
    micros = cut_micros(batch(), replicas=trainer.replicas.count, micro_sequences=8)
    params = place_params(host_params(), shape)
    ours = jax.tree.map(np.asarray, trainer.gradients(params, micros)[1])
    lr = 0.05
    sgd = [jax.tree.map(lambda p, g: p - lr * g, host_params(), g) for g in (ours, grads)]
    assert_close(*sgd, 1e-6)


@pytest.mark.parametrize("shape", slow_but([DATA_TENSOR, PIPE_TENSOR], PIPE_TENSOR))
def test_positions_split_over_tensor_change_no_gradient_and_take_less_memory(shape, one_device):
    """20 positions over 4 devices: a quarter of the residual stream is saved for the backward."""
    options = {**OPTIONS, "remat": "layer"}
    temporary = {}
    for split in (False, True):
        trainer = make_trainer(lm_loss, shape, sequence_parallel=split, **options)
        params = place_params(host_params(), shape)
        (stack,) = cut_micros(batch(), replicas=shape.data)
        loss, grads, _ = trainer.gradients(params, [stack])
        assert_close((loss, grads), one_device["lm"])
        micros = {name: trainer._place(stack[name]) for name in trainer.columns}
        weights, one = trainer.replicas.weights(params), np.int32(1)
        lowered = trainer._accumulate.lower(weights, trainer._zeros(), micros, one, one)
        temporary[split] = memory(lowered.compile()).temp_bytes
    assert temporary[True] < temporary[False]


# --- what moves -----------------------------------------------------------------------------------

MICROS = 2


def traffic_of(shape, zero):
    """The collectives of one update, by program: weights, micro-batches, the one reduction."""
    trainer = make_trainer(lm_loss, shape, zero=zero, columns=COLUMNS)
    replicas = trainer.replicas
    params = place_params(host_params(), shape)
    rows = 16 // MICROS
    (stack,) = cut_micros(batch(), replicas=replicas.count, micro_sequences=rows)
    micros = {name: trainer._place(stack[name]) for name in trainer.columns}
    weights, sums, one = replicas.weights(params), trainer._zeros(), np.int32(1)
    programs = {
        "micro-batches": trainer._accumulate.lower(weights, sums, micros, one, one),
        "reduction": trainer._reduce.lower(sums),
    }
    if weights is not params:
        programs["weights"] = replicas._as_weights.lower(params)
    return params, {
        name: meter(lowered.compile(), mesh=replicas.mesh) for name, lowered in programs.items()
    }


def over_replicas(traffic):
    """Collectives over the axes that split the rows, scalars (losses and metrics) left out."""
    return [
        c for c in traffic.collectives if set(c.axes) & {"data", "fsdp"} and c.result_bytes > 64
    ]


def matrices(params):
    """Bytes of the parameters that fsdp shards, those in layers apart; and of the norms."""
    layers = sum(w.nbytes for w in jax.tree.leaves(params["layers"]) if w.ndim > 2)
    ends = params["embed"].nbytes + params["lm_head"].nbytes
    norms = sum(w.nbytes for name, w in params["layers"].items() if "norm" in name)
    return layers, ends, norms + params["final_norm"].nbytes


def received(traffic, kind):
    found = [c for c in over_replicas(traffic) if c.kind == kind]
    return sum(c.bytes_received * c.trips for c in found)


@pytest.mark.parametrize(
    ("shape", "zero"), [(MeshShape(data=8), 3), (MeshShape(data=4, tensor=2), 3)]
)
def test_replicas_reduce_their_gradients_once_a_mini_batch(shape, zero):
    """2 P (n - 1) / n bytes of all-reduce, whatever the number of micro-batches."""
    params, programs = traffic_of(shape, zero)
    assert over_replicas(programs["micro-batches"]) == []
    layers, ends, norms = matrices(params)
    found = over_replicas(programs["reduction"])
    assert {c.kind for c in found} == {"all-reduce"}
    assert all(c.trips == 1 and c.axes == ("data",) for c in found)
    whole = (layers + ends) / shape.tensor + norms
    expected = 2 * whole * (shape.data - 1) / shape.data
    assert received(programs["reduction"], "all-reduce") == pytest.approx(expected)


@pytest.mark.parametrize("shape", [MeshShape(fsdp=8), MeshShape(fsdp=4, tensor=2)])
def test_zero_1_reduce_scatters_once_a_mini_batch_and_gathers_weights_once(shape):
    """P (n - 1) / n bytes of each: the least there can be."""
    params, programs = traffic_of(shape, 1)
    layers, ends, norms = matrices(params)
    part = (layers + ends) / shape.tensor * (shape.fsdp - 1) / shape.fsdp
    assert over_replicas(programs["micro-batches"]) == []
    assert received(programs["reduction"], "reduce-scatter") == pytest.approx(part)
    gathered = {c.kind for c in over_replicas(programs["weights"])}
    assert gathered == {"all-gather"}
    assert received(programs["weights"], "all-gather") == pytest.approx(part)
    rest = 2 * norms * (shape.fsdp - 1) / shape.fsdp  # not sharded: norms
    assert received(programs["reduction"], "all-reduce") == pytest.approx(rest)


def test_zero_2_reduce_scatters_each_micro_batch():
    shape = MeshShape(data=2, fsdp=2, tensor=2)
    params, programs = traffic_of(shape, 2)
    layers, ends, _ = matrices(params)
    whole = (layers + ends) / shape.tensor
    found = over_replicas(programs["micro-batches"])
    assert {c.kind for c in found} == {"reduce-scatter"}
    assert {(c.axes, c.trips) for c in found} == {(("fsdp",), MICROS)}
    assert received(programs["micro-batches"], "reduce-scatter") == MICROS * whole / 2
    reduced = [c for c in over_replicas(programs["reduction"]) if c.axes == ("data",)]
    assert sum(c.bytes_received for c in reduced) == whole / 2  # shards of half: 2 (w/2) (1/2)


@pytest.mark.parametrize("shape", [MeshShape(fsdp=8), MeshShape(data=2, fsdp=2, tensor=2)])
def test_zero_3_gathers_a_layer_twice_and_reduce_scatters_it_once_a_micro_batch(shape):
    params, programs = traffic_of(shape, 3)
    layers, ends, _ = matrices(params)
    n = shape.fsdp
    part = (n - 1) / n / shape.tensor * MICROS
    assert "weights" not in programs
    found = over_replicas(programs["micro-batches"])
    assert {c.kind for c in found} == {"all-gather", "reduce-scatter"}
    assert all(c.axes == ("fsdp",) for c in found)
    assert {c.trips for c in found} <= {1, MICROS, MICROS * CFG.layers}
    scattered = received(programs["micro-batches"], "reduce-scatter")
    assert scattered == pytest.approx((layers + ends) * part)
    gathered = received(programs["micro-batches"], "all-gather")
    once = ends * part  # embedding and head; the compiler gathers them before the loop or in it
    assert 2 * layers * part + once / MICROS <= gathered <= 2 * layers * part + once
