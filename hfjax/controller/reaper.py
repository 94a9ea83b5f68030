# SPDX-License-Identifier: Apache-2.0
"""Ends what a Ray session has left once its driver is gone, however that ended.

Ray's daemons die with their driver; their agents look a minute for a head that is gone. A process
of its own waits for the driver's end of a pipe to close: a killed driver runs nothing any more.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

PATIENCE_S = 10.0  # for killed processes to be gone


def start(session: str) -> "subprocess.Popen[bytes]":
    """Waits from now on; closing its stdin, as the end of this process does, begins the end.

    `session` is the directory that every process of the Ray session writes its log to.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, os.path.realpath(session), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is the driver's to answer
    )


def finish(reaper: "subprocess.Popen[bytes]") -> None:
    """Ends the session's processes, all but this one."""
    reaper.communicate(timeout=2 * PATIENCE_S)


def holding(session: str) -> set[int]:
    """Processes that write to files below a directory; those of other users cannot be seen."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            files = f"/proc/{pid}/fd"
            if any(_written(f"{files}/{file}", session) for file in os.listdir(files)):
                found.add(int(pid))
    return found


def _written(link: str, folder: str) -> bool:
    """Whether a file below a directory is open to be written; the link may be gone by now."""
    with suppress(OSError):
        return os.readlink(link).startswith(folder + os.sep) and os.lstat(link).st_mode & 0o200 > 0
    return False


def main(session: str, driver: str) -> None:
    """Waits for the driver, then kills until nobody is left."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to all of a job
    sys.stdin.buffer.read()
    ends_s = time.monotonic() + PATIENCE_S
    while (left := holding(session) - {int(driver)}) and time.monotonic() < ends_s:
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


if __name__ == "__main__":
    main(*sys.argv[1:])
