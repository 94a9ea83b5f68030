# SPDX-License-Identifier: Apache-2.0
"""What the single controller costs: a call's dispatch, the bytes it sees, what it leaves behind.

    python -m benchmarks.dispatch [--calls 200] [--steps 200]

Toy roles in two pools of Ray processes pass columns on. Nothing is computed: what is measured is
the controller's.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.figure14 import host
from hfjax.batch import Batch
from hfjax.controller.handle import Models, start
from hfjax.controller.protocol import THREE_D_PROTO, Answer, Shard, method
from hfjax.controller.worker import RoleContext
from meshes.mesh import MeshShape
from meshes.placement import Placement, Pool, RolePlacement

ROWS = 64
SETTLE_S = 30.0  # Ray frees objects in the background


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
    """Bytes that Ray's object store holds."""
    import ray

    about: Any = ray  # its stubs call these optional
    total, free = about.cluster_resources(), about.available_resources()
    return total["object_store_memory"] - free.get("object_store_memory", 0.0)


def left_behind(models: Models, steps: int) -> tuple[float, float]:
    """Bytes in the object store before and after so many steps of ten megabytes."""
    batch = Batch(x=np.zeros((ROWS, 10 * 250_000 // ROWS), np.float32))
    models.drain()
    before = settled(0.0)
    for _ in range(steps):
        models.b.second(models.a.first(batch))["z"]
        models.drain()
    return before, settled(before)


def settled(least: float) -> float:
    """What the store holds when it has come down to `least`, or has stopped falling."""
    until, last = time.monotonic() + SETTLE_S, float("inf")
    while (used := store_used()) > least + 4e6 and used < last and time.monotonic() < until:
        last = used
        time.sleep(2.0)
    return store_used()


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the numbers; 1 where payload passed the driver or the object store grew."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dispatch")
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(arguments)
    print(f"Two pools of a process each on Ray; {host()}")
    fine = True
    with start(placement(), {"a": Passer, "b": Passer}, log_to_driver=False) as models:
        watch = Watch(models)
        dispatched(models, 10)
        sent_s, done_s = dispatched(models, options.calls)
        print(f"a call of {ROWS} rows: on its way after {sent_s * 1e3:.2f} ms, done and read after")
        print(f"  {done_s * 1e3:.2f} ms; medians of {options.calls}")
        for megabytes in (1, 100):
            size, seen, took_s = passed_on(models, watch, megabytes)
            fine &= seen <= ROWS * 8
            print(f"a column of {size:,} bytes from role to role: the driver read {seen:,} bytes;")
            print(f"  {took_s:.3f} s with its way in")
        before, after = left_behind(models, options.steps)
        fine &= after <= before + 4e6
        print(f"object store before {options.steps} steps of 10 MB: {before:,.0f} bytes, after:")
        print(f"  {after:,.0f}")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
