# SPDX-License-Identifier: Apache-2.0
"""Reads the text of optimized HLO as far as collectives go; refuses what it does not know.

The text has no specification: this is how XLA of jax 0.10 to 0.12 writes it.
"""

import re
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

COLLECTIVES = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "collective-permute",
)
UNKNOWN = ("ragged-all-to-all", "collective-broadcast", "send", "recv")  # these move bytes too

_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r" +(?:ROOT )?%?([\w.\-]+) = (.+?) ([a-z][\w\-]*)\((.*)")
_OPERANDS = re.compile(r"(?:[^()]|\((?:[^()]|\([^()]*\))*\))*")
_CALLED = re.compile(r"([\w\-]+)=\{?((?:%[\w.\-]+(?:, ?)?)+)")
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_AXES = re.compile(
    r"replica_groups=@?mesh[\[<](?P<sizes>[^\]>]*)[\]>](?:, device_ids=\("
    r"(?:\[(?P<dims>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?|(?P<ids>[\d,]+))\))? \{(?P<used>[^}]*)\}"
)


@dataclass(frozen=True)
class Instruction:
    name: str
    type: str
    op: str
    operands: int
    attributes: str  # quoted text emptied: metadata may say anything
    line: str

    @property
    def kind(self) -> str:
        """The collective that it is or starts; empty for other instructions."""
        kind = self.op.removesuffix("-start")
        return kind if kind in COLLECTIVES + UNKNOWN else ""

    @property
    def known_trips(self) -> int | None:
        """Of a while loop whose length the compiler knows."""
        known = re.search(r"known_trip_count\W+n\W+(\d+)", self.line)
        return int(known[1]) if known else None

    @property
    def op_name(self) -> str:
        """Where it comes from, as jit(f)/while/body; its own name if that is not said."""
        found = re.search(r'op_name="([^"]*)"', self.line)
        return found[1] if found else self.name

    def refusal(self, why: str) -> ValueError:
        return ValueError(f"{why}: {self.line}")


class Module:
    """Computations, lists of instructions by name, and the number of devices they run on."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        current = None
        for line in text.splitlines():
            if line.startswith("}"):
                current = None
            elif current is not None and line.strip():
                current.append(_instruction(line))
            elif header := _HEADER.match(line):
                current = self.computations[header[2]] = []
                self.entry = header[2] if header[1] else self.entry
        first = text.partition("\n")[0]
        numbers = dict(re.findall(r"\b(num_partitions|replica_count)=(\d+)", first))
        self.partitions = int(numbers.get("num_partitions", 1))
        if not self.entry or numbers.get("replica_count", "1") != "1":
            raise ValueError(f"no SPMD program of one replica: {first}")

    def called(self, instruction: Instruction) -> list[tuple[str, str]]:
        """Computations that it calls, each with the attribute that names it."""
        if instruction.op.endswith(("-done", "-update")):
            return []  # they may name again what their start has called
        return [
            (attribute, name)
            for attribute, names in _CALLED.findall(instruction.attributes)
            for name in re.findall(r"%([\w.\-]+)", names)
            if attribute != "control-predecessors" and name in self.computations
        ]


def results(instruction: Instruction) -> tuple[tuple[str, ...], int]:
    """Element types and bytes of a collective's result, all elements of a tuple added.

    A start has (operands, results, contexts ...), but for an all-reduce's, and then the second.
    """
    shapes = _shapes(instruction.type)
    if len(shapes) != instruction.operands:
        halves = [_shapes(part) for part in _elements(instruction.type)[:2]]
        is_start = instruction.op.endswith("-start")
        if not is_start or [len(half) for half in halves] != [instruction.operands] * 2:
            raise instruction.refusal("results are not as many as operands")
        shapes = halves[1]
    bits = 0
    for element, sizes in shapes:
        width = re.match(r"(?:bf|f|s|u|c)(\d+)", element.replace("pred", "u8"))
        if not width or not re.fullmatch(r"[\d,]*", sizes):
            raise instruction.refusal(f"{element}[{sizes}] is of unknown size")
        bits += int(width[1]) * int(np.prod(_numbers(sizes)))
    return tuple(sorted({element for element, _ in shapes})), -(-bits // 8)


def groups(instruction: Instruction, partitions: int) -> np.ndarray:
    """Rows of devices that a collective joins; for a permute its pairs that differ.

    Devices are numbered by their place in the program's device order.
    """
    if instruction.kind in UNKNOWN:
        raise instruction.refusal(f"{instruction.kind} cannot be counted")
    if "channel_id=" not in instruction.attributes:
        raise instruction.refusal("without channel_id its groups are replicas, not devices")
    try:
        rows = _spelled_groups(instruction.attributes, partitions)
    except (KeyError, ValueError) as error:
        raise instruction.refusal("replica_groups not understood") from error
    if instruction.kind == "collective-permute":
        return rows[rows[:, 0] != rows[:, 1]]
    if not np.array_equal(np.sort(rows, axis=None), np.arange(partitions)):
        raise instruction.refusal(f"replica_groups do not hold each of {partitions} devices once")
    return rows


def _instruction(line: str) -> Instruction:
    match = _INSTRUCTION.match(line)
    if not match:
        raise ValueError(f"not an instruction of HLO as it is known here: {line}")
    name, result, op, rest = match.groups()
    rest = re.sub(r'"(?:[^"\\]|\\.)*"', '""', rest)
    operands = _OPERANDS.match(rest)
    assert operands  # it matches the empty text too
    attributes = rest[operands.end() :]
    return Instruction(name, result, op, operands[0].count("%"), attributes, line.strip())


def _shapes(text: str) -> list[tuple[str, str]]:
    return re.findall(r"\b([a-z]\w*)\[([^\]]*)\]", text)


def _elements(text: str) -> list[str]:
    """Those of a tuple type, themselves perhaps tuples."""
    elements, depth = [""], 0
    for letter in text[1:-1]:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            elements.append("")
        else:
            elements[-1] += letter
    return elements


def _numbers(text: str | None) -> list[int]:
    return [int(n) for n in (text or "").split(",") if n]


def _spelled_groups(text: str, partitions: int) -> np.ndarray:
    """Written out, as a reshaped count, along axes of a mesh, or {}: all devices, no pairs."""
    if listed := _LISTED.search(text):
        rows = [_numbers(row) for row in re.findall(r"\{([\d,]*)\}", listed[1])]
        if not rows and "source_target_pairs" in listed[0]:
            return np.empty((0, 2), int)
        return np.array(rows or [range(partitions)])
    if iota := _IOTA.search(text):
        return _iota(iota[2], iota[3]).reshape(_numbers(iota[1]))
    if axes := _AXES.search(text):
        return _groups_along_axes(**axes.groupdict())
    raise ValueError("no spelling that is known here")


def _iota(sizes: str, order: str | None) -> np.ndarray:
    """0, 1, 2, ... in an array of `sizes`, its axes then put into another order."""
    dims = _numbers(sizes)
    return np.arange(np.prod(dims)).reshape(dims).transpose(_numbers(order) or range(len(dims)))


def _groups_along_axes(
    sizes: str, dims: str | None, order: str | None, ids: str | None, used: str
) -> np.ndarray:
    """Groups along axes of a mesh of the compiler's, or along parts of its axes.

    'x':(2)4 is the part of size 4 of x that has a part of size 2 outside it, as in XLA's
    hlo/ir/replica_group.h.
    """
    lengths = {axis: int(n) for axis, n in re.findall(r"'?(\w+)'?=(\d+)", sizes)}
    ranges = [
        (axis, int(before or 1), int(before or 1) * int(n or lengths[axis]))
        for axis, before, n in re.findall(r"'?(\w+)'?(?::\((\d+)\)(\d+))?", used)
    ]
    pieces: list[int] = []
    inside: list[int] = []
    for axis, length in lengths.items():
        mine = [(start, end) for name, start, end in ranges if name == axis]
        cuts = sorted({1, length, *(cut for ends in mine for cut in ends)})
        for low, high in pairwise(cuts):
            if any(start <= low < end for start, end in mine):
                inside.append(len(pieces))
            pieces.append(high // low)
    devices = _iota(dims, order) if dims else np.array(_numbers(ids) or range(np.prod(pieces)))
    outside = [i for i in range(len(pieces)) if i not in inside]
    size = int(np.prod([pieces[i] for i in inside]))
    return devices.reshape(pieces).transpose(outside + inside).reshape(-1, size)
