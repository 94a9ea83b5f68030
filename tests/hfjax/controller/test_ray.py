# SPDX-License-Identifier: Apache-2.0
"""Pools as Ray actors: worlds of several processes, payload, and every way to fail."""

import dataclasses
import importlib.util
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import table3
from toys import BUCKETS, Beside, Doubler, Master, Summer, two_pools

from benchmarks import dispatch
from hfjax.batch import Batch
from hfjax.controller import ray_pool
from hfjax.controller.handle import Models, start
from hfjax.controller.pool import InputLost
from hfjax.controller.worker import RoleError
from meshes.mesh import MeshShape
from meshes.placement import Placement, Pool, RolePlacement, single_pool

pytestmark = pytest.mark.ray

DEADLINE_S = 6.0
HOST = socket.gethostname()


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One Ray session of six CPUs for all tests here; runs reuse it and leave it open.

    It believes in a GPU that this machine's JAX knows nothing of.
    """
    ray = pytest.importorskip("ray")
    os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
    cluster = {"num_cpus": 6, "num_gpus": 1, "object_store_memory": 200_000_000}
    ray.init(address="local", include_dashboard=False, log_to_driver=False, **cluster)
    yield
    ray.shutdown()


PLACEMENT = Placement(
    {"world": Pool("world", 4, 2), "single": Pool("single", 2)},
    {
        "summer": RolePlacement("summer", "world", train=MeshShape(data=4)),
        "doubler": RolePlacement("doubler", "world", infer=MeshShape(data=2, tensor=2)),
        "other": RolePlacement("other", "single", infer=MeshShape(data=2)),
    },
    platform="cpu",
)
BUILDERS: dict[str, Any] = {
    "summer": Summer,
    "doubler": partial(Doubler, factor=3),
    "other": Summer,
    "reward": Beside,
}


def run(deadline_s: float = 60.0, **options: Any) -> Models:
    return start(PLACEMENT, BUILDERS, deadline_s=deadline_s, **options)


@pytest.fixture(scope="module")
def m(cluster: None) -> Iterator[Models]:
    with run() as models:
        yield models


def processes(models: Models) -> list[int]:
    replies = [models.summer.facts().result(), models.other.facts().result()]
    return [fact["pid"] for reply in replies for fact in reply]


def ended(pid: int) -> bool:
    """Whether a process is gone, or waits only for its parent to notice."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_processes_form_one_world_with_the_devices_asked_for(m: Models) -> None:
    world, single = m.summer.facts().result(), m.other.facts().result()
    assert [fact["rank"] for fact in world] == [0, 1]
    assert {(fact["local"], fact["all"], fact["platform"]) for fact in world} == {(2, 4, "cpu")}
    assert (single[0]["local"], single[0]["all"]) == (2, 2)
    assert len({os.getpid(), *processes(m)}) == 4


@pytest.mark.parametrize("rows", [1, 3, 5, 8])
def test_rows_pass_from_pool_to_pool_and_come_back_in_order(m: Models, rows: int) -> None:
    x = np.arange(1, rows + 1)
    batch = Batch(x=x)
    batch |= m.summer.sums(batch)  # on two processes
    batch |= m.doubler.double(batch, plus=1)
    batch |= m.doubler.locate(batch)
    batch |= m.other.sums(Batch(x=batch.column("y")))  # its column "sum" wins
    batch |= m.reward.score(batch)  # in this process
    assert batch["y"].tolist() == (3 * x + 1).tolist()
    assert batch["text"] == [str(row) for row in range(rows)]
    assert batch["sum"].tolist() == [float(np.sum(3 * x + 1))] * rows
    assert batch["score"].tolist() == batch["y"].tolist()
    assert batch["where"].tolist() == [0 if row < -(-rows // 2) else 1 for row in range(rows)]
    assert batch.metrics.result()["pid"] == os.getpid()


def test_groups_stay_on_one_process(m: Models) -> None:
    m.group = 3  # 9 rows are 3 groups, so 6 rows for the first replica and 3 for the second
    try:
        batch = m.doubler.double(Batch(x=np.arange(9)))
        assert m.doubler.locate(batch)["where"].tolist() == [0] * 6 + [1] * 3
    finally:
        m.group = 1


def test_selected_rows_of_futures_reach_the_processes_that_need_them(m: Models) -> None:
    batch = m.doubler.double(Batch(x=np.arange(6))).select([5, 0, 0, 3])
    assert m.other.sums(Batch(x=batch.column("y")))["sum"].tolist() == [15.0 + 0 + 0 + 9] * 4


def test_calls_run_in_order_in_a_pool_and_side_by_side_in_two(m: Models) -> None:
    m.drain()
    batch = Batch(x=np.arange(4))
    slow = m.other.sums(batch, wait_s=6.0)  # long: a busy machine starts calls late
    m.summer.sums(batch, wait_s=5.0)
    m.doubler.locate(Batch(y=slow.column("sum")))  # waits for the other pool
    m.summer.sums(batch)  # needs nothing, and still comes after it
    records = m.drain()
    other, first, second, third = records
    assert other.start_s < first.end_s
    assert first.start_s < other.end_s
    assert other.end_s <= second.start_s
    # each rank begins the third after its own second; ranks need not end together
    assert second.start_s <= third.start_s
    assert other.end_s <= third.start_s
    assert second.inputs == {other.number}


def test_the_driver_does_not_wait_before_it_reads(m: Models) -> None:
    begun = time.monotonic()
    column = m.other.sums(Batch(x=np.arange(2)), wait_s=6.0).column("sum")
    assert time.monotonic() - begun < 5.0
    with pytest.raises(TimeoutError, match=r"0\.1 s"):
        column.result(0.1)  # type: ignore[union-attr]
    assert column.result().tolist() == [1.0, 1.0]  # type: ignore[union-attr]


def test_pp_only_and_all_to_all_over_processes(m: Models) -> None:
    """doubler: data 2 x tensor 2 in two processes; its one stage is led by the first."""
    assert m.doubler.own(["x", "y"]).result() == [(0, "x", None), (1, "y", None)]
    assert m.doubler.stage().result() == [0]


def test_two_processes_of_four_devices_are_given_and_answer_what_the_papers_table_3_says() -> None:
    """A method of each protocol, two of them the test's own, through handles."""
    lines = [line for line in table3.TABLE if line[1].devices == 8 and line[2] == 2]
    commands = [line for line in table3.COMMANDS if line[1].devices == 8 and line[2] == 2]
    shapes = sorted({line[1] for line in lines + commands}, key=str)
    with table3.listeners(shapes, 2, "ray") as models:
        for protocol, shape, _, given, answered in lines:
            role = getattr(models, f"m{shapes.index(shape)}")
            wanted = table3.rows_in(given), table3.rows_in(answered)
            assert table3.heard(role, protocol, 8) == wanted, (protocol.name, shape)
        for protocol, shape, _, texts, heard in commands:
            role = getattr(models, f"m{shapes.index(shape)}")
            ranks = [int(rank) for rank in heard.split()]
            wanted = [texts.split()[rank] for rank in ranks], ranks
            assert table3.told(role, protocol, texts.split()) == wanted, (protocol.name, shape)
    assert {line[0].name for line in lines + commands} == {*table3.ROWS, *table3.TELLS}


def test_weights_reach_the_second_copy_from_worker_to_worker_a_few_buckets_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = Batch(x=np.arange(4))
    with start(two_pools(2), {"master": Master}, deadline_s=60) as m:
        seen: list[Any] = []
        get = m.runtime.get

        def watched(refs: Sequence[Any]) -> list[Any]:
            seen.extend(values := get(refs))
            return values

        monkeypatch.setattr(m.runtime, "get", watched)
        m.master.update(batch)
        assert m.master.tell(batch)["told"].tolist() == [1] * 4
        assert m.master.received().result() == [[(b, 2) for b in range(BUCKETS)]]
        records = m.drain()
        assert not any(isinstance(value, list) for value in seen)  # the driver saw no parcel
        sent = [record for record in records if record.method == "send_weights"]
        arrived = [record for record in records if record.method == "receive_weights"]
        assert len(sent) == len(arrived) == BUCKETS
        for one, other in zip(arrived, sent[2:], strict=False):
            assert one.end_s <= other.start_s
            assert one.number in other.inputs


def test_a_workers_warning_is_logged_by_the_driver_once(
    m: Models, caplog: pytest.LogCaptureFixture
) -> None:
    for text in ("it is odd", "it is odd", "it is odder"):
        m.doubler.warn(text=text).result()  # on two ranks
    messages = [re.sub("rank .", "rank R", record.getMessage()) for record in caplog.records]
    where = f"role 'doubler', warn at step {m.step} (rank R of pool 'world' on host {HOST})"
    assert messages == [f"{where}: toys: it is odd", f"{where}: toys: it is odder"]


def test_nothing_compiles_twice(m: Models) -> None:
    batch = Batch(x=np.arange(4))
    m.summer.sums(batch)
    m.drain()
    m.summer.sums(batch)
    assert [record.compiles for record in m.drain()] == [0]


def test_nothing_of_a_step_stays_in_the_store_or_in_a_process() -> None:
    builders = {"a": dispatch.Passer, "b": dispatch.Passer}
    with start(dispatch.placement(), builders, deadline_s=60) as models:
        seen = dispatch.left_behind(models, 60, (10, 60))
    early, late = seen[10], seen[60]
    assert early.store > 0.9e6  # the column of the newest step
    assert late.store <= 1.1 * early.store
    assert all(now <= 1.05 * then for then, now in zip(early.resident, late.resident, strict=True))


@pytest.mark.parametrize(
    ("how", "rank", "message"),
    [
        ("raise", 1, r"ZeroDivisionError: a toy went wrong[\s\S]*in breaks"),
        ("kill", 1, r"the process died"),
        ("kill", 0, r"the process died"),  # without it the other ends too
        (
            *("stop", 1),
            rf"not finished after deadline_s=6[\s\S]*rank 1 on host {HOST} does not respond",
        ),
    ],
)
def test_a_failing_rank_is_named_and_everything_ends(how: str, rank: int, message: str) -> None:
    models = run(DEADLINE_S)
    pids = processes(models)
    models.step = 3
    batch = Batch(x=np.arange(4, dtype=np.float32))
    begun = time.monotonic()
    broken = models.summer.breaks(batch, rank=rank, how=how)
    with pytest.raises(RoleError, match=message) as failure:  # at once, or at the first look
        _ = models.other.sums(Batch(x=broken.column("sum")))["sum"]
    assert time.monotonic() - begun < DEADLINE_S + 20
    where = f"role 'summer', breaks at step 3 (rank {rank} of pool 'world' on host {HOST})"
    assert str(failure.value).startswith(where)
    with pytest.raises(RoleError) as again:
        models.other.sums(batch)
    assert again.value is failure.value
    assert [pid for pid in pids if not ended(pid)] == []


def test_a_call_whose_input_died_with_its_process_is_a_consequence(m: Models) -> None:
    import ray

    class Dies:
        def ends(self) -> None:
            time.sleep(1)
            os._exit(1)

        def takes(self, value: Any) -> Any:
            return value

    first, second = (ray.remote(Dies).options(num_cpus=0).remote() for _ in range(2))
    runtime: Any = m.runtime
    with pytest.raises(InputLost, match=r"input arguments.*could not be computed"):
        runtime.get([second.takes.remote(first.ends.remote())])


@pytest.mark.slow
def test_a_rank_40_s_late_is_waited_for_also_before_a_reduce_scatter() -> None:
    """CPU processes give up on a peer inside one after 30 s, whatever they are told."""
    with run(90.0) as models:
        models.summer.naps(rank=1, seconds=40)
        assert models.summer.scatters().result() == [[4.0] * 2] * 2


def test_a_rank_later_than_the_deadline_is_named_rather_than_those_that_wait() -> None:
    with run(3.0) as models:
        assert models.summer.scatters().result(60) == [[4.0] * 2] * 2
        pids = processes(models)
        models.other.facts().result()
        models.summer.naps(rank=1, seconds=3600)
        models.summer.scatters()
        begun = time.monotonic()
        with pytest.raises(RoleError, match=r"rank 1 of pool 'world' on host .*: not finished"):
            models.drain()
    assert time.monotonic() - begun < 20
    assert [pid for pid in pids if not ended(pid)] == []


def test_a_stuck_rank_says_where_it_stands() -> None:
    with run(3.0) as models:
        models.summer.breaks(Batch(x=np.arange(4.0)), rank=1, how="sleep")
        with pytest.raises(RoleError, match=r"rank 1 on host .* is in\n[\s\S]*time\.sleep\(3600\)"):
            models.drain()


def test_jax_platforms_of_the_caller_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    runtime = ray_pool.RayRuntime("cpu")
    assert os.environ["JAX_PLATFORMS"] == "cpu"
    runtime.close()
    assert os.environ["JAX_PLATFORMS"] == "cuda,cpu"


def test_the_first_error_is_seen_once_and_a_rerun_works() -> None:
    broken = {**BUILDERS, "doubler": partial(Doubler, factor=0)}
    with pytest.raises(RoleError, match=r"role 'doubler', build.*no model at /nowhere"):
        start(PLACEMENT, broken)
    with run() as models:
        assert models.summer.sums(Batch(x=np.arange(3)))["sum"].tolist() == [3.0] * 3


OTHER_JOB = """
import numpy as np
from toys import Doubler

from hfjax.batch import Batch
from hfjax.controller.handle import start
from meshes.placement import single_pool

placement = single_pool(["doubler"], 2, processes=2, platform="cpu")
with start(placement, {"doubler": Doubler}) as models:
    print(models.doubler.double(Batch(x=np.arange(3)))["y"].tolist())
"""


def test_a_second_job_on_the_cluster_takes_and_ends_only_what_is_its_own(m: Models) -> None:
    import ray

    before = processes(m)
    environment = dict(os.environ, RAY_ADDRESS=ray.get_runtime_context().gcs_address)
    environment["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    other = [sys.executable, "-c", OTHER_JOB]
    for _ in range(2):  # a rerun finds what it needs
        told = subprocess.run(other, env=environment, capture_output=True, text=True, timeout=120)
        assert told.stdout.splitlines()[-1:] == ["[0, 2, 4]"], told.stderr
    assert m.doubler.double(Batch(x=np.arange(3)))["y"].tolist() == [0, 3, 6]
    assert processes(m) == before


MINE = """
from hfjax.controller.protocol import DP_PROTO, Answer, method

def loss(x):
    return helper(x) + 1

def helper(x):
    return 2 * x

class Mine:
    def __init__(self, context, *, loss):
        self.loss = loss

    @method(DP_PROTO, reads=("x",), writes=("loss",))
    def compute(self, shard):
        return Answer({"loss": self.loss(shard.columns["x"])}, shard.rows)
"""


def test_code_that_workers_cannot_import_travels_by_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    spec = importlib.util.spec_from_file_location("mine", tmp_path / "mine.py")
    assert spec is not None
    assert spec.loader is not None
    mine = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mine", mine)
    spec.loader.exec_module(mine)
    builders = {"other": partial(mine.Mine, loss=partial(mine.loss))}
    with start(single_pool(["other"], 1, platform="cpu"), builders) as models:
        assert models.other.compute(Batch(x=np.arange(3)))["loss"].tolist() == [1, 3, 5]


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        (
            {"rollout": Pool("rollout", 6, 6), "train": Pool("train", 4, 4)},
            r"ask for 10 CPU \(rollout: 6 process\(es\), train: 4 .*has 6 CPU, 1 GPU on 1 node",
        ),
        ({"big": Pool("big", 64, 64)}, r"ask for 64 CPU \(big: 64"),
    ],
)
def test_pools_that_the_cluster_cannot_hold_are_refused_at_once(
    pools: dict[str, Pool], message: str
) -> None:
    roles = {
        name: RolePlacement(name, name, train=MeshShape(data=pool.devices))
        for name, pool in pools.items()
    }
    begun = time.monotonic()
    with pytest.raises(ValueError, match=message):
        start(Placement(pools, roles, "cpu"), dict.fromkeys(roles, Doubler))
    assert time.monotonic() - begun < 5


def test_gpus_that_are_not_there_are_refused_by_pool() -> None:
    with pytest.raises(
        ValueError, match=r"\[pool\.world\] a process asks for 1 CPU, 2 GPU .* 1 GPU"
    ):
        start(dataclasses.replace(PLACEMENT, platform="gpu"), BUILDERS)


def test_a_gpu_that_jax_cannot_use_is_named_with_what_is_installed() -> None:
    message = r"1 gpu devices were asked for, . of 'cpu' found .*installed: .*jaxlib [\d.]+.*cuda12"
    with pytest.raises(RuntimeError, match=message):
        start(single_pool(["other"], 1), {"other": Summer})
    with start(single_pool(["other"], 2, platform="cpu"), {"other": Summer}) as models:
        assert models.other.facts().result()[0]["platform"] == "cpu"


def test_pools_that_others_hold_are_refused_with_what_is_free(
    m: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module's own run holds three of the six CPUs; the reservation is released again."""
    monkeypatch.setattr(ray_pool, "RESERVE_TIMEOUT_S", 1)
    placement = single_pool(["other"], 4, processes=4, platform="cpu")
    message = (
        r"4 CPU \(all: 4.*not free within 1 s; the cluster has 6 CPU, 1 GPU, now available 3 CPU"
    )
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            start(placement, {"other": Summer})
