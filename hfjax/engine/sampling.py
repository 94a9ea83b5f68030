# SPDX-License-Identifier: Apache-2.0
"""How the next token is drawn from logits: filters, noise keyed by row and position, log-probs."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from hfjax.engine.scoring import log_softmax_at
from hfjax.models.llama import K_MASK


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How responses are drawn; hashable, a static argument of the compiled programs.

    Filters apply in this order: stop ids forbidden by `min_new_tokens`, temperature, top-k, top-p
    (the smallest set of the renormalised survivors whose mass reaches top_p), min-p (at least min_p
    times the likeliest). Tokens that tie with the last one kept by top-k or top-p are kept too.
    """

    max_new_tokens: int  # longest response of any row; rows may have a lower limit of their own
    n: int = 1  # responses a prompt
    temperature: float = 1.0  # 0 means greedy, with log-probs at temperature 1
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    greedy: bool = False  # the likeliest token; log-probs stay those of logits/temperature
    min_new_tokens: int = 0  # stop ids are forbidden at response positions below this one
    stop_ids: tuple[int, ...] = ()  # each of them ends a response and belongs to it
    ignore_eos: bool = False  # stop ids are ordinary tokens: every row runs to its limit

    def __post_init__(self) -> None:
        rules = (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("n", self.n >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < math.inf, "finite, and 0 (greedy) or above"),
            ("top_k", self.top_k >= 0, "a count of tokens, or 0 for off"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (off)"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 (off) and 1"),
            (
                "min_new_tokens",
                0 <= self.min_new_tokens <= self.max_new_tokens,
                f"between 0 and max_new_tokens={self.max_new_tokens}",
            ),
        )
        for name, holds, rule in rules:
            if not holds:
                raise ValueError(f"{name}={getattr(self, name)} must be {rule}")
        if not isinstance(self.stop_ids, tuple) or any(i < 0 for i in self.stop_ids):
            raise ValueError(f"stop_ids={self.stop_ids!r} must be a tuple of ids >= 0, as (2,)")

    @property
    def takes_likeliest(self) -> bool:
        return self.greedy or self.temperature == 0

    @property
    def scale(self) -> float:
        """The temperature that log-probs are taken at."""
        return self.temperature or 1.0

    @property
    def ends(self) -> tuple[int, ...]:
        """The ids that end a response."""
        return () if self.ignore_eos else self.stop_ids

    @property
    def truncates(self) -> bool:
        """Whether the sampled distribution is not the whole softmax of logits/temperature."""
        forbids = self.min_new_tokens > 0 and bool(self.ends)
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or forbids


def draw(
    logits_BnV: jax.Array, key_Bn: jax.Array, position: jax.Array, sampling: Sampling
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The next token of each row, its log-prob, and its log-prob under the filtered distribution.

    The noise of a row is gumbel(fold_in(its key, position)), drawn by vocabulary column, so that
    neither filters nor phantom columns nor other rows change which noise a token meets.
    """
    z_BnV = _filtered(logits_BnV, position, sampling)
    noisy_BnV = z_BnV
    if not sampling.takes_likeliest:
        noisy_BnV = z_BnV + _gumbel(key_Bn, position, logits_BnV.shape[-1])
    token_Bn = _first_largest(noisy_BnV)
    logp_Bn = log_softmax_at(logits_BnV, token_Bn, sampling.scale, by_mask=True)
    if not sampling.truncates:
        return token_Bn, logp_Bn, None
    return token_Bn, logp_Bn, log_softmax_at(z_BnV, token_Bn, by_mask=True)


def _filtered(logits_BnV: jax.Array, position: jax.Array, sampling: Sampling) -> jax.Array:
    """logits/temperature, with K_MASK where the filters forbid."""
    z_BnV = logits_BnV / sampling.scale
    if sampling.min_new_tokens and sampling.ends:
        column_BnV = lax.broadcasted_iota(jnp.int32, z_BnV.shape, z_BnV.ndim - 1)
        forbidden_BnV = is_any_of(column_BnV, sampling.ends) & (position < sampling.min_new_tokens)
        z_BnV = jnp.where(forbidden_BnV, K_MASK, z_BnV)
    if sampling.top_k:
        z_BnV = _likeliest(z_BnV, jnp.ones_like(z_BnV), float(sampling.top_k))
    if sampling.top_p < 1:
        z_BnV = _likeliest(z_BnV, jax.nn.softmax(z_BnV, axis=-1), sampling.top_p)
    if sampling.min_p:
        floor_Bn1 = jnp.max(z_BnV, axis=-1, keepdims=True) + math.log(sampling.min_p)
        z_BnV = jnp.where(z_BnV >= floor_Bn1, z_BnV, K_MASK)
    return z_BnV


def _likeliest(z_BnV: jax.Array, weight_BnV: jax.Array, target: float) -> jax.Array:
    """z where it lies in the smallest top set of weight >= target, K_MASK elsewhere; ties stay.

    The cut is found bit by bit: 32 passes of compare and sum, which cross `tensor` as scalars.
    XLA does not partition TopK: it would collect the logits of the whole batch on every device.
    """
    bits_BnV = lax.bitcast_convert_type(jnp.where(z_BnV == 0, 0.0, z_BnV), jnp.uint32)  # no -0.0
    top = jnp.uint32(1 << 31)
    order_BnV = jnp.where(bits_BnV >= top, ~bits_BnV, bits_BnV | top)  # ascends as z does

    def refine(i: jax.Array, cut_Bn1: jax.Array) -> jax.Array:
        higher_Bn1 = cut_Bn1 | (top >> i.astype(jnp.uint32))
        above_BnV = jnp.where(order_BnV >= higher_Bn1, weight_BnV, 0.0)
        enough_Bn1 = jnp.sum(above_BnV, axis=-1, keepdims=True) >= target
        return jnp.where(enough_Bn1, higher_Bn1, cut_Bn1)

    everything_Bn1 = jnp.zeros((*z_BnV.shape[:-1], 1), jnp.uint32)
    cut_Bn1 = lax.fori_loop(0, 32, refine, everything_Bn1)
    return jnp.where(order_BnV >= cut_Bn1, z_BnV, K_MASK)


def _first_largest(z_BnV: jax.Array) -> jax.Array:
    """argmax, as two reductions of one array each: XLA's CPU runs those 5 times faster."""
    V = z_BnV.shape[-1]
    column_BnV = lax.broadcasted_iota(jnp.int32, z_BnV.shape, z_BnV.ndim - 1)
    largest_BnV = z_BnV == jnp.max(z_BnV, axis=-1, keepdims=True)
    # the last column where nothing equals the largest, which is NaN
    return jnp.min(jnp.where(largest_BnV, column_BnV, V - 1), axis=-1)


def _gumbel(key_Bn: jax.Array, position: jax.Array, vocab: int) -> jax.Array:
    """gumbel(fold_in(key, position), (vocab,)) of each row, the bits of jax.random's."""
    tiny = jnp.finfo(jnp.float32).tiny

    def of_row(key: jax.Array) -> jax.Array:
        bits_V = _threefry_bits(jax.random.key_data(jax.random.fold_in(key, position)), vocab)
        one_V = (bits_V >> 9) | jnp.uint32(0x3F800000)  # 23 bits of mantissa: in [1, 2)
        uniform_V = lax.bitcast_convert_type(one_V, jnp.float32) - 1.0
        return -jnp.log(-jnp.log(jnp.maximum(uniform_V * (1.0 - tiny) + tiny, tiny)))

    return jax.vmap(jax.vmap(of_row))(key_Bn)


def _threefry_bits(key_data: jax.Array, count: int) -> jax.Array:
    """jax.random.bits of a threefry key, below 2**32 of them (Salmon et al. 2011, 20 rounds).

    JAX's own keeps the rounds as a loop on CPU, which no fusion with what reads it crosses: half
    as fast.
    """
    key = (*key_data, key_data[0] ^ key_data[1] ^ jnp.uint32(0x1BD11BDA))
    low = lax.iota(jnp.uint32, count) + key[1]
    high = jnp.zeros_like(low) + key[0]
    for i in range(5):
        for bits in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
            high = high + low
            low = ((low << bits) | (low >> (32 - bits))) ^ high
        high, low = high + key[(i + 1) % 3], low + key[(i + 2) % 3] + jnp.uint32(i + 1)
    return high ^ low


def is_any_of(ids: jax.Array, wanted: tuple[int, ...]) -> jax.Array:
    """True where an id is one of `wanted`."""
    found = jnp.zeros(ids.shape, bool)
    for i in wanted:
        found |= ids == i
    return found
