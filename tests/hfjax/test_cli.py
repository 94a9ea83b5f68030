# SPDX-License-Identifier: Apache-2.0
"""The command line answers questions, and its exit status says whose fault an end was."""

import pytest

from hfjax import cli
from hfjax.controller.worker import RoleError


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


@pytest.mark.parametrize(("refusal", "status"), [(True, 2), (False, 1)])
def test_the_status_of_a_workers_failure_is_its_causes(
    refusal: bool, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through Ray an error has no __cause__; the mark on it says whose fault it was."""

    def fail(arguments: list[str]) -> None:
        raise RoleError("role 'actor', build at step 0: no", refusal=refusal)

    monkeypatch.setattr(cli, "train", fail)
    assert cli.main(["train", "ppo"]) == status
    assert capsys.readouterr().err == "hfjax train ppo: role 'actor', build at step 0: no\n"


def test_the_error_of_a_role_in_this_process_is_told_once_with_its_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(arguments: list[str]) -> None:
        try:
            raise KeyError("rows")
        except KeyError as error:
            raise RoleError("role 'reward', compute_reward: KeyError: 'rows'") from error

    monkeypatch.setattr(cli, "train", fails)
    assert cli.main(["train", "ppo"]) == 1
    told = capsys.readouterr().err
    assert told.count("KeyError: 'rows'") == 1
    assert "in fails" in told
