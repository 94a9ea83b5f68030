# SPDX-License-Identifier: Apache-2.0
"""What the mapper writes is what a run takes: the file of a plan, and the plan of a run alone."""

import dataclasses
import math
import time
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from algorithms import dpo, grpo, ppo, reward_model, safe_rlhf, sft
from hfjax.engine.microbatch import legal_micro_sequences
from hfjax.mapping.default import Found
from hfjax.mapping.devices import load_devices, load_profile
from hfjax.mapping.options import Pricer
from hfjax.mapping.report import placement_of
from hfjax.mapping.search import Plan as MapperPlan
from hfjax.mapping.search import PlanPool
from hfjax.mapping.work import Kind, Model, Option, Problem, Workload
from hfjax.prepare import Plan, prepare
from hfjax.run import default_config, train
from meshes.mesh import MeshShape
from meshes.placement import Placement, parse_placement, single_pool
from tests.hfjax.mapping.steps import SMALL, a_problem
from tests.test_run import records

NOW = datetime(2026, 1, 2)
A100 = Found(None, "NVIDIA A100-SXM4-80GB", 8)
CLUSTER = ((load_devices()["a100-80g"], 8),)
WORK = Workload(prompts=48, n=2, prompt_tokens=64, response_tokens=64, updates=4)


def written(option: Option) -> Any:
    """The actor's section of the file, read back."""
    pool = PlanPool(("actor",), (8,), {"actor": option})
    plan = MapperPlan((pool,), 1.0, 1.0, 1.0, ())
    return parse_placement(placement_of(plan, CLUSTER, WORK).to_toml()).roles["actor"]


def test_the_file_of_a_plan_says_how_much_is_worked_on_at_a_time() -> None:
    """48 prompts of two: 12 on each of four replicas; five waves of three hold them."""
    option = Option(
        train=MeshShape(data=2, tensor=4),
        generate=MeshShape(tensor=2),
        micro_sequences=8,
        remat="layer",
        waves=5,
    )
    role = written(option)
    assert (role.micro_sequences, role.remat, role.generate_sequences) == (8, "layer", 4 * 3 * 2)
    rest = dataclasses.replace(option, micro_sequences=0, remat="none", waves=1)
    assert written(rest) == dataclasses.replace(
        role, micro_sequences=0, remat="", generate_sequences=0
    )


def test_micro_batches_that_are_planned_cut_the_mini_batch() -> None:
    """Of 24 rows: on 8 devices 3 each, on 5 no whole number, so all at once."""
    calls = a_problem(("actor", Kind.TRAIN, set())).calls
    actor = Model(config=SMALL, head="lm", trained=True)
    problem = Problem(calls, {"actor": actor}, dataclasses.replace(WORK, response_tokens=8192))
    pricer = Pricer(problem=problem, profile=load_profile("hfjax"))
    for devices in (3, 5, 6, 8):
        options = pricer.options("actor", CLUSTER[0][0], devices)
        assert options
        for option in options:
            assert option.train is not None
            replicas = option.train.data * option.train.fsdp
            legal = legal_micro_sequences(24, replicas) or [0]
            assert option.micro_sequences in legal


def planned(
    algorithm: ModuleType, monkeypatch: pytest.MonkeyPatch, found: Found = A100, **settings: Any
) -> Plan:
    """A run of the embedded model that names no placement, on devices that are not here."""
    monkeypatch.setattr("hfjax.prepare._devices_found", lambda _: found)
    config = default_config(algorithm, "embedded")
    config = dataclasses.replace(config, runtime="local", **settings)
    return prepare(algorithm, config, NOW)


def all_devices(plan: Plan, devices: int) -> Placement:
    frozen = [role for role, place in plan.placement.roles.items() if place.train is None]
    return single_pool(plan.placement.roles, devices, frozen=frozen)


@pytest.mark.parametrize("algorithm", [ppo, grpo, safe_rlhf, dpo, reward_model, sft])
def test_every_algorithm_is_planned_on_devices_that_the_mapper_knows(
    algorithm: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start_s = time.process_time()
    plan = planned(algorithm, monkeypatch, dataclasses.replace(A100, platform="gpu"))
    assert time.process_time() - start_s < 4  # the data is read too
    assert "no placement planned" not in caplog.text
    assert plan.placement.devices == 8
    assert {pool.processes for pool in plan.placement.pools.values()} == {1}
    assert plan.placement.platform == "gpu"
    assert plan.placement.roles != all_devices(plan, 8).roles
    assert parse_placement(plan.placement.to_toml()) == plan.placement


@pytest.mark.slow
def test_a_planned_placement_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hfjax.prepare._devices_found", lambda _: A100)
    settings: dict[str, Any] = {"rollout": {"n": 2, "max_new_tokens": 4}, "steps": 1}
    settings["eval_every"] = 0
    settings["data"] = {"prompts_per_step": 8, "eval": ""}
    out = train(ppo, runtime="local", out=str(tmp_path / "run"), tensorboard=False, **settings)
    (record,) = records(out)
    assert math.isfinite(record["actor/loss"])
    placement = parse_placement((out / "placement.toml").read_text())
    assert placement.devices == 8
    assert placement.roles["actor"].generate is not None


UNPLANNED = {  # devices, and the reason
    "simulated devices": (Found(None, "cpu", 8), ""),
    "one device": (Found("gpu", "NVIDIA H200", 1), ""),
    "an unknown kind": (Found(None, "NVIDIA H100 PCIe", 8), "no 'NVIDIA H100 PCIe'"),
    "a part of a device": (Found(None, f"{A100.kind} MIG 1g.10gb", 8), "no 'NVIDIA A100"),
}


@pytest.mark.parametrize("case", UNPLANNED)
def test_what_is_not_planned_is_on_all_devices_and_says_why(
    case: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found, why = UNPLANNED[case]
    plan = planned(grpo, monkeypatch, found)
    expected = all_devices(plan, found.count)
    assert plan.placement == dataclasses.replace(expected, platform=found.platform)
    assert caplog.text.count("no placement planned, every role is on all devices") == bool(why)
    assert why in caplog.text


def test_a_search_that_finds_nothing_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    small = dataclasses.replace(CLUSTER[0][0], memory_bytes=1e6)
    monkeypatch.setattr("hfjax.mapping.default.load_devices", lambda: {"a100-80g": small})
    plan = planned(grpo, monkeypatch)
    assert plan.placement == all_devices(plan, 8)
    assert "no placement planned" in caplog.text


def test_a_runs_own_micro_batch_is_kept_also_where_the_quickest_plan_cannot_cut_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """64 rows over the six devices that the critic has alone."""
    before = planned(ppo, monkeypatch).placement.roles["critic"]
    assert before.replicas == 6
    critic = dataclasses.replace(default_config(ppo, "embedded").critic, micro_sequences=64)
    plan = planned(ppo, monkeypatch, critic=critic)
    assert plan.builders["critic"].keywords["training"].micro_sequences == 64
    assert 64 % plan.placement.roles["critic"].replicas == 0
