# SPDX-License-Identifier: Apache-2.0
"""Calls in flight over a scripted runtime: which failure is shown, and when a deadline falls."""

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hfjax.controller import calls as calls_module
from hfjax.controller.calls import Calls
from hfjax.controller.pool import InputLost, ProcessDied
from hfjax.controller.worker import CallInfo, RoleError

NEVER = 10**9
COLLECTIVE = RoleError("gloo: connection closed by peer", collective=True)


class Ref:
    """Ready at the n-th look at it; its value is an exception to raise or a report."""

    def __init__(self, value: Any, after: int = 0) -> None:
        self.value, self.left = value, after


class Script:
    """A runtime whose refs become ready as the script says, one look a second."""

    now_s = 0.0

    def ready(self, refs: Sequence[Ref], timeout_s: float) -> list[bool]:
        if timeout_s:
            self.now_s += timeout_s
            for ref in set(refs):
                ref.left -= 1
        return [ref.left <= 0 for ref in refs]

    def get(self, refs: Sequence[Ref]) -> list[Any]:
        for ref in refs:
            if isinstance(ref.value, Exception):
                raise ref.value
        return [ref.value for ref in refs]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AssertionError(f"{name} is not for waiting")


class TwoRanks:
    processes = 2
    here = False

    def __init__(self, name: str = "pool", stands: Sequence[str | None] = ("line 1\n", None)):
        self.name, self.hosts, self.stands = name, ["east", "west"], stands

    def probe(self, rank: int) -> str | None:
        return self.stands[rank]


def info(rank: int, second: float = 0.0) -> CallInfo:
    return CallInfo(rank, second, second + 1 + rank, rank, {})


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    script = Script()
    monkeypatch.setattr(calls_module.time, "monotonic", lambda: script.now_s)
    return script


def submit(calls: Calls, *refs: Ref, pool: Any = None, inputs: Sequence[int] = ()) -> Any:
    pool = pool or TwoRanks()
    return calls.submit("role", "method", 3, pool, frozenset(inputs), refs)


@pytest.mark.parametrize(
    ("first", "second", "shown"),
    [
        (
            COLLECTIVE,
            ProcessDied("killed"),
            r"rank 1 of pool 'pool' on host west\): the process died",
        ),
        (COLLECTIVE, RoleError("out of memory"), "out of memory"),
        (COLLECTIVE, RoleError("gloo too", collective=True), "gloo: connection"),
        (COLLECTIVE, info(1), "gloo: connection"),
        (InputLost("an input is lost"), ProcessDied("killed"), r"\(rank 1 .*: the process died"),
        (InputLost("an input is lost"), info(1), r"\(rank 0 .*the call failed: an input is lost"),
        (
            ProcessDied("killed"),
            COLLECTIVE,
            r"rank 0 of pool 'pool' on host east\): the process died",
        ),
        (KeyError("x"), COLLECTIVE, r"\(rank 0 .*the call failed: 'x'"),
    ],
)
def test_the_cause_is_shown_rather_than_its_consequence(
    script: Script, first: Any, second: Any, shown: str
) -> None:
    ended: list[str] = []
    calls = Calls(script, 100.0, lambda: ended.append("pools"))
    call = submit(calls, Ref(first, after=1), Ref(second, after=3))
    with pytest.raises(RoleError, match=shown) as failure:
        calls.finish(call)
    assert ended == ["pools"]
    with pytest.raises(RoleError) as again:
        calls.drain()
    assert again.value is failure.value


def test_the_death_of_rank_0_explains_those_that_are_seen_before_it(script: Script) -> None:
    """The others meet at it and cannot live without."""
    calls = Calls(script, 100.0, lambda: None)
    died = ProcessDied("killed")
    submit(calls, Ref(info(0)), Ref(died, after=1))
    submit(calls, Ref(died, after=2), Ref(info(1), NEVER))
    with pytest.raises(RoleError, match=r"rank 0 of pool 'pool' on host east\): the process died"):
        calls.drain()
    assert script.now_s <= 5


def test_a_death_is_that_of_its_process_s_oldest_call_whichever_is_seen_first(
    script: Script,
) -> None:
    """The other pool's calls are not waited for; the last answer may be lost with the process."""
    calls, died, pool = Calls(script, 100.0, lambda: None), ProcessDied("killed"), TwoRanks()
    submit(calls, Ref(info(0), NEVER), Ref(info(1), NEVER), pool=TwoRanks("other"))
    for step, after in enumerate([3, 2, 1]):
        refs = Ref(died, after), Ref(info(1), NEVER)
        calls.submit("role", "method", step, pool, frozenset(), refs)
    with pytest.raises(
        RoleError,
        match=r"method at step 0 \(rank 0 of pool 'pool'.*the process died "
        r"\(or in role 'role', method, which followed\): killed",
    ):
        calls.drain()
    assert script.now_s <= 4


def test_what_all_pools_need_and_lost_is_named_with_the_call_that_waits(script: Script) -> None:
    ended: list[str] = []
    calls = Calls(script, 100.0, lambda: ended.append("pools"))
    submit(calls, Ref(info(0), NEVER), Ref(info(1), NEVER))

    def gone(refs: Sequence[Ref], timeout_s: float) -> list[bool]:
        raise ProcessDied("Ray's raylet is gone")

    script.ready = gone  # type: ignore[method-assign]
    with pytest.raises(RoleError, match=r"role 'role', method at step 3: Ray's raylet is gone"):
        calls.drain()
    assert ended == ["pools"]


def test_what_all_pools_need_and_lost_while_a_cause_is_waited_for_is_named(script: Script) -> None:
    ended: list[str] = []
    calls = Calls(script, 100.0, lambda: ended.append("pools"))
    pool, looks = TwoRanks(), [0]
    submit(calls, Ref(info(0), NEVER), Ref(ProcessDied("killed"), 1), pool=pool)
    ready = script.ready

    def gone(refs: Sequence[Ref], timeout_s: float) -> list[bool]:
        looks[0] += 1
        if looks[0] > 2:
            raise ProcessDied("Ray's raylet is gone")
        return ready(refs, timeout_s)

    script.ready = gone  # type: ignore[method-assign]
    with pytest.raises(RoleError, match=r"role 'role', method at step 3: Ray's raylet is gone"):
        calls.drain()
    assert ended == ["pools"]


def test_a_column_that_is_lost_after_its_call_ended_is_no_bare_error(script: Script) -> None:
    calls = Calls(script, 100.0, lambda: None)
    with pytest.raises(RoleError, match="a column is lost: its node died"):
        calls.fetch([Ref(ProcessDied("its node died"))])


def test_a_failure_of_any_call_ends_a_wait_for_another(script: Script) -> None:
    calls = Calls(script, 100.0, lambda: None)
    waited = submit(calls, Ref(info(0), NEVER), Ref(info(1), NEVER), pool=TwoRanks("a"))
    submit(calls, Ref(info(0)), Ref(RoleError("elsewhere"), 4), pool=TwoRanks("b"))
    with pytest.raises(RoleError, match="elsewhere"):
        calls.finish(waited)
    assert script.now_s < 10


def test_a_deadline_names_the_silent_rank_and_where_the_others_stand(script: Script) -> None:
    calls = Calls(script, 30.0, lambda: None)
    submit(calls, Ref(info(0), NEVER), Ref(info(1), NEVER))
    with pytest.raises(RoleError) as failure:
        calls.drain()
    assert str(failure.value) == (
        "role 'role', method at step 3 (rank 1 of pool 'pool' on host west): "
        "not finished after deadline_s=30\n"
        "rank 1 on host west does not respond (stopped or hung)\n"
        "rank 0 on host east is in\nline 1"
    )
    assert 30 < script.now_s < 35


def test_a_silent_rank_may_stand_in_the_call_that_followed(script: Script) -> None:
    calls, pool = Calls(script, 30.0, lambda: None), TwoRanks()
    submit(calls, Ref(info(0)), Ref(info(1), NEVER), pool=pool)
    submit(calls, Ref(info(0), NEVER), Ref(info(1), NEVER), pool=pool)
    with pytest.raises(RoleError) as failure:
        calls.drain()
    assert "(or in role 'role', method, which followed)\nrank 1" in str(failure.value)


def test_a_rank_that_does_not_come_is_named_before_those_that_wait_for_it(script: Script) -> None:
    calls = Calls(script, 30.0, lambda: None)
    pool = TwoRanks(stands=["  File x, line 1, in meet\n    wait()\n", "sleeps\n"])
    submit(calls, Ref(info(0), NEVER), Ref(info(1), NEVER), pool=pool)
    with pytest.raises(RoleError, match=r"^role 'role', method at step 3 \(rank 1 of pool"):
        calls.drain()


def test_waiting_for_inputs_or_for_the_pool_does_not_count(script: Script) -> None:
    calls = Calls(script, 30.0, lambda: None)
    first = submit(calls, Ref(info(0), 25), Ref(info(1), 25), pool=TwoRanks("a"))
    submit(calls, Ref(info(0), 50), Ref(info(1), 50), pool=TwoRanks("a"))  # begins at 25
    submit(calls, Ref(info(0), 52), Ref(info(1), 52), pool=TwoRanks("b"), inputs=[first.number])
    assert [record.number for record in calls.drain()] == [0, 1, 2]
    assert script.now_s < 60


def test_a_callers_own_timeout_ends_nothing(script: Script) -> None:
    calls = Calls(script, 30.0, lambda: None)
    call = submit(calls, Ref(info(0), 5), Ref(info(1), 5))
    with pytest.raises(TimeoutError, match="2 s"):
        calls.finish(call, 2.0)
    assert [info.rank for info in calls.finish(call)] == [0, 1]


def test_a_record_spans_all_processes(script: Script) -> None:
    calls = Calls(script, 30.0, lambda: None)
    submit(calls, Ref(info(0, 5.0)), Ref(info(1, 4.0)))
    (record,) = calls.drain()
    assert (record.start_s, record.end_s, record.compiles) == (4.0, 6.0, 1)


def test_errors_survive_the_way_to_the_driver() -> None:
    copy = pickle.loads(pickle.dumps(COLLECTIVE))
    assert (str(copy), copy.collective) == (str(COLLECTIVE), True)
