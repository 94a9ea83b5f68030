# SPDX-License-Identifier: Apache-2.0
"""Parity with transformers in float32: logits, gradients, greedy tokens, scores, exports."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from hfjax.models.hf import load_config, load_params, save_hf
from hfjax.models.llama import (
    KVCache,
    ModelConfig,
    Params,
    decode_step,
    hidden_states,
    lm_logits,
    prefill,
    scalar_head,
)
from tests.fixtures import write_lut, write_tiny_hf

pytestmark = pytest.mark.hf
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"rope_scaling": {"rope_type": "llama3"} | LLAMA3},
    "mistral": {"family": "mistral"},
    "qwen2": {"family": "qwen2", "head_dim": 8, "num_attention_heads": 5, "num_key_value_heads": 1},
    "qwen3": {
        "family": "qwen3",
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    "tied": {"tie_word_embeddings": True, "shards": 3},
}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"type": "linear", "factor": 4.0},
    "llama3": {"type": "llama3"} | LLAMA3,
    "llama3 by rope_type": {"rope_type": "llama3"} | LLAMA3,
    "yarn": YARN,
    "yarn untruncated": YARN | {"truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn attention factor": YARN | {"attention_factor": 1.5},
    "yarn mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
}
GREEDY = 32


def _theirs(path: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval()


def _ours(path: Path) -> tuple[ModelConfig, Params]:
    cfg = load_config(path)
    return cfg, load_params(path, cfg, "lm")


def _tokens(rows: int, width: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 96, (rows, width))


def _logits(cfg: ModelConfig, params: Params, tokens_BT: np.ndarray) -> jax.Array:
    return lm_logits(cfg, params, hidden_states(cfg, params, jnp.asarray(tokens_BT, jnp.int32)))


def _their_logits(model: Any, tokens_BT: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(tokens_BT)).logits.numpy()


@pytest.mark.parametrize("name", MODELS)
def test_logits(tmp_path: Path, name: str) -> None:
    path = write_tiny_hf(tmp_path, **MODELS[name])
    tokens_BT = _tokens(2, 11)
    found, wanted = _logits(*_ours(path), tokens_BT), _their_logits(_theirs(path), tokens_BT)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("name", MODELS)
def test_gradients(tmp_path: Path, name: str) -> None:
    """Of the mean log-probability; ours are written as a checkpoint to get their names."""
    path = write_tiny_hf(tmp_path / "in", **MODELS[name])
    cfg, params = _ours(path)
    tokens_BT = _tokens(2, 11)

    def mean_logp(params: Params) -> jax.Array:
        logp_BTV = jax.nn.log_softmax(_logits(cfg, params, tokens_BT)[:, :-1])
        return jnp.mean(jnp.take_along_axis(logp_BTV, jnp.asarray(tokens_BT)[:, 1:, None], -1))

    save_hf(jax.grad(mean_logp)(params), cfg, "lm", path, tmp_path / "gradients")
    found = load_file(tmp_path / "gradients" / "model.safetensors")
    model, tokens = _theirs(path), torch.tensor(tokens_BT)
    logp = torch.log_softmax(model(tokens).logits[:, :-1], -1)
    logp.gather(-1, tokens[:, 1:, None]).mean().backward()
    wanted = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys()
    for tensor, gradient in wanted.items():
        scale = 1e-5 * max(1.0, np.abs(gradient).max())
        np.testing.assert_allclose(found[tensor], gradient, atol=scale, err_msg=tensor)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens(tmp_path: Path, name: str) -> None:
    path = write_tiny_hf(tmp_path, eos=None, **MODELS[name])
    prompt_BP = _tokens(2, 7)
    wanted_BT = _theirs(path).generate(
        torch.tensor(prompt_BP), max_new_tokens=GREEDY, do_sample=False, pad_token_id=0
    )
    found_BR = _greedy(*_ours(path), jnp.asarray(prompt_BP, jnp.int32))
    np.testing.assert_array_equal(found_BR, wanted_BT[:, prompt_BP.shape[1] :].numpy())


def _greedy(cfg: ModelConfig, params: Params, prompt_BP: jax.Array) -> np.ndarray:
    B, P = prompt_BP.shape
    x_BPD, prompt = prefill(cfg, params, prompt_BP)
    rows = (cfg.layers, B, 1, cfg.kv_heads)
    cache = KVCache(
        k_LBKdS=jnp.zeros((*rows, cfg.head_dim, GREEDY)),
        v_LBKSd=jnp.zeros((*rows, GREEDY, cfg.head_dim)),
    )
    step = jax.jit(lambda *args: decode_step(cfg, params, *args))
    x_B1D, chosen = x_BPD[:, -1:], []
    for t in range(GREEDY):
        token_B1 = jnp.argmax(lm_logits(cfg, params, x_B1D), axis=-1)
        chosen.append(token_B1)
        x_B1D, cache = step(token_B1, prompt, jnp.full(B, P), cache, jnp.int32(t))
    return np.concatenate(chosen, axis=1)


@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_rope_at_position_100(tmp_path: Path, name: str) -> None:
    path = write_tiny_hf(tmp_path, head_dim=16, rope_scaling=SCALINGS[name])
    tokens_BT = _tokens(1, 101)
    found, wanted = _logits(*_ours(path), tokens_BT), _their_logits(_theirs(path), tokens_BT)
    scale = 2e-5 * np.abs(wanted).max()
    np.testing.assert_allclose(found[0, 100], wanted[0, 100], rtol=1e-5, atol=scale)
    plain = write_tiny_hf(tmp_path / "plain", head_dim=16)
    assert np.abs(_logits(*_ours(plain), tokens_BT)[0, 100] - wanted[0, 100]).max() > 100 * scale


@pytest.mark.parametrize("name", MODELS)
def test_what_transformers_saves_loads_and_what_we_save_loads_there(
    tmp_path: Path, name: str
) -> None:
    """Their newest config.json spelling in; our export of changed weights out."""
    _theirs(write_tiny_hf(tmp_path / "in", **MODELS[name])).save_pretrained(tmp_path / "theirs")
    cfg, params = _ours(tmp_path / "theirs")
    assert cfg == load_config(tmp_path / "in")
    trained = jax.tree.map(lambda x: x * 1.25, params)
    save_hf(trained, cfg, "lm", tmp_path / "theirs", tmp_path / "ours")
    tokens_BT = _tokens(2, 5)
    found = _their_logits(_theirs(tmp_path / "ours"), tokens_BT)
    wanted = np.asarray(_logits(cfg, trained, tokens_BT))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())
    assert np.abs(_their_logits(_theirs(tmp_path / "in"), tokens_BT) - wanted).max() > 0.1


def test_a_fresh_config_loads_there(tmp_path: Path) -> None:
    cfg, params = _ours(write_tiny_hf(tmp_path / "in", **MODELS["qwen3"]))
    save_hf(params, cfg, "lm", None, tmp_path / "out")
    found = _their_logits(_theirs(tmp_path / "out"), _tokens(2, 5))
    wanted = np.asarray(_logits(cfg, params, _tokens(2, 5)))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("bias", [None, 0.5])
def test_exported_scores(tmp_path: Path, bias: float | None) -> None:
    """The class named in the export computes our scores, its bias included."""
    source = write_lut(tmp_path / "in", scores=np.linspace(-1, 1, 16), bias=bias)
    cfg = load_config(source)
    params = load_params(source, cfg, "score")
    save_hf(params, cfg, "score", source, tmp_path / "out")
    (kind,) = transformers.AutoConfig.from_pretrained(tmp_path / "out").architectures
    model = getattr(transformers, kind).from_pretrained(tmp_path / "out").eval()
    tokens_BT = _tokens(1, 6) % 16
    found = _their_logits(model, tokens_BT)
    x_BTD = hidden_states(cfg, params, jnp.asarray(tokens_BT, jnp.int32))
    scores_BT = scalar_head(params, x_BTD)[..., None]
    np.testing.assert_allclose(found, scores_BT if bias else scores_BT[:, -1], atol=1e-5)
