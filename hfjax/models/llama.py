# SPDX-License-Identifier: Apache-2.0
"""The Llama family: one Linen module declares every parameter once, pure functions compute.

Letters, capitals for sizes, in every suffix and einsum of the project:
  B sequences (rows)   P prompt width      R response width   T = P + R     S key slots
  V vocabulary         D model width       H query heads      K kv heads    G = H / K
  d width of a head    F ffn width         L layers           M micro-batches
  N devices            n samples a prompt
  W = P + n R          a prefix of P slots and n responses behind it (attention.Prefix)
V' (the padded vocabulary) is written V too. Rows are left-aligned: a row's tokens start at index 0
and padding follows them, so causal attention alone keeps padding out of every valid position.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from hfjax.models.attention import (
    K_MASK,
    KVCache,
    Prefix,
    attend_cached,
    attend_causal,
    attend_packed,
    einsum_f32,
    lift,
)
from hfjax.models.rope import RopeScaling, rotate, sin_cos
from meshes.layouts import BATCH, SEQUENCE, VOCAB

GATHER = "custom_vjp_call"  # the primitive that a Run's `weights` shows where they are gathered
INIT_STDDEV = 0.02  # Hugging Face's initializer_range

Head = Literal["lm", "value", "score"]
Params = dict[str, Any]
Constrain = Callable[[jax.Array, tuple[str | None, ...]], jax.Array]
RESIDUAL = (BATCH, SEQUENCE, None)  # logical axes of x_BTD
LOGITS = (BATCH, None, VOCAB)  # logical axes of logits_BTV


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and variants of one decoder."""

    layers: int
    embed: int  # D
    heads: int  # H
    kv_heads: int  # K, divides heads
    head_dim: int  # d, even; need not be embed / heads
    mlp: int  # F
    vocab: int  # V, without padding
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tied: bool = False  # logits use the embedding
    qkv_bias: bool = False  # Qwen2
    qk_norm: bool = False  # Qwen3: RMS norm of each query and key head before the rotation
    head_bias: bool = False  # the value or score head has a bias (found in the checkpoint)
    max_positions: int = 8192
    vocab_multiple: int = 1  # parameters hold vocab rounded up to a multiple of this
    family: str = "llama"  # Hugging Face model_type, for export

    def __post_init__(self) -> None:
        sizes = ("layers", "embed", "heads", "kv_heads", "head_dim", "mlp", "vocab")
        for name in (*sizes, "vocab_multiple", "max_positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads={self.kv_heads} does not divide heads={self.heads}; "
                "each key/value head serves the same number of query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even (rotary pairs), got {self.head_dim}")

    @property
    def padded_vocab(self) -> int:
        return math.ceil(self.vocab / self.vocab_multiple) * self.vocab_multiple


class Layers(nn.Module):
    """Declares the stacked parameters of all blocks."""

    cfg: ModelConfig
    dtype: Any

    @nn.compact
    def __call__(self) -> None:
        c = self.cfg
        normal, ones, zeros = _initializers()
        L, D, F = {"layers": c.layers}, {"embed": c.embed}, {"mlp": c.mlp}
        N, d = {"norm": c.embed}, {"head_dim": c.head_dim}
        H, K = {"heads": c.heads}, {"kv_heads": c.kv_heads}
        declare = _declarer(self, self.dtype)
        declare("attn_norm", ones, L, N)
        declare("mlp_norm", ones, L, N)
        declare("wq", normal, L, D, H, d)
        declare("wk", normal, L, D, K, d)
        declare("wv", normal, L, D, K, d)
        declare("wo", normal, L, H, d, D)
        declare("w_gate", normal, L, D, F)
        declare("w_up", normal, L, D, F)
        declare("w_down", normal, L, F, D)
        if c.qkv_bias:
            declare("bq", zeros, L, H, d)
            declare("bk", zeros, L, K, d)
            declare("bv", zeros, L, K, d)
        if c.qk_norm:
            declare("q_norm", ones, L, d)
            declare("k_norm", ones, L, d)


class Llama(nn.Module):
    """Declares every parameter of a decoder with its head: name, logical axes with sizes, init."""

    cfg: ModelConfig
    head: Head
    dtype: Any

    @nn.compact
    def __call__(self) -> None:
        c = self.cfg
        normal, ones, zeros = _initializers()
        D, V = {"embed": c.embed}, {"vocab": c.padded_vocab}
        declare = _declarer(self, self.dtype)
        declare("embed", _zero_phantoms(normal, c.vocab, axis=0), V, D)
        Layers(c, self.dtype, name="layers")()
        declare("final_norm", ones, {"norm": c.embed})
        if self.head == "lm":
            if not c.tied:
                declare("lm_head", _zero_phantoms(normal, c.vocab, axis=1), D, V)
            return
        declare("value_head", zeros, D)
        if c.head_bias:
            declare("value_bias", zeros)


def _initializers() -> tuple[Callable, Callable, Callable]:
    return nn.initializers.normal(INIT_STDDEV), nn.initializers.ones, nn.initializers.zeros


def _declarer(module: nn.Module, dtype: Any) -> Callable[..., None]:
    def declare(name: str, init: Callable, *axes: dict[str, int]) -> None:
        names = tuple(axis for one in axes for axis in one)
        sizes = tuple(size for one in axes for size in one.values())
        module.param(name, nn.with_logical_partitioning(init, names), sizes, dtype)

    return declare


def _zero_phantoms(init: Callable, vocab: int, *, axis: int) -> Callable:
    """Draws the real vocabulary only and appends zeros, so that padding changes no drawn number."""

    def padded(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        real = (*shape[:axis], vocab, *shape[axis + 1 :])
        missing = [(0, whole - drawn) for whole, drawn in zip(shape, real, strict=True)]
        return jnp.pad(init(key, real, dtype), missing)

    return padded


def abstract_params(
    cfg: ModelConfig, head: Head, dtype: Any = jnp.float32
) -> tuple[Params, Params]:
    """Shapes with dtypes, and logical axes (tuples of names), of every parameter."""
    boxed = jax.eval_shape(_module(cfg, head, dtype).init, jax.random.key(0))["params"]
    axes = jax.tree.map(lambda box: box.names, boxed, is_leaf=_is_box)
    return nn.unbox(boxed), axes


def init_params(
    cfg: ModelConfig,
    head: Head,
    key: jax.Array,
    shardings: Any = None,
    dtype: Any = jnp.float32,
) -> Params:
    """Random parameters born in their shards, equal for every sharding; a scalar head is zero."""
    module = _module(cfg, head, dtype)

    def init(key: jax.Array) -> Params:
        return nn.unbox(module.init(key)["params"])

    return jax.jit(init, out_shardings=shardings)(key)


def _module(cfg: ModelConfig, head: Head, dtype: Any) -> Llama:
    if head not in ("lm", "value", "score"):
        raise ValueError(f"head={head!r} is unknown; use 'lm', 'value' or 'score'")
    return Llama(cfg, head, dtype)


def _is_box(leaf: Any) -> bool:
    return isinstance(leaf, nn.LogicallyPartitioned)


def unconstrained(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    """The default of `constrain`: leaves the layout of activations to the compiler."""
    return x


def as_it_is(x: Any) -> Any:
    """The default of a Run's functions."""
    return x


@dataclasses.dataclass(frozen=True)
class Run:
    """How a forward pass runs on a mesh; by default the compiler decides (hfjax.engine.replicas).

    With stacked weights the rows are (R, B/R, ...), R replicas, and `each` maps over them.
    """

    rows: Callable[[jax.Array], jax.Array] = as_it_is  # (B, ...) to those of each replica
    each: Callable[[Callable], Callable] = as_it_is  # maps a function over the replicas
    merge: Callable[[jax.Array], jax.Array] = as_it_is  # undoes `rows`
    weights: Callable[[Params], Params] = as_it_is  # of one layer, ready to compute with
    gathers: bool = False  # `weights` moves them: it is done again in the backward pass
    constrain: Constrain = unconstrained  # within `each`
    layers: Callable[..., tuple[jax.Array, Any]] = jax.lax.scan  # a body over all layers


PLAIN = Run()


def hidden_states(
    cfg: ModelConfig,
    params: Params,
    tokens_BT: jax.Array,
    *,
    prefix: Prefix | None = None,
    remat: str = "none",
    run: Run = PLAIN,
) -> jax.Array:
    """Final-normed hidden states x_BTD, causal from index 0; rows and result are those of `run`.

    With `prefix`, whose rows are those of `run` too, tokens and result are packed: (B, W).
    """

    def layer(x_BTD: jax.Array, w: Params, turn: Any, prefix: Prefix | None) -> jax.Array:
        attend = attend_causal if prefix is None else partial(attend_packed, prefix)
        x_BTD, _ = block(cfg, w, x_BTD, in_order if turn is None else turn, attend)
        return run.constrain(x_BTD, RESIDUAL)

    def body(x_BTD: jax.Array, w: Params) -> tuple[jax.Array, None]:
        return run.each(layer)(x_BTD, run.weights(w), turn, prefix), None

    def embedded(tokens_BT: jax.Array, w: Params) -> jax.Array:
        return run.constrain(embed_tokens(w, tokens_BT), RESIDUAL)

    def normed(x_BTD: jax.Array, w: Params) -> jax.Array:
        return final_norm(cfg, w, x_BTD)

    def turned(prefix: Prefix) -> tuple[jax.Array, jax.Array]:
        return _rotation(cfg, prefix.positions(T))

    T = tokens_BT.shape[-1]
    in_order = _rotation(cfg, jnp.arange(T)[None])
    turn = None if prefix is None else run.each(turned)(prefix)
    x_BTD = run.each(embedded)(tokens_BT, run.weights({"embed": params["embed"]}))
    x_BTD, _ = run.layers(rematerialised(body, remat, run), x_BTD, params["layers"])
    return run.each(normed)(x_BTD, run.weights({"final_norm": params["final_norm"]}))


def rematerialised(body: Callable, remat: str, run: Run = PLAIN) -> Callable:
    """The scanned block saving all ('none'), matmuls with weights ('dots') or nothing ('layer').

    Gathered weights are never saved.
    """
    stacked = int(run.each is not as_it_is)  # the stack's axis is a batch dimension of every matmul

    def everything(primitive: Any, *_: Any, **__: Any) -> bool:
        return primitive.name != GATHER

    def dots(primitive: Any, *_: Any, **parameters: Any) -> bool:
        if primitive.name != "dot_general":
            return False
        _, (batch, _) = parameters["dimension_numbers"]
        return len(batch) <= stacked

    if remat == "none" and not run.gathers:
        return body
    policies = {"none": everything, "dots": dots, "layer": None}
    if remat not in policies:
        raise ValueError(f"remat={remat!r} is unknown; use 'none', 'dots' or 'layer'")
    return jax.checkpoint(body, policy=policies[remat], prevent_cse=False)


def lm_logits(
    cfg: ModelConfig, params: Params, x: jax.Array, *, constrain: Constrain = unconstrained
) -> jax.Array:
    """Float32 logits (..., V') of x (..., D); phantom columns hold K_MASK and so no probability."""
    if cfg.tied:
        logits = einsum_f32("...D,VD->...V", x, params["embed"])
    else:
        logits = einsum_f32("...D,DV->...V", x, params["lm_head"])
    if cfg.padded_vocab > cfg.vocab:
        real_V = jnp.arange(cfg.padded_vocab) < cfg.vocab
        logits = jnp.where(lift(real_V, logits.ndim), logits, K_MASK)
    return constrain(logits, LOGITS) if logits.ndim == len(LOGITS) else logits


def scalar_head(params: Params, x: jax.Array) -> jax.Array:
    """Float32 value or score (...) of x (..., D), with the head's bias where it has one."""
    weight = params["value_head"].astype(jnp.float32)
    scalar = jnp.einsum("...D,D->...", x.astype(jnp.float32), weight)
    return scalar + params["value_bias"].astype(jnp.float32) if "value_bias" in params else scalar


def prefill(
    cfg: ModelConfig, params: Params, tokens_BP: jax.Array, *, constrain: Constrain = unconstrained
) -> tuple[jax.Array, KVCache]:
    """Final-normed hidden states x_BPD of the prompts, and their keys and values (slots = P)."""
    x_BPD = constrain(embed_tokens(params, tokens_BP), RESIDUAL)
    x_BPD, cache = prefill_layers(cfg, params["layers"], x_BPD, constrain=constrain)
    return final_norm(cfg, params, x_BPD), cache


def prefill_layers(
    cfg: ModelConfig, layers: Params, x_BPD: jax.Array, *, constrain: Constrain = unconstrained
) -> tuple[jax.Array, KVCache]:
    """`layers`, all of them or a stage's, over whole prompts; also their keys and values."""

    def body(x_BPD: jax.Array, w: Params) -> tuple[jax.Array, KVCache]:
        x_BPD, (k_BPKd, v_BPKd) = block(cfg, w, x_BPD, turn, attend_causal)
        cache = KVCache(k_LBKdS=k_BPKd.transpose(0, 2, 3, 1), v_LBKSd=v_BPKd.transpose(0, 2, 1, 3))
        return constrain(x_BPD, RESIDUAL), cache

    turn = _rotation(cfg, jnp.arange(x_BPD.shape[1])[None])
    return jax.lax.scan(body, x_BPD, layers)


def decode_step(
    cfg: ModelConfig,
    params: Params,
    tokens_Bn: jax.Array,
    prompt: KVCache,
    prompt_length_B: jax.Array,
    cache: KVCache,
    t: jax.Array,
) -> tuple[jax.Array, KVCache]:
    """Final-normed x_BnD of the response tokens number t, and the cache with their keys and values.

    One slot of `cache` (k_LBnKdS, v_LBnKSd) is written after the loop over layers, which only
    reads it, so nothing copies it.
    """
    x_BnD = embed_tokens(params, tokens_Bn)
    x_BnD, (k_LBnKd, v_LBnKd) = decode_layers(
        cfg, params["layers"], x_BnD, prompt, prompt_length_B, cache, t
    )
    cache = KVCache(
        k_LBKdS=jax.lax.dynamic_update_slice_in_dim(cache.k_LBKdS, k_LBnKd[..., None], t, 5),
        v_LBKSd=jax.lax.dynamic_update_slice_in_dim(cache.v_LBKSd, v_LBnKd[..., None, :], t, 4),
    )
    return final_norm(cfg, params, x_BnD), cache


def decode_layers(
    cfg: ModelConfig,
    layers: Params,
    x_BnD: jax.Array,
    prompt: KVCache,
    prompt_length_B: jax.Array,
    cache: KVCache,
    t: jax.Array,
    *,
    of_layer: Callable[[KVCache], KVCache] = as_it_is,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """`layers` over the response tokens number t; also their keys and values (L, B, n, K, d).

    Row (b, i) sees slots < prompt_length_b of prompt b, which its n samples share, its own response
    slots < t of `cache`, and itself, at position prompt_length_b + t. `of_layer` finds these rows
    in one layer of caches that hold more.
    """

    def body(x_BnD: jax.Array, layer: tuple[Params, KVCache, KVCache]) -> tuple[jax.Array, Any]:
        w, prompt, own = layer[0], of_layer(layer[1]), of_layer(layer[2])

        def attend(q_BnHd: jax.Array, k_BnKd: jax.Array, v_BnKd: jax.Array) -> jax.Array:
            return attend_cached(q_BnHd, k_BnKd, v_BnKd, prompt, prompt_length_B, own, t)

        return block(cfg, w, x_BnD, turn, attend)

    turn = _rotation(cfg, (prompt_length_B + t)[:, None])
    return jax.lax.scan(body, x_BnD, (layers, prompt, cache))


def final_norm(cfg: ModelConfig, params: Params, x: jax.Array) -> jax.Array:
    """What the head reads, of what the last layer gives."""
    return rms_norm(x, params["final_norm"], cfg.norm_eps)


def embed_tokens(params: Params, tokens: jax.Array) -> jax.Array:
    """Embeddings (..., D) of tokens (...)."""
    return params["embed"][tokens]


def block(
    cfg: ModelConfig,
    w: Params,
    x: jax.Array,
    turn: tuple[jax.Array, jax.Array],
    attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """One layer, weights w, on x (..., D); also its rotated keys and its values (..., K, d)."""
    h = rms_norm(x, w["attn_norm"], cfg.norm_eps)
    q, k, v = project(cfg, w, h)
    q, k = rotate(q, *turn), rotate(k, *turn)
    x = x + jnp.einsum("...Hd,HdD->...D", attend(q, k, v), w["wo"])
    h = rms_norm(x, w["mlp_norm"], cfg.norm_eps)
    gate = jax.nn.silu(jnp.einsum("...D,DF->...F", h, w["w_gate"]))
    up = jnp.einsum("...D,DF->...F", h, w["w_up"])
    return x + jnp.einsum("...F,FD->...D", gate * up, w["w_down"]), (k, v)


def project(cfg: ModelConfig, w: Params, h: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries (..., H, d), keys and values (..., K, d) before the rotation."""
    q = jnp.einsum("...D,DHd->...Hd", h, w["wq"])
    k = jnp.einsum("...D,DKd->...Kd", h, w["wk"])
    v = jnp.einsum("...D,DKd->...Kd", h, w["wv"])
    if cfg.qkv_bias:
        q, k, v = (y + lift(w[b], y.ndim) for y, b in ((q, "bq"), (k, "bk"), (v, "bv")))
    if cfg.qk_norm:
        q, k = rms_norm(q, w["q_norm"], cfg.norm_eps), rms_norm(k, w["k_norm"], cfg.norm_eps)
    return q, k, v


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x over its root mean square in float32, times weight (the last axis), in x's dtype."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return x32.astype(x.dtype) * lift(weight, x.ndim)


def _rotation(cfg: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    return sin_cos(positions, cfg.head_dim, cfg.rope_theta, cfg.rope_scaling)
