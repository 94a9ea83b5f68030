# SPDX-License-Identifier: Apache-2.0
"""Files that others wrote: JSON within bounds, refused by name, models told apart; free memory."""

import json
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

MOST_JSON_BYTES = 4 << 20  # an object of these takes some 25 times as much memory
SAMPLES, SAMPLE_BYTES = 256, 1 << 16  # of a file of weights
PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# By version of cgroups: the limit, what is used, and of it files that the kernel may drop.
CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


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


def fingerprint(model: str) -> str:
    """Of a model's config.json and weights: other ones differ in it, at the price of 16 MB a file.

    CRC-32 over each file's name, bytes and samples, which are all of a small file.
    """
    path = Path(model)
    names = [path] if path.is_file() else [path / "config.json", *path.glob("*.safetensors")]
    crc = 0
    for file in sorted(names):
        size = file.stat().st_size
        crc = zlib.crc32(f"{file.name} {size} ".encode(), crc)
        with file.open("rb") as stream:
            for start in range(0, size, max(SAMPLE_BYTES, size // SAMPLES)):
                stream.seek(start)
                crc = zlib.crc32(stream.read(SAMPLE_BYTES), crc)
    return f"{crc:08x}"


def printable(text: str) -> str:
    """A text that others wrote as a terminal may show it: control characters are spelled out."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def host_memory() -> dict[str, int]:
    """The kernel's numbers of this host's memory by name, in bytes; none where it has no such."""
    meminfo = PROC / "meminfo"
    lines = meminfo.read_text().splitlines() if meminfo.exists() else []
    fields = (line.partition(":") for line in lines)
    return {name: int(value.split()[0]) << 10 for name, _, value in fields}


def free_bytes() -> int:
    """Memory that can be taken on this host, in this container; a lot where nothing says."""
    return max(0, min([host_memory().get("MemAvailable", 1 << 62), *_left_in_cgroups()]))


def _left_in_cgroups() -> Iterator[int]:
    """What the limits of this process's cgroups, those around them too, leave."""
    groups = PROC / "self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else ():
        number, controllers, path = line.split(":", 2)
        if number != "0" and "memory" not in controllers.split(","):
            continue
        root = CGROUPS if number == "0" else CGROUPS / "memory"
        own = root / path.lstrip("/")
        for folder in (own, *own.parents[: len(own.parts) - len(root.parts)]):
            for limit, used, droppable in CGROUP_FILES:
                with suppress(OSError, ValueError):  # none of this version; "max"
                    most = int((folder / limit).read_text())
                    stat = (folder / "memory.stat").read_text().split()
                    files = int(stat[stat.index(droppable) + 1])
                    yield most - int((folder / used).read_text()) + files
