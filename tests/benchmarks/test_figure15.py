# SPDX-License-Identifier: Apache-2.0
"""Figure 15's benchmark at tiny size, on the eight devices of this process."""

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import figure14, generation, holding
from benchmarks.figure14 import HALF, Rig, Setup
from benchmarks.generation import Load, Row
from hfjax.engine.meter import memory
from meshes.layouts import HYBRID
from meshes.mesh import TENSOR
from tests.hfjax.engine.cases import CFG

TINY = Setup(cfg=CFG, p=1, t=4, p_g=1, t_g=4, devices=(8,))
LOAD = Load(prompts=32, tokens=16)
NORMS, TABLE = 2 * 2 * 40 + 40, 96 * 40  # elements
MATRICES = 2 * (2 * 8 * 6 * 40 + 2 * 4 * 6 * 40 + 3 * 40 * 56) + 2 * TABLE
SLOT = 2 * 2 * 4 * 6  # elements: keys and values of two layers' four heads of width six


def rig_of(t_g: int) -> Rig:
    return Rig(replace(TINY, t_g=t_g), 8, HYBRID, HALF)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return list(generation.seconds(TINY, 8, LOAD, rounds=2))


@pytest.mark.slow
def test_every_t_g_generates_the_same_tokens(rows: list[Row]) -> None:
    assert [(row["t_g"], row["d_g"], row["differ"]) for row in rows] == [
        (1, 4, 0),
        (2, 2, 0),
        (4, 1, 0),
    ]
    assert rows[-1]["ratio"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", generation.FAILS])
def test_status_says_whether_tokens_agree(
    text: str, rows: list[Row], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = "\n".join(json.dumps(row | {"model": "tiny", "text": text}) for row in rows)
    monkeypatch.setattr(figure14, "children", lambda *_: printed)
    assert generation.main(["seconds"]) == bool(text)
    assert [line.endswith(text) for line in capsys.readouterr().out.splitlines()[-3:]] == [True] * 3


def test_another_token_is_no_tie() -> None:
    """Its log-prob is that of the token it replaces, its noise is not."""
    turn = generation.Turn(replace(TINY, t_g=2), 8, LOAD)
    *_, sampled = turn.round()
    assert len(np.unique(sampled["input_ids"][:, LOAD.tokens :])) > CFG.vocab / 2
    ids = sampled["input_ids"].copy()
    ids[3, LOAD.tokens] = (ids[3, LOAD.tokens] + 1) % CFG.vocab
    assert generation.differences(sampled, sampled) == (0, 0)
    assert generation.differences({**sampled, "input_ids": ids}, sampled) == (1, 0)


@pytest.mark.parametrize("t_g", [1, 2, 4])
def test_a_device_holds_its_part(t_g: int) -> None:
    """Two bytes an element; what the compiled program is given beside it is columns of tokens."""
    rig = rig_of(t_g)
    row = generation.held(rig, LOAD)
    assert row["weights"] == 2 * (MATRICES // t_g + NORMS)
    assert row["cache"] == 2 * SLOT * 32 // t_g
    assert (row["replicas"], row["share"]) == (8 // t_g, 4 * t_g)
    segment = dict(holding.generation(rig, LOAD.prompts, LOAD.tokens))["segment"].compile()
    rest = memory(segment).argument_bytes - row["weights"] - row["share"] * row["cache"]
    assert 0 < rest < row["share"] * 200


@pytest.mark.parametrize("t_g", [1, 2, 4])
def test_a_step_adds_up_two_products_a_layer_and_the_embedding(t_g: int) -> None:
    rig = rig_of(t_g)
    segment = dict(holding.generation(rig, LOAD.prompts, LOAD.tokens))["segment"].compile()
    traffic = generation.a_step(segment, rig)
    tensor = [one for one in traffic.collectives if TENSOR in one.axes]
    halves = [one for one in tensor if one.element_types == ("f16",)]
    assert bool(tensor) == (t_g > 1)
    assert sum(one.trips for one in halves) == (5 if t_g > 1 else 0)
    received = sum(one.trips * one.bytes_received for one in halves)
    assert received == 5 * 2 * (t_g - 1) / t_g * (4 * t_g * 40 * 2)


def test_waves_are_equal_and_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for 3.5 of the 8 sequences that each of four replicas is given: 3, 3 and 2."""
    rig, load = rig_of(2), Load(prompts=32, tokens=2)
    weights, cache = 2 * (MATRICES // 2 + NORMS), 2 * SLOT * 4 // 2
    states = 38 * (MATRICES + NORMS) / 8
    monkeypatch.setattr(generation, "DEVICE_BYTES", weights + states + 3.5 * cache)
    row = generation.waves(rig, 8, load)
    assert [row[key] for key in ("fit", "share", "waves", "rows")] == [3, 8, 3, 3]
    # one step a wave reads all weights but the table, and of each sequence three slots of four
    read = 3 * (weights - TABLE) + 8 * cache * 3 / 4
    assert generation.read_bytes(rig, row, load) == read
    monkeypatch.setattr(generation, "DEVICE_BYTES", weights + states)
    with pytest.raises(ValueError, match=f"t_g=2 leaves 0 bytes, a sequence takes {cache}"):
        generation.waves(rig, 8, load)


@pytest.mark.slow
def test_rows_of_both_parts_have_a_cell_a_column(rows: list[Row]) -> None:
    compiled = next(iter(generation.compiled(TINY, 8, LOAD)))
    for part, row in (("seconds", rows[0]), ("compiled", compiled)):
        assert {key for _, key, _, _ in generation.COLUMNS[part]} <= row.keys()
    assert compiled["text"] == "1 all-reduce data*tensor_micro=8"
