# SPDX-License-Identifier: Apache-2.0
"""What is left of a session once its driver is gone."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from hfjax.controller import reaper

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
DAEMON = "import sys; print(flush=True); sys.stdin.read()"
DRIVER = """import subprocess, sys, time
from hfjax.controller import reaper
code = [sys.executable, "-S", "-c", sys.argv[1]]
old = subprocess.Popen([*code, "--session-dir=" + sys.argv[2]], stdin=-1, stdout=-1)
old.stdout.readline()
reaper.start()
new = subprocess.Popen([*code, "--session-dir=" + sys.argv[3]], stdin=-1)
time.sleep(600)
"""


def holder(folder: Path) -> "subprocess.Popen[bytes]":
    """A process with its log in a directory, as Ray's have."""
    folder.mkdir(exist_ok=True)
    with (folder / "log").open("w") as log:
        return subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=-1, stdout=log)


def daemon(folder: Path) -> "subprocess.Popen[bytes]":
    """A process that has no log yet, but was told of the directory."""
    code = [sys.executable, "-S", "-c", DAEMON, f"--session-dir={folder}"]
    started = subprocess.Popen(code, stdin=-1, stdout=-1)
    assert started.stdout is not None
    assert started.stdout.readline() == b"\n"
    return started


def test_a_killed_driver_takes_its_session_along_and_no_other(tmp_path: Path) -> None:
    folders = tmp_path / "session_1", tmp_path / "session_11"
    other, mine = holder(folders[0]), holder(folders[1])
    reads = subprocess.Popen(["tail", "-f", str(folders[1] / "log")])
    code = [sys.executable, "-c", DRIVER, DAEMON, *map(str, folders)]
    driver = subprocess.Popen(code, stdout=subprocess.PIPE)
    assert driver.stdout is not None
    assert driver.stdout.readline() == b"\n"
    early = daemon(folders[1])
    time.sleep(1)  # for the reaper to see the new daemon: it looks ten times a second
    assert mine.poll() is None
    driver.kill()
    driver.wait()
    assert (mine.wait(20), early.wait(20)) == (-9, -9)
    late = daemon(folders[1])
    assert late.wait(20) == -9
    assert (other.poll(), reads.poll()) == (None, None)
    other.communicate(b"\n")
    reads.kill()
    reads.wait()


def test_a_driver_that_goes_on_is_spared_though_it_holds_a_log(tmp_path: Path) -> None:
    mine = holder(tmp_path / "session")
    (tmp_path / "link").symlink_to(tmp_path)
    with (tmp_path / "session" / "driver.log").open("w"):
        started = reaper.start()
        told = daemon(tmp_path / "link" / "session")
        time.sleep(1)
        reaper.finish(started)
    assert (mine.wait(20), told.wait(20)) == (-9, -9)


def test_a_session_that_never_began_ends_nobody(tmp_path: Path) -> None:
    mine = holder(tmp_path / "session")
    reaper.finish(reaper.start())
    assert mine.poll() is None
    mine.communicate(b"\n")
