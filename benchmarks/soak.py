# SPDX-License-Identifier: Apache-2.0
"""What a long run leaves behind: PPO on the embedded model, over Ray, on two pools.

    python -m benchmarks.soak [--steps 500] [--placement FILE] [--every 10] [--out DIR]

Every few steps it reads what each process holds: resident memory, file handles, live arrays,
Python's objects, programs compiled; and the bytes in Ray's object store. Then it prints each one's
slope after warm-up. Exit status 1 where something grows. Without a placement: that of cpu8_split,
with the policy in two processes.
"""

import argparse
import dataclasses
import gc
import json
import os
import sys
import tempfile
import types
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
import numpy as np

from algorithms import ppo
from benchmarks.dispatch import resident, store_used
from benchmarks.figure14 import host
from hfjax.actor import Actor
from hfjax.batch import Batch
from hfjax.controller.protocol import ONE_TO_ALL, method
from hfjax.controller.worker import COMPILE_EVENT
from hfjax.roles import Critic
from hfjax.run import train
from meshes.placement import Placement, load_placement

WARM = 20  # steps after which nothing may grow
GROWTH = 0.01  # in 100 steps: of memory, relative to what there is
SAVE_EVERY = 10  # the first save compiles programs, which is to be over by then
KEPT = 30  # objects a save: Orbax reads tensorstore's metrics, whose lists 0.1.86 never frees

compiled: list[str] = []  # programs of this process


def count_compiles() -> None:
    """From now on."""

    def count(event: str, duration_secs: float, **about: Any) -> None:
        compiled.extend([event] if event == COMPILE_EVENT else [])

    jax.monitoring.register_event_duration_secs_listener(count)


def footprint() -> dict[str, float]:
    """What this process holds, by name."""
    gc.collect()
    return {
        "MB resident": resident("self") / 1e6,
        "file handles": len(os.listdir("/proc/self/fd")),
        "live arrays": len(jax.live_arrays()),
        "objects": len(gc.get_objects()),
        "compiled": len(compiled),
    }


class Weighed:
    """A role that says what its process holds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        count_compiles()
        super().__init__(*args, **kwargs)

    @method(ONE_TO_ALL)
    def footprint(self) -> dict[str, float]:
        """By name."""
        return footprint()


class WeighedActor(Weighed, Actor):
    """A policy, in the first pool."""


class WeighedCritic(Weighed, Critic):
    """A value function, in the second."""


def two_processes() -> Placement:
    """cpu8_split, with the policy in two, which meet before each call."""
    placement = load_placement("cpu8_split", ("actor", "reference", "critic"))
    policy = dataclasses.replace(placement.pools["policy"], processes=2)
    return dataclasses.replace(placement, pools={**placement.pools, "policy": policy})


def observed(every: int, marks: dict[int, dict[str, float]], file: Path) -> types.ModuleType:
    """PPO that notes what is held as every so many steps begin, also in a file."""

    def roles(cfg: Any) -> dict[str, Any]:
        table = ppo.roles(cfg)
        for name, kind in (("actor", WeighedActor), ("critic", WeighedCritic)):
            table[name] = partial(kind, *table[name].args, **table[name].keywords)
        return table

    def step(models: Any, prompts: Batch, cfg: Any) -> Any:
        if models.step % every == 1:
            marks[models.step - 1] = everywhere(models)
            with file.open("a") as lines:
                lines.write(json.dumps({"step": models.step - 1} | marks[models.step - 1]) + "\n")
        return ppo.step(models, prompts, cfg)

    module = types.ModuleType(ppo.__name__)
    vars(module).update(vars(ppo) | {"step": step, "roles": roles})
    return module


def everywhere(models: Any) -> dict[str, float]:
    """What the driver, every worker and the object store hold."""
    found = {f"driver: {name}": value for name, value in footprint().items()}
    for role in (models.actor, models.critic):
        for rank, mine in enumerate(role.footprint().result()):
            found |= {f"{role.pool.name}/{rank}: {name}": value for name, value in mine.items()}
    return found | {"object store: MB": store_used() / 1e6}


def slope(steps: Sequence[int], values: Sequence[float]) -> tuple[float, float]:
    """Least squares' slope in 100 steps, and its standard error."""
    x = np.array(steps, np.float64) - np.mean(steps)
    y = np.array(values, np.float64) - np.mean(values)
    rise = (x @ y) / (x @ x)
    error = np.sqrt(np.sum((y - rise * x) ** 2) / (len(x) - 2) / (x @ x))
    return 100 * float(rise), 100 * float(error)


def report(marks: dict[int, dict[str, float]]) -> bool:
    """Prints first and last number and slope of everything; whether nothing grows.

    Memory may by GROWTH, objects by KEPT a save; what else is counted must not, beyond the error
    of its slope.
    """
    steps, fine = [step for step in marks if step >= WARM], True
    print(f"{'':28}{f'step {steps[0]}':>12}{f'step {steps[-1]}':>12}{'in 100 steps':>16}")
    for name in marks[steps[0]]:
        values = [marks[step][name] for step in steps]
        rise, error = slope(steps, values)
        most = GROWTH * values[0] if "MB" in name else 0.0
        most += 100 / SAVE_EVERY * KEPT if "objects" in name else 0.0
        grows = rise - 3 * error > most
        fine &= not grows
        line = f"{name:28}{values[0]:12,.6g}{values[-1]:12,.6g}{rise:+10.3f} ±{error:.3f}"
        print(line + ("  GROWS" if grows else ""))
    return fine


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs and prints; 1 where something grows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--placement", default="")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    if options.steps < WARM + 4 * options.every:
        parser.error(f"use at least {WARM + 4 * options.every} --steps")
    out = options.out or Path(tempfile.mkdtemp(prefix="hfjax-soak-")) / "run"
    marks: dict[int, dict[str, float]] = {}
    placement = options.placement or str(out.with_name("two_processes.toml"))
    if not options.placement:
        out.parent.mkdir(parents=True, exist_ok=True)
        Path(placement).write_text(two_processes().to_toml())
    count_compiles()
    train(
        observed(options.every, marks, out / "held.jsonl"),
        placement=placement,
        steps=options.steps,
        save_every=SAVE_EVERY,
        out=str(out),
    )
    print(f"PPO on the embedded model, {placement}, {options.steps} steps; {host()}")
    return 0 if report(marks) else 1


if __name__ == "__main__":
    sys.exit(main())
