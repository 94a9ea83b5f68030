# SPDX-License-Identifier: Apache-2.0
"""Every call of the engine is timed under every layout, and a table says so."""

import itertools
import math

import pytest

from benchmarks.measured import CALLS, LAYOUTS, Load, measured, table
from meshes.mesh import MeshShape
from tests.fixtures import tiny_config


def test_layouts_are_every_shape_of_eight_devices() -> None:
    shapes = [{k: n for k, n in sizes.items() if k != "zero"} for sizes in LAYOUTS.values()]
    axes = ("data", "fsdp", "tensor", "pipe")
    sizes = (s for s in itertools.product((1, 2, 4, 8), repeat=4) if math.prod(s) == 8)
    every = {MeshShape(**dict(zip(axes, s, strict=True))) for s in sizes}
    assert {MeshShape(**sizes) for sizes in shapes} == every


@pytest.mark.slow
def test_each_call_has_seconds_under_each_layout() -> None:
    load = Load(rows=16, prompt=4, response=4, micros=2)
    names = ["zero1-8", "pipe2-tensor2-data2"]
    *_, rows = measured(names, 2, load, tiny_config())
    assert [(row["layout"], row["p_g"], row["t_g"]) for row in rows] == [
        ("zero1-8", 1, 1),
        ("pipe2-tensor2-data2", 1, 1),
        ("pipe2-tensor2-data2", 2, 1),
        ("pipe2-tensor2-data2", 1, 2),
        ("pipe2-tensor2-data2", 2, 2),
    ]
    assert all(second > 0 for row in rows[:2] for call in CALLS for second in row[call])
    assert "update" not in rows[2]
    assert len(table(rows).splitlines()) == 6
