# SPDX-License-Identifier: Apache-2.0
"""Rows of files to batches: what is refused and named, what is kept, and in which order."""

import dataclasses
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfjax.arithmetic import make_tokenizer, write_task_model_config
from hfjax.data import HeldOut, Source, make_sources
from hfjax.items import (
    EXAMPLES,
    PAIRS,
    PROMPTS,
    DataConfig,
    Prompt,
    bucket,
    cut,
    load_items,
    prompt_columns,
)
from hfjax.tokenizer import Tokenizer

TOKENIZER = make_tokenizer()
BOS, EOS = TOKENIZER.bos_id, TOKENIZER.eos_id
ASK = [{"role": "user", "content": "1+1="}]


def ids_of(text):
    return TOKENIZER.encode(text, add_bos=False)


def write_jsonl(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_parquet(tmp_path, **columns):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return str(path)


def load(path, kind=PROMPTS, tokenizer=TOKENIZER, **settings):
    return load_items(path, "train", tokenizer, DataConfig(**settings), kind)


def numbered(count):
    return [Prompt([i], str(i), i, "") for i in range(count)]


def order(source, batches):
    return [text for _ in range(batches) for text in source.next_batch()["prompt"]]


# --- files


BAD_LINES = (
    b'{"prompt": "1+1=", "ground_truth": "2"}\r\n'
    b'{"prompt": "secret", "ground_truth\r\n'
    b"\r\n"
    b'["secret"]\r\n'
    b'{"prompt": null, "ground_truth": "secret"}\r\n'
    b'{"prompt": "2+2=", "ground_truth": "4"}'
)


def test_bad_lines_are_named_and_not_shown(tmp_path):
    (tmp_path / "bad.jsonl").write_bytes(BAD_LINES)
    with pytest.raises(ValueError, match=r"bad.jsonl: 3 unusable rows.*line 2: not JSON") as error:
        load(str(tmp_path / "bad.jsonl"))
    assert "line 4: a JSON list, not an object; line 5: prompt is missing" in str(error.value)
    assert "secret" not in str(error.value)


def test_skipped_lines_are_counted_and_named(tmp_path, caplog):
    (tmp_path / "bad.jsonl").write_bytes(BAD_LINES)
    prompts = load(str(tmp_path / "bad.jsonl"), bad_rows="skip")
    assert [p.text for p in prompts] == ["1+1=", "2+2="]
    assert "2 rows kept, 3 skipped: line 2: not JSON" in caplog.text
    assert "line 4" in caplog.text
    assert "line 5" in caplog.text


def test_text_without_tokens_is_named(tmp_path, caplog):
    """The embedded tokenizer knows digits and signs, no letters."""
    rows = (
        b'{"prompt": "1+1=", "ground_truth": "2"}\n{"prompt": "what is 2?", "ground_truth": "2"}\n'
    )
    (tmp_path / "words.jsonl").write_bytes(rows)
    assert len(load(str(tmp_path / "words.jsonl"))) == 2
    assert "1 rows have text that the tokenizer has no token for" in caplog.text
    assert "the model reads '<unk>': line 2" in caplog.text


def test_skipping_everything_is_an_error(tmp_path):
    path = write_jsonl(tmp_path, {"prompt": "", "ground_truth": ""})
    with pytest.raises(ValueError, match="1 unusable rows, 0 usable: line 1: prompt is empty"):
        load(path, bad_rows="skip")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"empty.jsonl: no rows"):
        load(str(tmp_path / "empty.jsonl"))


def test_line_separators_inside_strings_and_a_byte_order_mark_are_text(tmp_path):
    row = json.dumps({"prompt": "1\u2028+1\x85=", "ground_truth": "2"}, ensure_ascii=False)
    (tmp_path / "odd.jsonl").write_bytes(b"\xef\xbb\xbf" + row.encode())
    assert load(str(tmp_path / "odd.jsonl"))[0].text == "1\u2028+1\x85="
    (tmp_path / "odd.jsonl").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(ValueError, match=r"line 1: not JSON \(UnicodeDecodeError\)"):
        load(str(tmp_path / "odd.jsonl"))


def test_missing_column_lists_those_present(tmp_path):
    path = write_parquet(tmp_path, question=["1+1="], answer=["2"])
    with pytest.raises(ValueError, match=r"no column 'ground_truth', or 'reward_model'; it has "
                                         "answer, question; set .*data.answer_key"):  # fmt: skip
        load(path, prompt_key="question")
    with pytest.raises(ValueError, match="no column 'prompt'"):
        load(path, answer_key="answer")
    assert load(path, prompt_key="question", answer_key="answer")[0].ground_truth == "2"
    assert load(path, prompt_key="question", answer_key="")[0].ground_truth == ""


@pytest.mark.parametrize(("value", "problem"), [(None, "missing"), ("", "empty"), (" ", "empty")])
def test_null_or_empty_prompt_of_a_parquet_row_is_named(tmp_path, value, problem):
    prompts = ["1+1="] * 37 + [value] + ["2+2="] * 3
    path = write_parquet(tmp_path, prompt=prompts, ground_truth=["2"] * 41)
    with pytest.raises(ValueError, match=rf"row 37 \(from 0\): prompt is {problem}"):
        load(path)
    assert len(load(path, bad_rows="skip")) == 40


def test_verl_columns(tmp_path):
    path = write_parquet(
        tmp_path,
        data_source=["sums"],
        prompt=[[{"role": "user", "content": "1+1=", "name": None}]],
        ability=["math"],
        reward_model=[{"style": "rule", "ground_truth": "2"}],
        extra_info=[{"index": 0}],
    )
    assert load(path) == [Prompt([BOS, *ids_of("1+1=")], "1+1=", "2", "sums")]


def test_a_reward_model_that_is_no_table_is_a_bad_row_by_number(tmp_path):
    good, bad = ({"prompt": "1+1=", "reward_model": r} for r in ({"ground_truth": "2"}, "rule"))
    path = write_jsonl(tmp_path, good, bad)
    with pytest.raises(ValueError, match="line 2: reward_model is of type str, not a table"):
        load(path)
    assert len(load(path, bad_rows="skip")) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [("none.jsonl", "no such file"), ("rows.csv", "use .jsonl, .parquet or sums")],
)
def test_files_that_cannot_be_read(tmp_path, name, message):
    (tmp_path / "rows.csv").write_text("a,b")
    with pytest.raises(ValueError, match=f"data.train='.*{name}': .*{message}"):
        load(f"{tmp_path}/{name}")
    (tmp_path / "not.parquet").write_text("a,b")
    with pytest.raises(ValueError, match="not a parquet file"):
        load(f"{tmp_path}/not.parquet")


# --- prompts


def test_prompts_as_text_messages_or_ids(tmp_path):
    path = write_jsonl(
        tmp_path,
        {"prompt": "1+1=", "ground_truth": "2"},
        {"prompt": ASK, "ground_truth": ["2", 2]},
        {"prompt": [6, 2, 3], "ground_truth": 0},
    )
    text, messages, ids = load(path)
    assert text.ids == messages.ids == [BOS, *ids_of("1+1=")]  # one BOS either way
    assert messages.ground_truth == ["2", 2]
    assert (ids.ids, ids.ground_truth) == ([6, 2, 3], 0)


@pytest.mark.parametrize("own_bos", [True, False])
def test_a_prompt_of_messages_has_one_bos_and_opens_the_assistants_turn(tmp_path, own_bos):
    """Whether the template writes BOS or the tokenizer adds it; here '=' opens that turn."""
    config = {"bos_token": TOKENIZER._config["bos_token"], "add_bos_token": True}
    config["chat_template"] = (
        "{{ bos_token }}" * own_bos + "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}={% endif %}"
    )
    tokenizer = Tokenizer(TOKENIZER._backend, config, "opening")
    ask = [{"role": "user", "content": "1+1"}]
    path = write_jsonl(tmp_path, {"prompt": ask, "ground_truth": "2"})
    assert load(path, tokenizer=tokenizer)[0].ids == [BOS, *ids_of("1+1=")]
    path = write_jsonl(tmp_path, {"prompt": "1+1", "ground_truth": "2"})
    assert load(path, tokenizer=tokenizer)[0].ids == [BOS, *ids_of("1+1")]


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([], "prompt is empty"),
        ([99], "ids outside 0 to 19"),
        ([{"role": "user"}], "message 0 of prompt lacks"),
        (["a"], "message 0 of prompt lacks"),
        (3, "prompt is of type int, not a string"),
        ([*ASK, {"role": "assistant", "content": "2"}], "ends with an assistant message"),
    ],
)
def test_unusable_prompts(tmp_path, prompt, problem):
    path = write_jsonl(tmp_path, {"prompt": prompt, "ground_truth": "2"})
    with pytest.raises(ValueError, match=f"line 1: .*{problem}"):
        load(path)


def test_messages_without_a_template_and_templates_that_refuse_name_the_row(tmp_path):
    path = write_jsonl(
        tmp_path,
        {"prompt": ASK, "ground_truth": "2"},
        {"prompt": [{"role": "system", "content": "1"}, *ASK], "ground_truth": "2"},
    )
    backend = TOKENIZER._backend
    bare = Tokenizer(backend, {}, "bare")
    with pytest.raises(ValueError, match=r"lines 1, 2: the tokenizer of bare has no chat templ"):
        load(path, tokenizer=bare)
    template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}1"
    )
    strict = Tokenizer(backend, {"chat_template": template}, "strict")
    with pytest.raises(ValueError, match="line 2: the chat template of strict refused: no system"):
        load(path, tokenizer=strict)


# --- length


def test_truncation_keeps_what_it_says(tmp_path):
    ids = [4 + i % 10 for i in range(558)]
    path = write_jsonl(
        tmp_path, {"prompt": [5], "ground_truth": ""}, {"prompt": ids, "ground_truth": ""}
    )
    assert load(path, truncation="left")[1].ids == ids[-512:]
    assert load(path, truncation="right")[1].ids == ids[:512]
    assert load(path, truncation="middle")[1].ids == ids[:256] + ids[-256:]
    assert [p.ids for p in load(path, truncation="filter")] == [[5]]
    with pytest.raises(ValueError, match=r"line 2: longer than data.max_prompt_tokens=512 tokens;"):
        load(path)


def test_filtered_rows_are_counted(tmp_path, caplog):
    path = write_jsonl(tmp_path, *({"prompt": [5] * n, "ground_truth": ""} for n in (9, 2, 9)))
    assert len(load(path, truncation="filter", max_prompt_tokens=5)) == 1
    assert "2 rows too long, left out: lines 1, 3" in caplog.text


def test_middle_of_an_odd_limit():
    assert cut(list(range(9)), 5, "middle") == [0, 1, 6, 7, 8]


@given(st.integers(1, 40), st.integers(1, 40))
def test_middle_truncation_keeps_both_ends(length, limit):
    ids = list(range(length))
    kept = cut(ids, limit, "middle")
    assert kept is not None
    assert len(kept) == min(length, limit)
    assert kept == sorted(set(kept))
    assert kept[-1] == length - 1
    assert limit == 1 or kept[0] == 0


def test_settings_are_checked():
    with pytest.raises(ValueError, match=r"truncation='lef': use one of error, filter, left"):
        DataConfig(**{"truncation": "lef"})
    with pytest.raises(ValueError, match="prompts_per_step=0: must be at least 1"):
        DataConfig(prompts_per_step=0)


# --- batches


def test_prompt_batch_repeats_each_prompt_in_adjacent_rows():
    columns = prompt_columns(
        [Prompt([7, 8, 9], "a", "x", "s"), Prompt([5], "b", "y", "s")] * 2, n=3
    )
    assert columns["prompt_ids"].shape == (12, 8)
    assert columns["prompt_ids"].dtype == np.int32
    assert columns["prompt_ids"][0].tolist() == [7, 8, 9] + [0] * 5
    assert columns["prompt_length"].tolist() == [3, 3, 3, 1, 1, 1] * 2
    assert columns["row_id"].tolist() == list(range(12))
    assert columns["uid"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]  # listed twice: 2 groups
    assert columns["prompt"] == ["a", "a", "a", "b", "b", "b"] * 2
    assert columns["ground_truth"][:4] == ["x", "x", "x", "y"]


@given(st.lists(st.integers(1, 600), min_size=1, max_size=5))
def test_rows_are_left_aligned_in_few_widths(lengths):
    columns = prompt_columns([Prompt([1] * length, "", "", "") for length in lengths])
    ids = columns["prompt_ids"]
    assert ids.shape[1] in (8, 16, 32, 64, 128, 256, 384, 512, 640)
    assert ids.shape[1] >= max(lengths)
    expected = np.arange(ids.shape[1])[None] < columns["prompt_length"][:, None]
    np.testing.assert_array_equal(ids == 1, expected)


def test_bucket_edges():
    widths = [bucket(n) for n in (1, 8, 9, 17, 64, 65, 128, 129, 512)]
    assert widths == [8, 8, 16, 32, 64, 128, 128, 256, 512]


@given(st.integers(1, 6), st.integers(0, 5), st.integers(0, 9), st.integers(0, 3))
def test_resumed_order_equals_the_uninterrupted_one(batch, extra, stop, seed):
    items = numbered(batch + extra)
    whole, first = (Source(items, prompt_columns, batch=batch, seed=seed) for _ in range(2))
    expected = order(whole, stop + 6)
    order(first, stop)
    state = json.loads(json.dumps(first.state_dict()))
    resumed = Source(items, prompt_columns, batch=batch, seed=seed)
    resumed.load_state_dict(state)
    assert order(resumed, 6) == expected[stop * batch :]


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 3))
def test_every_row_comes_once_an_epoch_in_another_order(batch, steps, seed):
    source = Source(numbered(batch * steps), prompt_columns, batch=batch, seed=seed)
    assert source.steps_per_epoch == steps
    for epoch in range(3):
        assert sorted(order(source, steps), key=int) == [str(i) for i in range(batch * steps)]
        assert source.epoch == epoch
    if batch * steps > 8:
        assert order(source, steps) != order(source, steps)


def test_order_of_the_file_without_shuffling():
    assert order(Source(numbered(4), prompt_columns, batch=2, shuffle=False), 3) == list("012301")


def test_fewer_rows_than_a_batch_are_refused():
    with pytest.raises(ValueError, match=r"prompts_per_step=8 is more than the 3 usable rows of f"):
        Source(numbered(3), prompt_columns, batch=8, name="f")


def test_dropped_rows_are_said_and_are_others_each_epoch(caplog):
    source = Source(numbered(10), prompt_columns, batch=4, name="f")
    assert "f: 10 rows, 4 a step, 2 steps per epoch; 2 rows dropped each epoch" in caplog.text
    assert len({frozenset(order(source, 2)) for _ in range(4)}) > 1
    assert source.epoch == 3


@pytest.mark.parametrize("change", ["seed", "rows", "shuffle"])
def test_resuming_with_another_order_is_refused(change):
    state = Source(numbered(4), prompt_columns, batch=2).state_dict()
    other = {
        "seed": lambda: Source(numbered(4), prompt_columns, batch=2, seed=1),
        "rows": lambda: Source(numbered(5), prompt_columns, batch=2),
        "shuffle": lambda: Source(numbered(4), prompt_columns, batch=2, shuffle=False),
    }[change]()
    with pytest.raises(ValueError, match=f"the data's {change} was"):
        other.load_state_dict(state)


@given(st.integers(1, 12), st.integers(1, 5))
def test_evaluation_counts_every_row_once_in_full_batches(rows, batch):
    texts = []
    for columns, real in HeldOut(numbered(rows), prompt_columns).batches(batch):
        assert len(columns["prompt"]) == batch
        texts += columns["prompt"][:real]
    assert texts == [str(i) for i in range(rows)]


def test_sources_of_the_embedded_task(tmp_path):
    write_task_model_config(tmp_path)
    config = DataConfig(train="sums", eval="sums", prompts_per_step=4)
    source, held_out = make_sources(config, str(tmp_path), n=2)
    columns = source.next_batch()
    assert columns["prompt_ids"].shape == (8, 8)
    assert columns["data_source"] == ["sums"] * 8
    assert held_out is not None
    assert not {p.text for p in held_out.items} & {p.text for p in source.items}
    assert make_sources(dataclasses.replace(config, eval=""), str(tmp_path))[1] is None


# --- fine-tuning and preferences


def test_examples_from_columns_messages_and_text(tmp_path):
    turn = {"role": "assistant", "content": "2"}
    path = write_jsonl(
        tmp_path,
        {"prompt": "1+1=", "response": "2"},
        {"messages": [*ASK, turn]},
        {"prompt": ASK, "response": "2"},
        {"text": "1+1=2"},
    )
    columns = EXAMPLES.collate(load(path, EXAMPLES), 1)
    row = [BOS, *ids_of("1+1=2"), EOS]
    assert columns["input_ids"].shape == (4, 8)
    assert columns["input_ids"][:, :7].tolist() == [row] * 4
    assert columns["length"].tolist() == [7] * 4
    assert columns["prompt_length"].tolist() == [5, 5, 5, 1]
    assert columns["response_mask"].dtype == bool
    assert columns["response_mask"][0].tolist() == [False] * 5 + [True] * 2 + [False]
    assert columns["response_mask"].sum(axis=1).tolist() == [2, 2, 2, 6]


def test_examples_without_an_answer_are_refused(tmp_path):
    rows = [
        {"prompt": "1+1=", "response": "2"},
        {"prompt": "1+1=", "response": ""},
        {"messages": ASK},
    ]
    path = write_jsonl(tmp_path, *rows)
    with pytest.raises(
        ValueError, match="line 2: response is empty; line 3: there is no assistant"
    ):
        load(path, EXAMPLES)
    with pytest.raises(
        ValueError, match="no column 'response', or 'messages', or 'text'; it has p"
    ):
        load(write_jsonl(tmp_path, {"prompt": "1"}), EXAMPLES)


def test_long_examples(tmp_path):
    path = write_jsonl(
        tmp_path, {"prompt": "1", "response": "23456"}, {"prompt": "123", "response": "4"}
    )
    with pytest.raises(ValueError, match=r"lines 1, 2: longer than data.max_tokens=4 tokens"):
        load(path, EXAMPLES, max_tokens=4)
    kept = load(path, EXAMPLES, max_tokens=4, truncation="right")
    assert [e.ids for e in kept] == [[BOS, *ids_of("123")]]  # the second has no answer left
    with pytest.raises(
        ValueError, match="truncation='left' cuts prompts; use one of error, filter"
    ):
        load(path, EXAMPLES, truncation="left")


def test_pairs_are_adjacent_rows_of_one_uid(tmp_path):
    row = {"prompt": "1+1=", "chosen": "2", "rejected": "11"}
    columns = PAIRS.collate(load(write_jsonl(tmp_path, row, row), PAIRS), 1)
    assert columns["uid"].tolist() == [0, 0, 1, 1]
    assert columns["row_id"].tolist() == [0, 1, 2, 3]
    assert columns["response_mask"].sum(axis=1).tolist() == [2, 3, 2, 3]
    with pytest.raises(ValueError, match="no column 'rejected'"):
        load(write_jsonl(tmp_path, {"prompt": "1", "chosen": "2"}), PAIRS)


def test_answers_of_a_conversation_may_be_messages_and_are_trained_alone(tmp_path):
    """Earlier turns of the assistant are not: a mean over tokens would count them."""
    prompt = [
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2="},
    ]
    rows = [
        {"prompt": prompt, "chosen": "4", "rejected": "22"},
        {
            "prompt": prompt,
            "chosen": [{"role": "assistant", "content": "4"}],
            "rejected": [{"role": "assistant", "content": "22"}],
        },
    ]
    text, messages = load(write_jsonl(tmp_path, *rows), PAIRS)
    assert text == messages
    assert sum(text.chosen.trained) == 2  # the 4 and the stop token
    assert sum(text.rejected.trained) == 3
    wrong = {"prompt": "2+2=", "chosen": rows[1]["chosen"], "rejected": "5"}
    with pytest.raises(ValueError, match="chosen is messages and prompt is not"):
        load(write_jsonl(tmp_path, wrong), PAIRS)


def test_embedded_demonstrations():
    taught = load("sums-sft", EXAMPLES)
    config = DataConfig()
    asked = load_items("sums-sft", "eval", TOKENIZER, config, EXAMPLES)
    assert {len(e.ids) for e in taught} <= set(range(6, 12))
    assert len(asked) > 500
