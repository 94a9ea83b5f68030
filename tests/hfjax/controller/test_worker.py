# SPDX-License-Identifier: Apache-2.0
"""The environment of a worker process, and the probe that answers for a stuck one."""

import copy
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hfjax.controller import probe
from hfjax.controller import worker as worker_module
from hfjax.controller.protocol import Shard
from hfjax.controller.ray_pool import COORDINATOR_PORTS, reserve_port
from hfjax.controller.worker import (
    COLLECTIVE_FLAGS,
    COUNT_FLAG,
    Call,
    RoleContext,
    RoleError,
    Worker,
    join,
    keep_programs,
    worker_environment,
)


def test_the_device_count_replaces_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--a=1 --xla_force_host_platform_device_count=8 --b=2")
    environment = worker_environment("cpu", 3)
    flags = environment["XLA_FLAGS"].split()
    assert flags[:2] == ["--a=1", "--b=2"]
    assert [flag for flag in flags if "device_count" in flag] == [f"{COUNT_FLAG}=3"]
    assert environment["JAX_PLATFORMS"] == "cpu"
    assert "XLA_FLAGS" not in worker_environment("gpu", 3)


def test_collectives_wait_longer_than_the_controller_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, other = COLLECTIVE_FLAGS
    monkeypatch.setenv("XLA_FLAGS", f"{own}=5")
    flags = worker_environment("cpu", 3, deadline_s=100.0)["XLA_FLAGS"].split()
    assert [flag for flag in flags if "collective" in flag] == [f"{own}=5", f"{other}=160"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.check=1", "glibc.malloc.check=1:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
    ],
)
def test_large_pages_are_asked_for_unless_the_user_decided(
    given: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", given)
    assert worker_environment("cpu", 1)["GLIBC_TUNABLES"] == expected


CACHE = ("jax_compilation_cache_dir", "jax_compilation_cache_max_size")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home for caches; JAX's own settings are put back."""
    import jax

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = (*CACHE, "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update(CACHE[0], None)
    yield tmp_path / "hfjax/programs"
    for name, value in before.items():
        jax.config.update(name, value)


def test_programs_are_kept_where_their_user_alone_reads_and_unfinished_ones_go(cache: Path) -> None:
    import jax

    cache.mkdir(parents=True)
    for name in ("whole-cache", "whole-atime", "unfinished-cache"):
        (cache / name).write_bytes(b"x")
    keep_programs()
    assert jax.config.jax_compilation_cache_dir == str(cache)
    assert sorted(entry.name for entry in cache.iterdir()) == ["whole-atime", "whole-cache"]


def test_programs_are_kept_where_jax_was_told_or_nowhere(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import jax

    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    keep_programs()
    assert jax.config.jax_compilation_cache_dir is None
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")  # nothing can be made there
    keep_programs()
    assert jax.config.jax_compilation_cache_dir is None
    assert not cache.exists()


def test_a_device_count_set_too_late_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    assert jax.device_count() == 8  # now it is too late
    for name in worker_environment("cpu", 3):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # put back afterwards
    with pytest.raises(RuntimeError, match=r"3 cpu devices were asked for, 8 of 'cpu' found"):
        join(platform="cpu", devices=3, rank=0, processes=1, coordinator="")


def test_a_probe_answers_while_its_thread_is_stuck() -> None:
    ports: list[int] = []
    listening, released = threading.Event(), threading.Event()

    def stuck_here() -> None:
        ports.append(probe.listen("127.0.0.1"))
        listening.set()
        released.wait()

    thread = threading.Thread(target=stuck_here)
    thread.start()
    assert listening.wait(10)
    try:
        assert "released.wait()" in str(probe.ask("127.0.0.1", ports[0], 5.0))
    finally:
        released.set()
        thread.join()


@pytest.mark.parametrize("local", [True, False])
def test_the_users_mistake_reads_the_same_in_every_process(local: bool) -> None:
    """One line and a mark that survives the way to the driver; other failures keep their trace."""
    worker = Worker("all", local=local)

    def refuses(context: RoleContext) -> None:
        raise ValueError("lr=-1: must be 0 or more")

    def fails(context: RoleContext) -> None:
        raise RuntimeError("boom")

    found = []
    for builder in (refuses, fails):
        with pytest.raises(RoleError) as caught:
            worker.build("actor", builder, None)
        found.append(copy.copy(caught.value))  # by __reduce__, as between processes
    assert [error.refusal for error in found] == [True, False]
    assert str(found[0]).endswith("ValueError: lr=-1: must be 0 or more")
    assert ("Traceback" in str(found[1])) is not local


def test_a_value_that_a_method_cannot_take_is_no_mistake_of_the_users() -> None:
    """NumPy and JAX raise it for shapes: the run failed, and may be started again."""

    class Role:
        def method(self, shard: Shard) -> None:
            raise ValueError("operands could not be broadcast together")

    worker = Worker("all")
    worker.build("actor", lambda context: Role(), None)
    call = Call(role="actor", method="method", columns={}, rows=[], n_rows=0, step=7)
    with pytest.raises(RoleError, match=r"method at step 7 .*broadcast") as caught:
        worker.call(call)
    assert not caught.value.refusal


def test_nobody_answers_a_probe_of_a_port_that_is_only_reserved() -> None:
    with reserve_port() as reserved:
        port = reserved.getsockname()[1]
        assert port in COORDINATOR_PORTS
        assert probe.ask("127.0.0.1", port, 1.0) is None
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", port))


def test_ranks_meet_before_each_call_under_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX keeps every name that it was given, for the life of the process."""
    names: list[str] = []
    monkeypatch.setattr(worker_module, "meet", lambda name, limit_s: names.append(name))
    worker = Worker("all", processes=2, limit_s=60)
    worker.build("role", lambda context: "text", None)
    for _ in range(3):
        worker.call(Call("role", "upper", 0))
    assert len(names) == 3
    assert len(set(names)) == 1
