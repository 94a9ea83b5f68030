# SPDX-License-Identifier: Apache-2.0
"""Generation whose layers lie in p = p_g stages: micro-batches follow one another, round and round.

HybridFlow (arXiv 2409.19256) §5: generation groups of p_g x t_g devices. A stage holds its layers
and their caches. Unit u is the token of micro-batch u % Q at the u // Q-th position of a segment,
Q = max(M, p). In tick t stage s does unit t - s and hands the activation to stage s + 1; the last
stage draws, and Q >= p ticks after a row's last token its next one begins. With M < p some units
are empty. N positions take (N - 1) Q + M + p - 1 ticks: N M + p - 1 where M >= p, as in prefill.

The first stage alone embeds and the last alone computes the head. These are branches, so that the
others neither read the vocabulary's weights nor send anything for them; the last stage is the
slower for it. What it draws is added over the stages, three numbers a row: all stages then hold
the same columns, see the same rows end, and leave in the same tick.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from hfjax.engine.responses import Columns, Prompts, Responses, Rows, draw_next, record, runs
from hfjax.engine.sampling import Sampling
from hfjax.models.llama import (
    RESIDUAL,
    Constrain,
    KVCache,
    ModelConfig,
    Params,
    decode_layers,
    embed_tokens,
    final_norm,
    prefill_layers,
)
from meshes.layouts import BATCH, HEAD_DIM, KV_HEADS, LAYERS, Axes, Layout, divisors
from meshes.mesh import shape_of

WHOLE: Any = PartitionSpec()


class Staged:
    """Every stage runs its layers (p_g > 1).

    Rows, (B, ...) outside, are (b, M, ...) within: row j M + m is row j of micro-batch m, so that
    a replica's rows stay where they are and no cache is copied.
    """

    def __init__(self, cfg: ModelConfig, mesh: Mesh, layout: Layout, micros: int | None) -> None:
        if micros is not None and micros < 1:
            raise ValueError(f"micros={micros} must be at least 1, or None for one a stage")
        self._mesh, self._layout, self._pipe = mesh, layout, layout.mesh_axes(LAYERS)
        self._pass = partial(_Pass, cfg=cfg, pipe=self._pipe, constrain=self._constrain)
        self._wished = micros or shape_of(mesh).over(self._pipe)
        self._replicas = shape_of(mesh).over(layout.mesh_axes(BATCH))

    def micros_of(self, rows: int) -> int:
        """M: the largest number up to the one wished for that divides the rows of a replica.

        Never a larger one: a tick reads a stage's weights, however few its rows.
        """
        return divisors(rows // self._replicas, most=self._wished)[-1]

    def begin(
        self,
        params: Params,
        prompt_ids_BP: jax.Array,
        rows: Rows,
        columns: Columns,
        sampling: Sampling,
    ) -> tuple[KVCache, Columns]:
        """Prefill, whole prompts a tick, and the first token of each row."""
        split = partial(_split, micros=self.micros_of(len(prompt_ids_BP)))

        def stage(
            params: Params, ids_BP: jax.Array, rows: Rows, columns: Columns
        ) -> tuple[KVCache, Columns]:
            first = self._pass(params, split(rows), sampling, jnp.int32(0), jnp.int32(1))
            cache, columns = first.prefill(split(ids_BP), split(columns))
            return _merge(cache, axis=1), _merge(columns)

        out_specs = (PartitionSpec(self._pipe), WHOLE)
        return self._manual(stage, (self._specs(params), WHOLE, WHOLE, WHOLE), out_specs)(
            params, prompt_ids_BP, rows, columns
        )

    def segment(
        self,
        params: Params,
        prompts: Prompts,
        responses: Responses,
        end: jax.Array,
        sampling: Sampling,
    ) -> tuple[Responses, jax.Array]:
        """Tokens up to response position `end`, fewer when no row runs any more; ticks it took."""
        split = partial(_split, micros=self.micros_of(len(prompts.rows.prompt_length_B)))

        def stage(
            params: Params, prompts: Prompts, responses: Responses, end: jax.Array
        ) -> tuple[Responses, jax.Array]:
            start = responses.position
            further = self._pass(params, split(prompts.rows), sampling, start, end - start)
            cache, columns, ticks = further.decode(
                split(prompts.cache, axis=1),
                split(responses.cache, axis=1),
                split(responses.columns),
            )
            # Where it ended early no row runs at any position.
            position = jnp.maximum(start, end)
            return Responses(position, _merge(cache, axis=1), _merge(columns)), ticks

        cut: Any = PartitionSpec(self._pipe)  # stands in the field of an array
        of_responses = Responses(position=WHOLE, cache=cut, columns=WHOLE)
        in_specs = (self._specs(params), Prompts(cut, WHOLE), of_responses, WHOLE)
        return self._manual(stage, in_specs, (of_responses, WHOLE))(params, prompts, responses, end)

    def _specs(self, params: Params) -> Params:
        return dict.fromkeys(params, WHOLE) | {"layers": PartitionSpec(self._pipe)}

    def _manual(self, stage: Callable, in_specs: Any, out_specs: Any) -> Callable:
        return jax.shard_map(
            stage,
            mesh=self._mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(self._pipe),
            check_vma=False,
        )

    def _constrain(self, x: jax.Array, axes: Axes) -> jax.Array:
        return lax.with_sharding_constraint(x, self._layout.spec(axes))


@dataclass(frozen=True)
class _Unit:
    valid: jax.Array  # False of an empty unit, whose other fields are those of some other
    m: jax.Array  # its micro-batch
    position: jax.Array  # of the token that comes of it


@dataclass(frozen=True)
class _Pass:
    """A stage's part in `positions` tokens a row from `start` on; rows and columns are (b, M)."""

    params: Params  # with this stage's layers
    rows: Rows
    sampling: Sampling
    start: jax.Array
    positions: jax.Array
    _: KW_ONLY
    cfg: ModelConfig
    pipe: tuple[str, ...]
    constrain: Constrain

    @property
    def micros(self) -> int:
        return self.rows.prompt_length_B.shape[1]

    @property
    def stages(self) -> int:
        return lax.axis_size(self.pipe)

    @property
    def rank(self) -> jax.Array:
        return lax.axis_index(self.pipe)

    def prefill(self, ids_bMP: jax.Array, columns: Columns) -> tuple[KVCache, Columns]:
        layers = self.params["layers"]

        def tick(state: Any, t: jax.Array) -> tuple[Any, None]:
            x_bPD, cache, columns = state
            unit = self.unit(t - self.rank)
            x_bPD = self.enter(_of(ids_bMP, unit.m), x_bPD)
            x_bPD, mine = prefill_layers(self.cfg, layers, x_bPD, constrain=self.constrain)
            cache = self.cached(_put(cache, mine, unit.m, axis=2, valid=unit.valid))

            def last_token(here: Rows) -> jax.Array:
                last_b11 = (here.prompt_length_B - 1)[:, None, None]
                return jnp.take_along_axis(x_bPD, last_b11, axis=1)

            columns, _ = self.leave(t, last_token, columns)
            return (self.forward(x_bPD), cache, columns), None

        b, M, P = ids_bMP.shape
        L, D, K, d = layers["wk"].shape
        dtype = self.params["embed"].dtype
        cache = KVCache(
            k_LBKdS=jnp.zeros((L, b, M, K, d, P), dtype),
            v_LBKSd=jnp.zeros((L, b, M, K, P, d), dtype),
        )
        state = jnp.zeros((b, P, D), dtype), self.cached(cache), columns
        (_, cache, columns), _ = lax.scan(tick, state, jnp.arange(M + self.stages - 1))
        return cache, columns

    def decode(
        self, prompt: KVCache, own: KVCache, columns: Columns
    ) -> tuple[KVCache, Columns, jax.Array]:
        """The responses' caches and columns, and the ticks it took."""

        def goes_on(state: Any) -> jax.Array:
            t, *_, running_M = state
            return (t < ticks) & jnp.any(running_M)

        def tick(state: Any) -> Any:
            t, x_bnD, own, columns, running_M = state
            unit = self.unit(t - self.rank)
            slot = unit.position - 1
            tokens_bnS = _of(columns.tokens_BnS, unit.m)
            tokens_bn = lax.dynamic_index_in_dim(tokens_bnS, slot, axis=2, keepdims=False)
            x_bnD, (k_LbnKd, v_LbnKd) = decode_layers(
                self.cfg,
                self.params["layers"],
                self.enter(tokens_bn, x_bnD),
                prompt,
                _of(self.rows.prompt_length_B, unit.m),
                own,
                slot,
                of_layer=lambda cache: _of(cache, unit.m),
            )
            own = self.cached(_write(own, k_LbnKd, v_LbnKd, unit, slot))
            columns, running_M = self.leave(t, lambda _: x_bnD, columns, running_M)
            return t + 1, self.forward(x_bnD), own, columns, running_M

        Q = max(self.micros, self.stages)
        ticks = (self.positions - 1) * Q + self.micros + self.stages - 1
        ticks = jnp.where(self.positions > 0, ticks, 0)
        running_M = runs(columns, self.rows, self.start).any(axis=(0, 2))
        b, _, n = columns.length_Bn.shape
        embed = self.params["embed"]
        x_bnD = jnp.zeros((b, n, embed.shape[1]), embed.dtype)
        state = jnp.int32(0), x_bnD, self.cached(own), columns, running_M
        t, _, own, columns, _ = lax.while_loop(goes_on, tick, state)
        return own, columns, t

    def unit(self, u: jax.Array) -> _Unit:
        Q = max(self.micros, self.stages)
        valid = (u >= 0) & (u < self.positions * Q) & (u % Q < self.micros)
        m, i = jnp.minimum(u % Q, self.micros - 1), jnp.clip(u // Q, 0, self.positions - 1)
        return _Unit(valid, m, self.start + i)

    def enter(self, tokens: jax.Array, arrived: jax.Array) -> jax.Array:
        """What this stage's layers read; a collective in the branch joins devices of one stage."""
        x = lax.cond(self.rank == 0, lambda: embed_tokens(self.params, tokens), lambda: arrived)
        return self.constrain(x, RESIDUAL)

    def forward(self, x: jax.Array) -> jax.Array:
        """What the stage before this one gives it."""
        pairs = [(s, s + 1) for s in range(self.stages - 1)]
        return lax.ppermute(self.constrain(x, RESIDUAL), self.pipe, pairs)

    def leave(
        self,
        t: jax.Array,
        x_of: Callable[[Rows], jax.Array],
        columns: Columns,
        running_M: jax.Array | None = None,
    ) -> tuple[Columns, jax.Array | None]:
        """Columns with what the last stage draws in tick t, and which micro-batches still run."""
        unit = self.unit(t - (self.stages - 1))
        here = _of(self.rows, unit.m)

        def head() -> Any:
            x_bmD = final_norm(self.cfg, self.params, x_of(here))
            return draw_next(
                self.cfg,
                self.params,
                x_bmD,
                here,
                unit.position,
                self.sampling,
                constrain=self.constrain,
            )

        def nothing() -> Any:
            return jax.tree.map(jnp.zeros_like, jax.eval_shape(head))

        is_last = self.rank == self.stages - 1
        drawn = lax.psum(lax.cond(is_last & unit.valid, head, nothing), self.pipe)
        mine = record(_of(columns, unit.m), here, unit.position, drawn, self.sampling, unit.valid)
        columns = _put(columns, mine, unit.m, axis=1)
        if running_M is not None:
            now = jnp.any(runs(mine, here, unit.position + 1))
            running_M = running_M.at[unit.m].set(jnp.where(unit.valid, now, running_M[unit.m]))
        return columns, running_M

    def cached(self, cache: KVCache) -> KVCache:
        """Keeps a cache (L, b, M, ...) where it lies."""
        rows = (None, BATCH, *(None,) * (cache.k_LBKdS.ndim - 5))
        return KVCache(
            k_LBKdS=self.constrain(cache.k_LBKdS, (*rows, KV_HEADS, HEAD_DIM, None)),
            v_LBKSd=self.constrain(cache.v_LBKSd, (*rows, KV_HEADS, None, HEAD_DIM)),
        )


def _split(tree: Any, *, micros: int, axis: int = 0) -> Any:
    """(B, ...) -> (b, M, ...) at `axis` of every leaf."""

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:axis], -1, micros, *x.shape[axis + 1 :])

    return jax.tree.map(split, tree)


def _merge(tree: Any, axis: int = 0) -> Any:
    """Undoes _split."""
    return jax.tree.map(lambda x: x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :]), tree)


def _of(tree: Any, m: jax.Array) -> Any:
    """The rows (b, ...) of micro-batch m."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, m, axis=1, keepdims=False), tree)


def _put(tree: Any, mine: Any, m: jax.Array, *, axis: int, valid: jax.Array | bool = True) -> Any:
    """`tree` with the rows of micro-batch m, which stand at `axis`."""

    def put(x: jax.Array, new: jax.Array) -> jax.Array:
        if valid is not True:
            old = lax.dynamic_index_in_dim(x, m, axis=axis, keepdims=False)
            new = jnp.where(valid, new, old)
        return lax.dynamic_update_index_in_dim(x, new, m, axis=axis)

    return jax.tree.map(put, tree, mine)


def _write(
    cache: KVCache, k_LbnKd: jax.Array, v_LbnKd: jax.Array, unit: _Unit, slot: jax.Array
) -> KVCache:
    """One slot of one micro-batch, of all layers; the old one again where the unit is empty."""

    def write(x: jax.Array, new: jax.Array, at: int) -> jax.Array:
        start = [jnp.int32(0)] * x.ndim
        start[2], start[at] = unit.m, slot
        new = jnp.expand_dims(new, (2, at))
        new = jnp.where(unit.valid, new, lax.dynamic_slice(x, start, new.shape))
        return lax.dynamic_update_slice(x, new, start)

    return KVCache(
        k_LBKdS=write(cache.k_LBKdS, k_LbnKd, 6), v_LBKSd=write(cache.v_LBKSd, v_LbnKd, 5)
    )
