# SPDX-License-Identifier: Apache-2.0
"""TOML as placements read and write it: tables with known keys, values, the words of refusals."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any


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
    return f"unknown {kind} {name!r}{did_you_mean(name, legal)}; legal: {', '.join(legal)}"


def did_you_mean(name: str, legal: Iterable[str]) -> str:
    """What to add to a refusal where a legal name is near."""
    near = difflib.get_close_matches(name, list(legal), n=1)
    return f", did you mean {near[0]!r}?" if near else ""


def bare_key(name: str) -> str:
    """A bare TOML key where the name allows it, a quoted one where not."""
    bare = name.isascii() and name.replace("-", "a").replace("_", "a").isalnum()
    return name if bare else spelled(name)


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
