# SPDX-License-Identifier: Apache-2.0
"""The command line answers questions, and its exit status says whose fault an end was."""

import pytest

from hfjax import cli


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("--help", "hfjax export RUN DIR"),
        ("train --help", "train ALGORITHM"),
        ("train -h", "train ALGORITHM"),
        ("train ppo -h", "--algorithm.gamma"),
        ("train ppo --help", "--algorithm.gamma"),
        ("export --help", "export RUN DIR"),
    ],
)
def test_help_is_shown_with_status_0(
    arguments: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = cli.main(arguments.split())
    except SystemExit as error:
        status = error.code
    assert (status, shown in capsys.readouterr().out) == (0, True)
