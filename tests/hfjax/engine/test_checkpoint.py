# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: bit-exact on any mesh and process count, whole or invisible, damage is named."""

import json
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hfjax.engine.checkpoint import finish_save, restore_role, save_role, start_save
from hfjax.engine.store import CheckpointStore
from meshes.layouts import replicated, shardings, train_layout
from meshes.mesh import MeshShape, make_mesh

AXES = {"norm": ("layers", "norm"), "w_up": ("layers", "embed", "mlp")}
TX = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(optax.cosine_decay_schedule(1e-3, 10), mu_dtype=jnp.bfloat16),
)


def _on(shape: MeshShape) -> tuple[Any, Any]:
    """(shardings of the parameters, sharding of counters) on a mesh of this shape."""
    mesh = make_mesh(jax.devices()[: shape.devices], shape)
    return shardings(mesh, train_layout(shape, kv_heads=4), AXES), replicated(mesh)


def _state(shape: MeshShape) -> dict[str, Any]:
    """Parameters of two dtypes with hard values, Adam moments, 0-d counters."""
    layout, alone = _on(shape)
    rng = np.random.default_rng(0)
    w = rng.standard_normal((2, 40, 56)).astype(np.float32)
    w[0, 0, :5] = [np.nan, np.inf, -0.0, 1e-45, np.finfo(np.float32).max]
    params = {"norm": rng.standard_normal((2, 40)).astype(jnp.bfloat16), "w_up": w}
    params = jax.device_put(params, layout)
    opt_state = optax.tree_utils.tree_map_params(
        TX,
        jax.device_put,
        TX.init(params),
        layout,
        transform_non_params=lambda leaf: jax.device_put(leaf + 7, alone),
    )
    counters = jax.device_put({"updates": np.int32(9), "skipped": np.int32(-1)}, alone)
    return {"params": params, "opt_state": opt_state, **counters}


def _abstract(shape: MeshShape) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), _state(shape)
    )


def _assert_same_bits(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize(
    "target",
    [MeshShape(data=2, tensor=2, tensor_micro=2), MeshShape(fsdp=8), MeshShape()],
    ids=str,
)
def test_state_comes_back_bit_for_bit_on_any_mesh(target: MeshShape, tmp_path: Path) -> None:
    state = _state(MeshShape(data=2, tensor=2, tensor_micro=2))
    save_role(tmp_path / "actor", state)
    wanted = _abstract(target)
    back = restore_role(tmp_path / "actor", wanted)
    _assert_same_bits(back, state)
    for leaf, spec in zip(jax.tree.leaves(back), jax.tree.leaves(wanted), strict=True):
        assert leaf.sharding == spec.sharding


TWO_PROCESSES = """
import json
import sys
import jax
import numpy as np
address, process, source, target = sys.argv[1:]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, 2, int(process))
from hfjax.engine.checkpoint import finish_save, restore_role, save_role, start_save
from meshes.layouts import replicated, shardings, train_layout
from meshes.mesh import MeshShape, make_mesh
shape = MeshShape(data=2, fsdp=2)
mesh = make_mesh(jax.devices(), shape)
axes = {"norm": ("layers", "norm"), "w_up": ("layers", "embed", "mlp")}
layout = shardings(mesh, train_layout(shape, kv_heads=4), axes)
wanted = {
    "norm": jax.ShapeDtypeStruct((2, 40), "bfloat16", sharding=layout["norm"]),
    "w_up": jax.ShapeDtypeStruct((2, 40, 56), "float32", sharding=layout["w_up"]),
    "updates": jax.ShapeDtypeStruct((), "int32", sharding=replicated(mesh)),
}
state = restore_role(source, wanted)
assert not state["w_up"].is_fully_addressable
sums = start_save(target, state).result()
print(json.dumps(sums))
"""


def test_two_processes_read_and_write_the_same_bits(tmp_path: Path, free_port: int) -> None:
    whole = _state(MeshShape(tensor=4))
    state = {**whole["params"], "updates": whole["updates"]}
    save_role(tmp_path / "source", state)
    env = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    command = [sys.executable, "-W", "error", "-c", TWO_PROCESSES, f"localhost:{free_port}"]
    where = [str(tmp_path / "source"), str(tmp_path / "target")]
    workers = [
        subprocess.Popen(
            [*command, str(i), *where],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    sums: dict[str, list[int]] = {}
    try:
        for worker in workers:
            told, errors = worker.communicate(timeout=120)
            assert worker.returncode == 0, errors
            sums |= json.loads(told)
    finally:
        for worker in workers:
            worker.kill()
    assert {name.partition("/")[0] for name in sums} == {"ocdbt.process_0", "ocdbt.process_1"}
    finish_save(tmp_path / "target", sums)
    target = _abstract(MeshShape(fsdp=8))
    back = restore_role(tmp_path / "target", {**target["params"], "updates": target["updates"]})
    _assert_same_bits(back, state)


@pytest.fixture
def free_port() -> int:
    """A port that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def _small(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A saved role and what to restore it into."""
    alone = replicated(make_mesh(jax.devices()[:1], MeshShape()))
    path = tmp_path / "actor"
    save_role(path, {"w": jax.device_put(np.arange(999, dtype=np.float32), alone)})
    return path, {"w": jax.ShapeDtypeStruct((999,), jnp.float32, sharding=alone)}


def test_a_role_that_was_not_saved_is_named(tmp_path: Path) -> None:
    _, wanted = _small(tmp_path)
    with pytest.raises(ValueError, match=f"no checkpoint at {tmp_path / 'critic'}"):
        restore_role(tmp_path / "critic", wanted)


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damaged_files_are_named(damage: str, tmp_path: Path) -> None:
    path, wanted = _small(tmp_path)
    file = max(path.rglob("d/*"), key=lambda f: f.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "flip":
        file.write_bytes(data)
    elif damage == "cut":
        file.write_bytes(data[: len(data) // 2])
    else:
        file.unlink()
    with pytest.raises(ValueError, match=rf"checkpoint {path} is damaged: \S*{file.name} is"):
        restore_role(path, wanted)


def test_another_model_is_refused_not_cast_cut_or_padded(tmp_path: Path) -> None:
    path, wanted = _small(tmp_path)
    sharding = wanted["w"].sharding
    with pytest.raises(ValueError, match=r"w: saved float32\[999\], here bfloat16\[999\]"):
        restore_role(path, {"w": jax.ShapeDtypeStruct((999,), jnp.bfloat16, sharding=sharding)})
    with pytest.raises(ValueError, match=r"w: saved float32\[999\], here float32\[1000\]"):
        restore_role(path, {"w": jax.ShapeDtypeStruct((1000,), jnp.float32, sharding=sharding)})
    with pytest.raises(ValueError, match="lacks v; has w, which this run has not"):
        restore_role(path, {"v": wanted["w"]})


def test_padding_for_one_mesh_is_neither_saved_nor_missed_on_another(tmp_path: Path) -> None:
    """21 rows filled up to 24 for eight devices, to 21 for one and to 22 for two."""
    w = np.arange(1, 22 * 3 - 2, dtype=np.float32).reshape(21, 3)
    real = {"w": jax.ShapeDtypeStruct(w.shape, w.dtype)}

    def placed(devices: int) -> Any:
        shape = MeshShape(tensor=devices)
        mesh = make_mesh(jax.devices()[:devices], shape)
        return shardings(mesh, train_layout(shape, kv_heads=8), {"w": ("vocab", "norm")})

    def padded(rows: int) -> np.ndarray:
        return np.pad(w, [(0, rows - 21), (0, 0)])

    before = jax.device_put({"w": padded(24)}, placed(8))
    save_role(tmp_path / "actor", before, real)
    for devices, rows in ((8, 24), (1, 21), (2, 22)):
        spec = jax.ShapeDtypeStruct((rows, 3), w.dtype, sharding=placed(devices)["w"])
        back = restore_role(tmp_path / "actor", {"w": spec}, real)
        np.testing.assert_array_equal(np.asarray(back["w"]), padded(rows))
        assert back["w"].sharding == spec.sharding
    with pytest.raises(ValueError, match=r"w: saved float32\[21, 3\], here float32\[20, 3\]"):
        restore_role(tmp_path / "actor", {"w": spec}, {"w": jax.ShapeDtypeStruct((20, 3), w.dtype)})


def test_a_part_is_read_alone(tmp_path: Path) -> None:
    state = _state(MeshShape(fsdp=2))
    save_role(tmp_path / "actor", state)
    wanted = {"params": _abstract(MeshShape())["params"]}
    back = restore_role(tmp_path / "actor", wanted, whole=False)
    _assert_same_bits(back, {"params": state["params"]})
    with pytest.raises(ValueError, match="which this run has not"):
        restore_role(tmp_path / "actor", wanted)


def test_saving_says_nothing(tmp_path: Path, capfd: pytest.CaptureFixture, caplog: Any) -> None:
    path, wanted = _small(tmp_path)
    restore_role(path, wanted)
    assert capfd.readouterr() == ("", "")
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def _commit(store: CheckpointStore, step: int, **meta: Any) -> None:
    """A checkpoint of one role with one small array."""
    sums = start_save(store.begin(step) / "actor", {"w": jnp.ones(3) * step}).result()
    store.commit(step, {"step": step, **meta}, {"actor": sums})


def test_a_checkpoint_shows_when_it_is_whole(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    assert store.latest() is None
    tmp = store.begin(6)
    sums = start_save(tmp / "actor", {"w": jnp.ones(3)}).result()
    assert store.latest() is None
    meta = {"step": 6, "cursor": [1, 4], "kl": {"coef": 0.1 + 0.2}}
    assert (
        store.commit(6, meta, {"actor": sums})
        == store.path(6)
        == tmp_path / "run/checkpoints/step_00000006"
    )
    assert (store.path(6) / "actor").is_dir()
    assert (store.latest(), store.load_meta(6)) == (6, meta)


def test_after_a_resume_from_an_older_one_the_damaged_are_deleted_and_no_other(
    tmp_path: Path,
) -> None:
    store = CheckpointStore(tmp_path, keep_last=3, keep_best="score")
    for step, score in ((10, 0.5), (20, 0.9)):
        _commit(store, step, metrics={"score": score})
    file = max(store.path(20).rglob("d/*"), key=lambda path: path.stat().st_size)
    held = bytearray(file.read_bytes())
    held[-1] ^= 1
    file.write_bytes(bytes(held))
    assert store.latest() == 10
    again = CheckpointStore(tmp_path, keep_last=1, keep_best="score")
    _commit(again, 12, metrics={"score": 0.4})
    assert again.steps() == [10, 12]
    assert (again.latest(), again.best()) == (12, 10)


def test_killed_while_saving_leaves_the_old_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    _commit(store, 2)
    (store.begin(4) / "actor").mkdir()  # killed here: nothing of step 2 is gone

    again = CheckpointStore(tmp_path, keep_last=1)
    assert again.latest() == 2
    assert "checkpoint of step 4" in caplog.text
    assert "incomplete and ignored; that of step 2 is used" in caplog.text
    assert list(again.begin(4).iterdir()) == []  # step 4 can be saved again
    again.commit(4, {"step": 4}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000004"]


def test_a_failed_commit_leaves_the_old_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    _commit(store, 2)
    store.begin(4)
    with pytest.raises(TypeError):
        store.commit(4, {"cursor": object()}, {})
    assert store.latest() == 2


def test_half_deleted_checkpoints_do_not_look_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    _commit(store, 2)

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            _commit(store, 4)
    assert CheckpointStore(tmp_path).steps() == [4]


def test_keep_last(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (2, 4, 5, 100_000_000):
        _commit(store, step)
    assert store.steps() == [5, 100_000_000]
    _commit(store, 100_000_000)  # the same step again replaces itself
    assert store.steps() == [5, 100_000_000]
    with pytest.raises(ValueError, match="keep_last = 0"):
        CheckpointStore(tmp_path, keep_last=0)


def test_lost_meta_is_named(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    _commit(store, 3)
    file = store.path(3) / "meta.json"
    file.write_text('{"step": ')
    with pytest.raises(ValueError, match=f"checkpoint file {file} cannot be read"):
        store.load_meta(3)


@pytest.mark.parametrize("kind", ["a file", "read-only"])
def test_unwritable_directories_are_refused_at_once(kind: str, tmp_path: Path) -> None:
    root = tmp_path / "out"
    if kind == "a file":
        root.write_text("")
    else:
        root = Path("/proc/hfjax")  # nobody, not even root, makes directories there
    with pytest.raises(ValueError, match=f"{root}/checkpoints cannot be written"):
        CheckpointStore(root / "checkpoints").make_root()
