# SPDX-License-Identifier: Apache-2.0
"""Ends that come from outside, Ctrl-C and SIGTERM, and starts after failures."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from rich.console import Console

from hfjax.saving import SaveError

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Wrappers and job managers pass a signal on that the run has also got itself; a hand is slower.
SAME_S: dict[int, float] = {signal.SIGINT: 0.3, signal.SIGTERM: 2.0}
PAUSE_S = 10  # after a restart that failed: a lost process's devices and ports come free
CHANGING = re.compile(r"\b(?:0x)?[0-9a-f]{6,}\b|\d+")  # of a message: ids, addresses, counts


class Stopped(KeyboardInterrupt):
    """Ctrl-C or SIGTERM; `number` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Stop:
    """Whether a run is to end after its step: the first signal asks for it, a second ends it.

    The same signal within SAME_S of the first is no second one.
    """

    def __init__(self) -> None:
        self.number, self._first_s = 0, 0.0

    def __bool__(self) -> bool:
        return self.number != 0

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """The handler; it runs in the midst of anything, so it prints through no buffer."""
        now_s = time.monotonic()
        if self.number == number and now_s - self._first_s < SAME_S[number]:
            return
        if self.number:
            raise Stopped(number)
        self.number, self._first_s = number, now_s
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        with suppress(OSError):
            os.write(2, f"\n{name}: stopping after this step; again stops at once\n".encode())


def at_once(number: int, frame: FrameType | None) -> None:
    """The handler while no step is under way."""
    raise Stopped(number)


@contextmanager
def handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Both signals go to `handler`, in the main thread; elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


class Restarts:
    """How often a run may start again after failures, and after which it does."""

    def __init__(self, most: int) -> None:
        self.most, self.count = most, 0
        self._last: Any = None  # the last failure: step, newest checkpoint, kind

    def again(
        self, error: Exception, step: int, saved: int, console: Console, *, starts: bool = False
    ) -> bool:
        """Whether to go on from the checkpoint of step `saved` after a failure in `step`.

        Refusals, checkpoints that cannot be written and a failure that comes again before another
        checkpoint end the run. Not so where `starts`: processes that could not be started again
        may be in a while, which is waited for; the settings are those that were taken before.
        """
        first = str(error).partition("\n")[0]
        if starts and self.count < self.most:
            self.count += 1
            told = f"restart {self.count} of {self.most} in {PAUSE_S} s, as the last could not be"
            console.print(f"{told}: {first}", markup=False)
            time.sleep(PAUSE_S)
            return True
        if isinstance(error, ValueError | SaveError) or getattr(error, "refusal", False):
            return False
        failure = (step, saved, type(error), CHANGING.sub("", first))
        repeated, self._last = failure == self._last, failure
        if self.count >= self.most:
            return False
        if repeated:
            console.print(f"step {step} failed twice in the same way: not started again")
            return False
        self.count += 1
        at = f"step {saved}" if saved else "the start"
        console.print(f"restart {self.count} of {self.most} from {at}: {first}", markup=False)
        return True
