# SPDX-License-Identifier: Apache-2.0
"""The policy: it generates, scores its tokens and learns; in one pool, or generates in another."""

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hfjax.config import RolloutConfig
from hfjax.controller.protocol import (
    ONE_TO_ALL,
    THREE_D_ALL_MICRO_DP,
    THREE_D_PROTO,
    Answer,
    Shard,
    method,
)
from hfjax.controller.worker import RoleContext
from hfjax.engine.checks import Check, Fault
from hfjax.engine.decode import Decoder
from hfjax.engine.exchange import Exchange, Side
from hfjax.engine.hybrid import Relay
from hfjax.engine.microbatch import cut_micros
from hfjax.engine.passes import Passes
from hfjax.engine.sampling import Sampling
from hfjax.engine.train import LossFn
from hfjax.models.hf import generation_stop_ids
from hfjax.models.llama import ModelConfig, Params, abstract_params
from hfjax.roles import ROW_COLUMNS, WIDTH_BUCKET, ModelRole, TrainedRole, plan_model
from hfjax.tokenizer import load_tokenizer
from meshes.layouts import (
    HYBRID_V,
    HYBRID_V_PERMUTE,
    TWO_COPIES,
    Layout,
    generate_layout,
    shardings,
)
from meshes.placement import RolePlacement

GENERATES = method(
    THREE_D_ALL_MICRO_DP,
    reads=("prompt_ids", "prompt_length", "row_id"),
    optional=("max_new_tokens",),
    writes=(
        "input_ids",
        "length",
        "response_mask",
        "rollout_log_probs",
        "rollout_truncated_log_probs",
        "truncated",
    ),
)


class Generation:
    """The decoder of a model on its mesh, with a run's settings."""

    def __init__(
        self,
        rollout: RolloutConfig,
        config: ModelConfig,
        mesh: jax.sharding.Mesh,
        layout: Layout,
        *,
        model: str,
        seed: int,
        sequences: int = 0,
    ) -> None:
        """`model` gives the ids that end a response; so many rows are generated at a time."""
        self.rollout, self.seed, self.sequences = rollout, seed, sequences
        self.passes = Passes(mesh, layout)
        self.decoder = Decoder(config, mesh, layout)
        self.stop_ids = stop_ids(model)

    def sampling(self, n: int, *, greedy: bool) -> Sampling:
        """The rollout's settings for n responses a prompt; greedy ones ignore the filters."""
        r = self.rollout
        greedy = greedy or r.temperature == 0
        filters = {} if greedy else {"top_k": r.top_k, "top_p": r.top_p, "min_p": r.min_p}
        return Sampling(
            n=n,
            temperature=r.temperature or 1.0,
            greedy=greedy,
            max_new_tokens=r.max_new_tokens,
            min_new_tokens=r.min_new_tokens,
            stop_ids=self.stop_ids,
            ignore_eos=r.ignore_eos,
            **filters,
        )

    def columns(self, weights: Params, shard: Shard, *, greedy: bool) -> dict[str, np.ndarray]:
        """What generate_sequences writes, for the rows of this process."""
        n, ids_BP = shard.group, shard.columns["prompt_ids"]
        if len(ids_BP) % n or (ids_BP != np.repeat(ids_BP[::n], n, axis=0)).any():
            raise ValueError(
                f"generate_sequences: {n} neighbouring rows are not one prompt each; give the call "
                "group=1, or rows as the step was given them"
            )
        sampling = self.sampling(n, greedy=greedy)
        done = []
        for prompts in self.passes.waves(shard, self.sequences):
            arrays = self.wave(weights, shard, prompts, sampling)
            # waited for: the caches of two waves may not fit
            done.append((prompts, jax.block_until_ready(arrays)))
        return self.passes.collect(shard, done)

    def wave(
        self, weights: Params, shard: Shard, prompts: np.ndarray, sampling: Sampling
    ) -> dict[str, jax.Array]:
        """Responses to the prompts of these numbers, on the devices."""
        n, place = shard.group, self.passes.placer(shard, prompts)
        default = np.full(len(shard.rows), sampling.max_new_tokens, np.int32)
        limit = np.minimum(shard.columns.get("max_new_tokens", default), default)
        out = self.decoder.generate(
            weights,
            place(shard.columns["prompt_ids"][::n]),
            place(shard.columns["prompt_length"][::n], filler=1),
            place(shard.columns["row_id"].reshape(-1, n)),
            jax.random.fold_in(jax.random.key(self.seed), shard.step),
            sampling,
            max_new_B=place(limit.reshape(-1, n)),
        )
        filtered_BT = out.truncated_log_probs_BT
        return {
            "input_ids": out.input_ids_BT,
            "length": out.length_B,
            "response_mask": out.response_mask_BT,
            "rollout_log_probs": out.log_probs_BT,
            "rollout_truncated_log_probs": out.log_probs_BT if filtered_BT is None else filtered_BT,
            "truncated": out.truncated_B,
        }


class Actor(TrainedRole):
    """The policy: generates, scores its tokens, learns."""

    with_entropy = True

    def __init__(
        self,
        context: RoleContext,
        *,
        rollout: RolloutConfig | None = None,
        seed: int = 0,
        exchange: Exchange | None = None,
        pretrain: LossFn | None = None,
        measured_loss: LossFn | None = None,
        **trained: Any,
    ) -> None:
        """`rollout` None: an actor that never generates; `exchange`: its second copy does.

        `pretrain` is the loss of update_pretrain, an update of its own; `measured_loss` that of a
        call's first mini-batch, with entropies, where it is not the others'.
        """
        self.rank, self.exchange = context.rank, exchange
        self.generates = rollout is not None and exchange is None
        temperature = rollout.temperature if rollout else 1.0
        super().__init__(context, temperature=temperature, seed=seed, **trained)
        of_text = {"temperature": 1.0}  # whatever that of sampling is
        self.pretrainer = self.make_trainer(pretrain, (), **of_text) if pretrain else None
        if measured_loss:
            self.first = self.make_trainer(measured_loss, trained["columns"], with_entropy=True)
        if rollout and self.generates:
            layout = self.generate_layout()
            self.generation = Generation(
                *(rollout, self.config, self.mesh, layout),
                model=self.model,
                seed=seed,
                sequences=self.placement.generate_sequences,
            )

    @staticmethod
    def two_copies(
        builder: partial[Any],
        trains: RolePlacement,
        generates: RolePlacement,
        processes: tuple[int, int],
    ) -> tuple[partial[Any], partial[Any], Exchange]:
        """Builders of an actor and of its second copy, and the way between their weights."""
        settings, kind = builder.keywords, builder.func
        if getattr(kind, "generate_sequences", None) is not Actor.generate_sequences:
            raise ValueError(
                f"[{trains.role}] relay = {TWO_COPIES!r} generates as hfjax.actor.Rollout does, "
                f"{kind} has a generate_sequences of its own; use another relay"
            )
        exchange = make_exchange(settings, trains, generates, processes)
        kept = {name: settings[name] for name in ("model", "seed", "rollout") if name in settings}
        dtype = settings["training"].compute_dtype
        second = partial(Rollout, compute_dtype=dtype, exchange=exchange, **kept)
        return partial(builder, exchange=exchange), second, exchange

    def generate_layout(self) -> Layout:
        """Where weights and rows lie while it generates."""
        kv_heads, relay = self.config.kv_heads, self.placement.relay
        return generate_layout(self.shape, kv_heads=kv_heads, relay=relay)

    def make_relay(self) -> Relay | None:
        """From training to generation."""
        if not self.generates:
            return None
        shapes, _ = abstract_params(self.config, self.head, self.replicas.weight_dtype)
        return Relay(
            *(self.mesh, self.layout, self.generate_layout(), shapes, self.axes),
            self.compute_dtype,
            by_compiler=self.placement.relay == HYBRID_V_PERMUTE,
            whole=self.placement.relay == HYBRID_V,
        )

    @GENERATES
    def generate_sequences(self, shard: Shard, *, greedy: bool = False) -> Answer:
        """A response a row; the n adjacent rows of a prompt share its prefill.

        A sampled token depends on (seed, step, row_id, position) and the weights alone. Weights
        are re-laid first if they changed. rollout_log_probs are those of logits / temperature over
        the whole vocabulary, rollout_truncated_log_probs those over what the filters left.
        """
        assert self.generates, "this actor was built without a [rollout] section"
        start_s = time.perf_counter()
        weights = self.held.generate()
        relay_s = time.perf_counter() - start_s
        columns = self.generation.columns(weights, shard, greedy=greedy)
        return Answer(columns, shard.rows, {"timing_s/update_weights": relay_s})

    @method(
        THREE_D_PROTO,
        reads=("input_ids", "response_mask"),
        optional=("length",),
        writes=("old_log_probs", "entropy"),
    )
    def compute_log_prob(self, shard: Shard) -> Answer:
        """Log-probs and entropies of the response tokens under the training layout; 0 elsewhere."""
        logp, entropy = self.score_responses(shard, self.scorer.log_probs)
        return Answer({"old_log_probs": logp, "entropy": entropy}, shard.rows)

    @method(ONE_TO_ALL, reads=("input_ids", "length", "response_mask"), extra="columns")
    def update_actor(self, shard: Shard) -> Answer:
        """Updates the policy."""
        return self.update(shard)

    @method(ONE_TO_ALL, reads=ROW_COLUMNS)
    def update_pretrain(self, shard: Shard) -> Answer:
        """One update on whole texts, which keeps the policy a language model (PTX)."""
        assert self.pretrainer is not None, "this actor was built without a pretraining loss"
        rows = {name: shard.columns[name] for name in ROW_COLUMNS}
        micros = cut_micros(
            rows,
            replicas=self.replicas.count,
            micro_sequences=min(self.training.micro_sequences, shard.n_rows),
            micro_tokens=self.training.micro_tokens,
            bucket=WIDTH_BUCKET,
        )
        return self.told(shard, self.updated(self.pretrainer, micros), "pretrain_")

    @method(ONE_TO_ALL)
    def send_weights(self, bucket: int, *after: Any) -> list[Any]:
        """This process's parcels of a bucket.

        What comes `after` is waited for, so that few buckets are on their way at a time.
        """
        assert self.exchange is not None
        return self.exchange.pack(bucket, self.rank, self.held.train())


class Rollout(ModelRole):
    """The second copy of an actor, in a pool of its own: it generates with what it was sent."""

    def __init__(
        self,
        context: RoleContext,
        *,
        exchange: Exchange,
        rollout: RolloutConfig,
        seed: int = 0,
        **model: Any,
    ) -> None:
        """Holds no weights before they come; `model` goes to ModelRole."""
        self.params: dict[int, jax.Array] = {}  # by place in the tree
        super().__init__(context, loads=False, seed=seed, **model)
        self.rank, self.exchange = context.rank, exchange
        layout = generate_layout(
            self.shape, kv_heads=self.config.kv_heads, relay=self.placement.relay
        )
        placed, self.treedef = jax.tree.flatten(shardings(self.mesh, layout, self.axes))
        self.shardings = placed
        self.check = Check(self.mesh, self.treedef.unflatten(placed))
        self.generation = Generation(
            *(rollout, self.config, self.mesh, layout),
            model=self.model,
            seed=seed,
            sequences=self.placement.generate_sequences,
        )

    @GENERATES
    def generate_sequences(self, shard: Shard, *, greedy: bool = False) -> Answer:
        """As the actor's, with the weights received."""
        columns = self.generation.columns(self.received(), shard, greedy=greedy)
        self.rest()
        return Answer(columns, shard.rows)

    def received(self) -> Params:
        """The weights that have come, as a tree."""
        weights = self.weights()
        return self.treedef.unflatten([weights[i] for i in range(len(self.shardings))])

    @method(ONE_TO_ALL)
    def check_weights(self) -> list[Fault]:
        """What is wrong with the weights that have come, on any device: replicas, finiteness."""
        if not self.params:
            return []
        found = self.check(self.received())
        self.rest()
        return found

    @method(ONE_TO_ALL)
    def receive_weights(self, bucket: int, *parcels: Any) -> None:
        """Takes up a bucket's parcels."""
        self.exchange.unpack(bucket, self.rank, parcels, self.shardings, self.params)
        jax.block_until_ready(self.params)


def make_exchange(
    settings: Mapping[str, Any],
    trains: RolePlacement,
    generates: RolePlacement,
    processes: tuple[int, int],
) -> Exchange:
    """Of the model in an actor's settings, placed in a training and a generation pool."""
    sides, shapes = [], []
    for place, count in zip((trains, generates), processes, strict=True):
        config, layout, parameters, axes = plan_model(place, settings["model"], Actor.head)
        if place is generates:
            kv_heads, relay = config.kv_heads, place.relay
            layout = generate_layout(place.mesh_shape, kv_heads=kv_heads, relay=relay)
        sides.append(Side(place.mesh_shape, layout, count))
        shapes.append(parameters)
    dtype = jnp.dtype(settings["training"].compute_dtype)
    return Exchange(sides[0], sides[1], (shapes[0], shapes[1]), axes, dtype)


def stop_ids(model: str) -> tuple[int, ...]:
    """Ids that end a response: those of the model's files and the tokenizer's end token."""
    ids = (*generation_stop_ids(model), *load_tokenizer(model).stop_ids)
    return tuple(dict.fromkeys(ids))
