# SPDX-License-Identifier: Apache-2.0
"""Checkpoint files as named tensors that can be read in slices; checked before anything is read."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from safetensors import SafetensorError, safe_open

log = logging.getLogger(__name__)

Slices = tuple[slice, ...]
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' names


class Source(Protocol):
    """Tensors under Hugging Face's names."""

    where: str  # for errors
    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str, slices: Slices) -> np.ndarray:
        """The part of a tensor that `slices` (start and stop only, one a dimension) select."""
        ...


class SafetensorsFiles:
    """A directory's safetensors files, single or sharded under an index."""

    def __init__(self, directory: Path) -> None:
        self.where = str(directory)
        self._files: dict[str, Any] = {}  # tensor -> open file
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path, names in _files_of(directory).items():
            self._add(path, names)

    def read(self, name: str, slices: Slices) -> np.ndarray:
        tensor = self._files[name].get_slice(name)
        return tensor[slices] if slices else self._files[name].get_tensor(name)

    def _add(self, path: Path, names: list[str] | None) -> None:
        file = _open(path)
        held = set(file.keys())
        absent = sorted(set(names or []) - held)
        if absent:
            raise ValueError(f"{path} does not hold {absent[0]!r}, which {INDEX} places there")
        for name in held if names is None else names:
            tensor = file.get_slice(name)
            if tensor.get_dtype() not in FLOATS:
                raise ValueError(
                    f"{path}: {name!r} has dtype {tensor.get_dtype()}, which is not supported; "
                    f"use one of {', '.join(FLOATS)}"
                )
            self._files[name] = file
            self.shapes[name] = tuple(tensor.get_shape())


def tensor_names(directory: Path) -> set[str]:
    """Names of the tensors in a directory's safetensors files; empty where there are none."""
    if (directory / SINGLE).exists():
        return set(_open(directory / SINGLE).keys())
    if (directory / INDEX).exists():
        return set(_weight_map(directory / INDEX))
    return set()


def _files_of(directory: Path) -> dict[Path, list[str] | None]:
    """Files to open and which of their tensors to take (None: all)."""
    if (directory / SINGLE).exists():  # transformers too prefers it to an index
        files: dict[Path, list[str] | None] = {directory / SINGLE: None}
    elif (directory / INDEX).exists():
        files = {}
        for tensor, file in _weight_map(directory / INDEX).items():
            if Path(file).name != file:
                raise ValueError(f"{directory / INDEX} points outside its directory: {file!r}")
            taken = files.setdefault(directory / file, [])
            assert taken is not None
            taken.append(tensor)
    else:
        raise ValueError(_no_weights(directory))
    for path, names in files.items():
        if not path.exists():
            first = f", e.g. {names[0]!r}" if names else ""
            raise ValueError(f"{path} is missing: {INDEX} places {len(names or ())} tensors{first}")
    stray = sorted(path.name for path in set(directory.glob("*.safetensors")) - set(files))
    if stray:
        log.warning("%s: %s not part of the model, ignored", directory, ", ".join(stray))
    return files


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found = json.loads(index.read_text())["weight_map"]
    except (json.JSONDecodeError, KeyError) as error:
        raise ValueError(f"{index} is not a safetensors index: {error!r}") from error
    if not found:
        raise ValueError(f"{index} lists no tensors")
    return found


def _no_weights(directory: Path) -> str:
    pickles = sorted(path.name for path in directory.glob("*.bin"))
    pickles += sorted(path.name for path in directory.glob("*.pt*"))
    if pickles:
        return (
            f"{directory} holds weights only as pickles ({', '.join(pickles)}), which are never "
            "opened: they can run code; save the model with safe_serialization=True"
        )
    return f"{directory} holds neither {SINGLE} nor {INDEX}: nothing to load"


def _open(path: Path) -> Any:
    """An open file whose header covers it whole: a cut file fails here, before a tensor is read."""
    try:
        return safe_open(str(path), framework="numpy")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or cut short: {error}") from error


class GGUFFile:
    """A GGUF file of the llama architecture, dequantised to float32 row range by row range."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        reader, self._dequantize = _gguf_reader(path)
        self.metadata = dict(reader.fields)
        architecture = self.value("general.architecture")
        if architecture != "llama":
            raise ValueError(
                f"{path}: GGUF architecture {architecture!r} is not supported; use 'llama'"
            )
        self._tensors = {_hf_name(tensor.name): tensor for tensor in reader.tensors}
        self.shapes = {
            name: tuple(int(size) for size in reversed(tensor.shape))
            for name, tensor in self._tensors.items()
        }

    def value(self, key: str, default: Any = None) -> Any:
        """One metadata value."""
        return self.metadata[key].contents() if key in self.metadata else default

    def read(self, name: str, slices: Slices) -> np.ndarray:
        tensor = self._tensors[name]
        rows = self._dequantize(tensor.data[slices[0]], tensor.tensor_type)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            rows = self._half_split(rows)
        return rows[(slice(None), *slices[1:])]

    def config(self) -> dict[str, Any]:
        """The metadata as a config.json would say it."""

        def llama(key: str, default: Any = None) -> Any:
            return self.value(f"llama.{key}", default)

        heads, embed = llama("attention.head_count"), llama("embedding_length")
        head_dim = llama("attention.key_length", embed // heads)
        if llama("rope.scaling.type", "none") != "none" or "rope_freqs.weight" in self._tensors:
            raise ValueError(f"{self.where}: rope scaling in a GGUF file is not supported")
        if llama("rope.dimension_count", head_dim) != head_dim:
            raise ValueError(f"{self.where}: rope.dimension_count must be head_dim={head_dim}")
        return {
            "model_type": "llama",
            "num_hidden_layers": llama("block_count"),
            "hidden_size": embed,
            "num_attention_heads": heads,
            "num_key_value_heads": llama("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "intermediate_size": llama("feed_forward_length"),
            "vocab_size": self.shapes["model.embed_tokens.weight"][0],
            "max_position_embeddings": llama("context_length"),
            # Stored in float32: its shortest spelling is the number the model was written with.
            "rms_norm_eps": float(str(np.float32(llama("attention.layer_norm_rms_epsilon")))),
            "rope_theta": llama("rope.freq_base", 10000.0),
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "bos_token_id": self.value("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.value("tokenizer.ggml.eos_token_id"),
        }

    def _half_split(self, rows: np.ndarray) -> np.ndarray:
        """Undoes llama.cpp's order of query and key rows in whole heads: pairs as neighbours."""
        d = self.value("llama.attention.key_length") or (
            self.value("llama.embedding_length") // self.value("llama.attention.head_count")
        )
        return rows.reshape(-1, d // 2, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


GGUF_TO_HF = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor; an unknown one keeps its own."""
    if not name.startswith("blk."):
        return GGUF_TO_HF.get(name, name)
    _, layer, part, kind = name.split(".", 3)
    return f"model.layers.{layer}.{GGUF_TO_HF.get(part, part)}.{kind}"


def _gguf_reader(path: Path) -> tuple[Any, Callable[..., np.ndarray]]:
    try:
        import gguf
    except ImportError as error:
        raise ValueError(
            f"reading {path} needs the gguf package: pip install gguf, or pip install hfjax[demo]"
        ) from error
    try:
        return gguf.GGUFReader(str(path)), gguf.dequantize
    except (ValueError, OSError, IndexError) as error:
        raise ValueError(f"{path} is damaged or cut short: {error}") from error
