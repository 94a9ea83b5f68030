# SPDX-License-Identifier: Apache-2.0
"""TOML as placements read and write it: tables with known keys, values, the words of refusals."""

import difflib
import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 18
MOST_DOTS = 100  # of a key: the parser's time grows with the square of its parts
# Strings and comments; the open end of a string too, so that nothing is looked at twice.
TEXTS = re.compile(
    r'"""(?:\\.|.)*?(?:"{3,5}|\Z)'
    r"|'''.*?(?:'{3,5}|\Z)"
    r'|"(?:\\.|[^"\\\n])*"?'
    r"|'[^'\n]*'?"
    r"|#[^\n]*",
    re.DOTALL,
)
NAME_CHARACTERS = 100  # of a wrong name, as they are compared and shown


def toml_file(path: str | Path) -> dict[str, Any]:
    """The table in a TOML file; ValueError names the file, of a syntax error line and column."""
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise ValueError(f"{path} has {size} bytes; at most {MOST_BYTES} are read")
        data = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    try:
        text = data.decode("utf-8")
        _check_keys(text)
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # too many digits; too deep
        raise ValueError(f"{path}: not valid TOML: {error}") from error


def _check_keys(text: str) -> None:
    """Refuses keys of too many parts, wherever they stand; strings and comments are left out."""
    bare = TEXTS.sub(lambda found: "_" + "\n" * found[0].count("\n"), text)
    for number, line in enumerate(bare.split("\n"), start=1):
        if any(part.count(".") > MOST_DOTS for part in re.split(r"[,=\[\]{}]", line)):
            raise ValueError(f"line {number} has a key of more than {MOST_DOTS} dots")


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
