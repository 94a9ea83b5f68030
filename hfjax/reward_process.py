# SPDX-License-Identifier: Apache-2.0
"""The worker process of a reward pool: loads a function, calls it, checks what it returns."""

import contextlib
import ctypes
import importlib
import importlib.util
import inspect
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np

RewardFunction = Callable[..., Any]  # (prompts, responses, ground_truths) -> a score a response
Texts = tuple[list[Any], ...]  # the function's arguments
LARGEST = float(np.finfo(np.float32).max)  # score
LAST_RESORT_S = 5.0  # a worker whose controller vanished ends itself this long after its deadline
MOST_REASON = 8_000  # characters of a failure's account: its end, where the error stands
PR_SET_PDEATHSIG = 1


class Scored(NamedTuple):
    """What came of a job: scores; or a failure of some row; or one of the function itself.

    "killed" is told by the controller alone: another process, or the kernel, ended this one.
    """

    kind: Literal["ready", "scores", "row", "function", "killed"]
    scores: list[float]
    reason: str = ""


def load_reward(spec: str) -> RewardFunction:
    """The function of 'package.module:function' or 'path/file.py:function', of four lists.

    One that needs the fourth, (step, row) of each response, gets it; others get three.
    """
    place, name = place_of(spec)
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(spec, place)
    function = vars(module).get(name)
    if not callable(function):
        found = ", ".join(sorted(n for n, v in vars(module).items() if inspect.isfunction(v)))
        raise ValueError(f"{spec!r}: no function {name!r} there; it has {found or 'none'}")
    if _accepts(function, 3):
        return lambda *texts: function(*texts[:3])
    if _accepts(function, 4):
        return function
    raise ValueError(
        f"{spec!r} must accept three lists, (prompts, responses, ground_truths), or these "
        f"and one of (step, row); it is {name}{inspect.signature(function)}"
    )


def place_of(spec: str) -> tuple[str, str]:
    """Module or file, and function; refuses a file that is not there. Nothing is imported."""
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise ValueError(f"{spec!r}: use 'package.module:function' or 'file.py:function'")
    if place.endswith(".py") and not Path(place).is_file():
        raise ValueError(f"{spec!r}: no file {place!r} in {Path.cwd()}")
    return place, name


def _accepts(function: RewardFunction, lists: int) -> bool:
    try:
        inspect.signature(function).bind(*[[]] * lists)
    except TypeError:
        return False
    return True


def _load_module(spec: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a module that the reward's module needs
        raise ValueError(f"{spec!r}: no module {error.name!r} on the path") from error


def _load_file(path: Path) -> ModuleType:
    name = f"reward_{path.stem}"  # math.py must not hide the library's
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    sys.path.append(str(path.resolve().parent))  # its neighbours
    found.loader.exec_module(module)
    return module


def call_reward(function: RewardFunction, texts: Texts, bound: str = "") -> Scored:
    """The function's scores, checked: one finite number a response; numpy and bool are numbers.

    `bound` is the setting of memory, named where a failure may come of it.
    """
    expected = len(texts[1])
    try:
        returned = function(*texts)
        scores = list(returned) if isinstance(returned, Iterable) else None
    except BaseException as error:  # sys.exit in a reward too is the reward's failure
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        told = "".join(lines)
        cut = "" if len(told) <= MOST_REASON else "...\n"
        hint = _on_memory(error, bound)
        return Scored("row", [], f"raised:\n{cut}{told[-MOST_REASON:]}{hint}")
    if scores is None or isinstance(returned, str | bytes):
        kind = type(returned).__name__
        return Scored("function", [], f"must return a list of {expected} scores, returned a {kind}")
    if len(scores) != expected:
        counts = f"{expected} expected, {len(scores)} received"
        return Scored("function", [], f"must return one score a response: {counts}")
    for score in scores:
        if not _is_score(score):
            return Scored("row", [], f"returned {score!r:.80}, not a finite number")
    return Scored("scores", [float(score) for score in scores])


def _on_memory(error: BaseException, bound: str) -> str:
    """Names the bound where an error speaks of memory or threads, or little is left below it."""
    words = ("alloc", "memory", "new thread")
    told = isinstance(error, MemoryError) or any(word in str(error).lower() for word in words)
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if bound and (told or 0 < limit < _held_bytes() * 10 / 9):
        return f"\na process may allocate {bound}: raise that if the function needs more\n"
    return ""


def _held_bytes() -> int:
    """What counts against the bound; 0 where the kernel does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[5]) * resource.getpagesize() if statm.exists() else 0


def _is_score(value: Any) -> bool:
    if value is None or isinstance(value, str | bytes | list | tuple | dict) or np.ndim(value):
        return False
    try:
        return bool(abs(value) <= LARGEST)
    except (TypeError, ValueError, OverflowError):
        return False


def encoded(answer: Scored) -> bytes:
    """An answer as it travels: no pickle, which would run what a function made of it."""
    return json.dumps(answer).encode()


def decoded(message: bytes, rows: int) -> Scored | None:
    """The answer of a job of `rows` rows; None where the message is no such thing."""
    try:
        kind, scores, reason = json.loads(message)
        wanted = rows if kind == "scores" else 0
        known = kind in ("ready", "scores", "row", "function") and isinstance(reason, str)
        whole = len(scores) == wanted and all(map(_is_score, scores))
    except (ValueError, TypeError, RecursionError):
        return None
    return Scored(kind, scores, reason) if known and whole else None


def _confine(memory_gb: float, controller: int) -> None:
    """Bounds memory; the kernel takes this process before others, and when its controller dies."""
    limit = min(int(memory_gb * 2**30), sys.maxsize)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, soft))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    if sys.platform == "linux":  # signals that the function takes over do not stop this one
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != controller:
        os._exit(1)


def _spare(own: int, number: int, frame: Any) -> None:
    """SIGTERM, sent to all of a job: the driver decides when this process ends.

    Not ignored: what a reward function starts would inherit that, and could not be terminated.
    """
    if os.getpid() != own:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def serve(descriptor: int, spec: str, memory_gb: float, controller: int, bound: str) -> None:
    """The worker process: loads the function, then answers jobs until the controller is gone."""
    own = os.getpid()
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, partial(_spare, own))
    _confine(memory_gb, controller)
    try:
        function = load_reward(spec)
    except BaseException as error:
        told = str(error) if isinstance(error, ValueError) else traceback.format_exc()
        told = told[-MOST_REASON:] + _on_memory(error, bound)
        connection.send_bytes(encoded(Scored("function", [], told)))
        return
    connection.send_bytes(encoded(Scored("ready", [])))
    while True:
        try:
            allowed_s, texts = connection.recv()
        except EOFError:
            return
        # The kernel ends a process stuck in C code; the controller does so earlier if it lives.
        signal.setitimer(signal.ITIMER_REAL, allowed_s + LAST_RESORT_S)
        answer = call_reward(function, texts, bound)
        if os.getpid() != own:  # the function forked: only one of the two answers
            os._exit(0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the function may have closed it
                stream.flush()
        connection.send_bytes(encoded(answer))
