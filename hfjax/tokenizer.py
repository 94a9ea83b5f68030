# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: Hugging Face folders and GGUF files, chat templates, exactly one BOS."""

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from hfjax.files import read_json, read_text
from hfjax.models.gguf_file import read_metadata
from hfjax.template import ChatTemplate

Messages = Sequence[Mapping[str, Any]]
GGUF_CONTROL = 3  # llama.cpp's token type for special tokens


class Tokenizer:
    """Text to ids and back, by one Hugging Face tokenizer and its settings."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: Mapping[str, Any],
        source: str,
        now: datetime.datetime | None = None,
    ) -> None:
        """Chat templates that ask for the time are told `now`, else when this was made."""
        backend.no_truncation()  # a tokenizer.json may carry both, and would cut in silence
        backend.no_padding()
        self._backend = backend
        self._config = dict(config)
        self._source = source
        self._now = now or datetime.datetime.now()
        self.bos_id = self._special_id("bos_token")
        self.eos_id = self._special_id("eos_token")
        self.pad_id = self._special_id("pad_token")
        self.unknown = getattr(backend.model, "unk_token", None)  # stands for what has no token
        ids = backend.get_vocab(with_added_tokens=True).values()
        if not ids:
            raise ValueError("its vocabulary is empty")
        self.vocab_size = 1 + max(ids)
        self.chat_template = _template_text(config.get("chat_template"))
        self.adds_bos = self._adds_bos()

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokenizer's own end token; a model's generation_config.json may name more."""
        return () if self.eos_id is None else (self.eos_id,)

    @property
    def vocabulary(self) -> dict[int, str]:
        """Every token by its id, in the order of ids."""
        table = self._backend.get_vocab(with_added_tokens=True)
        return dict(sorted((token_id, token) for token, token_id in table.items()))

    def id_of(self, token: str | None) -> int | None:
        """The id of a token; None of none, or of a text that is no token."""
        return None if token is None else self._backend.token_to_id(token)

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Ids of a text; with `add_bos`, one BOS in front if this tokenizer uses one."""
        ids = self._ids(text, specials=False)
        return self._with_bos(ids) if add_bos else ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def apply_chat_template(self, messages: Messages, *, add_generation_prompt: bool) -> list[int]:
        """Ids of a conversation, with exactly one BOS whether the template writes it or not."""
        text = self.render(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text)

    def render(self, messages: Messages, *, add_generation_prompt: bool) -> str:
        """The template's text of a conversation; any failure inside it is a ValueError."""
        return self._template.render(
            messages=messages,
            add_generation_prompt=add_generation_prompt,
            tools=None,
            **{name: self._token(name) or "" for name in _SPECIALS},
        )

    def encode_chat(self, messages: Messages) -> tuple[list[int], list[bool]]:
        """Ids of a conversation and which are trained: the assistant's, stop token included.

        Each assistant turn is what the template adds to its opening, so both renderings must
        begin the whole conversation, id by id; a template that rewrites earlier turns is refused.
        The row ends with its last trained id. A last turn without a stop token is given one.
        """
        ids = self.apply_chat_template(messages, add_generation_prompt=False)
        trained = [False] * len(ids)
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            opening = self.apply_chat_template(messages[:index], add_generation_prompt=True)
            turn = self.apply_chat_template(messages[: index + 1], add_generation_prompt=False)
            if ids[: len(opening)] != opening or ids[: len(turn)] != turn:
                raise ValueError(
                    f"message {index}: the chat template of {self._source} does not render a "
                    "conversation as its earlier turns plus new ones, so the assistant's tokens "
                    "cannot be told apart; train this row as prompt and response"
                )
            start = max(1, len(opening))  # nothing predicts the first id of a row
            stops = [at for at in range(start, len(turn)) if ids[at] == self.eos_id]
            end = stops[-1] + 1 if stops else len(turn)
            trained[start:end] = [True] * (end - start)
        if True not in trained:
            raise ValueError("there is no assistant message to learn from")
        end = len(trained) - trained[::-1].index(True)
        ids, trained = ids[:end], trained[:end]
        if self.eos_id is not None and ids[-1] != self.eos_id:
            ids, trained = [*ids, self.eos_id], [*trained, True]
        return ids, trained

    def save(self, folder: str | Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json, as transformers reads them."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._backend.save(str(Path(folder) / "tokenizer.json"))
        text = json.dumps(self._config, indent=2, ensure_ascii=False)
        (Path(folder) / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")

    def _token(self, name: str) -> str | None:
        value = self._config.get(name)
        token = value.get("content") if isinstance(value, Mapping) else value
        if value is not None and not isinstance(token, str):
            raise ValueError(f"{name}={value!r:.60} must be a text, or an object with its content")
        return token

    def _special_id(self, name: str) -> int | None:
        token = self._token(name)
        token_id = self.id_of(token)
        if token is not None and token_id is None:
            raise ValueError(f"{name}={token!r:.60} of {self._source} is not in its vocabulary")
        return token_id

    def _adds_bos(self) -> bool:
        """`add_bos_token` where it is given, otherwise what the post-processor does."""
        if self.bos_id is None:
            return False
        stated = self._config.get("add_bos_token")
        if isinstance(stated, bool):
            return stated
        return self._ids("", specials=True)[:1] == [self.bos_id]

    def _ids(self, text: str, *, specials: bool) -> list[int]:
        try:
            return self._backend.encode(text, add_special_tokens=specials).ids
        except Exception as error:  # half a surrogate pair; whatever tokenizer.json brings about
            told = f"the tokenizer of {self._source} cannot read the text: {error}"
            raise ValueError(told) from error

    def _with_bos(self, ids: list[int]) -> list[int]:
        if not self.adds_bos or self.bos_id is None or ids[:1] == [self.bos_id]:
            return ids
        return [self.bos_id, *ids]

    @cached_property
    def _template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise ValueError(
                f"the tokenizer of {self._source} has no chat template, so messages cannot be "
                "rendered; add chat_template.jinja to the model folder or give plain strings"
            )
        return ChatTemplate(self.chat_template, self._source, self._now)


def check_vocabulary(actor: Tokenizer, reader: Tokenizer) -> None:
    """Refuses a model that would read an id of the actor's as another token; it may know more."""
    theirs = reader.vocabulary
    for token_id, token in actor.vocabulary.items():
        if theirs.get(token_id) != token:
            raise ValueError(
                f"model={reader._source!r} has another tokenizer than the actor's "
                f"{actor._source!r}: id {token_id} is {theirs.get(token_id)!r} there and {token!r} "
                "here; use a model with the actor's tokenizer"
            )


_SPECIALS = ("bos_token", "eos_token", "pad_token", "unk_token")


def load_tokenizer(path: str | Path, now: datetime.datetime | None = None) -> Tokenizer:
    """The tokenizer of a Hugging Face folder or of a GGUF file."""
    path = Path(path)
    if path.suffix == ".gguf":
        return _load_gguf(path, now)
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ValueError(
            f"model={str(path)!r} has no tokenizer.json; give a folder saved by transformers' "
            "save_pretrained with a fast tokenizer, or a .gguf file"
        )
    config_file, template = path / "tokenizer_config.json", path / "chat_template.jinja"
    config = read_json(config_file) if config_file.is_file() else {}
    if template.is_file():
        config["chat_template"] = read_text(template)
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{file} is no tokenizer: {error}") from error
    return _named(path, backend, config, now)


def _named(
    path: Path, backend: tokenizers.Tokenizer, config: dict[str, Any], now: datetime.datetime | None
) -> Tokenizer:
    """The tokenizer; what its settings lack names its files."""
    try:
        return Tokenizer(backend, config, str(path), now)
    except ValueError as error:
        raise ValueError(f"tokenizer of model={str(path)!r}: {error}") from error


def _load_gguf(path: Path, now: datetime.datetime | None) -> Tokenizer:
    """Byte-level BPE with single digits, the "smollm" family; other families are refused.

    Without the Digits step numbers come out as other ids than the model was trained on.
    """
    if not path.is_file():
        raise ValueError(f"model={str(path)!r} is not a file")
    fields = read_metadata(path)
    family = (fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre"))
    if family != ("gpt2", "smollm"):
        raise ValueError(
            f"model={str(path)!r} has a GGUF tokenizer of family {family}; only "
            "('gpt2', 'smollm') is read, give others as a folder with tokenizer.json"
        )
    tokens, merges, kinds = (
        _listed(path, fields, name) for name in ("tokens", "merges", "token_type")
    )
    if len(kinds) != len(tokens):
        raise ValueError(f"{path} has {len(tokens)} tokens and types of {len(kinds)}")
    try:
        pairs: list[Any] = [tuple(merge.split(" ")) for merge in merges]
        backend = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, pairs))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path} has tokens and merges that are no tokenizer: {error}") from error
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    specials = [token for token, kind in zip(tokens, kinds, strict=True) if kind == GGUF_CONTROL]
    backend.add_special_tokens([tokenizers.AddedToken(s, special=True) for s in specials])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)),
        "chat_template": fields.get("tokenizer.chat_template"),
    }
    names = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token"}
    for theirs, ours in names.items():
        token_id = fields.get(key := f"tokenizer.ggml.{theirs}_token_id")
        if token_id is not None and not (type(token_id) is int and 0 <= token_id < len(tokens)):
            raise ValueError(f"{path}: {key}={token_id!r:.60} is none of its {len(tokens)} tokens")
        config[ours] = None if token_id is None else tokens[token_id]
    return _named(path, backend, config, now)


def _listed(path: Path, fields: Mapping[str, Any], name: str) -> list[Any]:
    """A list of the tokenizer in GGUF's metadata: of texts, but for the types."""
    found = fields.get(f"tokenizer.ggml.{name}")
    found = found.tolist() if isinstance(found, np.ndarray) else found
    kind = int if name == "token_type" else str
    if not isinstance(found, list) or not all(isinstance(each, kind) for each in found):
        raise ValueError(f"{path}: tokenizer.ggml.{name} must be a list of {kind.__name__}")
    return found


def _template_text(value: Any) -> str | None:
    """The template itself, or the one named "default" of a list of named ones."""
    if value is None or isinstance(value, str):
        return value
    named: dict[str, str] = {}
    for entry in value if isinstance(value, list) else [None]:
        fields = entry if isinstance(entry, dict) else {}
        if not all(isinstance(fields.get(name), str) for name in ("name", "template")):
            raise ValueError("chat_template must be a text, or a list of {name, template}")
        named[fields["name"]] = fields["template"]
    return named.get("default")
