# SPDX-License-Identifier: Apache-2.0
"""Generation: one prefill a prompt, then segments of tokens that leave early, with log-probs.

One `Decoder` serves every call of its role. A prompt is prefilled once and its n samples share that
cache; each sample owns a second cache for its response, sized to the response bucket in use and
grown between segments. Programs are therefore bounded: one prefill and one segment program for each
(prompt width, response bucket), whatever the lengths inside them.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

from hfjax.engine.pipeline_decode import Staged
from hfjax.engine.responses import (
    Columns,
    Generation,
    Prompts,
    Responses,
    Rows,
    any_runs,
    assemble,
    draw_next,
    grow,
    init_columns,
    init_response_cache,
    limits,
    record,
)
from hfjax.engine.sampling import Sampling
from hfjax.models.llama import KVCache, ModelConfig, Params, decode_step, prefill
from meshes.layouts import BATCH, HEAD_DIM, KV_HEADS, LAYERS, Layout
from meshes.mesh import shape_of

THREEFRY = "threefry2x32"  # rbg noise of a row changes under vmap, threefry's does not


class _Whole:
    """Every device runs all layers (p_g = 1)."""

    def __init__(self, cfg: ModelConfig, mesh: Mesh, layout: Layout) -> None:
        self._cfg, self._mesh, self._layout = cfg, mesh, layout

    def begin(
        self,
        params: Params,
        prompt_ids_BP: jax.Array,
        rows: Rows,
        columns: Columns,
        sampling: Sampling,
    ) -> tuple[KVCache, Columns]:
        """Prefill and the first token; the head sees the last token of each prompt only."""
        x_BPD, cache = prefill(self._cfg, params, prompt_ids_BP, constrain=self._constrain)
        last_B11 = (rows.prompt_length_B - 1)[:, None, None]
        x_B1D = jnp.take_along_axis(x_BPD, last_B11, axis=1)
        return cache, self._append(params, x_B1D, rows, columns, jnp.int32(0), sampling)

    def segment(
        self,
        params: Params,
        prompts: Prompts,
        responses: Responses,
        end: jax.Array,
        sampling: Sampling,
    ) -> tuple[Responses, jax.Array]:
        """Tokens up to response position `end`, fewer when no row runs any more; steps it took."""
        rows = prompts.rows

        def step(responses: Responses) -> Responses:
            columns, position = responses.columns, responses.position
            t = position - 1
            last_Bn = lax.dynamic_index_in_dim(columns.tokens_BnS, t, axis=2, keepdims=False)
            x_BnD, cache = decode_step(
                self._cfg, params, last_Bn, prompts.cache, rows.prompt_length_B, responses.cache, t
            )
            columns = self._append(params, x_BnD, rows, columns, position, sampling)
            return Responses(position=position + 1, cache=cache, columns=columns)

        def goes_on(responses: Responses) -> jax.Array:
            position = responses.position
            return (position < end) & any_runs(responses.columns, rows, position)

        grown = lax.while_loop(goes_on, step, responses)
        return grown, grown.position - responses.position

    def _append(
        self,
        params: Params,
        x_BmD: jax.Array,
        rows: Rows,
        columns: Columns,
        position: jax.Array,
        sampling: Sampling,
    ) -> Columns:
        drawn = draw_next(
            self._cfg, params, x_BmD, rows, position, sampling, constrain=self._constrain
        )
        return record(columns, rows, position, drawn, sampling)

    def _constrain(self, x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
        sharding = NamedSharding(self._mesh, self._layout.spec(axes))
        return lax.with_sharding_constraint(x, sharding)


class Decoder:
    """Generates on one mesh under one layout; `params` arrive in that layout."""

    def __init__(
        self,
        cfg: ModelConfig,
        mesh: Mesh,
        layout: Layout,
        *,
        segment: int = 32,
        micros: int | None = None,
    ) -> None:
        """`segment` is the tokens between two looks at whether any row still runs.

        Where the layout shards `layers` the rows of each replica pass through the stages in
        `micros` micro-batches, or the next lower number that divides them; by default one a stage.
        """
        if segment < 1:
            raise ValueError(f"segment={segment} must be at least 1 token")
        self._cfg, self._mesh, self._layout = cfg, mesh, layout
        self._segment = segment
        self._segment_programs = 0
        staged = shape_of(mesh).over(layout.mesh_axes(LAYERS)) > 1
        self._model = Staged(cfg, mesh, layout, micros) if staged else _Whole(cfg, mesh, layout)

        def sharding(*axes: str | None) -> Any:  # stands in the field of an array
            return NamedSharding(mesh, layout.spec(axes))

        each = sharding(BATCH)
        once = sharding()
        prompts = Prompts(
            cache=KVCache(
                k_LBKdS=sharding(LAYERS, BATCH, KV_HEADS, HEAD_DIM, None),
                v_LBKSd=sharding(LAYERS, BATCH, KV_HEADS, None, HEAD_DIM),
            ),
            rows=each,
        )
        responses = Responses(
            position=once,
            cache=KVCache(
                k_LBKdS=sharding(LAYERS, BATCH, None, KV_HEADS, HEAD_DIM, None),
                v_LBKSd=sharding(LAYERS, BATCH, None, KV_HEADS, None, HEAD_DIM),
            ),
            columns=each,
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
        self._grow = jax.jit(grow, static_argnames="slots", out_shardings=responses)
        self._assemble = jax.jit(assemble, out_shardings=each)

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
        return self._assemble(prompt_ids_BP, prompts.rows, responses.columns)

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
    ) -> tuple[Prompts, Responses, jax.Array]:
        """Prefill and the first token."""
        key = jax.random.wrap_key_data(key_data, impl=THREEFRY)
        rows = Rows(
            prompt_length_B=prompt_length_B,
            key_Bn=jax.vmap(jax.vmap(partial(jax.random.fold_in, key)))(row_id_Bn),
            limit_Bn=limits(max_new_B, row_id_Bn.shape, sampling.max_new_tokens),
        )
        columns = init_columns(row_id_Bn.shape, slots, filtered=sampling.truncates)
        cache, columns = self._model.begin(params, prompt_ids_BP, rows, columns, sampling)
        responses = Responses(
            position=jnp.int32(1),
            cache=init_response_cache(cache, sampling.n, slots),
            columns=columns,
        )
        return Prompts(cache, rows), responses, any_runs(columns, rows, responses.position)

    def _continue_impl(
        self,
        params: Params,
        prompts: Prompts,
        responses: Responses,
        end: jax.Array,
        *,
        sampling: Sampling,
    ) -> tuple[Responses, jax.Array]:
        """Tokens up to response position `end`, fewer when no row runs any more."""
        self._segment_programs += 1  # tracing runs this line, calling a compiled program does not
        responses, _ = self._model.segment(params, prompts, responses, end, sampling)
        return responses, any_runs(responses.columns, prompts.rows, responses.position)

    def _check(
        self, prompt_ids_BP: jax.Array, row_id_Bn: jax.Array, key: jax.Array, sampling: Sampling
    ) -> None:
        B = prompt_ids_BP.shape[0]
        if row_id_Bn.shape != (B, sampling.n):
            raise ValueError(
                f"row_id_Bn has shape {row_id_Bn.shape}; {B} prompts with n={sampling.n} "
                f"need {(B, sampling.n)}"
            )
        shards = shape_of(self._mesh).over(self._layout.mesh_axes(BATCH))
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
