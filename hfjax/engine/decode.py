# SPDX-License-Identifier: Apache-2.0
"""Generation: one prefill a prompt, then segments of tokens that leave early, with log-probs.

One `Decoder` serves every call of its role. A prompt is prefilled once and its n samples share that
cache; each sample owns a second cache for its response, sized to the response bucket in use and
grown between segments. Programs are therefore bounded: one prefill and one segment program for each
(prompt width, response bucket), whatever the lengths inside them.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.sharding import Mesh, NamedSharding

from hfjax.engine.sampling import Sampling, draw, is_any_of
from hfjax.models.llama import (
    KVCache,
    ModelConfig,
    Params,
    decode_step,
    lm_logits,
    prefill,
)
from meshes.layouts import BATCH, HEAD_DIM, KV_HEADS, LAYERS, Layout

THREEFRY = "threefry2x32"  # rbg noise of a row changes under vmap, threefry's does not


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
class _Prompts:
    """What stays as it is while the responses grow."""

    cache: KVCache
    length_B: jax.Array
    key_Bn: jax.Array  # noise key of each row
    limit_Bn: jax.Array


@struct.dataclass
class _Responses:
    """What a segment changes; S response slots, the bucket in use."""

    position: jax.Array  # where the next token goes, the same for all rows
    cache: KVCache  # k_LBnKdS, v_LBnKSd
    tokens_BnS: jax.Array
    log_probs_BnS: jax.Array
    truncated_log_probs_BnS: jax.Array | None
    length_Bn: jax.Array
    stopped_Bn: jax.Array  # a stop id was drawn


def _append(
    responses: _Responses, prompts: _Prompts, logits_BnV: jax.Array, sampling: Sampling
) -> _Responses:
    """Draws the token at `position` and writes it into the rows still running."""
    position = responses.position
    token_Bn, logp_Bn, filtered_Bn = draw(logits_BnV, prompts.key_Bn, position, sampling)
    runs_Bn = _runs(responses, prompts)

    def write(column_BnS: jax.Array, new_Bn: jax.Array) -> jax.Array:
        new_Bn = jnp.where(runs_Bn, new_Bn, jnp.zeros_like(new_Bn))
        return lax.dynamic_update_index_in_dim(column_BnS, new_Bn, position, axis=2)

    filtered_BnS = responses.truncated_log_probs_BnS
    if filtered_Bn is not None and filtered_BnS is not None:
        filtered_BnS = write(filtered_BnS, filtered_Bn)
    return replace(
        responses,
        position=position + 1,
        tokens_BnS=write(responses.tokens_BnS, token_Bn),
        log_probs_BnS=write(responses.log_probs_BnS, logp_Bn),
        truncated_log_probs_BnS=filtered_BnS,
        length_Bn=responses.length_Bn + runs_Bn.astype(jnp.int32),
        stopped_Bn=responses.stopped_Bn | (runs_Bn & is_any_of(token_Bn, sampling.ends)),
    )


def _runs(responses: _Responses, prompts: _Prompts) -> jax.Array:
    return ~responses.stopped_Bn & (responses.position < prompts.limit_Bn)


def _any_runs(responses: _Responses, prompts: _Prompts) -> jax.Array:
    return jnp.any(_runs(responses, prompts))


def _limits(max_new_B: jax.Array | None, shape: tuple[int, ...], longest: int) -> jax.Array:
    """limit_Bn of each row, from limits (B,) of prompts, (B, n) of rows, or none."""
    if max_new_B is None:
        return jnp.full(shape, longest, jnp.int32)
    limit_Bn = max_new_B if max_new_B.ndim == 2 else max_new_B[:, None]
    return jnp.minimum(jnp.broadcast_to(limit_Bn, shape), longest).astype(jnp.int32)


def _init_responses(cache: KVCache, n: int, slots: int, *, filtered: bool) -> _Responses:
    """Empty responses for n samples of each prompt in `cache`."""
    L, B, K, d, _ = cache.k_LBKdS.shape
    dtype = cache.k_LBKdS.dtype
    return _Responses(
        position=jnp.int32(0),
        cache=KVCache(
            k_LBKdS=jnp.zeros((L, B, n, K, d, slots), dtype),
            v_LBKSd=jnp.zeros((L, B, n, K, slots, d), dtype),
        ),
        tokens_BnS=jnp.zeros((B, n, slots), jnp.int32),
        log_probs_BnS=jnp.zeros((B, n, slots), jnp.float32),
        truncated_log_probs_BnS=jnp.zeros((B, n, slots), jnp.float32) if filtered else None,
        length_Bn=jnp.zeros((B, n), jnp.int32),
        stopped_Bn=jnp.zeros((B, n), bool),
    )


def _grow(responses: _Responses, slots: int) -> _Responses:
    """The same responses with room for `slots` tokens."""

    def pad(x: jax.Array, axis: int) -> jax.Array:
        width = [(0, 0)] * x.ndim
        width[axis] = (0, slots - x.shape[axis])
        return jnp.pad(x, width)

    filtered_BnS = responses.truncated_log_probs_BnS
    return replace(
        responses,
        cache=KVCache(
            k_LBKdS=pad(responses.cache.k_LBKdS, -1), v_LBKSd=pad(responses.cache.v_LBKSd, -2)
        ),
        tokens_BnS=pad(responses.tokens_BnS, -1),
        log_probs_BnS=pad(responses.log_probs_BnS, -1),
        truncated_log_probs_BnS=None if filtered_BnS is None else pad(filtered_BnS, -1),
    )


def _assemble(prompt_ids_BP: jax.Array, prompts: _Prompts, responses: _Responses) -> Generation:
    """Left-aligned rows of width P + S: the response follows its prompt without a gap."""
    B, n, S = responses.tokens_BnS.shape
    P = prompt_ids_BP.shape[1]
    shape = (B, n, P + S)
    column_BnT = lax.broadcasted_iota(jnp.int32, shape, 2)
    prompt_length_Bn = jnp.broadcast_to(prompts.length_B[:, None], (B, n))
    slot_BnT = column_BnT - prompt_length_Bn[..., None]
    mask_BnT = (slot_BnT >= 0) & (slot_BnT < responses.length_Bn[..., None])

    def placed(column_BnS: jax.Array, otherwise_BnT: jax.Array) -> jax.Array:
        here_BnT = jnp.take_along_axis(column_BnS, jnp.clip(slot_BnT, 0, S - 1), axis=2)
        return jnp.where(mask_BnT, here_BnT, otherwise_BnT).reshape(B * n, P + S)

    prompt_BT = jnp.pad(prompt_ids_BP, ((0, 0), (0, S)))
    prompt_BnT = jnp.broadcast_to(prompt_BT[:, None], shape)
    zeros_BnT = jnp.zeros(shape, jnp.float32)
    filtered_BnS = responses.truncated_log_probs_BnS
    return Generation(
        input_ids_BT=placed(responses.tokens_BnS, jnp.where(slot_BnT < 0, prompt_BnT, 0)),
        length_B=(prompt_length_Bn + responses.length_Bn).reshape(-1),
        prompt_length_B=prompt_length_Bn.reshape(-1),
        response_mask_BT=mask_BnT.reshape(B * n, P + S),
        log_probs_BT=placed(responses.log_probs_BnS, zeros_BnT),
        truncated_log_probs_BT=None if filtered_BnS is None else placed(filtered_BnS, zeros_BnT),
        truncated_B=~responses.stopped_Bn.reshape(-1),
    )


class Decoder:
    """Generates on one mesh under one layout; `params` arrive in that layout."""

    def __init__(self, cfg: ModelConfig, mesh: Mesh, layout: Layout, *, segment: int = 32) -> None:
        """`segment` is the tokens between two looks at whether any row still runs."""
        if segment < 1:
            raise ValueError(f"segment={segment} must be at least 1 token")
        self._cfg, self._mesh, self._layout = cfg, mesh, layout
        self._segment = segment
        self._segment_programs = 0

        def sharding(*axes: str | None) -> Any:  # stands in the field of an array
            return NamedSharding(mesh, layout.spec(axes))

        rows = sharding(BATCH)
        once = sharding()
        prompts = _Prompts(
            cache=KVCache(
                k_LBKdS=sharding(LAYERS, BATCH, KV_HEADS, HEAD_DIM, None),
                v_LBKSd=sharding(LAYERS, BATCH, KV_HEADS, None, HEAD_DIM),
            ),
            length_B=rows,
            key_Bn=rows,
            limit_Bn=rows,
        )
        responses = _Responses(
            position=once,
            cache=KVCache(
                k_LBKdS=sharding(LAYERS, BATCH, None, KV_HEADS, HEAD_DIM, None),
                v_LBKSd=sharding(LAYERS, BATCH, None, KV_HEADS, None, HEAD_DIM),
            ),
            tokens_BnS=rows,
            log_probs_BnS=rows,
            truncated_log_probs_BnS=rows,
            length_Bn=rows,
            stopped_Bn=rows,
        )
        self._begin = jax.jit(
            self._begin_impl,
            static_argnames=("sampling", "slots"),
            out_shardings=(prompts, responses, once),
        )
        # The responses are donated: a segment writes caches and columns where they lie.
        self._continue = jax.jit(
            self._continue_impl,
            static_argnames="sampling",
            donate_argnames="responses",
            out_shardings=(responses, once),
        )
        # Not donated: no old buffer has the new size, so none could be reused.
        self._grow = jax.jit(_grow, static_argnames="slots", out_shardings=responses)
        self._assemble = jax.jit(_assemble, out_shardings=rows)

    def _constrain(self, x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
        sharding = NamedSharding(self._mesh, self._layout.spec(axes))
        return lax.with_sharding_constraint(x, sharding)

    @property
    def programs(self) -> int:
        """Segment programs compiled so far: at most one a (prompt width, response bucket)."""
        return self._segment_programs

    def generate(
        self,
        params: Params,
        prompt_ids_BP: jax.Array,
        prompt_length_B: jax.Array,
        row_id_Bn: jax.Array,
        key: jax.Array,
        sampling: Sampling,
        max_new_B: jax.Array | None = None,
    ) -> Generation:
        """n responses a prompt; rows P + R wide, where R is the smallest bucket that held them all.

        A sampled token depends on (key, its row_id, its position in the response) and the weights,
        not on B, n, P, the mesh or the other rows. `key` is a typed threefry key with seed and step
        folded in. `max_new_B`, (B,) or (B, n), lowers max_new_tokens row by row, also below
        min_new_tokens; a row with limit 0 gets no response and counts as truncated. Rows that pad B
        to a multiple of the replicas have prompt_length 1 and limit 0.
        """
        self._check(prompt_ids_BP, row_id_Bn, key, sampling)
        # On the host, because a process may not hand a key of its own device to a shared program.
        key_data = np.asarray(jax.random.key_data(key))
        slots = min(self._segment, sampling.max_new_tokens)
        prompts, responses, running = self._begin(
            params,
            prompt_ids_BP,
            prompt_length_B,
            row_id_Bn,
            key_data,
            max_new_B,
            sampling=sampling,
            slots=slots,
        )
        for end in range(self._segment, sampling.max_new_tokens + self._segment, self._segment):
            # The one host sync of a segment: a replicated scalar, the same in every process.
            if not bool(running):
                break
            if end > slots and slots < sampling.max_new_tokens:
                slots = min(2 * slots, sampling.max_new_tokens)
                responses = self._grow(responses, slots=slots)
            responses, running = self._continue(
                params, prompts, responses, np.int32(min(end, slots)), sampling=sampling
            )
        return self._assemble(prompt_ids_BP, prompts, responses)

    def lowered(
        self, params: Params, prompts: int, width: int, sampling: Sampling
    ) -> dict[str, jax.stages.Lowered]:
        """Prefill, and a segment at the largest bucket, for a meter; `params` are abstract."""
        rows = NamedSharding(self._mesh, self._layout.spec((BATCH,)))

        def column(*shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows)

        ids = (column(prompts, width), column(prompts), column(prompts, sampling.n))
        key_data = jax.ShapeDtypeStruct((2,), jnp.uint32)
        options = {"sampling": sampling, "slots": sampling.max_new_tokens}
        begin = self._begin.lower(params, *ids, key_data, None, **options)
        held, responses, _ = self._begin.eval_shape(params, *ids, key_data, None, **options)
        end = np.int32(sampling.max_new_tokens)
        segment = self._continue.lower(params, held, responses, end, sampling=sampling)
        return {"prefill": begin, "segment": segment}

    def _begin_impl(
        self,
        params: Params,
        prompt_ids_BP: jax.Array,
        prompt_length_B: jax.Array,
        row_id_Bn: jax.Array,
        key_data: jax.Array,
        max_new_B: jax.Array | None,
        *,
        sampling: Sampling,
        slots: int,
    ) -> tuple[_Prompts, _Responses, jax.Array]:
        """Prefill and the first token; the head sees the last token of each prompt only."""
        x_BPD, cache = prefill(self._cfg, params, prompt_ids_BP, constrain=self._constrain)
        last_B11 = (prompt_length_B - 1)[:, None, None]
        x_B1D = jnp.take_along_axis(x_BPD, last_B11, axis=1)
        logits_B1V = lm_logits(self._cfg, params, x_B1D, constrain=self._constrain)
        logits_BnV = jnp.broadcast_to(logits_B1V, (*row_id_Bn.shape, logits_B1V.shape[-1]))
        key = jax.random.wrap_key_data(key_data, impl=THREEFRY)
        prompts = _Prompts(
            cache=cache,
            length_B=prompt_length_B,
            key_Bn=jax.vmap(jax.vmap(partial(jax.random.fold_in, key)))(row_id_Bn),
            limit_Bn=_limits(max_new_B, row_id_Bn.shape, sampling.max_new_tokens),
        )
        responses = _init_responses(cache, sampling.n, slots, filtered=sampling.truncates)
        responses = _append(responses, prompts, logits_BnV, sampling)
        return prompts, responses, _any_runs(responses, prompts)

    def _continue_impl(
        self,
        params: Params,
        prompts: _Prompts,
        responses: _Responses,
        end: jax.Array,
        *,
        sampling: Sampling,
    ) -> tuple[_Responses, jax.Array]:
        """Tokens up to response position `end`, fewer when no row runs any more."""
        self._segment_programs += 1  # tracing runs this line, calling a compiled program does not

        def step(responses: _Responses) -> _Responses:
            t = responses.position - 1
            last_Bn = lax.dynamic_index_in_dim(responses.tokens_BnS, t, axis=2, keepdims=False)
            x_BnD, cache = decode_step(
                self._cfg, params, last_Bn, prompts.cache, prompts.length_B, responses.cache, t
            )
            logits_BnV = lm_logits(self._cfg, params, x_BnD, constrain=self._constrain)
            return _append(replace(responses, cache=cache), prompts, logits_BnV, sampling)

        def goes_on(responses: _Responses) -> jax.Array:
            return (responses.position < end) & _any_runs(responses, prompts)

        responses = lax.while_loop(goes_on, step, responses)
        return responses, _any_runs(responses, prompts)

    def _check(
        self, prompt_ids_BP: jax.Array, row_id_Bn: jax.Array, key: jax.Array, sampling: Sampling
    ) -> None:
        B = prompt_ids_BP.shape[0]
        if row_id_Bn.shape != (B, sampling.n):
            raise ValueError(
                f"row_id_Bn has shape {row_id_Bn.shape}; {B} prompts with n={sampling.n} "
                f"need {(B, sampling.n)}"
            )
        shards = math.prod(self._mesh.shape[axis] for axis in self._layout.mesh_axes(BATCH))
        if B % shards:
            raise ValueError(
                f"{B} prompts do not divide over {shards} replicas; pad them to "
                f"{math.ceil(B / shards) * shards} with rows of prompt_length 1 and limit 0"
            )
        if str(jax.random.key_impl(key)) != THREEFRY:
            raise ValueError(
                f"key has implementation {jax.random.key_impl(key)}; tokens are the same on every "
                f"mesh with jax.random.key(seed, impl={THREEFRY!r}) only"
            )
        outside = [i for i in sampling.stop_ids if i >= self._cfg.vocab]
        if outside:
            raise ValueError(
                f"stop_ids {outside} are not below the vocabulary size {self._cfg.vocab}; "
                "a response could never end there"
            )
