# SPDX-License-Identifier: Apache-2.0
"""Steps and options made by hand, for the tests of the mapper."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from hfjax.mapping.devices import Device, load_devices
from hfjax.mapping.work import Call, Kind, Model, Option, Problem, Workload
from hfjax.models.llama import ModelConfig
from meshes.mesh import MeshShape

GENERATE, INFER, TRAIN, DRIVER = Kind
GB = 1e9
SMALL = ModelConfig(
    layers=2, embed=40, heads=8, kv_heads=4, head_dim=6, mlp=56, vocab=96, rope_theta=1e4
)
A, C, R, W = "actor", "critic", "reference", "reward"
Given = tuple[str, Kind, set[int]]  # role, kind, inputs
PPO: tuple[Given, ...] = (
    (A, GENERATE, set()),
    (A, INFER, {0}),
    (C, INFER, {0}),
    (R, INFER, {0}),
    (W, INFER, {0}),
    ("controller", DRIVER, {1, 2, 3, 4}),
    (C, TRAIN, {0, 2, 4, 5}),
    (A, TRAIN, {0, 1, 4, 5}),
)
SAFE: tuple[Given, ...] = (
    (A, GENERATE, set()),
    (A, INFER, {0}),
    (C, INFER, {0}),
    (R, INFER, {0}),
    (W, INFER, {0}),
    ("cost", INFER, {0, 4}),
    ("controller", DRIVER, {1, 2, 3, 4, 5}),
    (C, TRAIN, {0, 2, 6}),
    (A, TRAIN, {0, 1, 6}),
)


def a_device(
    name: str = "a", memory_bytes: float = 80 * GB, shares: int = 1, node: int = 1024
) -> Device:
    known = load_devices()["a100-80g"]
    return replace(known, name=name, memory_bytes=memory_bytes, shares=shares, node=node)


def a_problem(*calls: Given) -> Problem:
    """Roles in the order of their first call."""
    made = tuple(
        Call(i, role, kind.name.lower(), kind, frozenset(inputs), 8, 1.0)
        for i, (role, kind, inputs) in enumerate(calls)
    )
    roles = dict.fromkeys(call.role for call in made if call.kind is not DRIVER)
    model = Model(config=SMALL, head="lm", trained=False)
    return Problem(made, dict.fromkeys(roles, model), Workload())


def random_problem(random: Random, roles: int) -> Problem:
    """Calls of any role on any earlier calls; each role has one at least."""
    names = [A, C, R, W, "cost"][:roles]
    owners = names + random.choices([*names, "controller"], k=random.randint(0, 4))
    random.shuffle(owners)
    calls = []
    for i, owner in enumerate(owners):
        kind = DRIVER if owner == "controller" else random.choice([GENERATE, INFER, TRAIN])
        calls.append((owner, kind, {j for j in range(i) if random.random() < 0.4}))
    return a_problem(*calls)


Options = Callable[[str, Any, int], Sequence[Option]]


def random_options(problem: Problem, random: Random, most: int = 4) -> Options:
    """Up to `most` options a role and count: seconds whole in binary, memory in whole GB."""
    made: dict[tuple[str, str, int], tuple[Option, ...]] = {}

    def options(role: str, device: Any, n: int) -> Sequence[Option]:
        key = (role, device.name, n)
        if key not in made:
            made[key] = tuple(
                Option(
                    train=MeshShape(data=n),
                    infer=random.choice([None, None, MeshShape(data=n)]),
                    seconds={
                        call.number: (random.randint(64, 1024) + 2048 // n) / 256
                        for call in problem.of(role)
                    },
                    resident_bytes=random.randint(5, 90) * GB // n,
                    working_bytes=random.randint(0, 30) * GB // n,
                )
                for _ in range(random.randint(0, most))
            )
        return made[key]

    return options


def scaling_options(problem: Problem, sizes: Mapping[str, float], *, any_n: bool) -> Options:
    """As layouts scale: products by devices, a floor a layout, memory for speed.

    Up to 32 a role and count, seconds whole in binary; with `any_n` also layouts that do not
    divide the devices.
    """

    def options(role: str, device: Any, n: int) -> Sequence[Option]:
        found = []
        for t in (1, 2, 4, 8):
            for p in (1, 2, 4, 8):
                if t * p > n or (n % (t * p) and not any_n):
                    continue
                for lean in (0, 1):
                    slow = 1 + 0.04 * (t - 1) + 0.05 * (p - 1) + 0.2 * lean
                    seconds = {}
                    for call in problem.of(role):
                        work, floor = {
                            GENERATE: (600, 4 * (1 + 8 / (t * p))),
                            INFER: (300, 0.3 * t),
                            TRAIN: (900, 1.0 + p + 0.2 * n / (t * p)),
                        }[call.kind]
                        took = sizes[role] * (work / n * slow + floor)
                        seconds[call.number] = round(took * 1024) / 1024
                    trained = any(call.kind is TRAIN for call in problem.of(role))
                    held = sizes[role] * (120 if trained else 14) / (n if lean else t * p) * GB
                    found.append(
                        Option(
                            train=MeshShape(data=max(1, n // (t * p)), pipe=p, tensor=t),
                            seconds=seconds,
                            resident_bytes=held,
                            working_bytes=sizes[role] * 20 * GB / t,
                        )
                    )
        return found

    return options
