# SPDX-License-Identifier: Apache-2.0
"""An algorithm's dataflow, from the step function that runs: HybridFlow's figures 5 and 6."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from algorithms import dpo, grpo, ppo, reinforce_pp, remax, reward_model, rloo, safe_rlhf, sft
from hfjax.algorithm import dataflow
from hfjax.config import KLConfig
from hfjax.controller.graph import CONTROLLER, depths, text
from hfjax.run import train
from tests.fixtures import write_tiny_hf
from tests.test_run import configured

ALL = (ppo, grpo, remax, rloo, reinforce_pp, safe_rlhf, dpo, reward_model, sft)


def named(algorithm: ModuleType, **settings: object) -> list[tuple[str, list[str]]]:
    """Each call, and the calls it waits for, by name."""
    nodes = dataflow(algorithm, algorithm.Settings(**settings))
    names = [f"{node.role}.{node.method}" for node in nodes]
    return [(names[n.number], [names[i] for i in sorted(n.inputs)]) for n in nodes]


def test_ppo_is_that_of_the_paper() -> None:
    scores = ["actor.compute_log_prob", "critic.compute_values", "reference.compute_ref_log_prob"]
    scores += ["reward.compute_reward"]
    generation, arithmetic = "actor.generate_sequences", "controller.arithmetic"
    assert named(ppo) == [
        (generation, []),
        *((name, [generation]) for name in scores),
        (arithmetic, [generation, *scores]),
        ("critic.update_critic", [generation, "critic.compute_values", arithmetic]),
        ("actor.update_actor", [generation, "actor.compute_log_prob", arithmetic]),
    ]


def test_what_does_not_wait_for_one_another_has_one_depth() -> None:
    nodes = dataflow(ppo, ppo.Settings())
    assert depths(nodes) == [0, 1, 1, 1, 1, 2, 3, 3]


def test_settings_change_the_graph() -> None:
    names = [name for name, _ in named(ppo, kl=KLConfig(where="none"))]
    assert "reference.compute_ref_log_prob" not in names


def test_remax_generates_twice_and_has_no_critic() -> None:
    found = named(remax)
    assert [name for name, _ in found].count("actor.generate_sequences") == 2
    assert not [name for name, _ in found if name.startswith("critic")]
    assert dict(found)["controller.arithmetic"].count("reward.compute_reward") == 2


def test_renamed_columns_keep_their_call() -> None:
    found = dict(named(safe_rlhf))
    assert {"critic.compute_values", "cost_critic.compute_values"} <= set(
        found["controller.arithmetic"]
    )
    assert "cost_critic.compute_values" in found["cost_critic.update_critic"]


@pytest.mark.parametrize("algorithm", ALL, ids=lambda module: module.__name__)
def test_every_algorithm_has_a_graph_without_cycles_and_a_text(algorithm: ModuleType) -> None:
    nodes = dataflow(algorithm, algorithm.Settings())
    assert all(max(node.inputs, default=-1) < node.number for node in nodes)
    assert any(node.role != CONTROLLER and not node.writes for node in nodes)  # an update
    assert len(text(nodes).splitlines()) == len(nodes) + 1


def test_a_pretraining_loss_is_a_call_that_waits_for_nothing() -> None:
    assert dict(named(safe_rlhf, ptx_coef=16.0))["actor.update_pretrain"] == []


def test_a_run_makes_the_calls_of_the_graph_and_they_wait_for_the_same(tmp_path: Path) -> None:
    """One step function: run with a timeline, and traced on columns that stand for values."""
    model = write_tiny_hf(tmp_path / "model")
    config = configured(ppo, tmp_path, model, [[3, 4, 5], [6, 7]], trace=True)
    lines = (train(ppo, config) / "trace.json").read_text()
    found = [event["args"] | event for event in json.loads(lines.rstrip().rstrip(",") + "]")]
    calls = [event for event in found if event.get("step") == 1 and "call" in event]
    ran = {event["call"]: event for event in sorted(calls, key=lambda event: event["call"])}
    nodes = [n for n in dataflow(ppo, config.algorithm, ["reward"]) if n.role != CONTROLLER]
    drawn = {node.number: f"{node.role}.{node.method}" for node in nodes}
    assert [event["name"] for event in ran.values()][: len(nodes)] == list(drawn.values())
    for event, node in zip(ran.values(), nodes, strict=False):
        waits = {ran[number]["name"] for number in event["after"]}
        assert waits == {drawn[number] for number in node.inputs & drawn.keys()}
