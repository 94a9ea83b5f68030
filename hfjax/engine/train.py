# SPDX-License-Identifier: Apache-2.0
"""One optimizer update from one mini-batch, cut into micro-batches that change no number.

Losses divide by the denominators of the whole mini-batch, so the losses and gradients of its
micro-batches add up to the same sum for every cut, mesh and process count.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.typing import ArrayLike

from hfjax.engine.microbatch import Stack, place_rows
from hfjax.engine.packing import IDS, MASK, PREFIX_LENGTH
from hfjax.engine.replicas import Replicas
from hfjax.engine.scoring import score_tokens, scores_at_end, values_of
from hfjax.metrics import Max, Mean, Metric, Min, Total, merge
from hfjax.models.attention import Prefix
from hfjax.models.llama import Head, ModelConfig, Params, abstract_params
from hfjax.rl import Denominators
from meshes.layouts import BATCH, replicated

log = logging.getLogger(__name__)

Micro = Mapping[str, jax.Array]  # columns of one micro-batch on the devices

# Where their float32 norm is finite gradients are below 1.9e19, and Adam's step before the learning
# rate is below 1.9e19 / eps: within these no update of finite weights can overflow.
LEAST_EPS, MOST = 1e-15, 1e3

OVER_MICROS = {Mean: jnp.sum, Total: jnp.sum, Max: jnp.max, Min: jnp.min}


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW over every parameter; schedules are sized in optimizer updates that were applied."""

    lr: float = 1e-6  # after warm-up
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # decays to 0 at total_steps
    warmup_steps: int = 0  # update k of them (from 1) runs at lr * k / warmup_steps
    total_steps: int = 0  # updates until lr is 0; 0: all of the run's, filled in before training
    weight_decay: float = 0.01  # decoupled, times lr, as torch's AdamW
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    grad_clip: float = 1.0  # global norm; 0 = no clipping

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay"):
            value = getattr(self, name)
            _require(0 <= value <= MOST, name, value, f"lie in [0, {MOST:g}]")
        decay = f"be at most 1 / lr, with lr={self.lr:g}: decay shrinks weights"
        _require(self.lr * self.weight_decay <= 1, "weight_decay", self.weight_decay, decay)
        legal = 0 <= self.grad_clip < float("inf")
        _require(legal, "grad_clip", self.grad_clip, "be finite and at least 0")
        legal = LEAST_EPS <= self.eps <= MOST
        _require(legal, "eps", self.eps, f"lie in [{LEAST_EPS:g}, {MOST:g}]")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            _require(
                0 <= float(np.float32(value)) < 1, name, value, "lie in [0, 1), also in float32"
            )
        names = ("constant", "linear", "cosine")
        _require(self.schedule in names, "schedule", self.schedule, f"be one of {names}")
        _require(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, "be at least 0")
        if self.total_steps:
            self.require_end()

    def require_end(self) -> None:
        """Refuses a decay whose length is unknown, or over before it begins."""
        if self.schedule != "constant":
            rule = f"exceed warmup_steps={self.warmup_steps} with schedule={self.schedule!r}"
            _require(self.total_steps > self.warmup_steps, "total_steps", self.total_steps, rule)

    def lr_at(self, updates: ArrayLike) -> jax.Array:
        """Learning rate of the update that comes after `updates` applied ones."""
        done = jnp.asarray(updates).astype(jnp.float32)
        rise = jnp.minimum((done + 1) / max(self.warmup_steps, 1), 1.0)
        if self.schedule == "constant":
            return self.lr * rise
        span = self.total_steps - self.warmup_steps
        left = 1 - jnp.clip((done - self.warmup_steps) / span, 0.0, 1.0)
        fall = left if self.schedule == "linear" else (1 - jnp.cos(jnp.pi * left)) / 2
        return self.lr * rise * fall

    def transform(self) -> optax.GradientTransformation:
        """The optax chain: clip by global norm, then AdamW."""
        adamw = optax.adamw(
            self.lr_at, self.beta1, self.beta2, self.eps, weight_decay=self.weight_decay
        )
        if not self.grad_clip:
            return adamw
        return optax.chain(optax.clip_by_global_norm(self.grad_clip), adamw)


@flax.struct.dataclass
class TrainState:
    """What a trained role keeps between steps."""

    params: Params  # float32 master weights
    opt_state: optax.OptState
    updates: jax.Array  # int32, applied
    skipped: jax.Array  # int32, refused: non-finite, or nothing to train on


@flax.struct.dataclass
class Outputs:
    """What the model says of one micro-batch; only the head's own fields are set."""

    log_probs_BT: Any = None  # lm
    entropy_BT: Any = None  # lm; zeros unless the trainer was built with_entropy
    values_BT: Any = None  # value
    scores_B: Any = None  # score


LossFn = Callable[[Outputs, Micro, Denominators], tuple[jax.Array, Mapping[str, Metric]]]


class Columns(dict[str, jax.Array]):
    """What a loss reads of a micro-batch; one that is not there is refused by name."""

    def __missing__(self, name: str) -> jax.Array:
        raise KeyError(
            f"the loss reads column {name!r}; it has {', '.join(self)}; "
            "add it to the columns=(...) of the role, in roles() of the algorithm"
        )


class Trainer:
    """Compiled update of one model under one loss in one layout.

    The loss sees `columns` of a micro-batch (and input_ids, response_mask), and returns its share
    of the mini-batch loss, already divided by the mini-batch's denominators. Of packed rows it sees
    the responses alone, (B, R) for (B, T). The trainer's own metrics are loss, grad_norm (before
    clipping), lr, skipped and empty.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        head: Head,
        replicas: Replicas,
        optimizer: OptimizerConfig,
        loss: LossFn,
        *,
        columns: Sequence[str] = (),
        temperature: float = 1.0,
        remat: str = "none",
        chunk: int = 128,
        with_entropy: bool = False,
        zero: int = 3,
    ) -> None:
        """`zero` 1 adds up whole gradients and reduces them once; 2, 3 reduce each micro-batch."""
        optimizer.require_end()
        needed = ("input_ids", "response_mask") + (("length",) if head == "score" else ())
        self.columns = tuple(dict.fromkeys((*needed, *columns)))
        self.replicas = replicas
        self.optimizer, self._loss = optimizer, loss
        self._tx = self.optimizer.transform()
        lm = {"temperature": temperature, "chunk": chunk, "with_entropy": with_entropy}
        self._forward: Callable[..., Outputs] = {
            "lm": lambda params, micro, **options: Outputs(
                *score_tokens(cfg, params, micro[IDS], prefix=_prefix_of(micro), **lm, **options)
            ),
            "value": lambda params, micro, **options: Outputs(
                values_BT=values_of(cfg, params, micro[IDS], prefix=_prefix_of(micro), **options)
            ),
            "score": lambda params, micro, **options: Outputs(
                scores_B=scores_at_end(cfg, params, micro[IDS], micro["length"], **options)
            ),
        }[head]
        self._remat = remat
        self._place = partial(place_rows, replicas.mesh, replicas.layout, axis=1)
        self._scatters = zero > 1
        shapes, _ = abstract_params(cfg, head, jnp.float32)
        alone = replicated(replicas.mesh)
        self._abstract = self._abstract_state(shapes, alone)
        self._compile(alone)

    def _abstract_state(self, shapes: Any, alone: NamedSharding) -> TrainState:
        """Moments lie where their parameters lie; counters on every device."""
        tx, placed = self._tx, self.replicas.state_shardings
        opt_shapes = jax.eval_shape(tx.init, shapes)
        opt_shardings = optax.tree_utils.tree_map_params(
            tx,
            lambda _, sharding: sharding,
            opt_shapes,
            placed,
            transform_non_params=lambda _: alone,
        )
        counter: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=alone)
        return TrainState(
            params=_with_shardings(shapes, placed),
            opt_state=_with_shardings(opt_shapes, opt_shardings),
            updates=counter,
            skipped=counter,
        )

    def _compile(self, alone: NamedSharding) -> None:
        state = jax.tree.map(lambda leaf: leaf.sharding, self._abstract)
        sums = self.replicas.gradient_shardings(scattered=self._scatters)
        # without out_shardings the moments would all lie on one device; nothing is donated: the
        # parameters become the state's own
        self._init = jax.jit(
            lambda params: (self._tx.init(params), jnp.int32(0), jnp.int32(0)),
            out_shardings=(state.opt_state, alone, alone),
        )
        self._zeros = jax.jit(self._zero_sums, out_shardings=sums)
        # donated: the gradient sum so far; weights are read
        self._accumulate = jax.jit(
            self._add_micros, donate_argnums=1, out_shardings=(sums, alone, alone)
        )
        # not donated: reduced gradients are smaller than the sums, no buffer could be reused
        reduce = partial(self.replicas.reduce, scattered=self._scatters)
        self._reduce = jax.jit(reduce, out_shardings=state.params)
        # donated: the state; every leaf of the new one takes the place of the old
        self._apply = jax.jit(self._apply_grads, donate_argnums=0, out_shardings=(state, alone))

    def _zero_sums(self) -> Params:
        return jax.tree.map(
            lambda p: jnp.zeros(p.shape, jnp.float32),
            jax.eval_shape(self._gradient_sums, self._abstract.params),
        )

    def _gradient_sums(self, weights: Params) -> Params:
        """Weights, or their gradients, as gradients are added up."""
        stacked = self.replicas.stack(weights)
        return self.replicas.scatter(stacked) if self._scatters else stacked

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state, to restore a checkpoint into."""
        return self._abstract

    def lowered(self, micros: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.stages.Lowered]:
        """The programs of an update from one stack of columns (M, mb, ...), for a meter."""
        replicas = self.replicas
        cast = jax.tree.map(
            lambda p: jax.ShapeDtypeStruct(p.shape, replicas.weight_dtype), self._abstract.params
        )
        weights = _with_shardings(cast, replicas.weight_shardings)
        sums = _with_shardings(
            jax.eval_shape(self._zeros), replicas.gradient_shardings(scattered=self._scatters)
        )
        rows = NamedSharding(replicas.mesh, replicas.layout.spec((None, BATCH)))
        placed = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows)
            for name, x in micros.items()
        }
        one, loss = np.int32(1), np.float32(1)
        return {
            "accumulate": self._accumulate.lower(weights, sums, placed, one, one),
            "reduce": self._reduce.lower(sums),
            "apply": self._apply.lower(self._abstract, self._abstract.params, loss, one),
        }

    def init_state(self, params: Params) -> TrainState:
        """A fresh state that takes float32 `params` over: the first update donates them."""
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            name = f"dtype of parameter {jax.tree_util.keystr(path)}"
            _require(leaf.dtype == jnp.float32, name, leaf.dtype, "be float32 (master weights)")
        params = jax.device_put(params, self.replicas.state_shardings)
        opt_state, updates, skipped = self._init(params)
        return TrainState(params=params, opt_state=opt_state, updates=updates, skipped=skipped)

    def update(
        self, state: TrainState, micros: Sequence[Stack]
    ) -> tuple[TrainState, dict[str, Metric]]:
        """One optimizer update from one mini-batch; `state` is donated.

        `micros`: stacks of columns (M, mb, ...), one or several shapes, whole on every process. A
        non-finite loss or
        gradient, or a mini-batch without a trained token, changes nothing but `skipped`.
        """
        tokens, _ = _counts(micros)
        if tokens == 0:
            log.warning("mini-batch has no trained token: update skipped")
        loss, grads, metrics = self.gradients(state.params, micros)
        state, own = self._apply(state, grads, loss, tokens)
        return state, metrics | own

    def gradients(
        self, params: Params, micros: Sequence[Stack]
    ) -> tuple[jax.Array, Params, dict[str, Metric]]:
        """Loss, float32 gradients (as the state lies) and the loss's metrics of one mini-batch."""
        counts, weights = _counts(micros), self.replicas.weights(params)
        sums, losses, metrics = self._zeros(), [], dict[str, Metric]()
        for stack in micros:
            names = (*self.columns, *(name for name in (PREFIX_LENGTH,) if name in stack))
            placed = {name: self._place(self._column(stack, name)) for name in names}
            sums, loss, more = self._accumulate(weights, sums, placed, *counts)
            losses.append(loss)
            metrics = merge(metrics, more)
        return sum(losses[1:], start=losses[0]), self._reduce(sums), metrics

    def _column(self, stack: Stack, name: str) -> np.ndarray:
        if name not in stack:
            raise ValueError(f"column {name!r} is missing; the batch has {', '.join(stack)}")
        return stack[name]

    def _add_micros(
        self,
        weights: Params,
        sums: Params,
        micros: Micro,
        tokens: jax.Array,
        sequences: jax.Array,
    ) -> tuple[Params, jax.Array, dict[str, Metric]]:
        """`sums` plus the gradients of M micro-batches, one after another; loss and metrics."""
        denominators = Denominators(tokens, sequences)
        stacked, in_flight = self.replicas.stack(weights), 1
        if self.replicas.stages > 1:  # a pipeline takes them all at once
            in_flight = next(iter(micros.values())).shape[0]
            micros = {name: self.replicas.join_micros(x)[None] for name, x in micros.items()}
        rows = micros[IDS].shape[1]
        options = {"remat": self._remat, "run": self.replicas.run(rows, in_flight)}

        def loss_of(stacked: Params, micro: Micro) -> tuple[jax.Array, Mapping[str, Metric]]:
            outputs = self._forward(stacked, micro, **options)
            loss, metrics = self._loss(outputs, Columns(_as_read(micro)), denominators)
            _check_metrics(metrics)
            return loss, metrics

        def add(sums: Params, micro: Micro) -> tuple[Params, tuple[jax.Array, dict[str, Metric]]]:
            (loss, metrics), more = jax.value_and_grad(loss_of, has_aux=True)(stacked, micro)
            more = jax.tree.map(lambda g: g.astype(jnp.float32), more)
            more = self.replicas.scatter(more) if self._scatters else more
            return jax.tree.map(jnp.add, sums, more), (loss, dict(metrics))

        sums, (loss_M, metrics_M) = jax.lax.scan(add, sums, micros)
        return sums, loss_M.sum(), {name: _over_micros(m) for name, m in metrics_M.items()}

    def _apply_grads(
        self, state: TrainState, grads: Params, loss: jax.Array, tokens: jax.Array
    ) -> tuple[TrainState, dict[str, Metric]]:
        norm = optax.tree_utils.tree_norm(grads)
        usable = jnp.isfinite(norm) & jnp.isfinite(loss) & (tokens > 0)
        with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an int32 count
            updates, opt_state = self._tx.update(grads, state.opt_state, state.params)
        new = replace(
            state,
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
            updates=state.updates + 1,
        )
        old = replace(state, skipped=state.skipped + 1)
        one = jnp.float32(1)
        metrics = {
            "loss": Mean(loss, one),
            "grad_norm": Mean(norm, one),
            "lr": Mean(self.optimizer.lr_at(state.updates), one),
            "skipped": Total(1 - usable.astype(jnp.float32)),
            "empty": Total((tokens == 0).astype(jnp.float32)),
        }
        return jax.tree.map(partial(jnp.where, usable), new, old), metrics


def _prefix_of(micro: Micro) -> Prefix | None:
    """How the rows of a micro-batch are packed, by the shapes of its columns."""
    if PREFIX_LENGTH not in micro:
        return None
    (B, W), (rows, R) = micro[IDS].shape, micro[MASK].shape
    return Prefix(length_B=micro[PREFIX_LENGTH], slots=W - rows // B * R, n=rows // B)


def _as_read(micro: Micro) -> Micro:
    """The columns as a loss reads them: as many rows, as wide, as the mask."""
    prefix = _prefix_of(micro)
    if prefix is None:
        return micro
    return {**micro, IDS: prefix.responses(micro[IDS]).reshape(micro[MASK].shape)}


def _counts(micros: Sequence[Stack]) -> tuple[np.int32, np.int32]:
    """Trained tokens, and rows that have any, of the whole mini-batch."""
    masks = [stack["response_mask"] for stack in micros]
    tokens = sum(int(mask.sum()) for mask in masks)
    sequences = sum(int(mask.any(axis=-1).sum()) for mask in masks)
    return np.int32(tokens), np.int32(sequences)


def _over_micros(metric_M: Metric) -> Metric:
    return jax.tree.map(partial(OVER_MICROS[type(metric_M)], axis=0), metric_M)


def _with_shardings(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def _require(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        raise ValueError(f"{name}={value!r} must {rule}")


def _check_metrics(metrics: Mapping[str, Any]) -> None:
    """Refuses a bare number: how parts of a mini-batch add up to it is not known."""
    for name, value in metrics.items():
        if not isinstance(value, Metric):
            raise TypeError(
                f"the loss's metric {name!r} is of type {type(value).__name__}; give a Mean, Max, "
                "Min or Total of hfjax.metrics, as rl.loss_metric(value, mask, denominators)"
            )
