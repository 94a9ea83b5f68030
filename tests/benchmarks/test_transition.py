# SPDX-License-Identifier: Apache-2.0
"""The transition's benchmark at tiny size, on the eight devices of this process."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import holding, transition
from benchmarks.figure14 import SETUPS, Setup
from hfjax.engine.meter import Memory
from meshes.layouts import RELAYS
from tests.hfjax.engine.cases import CFG

GROUPS = {  # p, t, p_g, t_g on eight devices
    "tensor 4 to 2": (1, 4, 1, 2),
    "pipe 2 to 1, tensor 4 to 2": (2, 4, 1, 2),
    "pipe 2 to 1, all of tensor": (2, 4, 1, 4),
}
TINY = {
    name: Setup(cfg=CFG, p=p, t=t, p_g=p_g, t_g=t_g, devices=(8,))
    for name, (p, t, p_g, t_g) in GROUPS.items()
}
MATRICES = 2 * CFG.layers * (2 * 8 * 6 * 40 + 2 * 4 * 6 * 40 + 3 * 40 * 56)  # bytes, 2 an element


@pytest.mark.parametrize("name", list(GROUPS))
def test_bytes_are_those_of_table_2(name: str) -> None:
    """(received, redundant) of M bytes of layer matrices, by hand."""
    p, t, p_g, t_g = GROUPS[name]
    hybrid = MATRICES / (p_g * t_g) - MATRICES / (p * t)
    expected = {
        "hybrid": (hybrid, 0),
        "hybrid-v": (MATRICES * (p * t - 1) / (p * t), MATRICES / (p * t)),
        "ds-chat": (MATRICES * 7 / 8, MATRICES / 8),
        "shared": (0, 0),
    }
    for mode, (received, redundant) in expected.items():
        row = transition.measure(TINY[name], 8, mode)
        assert row["holds"]
        assert (row["received"], row["formula"]) == (received, received)
        assert row["redundant_formula"] == redundant
        inside = mode == "hybrid-v" and t == t_g  # consecutive groups are the hybrid's then
        assert row["redundant"] == (0 if inside else redundant)


def test_peak_is_that_of_the_worst_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training holds 10. Released: 10 + 8, then 14 + 6, temporaries 5; kept: 18 + 6, with 5."""
    monkeypatch.setattr(transition, "memory", lambda planned: planned)
    buckets: Any = [
        Memory(argument_bytes=4, output_bytes=8, alias_bytes=0, temp_bytes=3),
        Memory(argument_bytes=6, output_bytes=6, alias_bytes=0, temp_bytes=5),
    ]
    assert transition.peak(buckets, 10, releases=True) == (20, 25)
    assert transition.peak(buckets, 10, releases=False) == (24, 29)


def test_a_mode_that_moves_other_bytes_fails() -> None:
    row = transition.measure(TINY["tensor 4 to 2"], 8, "hybrid")
    assert row["collectives"] == "7 all-gather tensor_micro=2"
    traffic = transition.Traffic(())
    assert not transition.holds("hybrid", traffic, row["formula"])
    assert transition.holds("shared", traffic, 0.0)


def test_lines_of_table2_have_a_cell_a_column() -> None:
    setup = TINY["pipe 2 to 1, tensor 4 to 2"]
    row = transition.measure(setup, 8, "hybrid-v-permute")
    line = transition.line("tiny", setup, 8, row)
    assert line.split()[:6] == ["tiny", "8", "2-4-1", ">", "1-2-4", "hybrid-v-permute"]
    assert len(transition.header().splitlines()) == 3


@pytest.mark.slow
def test_seconds_print_every_mode(tmp_path: Path) -> None:
    text = transition.seconds(TINY["pipe 2 to 1, tensor 4 to 2"], 8, 1, tmp_path, rounds=2)
    rows = [line.split() for line in text.splitlines()[3:]]
    assert [row[0] for row in rows] == list(RELAYS)
    assert [row[4] for row in rows if row[0] == "hybrid"] == ["1.00"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_zero_holds_what_its_paper_says(dtype: str) -> None:
    """Weights, gradients, optimizer in bytes a parameter; the master's own arrays count once."""
    half = dtype == "bfloat16"
    expected = [(2, 4, 12), (2, 4, 12 / 8), (2, 4 / 8, 12 / 8), (0, 4 / 8, 12 / 8)]
    if not half:
        expected = [(0, 4, 12), (4, 4, 12 / 8), (4, 4 / 8, 12 / 8), (0, 4 / 8, 12 / 8)]
    for stage, each in enumerate(expected):
        held, _, count = holding.zero_row(CFG, 8, dtype, stage)
        assert held == tuple(count * size for size in each)


def test_programs_of_an_actor_are_compiled_without_arrays() -> None:
    work = holding.Work(micros=2, rows=2, tokens=8, prompts=8)
    setup = Setup(cfg=CFG, p=2, t=2, p_g=1, t_g=2, devices=(8,))
    names = [line.split()[0] for line in holding.compiled(setup, 8, work).splitlines()[3:]]
    assert names == ["weights", "accumulate", "reduce", "apply", "relay", "prefill", "segment"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["table2", "--models", "9b"], "9b"),
        (["table2", "--models", "34b", "--devices", "24"], "--devices 24"),
        (["zero", "--devices", "8"], "not to zero"),
        (["table2", "--processes", "2"], "--processes 2"),
        (["seconds", "--processes", "3"], "--processes 3"),
        (["speed"], "speed"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        transition.main(arguments)
    assert refused.value.code == 2
    assert named in capsys.readouterr().err


def test_a_cluster_that_p_t_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"devices=24 is no multiple of p t = 4 \* 8"):
        SETUPS["34b"].placed(24, "hybrid")


@pytest.mark.slow
def test_the_command_prints_the_smallest_case(capsys: pytest.CaptureFixture[str]) -> None:
    """In a process of its own, which has the devices."""
    assert transition.main(["table2", "--models", "7b", "--devices", "8"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[3:]]
    assert [row[5] for row in rows if row[2] != "zero"] == [
        "hybrid",
        "hybrid-v",
        "hybrid-v-permute",
        "shared",
    ]
