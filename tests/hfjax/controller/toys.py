# SPDX-License-Identifier: Apache-2.0
"""Small roles for the controller's tests: arithmetic, collectives, and ways to fail."""

import logging
import os
import signal
import time
from functools import partial
from typing import Any

import numpy as np

from hfjax.controller.protocol import (
    ALL_TO_ALL,
    DP_PROTO,
    ONE_TO_ALL,
    THREE_D_ALL_MICRO_DP,
    THREE_D_PP_ONLY,
    THREE_D_PROTO,
    Answer,
    Shard,
    method,
)
from hfjax.controller.worker import RoleContext
from hfjax.engine.exchange import Parcel
from meshes.mesh import MeshShape
from meshes.placement import Placement, Pool, RolePlacement

BUCKETS = 4  # of the master's weights


class Doubler:
    """Arithmetic on the rows a process holds."""

    def __init__(self, context: RoleContext, *, factor: int = 2, columns: tuple = ()) -> None:
        self.context, self.factor = context, factor
        if factor == 0:
            raise FileNotFoundError("no model at /nowhere")

    @method(DP_PROTO, reads=("x",), optional=("shift",), writes=("y", "text"))
    def double(self, shard: Shard, *, plus: int = 0) -> Answer:
        y = shard.columns["x"] * self.factor + plus + shard.columns.get("shift", 0)
        return Answer(
            {"y": y, "text": [f"{row}" for row in shard.rows]},
            shard.rows,
            {"double/rows": float(shard.n_rows)},
        )

    @method(THREE_D_ALL_MICRO_DP, reads=("y",), writes=("where",))
    def locate(self, shard: Shard) -> Answer:
        rank = np.full(len(shard.rows), self.context.rank)
        return Answer({"where": rank}, shard.rows, {})

    @method(ONE_TO_ALL, reads=("x",), extra="columns")
    def update(self, shard: Shard) -> Answer:
        self.factor += 1
        names = {name: float(np.sum(value)) for name, value in shard.columns.items()}
        return Answer({}, shard.rows, {f"sum/{name}": total for name, total in names.items()})

    @method(ALL_TO_ALL)
    def own(self, value: Any, *, more: Any = None) -> Any:
        return self.context.rank, value, more

    @method(THREE_D_PP_ONLY)
    def stage(self) -> int:
        return self.context.rank

    @method(ONE_TO_ALL)
    def facts(self) -> dict[str, Any]:
        return {
            "rank": self.context.rank,
            "pid": os.getpid(),
            "devices": len(self.context.devices),
            "factor": self.factor,
        }

    @method(ONE_TO_ALL)
    def warn(self, *, text: str) -> None:
        logging.getLogger("toys").info("hidden")
        logging.getLogger("toys").warning("%s", text)

    @method(THREE_D_PROTO, reads=("x",), writes=("y",))
    def wrong(self, shard: Shard) -> Answer:
        return Answer({"z": shard.columns["x"]}, shard.rows, {})

    @method(THREE_D_PROTO, reads=("x",), writes=("y",))
    def short(self, shard: Shard) -> Answer:
        return Answer({"y": shard.columns["x"][:1]}, shard.rows, {})

    @method(THREE_D_PROTO, reads=("x",), writes=("y",))
    def fails(self, shard: Shard, *, rank: int = 0) -> Answer:
        if self.context.rank == rank:
            raise ZeroDivisionError("a toy went wrong")
        return Answer({"y": shard.columns["x"]}, shard.rows, {})


class Summer:
    """Sums over all devices of its pool, in a jitted collective."""

    def __init__(self, context: RoleContext) -> None:
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        self.context = context
        self.mesh = Mesh(np.array(context.devices), ("all",))
        self.sharding = NamedSharding(self.mesh, PartitionSpec("all"))
        self.whole = NamedSharding(self.mesh, PartitionSpec())
        self.sum = jax.jit(lambda x: x.sum(), out_shardings=self.whole)
        scatter = partial(jax.lax.psum_scatter, axis_name="all", tiled=True)
        spec = PartitionSpec("all")
        whole = PartitionSpec()
        self.scatter = jax.jit(
            jax.shard_map(scatter, mesh=self.mesh, in_specs=whole, out_specs=spec, check_vma=False)
        )

    def total(self, shard: Shard) -> float:
        """The sum of column x over all rows, by the devices; rows short of a multiple are 0."""
        import jax

        count = len(self.context.devices)
        per = -(-shard.n_rows // count)
        full = np.zeros(per * count, np.float32)
        full[shard.rows] = shard.columns["x"]
        x = jax.make_array_from_callback(full.shape, self.sharding, lambda index: full[index])
        return float(np.asarray(self.sum(x).addressable_data(0)))

    @method(DP_PROTO, reads=("x",), writes=("sum",))
    def sums(self, shard: Shard, *, wait_s: float = 0.0) -> Answer:
        time.sleep(wait_s)
        total = np.full(len(shard.rows), self.total(shard), np.float32)
        return Answer(
            {"sum": total}, shard.rows, {"sum/total": float(total[0]) if len(total) else 0.0}
        )

    @method(DP_PROTO, reads=("x",), writes=("sum",))
    def breaks(self, shard: Shard, *, rank: int, how: str) -> Answer:
        """Before the collective, one rank raises, is killed, is stopped, or sleeps."""
        if self.context.rank == rank:
            if how == "raise":
                raise ZeroDivisionError("a toy went wrong")
            if how == "sleep":
                time.sleep(3600)
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])
        return self.sums(shard)

    @method(ONE_TO_ALL)
    def naps(self, *, rank: int, seconds: float) -> None:
        """One rank is late; nothing is computed together."""
        time.sleep(seconds if self.context.rank == rank else 0)

    @method(ONE_TO_ALL)
    def scatters(self) -> list[float]:
        """A reduce-scatter of ones: each device gets as many as there are devices."""
        ones = np.ones(len(self.context.devices), np.float32)
        return [float(shard.data[0]) for shard in self.scatter(ones).addressable_shards]

    @method(ONE_TO_ALL)
    def facts(self) -> dict[str, Any]:
        import jax

        return {
            "rank": self.context.rank,
            "pid": os.getpid(),
            "local": len(jax.local_devices()),
            "all": len(self.context.devices),
            "platform": jax.default_backend(),
        }


class Beside:
    """A role that lives in the controller's process."""

    on_driver = True
    closed = 0

    def __init__(self, context: RoleContext, *, unit: float = 1.0) -> None:
        self.context, self.unit = context, unit

    @method(ONE_TO_ALL, reads=("y", "text"), writes=("score", "response"))
    def score(self, shard: Shard) -> Answer:
        score = np.asarray(shard.columns["y"], np.float32) * np.float32(self.unit)
        response = [text + "!" for text in shard.columns["text"]]
        return Answer({"score": score, "response": response}, shard.rows, {"pid": os.getpid()})

    def close(self) -> None:
        type(self).closed += 1


class Master:
    """Has a number that updates raise; its pupil in another pool is told before it answers."""

    def __init__(self, context: RoleContext, *, exchange: Any = None) -> None:
        self.context, self.exchange, self.number = context, exchange, 0

    @staticmethod
    def two_copies(builder: Any, first: Any, second: Any, processes: Any) -> tuple[Any, Any, Any]:
        exchange = ToyExchange(BUCKETS, *processes)
        return partial(builder, exchange=exchange), partial(Pupil, exchange=exchange), exchange

    @method(ONE_TO_ALL, reads=("x",))
    def update(self, shard: Shard) -> Answer:
        self.number += 1
        return Answer({}, shard.rows, {"number": float(self.number)})

    @method(ONE_TO_ALL)
    def send_weights(self, bucket: int, *after: Any) -> list[Any]:
        parcels = self.exchange.parcels(bucket, writer=self.context.rank)
        time.sleep(0.02)
        return [[np.full(1, self.number)] for _ in parcels]


class Pupil:
    """Answers by what it was told last, in every bucket."""

    def __init__(self, context: RoleContext, *, exchange: Any) -> None:
        self.context, self.told, self.calls, self.fails = context, {}, [], False

    @method(ONE_TO_ALL)
    def receive_weights(self, bucket: int, *parcels: Any) -> None:
        time.sleep(0.05)
        self.calls.append((bucket, len(parcels)))
        if self.fails:
            self.fails = False
            raise KeyboardInterrupt
        self.told[bucket] = {int(parcel[0][0]) for parcel in parcels}

    @method(DP_PROTO, reads=("x",), writes=("told",))
    def tell(self, shard: Shard) -> Answer:
        (number,) = set.union(*self.told.values())
        return Answer({"told": np.full(len(shard.rows), number)}, shard.rows)

    @method(ONE_TO_ALL)
    def received(self) -> list[Any]:
        calls, self.calls = self.calls, []
        return calls


class ToyExchange:
    """Every process of one pool writes one parcel a bucket, for every process of the other."""

    def __init__(self, buckets: int, writers: int = 1, readers: int = 1) -> None:
        parcels = [Parcel(writer, tuple(range(readers)), ()) for writer in range(writers)]
        self.buckets = [parcels] * buckets

    def parcels(self, bucket: int, *, writer: int | None = None) -> list[Parcel]:
        return [one for one in self.buckets[bucket] if writer in (None, one.writer)]


def two_pools(processes: int = 1) -> Placement:
    """A master in `processes` processes of two devices, and its pupil in one."""
    pools = {"here": Pool("here", 2 * processes, processes), "there": Pool("there", 2)}
    where: Any = {"generate_pool": "there", "relay": "two-copies"}
    train = MeshShape(data=2 * processes)
    return Placement(
        pools, {"master": RolePlacement("master", "here", train=train, **where)}, "cpu"
    )
