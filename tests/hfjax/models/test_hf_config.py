# SPDX-License-Identifier: Apache-2.0
"""config.json: both spellings read alike, and what is not computed is refused by name."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from hfjax.models.hf_config import hf_config, model_config
from hfjax.models.llama import ModelConfig
from hfjax.models.rope import RopeScaling
from tests.fixtures import tiny_config

YARN = RopeScaling(kind="yarn", factor=8.0, original_positions=64, beta_fast=16.0)


def _raw(family: str = "llama", **over: Any) -> dict[str, Any]:
    raw = {
        "model_type": family,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "sliding_window": None,
    }
    return {key: value for key, value in (raw | over).items() if value != "absent"}


def _read(family: str = "llama", **over: Any) -> ModelConfig:
    return model_config(_raw(family, **over), "config.json")


def test_old_and_new_spelling_read_alike() -> None:
    llama3 = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    wanted = _read(rope_scaling={"rope_type": "llama3"} | llama3)
    assert wanted.rope_theta == 5000.0
    assert wanted.rope_scaling == RopeScaling(kind="llama3", factor=8.0, original_positions=64)
    assert _read(rope_scaling={"type": "llama3"} | llama3) == wanted
    new = {"rope_type": "llama3", "rope_theta": 5000.0} | llama3
    assert _read(rope_theta="absent", rope_parameters=new) == wanted


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_what_is_absent_is_as_transformers_assumes(family: str) -> None:
    cfg = _read(family, rope_theta="absent", rms_norm_eps="absent", num_key_value_heads=None)
    assert (cfg.rope_theta, cfg.norm_eps, cfg.kv_heads) == (10000.0, 1e-6, 4)
    assert cfg.head_dim == (128 if family == "qwen3" else 8)
    assert (cfg.qkv_bias, cfg.qk_norm) == (family == "qwen2", family == "qwen3")


def test_default_rope_is_no_scaling() -> None:
    assert _read(rope_scaling={"rope_type": "default"}).rope_scaling is None
    assert _read(rope_parameters={"rope_type": "default", "rope_theta": 7.0}).rope_theta == 7.0


def test_yarn_takes_the_pretraining_length_and_factor_from_beside_it() -> None:
    cfg = _read(original_max_position_embeddings=128, rope_scaling={"type": "yarn", "factor": None})
    assert cfg.rope_scaling == RopeScaling(kind="yarn", factor=4.0, original_positions=128)


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"family": "gpt2"}, "'gpt2' is not supported; use one of llama, mistral, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"pretraining_tp": 2}, "pretraining_tp=2"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_experts": 8}, "num_experts=8"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"family": "mistral", "sliding_window": 256}, "sliding_window=256 .*to 256"),
        (
            {"family": "mistral", "sliding_window": "absent", "max_position_embeddings": 8192},
            "4096",
        ),
        (
            {
                "family": "qwen2",
                "use_sliding_window": True,
                "sliding_window": 256,
                "max_window_layers": 2,
            },
            "sliding_window=256",
        ),
        (
            {
                "family": "qwen3",
                "layer_types": ["full_attention", "sliding_attention"],
                "sliding_window": 256,
            },
            "sliding_window=256",
        ),
        ({"layer_types": ["linear_attention"]}, "linear_attention.*full_attention"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'.*linear, llama3"),
        ({"rope_scaling": {"type": "spiral", "factor": 2.0}}, "'spiral'.*linear, llama3, yarn"),
        ({"rope_scaling": {"type": "linear"}}, "lacks factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "lacks low_freq_factor, high_freq"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "beta": 1}},
            r"unknown keys \['beta'\]",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differs between layers"),
        ({"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}}, "partial_rotary"),
        ({"hidden_size": "absent"}, "hidden_size is missing"),
        ({"hidden_size": 30}, "num_attention_heads=4 does not divide hidden_size=30"),
    ],
)
def test_what_is_not_computed_is_refused(over: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _read(**over)


@pytest.mark.parametrize(
    "over",
    [
        {"family": "qwen2", "use_sliding_window": False, "sliding_window": 64},
        {
            "family": "qwen2",
            "use_sliding_window": True,
            "sliding_window": 64,
            "max_window_layers": 3,
        },
        {"family": "mistral", "sliding_window": 512},
        {"family": "llama", "sliding_window": 64},
    ],
)
def test_a_window_that_no_row_meets_is_no_obstacle(over: dict[str, Any]) -> None:
    assert _read(**over).max_positions == 512


def test_dropout_is_ignored_with_one_note(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        cfg = _read(attention_dropout=0.1, hidden_dropout=0.2, resid_dropout=0.0)
    assert cfg == _read()
    (record,) = caplog.records
    assert "'attention_dropout': 0.1, 'hidden_dropout': 0.2" in record.getMessage()


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "scaling",
    [
        None,
        RopeScaling(kind="linear", factor=2.0, original_positions=512),
        RopeScaling(kind="llama3", factor=8.0, original_positions=64, low_freq_factor=2.0),
        YARN,
    ],
)
def test_a_config_survives_the_round_trip(family: str, scaling: RopeScaling | None) -> None:
    cfg = tiny_config(
        family=family,
        rope_scaling=scaling,
        max_positions=512,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    )
    written = json.loads(json.dumps(hf_config(cfg, "lm", "bfloat16", None)))
    assert model_config(written, "config.json") == cfg
    assert written["torch_dtype"] == "bfloat16"


def test_the_source_keeps_its_keys_and_its_spelling() -> None:
    raw = _raw(dtype="float32", eos_token_id=[1, 9], use_cache=True)
    written = hf_config(model_config(raw, "config.json"), "lm", "bfloat16", raw)
    changed = {"dtype": "bfloat16", "architectures": ["LlamaForCausalLM"]}
    assert written == raw | changed | {"tie_word_embeddings": False}


def test_any_config_file_can_be_planned_with(tmp_path: Path) -> None:
    from hfjax.models.hf import load_config

    file = tmp_path / "llama3-8b.json"
    file.write_text(json.dumps(_raw()))
    assert load_config(file) == _read()
