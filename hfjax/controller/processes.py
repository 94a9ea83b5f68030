# SPDX-License-Identifier: Apache-2.0
"""Processes of this host by their pids: who is there, which are Ray's own, and their end."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ACCOUNT = 600  # characters of what Ray says of a death
DAEMONS = ("gcs_server", "raylet")  # of a Ray session; it does not outlive either


def alive(pid: int) -> bool:
    """Whether a process is there and has not ended: a zombie only waits for its parent."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return stat_of(pid)[0] != "Z"


def space() -> str:
    """Where this process's pid means it: the same in all that may end it by that number."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def children(parent: int, package: str = "") -> dict[int, str]:
    """Processes that one has started, of a package, and their programs; none without /proc."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if stat_of(int(entry.name))[1] == str(parent):
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
                if package in command:
                    found[int(entry.name)] = os.path.basename(command.partition("\0")[0])
    return found


def end(pids: Iterable[int], patience_s: float) -> None:
    """Waits for processes to end; kills those that do not: a stopped one obeys nothing else."""
    ends_s = time.monotonic() + patience_s
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < ends_s:
        time.sleep(0.05)
    for pid in left:
        with suppress(OSError):  # it has just ended, or is another user's
            os.kill(pid, signal.SIGKILL)


def within(limit_s: float, ends: Callable[[], object]) -> None:
    """Calls a function, and goes on when it fails or does not return: all else may be gone."""

    def quietly() -> None:
        with suppress(Exception):
            ends()

    thread = threading.Thread(target=quietly, name="hfjax-close", daemon=True)
    thread.start()
    thread.join(limit_s)


@contextmanager
def own_sigterm() -> Iterator[None]:
    """What SIGTERM does stays as it was: Ray, when it starts, has it leave the process.

    Processes that are started meanwhile do not heed it: where it is sent to all of a job, the
    driver alone decides.
    """
    before = signal.getsignal(signal.SIGTERM)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def account(text: str) -> str:
    """Ray's account of a death, without its ids and guesses."""
    text = text.partition("Some common causes")[0]
    lines = [line.strip() for line in text.splitlines()]
    ids = ("class_name:", "actor_id:", "namespace:", "ip:", "The actor died unexpectedly")
    kept = [line for line in lines if line and not line.startswith(ids)]
    return "; ".join(kept)[:ACCOUNT]


def stat_of(pid: int) -> list[str]:
    """State, parent and what else /proc/PID/stat has after the name; two empty texts without it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["", ""]
