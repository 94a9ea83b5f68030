# SPDX-License-Identifier: Apache-2.0
"""Attention in float32 scores: causal over rows, and one token over its prompt and its cache."""

import jax
import jax.numpy as jnp
from flax import struct

K_MASK = -1e30  # finite: rows of -inf give NaN gradients


class KVCache(struct.PyTreeNode):
    """Keys and values of every layer; caches of n samples a prompt carry n after B.

    Slots stand last in the keys: decoding on a CPU read them 12 times faster so.
    """

    k_LBKdS: jax.Array
    v_LBKSd: jax.Array


def attend_causal(q_BTHd: jax.Array, k_BTKd: jax.Array, v_BTKd: jax.Array) -> jax.Array:
    """Attention of every position to itself and the ones before it."""
    B, T, H, d = q_BTHd.shape
    K = k_BTKd.shape[2]
    q_BTKGd = q_BTHd.reshape(B, T, K, H // K, d)
    scores_BKGTS = einsum_f32("BTKGd,BSKd->BKGTS", q_BTKGd, k_BTKd) * d**-0.5
    seen_TS = jnp.tri(T, dtype=bool)
    p_BKGTS = jax.nn.softmax(jnp.where(lift(seen_TS, 5), scores_BKGTS, K_MASK), axis=-1)
    mixed_BTKGd = jnp.einsum("BKGTS,BSKd->BTKGd", p_BKGTS.astype(v_BTKd.dtype), v_BTKd)
    return mixed_BTKGd.reshape(B, T, H, d)


def attend_cached(
    q_BnHd: jax.Array,
    k_BnKd: jax.Array,
    v_BnKd: jax.Array,
    prompt: KVCache,
    prompt_length_B: jax.Array,
    own: KVCache,
    t: jax.Array,
) -> jax.Array:
    """One layer's softmax over the shared prompt, the row's earlier slots and the token itself."""
    B, n, H, d = q_BnHd.shape
    K, P, S = k_BnKd.shape[2], prompt.k_LBKdS.shape[-1], own.k_LBKdS.shape[-1]
    q_BnKGd = q_BnHd.reshape(B, n, K, H // K, d)
    in_prompt_BP = jnp.arange(P)[None] < prompt_length_B[:, None]
    # with K before n the shared cache is one batched matmul; XLA's CPU refuses the other in bf16
    shared_BKnGP = einsum_f32("BKnGd,BKdP->BKnGP", q_BnKGd.swapaxes(1, 2), prompt.k_LBKdS)
    shared_BnKGP = shared_BKnGP.swapaxes(1, 2)
    earlier_BnKGS = einsum_f32("BnKGd,BnKdS->BnKGS", q_BnKGd, own.k_LBKdS)
    itself_BnKG = einsum_f32("BnKGd,BnKd->BnKG", q_BnKGd, k_BnKd)
    parts = [
        jnp.where(in_prompt_BP[:, None, None, None], shared_BnKGP * d**-0.5, K_MASK),
        jnp.where(lift(jnp.arange(S) < t, 5), earlier_BnKGS * d**-0.5, K_MASK),
        itself_BnKG[..., None] * d**-0.5,
    ]
    p = jax.nn.softmax(jnp.concatenate(parts, axis=-1), axis=-1).astype(v_BnKd.dtype)
    from_prompt_BKnGd = einsum_f32("BKnGP,BKPd->BKnGd", p[..., :P].swapaxes(1, 2), prompt.v_LBKSd)
    mixed_BnKGd = (
        from_prompt_BKnGd.swapaxes(1, 2)
        + einsum_f32("BnKGS,BnKSd->BnKGd", p[..., P : P + S], own.v_LBKSd)
        + einsum_f32("BnKG,BnKd->BnKGd", p[..., -1], v_BnKd)
    )
    return mixed_BnKGd.astype(q_BnHd.dtype).reshape(B, n, H, d)


def einsum_f32(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Matmul in the operands' dtype, accumulated and returned in float32."""
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def lift(x: jax.Array, ndim: int) -> jax.Array:
    """x with leading axes of size 1 (rank promotion is an error in the tests)."""
    return x.reshape((1,) * (ndim - x.ndim) + x.shape)
