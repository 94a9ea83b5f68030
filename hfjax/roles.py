# SPDX-License-Identifier: Apache-2.0
"""The roles of RLHF: what each computes, which columns it reads and writes, by which protocol.

A role object lives in every process of its pool; its methods take a Shard (the rows this process
holds, on the host) and return an Answer. Names are the paper's (HybridFlow Table 4) and verl's.
"""

import dataclasses
import math
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hfjax.config import TrainingConfig
from hfjax.controller.protocol import (
    ONE_TO_ALL,
    THREE_D_PROTO,
    Answer,
    Shard,
    method,
)
from hfjax.controller.worker import RoleContext
from hfjax.engine.checkpoint import Sums, restore_role, start_save
from hfjax.engine.checks import Check, Fault
from hfjax.engine.hybrid import Moves, Relay, Weights
from hfjax.engine.microbatch import Stack, cut_micros
from hfjax.engine.offload import to_device, to_host
from hfjax.engine.passes import Compute, Passes
from hfjax.engine.replicas import Replicas
from hfjax.engine.scoring import Scorer
from hfjax.engine.train import LossFn, OptimizerConfig, Trainer, TrainState
from hfjax.metrics import finalize, merge
from hfjax.models.hf import load_config, load_params
from hfjax.models.llama import Head, ModelConfig, abstract_params, init_params
from meshes.layouts import (
    Layout,
    check,
    generate_layout,
    state_layout,
    train_layout,
)
from meshes.mesh import make_mesh
from meshes.placement import RolePlacement

ROW_COLUMNS = ("input_ids", "length", "response_mask")  # of every update
WIDTH_BUCKET = 32  # rows of an update are trimmed to a multiple of this many tokens


def plan_model(
    placement: RolePlacement, model: str, head: Head
) -> tuple[ModelConfig, Layout, Any, Any]:
    """Configuration, training layout, shapes and axes of a model where it is placed.

    No device is touched. Raises ValueError with the numbers where an axis does not divide, in the
    layout of its own for scoring too.
    """
    shape, relay, scoring = placement.mesh_shape, placement.relay, placement.scoring
    config = load_config(model)
    padded_for = (each.tensor * each.tensor_micro for each in (shape, scoring.mesh_shape))
    config = dataclasses.replace(config, vocab_multiple=math.lcm(*padded_for))
    layout = base_layout(placement, config)
    shapes, axes = abstract_params(config, head, jnp.float32)
    generate = generate_layout(shape, kv_heads=config.kv_heads, relay=relay)
    for each in (layout, state_layout(layout, relay), generate):
        check(shape, each, shapes, axes)
    if scoring is not placement:
        check(scoring.mesh_shape, base_layout(scoring, config), shapes, axes)
    return config, layout, shapes, axes


def base_layout(placement: RolePlacement, config: ModelConfig) -> Layout:
    """The layout of a role's mesh: `train`, or `infer` of what only computes."""
    layout = train_layout(
        placement.mesh_shape,
        kv_heads=config.kv_heads,
        zero=placement.zero,
        relay=placement.relay,
        sequence_parallel=placement.sequence_parallel,
    )
    return dataclasses.replace(layout, name="train" if placement.train else "infer")


def saved_state(model: str, head: Head, optimizer: OptimizerConfig) -> TrainState:
    """Shapes of a training state in a checkpoint: any mesh can read it, no vocabulary is padded."""
    shapes, _ = abstract_params(load_config(model), head, jnp.float32)
    counter: Any = jax.ShapeDtypeStruct((), jnp.int32)
    moments = jax.eval_shape(optimizer.transform().init, shapes)
    return TrainState(params=shapes, opt_state=moments, updates=counter, skipped=counter)


class ModelRole:
    """One model on the devices of its pool: configuration, mesh, layout and weights."""

    head: Head = "lm"
    may_lack_head = False  # a policy's files will do: the new head is zero
    dtype_of_weights: str | None = None  # None: that of computation
    with_entropy = False  # of the policy's forward pass

    def __init__(
        self,
        context: RoleContext,
        *,
        model: str,
        random: bool = False,
        seed: int = 0,
        compute_dtype: str = "float32",
        temperature: float = 1.0,
        loads: bool = True,
    ) -> None:
        """Loads the weights (draws them when `random`) straight into their shards.

        Not `loads`: the caller sets them.
        """
        self.model = model
        self.temperature = temperature or 1.0  # greedy rows are scored at temperature 1
        self.compute_dtype = jnp.dtype(compute_dtype)
        self.shape = context.placement.mesh_shape
        self.placement = context.placement
        self.config, self.layout, self.shapes, self.axes = plan_model(
            self.placement, model, self.head
        )
        self.replicas = self.make_replicas(self.placement, context.devices)
        self.mesh, scoring = self.replicas.mesh, self.placement.scoring
        own = scoring is not self.placement
        self.scoring = self.make_replicas(scoring, context.devices) if own else self.replicas
        self.passes = Passes(self.scoring.mesh, self.scoring.layout)
        self.scorer = Scorer(
            self.config,
            self.scoring,
            temperature=self.temperature,
            with_entropy=self.with_entropy,
        )
        placed = self.placed()
        dtype = jnp.dtype(self.dtype_of_weights or compute_dtype)
        if loads and random:
            key = jax.random.key(seed)
            self.params = init_params(self.config, self.head, key, placed, dtype)
        elif loads:
            self.params = load_params(model, self.config, self.files_head(), placed, dtype)
        self.check = Check(self.mesh, placed, frozen=True)
        self.rest()

    def make_replicas(self, placement: RolePlacement, devices: Sequence[jax.Device]) -> Replicas:
        """The model's weights on a mesh over the pool's devices."""
        mesh, layout = make_mesh(devices, placement.mesh_shape), base_layout(placement, self.config)
        sizes = (self.shapes, self.axes, self.compute_dtype)
        return Replicas(mesh, layout, *sizes, relay=placement.relay)

    @classmethod
    def files_head(cls) -> Head:
        """What the weights' files are asked for: of 'value' the head is made where it is not."""
        return "value" if cls.may_lack_head else cls.head

    def placed(self) -> Any:
        """The shardings that weights are loaded into."""
        return self.replicas.weight_shardings

    def weights(self) -> Any:
        """The weights as forward passes read them."""
        if self.placement.offload:
            self.params = to_device(self.params)
        return self.params

    def rest(self) -> None:
        """What is to be done after a call: offloaded weights leave the devices."""
        if self.placement.offload:
            self.params = to_host(self.params)

    def forward(self, shard: Shard, names: tuple[str, ...], compute: Compute) -> list[np.ndarray]:
        """Host arrays of what compute(params, *columns) gives for the shard's rows."""
        found = self.passes.over(shard, names, partial(compute, self.weights()))
        self.rest()
        return found

    def score_responses(self, shard: Shard, compute: Compute) -> list[np.ndarray]:
        """The same of compute(params, input_ids, prefix), for the response tokens; 0 elsewhere."""
        compute = partial(compute, self.weights())
        found = self.passes.over_responses(shard, WIDTH_BUCKET, compute)
        self.rest()
        return [masked(column, shard) for column in found]

    @method(ONE_TO_ALL)
    def check_weights(self) -> list[Fault]:
        """What is wrong with the weights on any device: replicas, bits, finiteness."""
        found = self.check(self.weights())
        self.rest()
        return found


class TrainedRole(ModelRole):
    """A model with an optimizer; the training state is the only owner of its weights."""

    dtype_of_weights = "float32"

    def __init__(
        self,
        context: RoleContext,
        *,
        loss: LossFn,
        columns: tuple[str, ...],
        training: TrainingConfig,
        loss_entropy: bool = False,
        rows_together: int = 1,
        checkpoint: str = "",
        **model: Any,
    ) -> None:
        """`loss` reads `columns`, and entropies if `loss_entropy`; `model` goes to ModelRole.

        So many neighbouring rows are always in one micro-batch, on one replica: a pair's two.
        The training state is a new one, or that saved under `checkpoint`, on whatever mesh; the
        driver has verified its files' contents.
        """
        dtype = training.compute_dtype
        super().__init__(context, compute_dtype=dtype, loads=not checkpoint, **model)
        self.role, self.training, self.rows_together = context.role, training, rows_together
        self.columns = (*ROW_COLUMNS, *columns)
        self.trainer = self.make_trainer(loss, columns, with_entropy=loss_entropy)
        self.first = self.trainer  # of a call's first mini-batch
        self.saved = saved_state(self.model, self.head, training.optimizer)
        self.writing: Future[Sums] | None = None
        abstract = self.trainer.abstract_state()
        if checkpoint:
            state = restore_role(checkpoint, abstract, self.saved, verify=False)
        else:
            state = self.trainer.init_state(self.params)
        self.params: Any = None  # the state owns them
        own = self.scoring is not self.replicas
        scoring = Moves(self.replicas, self.scoring) if own else None
        relay, offload = self.make_relay(), self.placement.offload
        self.held = Weights(self.replicas, state, relay, scoring, offload=offload)
        self.check = Check(self.mesh, jax.tree.map(lambda x: x.sharding, abstract))

    def make_trainer(self, loss: LossFn, columns: tuple[str, ...], **options: Any) -> Trainer:
        """The update of this model's state under a loss, at the run's temperature by default."""
        options.setdefault("temperature", self.temperature)
        return Trainer(
            self.config,
            self.head,
            self.replicas,
            self.training.optimizer,
            loss,
            columns=columns,
            remat=self.training.remat,
            zero=self.placement.zero,
            **options,
        )

    def make_relay(self) -> Relay | None:
        """The way to the layout of generation, for a model that generates."""

    def placed(self) -> Any:
        """The shardings of the float32 master weights."""
        return self.replicas.state_shardings

    def weights(self) -> Any:
        """The weights as forward passes read them."""
        return self.held.score()

    def rest(self) -> None:
        """Weights stay; moments have left after the update."""

    def update(self, shard: Shard) -> Answer:
        """Epochs x mini-batches of optimizer updates; metrics, over the call, are the role's."""
        size = self.training.minibatch_sequences or shard.n_rows
        # a score is read at a row's own end, and a pipeline's rows are alike
        packs = self.head != "score" and self.replicas.stages == 1
        shared = max(shard.group, self.rows_together) if packs else 0
        total: dict[str, Any] = {}
        trainer = self.first
        for _ in range(self.training.epochs):
            for start in range(0, shard.n_rows, size):
                rows = {k: shard.columns[k][start : start + size] for k in self.columns}
                micros = cut_micros(
                    rows,
                    replicas=self.replicas.count,
                    micro_sequences=self.training.micro_sequences,
                    micro_tokens=self.training.micro_tokens,
                    bucket=WIDTH_BUCKET,
                    group=self.rows_together,
                    shared=shared,
                )
                total = merge(total, self.updated(trainer, micros))
                trainer = self.trainer
        return self.told(shard, total)

    def updated(self, trainer: Trainer, micros: list[Stack]) -> dict[str, Any]:
        """One optimizer update; its metrics."""
        state, metrics = trainer.update(self.held.state(), micros)
        self.held.take(state)
        return metrics

    def told(self, shard: Shard, metrics: dict[str, Any], kind: str = "") -> Answer:
        """Metrics of updates under the role's name, or under one of their own that has a slash."""
        named = finalize(metrics).items()
        own = {x if "/" in x else f"{self.role}/{kind}{x}": number for x, number in named}
        return Answer({}, shard.rows, own)

    @method(ONE_TO_ALL)
    def check_weights(self) -> list[Fault]:
        """What is wrong with master weights and moments on any device: replicas, finiteness."""
        state = self.held.state()
        found = self.check(state)
        self.held.take(state)
        return found

    @method(ONE_TO_ALL)
    def save(self, *, path: str) -> None:
        """Begins to write the training state as it is now under `path`."""
        state = self.held.state()
        self.writing = start_save(path, state, self.saved)
        self.held.take(state)

    @method(ONE_TO_ALL)
    def written(self, *, wait: bool) -> Sums | str | None:
        """What this process wrote, or in words why it failed; None while it writes."""
        if self.writing is None or not (wait or self.writing.done()):
            return None
        error = self.writing.exception()
        return f"{type(error).__name__}: {error}" if error else self.writing.result()


class Critic(TrainedRole):
    """The value function; started from a policy, its head is zero."""

    head: Head = "value"

    @method(
        THREE_D_PROTO,
        reads=("input_ids", "response_mask"),
        optional=("length",),
        writes=("values",),
    )
    def compute_values(self, shard: Shard) -> Answer:
        """The value before each response token; 0 elsewhere."""
        (values,) = self.score_responses(shard, self.scorer.values)
        return Answer({"values": values}, shard.rows)

    @method(ONE_TO_ALL, reads=("input_ids", "length", "response_mask"), extra="columns")
    def update_critic(self, shard: Shard) -> Answer:
        """Updates the value function."""
        return self.update(shard)


class RewardModel(TrainedRole):
    """A score model that is trained: one number a sequence, read at its last token."""

    head: Head = "score"
    may_lack_head = True

    @method(THREE_D_PROTO, reads=("input_ids", "length"), writes=("score",))
    def compute_reward(self, shard: Shard) -> Answer:
        """score (B,) of prompt and response together."""
        names = ("input_ids", "length")
        (score,) = self.forward(shard, names, self.scorer.scores)
        return Answer({"score": score}, shard.rows)

    @method(ONE_TO_ALL, reads=("input_ids", "length", "response_mask"), extra="columns")
    def update_reward(self, shard: Shard) -> Answer:
        """Updates the scores."""
        return self.update(shard)


class Reference(ModelRole):
    """The frozen policy of the start, from which KL is measured."""

    @method(
        THREE_D_PROTO,
        reads=("input_ids", "response_mask"),
        optional=("length",),
        writes=("ref_log_prob",),
    )
    def compute_ref_log_prob(self, shard: Shard) -> Answer:
        """Log-probs of the response tokens under the reference; 0 elsewhere."""
        logp, _ = self.score_responses(shard, self.scorer.log_probs)
        return Answer({"ref_log_prob": logp}, shard.rows)


class Reward(ModelRole):
    """A score model: one number a sequence, read at its last token."""

    head: Head = "score"
    section = "reward"  # its settings

    @method(THREE_D_PROTO, reads=("input_ids", "length"), writes=("score",))
    def compute_reward(self, shard: Shard, *, evaluates: bool = False) -> Answer:
        """score (B,) of prompt and response together, in training and evaluation alike."""
        names = ("input_ids", "length")
        (score,) = self.forward(shard, names, self.scorer.scores)
        return Answer({"score": score}, shard.rows)


class Cost(Reward):
    """A score model of harm: what a constraint holds down (arXiv 2310.12773)."""

    section = "cost"

    @method(THREE_D_PROTO, reads=("input_ids", "length"), writes=("cost",))
    def compute_cost(self, shard: Shard) -> Answer:
        """cost (B,) of prompt and response together."""
        answer = self.compute_reward(shard)
        return Answer({"cost": answer.columns["score"]}, answer.rows)


def masked(x_BT: np.ndarray, shard: Shard) -> np.ndarray:
    """x where the batch has response tokens, 0 elsewhere."""
    return np.where(shard.columns["response_mask"], x_BT, np.float32(0))


def role_class(builder: partial[Any]) -> type:
    """The class behind a builder; ValueError where that is no partial of one."""
    if not isinstance(builder, partial) or not isinstance(builder.func, type):
        raise ValueError(
            f"roles() of the algorithm has {builder!r}: each role must be a functools.partial of "
            "its class, as partial(Reward)"
        )
    return builder.func


def check_model(
    builder: partial[Any], placement: RolePlacement, tokens: int, highest_id: int
) -> None:
    """Refuses, before a process starts, what a model cannot take.

    A mesh that does not divide it, rows longer than its positions, ids outside its vocabulary.
    """
    role = role_class(builder)
    if not issubclass(role, ModelRole):
        return
    model = builder.keywords["model"]
    config, *_ = plan_model(placement, model, role.head)
    if highest_id >= config.vocab:
        raise ValueError(
            f"token id {highest_id} (of the data, or that the actor can generate) is outside the "
            f"vocabulary of {config.vocab} of {model}; use the tokenizer that belongs to the model"
        )
    if tokens > config.max_positions:
        raise ValueError(
            f"rows of up to {tokens} tokens (the longest prompt and rollout.max_new_tokens, or the "
            f"longest row) exceed the {config.max_positions} positions of {model}; lower "
            "rollout.max_new_tokens, or cut rows by data.max_prompt_tokens, data.max_tokens"
        )
