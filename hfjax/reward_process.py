# SPDX-License-Identifier: Apache-2.0
"""The worker process of a reward pool: loads a function, calls it, checks what it returns."""

import importlib
import importlib.util
import inspect
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np

RewardFunction = Callable[..., Any]  # (prompts, responses, ground_truths) -> a score a response
Texts = tuple[list[Any], ...]  # the function's arguments
LAST_RESORT_S = 5.0  # a worker whose controller vanished ends itself this long after its deadline


class Scored(NamedTuple):
    """What came of a job: scores; or a failure of some row; or one of the function itself."""

    kind: Literal["ready", "scores", "row", "function"]
    scores: list[float]
    reason: str = ""


def load_reward(spec: str) -> RewardFunction:
    """The function of 'package.module:function' or 'path/file.py:function', of four lists.

    One that needs the fourth, (step, row) of each response, gets it; others get three.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise ValueError(f"{spec!r}: use 'package.module:function' or 'file.py:function'")
    module = _load_file(spec, Path(place)) if place.endswith(".py") else _load_module(spec, place)
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


def _load_file(spec: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"{spec!r}: no file {str(path)!r} in {Path.cwd()}")
    name = f"reward_{path.stem}"  # math.py must not hide the library's
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    sys.path.append(str(path.resolve().parent))  # its neighbours
    found.loader.exec_module(module)
    return module


def call_reward(function: RewardFunction, texts: Texts) -> Scored:
    """The function's scores, checked: one finite number a response; numpy and bool are numbers."""
    expected = len(texts[1])
    try:
        returned = function(*texts)
        scores = list(returned) if isinstance(returned, Iterable) else None
    except BaseException as error:  # sys.exit in a reward too is the reward's failure
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        return Scored("row", [], "raised:\n" + "".join(lines))
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


def _is_score(value: Any) -> bool:
    if value is None or isinstance(value, str | bytes | list | tuple | dict) or np.ndim(value):
        return False
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False


def serve(descriptor: int, spec: str) -> None:
    """The worker process: loads the function, then answers jobs until the controller is gone."""
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    try:
        function = load_reward(spec)
    except BaseException as error:
        reason = str(error) if isinstance(error, ValueError) else traceback.format_exc()
        connection.send(Scored("function", [], reason))
        return
    connection.send(Scored("ready", []))
    while True:
        try:
            allowed_s, texts = connection.recv()
        except EOFError:
            return
        # The kernel ends a process stuck in C code; the controller does so earlier if it lives.
        signal.setitimer(signal.ITIMER_REAL, allowed_s + LAST_RESORT_S)
        answer = call_reward(function, texts)
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send(answer)
