# SPDX-License-Identifier: Apache-2.0
"""One row to one item: a prompt, a fine-tuning example or a preference pair, cut to size."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from hfjax.rows import Row, Split, Table, read_rows
from hfjax.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Columns = dict[str, Any]  # column name -> array or list; first dimension rows
CUTS = ("left", "right", "middle")
BAD_ROWS = ("error", "skip")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which rows are read and how they become batches. Lengths count tokens."""

    train: str = ""  # a .jsonl or .parquet file, or the embedded "sums", "sums-sft", "sums-pairs"
    eval: str = ""  # the same for evaluation, which never drops a row; empty: none
    prompt_key: str = "prompt"  # column of a string, a list of messages, or a list of ids
    answer_key: str = "ground_truth"  # or verl's reward_model.ground_truth; empty: rows have none
    response_key: str = "response"  # column that fine-tuning learns to answer
    pretrain: str = ""  # rows with a column `text`, for algorithms with a pretraining loss
    max_prompt_tokens: int = 512  # longest prompt
    max_tokens: int = 1024  # longest row of fine-tuning and preferences, prompt included
    truncation: Literal["error", "left", "right", "middle", "filter"] = "error"  # what is cut off
    bad_rows: Literal["error", "skip"] = "error"  # for unreadable and unusable rows
    prompts_per_step: int = 8  # rows of the file in a step; a last partial batch is dropped
    shuffle: bool = True  # a new order each epoch, drawn from the run's seed

    def __post_init__(self) -> None:
        for name in ("max_prompt_tokens", "max_tokens", "prompts_per_step"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        for name, legal in (("truncation", ("error", "filter", *CUTS)), ("bad_rows", BAD_ROWS)):
            if getattr(self, name) not in legal:
                raise ValueError(f"{name}={getattr(self, name)!r}: use one of {', '.join(legal)}")


class Prompt(NamedTuple):
    """A prompt ready for generation; `text` is what reward functions see of it."""

    ids: list[int]
    text: str
    ground_truth: Any
    data_source: str


class Example(NamedTuple):
    """A row to learn from: all its ids, and which of them are trained."""

    ids: list[int]
    trained: list[bool]


class Pair(NamedTuple):
    """Two answers to one prompt, the first preferred."""

    chosen: Example
    rejected: Example

    @property
    def ids(self) -> list[int]:
        """Those of both rows."""
        return [*self.chosen.ids, *self.rejected.ids]


class Kind(NamedTuple):
    """One use of rows: which columns it needs, how a row is read, cut and put into columns."""

    name: str
    needs: Callable[[DataConfig], list[set[str]]]  # sets of columns, one of which must be there
    parse: Callable[[Row, Tokenizer, DataConfig], Any]
    limit: Literal["max_prompt_tokens", "max_tokens"]
    cuts: tuple[str, ...]  # the truncations that make sense for it
    fit: Callable[[Any, int, str], Any]  # the item cut to the limit; None if it is not to be cut
    collate: Callable[[Sequence[Any], int], Columns]  # items, each n times in adjacent rows
    rows: int = 1  # of a batch that an item makes: they stay together


def load_items(
    path: str, split: Split, tokenizer: Tokenizer, config: DataConfig, kind: Kind
) -> list[Any]:
    """The usable rows of a file, ready for batches: generation and training see these same ids."""
    if config.truncation in CUTS and config.truncation not in kind.cuts:
        legal = ", ".join(("error", "filter", *kind.cuts))
        raise ValueError(f"data.truncation={config.truncation!r} cuts prompts; use one of {legal}")
    table = read_rows(path, split)
    _require_columns(table, kind.needs(config))

    def parsed(row: Row) -> Any:
        item = kind.parse(row, tokenizer, config)
        if not item.ids:
            chat = isinstance(row.get(config.prompt_key), list)
            by = ", which chat_template.jinja or tokenizer_config.json renders" if chat else ""
            raise ValueError(f"it has no tokens: nothing is left of its text{by}")
        return item

    items = table.convert(parsed, config.bad_rows)
    limit = getattr(config, kind.limit)
    _warn_of_unknown(path, table, items, tokenizer)
    fitted = [(number, kind.fit(item, limit, config.truncation)) for number, item in items]
    long = [number for number, item in fitted if item is None]
    if long and config.truncation == "error":
        raise ValueError(
            f"{path}: {table.named(long)}: longer than data.{kind.limit}={limit} tokens; raise it "
            f"or set data.truncation to one of {', '.join(('filter', *kind.cuts))}"
        )
    if long:
        log.warning("%s: %d rows too long, left out: %s", path, len(long), table.named(long))
    return [item for _, item in fitted if item is not None]


def _warn_of_unknown(
    path: str, table: Table, items: Sequence[tuple[int, Any]], tokenizer: Tokenizer
) -> None:
    """Names rows with text that the tokenizer does not know: the model never sees it."""
    unknown = tokenizer.id_of(tokenizer.unknown)
    rows = [number for number, item in items if unknown is not None and unknown in item.ids]
    if rows:
        log.warning(
            *("%s: %d rows have text that the tokenizer has no token for, the model reads %r: %s",),
            *(path, len(rows), tokenizer.unknown, table.named(rows)),
        )


def _require_columns(table: Table, alternatives: Sequence[set[str]]) -> None:
    if not table.rows or any(names <= set(table.columns) for names in alternatives):
        return
    lacking = (sorted(names - set(table.columns)) for names in alternatives)
    missing = ", or ".join(" and ".join(map(repr, names)) for names in lacking)
    raise ValueError(
        f"{table.path}: no column {missing}; it has {', '.join(table.columns)}; set "
        "data.prompt_key, data.response_key or data.answer_key ('' when rewards need no answer)"
    )


def cut(ids: list[int], limit: int, truncation: str) -> list[int] | None:
    """At most `limit` ids: "left" keeps the last, "right" the first, "middle" both ends."""
    if len(ids) <= limit:
        return ids
    head = {"left": 0, "right": limit, "middle": limit // 2}.get(truncation)
    return None if head is None else ids[:head] + ids[len(ids) - (limit - head) :]


def _text(row: Row, key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        found = "missing" if value is None else f"of type {type(value).__name__}, not a string"
        raise ValueError(f"{key} is {found}")
    if not value.strip():
        raise ValueError(f"{key} is empty")
    return value


def _messages(row: Row, key: str) -> list[dict[str, Any]]:
    """Messages without parquet's null fields; each has a role and a text."""
    messages = row[key]
    if not messages:
        raise ValueError(f"{key} is empty")
    for index, message in enumerate(messages):
        fields = message if isinstance(message, dict) else {}
        if not all(isinstance(fields.get(name), str) for name in ("role", "content")):
            raise ValueError(f"message {index} of {key} lacks a role or content, as strings")
    return [{name: part for name, part in m.items() if part is not None} for m in messages]


def _answer(row: Row, config: DataConfig) -> Any:
    """The ground truth, of any JSON type: its own column, or verl's nested one."""
    if not config.answer_key:
        return ""
    answer = row.get(config.answer_key)
    if answer is None:
        nested = row.get("reward_model") or {}
        if not isinstance(nested, dict):
            raise ValueError(f"reward_model is of type {type(nested).__name__}, not a table")
        answer = nested.get("ground_truth")
    if answer is None:
        raise ValueError(f"{config.answer_key} is missing")
    return answer


def parse_prompt(row: Row, tokenizer: Tokenizer, config: DataConfig) -> Prompt:
    """Ids of a string (as it is), of messages (by the chat template), or as given.

    The text of messages, for reward functions, is that of the last one.
    """
    key, value = config.prompt_key, row.get(config.prompt_key)
    answer, source = _answer(row, config), str(row.get("data_source") or "")
    if not isinstance(value, list):
        text = _text(row, key)
        return Prompt(tokenizer.encode(text), text, answer, source)
    if value and all(type(token) is int for token in value):
        if not all(0 <= token < tokenizer.vocab_size for token in value):
            raise ValueError(f"{key} has ids outside 0 to {tokenizer.vocab_size - 1}")
        return Prompt(value, tokenizer.decode(value), answer, source)
    messages = _messages(row, key)
    if messages[-1]["role"] == "assistant":
        raise ValueError(f"{key} ends with an assistant message: there is nothing to answer")
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return Prompt(ids, messages[-1]["content"], answer, source)


def parse_example(row: Row, tokenizer: Tokenizer, config: DataConfig) -> Example:
    """From `messages`, from `text`, or from prompt and response; the stop token is trained."""
    if row.get("messages") is not None:
        return Example(*tokenizer.encode_chat(_messages(row, "messages")))
    if row.get("text") is not None:
        ids = [*tokenizer.encode(_text(row, "text")), *tokenizer.stop_ids]
        return Example(ids, [False] + [True] * (len(ids) - 1))  # nothing predicts the first id
    return _answered(row, config.response_key, tokenizer, config)


def parse_pair(row: Row, tokenizer: Tokenizer, config: DataConfig) -> Pair:
    """The prompt with its `chosen` and its `rejected` answer."""
    return Pair(*(_answered(row, key, tokenizer, config) for key in ("chosen", "rejected")))


def _answered(row: Row, key: str, tokenizer: Tokenizer, config: DataConfig) -> Example:
    """The row's prompt followed by its column `key`: a text, or messages after a prompt of these.

    Of a conversation only what follows the prompt is trained.
    """
    prompt_is_chat = isinstance(row.get(config.prompt_key), list)
    if prompt_is_chat and any(isinstance(part, int) for part in row[config.prompt_key]):
        raise ValueError(f"{config.prompt_key} is a list of ids: make it a text or messages here")
    if isinstance(row.get(key), list) and not prompt_is_chat:
        raise ValueError(
            f"{key} is messages and {config.prompt_key} is not: make both one or both the other"
        )
    if prompt_is_chat:
        before = _messages(row, config.prompt_key)
        turn = [{"role": "assistant", "content": row.get(key)}]
        after = _messages(row, key) if isinstance(row.get(key), list) else turn
        if not isinstance(row.get(key), list):
            _text(row, key)
        ids, trained = tokenizer.encode_chat([*before, *after])
        start = len(tokenizer.apply_chat_template(before, add_generation_prompt=False))
        return Example(ids, [at >= start and is_trained for at, is_trained in enumerate(trained)])
    response = _text(row, key)
    prompt = tokenizer.encode(_text(row, config.prompt_key))
    if not prompt:
        raise ValueError(f"{config.prompt_key} has no tokens: nothing is left of its text")
    answer = [*tokenizer.encode(response, add_bos=False), *tokenizer.stop_ids]
    return Example(prompt + answer, [False] * len(prompt) + [True] * len(answer))


def fit_prompt(prompt: Prompt, limit: int, truncation: str) -> Prompt | None:
    """The prompt with at most `limit` ids."""
    ids = cut(prompt.ids, limit, truncation)
    return None if ids is None else prompt._replace(ids=ids)


def fit_example(example: Example, limit: int, truncation: str) -> Example | None:
    """The example with at most `limit` ids; None also if the cut leaves nothing to train."""
    ids = cut(example.ids, limit, truncation)
    trained = example.trained[:limit]
    return None if ids is None or True not in trained else Example(ids, trained)


def fit_pair(pair: Pair, limit: int, truncation: str) -> Pair | None:
    """Both answers with at most `limit` ids."""
    chosen, rejected = (fit_example(example, limit, truncation) for example in pair)
    return None if chosen is None or rejected is None else Pair(chosen, rejected)


def _prompt_needs(config: DataConfig) -> list[set[str]]:
    if not config.answer_key:
        return [{config.prompt_key}]
    return [{config.prompt_key, key} for key in (config.answer_key, "reward_model")]


def _example_needs(config: DataConfig) -> list[set[str]]:
    return [{config.prompt_key, config.response_key}, {"messages"}, {"text"}]


def _pair_needs(config: DataConfig) -> list[set[str]]:
    return [{config.prompt_key, "chosen", "rejected"}]


def bucket(tokens: int) -> int:
    """Width of a batch: 8, 16, 32, 64, 128, then multiples of 128, so that few shapes compile."""
    return next((w for w in (8, 16, 32, 64) if tokens <= w), -(-tokens // 128) * 128)


def prompt_columns(prompts: Sequence[Prompt], n: int = 1) -> Columns:
    """Prompts, left-aligned, each in n adjacent rows; a prompt listed twice is two groups."""
    rows = [prompt for prompt in prompts for _ in range(n)]
    ids_BP, length_B = _pad([row.ids for row in rows])
    row_id_B = np.arange(len(rows), dtype=np.int32)
    return {
        "prompt_ids": ids_BP,
        "prompt_length": length_B,
        "uid": row_id_B.astype(np.int64) // n,
        "row_id": row_id_B,
        "prompt": [row.text for row in rows],
        "ground_truth": [row.ground_truth for row in rows],
        "data_source": [row.data_source for row in rows],
    }


def example_columns(examples: Sequence[Example], n: int = 1) -> Columns:
    """Whole rows, left-aligned, with the mask of trained tokens; prompts end before its first."""
    rows = [example for example in examples for _ in range(n)]
    ids_BT, length_B = _pad([row.ids for row in rows])
    mask_BT, _ = _pad([row.trained for row in rows])
    row_id_B = np.arange(len(rows), dtype=np.int32)
    return {
        "input_ids": ids_BT,
        "prompt_length": np.asarray([row.trained.index(True) for row in rows], np.int32),
        "length": length_B,
        "response_mask": mask_BT.astype(bool),
        "uid": row_id_B.astype(np.int64) // n,
        "row_id": row_id_B,
    }


def pair_columns(pairs: Sequence[Pair], n: int = 1) -> Columns:
    """Rows 2i and 2i + 1 are the chosen and the rejected answer of pair i, which is their uid."""
    columns = example_columns([example for pair in pairs for _ in range(n) for example in pair])
    return columns | {"uid": columns["row_id"].astype(np.int64) // 2}


def _pad(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    length_B = np.asarray([len(row) for row in rows], np.int32)
    padded_BT = np.zeros((len(rows), bucket(int(length_B.max()))), np.int32)
    for i, row in enumerate(rows):
        padded_BT[i, : len(row)] = row
    return padded_BT, length_B


PROMPTS = Kind(
    "prompts", _prompt_needs, parse_prompt, "max_prompt_tokens", CUTS, fit_prompt, prompt_columns
)
ROWS = "max_tokens", ("right",)  # limit and cut of whole rows
EXAMPLES = Kind("examples", _example_needs, parse_example, *ROWS, fit_example, example_columns)
PAIRS = Kind("pairs", _pair_needs, parse_pair, *ROWS, fit_pair, pair_columns, rows=2)
