# SPDX-License-Identifier: Apache-2.0
"""Damage: bytes of any file, values of JSON and TOML, columns of parquet."""

import io
import json
import string
from collections.abc import Callable
from typing import Any

import pyarrow
import pyarrow.parquet
from hypothesis import strategies as st

Damage = Callable[[bytes], st.SearchStrategy[bytes]]

SIZES = [0, 1, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1]
LITERALS = [  # of JSON; those of TOML are made from them
    *("null", "true", "false", "0", "1", "-1", "1.5", "-0.0", "1e999", "1e308", "NaN", "Infinity"),
    *("40", "2147483648", "1000000000", "1" + "0" * 18, "1" + "0" * 400, "9" * 5000),
    *('""', '"x"', '"40"', '"\\ud800"', '"a\\u0000b"', '"\\u001b[31m"', '"' + "A" * 5000 + '"'),
    *("[]", "[1]", '["a"]', "[[3]]", "[null]", "{}", '{"a": 1}', '{"content": 3}', '[{"a": "b"}]'),
    *("[" * 50 + "]" * 50, "[" * 5000 + "]" * 5000, '{"a":' * 5000 + "1" + "}" * 5000),
]
MARK = "@@mark@@"


def spans(size: int) -> st.SearchStrategy[tuple[int, int]]:
    """Start and length of a part: near the front, near the end, anywhere."""
    starts = st.one_of(
        st.integers(0, min(size, 400)),
        st.integers(max(0, size - 400), size),
        st.integers(0, size),
    )
    return st.tuples(starts, st.one_of(st.integers(1, 16), st.integers(1, max(1, size))))


@st.composite
def damaged_bytes(draw: Any, good: bytes) -> bytes:
    """One to three changes: flipped, overwritten, cut, inserted, doubled, sizes made huge."""
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 3))):
        start, length = draw(spans(len(data)))
        kind = draw(st.sampled_from(["flip", "set", "size", "delete", "insert", "double", "cut"]))
        if kind == "flip" and start < len(data):
            data[start] ^= 1 << draw(st.integers(0, 7))
        elif kind == "set":
            size = len(data[start : start + length])
            data[start : start + length] = bytes([draw(st.sampled_from([0, 255, 32, 34]))]) * size
        elif kind == "size":
            width = draw(st.sampled_from([4, 8]))
            number = draw(st.sampled_from(SIZES)) % 2 ** (8 * width)
            data[start : start + width] = number.to_bytes(width, "little")
        elif kind == "delete":
            del data[start : start + length]
        elif kind == "insert":
            data[start:start] = draw(st.binary(min_size=1, max_size=16))
        elif kind == "double":
            data[start:start] = data[start : start + length]
        elif kind == "cut":
            del data[start:]
    return bytes(data)


def _places(tree: Any) -> list[tuple[Any, ...]]:
    """Paths of all values in a JSON tree, the root's first."""
    found: list[tuple[Any, ...]] = [()]
    items = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree if isinstance(tree, list) else ())
    )
    for key, value in items:
        found += [(key, *rest) for rest in _places(value)]
    return found


@st.composite
def damaged_json(draw: Any, good: bytes) -> bytes:
    """A value replaced, left out, renamed or given twice; shallow ones oftener."""
    tree = json.loads(good)
    for _ in range(draw(st.integers(1, 2))):
        places = sorted(_places(tree), key=len)
        most = draw(st.sampled_from([min(len(places), 40), len(places)]))
        path = places[draw(st.integers(0, most - 1))]
        kind = draw(st.sampled_from(["replace", "replace", "replace", "drop", "rename"]))
        if not path:
            if kind == "replace" and draw(st.booleans()):
                return draw(st.sampled_from(LITERALS)).encode()
            continue
        at = tree
        for key in path[:-1]:
            at = at[key]
        if kind == "replace":
            at[path[-1]] = MARK + str(draw(st.integers(0, len(LITERALS) - 1)))
        elif kind == "drop":
            del at[path[-1]]
        elif isinstance(at, dict):
            at[draw(st.text(string.ascii_letters + "_", max_size=8))] = at.pop(path[-1])
    text = json.dumps(tree)
    for number, literal in reversed(list(enumerate(LITERALS))):
        text = text.replace(f'"{MARK}{number}"', literal)
    return text.encode()


@st.composite
def damaged_jsonl(draw: Any, good: bytes) -> bytes:
    """One line damaged as JSON."""
    lines = good.splitlines()
    at = draw(st.integers(0, len(lines) - 1))
    lines[at] = draw(damaged_json(lines[at]))
    return b"\n".join(lines)


@st.composite
def damaged_toml(draw: Any, good: bytes) -> bytes:
    """A line's value replaced, a line doubled, left out, renamed or nested without end."""
    lines = good.decode().splitlines()
    for _ in range(draw(st.integers(1, 2))):
        at = draw(st.integers(0, len(lines) - 1))
        kind = draw(st.sampled_from(["value", "value", "value", "double", "drop", "name", "nest"]))
        name, equals, _ = lines[at].partition(" = ")
        if kind == "value" and equals:
            literal = draw(st.sampled_from(LITERALS)).replace(":", "=").replace('"a"=', "a=")
            more = ["nan", "-inf", "1979-05-27", "0x7fffffffffffffff", '"""a\nb"""', "{a.b.c = 1}"]
            lines[at] = name + equals + draw(st.sampled_from([literal, *more]))
        elif kind == "double":
            lines.insert(at, lines[at])
        elif kind == "drop" and len(lines) > 1:
            del lines[at]
        elif kind == "name" and equals:
            lines[at] = draw(st.text(string.ascii_letters + "._-\"'", max_size=8)) + equals + "1"
        elif kind == "nest":
            lines.insert(at, draw(st.sampled_from(["a." * 5000 + "a = 1", "[" * 5000, "[a.a.a]"])))
    return "\n".join(lines).encode("utf-8", "surrogateescape")


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "texts": st.text(max_size=12),
    "numbers": st.integers(-(2**63), 2**63 - 1),
    "floats": st.floats(),
    "bytes": st.binary(max_size=12),
    "truths": st.booleans(),
    "dates": st.datetimes(),
    "ids": st.lists(st.integers(-2, 90), max_size=5),
    "messages": st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "", "x"])}), max_size=3
    ),
    "decimals": st.decimals(-1000, 1000, places=2),
    "nested": st.fixed_dictionaries({"ground_truth": st.none() | st.text(max_size=3)}),
}


@st.composite
def other_columns(draw: Any, good: bytes) -> bytes:
    """A parquet file of any types under the names that are read."""
    rows, columns = draw(st.integers(0, 5)), {}
    for name in ("prompt", "ground_truth", "data_source", "reward_model"):
        values = VALUES[draw(st.sampled_from(sorted(VALUES)))]
        if draw(st.integers(0, 4)):
            columns[name] = draw(st.lists(values | st.none(), min_size=rows, max_size=rows))
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink)
    return sink.getvalue()
