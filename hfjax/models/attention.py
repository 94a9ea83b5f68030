# SPDX-License-Identifier: Apache-2.0
"""Attention in float32 scores: causal over rows, packed or not, and of one token over its cache."""

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


class Prefix(struct.PyTreeNode):
    """How rows of W = P + n R slots are cut: a prefix, then n responses that see it and themselves.

    A response's first token follows the prefix's last, wherever its slot is.
    """

    length_B: jax.Array  # tokens of the prefix, in the first of its slots
    slots: int = struct.field(pytree_node=False)  # P
    n: int = struct.field(pytree_node=False)

    def positions(self, W: int) -> jax.Array:
        """Of every slot (B, W), as in a row of its own."""
        B, R = len(self.length_B), (W - self.slots) // self.n
        prefix_BP = jnp.broadcast_to(jnp.arange(self.slots), (B, self.slots))
        response_BR = self.length_B[:, None] + jnp.arange(R)[None]
        return jnp.concatenate([prefix_BP, jnp.tile(response_BR, (1, self.n))], axis=1)

    def responses(self, x_BW: jax.Array) -> jax.Array:
        """(B, W, ...) without the prefix: (B, n, R, ...)."""
        B, rest = len(x_BW), x_BW.shape[2:]
        return x_BW[:, self.slots :].reshape(B, self.n, -1, *rest)

    def before(self, x_BWD: jax.Array) -> jax.Array:
        """Of what stands before each response token: (B, n, R, D); before the first the prefix."""
        at_B11 = jnp.maximum(self.length_B - 1, 0)[:, None, None]
        last_B11D = jnp.take_along_axis(x_BWD[:, : self.slots], at_B11, axis=1)[:, None]
        x_BnRD = self.responses(x_BWD)[:, :, :-1]
        B, n, _, D = x_BnRD.shape
        return jnp.concatenate([jnp.broadcast_to(last_B11D, (B, n, 1, D)), x_BnRD], axis=2)


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


def attend_packed(
    prefix: Prefix, q_BWHd: jax.Array, k_BWKd: jax.Array, v_BWKd: jax.Array
) -> jax.Array:
    """Causal attention of prefixes, and of each response to its prefix and itself."""
    B, _, H, d = q_BWHd.shape
    K, P = k_BWKd.shape[2], prefix.slots
    of_prefix_BPHd = attend_causal(q_BWHd[:, :P], k_BWKd[:, :P], v_BWKd[:, :P])
    q_BnRHd, k_BnSKd, v_BnSKd = map(prefix.responses, (q_BWHd, k_BWKd, v_BWKd))
    _, n, R, _, _ = q_BnRHd.shape
    q_BnRKGd = q_BnRHd.reshape(B, n, R, K, H // K, d)
    # two parts side by side, never joined: their products give different orders of dimensions
    shared_BKnRGP = einsum_f32("BnRKGd,BPKd->BKnRGP", q_BnRKGd, k_BWKd[:, :P]) * d**-0.5
    own_BnKRGS = einsum_f32("BnRKGd,BnSKd->BnKRGS", q_BnRKGd, k_BnSKd) * d**-0.5
    in_prefix_BP = jnp.arange(P)[None] < prefix.length_B[:, None]
    shared_BKnRGP = jnp.where(in_prefix_BP[:, None, None, None, None], shared_BKnRGP, K_MASK)
    seen_RS = jnp.tri(R, dtype=bool)
    own_BnKRGS = jnp.where(seen_RS[None, None, None, :, None], own_BnKRGS, K_MASK)
    largest_BnKRG = jnp.maximum(shared_BKnRGP.max(-1).swapaxes(1, 2), own_BnKRGS.max(-1))
    largest_BnKRG = jax.lax.stop_gradient(largest_BnKRG)
    shared_BKnRGP = jnp.exp(shared_BKnRGP - largest_BnKRG.swapaxes(1, 2)[..., None])
    own_BnKRGS = jnp.exp(own_BnKRGS - largest_BnKRG[..., None])
    total_BnKRG = shared_BKnRGP.sum(-1).swapaxes(1, 2) + own_BnKRGS.sum(-1)
    mixed_BnKRGd = einsum_f32(
        "BKnRGP,BPKd->BKnRGd", shared_BKnRGP.astype(v_BWKd.dtype), v_BWKd[:, :P]
    ).swapaxes(1, 2) + einsum_f32("BnKRGS,BnSKd->BnKRGd", own_BnKRGS.astype(v_BWKd.dtype), v_BnSKd)
    mixed_BnRKGd = (mixed_BnKRGd / total_BnKRG[..., None]).swapaxes(2, 3)
    of_responses_BnRHd = mixed_BnRKGd.astype(q_BWHd.dtype).reshape(B, n * R, H, d)
    return jnp.concatenate([of_prefix_BPHd, of_responses_BnRHd], axis=1)


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
