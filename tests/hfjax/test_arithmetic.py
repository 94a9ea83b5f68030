# SPDX-License-Identifier: Apache-2.0
"""The embedded task: splits that do not touch, a pupil that forgets carries, honest rewards."""

import json
import subprocess
import sys

import pytest

from hfjax import arithmetic
from hfjax.rewards import RewardPool
from hfjax.tokenizer import load_tokenizer


def test_held_out_problems_are_held_out_in_both_orders():
    train, held_out = (set(arithmetic.problems(split)) for split in ("train", "eval"))
    assert len(train) >= 5000
    assert len({frozenset(pair) for pair in held_out}) == 512
    assert len(train) + len(held_out) == 10_000
    assert not train & ({(b, a) for a, b in held_out} | held_out)
    taught = {tuple(map(int, r["prompt"][:-1].split("+"))) for r in arithmetic.sft_rows(1)}
    assert taught == train


def test_split_is_the_same_for_ever():
    # a change here moves held-out problems into training sets already used
    assert arithmetic.problems("eval")[:3] == [(0, 0), (0, 3), (0, 12)]


def test_rows_are_right():
    row = next(r for r in arithmetic.rows("train") + arithmetic.rows("eval") if "37+58" in str(r))
    assert row == {"prompt": "37+58=", "ground_truth": "95", "data_source": "sums"}


@pytest.mark.parametrize(
    ("problem", "forgets", "answer"),
    [
        ((37, 58), (False, False), 95),
        ((37, 58), (True, False), 85),  # 7+8 leaves 5, 3+5 is 8 without the carried 1
        ((67, 58), (False, False), 125),
        ((67, 58), (False, True), 25),
        ((67, 58), (True, True), 15),
        ((41, 58), (True, True), 99),  # 4+5 carries only if 1+8 did
        ((42, 58), (True, False), 90),
        ((42, 58), (False, False), 100),
    ],
)
def test_careless_pupil_forgets_single_carries(problem, forgets, answer):
    assert arithmetic.careless_sum(*problem, *forgets) == answer


def test_imitation_would_be_right_only_where_nothing_is_carried():
    answers: dict[str, list[str]] = {}
    for row in arithmetic.sft_rows(0, copies=9):
        answers.setdefault(row["prompt"], []).append(row["response"])
    modes = {prompt: max(sorted(set(a)), key=a.count) for prompt, a in answers.items()}
    right = [eval(prompt[:-1]) == int(mode) for prompt, mode in modes.items()]
    assert 0.27 < sum(right) / len(right) < 0.40
    assert arithmetic.sft_rows(0)[:5] != arithmetic.sft_rows(1)[:5]


def test_pupil_without_fault_is_always_right():
    rows = arithmetic.sft_rows(0, forget=0.0, copies=1)
    assert all(eval(row["prompt"][:-1]) == int(row["response"]) for row in rows)


def test_reward_wants_the_number_and_nothing_else():
    responses = ["95", " 95\n", "095", "95.", "9 5", "", "+95", "85"]
    scores = arithmetic.sum_reward(["37+58="] * 8, responses, ["95"] * 8)
    assert scores == [1, 1, 0, 0, 0, 0, 0, 0]


def test_random_reward_is_the_same_in_a_rerun_with_any_workers_and_new_in_every_step():
    texts = ["1+1="] * 400, ["2"] * 400, ["2"] * 400

    def scores(workers, step):
        with RewardPool("hfjax.arithmetic:random_reward", workers=workers) as pool:
            pool.score(*texts, step=9)  # earlier calls leave no trace
            return pool.score(*texts, step=step)[0].tolist()

    first = scores(1, 1)
    assert scores(2, 1) == first != scores(1, 2)
    assert set(first) == {0.0, 1.0}
    assert 0.4 < sum(first) / 400 < 0.6


def test_tokenizer_has_a_token_for_each_character(tmp_path):
    arithmetic.write_task_model_config(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 20
    ids = tokenizer.encode("37+58=")
    assert len(ids) == 7
    assert ids[0] == tokenizer.bos_id
    assert tokenizer.decode([*ids, tokenizer.eos_id]) == "37+58="
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["vocab_size"] == tokenizer.vocab_size
    assert config["eos_token_id"] == tokenizer.eos_id


def test_chat_template_of_the_task_is_plain(tmp_path):
    tokenizer = arithmetic.make_tokenizer()
    ask = {"role": "user", "content": "1+1="}
    assert tokenizer.apply_chat_template([ask], add_generation_prompt=True) == tokenizer.encode(
        "1+1="
    )
    ids, trained = tokenizer.encode_chat([ask, {"role": "assistant", "content": "2"}])
    assert ids == [*tokenizer.encode("1+1=2"), tokenizer.eos_id]
    assert trained == [False] * 5 + [True] * 2


def test_command_writes_the_task(tmp_path):
    command = [sys.executable, "-m", "hfjax.arithmetic", str(tmp_path / "sums")]
    subprocess.run(command, check=True, capture_output=True)
    counts = {
        file.stem: len(file.read_text().splitlines())
        for file in (tmp_path / "sums").glob("*.jsonl")
    }
    held_out = len(arithmetic.problems("eval"))
    assert counts == {"train": 10_000 - held_out, "eval": held_out, "sft": 4 * (10_000 - held_out)}
    assert load_tokenizer(tmp_path / "sums" / "model").encode("1")
