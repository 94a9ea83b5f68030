# SPDX-License-Identifier: Apache-2.0
"""ZeRO and FSDP: gradients and updates of one device, and the collectives each stage may use."""

import jax
import pytest

from hfjax.engine.microbatch import cut_micros
from meshes.mesh import MeshShape
from tests.hfjax.engine.cases import (
    COLUMNS,
    LOSSES,
    assert_close,
    host_params,
    make_batch,
    make_trainer,
    place_params,
)

ONE = MeshShape()
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


@pytest.mark.parametrize("name", LAYOUTS)
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
