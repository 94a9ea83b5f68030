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

    Filters apply in this order: stop ids forbidden by `min_new_tokens`, temperature, top-k (exactly
    k candidates, ties to the lower id), top-p (the smallest set of the renormalised survivors whose
    mass reaches top_p), min-p (at least min_p times the likeliest survivor).
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
    z_BnC, id_BnC = _candidates(logits_BnV, position, sampling)
    noisy_BnC = z_BnC
    if not sampling.takes_likeliest:
        noise_BnC = _gumbel(key_Bn, position, logits_BnV.shape[-1])
        if id_BnC is not None:
            noise_BnC = jnp.take_along_axis(noise_BnC, id_BnC, axis=-1)
        noisy_BnC = z_BnC + noise_BnC
    choice_Bn = jnp.argmax(noisy_BnC, axis=-1).astype(jnp.int32)
    token_Bn = choice_Bn
    if id_BnC is not None:
        token_Bn = jnp.take_along_axis(id_BnC, choice_Bn[..., None], axis=-1)[..., 0]
    logp_Bn = log_softmax_at(logits_BnV, token_Bn, sampling.scale)
    filtered_Bn = log_softmax_at(z_BnC, choice_Bn, 1.0) if sampling.truncates else None
    return token_Bn, logp_Bn, filtered_Bn


def _candidates(
    logits_BnV: jax.Array, position: jax.Array, sampling: Sampling
) -> tuple[jax.Array, jax.Array | None]:
    """Tempered logits with what may not be drawn at K_MASK; and the columns' ids once sorted."""
    z_BnC, id_BnC = logits_BnV / sampling.scale, None
    if sampling.min_new_tokens and sampling.ends:
        column_BnV = lax.broadcasted_iota(jnp.int32, z_BnC.shape, z_BnC.ndim - 1)
        forbidden_BnV = is_any_of(column_BnV, sampling.ends) & (position < sampling.min_new_tokens)
        z_BnC = jnp.where(forbidden_BnV, K_MASK, z_BnC)
    if sampling.top_k or sampling.top_p < 1:  # the only sort, and only on demand
        count = min(sampling.top_k or z_BnC.shape[-1], z_BnC.shape[-1])
        z_BnC, id_BnC = lax.top_k(z_BnC, count)
    if sampling.top_p < 1:
        p_BnC = jax.nn.softmax(z_BnC, axis=-1)
        before_BnC = jnp.cumsum(p_BnC, axis=-1) - p_BnC
        z_BnC = jnp.where(before_BnC < sampling.top_p, z_BnC, K_MASK)
    if sampling.min_p:
        floor_Bn1 = jnp.max(z_BnC, axis=-1, keepdims=True) + math.log(sampling.min_p)
        z_BnC = jnp.where(z_BnC >= floor_Bn1, z_BnC, K_MASK)
    return z_BnC, id_BnC


def _gumbel(key_Bn: jax.Array, position: jax.Array, vocab: int) -> jax.Array:
    def of_row(key: jax.Array) -> jax.Array:
        return jax.random.gumbel(jax.random.fold_in(key, position), (vocab,), jnp.float32)

    return jax.vmap(jax.vmap(of_row))(key_Bn)


def is_any_of(ids: jax.Array, wanted: tuple[int, ...]) -> jax.Array:
    found = jnp.zeros(ids.shape, bool)
    for i in wanted:
        found |= ids == i
    return found
