# SPDX-License-Identifier: Apache-2.0
"""Chat templates: Jinja in a sandbox, within bounds of time, memory and length.

A template comes with a model, so it is foreign code.
"""

import datetime
import json
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

DEADLINE_S = 5.0  # of computing, for one conversation: others may hold the processor
ROOM_BYTES = 64 << 20  # memory that a conversation may take while it is rendered
MOST_CHARACTERS = 1 << 22  # of a rendered conversation
MOST_BITS = 10_000  # of a product or a power: longer ones would hold the process
ONE_AT_A_TIME = threading.Lock()  # the bounds are the process's: each must see those of no other


class ChatTemplate:
    """One template's text of conversations; whatever goes wrong inside is a ValueError.

    After it has overrun its time, or its memory, twice it is not tried again.
    """

    def __init__(self, text: str, source: str, now: datetime.datetime) -> None:
        """`source` is named in errors; templates that ask for the time are told `now`."""
        self._source = source
        self._overran: dict[str, int] = {}  # how often, by what is told of it
        try:
            with _bounded():  # constants are computed here
                self._template = _environment(now).from_string(text)
        except Exception as error:
            raise ValueError(f"the chat template of {source} is broken: {_told(error)}") from error

    def render(self, **variables: Any) -> str:
        """The text; the time is watched in the main thread only.

        Meanwhile other threads share the bound of memory.
        """
        for told, times in list(self._overran.items()):
            if times > 1:
                raise ValueError(told)
        try:
            with _bounded():
                text = self._template.render(**variables)
        except (TimeoutError, MemoryError) as error:
            told = f"the chat template of {self._source} {_told(error)}"
            self._overran[told] = self._overran.get(told, 0) + 1
            raise ValueError(told) from None
        except Exception as error:
            told = f"the chat template of {self._source} refused: {_told(error)}"
            raise ValueError(told) from error
        if len(text) > MOST_CHARACTERS:
            raise ValueError(
                f"the chat template of {self._source} made {len(text)} characters of one "
                f"conversation; at most {MOST_CHARACTERS} are taken"
            )
        return text


def _told(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"did not end within {DEADLINE_S:g} s"
    if isinstance(error, MemoryError):
        return f"took more than {ROOM_BYTES >> 20} MiB"
    return str(error) or type(error).__name__


@contextmanager
def _bounded() -> Iterator[None]:
    """TimeoutError after DEADLINE_S, MemoryError beyond ROOM_BYTES; what was set before returns."""
    with ONE_AT_A_TIME, _memory_bounded():
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        start_s, own_s = time.process_time(), time.thread_time()

        def overrun(number: int, frame: Any) -> None:
            if time.thread_time() - own_s >= DEADLINE_S:  # the timer counts all threads
                signal.setitimer(signal.ITIMER_VIRTUAL, 1.0, 1.0)
                raise TimeoutError

        handler = signal.signal(signal.SIGVTALRM, overrun)
        left_s, again_s = signal.setitimer(signal.ITIMER_VIRTUAL, DEADLINE_S, 0.1)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, handler)
            if left_s:
                left_s = max(left_s - (time.process_time() - start_s), 1e-3)
                signal.setitimer(signal.ITIMER_VIRTUAL, left_s, again_s)


@contextmanager
def _memory_bounded() -> Iterator[None]:
    """The kernel refuses this process's further memory: no operator of a template gets by."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        yield
        return
    held = int(statm.read_text().split()[5]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = held + ROOM_BYTES
    if soft != resource.RLIM_INFINITY:
        most = min(most, soft)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which numbers stay short: no signal ends their arithmetic."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length()
            bits += right.bit_length()
            if bits > MOST_BITS:
                raise OverflowError(f"a number of {operator} has more than {MOST_BITS} bits")
        return super().call_binop(context, operator, left, right)


class _GenerationTag(Extension):
    """Accepts `{% generation %}`: some templates mark the assistant's words with it."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(now: datetime.datetime) -> jinja2.Environment:
    """Jinja as transformers sets it up, so that the same template gives the same text."""
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = now.strftime
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own tojson escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
