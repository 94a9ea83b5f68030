# SPDX-License-Identifier: Apache-2.0
"""Rows of JSONL and parquet files, with their numbers for error messages."""

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet

from hfjax import arithmetic
from hfjax.files import free_bytes

log = logging.getLogger(__name__)

Row = Mapping[str, Any]
Split = Literal["train", "eval"]
EMBEDDED = {  # in place of a file
    "sums": arithmetic.rows,
    "sums-sft": arithmetic.demonstrations,
    "sums-pairs": arithmetic.preferences,
    "sums-pairs-random": arithmetic.random_preferences,
}
CELL_BYTES = 64  # of a Python value in a row
SHOWN = 20  # row numbers in one message


@dataclasses.dataclass
class Table:
    """Rows of one file with their numbers, and what was wrong with the others."""

    path: str
    unit: Literal["line", "row"]  # lines count from 1, rows of parquet from 0
    rows: list[tuple[int, Row]]
    problems: list[tuple[int, str]] = dataclasses.field(default_factory=list)

    @property
    def columns(self) -> list[str]:
        """Names found in any row."""
        return sorted({name for _, row in self.rows for name in row})

    def convert(self, parse: Callable[[Row], Any], bad_rows: str) -> list[tuple[int, Any]]:
        """Numbered `parse` of each row; ValueErrors are raised together, or skipped and logged."""
        items: list[tuple[int, Any]] = []
        problems = list(self.problems)
        for number, row in self.rows:
            try:
                items.append((number, parse(row)))
            except ValueError as error:
                problems.append((number, str(error)))
        if problems and (bad_rows == "error" or not items):
            raise ValueError(
                f"{self.path}: {len(problems)} unusable rows, {len(items)} usable: "
                f"{self._reasons(problems)}; mend them or set data.bad_rows='skip'"
            )
        if problems:
            counts = f"{len(items)} rows kept, {len(problems)} skipped"
            log.warning("%s: %s: %s", self.path, counts, self._reasons(problems))
        if not items:
            raise ValueError(f"{self.path}: no rows")
        return items

    def named(self, numbers: Sequence[int]) -> str:
        """'line 7', or 'lines 2, 4, 5'; the text of rows is never shown."""
        first = ", ".join(str(number) for number in sorted(numbers)[:SHOWN])
        more = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
        base = " (from 0)" if self.unit == "row" else ""
        return f"{self.unit}{'s' if len(numbers) > 1 else ''} {first}{more}{base}"

    def _reasons(self, problems: Sequence[tuple[int, str]]) -> str:
        grouped: dict[str, list[int]] = {}
        for number, reason in sorted(problems):
            grouped.setdefault(reason, []).append(number)
        shown = [f"{self.named(numbers)}: {reason}" for reason, numbers in grouped.items()]
        return "; ".join(shown[:SHOWN]) + ("; ..." if len(shown) > SHOWN else "")


def read_rows(path: str, split: Split = "train") -> Table:
    """The rows of a .jsonl or .parquet file or of an embedded set; bad lines become problems."""
    if path in EMBEDDED:
        return Table(path, "row", list(enumerate(EMBEDDED[path](split))))
    names = ", ".join(EMBEDDED)
    if not path:
        raise ValueError(f"data.{split} is not set; give a path or one of {names}")
    if not Path(path).is_file():
        found = "a directory" if Path(path).is_dir() else "no such file"
        raise ValueError(f"data.{split}={path!r}: {found}; give a file's path or one of {names}")
    if path.endswith(".jsonl"):
        return _read_jsonl(path)
    if path.endswith(".parquet"):
        return _read_parquet(path)
    raise ValueError(f"data.{split}={path!r}: unknown format; use .jsonl, .parquet or {names}")


def _read_parquet(path: str) -> Table:
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _check_declared(file.metadata)
            rows = file.read().to_pylist()
    except Exception as error:  # damaged files raise whatever the damage leads to
        raise ValueError(f"{path}: not a parquet file that can be read: {error}") from error
    return Table(path, "row", list(enumerate(rows)))


def _check_declared(metadata: pyarrow.parquet.FileMetaData) -> None:
    """Refuses rows that memory cannot hold: a few bytes may stand for any number of them."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    cells = metadata.num_rows * metadata.num_columns
    needed = cells * CELL_BYTES + sum(group.total_byte_size for group in groups)
    free = free_bytes()
    if not 0 <= needed <= free:
        raise ValueError(
            f"it declares {metadata.num_rows} rows of {metadata.num_columns} columns, some "
            f"{needed >> 20} MiB; {free >> 20} MiB are free"
        )


def _read_jsonl(path: str) -> Table:
    """Lines end at newline bytes only: str.splitlines would also cut inside JSON strings."""
    table = Table(path, "line", [])
    lines = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            table.problems.append((number, f"not JSON ({error.msg} at column {error.colno})"))
        except (ValueError, RecursionError) as error:
            table.problems.append((number, f"not JSON ({type(error).__name__})"))
        else:
            if isinstance(row, dict):
                table.rows.append((number, row))
            else:
                table.problems.append((number, f"a JSON {type(row).__name__}, not an object"))
    return table
