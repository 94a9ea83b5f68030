# SPDX-License-Identifier: Apache-2.0
"""What cannot be printed ends no run and changes no status."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys
from hfjax import cli
from hfjax.console import make_console
from hfjax.stopping import Stopped

def stopped(arguments):
    console = make_console()
    for _ in range(2):
        console.print("a line " * 10000)
    os.write(report, b"went on")
    raise Stopped(signal.SIGTERM)

report = int(sys.argv[1])
cli.train = stopped
sys.exit(cli.main(["train", "ppo"]))
"""


@pytest.mark.parametrize("where", ["nobody reads", "/dev/full"])
def test_a_run_that_nobody_reads_any_more_ends_with_its_own_status(where: str) -> None:
    """As after `hfjax train ... 2>&1 | tee log`, where the signal ended tee."""
    if where == "nobody reads":
        end, out = os.pipe()
        os.close(end)
    else:
        out = os.open(where, os.O_WRONLY)
    told, report = os.pipe()
    code = [sys.executable, "-c", PROGRAM, str(report)]
    ended = subprocess.run(code, stdout=out, stderr=out, pass_fds=[report], timeout=60)
    os.close(report)
    assert os.read(told, 100) == b"went on"
    assert ended.returncode == 143
    os.close(out)
    os.close(told)
