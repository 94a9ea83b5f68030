# SPDX-License-Identifier: Apache-2.0
"""Rows onto replicas and back: every row once, fillers nowhere, whatever a process holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfjax.controller.protocol import Shard
from hfjax.engine import passes
from hfjax.engine.passes import Passes
from meshes.layouts import train_layout
from meshes.mesh import MeshShape, make_mesh


def _passes(replicas: int) -> Passes:
    shape = MeshShape(data=replicas)
    mesh = make_mesh(jax.devices()[:replicas], shape)
    return Passes(mesh, train_layout(shape, kv_heads=1))


def _shard(rows: int, group: int = 1) -> Shard:
    x = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)
    return Shard({"x": x}, np.arange(rows), rows, group, 0)


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize(("rows", "group"), [(1, 1), (5, 1), (12, 3), (8, 2)])
@pytest.mark.parametrize("tokens", [3, 6, 1000])  # rows a pass: 1, 2, all
def test_every_row_comes_back_in_its_place(
    replicas: int, rows: int, group: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "PASS_TOKENS", tokens)
    shard = _shard(rows, group)
    doubled, sums = _passes(replicas).over(shard, ("x",), lambda x: (2 * x, jnp.sum(x, axis=1)))
    np.testing.assert_array_equal(doubled, 2 * shard.columns["x"])
    np.testing.assert_array_equal(sums, shard.columns["x"].sum(axis=1))


def test_a_process_without_rows_places_fillers() -> None:
    empty = np.zeros((0, 3), np.float32)
    held = np.zeros(0, np.int64)
    placed = _passes(2)._place(empty, held, np.arange(4), n_rows=0, filler=7)
    np.testing.assert_array_equal(placed, np.full((4, 3), 7, np.float32))
    assert passes._collected([(np.arange(4), placed)], held).shape == (0, 3)


def test_a_row_that_its_process_lacks_is_refused_and_not_computed_as_zeros() -> None:
    shard = Shard({"x": np.ones((3, 3), np.float32)}, np.array([0, 1, 3]), 4, 1, 0)
    with pytest.raises(ValueError, match=r"rows \[2\] belong to this process, which lacks them"):
        _passes(2).over(shard, ("x",), lambda x: x)
