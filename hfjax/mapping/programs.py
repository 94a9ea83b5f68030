# SPDX-License-Identifier: Apache-2.0
"""Everything a role runs, lowered for a mesh without an array: what memory and meter can count."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from hfjax.engine.decode import Decoder
from hfjax.engine.hybrid import Relay
from hfjax.engine.replicas import Replicas
from hfjax.engine.sampling import Sampling
from hfjax.engine.scoring import Scorer
from hfjax.engine.train import OptimizerConfig, Outputs, Trainer
from hfjax.models.llama import Head, ModelConfig, abstract_params
from hfjax.rl import Denominators
from meshes.layouts import HYBRID_V, HYBRID_V_PERMUTE, generate_layout, shardings, train_layout
from meshes.mesh import make_mesh
from meshes.placement import RolePlacement

HALF = jnp.float16  # stands for bfloat16, which XLA's CPU compiler would move as float32

Lowered = dict[str, jax.stages.Lowered]


class Programs:
    """One model where it is placed, on the first devices of this process."""

    def __init__(
        self, cfg: ModelConfig, head: Head, placement: RolePlacement, dtype: Any = HALF
    ) -> None:
        """`cfg` with the padded vocabulary of this placement."""
        self.cfg, self.placement, self.dtype = cfg, placement, dtype
        self.head: Head = head
        shape = placement.mesh_shape
        self.mesh = make_mesh(jax.devices()[: shape.devices], shape)
        relay = placement.relay
        self.layout = train_layout(
            shape,
            kv_heads=cfg.kv_heads,
            zero=placement.zero,
            relay=relay,
            sequence_parallel=placement.sequence_parallel,
        )
        self.after = generate_layout(shape, kv_heads=cfg.kv_heads, relay=relay)
        self.shapes, self.axes = abstract_params(cfg, head)
        self.replicas = Replicas(self.mesh, self.layout, self.shapes, self.axes, dtype, relay=relay)

    def training(self, micros: int, rows: int, tokens: int, *, remat: str = "none") -> Lowered:
        """An update from `micros` micro-batches of `rows` rows over all replicas."""
        replicas = self.replicas
        options: Any = {"remat": remat, "zero": self.placement.zero}
        optimizer = OptimizerConfig()
        trainer = Trainer(self.cfg, self.head, replicas, optimizer, mean_output, **options)
        dtypes = {"input_ids": jnp.int32, "response_mask": jnp.bool_, "length": jnp.int32}
        shape = (micros, rows, tokens)
        columns = {
            name: jax.ShapeDtypeStruct(shape[:2] if name == "length" else shape, dtypes[name])
            for name in trainer.columns
        }
        cast = replicas.lowered(trainer.abstract_state().params)
        return ({"weights": cast} if cast else {}) | trainer.lowered(columns)

    def weights(self, dtype: Any) -> Any:
        """In the training layout, as passes read them."""
        return _placed(self.shapes, self.replicas.weight_shardings, dtype)

    def scoring(self, rows: int, tokens: int, *, trained: bool = True) -> Lowered:
        """A forward pass over `rows` rows of all replicas; a role that only infers holds halves."""
        scorer = Scorer(self.cfg, self.replicas)
        dtype = self.replicas.weight_dtype if trained else self.dtype
        where = self.replicas.row_sharding
        ids = jax.ShapeDtypeStruct((rows, tokens), jnp.int32, sharding=where)
        weights = self.weights(dtype)
        if self.head == "lm":
            return {"scoring": scorer.log_probs.lower(weights, ids)}
        if self.head == "value":
            return {"scoring": scorer.values.lower(weights, ids)}
        length = jax.ShapeDtypeStruct((rows,), jnp.int32, sharding=where)
        return {"scoring": scorer.scores.lower(weights, ids, length)}

    def relay(self) -> Lowered:
        """The way to generation, bucket by bucket."""
        mode, weights = self.placement.relay, self.weights(self.replicas.weight_dtype)
        options = {"by_compiler": mode == HYBRID_V_PERMUTE, "whole": mode == HYBRID_V}
        relay = Relay(
            *(self.mesh, self.replicas.layout, self.after, weights, self.axes, self.dtype),
            **options,
        )
        return {f"relay {k}": each for k, each in enumerate(relay.lowered(weights))}

    def generation(self, prompts: int, width: int, sampling: Sampling) -> Lowered:
        """Prefill, and all further tokens as one segment."""
        placed = shardings(self.mesh, self.after, self.axes)
        weights = _placed(self.shapes, placed, self.dtype)
        decoder = Decoder(self.cfg, self.mesh, self.after, segment=sampling.max_new_tokens)
        return decoder.lowered(weights, prompts, width, sampling)


def mean_output(
    outputs: Outputs, batch: Mapping[str, jax.Array], total: Denominators
) -> tuple[jax.Array, dict[str, Any]]:
    """A loss that reads what the head gives."""
    if outputs.scores_B is not None:
        return outputs.scores_B.sum() / total.sequences.astype(jnp.float32), {}
    each = outputs.log_probs_BT if outputs.values_BT is None else outputs.values_BT
    trained = jnp.where(batch["response_mask"], each, 0.0)
    return trained.sum() / total.tokens.astype(jnp.float32), {}


def _placed(shapes: Any, placed: Any, dtype: Any) -> Any:
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=where), shapes, placed
    )
