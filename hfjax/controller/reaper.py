# SPDX-License-Identifier: Apache-2.0
"""Ends what a Ray session has left once its driver is gone, however that ended.

Ray's daemons die with their driver; their agents look a minute for a head that is gone. A process
of its own waits for the driver's end of a pipe to close: a killed driver runs nothing any more.
"""

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

PATIENCE_S = 20.0  # for killed processes to be gone, and those that were just starting to show
SETTLED_S = 3.0  # nobody is seen for so long after a driver's sudden end
LOOK_S = 0.1
OPTION = b"--session-dir="  # of a session's first daemon, a child of the driver, and of its agents


def start() -> "subprocess.Popen[bytes]":
    """Waits from now on, before the session begins; closing its stdin begins the end.

    So does the end of this process. The session is that of the next daemon that it starts.
    """
    driver = str(os.getpid())
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, driver, *sessions_of(driver)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is the driver's to answer
    )


def finish(reaper: "subprocess.Popen[bytes]") -> None:
    """Ends the session's processes, all but this one."""
    reaper.communicate(timeout=2 * PATIENCE_S)


def sessions_of(driver: str) -> set[str]:
    """Directories of the sessions whose daemons are a process's children."""
    found = set()
    for pid in _pids():
        with suppress(OSError):
            if _stat(pid)[1] == driver:
                found.add(_session(pid))
    return found - {""}


def members(session: str) -> set[int]:
    """Processes that write to files below a session's directory, or are given it as theirs.

    Agents have it among their arguments until they rename themselves, and then a log. Processes of
    other users cannot be seen.
    """
    real = os.path.realpath(session)
    found = set()
    for pid in _pids():
        with suppress(OSError):
            files = f"/proc/{pid}/fd"
            if _session(pid) == session or any(
                _written(f"{files}/{file}", real) for file in os.listdir(files)
            ):
                found.add(int(pid))
    return found


def _pids() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: str) -> list[str]:
    """State, parent and more."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()


def _lives(pid: str) -> bool:
    with suppress(OSError):
        return _stat(pid)[0] not in "ZX"
    return False


def _session(pid: str) -> str:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        for argument in file.read().split(b"\0"):
            if argument.startswith(OPTION):
                return os.fsdecode(argument.removeprefix(OPTION))
    return ""


def _written(link: str, folder: str) -> bool:
    """Whether a file below a directory is open to be written; the link may be gone by now."""
    with suppress(OSError):
        return os.readlink(link).startswith(folder + os.sep) and os.lstat(link).st_mode & 0o200 > 0
    return False


def main(driver: str, *known: str) -> None:
    """Waits for the driver, then kills until nobody is left."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to all of a job
    begun: set[str] = set()
    while not begun and not select.select([sys.stdin], [], [], LOOK_S)[0]:
        begun = sessions_of(driver) - {*known}
    sys.stdin.buffer.read()
    ends_s = time.monotonic() + PATIENCE_S
    settles_s = time.monotonic() + (0.0 if _lives(driver) else SETTLED_S)
    while begun and time.monotonic() < ends_s:
        left = set().union(*map(members, begun)) - {int(driver)}
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not left and time.monotonic() > settles_s:
            return
        time.sleep(LOOK_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
