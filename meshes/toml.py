# SPDX-License-Identifier: Apache-2.0
"""TOML as placements read and write it: tables with known keys, values, the words of refusals."""

import difflib
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 18
MOST_DOTS = 100  # in a line: the parser's time grows with the square of a key's parts
NAME_CHARACTERS = 100  # of a wrong name, as they are compared and shown


def toml_file(path: str | Path) -> dict[str, Any]:
    """The table in a TOML file; ValueError names the file, of a syntax error line and column."""
    path = Path(path)
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
        for number, line in enumerate(text.splitlines(), start=1):
            if line.count(".") > MOST_DOTS:
                raise ValueError(f"line {number} has more than {MOST_DOTS} dots")
        return tomllib.loads(text)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:  # too many digits; too deep
        raise ValueError(f"{path}: not valid TOML: {error}") from error


def checked_table(
    section: str, value: Any, legal: Sequence[str] | None, required: Sequence[str] = ()
) -> dict[str, Any]:
    """A TOML table whose keys are all legal and none of the required missing."""
    if not isinstance(value, dict):
        raise ValueError(f"{section} = {spelled(value)}: must be a table, with keys of its own")
    for key in value:
        if legal is not None and key not in legal:
            raise ValueError(f"[{section}] {unknown_name('key', key, legal)}")
    for key in required:
        if key not in value:
            raise ValueError(
                f"[{section}] lacks the key {key!r}; its keys: {', '.join(legal or ())}"
            )
    return dict(value)


def unknown_name(kind: str, name: str, legal: Iterable[str]) -> str:
    """Refuses a name, with the nearest legal one and all of them."""
    legal = list(legal)
    name = name[:NAME_CHARACTERS]
    return f"unknown {kind} {name!r}{did_you_mean(name, legal)}; legal: {', '.join(legal)}"


def did_you_mean(name: str, legal: Iterable[str]) -> str:
    """What to add to a refusal where a legal name is near."""
    near = difflib.get_close_matches(name[:NAME_CHARACTERS], list(legal), n=1)
    return f", did you mean {near[0]!r}?" if near else ""


def bare_key(name: str) -> str:
    """A bare TOML key where the name allows it, a quoted one where not."""
    bare = name.isascii() and name.replace("-", "a").replace("_", "a").isalnum()
    return name if bare else spelled(name)


def shown(value: object) -> str:
    """A value for a refusal, cut where it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # of too many digits
        text = f"a {type(value).__name__} too long to show"
    return text if len(text) <= 2 * NAME_CHARACTERS else f"{text[: 2 * NAME_CHARACTERS]}..."


def spelled(value: object) -> str:
    """A value as TOML spells it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {spelled(item)}" for key, item in value.items()) + " }"
    return repr(value)
