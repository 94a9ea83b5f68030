# SPDX-License-Identifier: Apache-2.0
"""GGUF files of the llama architecture: metadata, tokens, tensors that are read in slices.

The header is read here: the package `gguf` believes what a file declares, and only dequantises.
"""

import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hfjax.models.sources import Slices

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?"}
SCALARS |= {10: "<Q", 11: "<q", 12: "<d"}  # type in the file -> code of struct
ALIGNMENT = 32  # where the file names none
MOST_DIMENSIONS = 4


class TensorInfo(NamedTuple):
    """Where a tensor lies; `shape` as NumPy has it."""

    shape: tuple[int, ...]
    kind: int  # ggml's number of its type
    offset: int  # from the start of all tensors


class Header(NamedTuple):
    """What stands before the tensors."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    end: int  # bytes


class _Cursor:
    """Reads a file from the front; what is declared and lies beyond its end is refused."""

    def __init__(self, data: np.ndarray) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> np.ndarray:
        if count > len(self.data) - self.at:
            raise ValueError(
                f"{count} bytes are declared at byte {self.at}, the file ends at {len(self.data)}"
            )
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code)).tobytes())[0]

    def text(self) -> str:
        return self.take(self.number("<Q")).tobytes().decode("utf-8")

    def value(self, kind: int) -> Any:
        """One value of the metadata; arrays of numbers stay arrays of NumPy."""
        if kind == STRING:
            return self.text()
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind != ARRAY:
            raise ValueError(f"metadata of type {kind} at byte {self.at} is unknown")
        inner, count = self.number("<I"), self.number("<Q")
        if inner == STRING:
            self.fits(count, struct.calcsize("<Q"))
            return [self.text() for _ in range(count)]
        if inner not in SCALARS:
            raise ValueError(f"an array of type {inner} at byte {self.at} is unknown")
        dtype = np.dtype(SCALARS[inner])
        self.fits(count, dtype.itemsize)
        return np.frombuffer(self.take(count * dtype.itemsize).tobytes(), dtype)

    def tensor(self) -> tuple[str, TensorInfo]:
        name, dimensions = self.text(), self.number("<I")
        if dimensions > MOST_DIMENSIONS:
            raise ValueError(f"{name!r} has {dimensions} dimensions, at most {MOST_DIMENSIONS} are")
        shape = tuple(self.number("<Q") for _ in range(dimensions))[::-1]
        return name, TensorInfo(shape, self.number("<I"), self.number("<Q"))

    def fits(self, count: int, each: int) -> None:
        """Refuses a count of things of at least `each` bytes that the rest cannot hold."""
        if count * each > len(self.data) - self.at:
            raise ValueError(f"{count} items are declared at byte {self.at}, the file is shorter")


def read_header(data: np.ndarray) -> Header:
    """The header of a file's bytes; ValueError where it is damaged."""
    cursor = _Cursor(data)
    if cursor.take(len(MAGIC)).tobytes() != MAGIC:
        raise ValueError("it does not begin with GGUF")
    if (version := cursor.number("<I")) not in VERSIONS:
        raise ValueError(f"version {version} is not supported; use one of {VERSIONS}")
    tensors, pairs = cursor.number("<Q"), cursor.number("<Q")
    cursor.fits(pairs, 13)  # length of a key, type, a byte
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        key = cursor.text()
        if key in metadata:
            raise ValueError(f"it has two values of {key!r}")
        metadata[key] = cursor.value(cursor.number("<I"))
    cursor.fits(tensors, 24)  # length of a name, dimensions, type, offset
    infos: dict[str, TensorInfo] = {}
    for _ in range(tensors):
        name, info = cursor.tensor()
        if name in infos:
            raise ValueError(f"it has two tensors {name!r}")
        infos[name] = info
    return Header(metadata, infos, cursor.at)


def read_metadata(path: Path) -> dict[str, Any]:
    """The metadata of a GGUF file, without its tensors."""
    return _read(path)[1].metadata


def _read(path: Path) -> tuple[np.ndarray, Header]:
    """A file's bytes, which are not read yet, and its header."""
    try:
        data = np.memmap(path, mode="r")
        return data, read_header(data)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged or cut short: {error}") from error


class GGUFFile:
    """A GGUF file of the llama architecture, dequantised to float32 row range by row range."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self._gguf = _package(path)
        self._data, header = _read(path)
        self.metadata = header.metadata
        architecture = self.value("general.architecture")
        if architecture != "llama":
            raise ValueError(
                f"{path}: GGUF architecture {architecture!r} is not supported; use 'llama'"
            )
        self._tensors: dict[str, tuple[np.ndarray, Any]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        start = self._aligned(header.end)
        for name, info in header.tensors.items():
            ours = _hf_name(name)
            self._tensors[ours] = self._located(name, info, start)
            self.shapes[ours] = info.shape

    def value(self, key: str, default: Any = None) -> Any:
        """One metadata value."""
        return self.metadata.get(key, default)

    def read(self, name: str, slices: Slices) -> np.ndarray:
        data, kind = self._tensors[name]
        with np.errstate(all="ignore"):  # infinite scales are not this file's to judge
            if data.ndim == 1:
                return self._gguf.dequantize(data, kind)[slices]
            rows = self._gguf.dequantize(data[slices[0]], kind)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            rows = self._half_split(rows)
        return rows[(slice(None), *slices[1:])]

    def config(self) -> dict[str, Any]:
        """The metadata as a config.json would say it."""

        def llama(key: str, default: Any = None) -> Any:
            return self.value(f"llama.{key}", default)

        heads = self._size("attention.head_count")
        embed = self._size("embedding_length")
        head_dim = self._size("attention.key_length", embed // heads)
        if llama("rope.scaling.type", "none") != "none" or "rope_freqs.weight" in self._tensors:
            raise ValueError(f"{self.where}: rope scaling in a GGUF file is not supported")
        if llama("rope.dimension_count", head_dim) != head_dim:
            raise ValueError(f"{self.where}: rope.dimension_count must be head_dim={head_dim}")
        embedding = self.shapes.get("model.embed_tokens.weight")
        if not embedding:
            raise ValueError(f"{self.where} lacks the tensor 'token_embd.weight'")
        return {
            "model_type": "llama",
            "num_hidden_layers": llama("block_count"),
            "hidden_size": embed,
            "num_attention_heads": heads,
            "num_key_value_heads": llama("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "intermediate_size": llama("feed_forward_length"),
            "vocab_size": embedding[0],
            "max_position_embeddings": llama("context_length"),
            # Stored in float32: its shortest spelling is the number the model was written with.
            "rms_norm_eps": self._shortest("llama.attention.layer_norm_rms_epsilon"),
            "rope_theta": llama("rope.freq_base", 10000.0),
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "bos_token_id": self.value("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.value("tokenizer.ggml.eos_token_id"),
        }

    def _size(self, key: str, default: int | None = None) -> int:
        found = self.value(f"llama.{key}", default)
        if type(found) is not int or found < 1:
            raise ValueError(f"{self.where}: llama.{key}={found!r}: must be 1 or more")
        return found

    def _shortest(self, key: str) -> Any:
        found = self.value(key)
        return float(str(np.float32(found))) if isinstance(found, float) else found

    def _aligned(self, end: int) -> int:
        """Where the tensors begin."""
        alignment = self.value("general.alignment", ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(
                f"{self.where}: general.alignment={alignment!r} must be a power of two"
            )
        return -(-end // alignment) * alignment

    def _located(self, name: str, info: TensorInfo, start: int) -> tuple[np.ndarray, Any]:
        """A tensor's bytes, a row of them a row of the tensor, and its type; nothing is read."""
        where = f"{self.where}: tensor {name!r}"
        try:
            kind = self._gguf.GGMLQuantizationType(info.kind)
            block, size = self._gguf.GGML_QUANT_SIZES[kind]
            self._gguf.dequantize(np.zeros((1, size), np.uint8), kind)
        except (ValueError, KeyError, NotImplementedError) as error:
            raise ValueError(f"{where} has type {info.kind}, which is not supported") from error
        *rows, width = info.shape or (1,)
        if width % block:
            raise ValueError(f"{where}: rows of {width} are no whole blocks of {block}")
        row_bytes = width // block * size
        begin = start + info.offset
        end = begin + math.prod(rows) * row_bytes
        if end > len(self._data):
            raise ValueError(
                f"{where} of shape {info.shape} ends at byte {end}, the file at {len(self._data)}"
            )
        return self._data[begin:end].reshape(*rows, row_bytes), kind

    def _half_split(self, rows: np.ndarray) -> np.ndarray:
        """Undoes llama.cpp's order of query and key rows in whole heads: pairs as neighbours."""
        heads, embed = (self._size(k) for k in ("attention.head_count", "embedding_length"))
        d = self._size("attention.key_length", embed // heads)
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
    parts = name.split(".", 3)
    if len(parts) < 4 or parts[0] != "blk":
        return GGUF_TO_HF.get(name, name)
    _, layer, part, kind = parts
    return f"model.layers.{layer}.{GGUF_TO_HF.get(part, part)}.{kind}"


def _package(path: Path) -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ValueError(
            f"reading {path} needs the gguf package: pip install gguf, or pip install hfjax[demo]"
        ) from error
    return gguf
