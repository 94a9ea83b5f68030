# SPDX-License-Identifier: Apache-2.0
"""Processes of this host by their pids: who is there, which are Ray's own, and their end."""

import os
import signal
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
    return _stat(pid)[0] != "Z"


def daemons() -> dict[str, int]:
    """Ray's own processes that this process has started, by name; none where /proc is not there."""
    found, parent = {}, str(os.getpid())
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            name = (entry / "comm").read_text().strip()
            if name in DAEMONS and _stat(int(entry.name))[1] == parent:
                found[name] = int(entry.name)
    return found


def end(pids: Iterable[int], patience_s: float) -> None:
    """Waits for processes to end; kills those that do not: a stopped one obeys nothing else."""
    ends_s = time.monotonic() + patience_s
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < ends_s:
        time.sleep(0.05)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def within(limit_s: float, ends: Callable[[], object]) -> None:
    """Calls a function, and goes on when it does not return: what it waits for may be gone."""
    thread = threading.Thread(target=ends, name="hfjax-close", daemon=True)
    thread.start()
    thread.join(limit_s)


@contextmanager
def own_sigterm() -> Iterator[None]:
    """What SIGTERM does stays as it was: Ray, when it starts, has it leave the process."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


def account(text: str) -> str:
    """Ray's account of a death, without its ids and guesses."""
    text = text.partition("Some common causes")[0]
    lines = [line.strip() for line in text.splitlines()]
    ids = ("class_name:", "actor_id:", "namespace:", "ip:", "The actor died unexpectedly")
    kept = [line for line in lines if line and not line.startswith(ids)]
    return "; ".join(kept)[:ACCOUNT]


def _stat(pid: int) -> tuple[str, str]:
    """State and parent of a process; empty where nothing says so."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", ""
    state, parent, *_ = text.rpartition(")")[2].split()
    return state, parent
