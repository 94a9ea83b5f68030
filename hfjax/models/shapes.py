# SPDX-License-Identifier: Apache-2.0
"""Sizes of models that are known by name, to plan for without their files."""

from pathlib import Path
from typing import Any

from hfjax.models.hf import load_config, resolve_model
from hfjax.models.llama import ModelConfig
from meshes.toml import did_you_mean


def _llama(layers: int, embed: int, heads: int, kv_heads: int, mlp: int) -> ModelConfig:
    """A Llama 2 shape."""
    sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": 128, "mlp": mlp}
    return ModelConfig(layers=layers, embed=embed, **sizes, vocab=32000, rope_theta=1e4)


SHAPES = {  # maxtext configs/models/llama2-*.yml; config.json of CodeLlama-34b-hf
    "llama2-7b": _llama(32, 4096, 32, 32, 11008),
    "llama2-13b": _llama(40, 5120, 40, 40, 13824),
    "codellama-34b": _llama(48, 8192, 64, 8, 22016),
    "llama2-70b": _llama(80, 8192, 64, 8, 28672),
}


def model_shape(name: str, setting: str = "model") -> ModelConfig:
    """Sizes by a name of SHAPES, a config.json, or anything that holds a model's files."""
    if name in SHAPES:
        return SHAPES[name]
    if name.endswith(".json") and Path(name).is_file():
        return load_config(name)
    try:
        return load_config(resolve_model(name, setting))
    except ValueError as error:
        near = did_you_mean(name, SHAPES)
        names = ", ".join(SHAPES)
        raise ValueError(f"{error}; or a shape by name{near}: {names}") from error
