# SPDX-License-Identifier: Apache-2.0
"""What a step of an algorithm asks of its models: the traced calls with sizes, and their options.

The dataflow is the algorithm's own (hfjax.controller.graph); nothing here knows an algorithm.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from hfjax.controller.graph import ROW_COLUMNS, Node
from hfjax.models.llama import Head, ModelConfig
from meshes.mesh import MeshShape


class Kind(Enum):
    """What a call does, and the paper's stage in which it runs (HybridFlow §2.1)."""

    GENERATE = 0
    INFER = 1
    TRAIN = 2
    DRIVER = 3  # the controller's arithmetic, a reward function: no device works


USABLE = 0.9  # share of a device's memory to plan for; vLLM's gpu_memory_utilization
KINDS = {"generate_": Kind.GENERATE, "compute_": Kind.INFER, "update_": Kind.TRAIN}


@dataclass(frozen=True, kw_only=True)
class Model:
    """A role's model."""

    config: ModelConfig
    head: Head
    trained: bool
    rows_together: int = 1  # neighbouring rows of a micro-batch that are not parted
    generates: bool = False  # found in the calls


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Sizes of a step; every row has the same lengths."""

    prompts: int = 1024
    n: int = 1  # responses a prompt
    prompt_tokens: int = 1024
    response_tokens: int = 1024
    updates: int = 8  # optimizer updates of a trained role a step and epoch
    epochs: int = 1

    @property
    def rows(self) -> int:
        return self.prompts * self.n

    @property
    def row_tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens

    @property
    def tokens(self) -> int:
        """Of all rows: what throughput counts (HybridFlow §8.1)."""
        return self.rows * self.row_tokens


@dataclass(frozen=True)
class Call:
    """One call of a step."""

    number: int  # in call order, as in the graph
    role: str
    method: str
    kind: Kind
    inputs: frozenset[int]  # numbers of the calls whose columns it reads
    rows: int  # of its batch
    bytes_out: float = 0.0  # of the columns that it writes


@dataclass(frozen=True)
class Problem:
    """A step to be placed."""

    calls: tuple[Call, ...]
    models: Mapping[str, Model]  # roles on devices, in order of the algorithm
    work: Workload

    def of(self, role: str) -> tuple[Call, ...]:
        return tuple(call for call in self.calls if call.role == role)


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to run a role on some devices: a layout a kind of call, and what it costs there.

    A pool can hold options together whose resident bytes, and the largest of whose working bytes,
    fit a device's memory.
    """

    train: MeshShape | None = None  # p and t whole, as a placement file writes them
    infer: MeshShape | None = None  # None: as train
    generate: MeshShape | None = None  # p_g and t_g only
    zero: int = 3
    sequence_parallel: bool = False
    relay: str = "hybrid"
    remat: str = "none"
    micro_sequences: int = 0  # rows of a training micro-batch over all replicas; 0: all at once
    waves: int = 1  # times that generation fills its KV cache
    seconds: Mapping[int, float] = field(default_factory=dict)  # by number of the role's calls
    resident_bytes: float = 0.0  # a device, between calls
    working_bytes: float = 0.0  # a device, the most that any of its calls needs besides


def problem(nodes: Sequence[Node], models: Mapping[str, Model], work: Workload) -> Problem:
    """The sized calls of a traced step; roles without a model are the driver's work."""
    calls = []
    for node in nodes:
        on_devices = node.role in models
        kind = _kind(node) if on_devices else Kind.DRIVER
        size = sum(work.rows * _column_bytes(name, work) for name in node.writes)
        inputs, rows = frozenset(node.inputs), work.rows
        calls.append(Call(node.number, node.role, node.method, kind, inputs, rows, size))
    kinds = {role: {call.kind for call in calls if call.role == role} for role in models}
    roles = {
        role: replace(model, generates=Kind.GENERATE in kinds[role])
        for role, model in models.items()
        if kinds[role]
    }
    return Problem(tuple(calls), roles, work)


def _kind(node: Node) -> Kind:
    """By the paper's names of operations (HybridFlow Table 4)."""
    for start, kind in KINDS.items():
        if node.method.startswith(start):
            return kind
    raise ValueError(
        f"{node.role}.{node.method}: methods of models are named {', '.join(KINDS)}...; rename it"
    )


def _column_bytes(name: str, work: Workload) -> int:
    """Of a row: a number, or one a token; all have four bytes but masks."""
    if name in ROW_COLUMNS:
        return 4
    return work.row_tokens * (1 if name.endswith("mask") else 4)
