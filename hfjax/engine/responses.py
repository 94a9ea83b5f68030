# SPDX-License-Identifier: Apache-2.0
"""The rows of a generation while they grow: what is kept of them, and how a token is added."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from hfjax.engine.sampling import Sampling, draw, is_any_of
from hfjax.models.llama import (
    Constrain,
    KVCache,
    ModelConfig,
    Params,
    lm_logits,
    unconstrained,
)

# token, its log-prob, its log-prob under the filtered distribution (None without filters)
Drawn = tuple[jax.Array, jax.Array, jax.Array | None]


@struct.dataclass
class Generation:
    """Responses on the device, rows prompt-major (the n samples of a prompt are neighbours)."""

    input_ids_BT: jax.Array  # prompt, response from index prompt_length, then 0
    length_B: jax.Array  # prompt and response, stop token included
    prompt_length_B: jax.Array
    response_mask_BT: jax.Array  # True on response tokens, stop token included
    log_probs_BT: jax.Array  # of logits/temperature, whole vocabulary; 0 outside the response
    truncated_log_probs_BT: jax.Array | None  # of the filtered distribution; None without filters
    truncated_B: jax.Array  # True when the row ended at its limit, without a stop id


@struct.dataclass
class Rows:
    """What stays as it is while the responses grow."""

    prompt_length_B: jax.Array
    key_Bn: jax.Array  # noise key of each row
    limit_Bn: jax.Array


@struct.dataclass
class Columns:
    """What is drawn; S response slots, the bucket in use."""

    tokens_BnS: jax.Array
    log_probs_BnS: jax.Array
    truncated_log_probs_BnS: jax.Array | None
    length_Bn: jax.Array
    stopped_Bn: jax.Array  # a stop id was drawn


@struct.dataclass
class Prompts:
    """Prefilled prompts, with what stays as it is of their responses."""

    cache: KVCache
    rows: Rows


@struct.dataclass
class Responses:
    """What a segment changes."""

    position: jax.Array  # where the next token goes, the same for all rows
    cache: KVCache  # k_LBnKdS, v_LBnKSd
    columns: Columns


def draw_next(
    cfg: ModelConfig,
    params: Params,
    x_BmD: jax.Array,
    rows: Rows,
    position: jax.Array,
    sampling: Sampling,
    *,
    constrain: Constrain = unconstrained,
) -> Drawn:
    """The tokens at `position` from final-normed states: one a row, or m = 1 for all n of them."""
    logits_BmV = lm_logits(cfg, params, x_BmD, constrain=constrain)
    logits_BnV = jnp.broadcast_to(logits_BmV, (*rows.key_Bn.shape, logits_BmV.shape[-1]))
    return draw(logits_BnV, rows.key_Bn, position, sampling)


def record(
    columns: Columns,
    rows: Rows,
    position: jax.Array,
    drawn: Drawn,
    sampling: Sampling,
    valid: jax.Array | bool = True,
) -> Columns:
    """Writes what was drawn for `position` into the rows still running; nothing unless `valid`."""
    token_Bn, logp_Bn, filtered_Bn = drawn
    runs_Bn = runs(columns, rows, position) & valid

    def write(column_BnS: jax.Array, new_Bn: jax.Array) -> jax.Array:
        old_Bn = lax.dynamic_index_in_dim(column_BnS, position, axis=2, keepdims=False)
        new_Bn = jnp.where(runs_Bn, new_Bn, old_Bn)
        return lax.dynamic_update_index_in_dim(column_BnS, new_Bn, position, axis=2)

    filtered_BnS = columns.truncated_log_probs_BnS
    if filtered_Bn is not None and filtered_BnS is not None:
        filtered_BnS = write(filtered_BnS, filtered_Bn)
    return Columns(
        tokens_BnS=write(columns.tokens_BnS, token_Bn),
        log_probs_BnS=write(columns.log_probs_BnS, logp_Bn),
        truncated_log_probs_BnS=filtered_BnS,
        length_Bn=columns.length_Bn + runs_Bn.astype(jnp.int32),
        stopped_Bn=columns.stopped_Bn | (runs_Bn & is_any_of(token_Bn, sampling.ends)),
    )


def runs(columns: Columns, rows: Rows, position: jax.Array) -> jax.Array:
    """True where the token at `position` will belong to the response."""
    return ~columns.stopped_Bn & (position < rows.limit_Bn)


def any_runs(columns: Columns, rows: Rows, position: jax.Array) -> jax.Array:
    """Whether any row of the batch still has a token at `position`."""
    return jnp.any(runs(columns, rows, position))


def limits(max_new_B: jax.Array | None, shape: tuple[int, ...], longest: int) -> jax.Array:
    """limit_Bn of each row, from limits (B,) of prompts, (B, n) of rows, or none."""
    if max_new_B is None:
        return jnp.full(shape, longest, jnp.int32)
    limit_Bn = max_new_B if max_new_B.ndim == 2 else max_new_B[:, None]
    return jnp.minimum(jnp.broadcast_to(limit_Bn, shape), longest).astype(jnp.int32)


def init_columns(shape: tuple[int, ...], slots: int, *, filtered: bool) -> Columns:
    """Nothing drawn yet, in rows (B, n)."""
    return Columns(
        tokens_BnS=jnp.zeros((*shape, slots), jnp.int32),
        log_probs_BnS=jnp.zeros((*shape, slots), jnp.float32),
        truncated_log_probs_BnS=jnp.zeros((*shape, slots), jnp.float32) if filtered else None,
        length_Bn=jnp.zeros(shape, jnp.int32),
        stopped_Bn=jnp.zeros(shape, bool),
    )


def init_response_cache(prompts: KVCache, n: int, slots: int) -> KVCache:
    """Empty caches for n responses to each prompt in `prompts`."""
    L, B, K, d, _ = prompts.k_LBKdS.shape
    dtype = prompts.k_LBKdS.dtype
    return KVCache(
        k_LBKdS=jnp.zeros((L, B, n, K, d, slots), dtype),
        v_LBKSd=jnp.zeros((L, B, n, K, slots, d), dtype),
    )


def grow(responses: Responses, slots: int) -> Responses:
    """The same responses with room for `slots` tokens."""

    def pad(x: jax.Array, axis: int) -> jax.Array:
        width = [(0, 0)] * x.ndim
        width[axis] = (0, slots - x.shape[axis])
        return jnp.pad(x, width)

    cache, columns = responses.cache, responses.columns
    filtered_BnS = columns.truncated_log_probs_BnS
    return replace(
        responses,
        cache=KVCache(k_LBKdS=pad(cache.k_LBKdS, -1), v_LBKSd=pad(cache.v_LBKSd, -2)),
        columns=replace(
            columns,
            tokens_BnS=pad(columns.tokens_BnS, -1),
            log_probs_BnS=pad(columns.log_probs_BnS, -1),
            truncated_log_probs_BnS=None if filtered_BnS is None else pad(filtered_BnS, -1),
        ),
    )


def assemble(prompt_ids_BP: jax.Array, rows: Rows, columns: Columns) -> Generation:
    """Left-aligned rows of width P + S: the response follows its prompt without a gap."""
    B, n, S = columns.tokens_BnS.shape
    P = prompt_ids_BP.shape[1]
    shape = (B, n, P + S)
    column_BnT = lax.broadcasted_iota(jnp.int32, shape, 2)
    prompt_length_Bn = jnp.broadcast_to(rows.prompt_length_B[:, None], (B, n))
    slot_BnT = column_BnT - prompt_length_Bn[..., None]
    mask_BnT = (slot_BnT >= 0) & (slot_BnT < columns.length_Bn[..., None])

    def placed(column_BnS: jax.Array, otherwise_BnT: jax.Array) -> jax.Array:
        here_BnT = jnp.take_along_axis(column_BnS, jnp.clip(slot_BnT, 0, S - 1), axis=2)
        return jnp.where(mask_BnT, here_BnT, otherwise_BnT).reshape(B * n, P + S)

    prompt_BT = jnp.pad(prompt_ids_BP, ((0, 0), (0, S)))
    prompt_BnT = jnp.broadcast_to(prompt_BT[:, None], shape)
    zeros_BnT = jnp.zeros(shape, jnp.float32)
    filtered_BnS = columns.truncated_log_probs_BnS
    return Generation(
        input_ids_BT=placed(columns.tokens_BnS, jnp.where(slot_BnT < 0, prompt_BnT, 0)),
        length_B=(prompt_length_Bn + columns.length_Bn).reshape(-1),
        prompt_length_B=prompt_length_Bn.reshape(-1),
        response_mask_BT=mask_BnT.reshape(B * n, P + S),
        log_probs_BT=placed(columns.log_probs_BnS, zeros_BnT),
        truncated_log_probs_BT=None if filtered_BnS is None else placed(filtered_BnS, zeros_BnT),
        truncated_B=~columns.stopped_Bn.reshape(-1),
    )
