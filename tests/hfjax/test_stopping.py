# SPDX-License-Identifier: Apache-2.0
"""Signals that end a run: the first, those that come with it, and a second."""

import signal

import pytest

from hfjax import stopping
from hfjax.stopping import Stop, Stopped


@pytest.mark.parametrize(("number", "told"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTE")])
def test_a_signal_that_comes_twice_at_once_is_one_and_a_later_one_ends_the_run(
    number: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    now_s = 100.0
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now_s)
    stop = Stop()
    stop.on_signal(number, None)
    now_s += 0.2
    stop.on_signal(number, None)
    assert stop
    assert capfd.readouterr().err.count(told) == 1
    now_s += 2.0
    with pytest.raises(Stopped):
        stop.on_signal(number, None)


def test_the_other_signal_ends_the_run_at_once() -> None:
    stop = Stop()
    stop.on_signal(signal.SIGTERM, None)
    with pytest.raises(Stopped) as stopped:
        stop.on_signal(signal.SIGINT, None)
    assert stopped.value.number == signal.SIGINT
