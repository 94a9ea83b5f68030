# SPDX-License-Identifier: Apache-2.0
"""The embedded task: sums of two numbers from 0 to 99, its splits, rewards, pupil and model."""

import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from hfjax.tokenizer import Tokenizer

HELD_OUT_PAIRS = 512  # unordered pairs; both orders of each are kept from all training
FORGET = 0.7  # above one half, so that greedy imitation gets every carry wrong
CHARACTERS = "0123456789+-*=? "
SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
Row = dict[str, str]


def problems(split: Literal["train", "eval"]) -> list[tuple[int, int]]:
    """The ordered problems (a, b) of a split; (a, b) and (b, a) are always in the same one.

    The order of the hashes of {a, b} decides, so the split depends on no seed or library.
    """
    pairs = [(a, b) for a in range(100) for b in range(a, 100)]
    held_out = set(sorted(pairs, key=_hash_of_pair)[:HELD_OUT_PAIRS])
    wanted = split == "eval"
    return [
        (a, b)
        for a in range(100)
        for b in range(100)
        if ((min(a, b), max(a, b)) in held_out) == wanted
    ]


def rows(split: Literal["train", "eval"]) -> list[Row]:
    """Prompts with ground truths: {"prompt": "37+58=", "ground_truth": "95", ...}."""
    return [
        {"prompt": f"{a}+{b}=", "ground_truth": str(a + b), "data_source": "sums"}
        for a, b in problems(split)
    ]


def careless_sum(a: int, b: int, forget_units: bool, forget_tens: bool) -> int:
    """a + b by a pupil who drops the carry from the units, from the tens, or both."""
    units = a % 10 + b % 10
    carry = 1 if units >= 10 and not forget_units else 0
    tens = a // 10 + b // 10 + carry
    hundreds = 1 if tens >= 10 and not forget_tens else 0
    return 100 * hundreds + 10 * (tens % 10) + units % 10


def sft_rows(seed: int, forget: float = FORGET, copies: int = 4) -> list[Row]:
    """Demonstrations of the careless pupil: each training problem `copies` times, in random order.

    Every carry is forgotten with probability `forget`, independently. 30 % of the problems have
    no carry: this is what greedy imitation reaches, and reinforcement has to exceed.
    """
    rng = np.random.default_rng(seed)
    drawn = problems("train") * copies
    forgets = rng.random((len(drawn), 2)) < forget
    answers = [careless_sum(*ab, *map(bool, f)) for ab, f in zip(drawn, forgets, strict=True)]
    return [
        {"prompt": f"{drawn[i][0]}+{drawn[i][1]}=", "response": str(answers[i])}
        for i in rng.permutation(len(drawn))
    ]


def demonstrations(split: Literal["train", "eval"]) -> list[Row]:
    """For fine-tuning: the careless pupil's work, judged on right answers to held-out problems."""
    if split == "train":
        return sft_rows(seed=0)
    return [{"prompt": row["prompt"], "response": row["ground_truth"]} for row in rows(split)]


def preferences(split: Literal["train", "eval"]) -> list[Row]:
    """Pairs: the right sum, and that of a pupil who forgets every carry, where it is another."""
    forgets = {"forget_units": True, "forget_tens": True}
    return [
        {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(wrong)}
        for a, b in problems(split)
        if (wrong := careless_sum(a, b, **forgets)) != a + b
    ]


def random_preferences(split: Literal["train", "eval"]) -> list[Row]:
    """The control: in training a hash of the prompt says which of the two is preferred."""
    rows = preferences(split)
    for row in rows if split == "train" else []:
        if _hash(row["prompt"]) & 1:
            row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    return rows


def sum_reward(
    prompts: Sequence[str], responses: Sequence[str], ground_truths: Sequence[str]
) -> list[float]:
    """1 where the response is the number itself, digit for digit; otherwise 0."""
    return [
        1.0 if response.strip() == truth else 0.0
        for response, truth in zip(responses, ground_truths, strict=True)
    ]


def seven_cost(
    prompts: Sequence[str], responses: Sequence[str], ground_truths: Sequence[str]
) -> list[float]:
    """1 where a 7 is written, as a quarter of the sums must: a constraint that has its price."""
    return [1.0 if "7" in response else 0.0 for response in responses]


def last_number_reward(
    prompts: Sequence[str], responses: Sequence[str], ground_truths: Sequence[str]
) -> list[float]:
    """1 where the last whole number of the response is the answer; for chatty models."""
    found = [re.findall(r"-?\d+", response.replace(",", "")) for response in responses]
    return [
        1.0 if numbers and int(numbers[-1]) == int(truth) else 0.0
        for numbers, truth in zip(found, ground_truths, strict=True)
    ]


def random_reward(
    prompts: Sequence[str],
    responses: Sequence[str],
    ground_truths: Sequence[str],
    places: Sequence[tuple[int, int]],
) -> list[float]:
    """0 or 1 by chance, the control: nothing can be learned from it.

    A hash of step, row, prompt and response, so a rerun or a resumed run scores the same with any
    number of workers, and the same response in another step or row is tossed for again: were it
    not, a policy could learn the table by heart.
    """
    rows = zip(places, prompts, responses, strict=True)
    return [float(_hash(f"{place}|{prompt}|{response}") & 1) for place, prompt, response in rows]


def make_tokenizer() -> Tokenizer:
    """One id a character, 20 in all."""
    vocab = {token: index for index, token in enumerate((*SPECIALS, *CHARACTERS))}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    every_character = tokenizers.Regex(r"[\s\S]")
    backend.pre_tokenizer = pre_tokenizers.Split(every_character, behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([tokenizers.AddedToken(s, special=True) for s in SPECIALS])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{name[1:-1]}_token": name for name in SPECIALS},
        "add_bos_token": True,
        "chat_template": CHAT_TEMPLATE,
    }
    return Tokenizer(backend, config, "hfjax.arithmetic")


def write_task_model_config(folder: str | Path) -> None:
    """A Hugging Face folder without weights: 0.3M parameters, for training from random ones."""
    tokenizer = make_tokenizer()
    tokenizer.save(folder)
    ids = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.vocab_size,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        **ids,
    }
    _write_json(Path(folder) / "config.json", config)
    _write_json(Path(folder) / "generation_config.json", ids)


def write_task(folder: str | Path, seed: int = 0) -> None:
    """train.jsonl, eval.jsonl, sft.jsonl and the folder model/ of the task."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = {"train": rows("train"), "eval": rows("eval"), "sft": sft_rows(seed)}
    for name, table in files.items():
        text = "".join(json.dumps(row) + "\n" for row in table)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    write_task_model_config(folder / "model")


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _hash_of_pair(pair: tuple[int, int]) -> int:
    return _hash(f"{pair[0]}+{pair[1]}")


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m hfjax.arithmetic DIR")
    write_task(sys.argv[1])
    print(f"wrote train.jsonl, eval.jsonl, sft.jsonl and model/ to {sys.argv[1]}")
