# SPDX-License-Identifier: Apache-2.0
"""What a hostile tester tried and could not break: evaluation, failed rewards, chat masks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from algorithms import grpo
from hfjax.data import make_sources
from hfjax.items import EXAMPLES, DataConfig
from hfjax.metrics import STEP
from hfjax.run import train
from meshes.mesh import MeshShape
from tests.fixtures import is_timing, write_lut
from tests.test_run import configured, placed, prompts_file, records

PROMPTS = [[3], [4, 5], [6, 7, 8]]
TEMPLATE = (
    "{% for m in messages %}{{ 't11 ' if m['role'] == 'assistant' else 't10 ' }}{{ m['content'] }}"
    "{{ ' t2 ' if m['role'] == 'assistant' else ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 't11 ' }}{% endif %}"
)


def length_reward(prompts: list[str], responses: list[str], truths: list[str]) -> list[float]:
    """The words of a response."""
    return [float(len(response.split())) for response in responses]


def broken_reward(prompts: list[str], responses: list[str], truths: list[str]) -> list[float]:
    """Never a score."""
    raise RuntimeError("boom")


def trained(folder: Path, reward: str, **settings: Any) -> list[dict[str, Any]]:
    """Records of a small GRPO run, without what measures the machine."""
    folder.mkdir()
    table = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
    model = write_lut(folder / "model", table)
    config = configured(
        grpo,
        folder,
        model,
        PROMPTS,
        rollout={"n": 2, "max_new_tokens": 4},
        actor={"optimizer": {"lr": 1e-2}},
        algorithm={"kl": {"where": "none"}},
        placement=placed(folder / "actor.toml", MeshShape(), "actor"),
        **{"steps": 2, **settings},
        reward={"function": f"{__file__}:{reward}", "workers": 1, "on_error": "skip"},
    )
    return [
        {name: value for name, value in record.items() if not is_timing(name)}
        for record in records(train(grpo, config))
    ]


@pytest.mark.slow
def test_evaluation_changes_no_bit_of_training(tmp_path: Path) -> None:
    """Greedy rows of another count and width come between the steps, and leave no trace."""
    held_out = prompts_file(tmp_path / "eval.jsonl", [[3] * 9, [5], [6, 7], [8], [9]])
    plain = trained(tmp_path / "plain", "length_reward")
    data = {"eval": held_out}
    looked = trained(tmp_path / "looked", "length_reward", data=data, eval_every=1)
    assert [record[STEP] for record in looked] == [0, 1, 2]
    ignored = ("val-core/", "perf/compiles")

    def kept(record: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in record.items() if not name.startswith(ignored)}

    assert all("val-core/all/reward/mean@1" in record for record in looked)
    assert [kept(record) for record in looked[1:]] == [kept(record) for record in plain]
    assert plain[0]["actor/grad_norm"] > 0


@pytest.mark.slow
def test_a_step_whose_rewards_all_fail_trains_nothing(tmp_path: Path) -> None:
    """Under on_error=skip: counted, finite, and no update."""
    for record in trained(tmp_path / "failed", "broken_reward"):
        assert record["reward/failed"] == 2 * len(PROMPTS)
        assert record["actor/empty"] == record["actor/skipped"] == 1
        assert record["actor/loss"] == record["actor/grad_norm"] == 0


def test_only_the_assistant_is_trained_empty_turns_too(tmp_path: Path) -> None:
    """Ids and masks by hand: an empty turn teaches its stop token, a last user turn nothing."""
    model = write_lut(tmp_path / "model", np.zeros((48, 48), np.float32))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    talks = [
        [("user", "t40 t41"), ("assistant", "t30"), ("user", "t42"), ("assistant", "t31 t32")],
        [("user", "t40"), ("assistant", ""), ("user", "t41"), ("assistant", "t30")],
        [("user", "t40"), ("assistant", "t30"), ("user", "t41 t42")],
    ]
    rows = [
        {"messages": [{"role": role, "content": content} for role, content in talk]}
        for talk in talks
    ]
    file = tmp_path / "talks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(train=str(file), prompts_per_step=3, shuffle=False)
    columns = make_sources(config, str(model), kind=EXAMPLES)[0].next_batch()
    wanted = [
        ([10, 40, 41, 11, 30, 2, 10, 42, 11, 31, 32, 2], [4, 5, 9, 10, 11]),
        ([10, 40, 11, 2, 10, 41, 11, 30, 2], [3, 7, 8]),
        ([10, 40, 11, 30, 2], [3, 4]),
    ]
    for row, (ids, trained_at) in enumerate(wanted):
        assert columns["input_ids"][row, : columns["length"][row]].tolist() == ids
        assert np.flatnonzero(columns["response_mask"][row]).tolist() == trained_at
