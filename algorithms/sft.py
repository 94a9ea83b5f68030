# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning: the mean negative log-likelihood of the demonstrated tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from hfjax import rl
from hfjax.actor import Actor
from hfjax.batch import Batch
from hfjax.engine.train import Outputs
from hfjax.items import EXAMPLES
from hfjax.metrics import Mean

DATA = EXAMPLES  # rows are demonstrations, not prompts


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The one choice there is."""

    aggregation: rl.Aggregation = "token-mean"  # of token losses over the mini-batch

    def __post_init__(self) -> None:
        if self.aggregation == "seq-mean-token-sum-norm":
            raise ValueError(
                "algorithm.aggregation='seq-mean-token-sum-norm': fine-tuning has no length to "
                "divide by; use 'seq-mean-token-sum'"
            )


def roles(cfg: Settings) -> dict[str, Any]:
    """The actor alone."""
    return {"actor": partial(Actor, loss=partial(sft_loss, cfg=cfg), columns=())}


def step(m: Any, examples: Batch, cfg: Settings) -> tuple[Batch, Any]:
    """One update on rows of prompt and response."""
    return examples, m.actor.update_actor(examples)


def sft_loss(
    outputs: Outputs, batch: Mapping[str, jax.Array], total: rl.Denominators, *, cfg: Settings
) -> tuple[jax.Array, Mapping[str, Mean]]:
    """-log p of the tokens under response_mask."""
    mask_BT = batch["response_mask"]
    loss = rl.aggregate(-outputs.log_probs_BT, mask_BT, total, cfg.aggregation)
    return loss, {"nll": rl.loss_metric(loss, mask_BT, total)}
