# SPDX-License-Identifier: Apache-2.0
"""A run that was stopped goes on as if it had not been: killed, interrupted, or moved."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from algorithms import dpo, grpo, ppo, safe_rlhf, sft
from hfjax.algorithm import config_class
from hfjax.arithmetic import write_task_model_config
from hfjax.config import from_dict, to_toml
from hfjax.engine.store import CheckpointStore
from hfjax.engine.train import Trainer
from hfjax.metrics import STEP, MetricLog
from hfjax.models.hf import load_config, load_params
from hfjax.run import train
from hfjax.rundir import export_run
from meshes.mesh import MeshShape
from meshes.placement import Placement, Pool, RolePlacement
from tests.fixtures import is_timing, placed, write_tiny_hf
from tests.test_run import tuning

STEPS = 8
SAVE_EVERY = 3
CHANGING = {
    safe_rlhf: ("lagrange/lambda", "actor/reward_kl_penalty_coeff", "actor/pretrain_nll"),
    grpo: ("dynamic/batches", "actor/pg_loss"),
}
DEADLINE_S = 300
ROLES = ("actor", "critic", "reference")


def configured(folder: Path, program: Any = ppo, **settings: Any) -> Any:
    """Eight steps, of PPO by default, on sums, from new weights, a checkpoint every three."""
    folder.mkdir(exist_ok=True)
    if not (folder / "model").exists():
        write_task_model_config(folder / "model")
    decay = {"lr": 1e-3, "warmup_steps": 4, "schedule": "linear"}
    table: dict[str, Any] = {
        "model": str(folder / "model"),
        "init": "random",
        "runtime": "local",
        "placement": placed(folder / "one.toml", MeshShape(), *ROLES),
        "out": str(folder / "run"),
        "steps": STEPS,
        "save_every": SAVE_EVERY,
        "tensorboard": False,
        "data": {"train": "sums", "prompts_per_step": 8, "max_prompt_tokens": 8},
        "rollout": {"n": 2, "max_new_tokens": 4},
        "reward": {"function": "hfjax.arithmetic:sum_reward", "workers": 1},
        "actor": {"optimizer": decay | {"total_steps": 2 * STEPS}, "minibatch_sequences": 8},
        "critic": {"optimizer": decay | {"total_steps": STEPS}},
    }
    used = config_class(program)
    sections = {field.name for field in dataclasses.fields(used)}
    table = {name: value for name, value in table.items() if name in sections}
    return from_dict(used, table | settings, where="test")


def started(config: Any) -> subprocess.Popen[str]:
    """`hfjax train ppo` with these settings, in a process group of its own and this environment."""
    file = Path(config.out).with_name("given.toml")
    file.write_text(to_toml(config))
    return subprocess.Popen(
        [sys.executable, "-m", "hfjax.cli", "train", "ppo", "--config", str(file)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for_step(process: subprocess.Popen[str], out: str, step: int) -> None:
    """Until the record of `step` is in metrics.jsonl."""
    ends_s = time.monotonic() + DEADLINE_S
    while not any(record[STEP] == step for record in records(Path(out))):
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < ends_s
        time.sleep(0.02)


def records(out: Path) -> list[dict[str, Any]]:
    """metrics.jsonl as it stands, without a half-written last line."""
    path = out / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def untimed(out: Path) -> list[dict[str, Any]]:
    """Its records without what measures the machine."""
    return [{k: v for k, v in record.items() if not is_timing(k)} for record in records(out)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that nobody stopped."""
    return train(ppo, configured(tmp_path_factory.mktemp("whole")))


def test_a_run_killed_in_step_7_and_resumed_equals_one_never_stopped(
    tmp_path: Path, whole: Path
) -> None:
    """Bit for bit, in every metric that does not measure time; each step stands once."""
    config = configured(tmp_path)
    process = started(config)
    wait_for_step(process, config.out, 6)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert records(Path(config.out))[-1][STEP] == 6, "killed too late to test anything"
    out = train(ppo, dataclasses.replace(config, resume=True))
    assert [record[STEP] for record in records(out)] == list(range(1, STEPS + 1))
    assert untimed(out) == untimed(whole)
    samples = [(each / "samples.jsonl").read_text() for each in (out, whole)]
    assert samples[0] == samples[1]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a fine-tuning run that nobody stopped."""
    return train(sft, tuning(tmp_path_factory.mktemp("tuned"), steps=3, save_every=1))


@pytest.mark.parametrize(("owner", "name"), [(MetricLog, "write"), (CheckpointStore, "commit")])
def test_a_kill_between_record_and_checkpoint_loses_neither(
    owner: type, name: str, tmp_path: Path, tuned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of step 2 without its record left steps 1 and 3 after the resumption."""
    works = getattr(owner, name)

    def killed(self: Any, step: int, *args: Any) -> Any:
        if step == 2:
            raise KeyboardInterrupt
        return works(self, step, *args)

    config = tuning(tmp_path, steps=3, save_every=1)
    monkeypatch.setattr(owner, name, killed)
    with pytest.raises(KeyboardInterrupt):
        train(sft, config)
    monkeypatch.setattr(owner, name, works)
    out = train(sft, dataclasses.replace(config, resume=True))
    assert [record[STEP] for record in records(out)] == [1, 2, 3]
    assert untimed(out) == untimed(tuned)


@pytest.mark.slow
def test_a_vocabulary_that_was_padded_for_one_placement_goes_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """21 words on two tensor shards, then on one device, then exported; no state is made twice."""
    model = write_tiny_hf(tmp_path / "small", vocab_size=21)
    shape = MeshShape(tensor=2)
    two = Placement({"all": Pool("all", 2)}, {"actor": RolePlacement("actor", "all", train=shape)})
    (tmp_path / "two.toml").write_text(two.to_toml())
    split = str(tmp_path / "two.toml")
    config = tuning(tmp_path, model=str(model), placement=split, steps=2)
    train(sft, config)
    single = str(tmp_path / "placement.toml")
    again = dataclasses.replace(config, placement=single, steps=3, resume=True)
    with monkeypatch.context() as patch:
        patch.setattr("hfjax.roles.load_params", lambda *_: pytest.fail("weights were loaded"))
        patch.setattr(Trainer, "init_state", lambda *_: pytest.fail("moments were made"))
        found = untimed(train(sft, again))
        train(sft, dataclasses.replace(again, placement=split, steps=4))
    assert [record[STEP] for record in found] == [1, 2, 3]
    assert found[2]["actor/nll"] < found[1]["actor/nll"] < found[0]["actor/nll"]
    export_run(config.out, tmp_path / "exported")
    exported = load_params(tmp_path / "exported", load_config(tmp_path / "exported"), "lm")
    assert exported["embed"].shape == (21, 40)


def test_a_resume_that_fails_leaves_every_file_as_it_was(tmp_path: Path) -> None:
    """Other rows in the same file, another model in the same directory, a damaged checkpoint."""
    config = tuning(tmp_path, steps=1)
    out = train(sft, config)
    with (out / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({STEP: 2}) + "\n")  # of a step that a kill cut short of a checkpoint

    def files() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}

    before = files()
    again = dataclasses.replace(config, resume=True, keep_last=7)

    rows = (tmp_path / "train.jsonl").read_text()
    (tmp_path / "train.jsonl").write_text(rows.replace("t7", "t8"))
    with pytest.raises(ValueError, match="the data's rows was"):
        train(sft, again)
    (tmp_path / "train.jsonl").write_text(rows)

    write_tiny_hf(tmp_path / "model", intermediate_size=64)
    with pytest.raises(ValueError, match=r"does not fit this run: .*\[2, 40, 56\], here"):
        train(sft, again)
    write_tiny_hf(tmp_path / "model")

    data = max((out / "checkpoints").rglob("d/*"), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    with pytest.raises(ValueError, match=r"no checkpoint in .* is whole: step 1 is damaged"):
        train(sft, again)
    assert files() == before


def test_another_reference_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    """Resumed with other weights in its directory; the policy's are in the checkpoint."""
    row = {"prompt": "t3", "chosen": "t4 t5", "rejected": "t6"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row) + "\n")
    table = {
        "model": str(write_tiny_hf(tmp_path / "model")),
        "runtime": "local",
        "placement": placed(tmp_path / "placement.toml", MeshShape(), "actor", "reference"),
        "out": str(tmp_path / "run"),
        "tensorboard": False,
        "data": {"train": str(tmp_path / "pairs.jsonl"), "prompts_per_step": 1, "max_tokens": 16},
    }
    config = from_dict(config_class(dpo), table | {"steps": 1}, where="test")
    train(dpo, config)
    again = dataclasses.replace(config, resume=True, steps=2)
    write_tiny_hf(tmp_path / "model", seed=1)
    with pytest.raises(ValueError, match="the weights of reference, which nothing trains, are not"):
        train(dpo, again)
    write_tiny_hf(tmp_path / "model")
    assert [record[STEP] for record in records(train(dpo, again))] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [safe_rlhf, grpo])
def test_what_an_algorithm_remembers_outlives_a_kill(
    algorithm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Multiplier and recent costs, the KL's coefficient, the places in texts and in prompts."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"{n}+1={n + 1}"}) + "\n" for n in range(19)))
    data = {"train": "sums", "prompts_per_step": 8, "max_prompt_tokens": 8}
    reward = {"function": "hfjax.arithmetic:random_reward", "workers": 1}
    settings: dict[str, Any] = {"data": data, "reward": reward, "algorithm": {"dynamic_batches": 3}}
    roles = ["actor", "reference"]
    if algorithm is safe_rlhf:
        roles += ["critic", "cost_critic"]
        steered = {"coef": 0.1, "target": 0.01, "horizon": 100.0}
        settings["data"] = data | {"pretrain": str(texts)}
        settings["cost"] = {"function": "hfjax.arithmetic:seven_cost", "workers": 1}
        settings["algorithm"] = {"ptx_coef": 1.0, "multiplier_lr": 0.3, "kl": steered}
    settings["placement"] = placed(tmp_path / "these.toml", MeshShape(), *roles)
    whole = train(algorithm, configured(tmp_path / "whole", algorithm, **settings))
    config = configured(tmp_path / "killed", algorithm, **settings)
    write = MetricLog.write

    def killed(self: MetricLog, step: int, *args: Any) -> Any:
        if step == SAVE_EVERY + 2:
            raise KeyboardInterrupt
        return write(self, step, *args)

    with monkeypatch.context() as patch:
        patch.setattr(MetricLog, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            train(algorithm, config)
    found = untimed(train(algorithm, dataclasses.replace(config, resume=True)))
    assert found == untimed(whole)
    for name in CHANGING[algorithm]:
        assert len({record[name] for record in found}) > 1, name


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_starts_over(tmp_path: Path, whole: Path) -> None:
    config = configured(tmp_path)
    process = started(config)
    wait_for_step(process, config.out, 2)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert untimed(train(ppo, dataclasses.replace(config, resume=True))) == untimed(whole)


@pytest.mark.slow
def test_a_run_resumed_on_another_placement_equals_it_to_rounding(
    tmp_path: Path, whole: Path
) -> None:
    """Sharded Adam moments and master weights come from the checkpoint of one device."""
    config = configured(tmp_path, steps=SAVE_EVERY)
    train(ppo, config)
    elsewhere = placed(tmp_path / "eight.toml", MeshShape(data=2, fsdp=2, tensor=2), *ROLES)
    again = dataclasses.replace(config, steps=STEPS, placement=elsewhere, resume=True)
    found, expected = untimed(train(ppo, again)), untimed(whole)
    assert [record[STEP] for record in found] == list(range(1, STEPS + 1))
    after = zip(found[SAVE_EVERY:], expected[SAVE_EVERY:], strict=True)
    first, known = next(after)
    assert first.keys() == known.keys()
    for name in ("critic/score/mean", "response_length/mean", "training/epoch"):
        assert first[name] == known[name]
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/vf_loss"):
        np.testing.assert_allclose(first[name], known[name], rtol=1e-3, atol=1e-5)


def test_resume_needs_a_run_and_a_run_needs_a_free_directory(tmp_path: Path) -> None:
    config = configured(tmp_path)
    with pytest.raises(ValueError, match="holds no run to resume; leave --resume out"):
        train(ppo, dataclasses.replace(config, resume=True))
    out = Path(config.out)
    out.mkdir(exist_ok=True)
    (out / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="holds a run; add --resume or choose another directory"):
        train(ppo, config)
    with pytest.raises(ValueError, match=r"out=''.*set with --resume"):
        configured(tmp_path, out="", resume=True)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_run_after_the_step_with_a_checkpoint_to_resume(
    number: int, status: int, tmp_path: Path, whole: Path
) -> None:
    """Ctrl-C, and what comes before a machine is taken away; the rest is as it would have been."""
    config = configured(tmp_path, save_every=0)
    process = started(config)
    wait_for_step(process, config.out, 1)
    os.killpg(process.pid, number)  # as a terminal does: reward workers get it too
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == status, errors[-3000:]
    assert "Traceback" not in errors
    done = records(Path(config.out))[-1][STEP]
    saved = sorted(path.name for path in (Path(config.out) / "checkpoints").iterdir())
    assert saved == [f"step_{done:08d}"]
    assert done < STEPS
    assert untimed(train(ppo, dataclasses.replace(config, resume=True))) == untimed(whole)


HELD_UP_S = 25  # below the reward's deadline


def slow_reward(
    prompts: list[str], responses: list[str], truths: list[str], places: list[tuple[int, int]]
) -> list[float]:
    """Holds the second step up."""
    if places and places[0][0] == 2:
        time.sleep(HELD_UP_S)
    return [0.0] * len(responses)


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    """The step is not finished: nothing of it is in the records, and no checkpoint is written."""
    reward = {"function": f"{__file__}:slow_reward", "workers": 1}
    config = configured(tmp_path, reward=reward, save_every=0)
    process = started(config)
    wait_for_step(process, config.out, 1)
    time.sleep(2)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)
    start_s = time.monotonic()
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, errors[-3000:]
    assert time.monotonic() - start_s < HELD_UP_S / 2  # it did not wait for the step
    assert "Traceback" not in errors
    assert records(Path(config.out))[-1][STEP] == 1
    assert not list((Path(config.out) / "checkpoints").iterdir())


@pytest.mark.ray
@pytest.mark.slow
def test_a_ray_run_killed_in_step_7_and_resumed_equals_one_never_stopped(tmp_path: Path) -> None:
    """Two processes of two devices write and read one checkpoint."""
    shape = MeshShape(data=2, tensor=2)

    def run(folder: Path) -> Any:
        folder.mkdir()
        placement = placed(folder / "two.toml", shape, *ROLES, processes=2)
        return configured(folder, runtime="ray", placement=placement)

    config = run(tmp_path / "killed")
    process = started(config)
    wait_for_step(process, config.out, 6)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    finished(dataclasses.replace(config, resume=True))
    whole = run(tmp_path / "whole")
    finished(whole)
    assert untimed(Path(config.out)) == untimed(Path(whole.out))


def two_pools(path: Path) -> str:
    """The actor on four devices, the others on four more."""
    shape = MeshShape(fsdp=2, tensor=2)
    roles = {
        "actor": RolePlacement("actor", "first", train=shape),
        "critic": RolePlacement("critic", "second", train=shape),
        "reference": RolePlacement("reference", "second", infer=shape),
    }
    path.write_text(
        Placement({name: Pool(name, 4) for name in ("first", "second")}, roles).to_toml()
    )
    return str(path)


@pytest.mark.ray
@pytest.mark.slow
def test_what_two_processes_of_four_devices_saved_goes_on_anywhere(tmp_path: Path) -> None:
    """In one process of eight devices, one of two, and two pools: the next step has its numbers."""
    eight, two = MeshShape(data=2, fsdp=2, tensor=2), MeshShape(data=2)
    many = placed(tmp_path / "many.toml", eight, *ROLES, processes=2)
    config = configured(tmp_path, steps=4, runtime="ray", placement=many)
    finished(config)
    expected = records(Path(config.out))[-1]
    shown = (Path(config.out) / "samples.jsonl").read_text()
    placements = {
        "eight": placed(tmp_path / "eight.toml", eight, *ROLES),
        "two": placed(tmp_path / "two.toml", two, *ROLES),
        "pools": two_pools(tmp_path / "pools.toml"),
    }
    for name, placement in placements.items():
        out = tmp_path / name
        shutil.copytree(config.out, out)
        shutil.rmtree(out / "checkpoints" / "step_00000004")
        there = {"out": str(out), "placement": placement, "runtime": "local", "resume": True}
        found = records(train(ppo, dataclasses.replace(config, **there)))
        assert [record[STEP] for record in found] == [1, 2, 3, 4]
        assert (out / "samples.jsonl").read_text() == shown, name
        for metric in ("actor/pg_loss", "critic/vf_loss", "critic/score/mean", "actor/entropy"):
            assert found[-1][metric] == pytest.approx(expected[metric], abs=1e-5), (name, metric)


def finished(config: Any) -> None:
    """Runs to the end in another process."""
    process = started(config)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors[-3000:]
