# SPDX-License-Identifier: Apache-2.0
"""Batches from a file's items: the training order, which can be resumed, and the held-out set."""

import dataclasses
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any

import numpy as np

from hfjax.items import EXAMPLES, PROMPTS, Columns, DataConfig, Kind, Pair, load_items
from hfjax.tokenizer import load_tokenizer

log = logging.getLogger(__name__)


class Source:
    """Endless batches over the epochs of a set; where it stands can be saved and restored.

    Epoch e visits the rows in the permutation drawn from (seed, e). Rows left over at its end,
    fewer than a batch, are dropped: with shuffling they are others each time.
    """

    def __init__(
        self,
        items: Sequence[Any],
        collate: Callable[[Sequence[Any], int], Columns],
        *,
        batch: int,
        n: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        name: str = "the data",
    ) -> None:
        if len(items) < batch:
            raise ValueError(
                f"data.prompts_per_step={batch} is more than the {len(items)} usable rows of "
                f"{name}; use at most {len(items)}"
            )
        self.items, self._collate, self._batch, self._n = items, collate, batch, n
        self.epoch, self.position = 0, 0
        digest = hashlib.blake2b(digest_size=8)
        for item in items:
            digest.update(repr(item).encode())
        self._order = {"seed": seed, "shuffle": shuffle, "rows": digest.hexdigest()}
        self._permutation = self._permute()
        if dropped := len(items) % batch:
            log.warning("%s; %d rows dropped each epoch", self.describe(name), dropped)

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in an epoch."""
        return len(self.items) // self._batch

    def describe(self, name: str) -> str:
        """'train.jsonl: 10 rows, 4 a step, 2 steps per epoch'."""
        sizes = f"{len(self.items)} rows, {self._batch} a step"
        return f"{name}: {sizes}, {self.steps_per_epoch} steps per epoch"

    def next_batch(self) -> Columns:
        """The next rows of the epoch, each n times, as columns."""
        if self.position + self._batch > len(self.items):
            self.epoch, self.position = self.epoch + 1, 0
            self._permutation = self._permute()
        chosen = self._permutation[self.position : self.position + self._batch]
        self.position += self._batch
        return self._collate([self.items[i] for i in chosen], self._n)

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch begins, and what the order was drawn from."""
        return {"epoch": self.epoch, "position": self.position, **self._order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues there; refuses another file, seed or order, which would mix two orders."""
        for name, value in self._order.items():
            if state[name] != value:
                raise ValueError(
                    f"the data's {name} was {state[name]!r} in the checkpoint and is {value!r} "
                    "now; resume with the same file, seed and data settings or start a new run"
                )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._permutation = self._permute()

    def _permute(self) -> np.ndarray:
        if not self._order["shuffle"]:
            return np.arange(len(self.items))
        rng = np.random.default_rng([self._order["seed"], self.epoch])
        return rng.permutation(len(self.items))


def extent(items: Sequence[Any]) -> tuple[int, int]:
    """Tokens of the longest item, and the highest id in any."""
    rows = [row for item in items for row in (item if isinstance(item, Pair) else (item,))]
    return max(len(row.ids) for row in rows), max(max(row.ids) for row in rows)


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """A set for evaluation: every row once, in the file's order."""

    items: Sequence[Any]
    collate: Callable[[Sequence[Any], int], Columns]
    rows: int = 1  # that an item makes

    def batches(self, batch: int) -> Iterator[tuple[Columns, int]]:
        """Full batches, so that shapes repeat, and how many of their rows count.

        The last batch is filled up with its own last item; those rows stand at the end.
        """
        for start in range(0, len(self.items), batch):
            items = list(self.items[start : start + batch])
            filled = items + items[-1:] * (batch - len(items))
            yield self.collate(filled, 1), len(items) * self.rows


def make_texts(config: DataConfig, model: str, *, seed: int) -> Source | None:
    """Batches of whole texts for a pretraining loss; None without data.pretrain."""
    if not config.pretrain:
        return None
    items = load_items(config.pretrain, "train", load_tokenizer(model), config, EXAMPLES)
    batch = config.prompts_per_step
    how = {"seed": seed, "shuffle": config.shuffle, "name": config.pretrain}
    return Source(items, EXAMPLES.collate, batch=batch, **how)


def make_sources(
    config: DataConfig,
    model: str,
    *,
    kind: Kind = PROMPTS,
    n: int = 1,
    seed: int = 0,
    now: datetime | None = None,
) -> tuple[Source, HeldOut | None]:
    """Training batches and the evaluation set (None without data.eval), by the model's tokenizer.

    Everything that can be wrong with the data is found here, before any worker starts. Chat
    templates that ask for the time are told `now`.
    """
    tokenizer = load_tokenizer(model, now)
    items = load_items(config.train, "train", tokenizer, config, kind)
    source = Source(
        items,
        kind.collate,
        batch=config.prompts_per_step,
        n=n,
        seed=seed,
        shuffle=config.shuffle,
        name=config.train,
    )
    if not config.eval:
        return source, None
    held_out = load_items(config.eval, "eval", tokenizer, config, kind)
    if not held_out:
        raise ValueError(f"data.eval={config.eval}: no usable row is left; leave it out or mend it")
    return source, HeldOut(held_out, kind.collate, kind.rows)
