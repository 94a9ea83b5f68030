# SPDX-License-Identifier: Apache-2.0
"""The one place that turns hidden states into log-probabilities, entropies, values and scores.

Decoding, scoring and training all call `log_softmax_at`, so a rollout and the loss that trains on
it disagree by rounding only. Every per-token result is aligned with the token it scores.
"""

import math

import jax
import jax.numpy as jnp

from hfjax.engine.replicas import Replicas
from hfjax.models.attention import Prefix
from hfjax.models.llama import (
    PLAIN,
    ModelConfig,
    Params,
    Run,
    hidden_states,
    lm_logits,
    scalar_head,
)
from hfjax.rl import entropy
from meshes.layouts import BATCH

SCALAR_HEAD = ("value_head", "value_bias")


def log_softmax_at(
    logits_V: jax.Array,
    tokens: jax.Array,
    temperature: float | jax.Array = 1.0,
    *,
    by_mask: bool = False,
) -> jax.Array:
    """log softmax(logits / temperature) of `tokens`; logits float32, vocabulary last, any rank.

    Columns at K_MASK (vocabulary padding, forbidden tokens) carry no probability. With `by_mask`
    a sum picks the token's logit, the same bits: XLA cannot partition the gather within a stage of
    a pipeline (spmd_partitioner_util: ExpandDeviceGroups), whose gradient is the cheaper one.
    """
    scaled_V = logits_V.astype(jnp.float32) / temperature
    if by_mask:
        column_V = jax.lax.broadcasted_iota(jnp.int32, scaled_V.shape, scaled_V.ndim - 1)
        picked = jnp.where(column_V == tokens[..., None], scaled_V, 0.0).sum(axis=-1)
    else:
        picked = jnp.take_along_axis(scaled_V, tokens[..., None], axis=-1)[..., 0]
    return picked - jax.nn.logsumexp(scaled_V, axis=-1)


def score_tokens(
    cfg: ModelConfig,
    params: Params,
    tokens_BT: jax.Array,
    temperature: float | jax.Array = 1.0,
    *,
    prefix: Prefix | None = None,
    chunk: int = 128,
    remat: str = "none",
    with_entropy: bool = True,
    run: Run = PLAIN,
) -> tuple[jax.Array, jax.Array]:
    """(log_probs_BT, entropy_BT) of each token given those before it, float32; column 0 is 0.0.

    With `prefix` the rows are packed, (B, W), and results those of the responses alone: (B n, R).
    The vocabulary exists for `chunk` positions at a time, in the backward pass too: each chunk's
    logits are computed again there. Without `with_entropy` the second array is zeros.
    """

    def score(
        x_BTD: jax.Array, tokens_BT: jax.Array, w: Params, prefix: Prefix | None
    ) -> tuple[jax.Array, jax.Array]:
        @jax.checkpoint
        def score_chunk(x_BcD: jax.Array, tokens_Bc: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits_BcV = lm_logits(cfg, w, x_BcD, constrain=run.constrain)
            logp_Bc = log_softmax_at(logits_BcV, tokens_Bc, temperature)
            if not with_entropy:
                return logp_Bc, jnp.zeros_like(logp_Bc)
            return logp_Bc, entropy(logits_BcV / temperature)

        if prefix is None:
            next_BT = jnp.concatenate([tokens_BT[:, 1:], tokens_BT[:, :1]], axis=1)
        else:
            x_BTD = _before_responses(x_BTD, prefix, run)
            next_BT = prefix.responses(tokens_BT).reshape(x_BTD.shape[:2])
        chunks = _split(x_BTD, chunk), _split(next_BT, chunk)
        _, found = jax.lax.scan(lambda _, c: (None, score_chunk(*c)), None, chunks)
        logp_BT, entropy_BT = (_join(x_CBc, next_BT.shape[1]) for x_CBc in found)
        if prefix is None:
            return _to_scored_token(logp_BT), _to_scored_token(entropy_BT)
        return _of_prefix(logp_BT, prefix), _of_prefix(entropy_BT, prefix)

    tokens, prefix = run.rows(tokens_BT), jax.tree.map(run.rows, prefix)
    x = hidden_states(cfg, params, tokens, prefix=prefix, remat=remat, run=run)
    w = run.weights(_pick(params, ("embed",) if cfg.tied else ("lm_head",)))
    logp, entropies = run.each(score)(x, tokens, w, prefix)
    return _merged(logp, run, prefix), _merged(entropies, run, prefix)


def values_of(
    cfg: ModelConfig,
    params: Params,
    tokens_BT: jax.Array,
    *,
    prefix: Prefix | None = None,
    remat: str = "none",
    run: Run = PLAIN,
) -> jax.Array:
    """values_BT, column t the value BEFORE token t (read after token t-1); column 0 is 0.0.

    With `prefix` the rows are packed, (B, W), and values those of the responses alone: (B n, R).
    """

    def value(x_BTD: jax.Array, w: Params, prefix: Prefix | None) -> jax.Array:
        if prefix is None:
            return _to_scored_token(scalar_head(w, x_BTD))
        return _of_prefix(scalar_head(w, _before_responses(x_BTD, prefix, run)), prefix)

    tokens, prefix = run.rows(tokens_BT), jax.tree.map(run.rows, prefix)
    x = hidden_states(cfg, params, tokens, prefix=prefix, remat=remat, run=run)
    w = run.weights(_pick(params, SCALAR_HEAD))
    return _merged(run.each(value)(x, w, prefix), run, prefix)


def _before_responses(x_BWD: jax.Array, prefix: Prefix, run: Run) -> jax.Array:
    """What the head reads of packed rows: (B n, R, D)."""
    x_BnRD = prefix.before(run.constrain(x_BWD, (BATCH, None, None)))
    return x_BnRD.reshape(-1, *x_BnRD.shape[2:])


def _of_prefix(x_BR: jax.Array, prefix: Prefix) -> jax.Array:
    """A row for each prefix again, as `run` counts them: (B, n, R)."""
    return x_BR.reshape(-1, prefix.n, x_BR.shape[-1])


def _merged(x: jax.Array, run: Run, prefix: Prefix | None) -> jax.Array:
    x = run.merge(x)
    return x if prefix is None else x.reshape(-1, x.shape[-1])


def scores_at_end(
    cfg: ModelConfig,
    params: Params,
    tokens_BT: jax.Array,
    length_B: jax.Array,
    *,
    remat: str = "none",
    run: Run = PLAIN,
) -> jax.Array:
    """scores_B, the score head after each row's last token; a row of length 0 reads token 0."""

    def score(x_BTD: jax.Array, length_B: jax.Array, w: Params) -> jax.Array:
        last_B11 = jnp.maximum(length_B - 1, 0)[:, None, None]
        x_B1D = jnp.take_along_axis(x_BTD, last_B11, axis=1)
        return scalar_head(w, x_B1D[:, 0])

    x = hidden_states(cfg, params, run.rows(tokens_BT), remat=remat, run=run)
    w = run.weights(_pick(params, SCALAR_HEAD))
    return run.merge(run.each(score)(x, run.rows(length_B), w))


def _pick(params: Params, names: tuple[str, ...]) -> Params:
    return {name: params[name] for name in names if name in params}


class Scorer:
    """Compiled forward passes over (rows, T) arrays, with weights as `replicas` holds them.

    Rows are a multiple of the replicas. Computation is that of the trainer: a policy scored and
    trained in one dtype has ratio 1 before its update, to rounding where only one is packed.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        replicas: Replicas,
        *,
        temperature: float = 1.0,
        chunk: int = 128,
        with_entropy: bool = True,
    ) -> None:
        rows = replicas.row_sharding

        def run_of(tokens_BT: jax.Array) -> Run:
            """Pipelined, the pass is cut into as many micro-batches as there are stages."""
            rows = tokens_BT.shape[0]
            return replicas.run(rows, math.gcd(replicas.stages, rows // replicas.count))

        def log_probs(
            weights: Params, tokens_BT: jax.Array, prefix: Prefix | None = None
        ) -> tuple[jax.Array, jax.Array]:
            options = {"chunk": chunk, "with_entropy": with_entropy, "run": run_of(tokens_BT)}
            weights = replicas.stack(weights)
            return score_tokens(cfg, weights, tokens_BT, temperature, prefix=prefix, **options)

        def values(
            weights: Params, tokens_BT: jax.Array, prefix: Prefix | None = None
        ) -> jax.Array:
            weights, run = replicas.stack(weights), run_of(tokens_BT)
            return values_of(cfg, weights, tokens_BT, prefix=prefix, run=run)

        def scores(weights: Params, tokens_BT: jax.Array, length_B: jax.Array) -> jax.Array:
            return scores_at_end(
                cfg, replicas.stack(weights), tokens_BT, length_B, run=run_of(tokens_BT)
            )

        # packed rows (their prefix is the third argument) give results of responses alone
        self.log_probs = jax.jit(log_probs, out_shardings=rows)  # (log_probs_BT, entropy_BT)
        self.values = jax.jit(values, out_shardings=rows)  # values_BT
        self.scores = jax.jit(scores, out_shardings=rows)  # scores_B


def _to_scored_token(after_BT: jax.Array) -> jax.Array:
    """Moves what was read after token t to column t+1, the token it says something about."""
    return jnp.concatenate([jnp.zeros_like(after_BT[:, :1]), after_BT[:, :-1]], axis=1)


def _split(x_BT: jax.Array, chunk: int) -> jax.Array:
    """(B, T, ...) -> (C, B, c, ...), c <= chunk, as even as can be; the last filled with zeros."""
    B, T = x_BT.shape[:2]
    C = -(-T // chunk)
    c = -(-T // C)
    padded = jnp.pad(x_BT, [(0, 0), (0, C * c - T)] + [(0, 0)] * (x_BT.ndim - 2))
    return padded.reshape(B, C, c, *x_BT.shape[2:]).swapaxes(0, 1)


def _join(x_CBc: jax.Array, T: int) -> jax.Array:
    """(C, B, c) -> (B, T)."""
    C, B, c = x_CBc.shape
    return x_CBc.swapaxes(0, 1).reshape(B, C * c)[:, :T]
