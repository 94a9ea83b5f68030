# SPDX-License-Identifier: Apache-2.0
"""Tiny models: a config whose sizes all differ, and real checkpoints written by NumPy alone."""

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from hfjax.models.llama import ModelConfig
from meshes.mesh import MeshShape
from meshes.placement import Placement, Pool, RolePlacement

LUT_VOCAB = 16
PATH_LOGIT = 30.0
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
HEADS = {"lm": "ForCausalLM", "score": "ForSequenceClassification"}
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


def slow_but(names: Iterable[Any], *quick: Any) -> list[Any]:
    """Cases for parametrize, all of which but the quick ones are marked slow."""
    return [n if n in quick else pytest.param(n, marks=pytest.mark.slow) for n in names]


def is_timing(name: str) -> bool:
    """Whether a metric may differ between two equal runs: it measures the machine."""
    return name.startswith(("timing_s/", "timing_per_token_ms/", "perf/"))


def damaged(x: jax.Array, device: int, change: Callable[[np.ndarray], None]) -> jax.Array:
    """The array with `change` made to the copy, or the part, that one of its devices holds."""
    shards = [shard.data for shard in x.addressable_shards]
    values = np.array(shards[device])
    change(values)
    shards[device] = jax.device_put(values, shards[device].sharding)
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


def tiny_config(**over: Any) -> ModelConfig:
    """Every size differs and divides by 4-way tensor, so that a swapped axis fails."""
    sizes: dict[str, Any] = {
        "layers": 2,
        "embed": 40,
        "heads": 8,
        "kv_heads": 4,
        "head_dim": 6,
        "mlp": 56,
        "vocab": 96,
        "rope_theta": 1e4,
    }
    return ModelConfig(**(sizes | over))


def write_tiny_hf(
    directory: str | Path,
    *,
    family: str = "llama",
    head: str = "lm",
    seed: int = 0,
    dtype: str = "float32",
    shards: int = 1,
    eos: int | list[int] | None = 2,
    **settings: Any,
) -> Path:
    """A random model in Hugging Face's format; `settings` go into config.json and set the sizes.

    Nothing is at its usual initial value: norms and biases are random too, so that one left out
    changes the logits.
    """
    raw: dict[str, Any] = {
        "architectures": [CLASSES[family] + HEADS[head]],
        "model_type": family,
        "hidden_act": "silu",
        "hidden_size": 40,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 6,
        "vocab_size": 96,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "bos_token_id": 1,
        "eos_token_id": eos,
    }
    if family == "mistral":
        raw["sliding_window"] = None
    if head == "score":
        raw |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "pad_token_id": 0}
    raw |= settings
    rng = np.random.default_rng(seed)
    tensors = {
        name: (float(name.endswith("norm.weight")) + 0.3 * rng.standard_normal(shape)).astype(
            DTYPES[dtype]
        )
        for name, shape in _shapes(raw, head).items()
    }
    return write_checkpoint(directory, raw, tensors, shards=shards)


def write_lut(
    directory: str | Path,
    table: np.ndarray | None = None,
    *,
    scores: Sequence[float] | np.ndarray | None = None,
    bias: float | None = None,
    eos: int | list[int] | None = 2,
) -> Path:
    """A model whose next-token logits are table[current, next], or whose score is scores[last].

    Attention and MLP add nothing and the embedding is the identity, so the final hidden state is
    sqrt(V) x one-hot(current token): rows of the head are the table's columns over sqrt(V).
    """
    values = np.asarray(table if table is not None else scores, np.float32)
    vocab = values.shape[0]
    raw = {
        "architectures": [
            "LlamaForCausalLM" if table is not None else "LlamaForTokenClassification"
        ],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": vocab,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 4,
        "vocab_size": vocab,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-9,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": eos,
    }
    if scores is not None:
        raw |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    shapes = _shapes(raw, "lm" if table is not None else "score")
    tensors = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = np.zeros_like(tensors[name])
    tensors["model.embed_tokens.weight"] = np.eye(vocab, dtype=np.float32)
    if table is not None:
        tensors["lm_head.weight"] = np.ascontiguousarray(values.T / np.float32(vocab**0.5))
    else:
        tensors["score.weight"] = values[None] / np.float32(vocab**0.5)
        if bias is not None:
            tensors["score.bias"] = np.array([bias], np.float32)
    return write_checkpoint(directory, raw, tensors)


def path_table(*path: int, vocab: int = LUT_VOCAB) -> np.ndarray:
    """Logits under which greedy decoding follows the path: each step puts +30 on the next id."""
    table = np.zeros((vocab, vocab), np.float32)
    for current, following in itertools.pairwise(path):
        table[current, following] = PATH_LOGIT
    return table


def write_checkpoint(
    directory: str | Path, raw: dict[str, Any], tensors: dict[str, np.ndarray], *, shards: int = 1
) -> Path:
    """config.json, generation_config.json, a tokenizer of words t0 t1 ..., and the weights."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw, indent=2))
    generation = {key: raw[key] for key in ("bos_token_id", "eos_token_id") if key in raw}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    write_tokenizer(directory, raw["vocab_size"], eos=raw.get("eos_token_id"))
    names = list(tensors)
    files = {
        f"model-{i + 1:05d}-of-{shards:05d}.safetensors": names[i::shards] for i in range(shards)
    }
    if shards == 1:
        files = {"model.safetensors": names}
    for file, held in files.items():
        save_file({n: tensors[n] for n in held}, directory / file, metadata={"format": "pt"})
    if shards > 1:
        weight_map = {name: file for file, held in files.items() for name in held}
        index = directory / "model.safetensors.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def write_tokenizer(directory: str | Path, vocab: int, *, eos: int | list[int] | None = 2) -> None:
    """Token i is the word `t{i}`; the end token decodes to nothing."""
    first = eos[0] if isinstance(eos, list) else eos
    end = None if first is None else f"t{first}"
    special = {"id": first, "content": end, "special": True, "normalized": False}
    special |= {"single_word": False, "lstrip": False, "rstrip": False}
    words = {
        "version": "1.0",
        "added_tokens": [] if end is None else [special],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {
            "type": "WordLevel",
            "vocab": {f"t{i}": i for i in range(vocab)},
            "unk_token": "t0",
        },
    }
    (Path(directory) / "tokenizer.json").write_text(json.dumps(words))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "chat_template": TEMPLATE,
    }
    (Path(directory) / "tokenizer_config.json").write_text(json.dumps(settings))


def _shapes(raw: dict[str, Any], head: str) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint, named and shaped as transformers saves it."""
    D, F, V = raw["hidden_size"], raw["intermediate_size"], raw["vocab_size"]
    d, Q = raw["head_dim"], raw["num_attention_heads"] * raw["head_dim"]
    KV = raw["num_key_value_heads"] * d
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D)}
    for layer in range(raw["num_hidden_layers"]):
        here = f"model.layers.{layer}."
        attention = here + "self_attn."
        shapes |= {
            here + "input_layernorm.weight": (D,),
            attention + "q_proj.weight": (Q, D),
            attention + "k_proj.weight": (KV, D),
            attention + "v_proj.weight": (KV, D),
            attention + "o_proj.weight": (D, Q),
            here + "post_attention_layernorm.weight": (D,),
            here + "mlp.gate_proj.weight": (F, D),
            here + "mlp.up_proj.weight": (F, D),
            here + "mlp.down_proj.weight": (D, F),
        }
        if raw["model_type"] == "qwen2":
            for name, size in (("q", Q), ("k", KV), ("v", KV)):
                shapes[f"{attention}{name}_proj.bias"] = (size,)
        if raw["model_type"] == "qwen3":
            shapes |= {attention + "q_norm.weight": (d,), attention + "k_norm.weight": (d,)}
    shapes["model.norm.weight"] = (D,)
    if head == "score":
        shapes["score.weight"] = (1, D)
    elif not raw["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (V, D)
    return shapes


def placed(path: Path, shape: MeshShape, *roles: str, processes: int = 1) -> str:
    """A placement file with every role on one mesh of one pool; only actor and critics learn."""
    learn = ("actor", "critic", "cost_critic")
    table = {
        role: RolePlacement(role, "all", **{"train" if role in learn else "infer": shape})
        for role in roles
    }
    path.write_text(Placement({"all": Pool("all", shape.devices, processes)}, table).to_toml())
    return str(path)
