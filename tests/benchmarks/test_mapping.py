# SPDX-License-Identifier: Apache-2.0
"""Predictions beside measurements: rank correlation, rows and placements priced, the verdict."""

from dataclasses import asdict, replace
from typing import Any

import pytest

from algorithms import ppo
from benchmarks.measured import Load
from benchmarks.predicted import Pair, order, pairs_of, pairs_text, spearman
from benchmarks.rivals import DEVICES, PLANNED, RIVALS, near, option_of, plan, predicted_s
from hfjax.mapping.devices import Device, load_profile
from hfjax.mapping.plan import plan_class, planned
from hfjax.mapping.pricing import engine_of
from meshes.mesh import MeshShape
from meshes.placement import RolePlacement
from tests.fixtures import tiny_config

DEVICE = Device(
    name="cpu8",
    flops=2e10,
    memory_bytes=3e9,
    memory_bytes_s=2e9,
    node=8,
    link_bytes_s=2e9,
    link_latency_s=1e-4,
    network_bytes_s=2e10,
    network_latency_s=1e-4,
    host_bytes_s=1e8,
    fresh_bytes_s=2e8,
    shares=8,
)
ENGINE = engine_of(DEVICE, load_profile("hfjax"), 4)


@pytest.mark.parametrize(
    ("a", "b", "value"),
    [
        ([1, 2, 3], [10, 20, 21], 1.0),
        ([1, 2, 3], [3, 2, 1], -1.0),
        ([1, 2, 3, 4], [2, 1, 4, 3], 0.6),  # 1 - 6 * 4 / (4 * 15)
        ([1, 1, 2], [1, 2, 3], 3**0.5 / 2),  # ties share rank 0.5
        ([1, 1, 1], [1, 2, 3], 0.0),
    ],
)
def test_rank_correlation_shares_the_ranks_of_ties(
    a: list[float], b: list[float], value: float
) -> None:
    assert spearman(a, b) == pytest.approx(value)


def row(layout: str, *, trains: bool = True, **mesh: int) -> dict[str, Any]:
    found: dict[str, Any] = {"layout": layout, "zero": 3, "p_g": 1, "t_g": 1, "rounds": 3}
    found |= {"mesh": asdict(MeshShape(**mesh)), "load": asdict(Load(rows=16))}
    for call in ("update", "score") if trains else ():
        found[call] = [0.1, 0.2, 0.3]
    return found | {"relay": [0.01, 0.02, 0.03], "generate": [1.0, 2.0, 3.0]}


def test_every_call_of_a_row_is_priced_and_a_layout_that_only_generates_has_two() -> None:
    rows = [
        row("tensor8", tensor_micro=8),
        row("tensor8", trains=False, tensor=2, tensor_micro=4),
        row("pipe2-data4", pipe_micro=2, data=4),
    ]
    found = pairs_of(rows, ENGINE, tiny_config())
    assert {call: len(pairs) for call, pairs in found.items()} == {
        **{"update": 2, "score": 2, "generate": 3, "relay": 3, "all": 2}
    }
    assert all(pair.predicted_s > 0 for pairs in found.values() for pair in pairs)
    assert found["all"][0].measured_s == pytest.approx((1.21, 2.42, 3.63))
    parts = [found[call][0].predicted_s for call in ("update", "score", "generate", "relay")]
    assert found["all"][0].predicted_s == pytest.approx(sum(parts))


def test_a_table_has_a_line_a_pair_and_the_order_of_the_medians() -> None:
    pairs = [Pair(n, s, (s, 2 * s, 3 * s)) for n, s in (("one", 0.001), ("two", 0.003))]
    lines = pairs_text("call", pairs).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["one", "1.0", "2.0", "(1.0-3.0)", "0.50"],
        ["two", "3.0", "6.0", "(3.0-9.0)", "0.50"],
    ]
    assert order(pairs) == pytest.approx(1)


@pytest.mark.parametrize(
    ("ours", "best", "fine"),
    [
        (1.09, (0.9, 1.0, 1.02), True),  # within a tenth of the best
        (1.2, (0.9, 1.0, 1.02), False),
        (1.2, (0.9, 1.0, 1.3), True),  # within its repeats
    ],
)
def test_the_planned_one_is_near_the_best_or_within_its_repeats(
    ours: float, best: tuple[float, float, float], fine: bool
) -> None:
    pairs = [Pair("best", 1.0, best), Pair(PLANNED, 1.0, (ours, ours, ours))]
    found, text = near(pairs)
    assert found is fine
    assert "best measured: best, 1.000 s" in text


def test_placements_take_all_devices_and_are_priced() -> None:
    assert {placement.devices for placement in RIVALS.values()} == {DEVICES}
    config = plan_class(ppo)(dtype="float32", prompts=16, prompt_tokens=8, response_tokens=8)
    problem = planned(ppo, replace(config, updates=1))
    small = {role: replace(m, config=tiny_config()) for role, m in problem.models.items()}
    problem = replace(problem, models=small)
    ours = plan(problem, DEVICE)
    seconds = {n: predicted_s(problem, DEVICE, p) for n, p in (RIVALS | {PLANNED: ours}).items()}
    assert len(seconds) == 9
    assert min(seconds, key=lambda name: seconds[name]) == PLANNED


def test_a_section_of_a_placement_is_priced_as_it_says() -> None:
    config = plan_class(ppo)(prompts=16, n=2)
    place = RolePlacement(
        "actor",
        "all",
        train=MeshShape(data=2, pipe=4),
        generate=MeshShape(pipe=2),
        remat="layer",
        micro_sequences=8,
        generate_sequences=12,
    )
    option = option_of(place, config.work)
    assert (option.micro_sequences, option.remat, option.waves) == (8, "layer", 3)
    assert (option.train, option.generate) == (place.train, place.generate)
