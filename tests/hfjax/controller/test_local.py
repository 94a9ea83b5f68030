# SPDX-License-Identifier: Apache-2.0
"""Role handles in this process: distribution, futures, metrics, refusals."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from toys import BUCKETS, Beside, Doubler, Master, Summer, two_pools

from hfjax.batch import Batch, Future
from hfjax.controller.handle import Models, start
from hfjax.controller.worker import RoleError
from meshes.mesh import MeshShape
from meshes.placement import Placement, Pool, RolePlacement, single_pool


def local(**builders: Any) -> Models:
    return start(single_pool(["a", "b"], 4).only(builders), builders, runtime="local")


def test_columns_are_futures_that_the_next_role_reads() -> None:
    with local(a=Doubler, b=partial(Doubler, factor=5)) as m:
        batch = Batch(x=np.arange(5))
        batch |= m.a.double(batch, plus=1)
        assert isinstance(batch.column("y"), Future)
        batch |= m.b.locate(batch)
        assert batch["y"].tolist() == [1, 3, 5, 7, 9]
        assert batch["text"] == list("01234")
        assert batch["where"].tolist() == [0] * 5
        assert batch.metrics.result() == {"double/rows": 5.0}


def test_the_placement_and_the_devices_reach_the_role() -> None:
    pools = {"p": Pool("p", 2), "q": Pool("q", 4)}
    roles = {
        "a": RolePlacement("a", "p", infer=MeshShape(data=2)),
        "b": RolePlacement("b", "q", train=MeshShape(data=2, tensor=2)),
    }
    with start(Placement(pools, roles), {"a": Doubler, "b": Summer}, runtime="local") as m:
        assert m.a.facts().result()[0]["devices"] == 2
        assert m.b.facts().result()[0]["all"] == 4
        first = m.a.pool.worker.roles["a"].context
        second = m.b.pool.worker.roles["b"].context
        assert not set(first.devices) & set(second.devices)
        assert second.placement is roles["b"]
        assert first.local


@pytest.mark.parametrize("rows", [1, 3, 5, 8])
def test_any_number_of_rows_comes_back_once_and_in_order(rows: int) -> None:
    with local(a=Doubler, b=Summer) as m:
        batch = Batch(x=np.arange(1, rows + 1))
        assert m.a.double(batch)["y"].tolist() == [2 * x for x in range(1, rows + 1)]
        assert m.b.sums(batch)["sum"].tolist() == [sum(range(1, rows + 1))] * rows


def test_updates_give_metrics_and_read_the_columns_their_settings_add() -> None:
    with local(a=partial(Doubler, columns=("extra",))) as m:
        batch = Batch(x=np.arange(3), extra=np.ones(3))
        assert m.a.update(batch).result() == {"sum/x": 3.0, "sum/extra": 3.0}
        assert m.a.facts().result()[0]["factor"] == 3
        with pytest.raises(KeyError, match=r"a\.update reads column 'extra'.*it has x"):
            m.a.update(batch.columns("x"))


def test_optional_columns_are_read_where_they_are() -> None:
    with local(a=Doubler) as m:
        assert m.a.double(Batch(x=np.arange(2)))["y"].tolist() == [0, 2]
        assert m.a.double(Batch(x=np.arange(2), shift=np.full(2, 9)))["y"].tolist() == [9, 11]


def test_columns_cannot_be_changed_in_place() -> None:
    with local(a=Doubler) as m:
        made = m.a.double(Batch(x=np.arange(2)))
        with pytest.raises(ValueError, match="read-only"):
            made["y"] += 1


def test_roles_beside_the_controller_use_the_same_handle() -> None:
    before = Beside.closed
    with local(a=Doubler, reward=partial(Beside, unit=0.5)) as m:
        batch = Batch(x=np.arange(3))
        batch |= m.a.double(batch)
        batch |= m.reward.score(batch)
        assert batch["score"].tolist() == [0.0, 1.0, 2.0]
        assert batch["response"] == ["0!", "1!", "2!"]
    assert Beside.closed == before + 1


def test_records_say_what_ran_where_and_from_which_columns() -> None:
    with local(a=Doubler, b=Summer) as m:
        m.step = 7
        batch = Batch(x=np.arange(3))
        batch |= m.a.double(batch)
        batch |= m.a.locate(batch)
        batch |= m.b.sums(batch)
        first, second, third = m.drain()
        assert [r.method for r in (first, second, third)] == ["double", "locate", "sums"]
        assert {(r.step, r.pool) for r in (first, second, third)} == {(7, "all")}
        assert second.inputs == {first.number}
        assert third.inputs == set()
        assert first.start_s <= first.end_s <= second.start_s
        assert third.compiles > 0
        assert m.drain() == []
        m.b.sums(batch)
        (again,) = m.drain()
        assert again.compiles == 0


def test_errors_say_where_and_keep_the_cause() -> None:
    with local(a=Doubler) as m:
        m.step = 3
        with pytest.raises(
            RoleError, match=r"role 'a', fails at step 3 \(rank 0 of pool 'all'"
        ) as e:
            m.a.fails(Batch(x=np.arange(2)))
        assert isinstance(e.value.__cause__, ZeroDivisionError)
        assert m.a.double(Batch(x=np.arange(2)))["y"].tolist() == [0, 2]  # a debugger can go on


def test_answers_must_be_what_was_declared() -> None:
    with local(a=Doubler) as m:
        with pytest.raises(RoleError, match=r"declares writes=\('y',\) but answered \('z',\)"):
            m.a.wrong(Batch(x=np.arange(3)))
        with pytest.raises(RoleError, match="1 rows of 'y' for 3"):
            m.a.short(Batch(x=np.arange(3)))


def test_a_role_that_cannot_be_built_is_named() -> None:
    with pytest.raises(RoleError, match=r"role 'a', build .*no model at /nowhere"):
        local(a=partial(Doubler, factor=0))


def test_what_cannot_be_called_is_refused_with_what_can() -> None:
    with local(a=Doubler) as m:
        with pytest.raises(AttributeError, match=r"no role 'critic'; this run has a"):
            _ = m.critic
        with pytest.raises(AttributeError, match=r"'a' has no method 'helper'; it has .*double"):
            _ = m.a.helper
        with pytest.raises(ValueError, match="without rows"):
            m.a.double(Batch(x=np.arange(0)))


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (single_pool(["a"], 16), r"16 devices \(all 16\), this process has 8"),
        (single_pool(["a"], 8, processes=2), "processes=2.*runtime='ray'"),
        (single_pool(["a"], 8, platform="gpu"), "'gpu', JAX in this process is on 'cpu'"),
        (single_pool(["b"], 1), "no section for role 'a'"),
    ],
)
def test_placements_that_do_not_fit_are_refused(placement: Placement, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        start(placement, {"a": Doubler}, runtime="local")


def test_unknown_runtimes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"runtime='slurm'.*local or ray"):
        start(single_pool(["a"], 1), {"a": Doubler}, runtime="slurm")


def test_a_second_copy_answers_with_the_newest_weights_and_gets_them_once() -> None:
    batch = Batch(x=np.arange(4))
    with start(two_pools(), {"master": Master}, runtime="local") as m:
        assert m.master.tell(batch)["told"].tolist() == [0] * 4
        assert m.master.tell(batch)["told"].tolist() == [0] * 4
        assert m.master.received().result() == [[(b, 1) for b in range(BUCKETS)]]
        m.master.update(batch)
        m.master.update(batch)
        assert m.master.tell(batch)["told"].tolist() == [2] * 4
        assert m.master.received().result() == [[(b, 1) for b in range(BUCKETS)]]
        records = {record.method: record for record in m.drain()}
        sent, arrived = records["send_weights"], records["receive_weights"]
        assert sent.pool == records["update"].pool == "here"
        assert arrived.pool == records["tell"].pool == "there"
        assert sent.infos[0].bytes_out == arrived.infos[0].bytes_in == 8  # a parcel of one number


def test_after_an_interrupted_transfer_all_weights_are_sent_again() -> None:
    batch = Batch(x=np.arange(4))
    with start(two_pools(), {"master": Master}, runtime="local") as m:
        m.master.tell(batch)
        m.master.update(batch)
        m.master.second_copy.handle.pool.worker.roles["master"].fails = True
        with pytest.raises(KeyboardInterrupt):
            m.master.tell(batch)
        assert m.master.tell(batch)["told"].tolist() == [1] * 4


def test_only_a_role_that_generates_may_have_a_second_copy() -> None:
    with pytest.raises(ValueError, match=r"\[master\] generate_pool: this role does not generate"):
        start(two_pools(), {"master": Doubler}, runtime="local")


def test_all_to_all_gives_each_process_its_own_value() -> None:
    with local(a=Doubler) as m:
        assert m.a.own(["x"], more=["y"]).result() == [(0, "x", "y")]
        assert m.a.stage().result() == [0]
        with pytest.raises(ValueError, match=r"a\.own is ALL_TO_ALL: .* each of the 1 processes"):
            m.a.own(["x", "y"])
