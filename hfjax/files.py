# SPDX-License-Identifier: Apache-2.0
"""JSON files that others wrote: read within bounds, refused by name."""

import json
from pathlib import Path
from typing import Any

MOST_JSON_BYTES = 4 << 20  # an object of these takes some 25 times as much memory


def read_text(path: Path, most_bytes: int = MOST_JSON_BYTES) -> str:
    """A file's text; ValueError names the file if it is too long, unreadable or not UTF-8."""
    try:
        size = path.stat().st_size
        if size > most_bytes:
            raise ValueError(f"{path} has {size} bytes; at most {most_bytes} are read")
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: {error}") from error


def read_json(path: Path, most_bytes: int = MOST_JSON_BYTES) -> dict[str, Any]:
    """The object in a JSON file; ValueError names the file and what is wrong with it."""
    text = read_text(path, most_bytes)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:  # too deep; numbers of too many digits
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}: it must be an object, {{...}}")
    return found


def printable(text: str) -> str:
    """A text that others wrote as a terminal may show it: control characters are spelled out."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def free_bytes() -> int:
    """Memory of this host that can be taken; a lot where the kernel does not say."""
    meminfo = Path("/proc/meminfo")
    for line in meminfo.read_text().splitlines() if meminfo.exists() else ():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    return 1 << 62
