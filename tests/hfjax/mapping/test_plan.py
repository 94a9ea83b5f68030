# SPDX-License-Identifier: Apache-2.0
"""`hfjax plan`, as a user types it: tables, reasons, files, refusals."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hfjax.algorithm import load_algorithm
from hfjax.cli import main
from hfjax.mapping.plan import PlanConfig, plan_class, planned
from hfjax.mapping.work import Kind
from meshes.placement import load_placement

PPO = ("actor", "critic", "reference", "reward")


def run(capsys: Any, *arguments: str) -> tuple[int, str]:
    code = main(["plan", *arguments])
    told = capsys.readouterr()
    return code, told.out + told.err


def test_the_best_placement_is_a_file_that_training_takes(tmp_path: Path, capsys: Any) -> None:
    out, trace = tmp_path / "best.toml", tmp_path / "trace.json"
    devices = ("--devices", "8xa100-80g")
    code, text = run(capsys, "ppo", *devices, "--out", str(out), "--trace", str(trace))
    assert code == 0, text
    assert text.startswith("simulated: 8 x a100-80g, profile hfjax")
    for word in ("tokens/s", "GB", "idle", "d_cost", "not among them", "worse"):
        assert word in text
    placement = load_placement(out, PPO)
    assert placement.devices == 8
    events = json.loads(trace.read_text().rstrip().rstrip(",") + "]")
    assert all(event["args"].get("simulated") for event in events if event["ph"] == "X")


def test_both_objectives_stand_side_by_side(capsys: Any) -> None:
    code, text = run(capsys, "ppo", "--devices", "16xa100-80g", "--profile", "eager-2024")
    assert code == 0
    rows = [line.split()[0] for line in text.splitlines() if line.startswith(("time ", "paper "))]
    assert rows == ["time", "paper"]


def test_auto_finds_the_fewest_devices_that_fit(capsys: Any) -> None:
    code, text = run(capsys, "grpo", "--devices", "auto", "--reward", "function")
    assert code == 0
    count = int(text.split()[1])
    fewer = f"{count - 1}xa100-80g"
    code, refusal = run(capsys, "grpo", "--devices", fewer, "--reward", "function")
    assert code == 2
    assert f"use {count} x a100-80g or more" in refusal


def test_a_mixed_cluster_is_shown_beside_equal_devices(capsys: Any) -> None:
    code, text = run(capsys, "ppo", "--devices", "4xa100-80g+4xh100")
    assert code == 0
    assert "taken for 8 equal devices" in text
    assert "times as long" in text
    assert "# [pool." in text  # of which kind it is


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ppo", "--devices", "1xa100-80g"], "use 4 x a100-80g or more"),
        (["ppo", "--devices", "8xb200"], "device 'b200' is unknown, did you mean 'h200'"),
        (["ppo", "--devices", "8"], "COUNTxDEVICE"),
        (["ppo", "--model", "llama2-8b"], "did you mean 'llama2-7b'"),
        (["ppo", "--device", "8xh100"], "unknown key 'device'; did you mean 'devices'"),
        (["ppo", "--devices", "5000xh100"], "up to 4096 of a kind"),
        (["ppo", "--prompts", "1000000000", "--updates", "1"], "use at most 4194304 rows"),
        (["ppo", "--prompt-tokens", "9000"], "the actor's model has 8192 positions"),
        (["dpo", "--prompts", "24", "--updates", "16"], "updates=16 does not divide the 24 rows"),
        (["ppo", "--out", "no/such/place.toml"], "must be a new file in a directory that exists"),
        (["ppo", "--profile", "vllm"], "use eager-2024 or hfjax"),
        (["ppo", "--host", "nowhere.toml", "--devices", "8xmine"], "nowhere.toml"),
    ],
)
def test_an_impossible_request_is_answered_with_what_is_possible(
    arguments: list[str], said: str, capsys: Any
) -> None:
    code, text = run(capsys, *arguments)
    assert code == 2
    assert said in text


def test_a_device_with_no_memory_is_refused(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[device.mine]\nlike = "a100-80g"\nmemory_bytes = 0\n')
    code, text = run(capsys, "ppo", "--host", str(file), "--devices", "8xmine")
    assert code == 2
    assert "memory_bytes = 0: must be above 0" in text


@pytest.mark.parametrize("name", ["prompts", "updates", "response_tokens"])
def test_sizes_are_counts(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0: must be 1 or more"):
        PlanConfig(**{name: 0}).check()


def test_updates_divide_the_rows() -> None:
    with pytest.raises(ValueError, match="updates=7 does not divide the 1024 rows"):
        PlanConfig(updates=7).check()


@pytest.mark.parametrize(
    ("algorithm", "generations", "trained"),
    [("ppo", 1, 2), ("remax", 2, 1), ("grpo", 1, 1), ("safe_rlhf", 1, 3), ("dpo", 0, 1)],
)
def test_the_step_is_the_algorithms_own(algorithm: str, generations: int, trained: int) -> None:
    module = load_algorithm(algorithm)
    task = planned(module, plan_class(module)())
    kinds = [call.kind for call in task.calls]
    assert kinds.count(Kind.GENERATE) == generations
    assert kinds.count(Kind.TRAIN) == trained


def test_models_of_unequal_sizes_are_those_of_their_roles() -> None:
    module = load_algorithm("ppo")
    config = replace(plan_class(module)(), critic="llama2-70b", reward="llama2-13b")
    models = planned(module, config).models
    layers = {role: model.config.layers for role, model in models.items()}
    assert layers == {"actor": 32, "reference": 32, "critic": 80, "reward": 40}
    assert {role: model.head for role, model in models.items()} == {
        "actor": "lm",
        "reference": "lm",
        "critic": "value",
        "reward": "score",
    }


def test_an_item_of_pairs_is_two_rows() -> None:
    module = load_algorithm("dpo")
    assert planned(module, replace(plan_class(module)(), prompts=64)).work.rows == 128


def test_a_function_that_rewards_takes_no_device() -> None:
    module = load_algorithm("grpo")
    task = planned(module, replace(plan_class(module)(), reward="function"))
    assert "reward" not in task.models
    assert [c.kind for c in task.calls if c.method == "compute_reward"] == [Kind.DRIVER]
