# SPDX-License-Identifier: Apache-2.0
"""What a run leaves behind: checkpoints beside its steps, the best one, and ends of every kind."""

import contextlib
import ctypes
import dataclasses
import json
import os
import re
import resource
import signal
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import hfjax.roles
from algorithms import sft
from hfjax.batch import Batch
from hfjax.config import RunConfig, to_toml
from hfjax.engine.checkpoint import file_sum, finish_save, restore_role, start_save
from hfjax.engine.offload import HOST
from hfjax.engine.store import CheckpointStore
from hfjax.metrics import STEP, make_console
from hfjax.roles import saved_state
from hfjax.run import Run, train
from hfjax.rundir import export_run, hold
from hfjax.saving import SaveError, check_best
from hfjax.stopping import Stopped
from meshes.mesh import MeshShape
from meshes.placement import Placement, Pool, RolePlacement
from tests.fixtures import placed, slow_but
from tests.test_resume import records, untimed
from tests.test_run import tuning

Step = Callable[[Any, Batch, Any], tuple[Batch, Any]]


def stepping(before: Callable[[Any, Batch], None]) -> types.ModuleType:
    """Fine-tuning that does something of its own before each step."""

    def step(models: Any, prompts: Batch, cfg: Any) -> tuple[Batch, Any]:
        before(models, prompts)
        return sft.step(models, prompts, cfg)

    module = types.ModuleType("stepping")
    vars(module).update(vars(sft), step=step)
    return module


def rows(folder: Path, count: int, **settings: Any) -> Any:
    """Fine-tuning on so many rows, two a step."""
    config = tuning(folder, **settings)
    lines = [{"prompt": f"t{3 + k}", "response": f"t{30 + k} t5"} for k in range(count)]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return config


def saved(config: Any, step: int) -> dict[str, np.ndarray]:
    """Arrays of the actor's checkpoint of a step."""
    shapes = saved_state(config.model, "lm", config.actor.optimizer)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), shapes)
    state = restore_role(store(config).path(step) / "actor", wanted)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def assert_equal_bits(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].tobytes() == b[name].tobytes(), name


def store(config: Any) -> CheckpointStore:
    return CheckpointStore(Path(config.out) / "checkpoints")


def test_steps_go_on_while_a_checkpoint_is_written_and_it_holds_the_bits_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 2 is written until step 5 begins; step 4 waits for nothing but its own turn."""
    held: list[tuple[Future[Any], Future[Any]]] = []

    def slowly(path: str, *state: Any) -> Future[Any]:
        real, given = start_save(path, *state), Future[Any]()
        held.append((real, given)) if "step_00000002" in path else given.set_result(real.result())
        return given

    seen = {}

    def before(models: Any, _: Batch) -> None:
        seen[models.step] = store(config).steps()
        if models.step == 5:
            ((real, given),) = held
            given.set_result(real.result())

    monkeypatch.setattr(hfjax.roles, "start_save", slowly)
    config = tuning(tmp_path, steps=6, save_every=5)
    monkeypatch.setattr(Run, "_due", lambda self, every, step: every > 0 and step in (2, 6))
    train(stepping(before), config)
    assert seen == {1: [], 2: [], 3: [], 4: [], 5: []} | {6: [2]}
    assert store(config).steps() == [2, 6]
    monkeypatch.undo()
    (tmp_path / "short").mkdir()
    short = tuning(tmp_path / "short", steps=2)
    train(sft, short)
    assert_equal_bits(saved(config, 2), saved(short, 2))


def test_what_was_copied_is_written_whatever_becomes_of_the_arrays(tmp_path: Path) -> None:
    """An array's memory is scribbled over as soon as saving returns."""
    x = jnp.arange(20_000_000, dtype=jnp.float32)
    expected = np.array(x)
    writing = start_save(tmp_path / "role", {"x": x})
    pointer = x.addressable_shards[0].data.unsafe_buffer_pointer()
    ctypes.memset(pointer, 255, x.nbytes)
    (bulk,) = sorted(size for size, _ in writing.result().values())[-1:]
    assert bulk >= x.nbytes
    finish_save(tmp_path / "role", writing.result())
    wanted = {"x": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)}
    assert np.array_equal(restore_role(tmp_path / "role", wanted)["x"], expected)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "steps"), [(10, [2, 4, 5]), (8, [2, 4])])
def test_the_last_step_is_saved_once(
    count: int, steps: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    save = Run.save
    monkeypatch.setattr(
        Run, "save", lambda self, step, *rest: asked.append(step) or save(self, step, *rest)
    )
    config = rows(tmp_path, count, save_every=2, keep_last=3)
    out = train(sft, config)
    assert asked == store(config).steps() == steps
    train(sft, dataclasses.replace(config, resume=True, epochs=2))
    assert [record[STEP] for record in records(out)] == list(range(1, count + 1))
    export_run(out, tmp_path / "exported")


@pytest.mark.parametrize("stop", slow_but([3, 4, 6], 4))
def test_a_resumed_run_uses_each_row_as_often_as_one_never_stopped(
    stop: int, tmp_path: Path
) -> None:
    """Four steps an epoch, shuffled: in the middle of one, at its end, and in the last."""
    used: list[bytes] = []

    def before(models: Any, prompts: Batch) -> None:
        used.extend(row.tobytes() for row in prompts["input_ids"])

    whole = rows(tmp_path, 8, epochs=2)
    train(stepping(before), whole)
    expected, used[:] = list(used), []
    assert set(Counter(expected).values()) == {2}
    halved = dataclasses.replace(whole, out=str(tmp_path / "halved"))

    def stops(models: Any, prompts: Batch) -> None:
        before(models, prompts)
        if models.step == stop:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Stopped) as stopped:
        train(stepping(stops), halved)
    assert stopped.value.number == signal.SIGTERM
    assert store(halved).steps() == [stop]
    train(stepping(before), dataclasses.replace(halved, resume=True))
    assert used == expected
    assert untimed(Path(halved.out)) == untimed(Path(whole.out))
    assert_equal_bits(saved(halved, 8), saved(whole, 8))


@pytest.mark.slow
def test_a_resumed_run_counts_updates_apart_from_rows(tmp_path: Path) -> None:
    """Four updates a step, 24 in all; the second half on twice the replicas.

    A rate that falls from 1e-3 to 0 is 5e-4 at update 12; of the last four the mean is 2.5 / 24.
    """
    actor = {"optimizer": {"lr": 1e-3, "schedule": "linear"}, "epochs": 2, "minibatch_sequences": 2}
    data = {"train": str(tmp_path / "train.jsonl"), "prompts_per_step": 4, "max_tokens": 64}
    config = rows(tmp_path, 24, actor=actor, data=data)
    rates: list[float] = []
    used: list[list[bytes]] = []

    def before(models: Any, prompts: Batch) -> None:
        used.append([row.tobytes() for row in prompts["input_ids"]])
        role = models.actor.pool.worker.roles["actor"]
        rates.append(float(role.training.optimizer.lr_at(role.held.state().updates)))

    def stops(models: Any, prompts: Batch) -> None:
        before(models, prompts)
        if models.step == 3:
            signal.raise_signal(signal.SIGTERM)

    train(stepping(before), config)
    assert rates[3] == pytest.approx(5e-4)
    halved = dataclasses.replace(config, out=str(tmp_path / "halved"))
    with pytest.raises(Stopped):
        train(stepping(stops), halved)
    assert saved(halved, 3)[".updates"] == 12
    wide = placed(tmp_path / "wide.toml", MeshShape(data=2), "actor")
    train(stepping(before), dataclasses.replace(halved, placement=wide, resume=True))
    assert used[6:] == used[:6]
    assert rates[6:] == rates[:6]
    last = [records(Path(each.out))[-1] for each in (config, halved)]
    assert last[0]["actor/lr"] == last[1]["actor/lr"] == pytest.approx(1e-3 * 2.5 / 24)


@pytest.fixture
def no_large_files() -> Any:
    """Sets the size that no file may exceed, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int | None) -> None:
        now = before if size is None else (size, before[1])
        resource.setrlimit(resource.RLIMIT_FSIZE, now)

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        ("full", "stop"),
        ("unwritable", "continue"),
        pytest.param("full", "continue", marks=pytest.mark.slow),
        pytest.param("unwritable", "stop", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_that_cannot_be_written_is_said_and_the_one_before_stays(
    kind: str, policy: str, tmp_path: Path, no_large_files: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Of step 4: its files may not grow, or a file stands where its directory would."""
    blocked = tmp_path / "run" / "checkpoints" / "step_00000004.tmp"

    def before(models: Any, _: Batch) -> None:
        step = models.step
        if step == 3:
            models.actor.written(wait=True).result()
        if step == 4 and kind == "full":
            no_large_files(100_000)
        elif step == 4:
            blocked.write_text("")
        elif step == 6:
            models.actor.written(wait=True).result()
            no_large_files(None)
            if kind == "unwritable":
                blocked.unlink()

    config = tuning(tmp_path, steps=6, save_every=2, on_save_error=policy)
    told = r"checkpoint of step 4 could not be written to .*step_00000004: .*; step 2 stays"
    if policy == "stop":
        with pytest.raises(SaveError, match=told):
            train(stepping(before), config)
        no_large_files(None)
        assert store(config).steps() == [2]
        assert kind == "unwritable" or not blocked.exists()
        blocked.unlink(missing_ok=True)
        train(sft, dataclasses.replace(config, resume=True))
        assert store(config).steps() == [4, 6]
    else:
        train(stepping(before), config)
        assert [text for text in caplog.messages if "step 4 could not be written" in text]
        assert store(config).steps() == [2, 6]
    assert [record[STEP] for record in records(Path(config.out))] == [1, 2, 3, 4, 5, 6]


KILLED = """
import os, signal
from concurrent.futures import Future
import hfjax.roles
from algorithms.sft import *
from algorithms import sft
start_save = hfjax.roles.start_save

def never_done(path, *state):
    done = start_save(path, *state)
    return Future() if "step_00000004" in path else done

def step(models, prompts, cfg):
    if models.step == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    return sft.step(models, prompts, cfg)

hfjax.roles.start_save = never_done
"""


FULL = """
import resource
from algorithms.sft import *
from algorithms import sft

def step(models, prompts, cfg):
    if models.step in (2, 60):
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000 if models.step == 2 else most, most))
    return sft.step(models, prompts, cfg)
"""


@pytest.mark.slow
def test_a_run_whose_disk_was_full_for_a_while_ends_with_all_its_records(tmp_path: Path) -> None:
    """More numbers than a pipe holds come after TensorBoard's file found no room."""
    config = tuning(tmp_path, steps=150, on_save_error="continue", tensorboard=True)
    (tmp_path / "full.py").write_text(FULL)
    (tmp_path / "given.toml").write_text(to_toml(config))
    command = [sys.executable, "-m", "hfjax.cli", "train", str(tmp_path / "full.py")]
    command += ["--config", str(tmp_path / "given.toml")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert re.search(r"tfevents\S* could not be written: File too large", ended.stderr)
    assert [record[STEP] for record in records(tmp_path / "run")] == [*range(1, 151)]
    (events,) = (tmp_path / "run" / "tensorboard").iterdir()
    assert events.read_bytes().count(b"actor/nll") == 150


@pytest.mark.slow
def test_a_run_killed_while_it_saves_goes_on_from_the_checkpoint_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Everything of step 4 is on disk but the manifest; with keep_last=1 step 2 is still there."""
    config = tuning(tmp_path, steps=6, save_every=2, keep_last=1)
    (tmp_path / "killed.py").write_text(KILLED)
    (tmp_path / "given.toml").write_text(to_toml(config))
    command = [sys.executable, "-m", "hfjax.cli", "train", str(tmp_path / "killed.py")]
    command += ["--config", str(tmp_path / "given.toml")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr[-3000:]
    assert store(config).steps() == [2]
    run = json.loads((tmp_path / "run" / "run.json").read_text()) | {"algorithm": "sft"}
    (tmp_path / "run" / "run.json").write_text(json.dumps(run))
    train(sft, dataclasses.replace(config, resume=True))
    assert [
        t
        for t in caplog.messages
        if "step 4" in t and "incomplete and ignored; that of step 2" in t
    ]
    assert store(config).steps() == [6]
    assert [record[STEP] for record in records(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("damage", ["byte", "role", "file", "manifest", "format"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = CheckpointStore(tmp_path)
    for step in (2, 4):
        sums = start_save(root.begin(step) / "actor", {"w": jnp.arange(2000) * step}).result()
        root.commit(step, {"step": step}, {"actor": sums})
    newest = root.path(4)
    bulk = max(newest.rglob("d/*"), key=lambda path: path.stat().st_size)
    manifest = newest / "manifest.json"
    if damage == "byte":
        bulk.write_bytes(bulk.read_bytes()[:-1] + b"?")
    elif damage == "role":
        (newest / "actor").rename(newest / "critic")
    elif damage == "format":
        manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    else:
        (bulk if damage == "file" else manifest).unlink()
    told = {
        "byte": f"{bulk.name} is not as it was written",
        "role": "actor/checksums.json is missing",
        "file": f"{bulk.name} is missing",
        "manifest": "manifest.json is missing",
        "format": "of format 2, this hfjax reads 1,",
    }
    assert root.latest() == 2
    (text,) = caplog.messages
    assert "checkpoint of step 4" in text
    assert told[damage] in text
    assert text.endswith("ignored; that of step 2 is used")


def test_a_checkpoint_that_is_not_all_here_is_not_committed(tmp_path: Path) -> None:
    """As where a process wrote to a disk of its own host: what it says of its files is not so."""
    root = CheckpointStore(tmp_path)
    sums = start_save(root.begin(2) / "actor", {"w": jnp.arange(2000)}).result()
    elsewhere = {"ocdbt.process_1/d/0123": [10, 0]}
    with pytest.raises(ValueError, match=r"ocdbt\.process_1/d/0123 is missing"):
        root.commit(2, {"step": 2}, {"actor": sums | elsewhere})
    assert root.steps() == []


def test_a_memory_of_any_length_comes_back(tmp_path: Path) -> None:
    """Five million bytes are more than is read of others' JSON."""
    root = CheckpointStore(tmp_path, keep_last=1, keep_best="loss")
    meta = {"memory": {"costs": "9" * 5_000_000}, "metrics": {"loss": 1.0}}
    for step in (2, 4):
        root.begin(step)
        root.commit(step, meta, {})
    assert root.steps() == [2, 4]
    assert root.load_meta(root.latest() or 0) == meta


def test_a_checkpoints_contents_are_read_once_and_its_bytes_told_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tuning(tmp_path, steps=1)
    train(sft, config)
    read: list[Path] = []
    monkeypatch.setattr(
        "hfjax.engine.checkpoint.file_sum", lambda file: read.append(file) or file_sum(file)
    )
    bulk = [path for path in store(config).path(1).glob("actor/**/d/*") if path.is_file()]
    with Run(sft, dataclasses.replace(config, resume=True, steps=2)):
        assert [read.count(file) for file in bulk] == [1] * len(bulk)
    assert re.search(r"verifying the checkpoint of step 1: 0\.\d+ GB\n", capsys.readouterr().out)
    read.clear()
    export_run(config.out, tmp_path / "exported")
    assert [read.count(file) for file in bulk] == [1] * len(bulk)


def test_the_best_checkpoint_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of losses 3 1 none nan 1 2: the first of the lowest, beside the last; then one better."""
    root = CheckpointStore(tmp_path, keep_last=1, keep_best="-loss")
    for step, loss in enumerate((3.0, 1.0, None, 1.0, 2.0), 1):
        root.begin(step)
        root.commit(step, {"metrics": {"loss": loss}} if loss else {}, {})
    assert root.steps() == [2, 5]
    assert CheckpointStore(tmp_path, keep_best="loss").best() == 5
    root.begin(6)
    root.commit(6, {"metrics": {"loss": 0.5}}, {})
    assert root.steps() == [6]


@pytest.mark.slow
def test_a_run_keeps_its_best_checkpoint_and_says_where_it_has_no_value(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The loss falls, so that the first step has the highest."""
    config = tuning(tmp_path, steps=4, save_every=1, keep_last=1, keep_best="actor/nll")
    out = train(sft, config)
    assert store(config).steps() == [1, 4]
    value = store(config).load_meta(1)["metrics"]["actor/nll"]
    assert value == records(out)[0]["actor/nll"]
    export_run(out, tmp_path / "best", best=True)
    export_run(out, tmp_path / "last")
    best, last = (load_file(tmp_path / name / "model.safetensors") for name in ("best", "last"))
    assert not np.array_equal(best["model.norm.weight"], last["model.norm.weight"])
    other = dataclasses.replace(config, keep_best="-actor/nil", resume=True, steps=5)
    train(sft, other)
    assert "keep_best=actor/nil: step 5 has no such metric (nearest: actor/nll)" in caplog.text
    with pytest.raises(ValueError, match="no whole checkpoint with a value of keep_best='-actor/n"):
        export_run(out, tmp_path / "none", best=True)


@pytest.mark.parametrize(
    ("name", "evaluated", "every", "saves", "told"),
    [
        ("-", True, 2, 2, "keep_best=-: put a metric's name"),
        ("val-core/nll", False, 2, 2, r"keep_best=val-core/nll: .* set data\.eval"),
        ("-val-core/nll", True, 0, 2, r"eval_every=0, save_every=2: .*, as eval_every=2, save_"),
        ("val-core/nll", True, 2, 3, "save_every must be a multiple of eval_every"),
        ("val-core/nll", True, 2, 4, ""),
        ("actor/nll", False, 0, 3, ""),
        ("", False, 0, 3, ""),
    ],
)
def test_a_best_that_checkpoints_would_have_no_value_of_is_refused(
    name: str, evaluated: bool, every: int, saves: int, told: str
) -> None:
    config = RunConfig(keep_best=name, eval_every=every, save_every=saves)
    with pytest.raises(ValueError, match=told) if told else contextlib.nullcontext():
        check_best(config, object() if evaluated else None)


@pytest.mark.slow
def test_offloaded_moments_rest_on_the_host_after_a_save(tmp_path: Path) -> None:
    role = RolePlacement("actor", "all", train=MeshShape(), offload=True)
    placement = Placement({"all": Pool("all", 1)}, {"actor": role})
    (tmp_path / "offload.toml").write_text(placement.to_toml())
    config = tuning(tmp_path, steps=1)
    with Run(sft, dataclasses.replace(config, placement=str(tmp_path / "offload.toml"))) as run:
        run.train()
        state = run.models.actor.pool.worker.roles["actor"].held._state
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state.opt_state)} == {HOST}
    moments = {n: x for n, x in saved(config, 1).items() if "opt_state" in n}
    leaves = jax.tree_util.tree_leaves_with_path(state.opt_state)
    kept = {f".opt_state{jax.tree_util.keystr(path)}": np.asarray(x) for path, x in leaves}
    assert_equal_bits(moments, kept)


def failing(at: dict[int, int]) -> types.ModuleType:
    """Fine-tuning whose step fails so many more times."""

    def before(models: Any, _: Batch) -> None:
        if at.get(models.step, 0) > 0:
            at[models.step] -= 1
            raise ArithmeticError(f"of step {models.step}, object at 0x{id(object()):x}")

    return stepping(before)


@pytest.mark.slow
def test_a_run_that_failed_goes_on_from_its_last_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twice, at other steps; the records and weights are those of a run that never failed."""
    config = tuning(tmp_path, steps=6, save_every=2, max_restarts=2)
    out = train(failing({1: 1, 5: 1}), config)
    shown = capsys.readouterr().out
    assert "restart 1 of 2 from the start: of step 1" in shown
    assert "restart 2 of 2 from step 4: of step 5" in shown
    (tmp_path / "whole").mkdir()
    whole = tuning(tmp_path / "whole", steps=6, save_every=2)
    train(sft, whole)
    assert untimed(out) == untimed(Path(whole.out))
    assert [record["perf/restarts"] for record in records(out)] == [1, 1, 1, 1, 2, 2]
    assert_equal_bits(saved(config, 6), saved(whole, 6))


def test_a_restart_that_cannot_start_is_tried_again_and_a_first_start_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[bool] = []
    refused = [2, 3]

    class Starting(contextlib.AbstractContextManager):  # a run whose first step fails once
        out, console = tmp_path / "run", make_console()
        models, saves = types.SimpleNamespace(step=3), types.SimpleNamespace(newest=2)

        def __init__(self, algorithm: Any, config: Any, restarts: int) -> None:
            opened.append(config.resume)
            if len(opened) in refused:
                raise ValueError("devices are not free within 20 s")

        def train(self) -> None:
            if len(opened) == 1:
                raise ArithmeticError("of step 3")

        def __exit__(self, *error: object) -> None:
            pass

    monkeypatch.setattr("hfjax.run.Run", Starting)
    monkeypatch.setattr("hfjax.stopping.PAUSE_S", 0)
    config = RunConfig(max_restarts=3)
    train(sft, config)
    assert opened == [False, True, True, True]
    shown = capsys.readouterr().out
    assert "restart 1 of 3 from step 2: of step 3" in shown
    assert "restart 3 of 3 in 0 s, as the last could not be: devices are not free" in shown
    for now_refused, runs in (([1], 1), ([2, 3, 4], 4)):
        opened[:], refused[:] = [], now_refused
        with pytest.raises(ValueError, match="not free"):
            train(sft, config)
        assert len(opened) == runs


@pytest.mark.ray
@pytest.mark.slow
def test_a_killed_process_is_replaced_where_restarts_are_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = []

    def before(models: Any, _: Batch) -> None:
        if models.step == 3:
            models.actor.written(wait=True).result()
        if models.step == 6 and not killed:
            killed.append(models.actor.pool.hellos[0]["pid"])
            os.kill(killed[0], signal.SIGKILL)

    config = tuning(tmp_path, runtime="ray", steps=6, save_every=2, max_restarts=1)
    out = train(stepping(before), config)
    told = r"restart 1 of 1 from step [24]: role 'actor', \w+ at step [456] .*: the process died"
    assert re.search(told, capsys.readouterr().out)
    assert [record[STEP] for record in records(out)] == [1, 2, 3, 4, 5, 6]
    whole = dataclasses.replace(config, out=str(tmp_path / "whole"), runtime="local")
    train(sft, whole)
    assert untimed(out) == untimed(Path(whole.out))
    assert_equal_bits(saved(config, 6), saved(whole, 6))


@pytest.mark.parametrize(("most", "runs"), [(5, 2), pytest.param(0, 1, marks=pytest.mark.slow)])
def test_a_failure_that_comes_again_without_progress_ends_the_run(
    most: int, runs: int, tmp_path: Path
) -> None:
    at = {3: 99}
    config = tuning(tmp_path, steps=4, save_every=2, max_restarts=most)
    with pytest.raises(ArithmeticError):
        train(failing(at), config)
    assert at == {3: 99 - runs}
    assert store(config).steps() == [2]


def test_a_directory_is_used_by_one_run_at_a_time(tmp_path: Path) -> None:
    """Refused before anything else is looked at; what another program left there is not touched."""
    config = tuning(tmp_path, steps=2)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    with hold(tmp_path / "run") as held:
        assert held
        for each in (config, dataclasses.replace(config, resume=True)):
            with pytest.raises(ValueError, match=r"is in use by process \d+ on .*; wait for it"):
                Run(sft, each)
    with hold(tmp_path / "run") as held:
        assert held
    (tmp_path / "other" / "checkpoints").mkdir(parents=True)
    (tmp_path / "other" / "notes.txt").write_text("")
    with hold(tmp_path / "other") as held:
        assert not held
    assert not (tmp_path / "other" / "run.lock").exists()


@pytest.mark.parametrize(
    ("left", "resume"),
    [
        ("settings", True),
        pytest.param("root", False, marks=pytest.mark.slow),
        pytest.param("root", True, marks=pytest.mark.slow),
        pytest.param("settings", False, marks=pytest.mark.slow),
    ],
)
def test_a_run_killed_while_its_directory_was_made_starts_over(
    left: str, resume: bool, tmp_path: Path
) -> None:
    config = tuning(tmp_path, steps=1, resume=resume)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    if left == "settings":
        (tmp_path / "run" / "settings.toml").write_text(to_toml(config))
        (tmp_path / "run" / "run.json.new").write_text("{")
    train(sft, config)
    assert store(config).steps() == [1]
