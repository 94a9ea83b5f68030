# SPDX-License-Identifier: Apache-2.0
"""What the single controller costs: a call's dispatch, the bytes it sees, what it leaves behind.

    python -m benchmarks.dispatch [--calls 200] [--steps 200] [--ppo-steps 24]

Toy roles in two pools of Ray processes pass columns on; nothing is computed there, so that what is
measured is the controller's. Then PPO on the embedded model: the share of an iteration in which no
worker runs. Exit status 1 where payload passed the driver, or memory grew.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figure14 import host
from benchmarks.overlap import WARM, run, warm_steps
from hfjax.batch import Batch
from hfjax.controller.handle import Models, start
from hfjax.controller.protocol import THREE_D_PROTO, Answer, Shard, method
from hfjax.controller.worker import RoleContext
from hfjax.timeline import CONTROLLER, HERE, Bar, busy_s, read_bars
from meshes.mesh import MeshShape
from meshes.placement import Placement, Pool, RolePlacement

ROWS = 64
LAG_S = 1.0  # Ray frees objects in the background, and counts them now and then
STORE_GROWTH, RESIDENT_GROWTH = 0.1, 0.05  # that may be seen from the tenth step to the last


class Passer:
    """Gives a column back under another name."""

    def __init__(self, context: RoleContext) -> None:
        pass

    @method(THREE_D_PROTO, reads=("x",), writes=("y",))
    def first(self, shard: Shard) -> Answer:
        """y = x."""
        return Answer({"y": np.array(shard.columns["x"])}, shard.rows)

    @method(THREE_D_PROTO, reads=("y",), writes=("z",))
    def second(self, shard: Shard) -> Answer:
        """z, a number a row, of y."""
        return Answer({"z": shard.columns["y"][:, 0]}, shard.rows)


def placement() -> Placement:
    """Two pools of one process."""
    shape = MeshShape(data=1)
    roles = {name: RolePlacement(name, f"pool-{name}", infer=shape) for name in ("a", "b")}
    return Placement({f"pool-{name}": Pool(f"pool-{name}", 1) for name in roles}, roles, "cpu")


class Watch:
    """Counts bytes of arrays that the driver reads or shares."""

    def __init__(self, models: Models) -> None:
        self.nbytes = 0
        runtime: Any = models.runtime
        get, share = runtime.get, runtime.share

        def watched_get(refs: Sequence[Any]) -> list[Any]:
            values = get(refs)
            self.nbytes += sum(getattr(value, "nbytes", 0) for value in values)
            return values

        def watched_share(value: Any) -> Any:
            self.nbytes += getattr(value, "nbytes", 0)
            return share(value)

        runtime.get, runtime.share = watched_get, watched_share


def dispatched(models: Models, calls: int) -> tuple[float, float]:
    """Median seconds until a call is on its way, and until it is done and its columns are back."""
    batch = Batch(x=np.zeros((ROWS, 4), np.float32))
    sent, done = [], []
    for _ in range(calls):
        start_s = time.perf_counter()
        made = models.a.first(batch)
        sent.append(time.perf_counter() - start_s)
        made["y"]
        done.append(time.perf_counter() - start_s)
    models.drain()
    return statistics.median(sent), statistics.median(done)


def passed_on(models: Models, watch: Watch, megabytes: int) -> tuple[int, int, float]:
    """Bytes of the batch, those that the driver saw while two roles passed it on, and seconds.

    The batch enters from the driver, once; what it sees beyond that are the second role's numbers.
    """
    x = np.zeros((ROWS, megabytes * 250_000 // ROWS), np.float32)
    start_s = time.perf_counter()
    made = models.a.first(Batch(x=x))
    watch.nbytes = 0
    models.b.second(made)["z"]
    models.drain()
    return x.nbytes, watch.nbytes, time.perf_counter() - start_s


def store_used() -> float:
    """Bytes that Ray's object store holds; they follow the truth within half a second."""
    import ray

    time.sleep(LAG_S)
    about: Any = ray  # its stubs call these optional
    total, free = about.cluster_resources(), about.available_resources()
    return total["object_store_memory"] - free.get("object_store_memory", 0.0)


def gauge_error() -> float:
    """How far `store_used` is from a held object's bytes, relative: it must see them."""
    import ray

    before, held = store_used(), np.zeros(100_000_000, np.int8)
    ref = ray.put(held)
    error = abs(store_used() - before - held.nbytes) / held.nbytes
    del ref
    return error


def resident(pid: int | str) -> int:
    """Bytes of a process's memory without the object store's pages, which processes share."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    return sum(int(status[kind].split()[0]) * 1024 for kind in ("RssAnon", "RssFile"))


@dataclass(frozen=True)
class Held:
    """Bytes that are in use after a step: in the object store, by the driver and each worker."""

    store: float
    resident: tuple[int, ...]


def left_behind(models: Models, steps: int, at: Sequence[int]) -> dict[int, Held]:
    """What is held after some of so many steps of a megabyte.

    As a trainer does, a step holds its batch until the next one.
    """
    x, seen = np.zeros((ROWS, 1_000_000 // 4 // ROWS), np.float32), {}
    pools: list[Any] = [handle.pool for handle in models.handles.values()]
    pids = ["self", *(hello["pid"] for pool in pools for hello in pool.hellos)]
    for step in range(1, steps + 1):
        made = models.a.first(Batch(x=x))
        models.b.second(made)["z"]
        models.drain()
        if step in at:
            seen[step] = Held(store_used(), tuple(map(resident, pids)))
    return seen


def idle_shares(bars: Sequence[Bar]) -> list[tuple[float, float]]:
    """Of each iteration after warm-up, the share with no worker busy, and with no reward either.

    An iteration lasts until the next begins: metrics and log are in it.
    """
    steps = warm_steps(bars)
    begins = [min(bar.begin_s for bar in step) for step in steps]
    shares = []
    for step, begin_s, end_s in zip(steps, begins, begins[1:], strict=False):
        workers = busy_s(bar for bar in step if bar.pool not in HERE)
        all_roles = busy_s(bar for bar in step if bar.pool != CONTROLLER)
        shares.append(tuple(1 - busy / (end_s - begin_s) for busy in (workers, all_roles)))
    return shares


def show_toys(calls: int, steps: int) -> bool:
    """Prints what toy roles measure; whether nothing passed the driver and nothing grew."""
    fine = True
    with start(placement(), {"a": Passer, "b": Passer}, log_to_driver=False) as models:
        watch = Watch(models)
        dispatched(models, 10)
        sent_s, done_s = dispatched(models, calls)
        print(f"a call of {ROWS} rows: on its way after {sent_s * 1e3:.2f} ms, done and read after")
        print(f"  {done_s * 1e3:.2f} ms; medians of {calls}")
        for megabytes in (1, 100):
            size, seen, took_s = passed_on(models, watch, megabytes)
            fine &= seen <= ROWS * 8
            print(f"a column of {size:,} bytes from role to role: the driver read {seen:,} bytes;")
            print(f"  {took_s:.3f} s with its way in")
        error = gauge_error()
        fine &= error < 0.01
        print(f"object store: an object of 100 MB is seen to {error:.1%}; steps of 1 MB:")
        found = left_behind(models, steps, at := sorted({10, min(60, steps), steps}))
        for step, held in found.items():
            sizes = ", ".join(f"{nbytes / 1e6:.1f}" for nbytes in held.resident)
            print(f"  after step {step:3}: {held.store:>11,.0f} bytes in the store; driver and")
            print(f"    workers hold {sizes} MB")
        early, late = found[at[0]], found[steps]
        pairs = zip(early.resident, late.resident, strict=True)
        fine &= late.store <= early.store * (1 + STORE_GROWTH)
        fine &= all(now <= then * (1 + RESIDENT_GROWTH) for then, now in pairs)
    return fine


def show_ppo(steps: int, out: Path) -> None:
    """Prints the share of an iteration in which no worker is busy, of PPO with runtime ray."""
    seconds = run("laptop", steps, out)
    pairs = idle_shares(read_bars(out / "trace.json"))
    idle, without_reward = (statistics.median(shares) for shares in zip(*pairs, strict=True))
    print(f"PPO on the embedded model, {statistics.median(seconds):.3f} s a step: no worker runs")
    print(f"  in {idle:.1%} of an iteration; neither a worker nor the reward function, which is")
    print(f"  beside the controller, in {without_reward:.1%}; medians of {len(pairs)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the numbers; 1 where payload passed the driver, or memory grew."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dispatch")
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ppo-steps", type=int, default=24)
    options = parser.parse_args(arguments)
    if options.steps <= 10 or options.ppo_steps < WARM + 3:
        parser.error(f"use more than 10 --steps and at least {WARM + 3} --ppo-steps")
    print(f"Ray, two pools of a process each; {host()}")
    fine = show_toys(options.calls, options.steps)
    show_ppo(options.ppo_steps, Path(tempfile.mkdtemp(prefix="hfjax-dispatch-")) / "ppo")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
