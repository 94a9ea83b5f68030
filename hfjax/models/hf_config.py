# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's config.json to ModelConfig and back; what we do not compute is refused by name."""

import functools
import logging
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from hfjax.models.llama import Head, ModelConfig
from hfjax.models.rope import KINDS, RopeScaling, inverse_frequencies

log = logging.getLogger(__name__)

Json = dict[str, Any]

# What transformers 5.24's config classes assume where config.json is silent.
DEFAULTS: dict[str, Json] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "qwen2": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "qwen3": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
}
DEFAULT_THETA = 10000.0  # transformers' RotaryEmbeddingConfigMixin.default_theta, all four families
DEFAULT_EPS = 1e-6  # rms_norm_eps of all four config classes
FAMILIES = tuple(DEFAULTS)
CLASS_PREFIX = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}

# Setting -> values under which it changes nothing; any other value is refused.
INERT: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1, 1.0, None),
    "quantization_config": (None,),
    "num_experts": (0, None),
    "num_local_experts": (0, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logits_scaling": (1, 1.0, None),
    "residual_multiplier": (1, 1.0, None),
    "embedding_multiplier": (1, 1.0, None),
    "clip_qkv": (None,),
}
ROPE_KEYS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_positions",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "attention_factor": "attention_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "truncate",
}

# Settings that are read, and the most they may be: a damaged file must not size anything.
MOST: dict[str, int] = {
    "num_hidden_layers": 10_000,
    "hidden_size": 1 << 20,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "intermediate_size": 1 << 24,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 31,
    "original_max_position_embeddings": 1 << 31,
    "sliding_window": 1 << 31,
}
MOST_NUMBER = 1e30  # float32 holds it with room to multiply
KINDS_OF: dict[str, tuple[type, ...]] = {
    "rms_norm_eps": (int, float),
    "rope_theta": (int, float),
    "max_window_layers": (int,),
    "tie_word_embeddings": (bool,),
    "use_sliding_window": (bool,),
    "layer_types": (list,),
    "rope_scaling": (dict,),
    "rope_parameters": (dict,),
}
WORDS: dict[type, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


def model_config(raw: Json, where: str, *, head_bias: bool = False) -> ModelConfig:
    """The ModelConfig of a config.json's content; `where` names the file in errors."""
    _check_kinds(raw, where)
    try:
        return _model_config(raw, where, head_bias)
    except ValueError as error:
        raise ValueError(str(error) if where in str(error) else f"{where}: {error}") from error


def _check_kinds(raw: Json, where: str) -> None:
    """Refuses settings of another type, and sizes that no model has; null is as left out."""
    for key, most in MOST.items():
        value = raw.get(key)
        if value is not None and (type(value) is not int or not 1 <= value <= most):
            raise ValueError(
                f"{where}: {key}={value!r:.60}: must be a whole number from 1 to {most}"
            )
    for key, kinds in KINDS_OF.items():
        value = raw.get(key)
        if value is not None and type(value) not in kinds:
            words = WORDS[kinds[-1]]
            raise ValueError(f"{where}: {key}={value!r:.60}: must be {words}")
    for key in ("rms_norm_eps", "rope_theta"):
        value = raw.get(key)
        if value is not None and not 0 < value < MOST_NUMBER:
            raise ValueError(f"{where}: {key}={value!r:.60}: must be above 0, below {MOST_NUMBER}")


def _model_config(raw: Json, where: str, head_bias: bool) -> ModelConfig:
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(
            f"{where}: model_type {family!r} is not supported; use one of {', '.join(FAMILIES)}"
        )
    _refuse_unsupported(raw, family, where)
    known = DEFAULTS[family] | raw

    def size(key: str) -> int:
        if known.get(key) is None:
            raise ValueError(f"{where}: {key} is missing; it must be a positive integer")
        return known[key]

    heads, embed = size("num_attention_heads"), size("hidden_size")
    if known.get("head_dim") is None and embed % heads:
        raise ValueError(
            f"{where}: num_attention_heads={heads} does not divide hidden_size={embed} "
            "and head_dim is missing"
        )
    theta, scaling = _rope(raw, size("max_position_embeddings"), where)
    head_dim = known.get("head_dim") or embed // heads
    _check_frequencies(head_dim, theta, scaling, where)
    return ModelConfig(
        layers=size("num_hidden_layers"),
        embed=embed,
        heads=heads,
        kv_heads=known.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        mlp=size("intermediate_size"),
        vocab=size("vocab_size"),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=float(known.get("rms_norm_eps") or DEFAULT_EPS),
        tied=bool(known.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        head_bias=head_bias,
        max_positions=size("max_position_embeddings"),
        family=family,
    )


def _check_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, where: str
) -> None:
    """Refuses rotary settings whose formula has no result."""
    try:
        with np.errstate(all="ignore"):
            found, factor = inverse_frequencies(head_dim, theta, scaling)
        usable = bool(np.isfinite(found).all()) and math.isfinite(factor)
    except (ArithmeticError, ValueError):
        usable = False
    if not usable:
        raise ValueError(f"{where}: rope_theta={theta} with {scaling} gives no rotary frequencies")


def hf_config(cfg: ModelConfig, head: Head, dtype: Any, source: Json | None) -> Json:
    """A config.json: the source's own keys where there is one, with what training may change."""
    raw = dict(source) if source else _fresh(cfg)
    spelled = [key for key in ("dtype", "torch_dtype") if key in raw] or ["torch_dtype"]
    raw |= {key: jnp.dtype(dtype).name for key in spelled}
    raw |= {"architectures": [architecture(cfg, head)], "vocab_size": cfg.vocab}
    raw["tie_word_embeddings"] = cfg.tied
    if head != "lm":
        raw.pop("num_labels", None)  # transformers derives it from id2label
        raw |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return raw


def architecture(cfg: ModelConfig, head: Head) -> str:
    """The transformers class that loads our head: its token classifier is the one with a bias."""
    if head == "lm":
        return CLASS_PREFIX[cfg.family] + "ForCausalLM"
    kind = "ForTokenClassification" if cfg.head_bias else "ForSequenceClassification"
    return CLASS_PREFIX[cfg.family] + kind


def _fresh(cfg: ModelConfig) -> Json:
    raw: Json = {
        "model_type": cfg.family,
        "hidden_act": "silu",
        "num_hidden_layers": cfg.layers,
        "hidden_size": cfg.embed,
        "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_dim,
        "intermediate_size": cfg.mlp,
        "max_position_embeddings": cfg.max_positions,
        "rms_norm_eps": cfg.norm_eps,
        "rope_theta": cfg.rope_theta,
    }
    if cfg.family == "mistral":
        raw["sliding_window"] = None  # its class assumes 4096 where the key is absent
    if cfg.rope_scaling is not None:
        values = {key: getattr(cfg.rope_scaling, field) for key, field in ROPE_KEYS.items()}
        keys = _keys_of(cfg.rope_scaling.kind)
        scaling = {key: values[key] for key in keys if values[key] is not None}
        raw["rope_scaling"] = {"rope_type": cfg.rope_scaling.kind} | scaling
    return raw


def _keys_of(kind: str) -> tuple[str, ...]:
    """The settings a scaling kind reads."""
    original = "original_max_position_embeddings"
    if kind == "linear":
        return ("factor",)
    if kind == "llama3":
        return ("factor", original, "low_freq_factor", "high_freq_factor")
    return tuple(key for key in ROPE_KEYS if key not in ("low_freq_factor", "high_freq_factor"))


def _refuse_unsupported(raw: Json, family: str, where: str) -> None:
    for key, legal in INERT.items():
        if key in raw and raw[key] not in legal:
            raise ValueError(
                f"{where}: {key}={raw[key]!r} is not supported; only {legal[0]!r} is computed here"
            )
    _refuse_sliding_window(DEFAULTS[family] | raw, family, where)
    dropout = {k: v for k, v in raw.items() if "dropout" in k and isinstance(v, int | float) and v}
    if dropout:
        _warn_once(f"{where}: dropout is not applied; {dropout} ignored")


@functools.cache
def _warn_once(message: str) -> None:
    """A file is read by every role."""
    log.warning("%s", message)


def _refuse_sliding_window(known: Mapping[str, Any], family: str, where: str) -> None:
    """Refuses a window that some layer uses and that is shorter than the longest row."""
    kinds = known.get("layer_types") or []
    other = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
    if other:
        raise ValueError(
            f"{where}: layer_types {other[:1]} are not supported; use 'full_attention'"
        )
    if family == "llama" and "sliding_attention" not in kinds:
        return
    if family in ("qwen2", "qwen3"):
        slides = "sliding_attention" in kinds if kinds else _qwen_slides(known)
        if not slides:
            return
    window, longest = known.get("sliding_window"), known.get("max_position_embeddings")
    if window is not None and longest is not None and window < longest:
        raise ValueError(
            f"{where}: sliding_window={window} is shorter than max_position_embeddings={longest} "
            "and windowed attention is not supported; rows of at most one window are exact: set "
            f"max_position_embeddings to {window} to train on such rows"
        )


def _qwen_slides(known: Mapping[str, Any]) -> bool:
    """Whether some layer at or above max_window_layers exists and windows are switched on."""
    on = bool(known.get("use_sliding_window", False))
    return on and (known.get("max_window_layers") or 0) < (known.get("num_hidden_layers") or 0)


def _rope(raw: Json, max_positions: int, where: str) -> tuple[float, RopeScaling | None]:
    """theta and scaling, from either spelling (rope_scaling beside rope_theta, rope_parameters)."""
    spelled = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    given: Json = dict(raw.get(spelled) or {})
    if any(isinstance(value, dict) for value in given.values()):
        raise ValueError(
            f"{where}: {spelled} differs between layers ({sorted(given)}), which is not supported"
        )
    theta = given.pop("rope_theta", None) or raw.get("rope_theta") or DEFAULT_THETA
    old_kind = given.pop("type", "default")
    kind = given.pop("rope_type", old_kind)
    turned = given.pop("partial_rotary_factor", None)
    if turned not in INERT["partial_rotary_factor"]:
        raise ValueError(f"{where}: partial_rotary_factor={turned} is not supported; only 1.0 is")
    if not _is_number(theta) or theta <= 0:
        raise ValueError(f"{where}: rope_theta={theta!r:.60}: must be a number above 0")
    if kind == "default":
        return float(theta), None
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(
            f"{where}: {spelled} kind {kind!r} is not supported; use 'default' or one of "
            f"{', '.join(KINDS)}"
        )
    return float(theta), _scaling(kind, given, raw, max_positions, f"{where}: {spelled}")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < MOST_NUMBER


def _scaling(kind: str, given: Json, raw: Json, max_positions: int, where: str) -> RopeScaling:
    unknown = sorted(set(given) - set(ROPE_KEYS))
    if unknown:
        raise ValueError(f"{where} has unknown keys {unknown}; {kind} reads {_keys_of(kind)}")
    for key, value in given.items():
        legal = type(value) is bool if key == "truncate" else _is_number(value)
        if value is not None and not legal:
            kind_of = "true or false" if key == "truncate" else "a number"
            raise ValueError(f"{where}: {key}={value!r:.60}: must be {kind_of}")
    values = {ROPE_KEYS[key]: value for key, value in given.items() if value is not None}
    # As transformers: a key beside the dict wins over the one inside it.
    original = raw.get("original_max_position_embeddings") or values.get("original_positions")
    values["original_positions"] = original or max_positions
    if "factor" not in values and kind == "yarn":
        values["factor"] = max_positions / values["original_positions"]
    required = _keys_of(kind) if kind == "llama3" else ("factor",)
    missing = [key for key in required if ROPE_KEYS[key] not in values]
    if missing:
        raise ValueError(f"{where} of kind {kind!r} lacks {', '.join(missing)}")
    return RopeScaling(kind=kind, **values)
