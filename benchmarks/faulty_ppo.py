# SPDX-License-Identifier: Apache-2.0
"""PPO that does wrong what its environment tells it to, for `benchmarks.faults`.

HFJAX_FAULT is JSON: `do` at point `at` ("update", "reward", "scores") in `step` on `rank` (or row),
after writing the time to the file `mark`. Where the mark is there already, nothing is done, but for
rewards: what a row's reward does it always does. HFJAX_ROWS is a file for the rows of every step.
"""

import json
import os
import resource
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from algorithms import ppo
from hfjax import arithmetic
from hfjax.actor import Actor
from hfjax.batch import Batch
from hfjax.controller.protocol import Answer, Shard
from hfjax.roles import Critic

FAULT, ROWS = "HFJAX_FAULT", "HFJAX_ROWS"
Settings = ppo.Settings


def told(at: str, step: int, rank: int, *, again: bool = False) -> str:
    """What to do here, if anything; the file `mark` then says since when."""
    fault = json.loads(os.environ.get(FAULT, "{}"))
    if (fault.get("at"), fault.get("step"), fault.get("rank")) != (at, step, rank):
        return ""
    mark = Path(fault["mark"])
    if mark.exists() and not again:
        return ""
    if not mark.exists():
        mark.write_text(str(time.time()))
    return fault["do"]


def misbehave(do: str) -> None:
    """Does it."""
    if do:
        ACTIONS[do]()


def fail() -> None:
    raise ZeroDivisionError("told to fail")


def eat_memory() -> None:
    """Until an allocation fails; the limit is that of this process alone."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28), resource.RLIM_INFINITY))
    held = []
    while True:
        held.append(np.ones(1 << 22))


def wait() -> None:
    """Holds the step up until somebody ends the process, or a file appears beside the mark."""
    go = Path(json.loads(os.environ[FAULT])["mark"]).with_suffix(".go")
    while not go.exists():
        time.sleep(0.01)


ACTIONS = {
    "raise": fail,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exit": lambda: os._exit(3),
    "leave": exit,
    "hang": lambda: time.sleep(3600),
    "memory": eat_memory,
    "wait": wait,
}


class FaultyActor(Actor):
    """An actor whose process may fail in an update."""

    def __init__(self, context: Any, **settings: Any) -> None:
        super().__init__(context, **settings)
        self.rank = context.rank

    def update(self, shard: Shard) -> Answer:
        """Updates, where nothing is told."""
        misbehave(told("update", shard.step, self.rank))
        return super().update(shard)


class FaultyCritic(Critic):
    """A critic whose process may fail in an update."""

    def __init__(self, context: Any, **settings: Any) -> None:
        super().__init__(context, **settings)
        self.rank = context.rank

    def update(self, shard: Shard) -> Answer:
        """Updates, where nothing is told."""
        misbehave(told("critic", shard.step, self.rank))
        return super().update(shard)


def roles(cfg: Settings) -> dict[str, Any]:
    """PPO's, two of them replaced."""
    faulty: dict[str, Any] = {"actor": FaultyActor, "critic": FaultyCritic}
    return {
        name: partial(faulty.get(name, role.func), *role.args, **role.keywords)
        for name, role in ppo.roles(cfg).items()
    }


class NoNumbers:
    """The roles, with a NaN among the scores."""

    def __init__(self, models: Any) -> None:
        self.models, self.reward = models, self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.models, name)

    def compute_reward(self, batch: Batch) -> Batch:
        """The reward's answer, the first row's spoilt."""
        found = self.models.reward.compute_reward(batch)
        score = np.array(found["score"])
        score[0] = np.nan
        return found | Batch({"score": score})


def step(m: Any, prompts: Batch, cfg: Settings) -> tuple[Batch, Any]:
    """PPO's; a told NaN is in every step from that one on, or in it alone."""
    do = told("scores", m.step, 0) or ("nan" if os.environ.get(FAULT, "").count("always") else "")
    return ppo.step(NoNumbers(m) if do else m, prompts, cfg)


def reward(
    prompts: list[str],
    responses: list[str],
    ground_truths: list[Any],
    places: list[tuple[int, int]],
) -> list[float]:
    """Sums, and a line a row for each step where HFJAX_ROWS asks for it."""
    for step, row in places or ():
        misbehave(told("reward", step, row, again=True))
    if places and (file := os.environ.get(ROWS)):
        lines = [f"{s} {row} {prompt}\n" for (s, row), prompt in zip(places, prompts, strict=True)]
        with open(file, "a") as rows:
            rows.write("".join(lines))
    return arithmetic.sum_reward(prompts, responses, ground_truths)
