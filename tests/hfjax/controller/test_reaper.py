# SPDX-License-Identifier: Apache-2.0
"""What is left of a session once its driver is gone."""

import subprocess
import sys
from pathlib import Path

import pytest

from hfjax.controller import reaper

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
DRIVER = "import sys, time; from hfjax.controller import reaper; reaper.start(sys.argv[1]); print()"


def holder(folder: Path) -> "subprocess.Popen[bytes]":
    """A process with its log in a directory, as Ray's have."""
    folder.mkdir(exist_ok=True)
    with (folder / "log").open("w") as log:
        return subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=-1, stdout=log)


def test_a_killed_driver_takes_its_session_along_and_no_other(tmp_path: Path) -> None:
    mine, other = holder(tmp_path / "session_1"), holder(tmp_path / "session_11")
    reads = subprocess.Popen(["tail", "-f", str(tmp_path / "session_1" / "log")])
    code = [sys.executable, "-c", f"{DRIVER}; sys.stdout.flush(); time.sleep(600)"]
    driver = subprocess.Popen([*code, str(tmp_path / "session_1")], stdout=subprocess.PIPE)
    assert driver.stdout is not None
    assert driver.stdout.readline() == b"\n"
    assert mine.poll() is None
    driver.kill()
    driver.wait()
    assert mine.wait(20) == -9
    assert (other.poll(), reads.poll()) == (None, None)
    other.communicate(b"\n")
    reads.kill()
    reads.wait()


def test_a_driver_that_goes_on_is_spared_though_it_holds_a_log(tmp_path: Path) -> None:
    mine = holder(tmp_path / "session")
    with (tmp_path / "session" / "driver.log").open("w"):
        (tmp_path / "link").symlink_to(tmp_path)
        reaper.finish(reaper.start(str(tmp_path / "link" / "session")))
    assert mine.wait(20) == -9
