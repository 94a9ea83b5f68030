# SPDX-License-Identifier: Apache-2.0
"""What is printed, which ends no run: its reader may be gone, its file on a full disk."""

import os
import sys
from contextlib import suppress
from typing import Any

from rich.console import Console


class Outlet:
    """Standard output as it is at each write; what that does not take is lost."""

    def write(self, text: str) -> int:
        """As a file's."""
        with suppress(OSError):
            self._now.write(text)
        return len(text)

    def flush(self) -> None:
        """As a file's."""
        with suppress(OSError):
            self._now.flush()

    @property
    def _now(self) -> Any:
        """Not rich's stand-in, which prints through a console."""
        return getattr(sys.stdout, "rich_proxied_file", sys.stdout)

    def __getattr__(self, name: str) -> Any:
        if name == "rich_proxied_file":
            raise AttributeError(name)
        return getattr(self._now, name)


def make_console() -> Console:
    """A console that shows brackets and colons as they are: paths and data may hold them."""
    outlet: Any = Outlet()
    return Console(file=outlet, soft_wrap=True, highlight=False, markup=False, emoji=False)


def say(text: str) -> None:
    """A line on standard error, if that takes it."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def let_go() -> None:
    """What could not be printed is given up, or Python would end with a status of its own."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):  # it is closed, or no file of the system
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
