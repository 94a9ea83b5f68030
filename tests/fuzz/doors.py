# SPDX-License-Identifier: Apache-2.0
"""Every door of a run through which foreign files come: a good input, and what reads it."""

import dataclasses
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import strategies as st

from algorithms import grpo
from hfjax.algorithm import config_class
from hfjax.config import from_dict, setting_names, to_toml
from hfjax.engine.checkpoint import check_role, restore_role, start_save
from hfjax.engine.store import CheckpointStore
from hfjax.models.hf import load_config, load_params
from hfjax.prepare import prepare
from hfjax.run import default_config
from hfjax.rundir import began, find_run, open_directory
from hfjax.tokenizer import load_tokenizer
from meshes.layouts import replicated
from meshes.mesh import MeshShape, make_mesh
from tests.fixtures import placed, write_tiny_hf
from tests.fuzz.mutations import (
    Damage,
    damaged_bytes,
    damaged_json,
    damaged_jsonl,
    damaged_toml,
    other_columns,
)

NOW = datetime(2026, 1, 1)
CASE_S = 60.0  # longest refusal, on a machine that does much else
MESSAGES = [{"role": "user", "content": "t3 t4"}]
SETTINGS = tuple(setting_names(config_class(grpo)))


class Door(NamedTuple):
    """One kind of input."""

    write: Callable[[Path], list[Path]]  # a good one in an empty folder; the files to damage
    read: Callable[[Path], object]  # as a run reads it, until something would start
    damages: tuple[Damage, ...]


class Hung(BaseException):
    """A case took longer than CASE_S; no `except Exception` catches it."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises Hung in code that takes longer."""

    def overrun(number: int, frame: Any) -> None:
        raise Hung(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, overrun)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def settings(folder: Path, **more: Any) -> Any:
    """A small GRPO run over the folder's files."""
    table: dict[str, Any] = {
        "model": str(folder / "model"),
        "runtime": "local",
        "placement": str(folder / "placement.toml"),
        "out": str(folder / "run"),
        "steps": 4,
        "data": {"train": str(folder / "rows.jsonl"), "prompts_per_step": 4},
        "rollout": {"n": 2, "max_new_tokens": 4},
        "reward": {"function": "hfjax.arithmetic:sum_reward"},
    }
    return from_dict(config_class(grpo), table | more, where="test")


def write_run(folder: Path) -> None:
    """Model, rows, placement and settings of a run that could start."""
    write_tiny_hf(folder / "model")
    placed(folder / "placement.toml", MeshShape(), "actor", "reference")
    rows = [{"prompt": f"t{i} t3", "ground_truth": "t4", "data_source": "s"} for i in range(5)]
    rows += [{"prompt": MESSAGES, "ground_truth": 7}, {"prompt": [3, 4], "ground_truth": None}]
    rows[-1]["reward_model"] = {"ground_truth": "t5"}
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"prompt": ["t3 t4"] * 40, "ground_truth": ["t5"] * 40, "data_source": ["s"] * 40}
    columns["reward_model"] = [{"ground_truth": "a", "style": "rule"}] * 40
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "rows.parquet")
    (folder / "settings.toml").write_text(to_toml(settings(folder)))


def read_run(folder: Path, **more: Any) -> Any:
    """All that is checked before a process starts."""
    return prepare(grpo, settings(folder, **more), NOW)


def files(*names: str) -> Callable[[Path], list[Path]]:
    """A run's files, of which these are damaged."""

    def write(folder: Path) -> list[Path]:
        write_run(folder)
        return [folder / name for name in names]

    return write


def read_weights(folder: Path) -> None:
    """The check before the start, then every weight."""
    read_run(folder)
    model = folder / "model"
    load_params(model, load_config(model), "lm")


def sharded(name: str) -> Callable[[Path], list[Path]]:
    """A run whose weights lie in three files."""

    def write(folder: Path) -> list[Path]:
        write_run(folder)
        (folder / "model/model.safetensors").unlink()
        write_tiny_hf(folder / "model", shards=3)
        return [folder / "model" / name]

    return write


def read_tokenizer(folder: Path) -> None:
    """Texts, messages and what evaluation shows."""
    read_run(folder)
    tokenizer = load_tokenizer(folder / "model", NOW)
    answered = [*MESSAGES, {"role": "assistant", "content": "t5"}]
    for encode in (lambda: tokenizer.encode_chat(answered), lambda: tokenizer.encode("t3 \n x")):
        try:
            encode()
        except ValueError as error:  # the row is named where one is read
            raise ValueError(f"{folder / 'model'}: {error}") from error
    tokenizer.decode([0, 5, 95])


TEMPLATE = """{% for m in messages %}{{ m['role'] ~ ' ' ~ m.content | trim }}
{% if loop.last and add_generation_prompt %}{{ 't' * 2 ** 3 }}{% endif %}{% endfor %}"""


def write_template(folder: Path) -> list[Path]:
    write_run(folder)
    (folder / "model/chat_template.jinja").write_text(TEMPLATE)
    return [folder / "model/chat_template.jinja"]


def read_settings(folder: Path) -> None:
    prepare(grpo, default_config(grpo, "x", str(folder / "settings.toml")), NOW)


def write_gguf(folder: Path) -> list[Path]:
    """A GGUF model with its tokenizer."""
    gguf = pytest.importorskip("gguf")
    write_run(folder)
    file = folder / "model.gguf"
    writer = gguf.GGUFWriter(str(file), "llama")
    sizes = {"block_count": 1, "embedding_length": 32, "feed_forward_length": 64}
    for name, size in (sizes | {"context_length": 512, "attention.head_count": 4}).items():
        writer.add_uint32(f"llama.{name}", size)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    tokens = ["<|end|>", "t", *"0123456789", "Ġ", "t3", "t4"]
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "smollm")
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.token_type", [3] + [1] * (len(tokens) - 1))
    writer.add_array("tokenizer.ggml.merges", ["t 3", "t 4"])
    writer.add_uint32("tokenizer.ggml.eos_token_id", 0)
    writer.add_string("tokenizer.chat_template", TEMPLATE)
    rng = np.random.default_rng(0)
    shapes = {"attn_norm": (32,), "ffn_norm": (32,), "ffn_down": (32, 64)}
    shapes |= dict.fromkeys(["attn_q", "attn_k", "attn_v", "attn_output"], (32, 32))
    shapes |= dict.fromkeys(["ffn_gate", "ffn_up"], (64, 32))
    named = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    named |= {"token_embd.weight": (len(tokens), 32), "output_norm.weight": (32,)}
    for name, shape in named.items():
        values = rng.standard_normal(shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0 if len(shape) > 1 else None
        writer.add_tensor(name, gguf.quantize(values, kind) if kind else values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return [file]


def read_gguf(folder: Path) -> None:
    model = folder / "model.gguf"
    read_run(folder, model=str(model))
    load_params(model, load_config(model), "lm")


STATE = {"w": np.arange(24, dtype=np.float32).reshape(4, 6), "n": np.ones(3, np.int32)}


def write_checkpoint(folder: Path) -> list[Path]:
    """A whole checkpoint of one role."""
    write_run(folder)
    alone = replicated(make_mesh(jax.devices()[:1], MeshShape()))
    store = CheckpointStore(folder / "run/checkpoints")
    store.make_root()
    sums = start_save(store.begin(2) / "actor", jax.device_put(STATE, alone)).result()
    meta = {"step": 2, "data": read_run(folder).source.state_dict(), "memory": {}}
    store.commit(2, meta, {"actor": sums})
    return sorted(path for path in (folder / "run").rglob("*") if path.is_file())


def read_checkpoint(folder: Path) -> None:
    alone = replicated(make_mesh(jax.devices()[:1], MeshShape()))
    wanted = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype), sharding=alone), STATE
    )
    store = CheckpointStore(folder / "run/checkpoints")
    step = store.latest()
    if step is None:
        return  # a run that resumes is told that nothing whole is there
    meta = store.load_meta(step)
    read_run(folder).source.load_state_dict(meta["data"])
    check_role(store.path(step) / "actor", wanted)
    found = restore_role(store.path(step) / "actor", wanted)
    for name, value in STATE.items():  # what is accepted is what was saved
        np.testing.assert_array_equal(np.asarray(found[name]), value)


def write_directory(folder: Path) -> list[Path]:
    """A run's directory after two steps."""
    write_checkpoint(folder)
    out, config = folder / "run", settings(folder)
    open_directory(out, 2, config, read_run(folder).placement, about(folder, NOW))
    lines = [json.dumps({"training/global_step": step, "actor/loss": 0.5}) for step in (0, 1, 2)]
    (out / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (out / "samples.jsonl").write_text("\n".join(lines) + "\n")
    return [out / name for name in ("run.json", "settings.toml", "metrics.jsonl", "samples.jsonl")]


def read_directory(folder: Path) -> None:
    out, config = folder / "run", dataclasses.replace(settings(folder), resume=True)
    find_run(out, config, about(folder, began(out, resume=True)))


def about(folder: Path, now: datetime) -> dict[str, Any]:
    """What run.json says."""
    frozen = {"reference": "8c736521"}
    run = {"algorithm": "grpo", "model": str(folder / "model"), "frozen": frozen}
    return run | {"began": now.isoformat()}


BYTES, JSON = (damaged_bytes,), (damaged_json, damaged_bytes)
DOORS: dict[str, Door] = {
    "safetensors": Door(files("model/model.safetensors"), read_weights, BYTES),
    "shards": Door(sharded("model-00002-of-00003.safetensors"), read_weights, BYTES),
    "index": Door(sharded("model.safetensors.index.json"), read_weights, JSON),
    "config": Door(files("model/config.json"), read_weights, JSON),
    "generation config": Door(files("model/generation_config.json"), read_run, JSON),
    "tokenizer": Door(files("model/tokenizer.json"), read_tokenizer, JSON),
    "tokenizer config": Door(files("model/tokenizer_config.json"), read_tokenizer, JSON),
    "template": Door(write_template, read_tokenizer, BYTES),
    "jsonl": Door(files("rows.jsonl"), read_run, (damaged_jsonl, damaged_bytes)),
    "parquet": Door(
        files("rows.parquet"),
        lambda folder: read_run(
            folder, data={"train": str(folder / "rows.parquet"), "prompts_per_step": 4}
        ),
        (other_columns, damaged_bytes, damaged_bytes),
    ),
    "settings": Door(files("settings.toml"), read_settings, (damaged_toml, damaged_bytes)),
    "placement": Door(files("placement.toml"), read_run, (damaged_toml, damaged_bytes)),
    "gguf": Door(write_gguf, read_gguf, BYTES),
    "checkpoint": Door(write_checkpoint, read_checkpoint, BYTES),
    "run directory": Door(write_directory, read_directory, JSON),
}


def damages(door: Door, good: bytes) -> st.SearchStrategy[bytes]:
    """Damaged forms of a file; what is no JSON is damaged as bytes."""

    def fits(damage: Damage) -> bool:
        try:
            if damage is damaged_json:
                json.loads(good)
        except ValueError:
            return False
        return True

    return st.one_of([damage(good) for damage in door.damages if fits(damage)])


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file with size and time."""
    found = {}
    for root, _, names in os.walk(folder):
        for name in names:
            stat = os.stat(os.path.join(root, name))
            found[os.path.join(root, name)] = stat.st_size, stat.st_mtime_ns
    return found


def resident_bytes() -> int:
    """Memory of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def forget_peak() -> None:
    """Starts the kernel's count of the highest memory anew."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The highest memory since then."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("the kernel does not tell the highest memory")
