# SPDX-License-Identifier: Apache-2.0
"""Layouts: strictness, divisibility, the kv-head fallback, and a relay that is all-gathers only."""

import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from meshes.layouts import (
    LOGICAL,
    Axes,
    Layout,
    batch_sharding,
    check,
    generate_layout,
    replicated,
    shardings,
    train_layout,
)
from meshes.mesh import MeshShape, make_mesh

AXES_TREE = {
    "embed": ("vocab", "embed"),
    "layers": {
        "wq": ("layers", "embed", "heads", "head_dim"),
        "wk": ("layers", "embed", "kv_heads", "head_dim"),
        "w_up": ("layers", "embed", "mlp"),
        "norm": ("layers", "norm"),
    },
    "value_bias": (),
}


def _shapes(heads: int = 8, kv_heads: int = 4, mlp: int = 56, embed: int = 40) -> dict:
    sizes = {"layers": 2, "embed": embed, "heads": heads, "kv_heads": kv_heads, "head_dim": 6}
    sizes |= {"mlp": mlp, "vocab": 96, "norm": embed}

    def leaf(axes: Axes) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(sizes[str(axis)] for axis in axes), jnp.float32)

    return jax.tree.map(leaf, AXES_TREE, is_leaf=lambda node: type(node) is tuple)


def test_specs() -> None:
    shape = MeshShape(data=2, fsdp=2, tensor=2, tensor_micro=2)
    train, generate = train_layout(shape, kv_heads=4), generate_layout(shape, kv_heads=4)
    wq = AXES_TREE["layers"]["wq"]
    both = ("tensor", "tensor_micro")
    assert train.spec(wq) == PartitionSpec(("pipe", "pipe_micro"), "fsdp", both, None)
    assert generate.spec(wq) == PartitionSpec("pipe", None, "tensor", None)
    assert train.spec(("batch", None)) == PartitionSpec(("data", "fsdp"), None)
    micro = ("data", "fsdp", "pipe_micro", "tensor_micro")
    assert generate.spec(("batch",)) == PartitionSpec(micro)
    assert train.spec(()) == PartitionSpec()


def test_misspelt_axes_are_errors() -> None:
    layout = train_layout(MeshShape(), kv_heads=4)
    with pytest.raises(ValueError, match=r"unknown logical axis 'head'; use one of .*heads"):
        layout.spec(("head",))
    with pytest.raises(ValueError, match="unknown mesh axis 'tensors'"):
        Layout("mine", dict(layout.rules) | {"mlp": "tensors"})
    with pytest.raises(ValueError, match="unknown logical axis 'mpl'"):
        Layout("mine", dict(layout.rules) | {"mpl": None})
    with pytest.raises(ValueError, match="no rule for embed, heads"):
        Layout("mine", {k: None for k in LOGICAL if k not in ("embed", "heads")})


def test_an_axis_may_not_shard_two_dimensions() -> None:
    layout = train_layout(MeshShape(fsdp=2), kv_heads=4)
    with pytest.raises(ValueError, match=r"two dimensions of .* over mesh axis 'fsdp'"):
        layout.spec(("batch", None, "embed"))


def test_every_violation_is_named_at_once() -> None:
    shape = MeshShape(fsdp=3, tensor=4, tensor_micro=2)
    layout = train_layout(shape, kv_heads=6)
    with pytest.raises(ValueError, match="does not divide") as error:
        check(shape, layout, _shapes(heads=6, kv_heads=6, mlp=60), AXES_TREE)
    message = str(error.value)
    assert "fsdp=3 does not divide embed=40; use fsdp 1, 2, 4, 5, 8, 10 or 20" in message
    assert "tensor=8 does not divide heads=6, mlp=60; use tensor 1, 2, 3 or 6" in message


def test_heads_that_tensor_does_not_divide_are_refused_and_never_copied() -> None:
    shape, message = MeshShape(tensor=4), "tensor=4 does not divide heads=6; use tensor 1 or 2"
    for layout in (train_layout(shape, kv_heads=2), generate_layout(shape, kv_heads=2)):
        with pytest.raises(ValueError, match=message):
            check(shape, layout, _shapes(heads=6, kv_heads=2), AXES_TREE)


def test_stages_that_do_not_divide_the_layers_are_refused() -> None:
    shape = MeshShape(pipe=2, pipe_micro=2)
    with pytest.raises(ValueError, match=r"pipe=4 does not divide layers=2; use pipe 1 or 2"):
        check(shape, train_layout(shape, kv_heads=4), _shapes(), AXES_TREE)


def test_axes_of_the_wrong_rank_name_the_parameter() -> None:
    shapes = _shapes()
    shapes["layers"]["w_up"] = jax.ShapeDtypeStruct((2, 40), jnp.float32)
    with pytest.raises(ValueError, match=r"\['layers'\]\['w_up'\] has shape \(2, 40\)"):
        check(MeshShape(), train_layout(MeshShape(), kv_heads=4), shapes, AXES_TREE)


@pytest.mark.parametrize(
    ("kv_heads", "tensor", "tensor_micro", "train", "generate"),
    [
        (4, 2, 2, ("tensor", "tensor_micro"), ("tensor",)),
        (2, 2, 4, ("tensor",), ("tensor",)),  # 8-way heads, 2-way kv, 4 copies
        (2, 1, 8, ("tensor",), ("tensor",)),
        (2, 4, 2, (), ()),  # tensor alone does not divide: never tensor_micro alone
        (3, 2, 1, (), ()),
    ],
)
def test_kv_heads_fall_back_to_copies(
    kv_heads: int, tensor: int, tensor_micro: int, train: Sequence[str], generate: Sequence[str]
) -> None:
    shape = MeshShape(tensor=tensor, tensor_micro=tensor_micro)
    assert train_layout(shape, kv_heads=kv_heads).mesh_axes("kv_heads") == train
    assert generate_layout(shape, kv_heads=kv_heads).mesh_axes("kv_heads") == generate


def test_copied_kv_heads_are_announced_once(caplog: pytest.LogCaptureFixture) -> None:
    shape = MeshShape(tensor=2, tensor_micro=16)
    for _ in range(2):
        shapes = _shapes(heads=32, kv_heads=2, mlp=64)
        check(shape, train_layout(shape, kv_heads=2), shapes, AXES_TREE)
    assert caplog.text.count("tensor=32 does not divide kv_heads=2: sharded 2 ways, 16 copies") == 1


SHAPES = [
    MeshShape(data=2, tensor=2, tensor_micro=2),
    MeshShape(fsdp=2, tensor=2, tensor_micro=2),
    MeshShape(tensor=2, tensor_micro=4),
    MeshShape(fsdp=4, tensor_micro=2),
    MeshShape(tensor=8),
]


def _indices(array: jax.Array) -> dict[jax.Device, list[set[int]]]:
    places = array.sharding.devices_indices_map(array.shape)
    return {
        device: [set(range(*s.indices(n))) for s, n in zip(index, array.shape, strict=True)]
        for device, index in places.items()
    }


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_training_shard_lies_inside_the_generation_shard(shape: MeshShape, kv_heads: int) -> None:
    mesh = make_mesh(jax.devices(), shape)
    arrays = jax.tree.map(lambda s: np.zeros(s.shape, np.float32), _shapes(kv_heads=kv_heads))
    train = shardings(mesh, train_layout(shape, kv_heads=kv_heads), AXES_TREE)
    generate = shardings(mesh, generate_layout(shape, kv_heads=kv_heads), AXES_TREE)
    pairs = zip(
        jax.tree.leaves(jax.device_put(arrays, train)),
        jax.tree.leaves(jax.device_put(arrays, generate)),
        strict=True,
    )
    for small, large in pairs:
        inner, outer = _indices(small), _indices(large)
        for device in mesh.devices.flat:
            assert all(a <= b for a, b in zip(inner[device], outer[device], strict=True))


def test_relay_is_one_all_gather_of_the_micro_group() -> None:
    shape = MeshShape(data=2, tensor=2, tensor_micro=2)
    mesh = make_mesh(jax.devices(), shape)
    axes = {"wq": ("layers", "embed", "heads", "head_dim")}
    train = shardings(mesh, train_layout(shape, kv_heads=4), axes)
    generate = shardings(mesh, generate_layout(shape, kv_heads=4), axes)
    weights = {"wq": np.arange(2 * 40 * 8 * 6, dtype=np.float32).reshape(2, 40, 8, 6)}
    move = jax.jit(lambda tree: tree, in_shardings=(train,), out_shardings=generate)
    text = move.lower(weights).compile().as_text()
    assert set(re.findall(r"\b(all-\w+|collective-permute|reduce-scatter)\(", text)) == {
        "all-gather"
    }
    np.testing.assert_array_equal(move(jax.device_put(weights, train))["wq"], weights["wq"])


def test_batch_sharding_splits_rows() -> None:
    shape = MeshShape(data=2, tensor=2, tensor_micro=2)
    mesh = make_mesh(jax.devices(), shape)
    rows = np.arange(8, dtype=np.int32)
    train = jax.device_put(rows, batch_sharding(mesh, train_layout(shape, kv_heads=4)))
    generate = jax.device_put(rows, batch_sharding(mesh, generate_layout(shape, kv_heads=4)))
    assert {s.data.shape for s in train.addressable_shards} == {(4,)}
    assert {s.data.shape for s in generate.addressable_shards} == {(2,)}
    # Micro-DP groups are neighbours: devices 0 and 1 split what device 0 trains on.
    assert [int(np.asarray(s.data)[0]) for s in generate.addressable_shards[:2]] == [0, 2]
    assert jax.device_put(rows, replicated(mesh)).is_fully_replicated
