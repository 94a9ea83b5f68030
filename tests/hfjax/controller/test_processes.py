# SPDX-License-Identifier: Apache-2.0
"""Processes by pid: who is alive, and how they are ended."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from hfjax.controller.processes import account, alive, children, end, own_sigterm, within

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def test_a_stopped_process_is_killed_and_a_zombie_is_not_alive() -> None:
    process = subprocess.Popen(SLEEP)
    process.send_signal(signal.SIGSTOP)
    assert alive(process.pid)
    end([process.pid], patience_s=0.1)
    ends_s = time.monotonic() + 10
    while alive(process.pid) and time.monotonic() < ends_s:
        time.sleep(0.01)
    assert not alive(process.pid)  # though nobody has waited for it
    assert process.wait() == -signal.SIGKILL
    end([process.pid], patience_s=0.1)  # it is gone


def test_what_does_not_return_is_left_behind() -> None:
    released, start_s = threading.Event(), time.monotonic()
    within(0.1, released.wait)
    assert time.monotonic() - start_s < 5
    released.set()


def test_of_rays_account_pid_and_cause_are_kept() -> None:
    text = """The actor died unexpectedly before finishing this task.
\tclass_name: RayProcess
\tactor_id: 103e85b8
\tpid: 18065
\tnamespace: hfjax-b4
\tip: 192.0.2.2
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR \
Worker exit detail: End of file. Some common causes include: (1) the OOM killer"""
    assert account(text) == (
        "pid: 18065; The actor is dead because its worker process has died. Worker exit type: "
        "SYSTEM_ERROR Worker exit detail: End of file."
    )


def test_another_users_process_is_left_and_a_failure_on_the_way_out_is_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refused)
    end([1], patience_s=0.0)

    def fails() -> None:
        raise RuntimeError("the session is gone")

    within(5, fails)
    assert not capsys.readouterr().err


def test_what_starts_beside_a_driver_does_not_heed_sigterm_and_the_driver_does() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with own_sigterm():
        process = subprocess.Popen(SLEEP)
    process.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    assert process.pid in children(os.getpid(), "time.sleep(600)")
    process.kill()
    process.wait()
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
