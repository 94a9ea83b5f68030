# SPDX-License-Identifier: Apache-2.0
"""Generation in waves: the tokens of one wave, whatever the layout, rows, widths and processes."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from algorithms import ppo
from hfjax.batch import Batch
from hfjax.config import KLConfig, RolloutConfig, TrainingConfig
from hfjax.controller.handle import Models, start
from hfjax.controller.protocol import Shard
from hfjax.engine.passes import Passes
from hfjax.items import Prompt, prompt_columns
from meshes.layouts import train_layout
from meshes.mesh import MeshShape, make_mesh
from meshes.placement import Placement, Pool, RolePlacement
from tests.fixtures import write_tiny_hf

SETTINGS = ppo.Settings(kl=KLConfig(where="none"))
PROMPTS = [[5, 9, 2], [7], [11, 3, 8, 90, 41], [1, 2, 3, 4], [60, 61], [33], [9, 9]]
NEW = 40  # a second response bucket, after one of 32
N = 2
Columns = Mapping[str, Any]
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {  # the actor's, rows of a wave
    "four replicas, two waves": (
        {"train": MeshShape(data=2, tensor=2), "generate": MeshShape(tensor=1)},
        8,
    ),
    "pipelined, two waves and a filler": (
        {"train": MeshShape(data=1, pipe=2, tensor=2), "generate": MeshShape(pipe=2)},
        8,
    ),
    "two copies, four waves": (
        {
            "train": MeshShape(data=2),
            "generate": MeshShape(tensor=2),
            "generate_pool": "other",
            "relay": "two-copies",
        },
        4,
    ),
}


def started(model: Path, sequences: int, *, processes: int = 1, **where: Any) -> Models:
    """An actor that generates so many rows at a time."""
    actor = RolePlacement("actor", "all", generate_sequences=sequences, **where)
    pools = {"all": Pool("all", actor.base.devices, processes)}
    pools |= {name: Pool(name, 4) for name in [actor.generate_pool] if name}
    settings = {"training": TrainingConfig(), "rollout": RolloutConfig(n=N, max_new_tokens=NEW)}
    builder = partial(ppo.roles(SETTINGS)["actor"], model=str(model), **settings)
    runtime: Any = "ray" if processes > 1 else "local"
    placement = Placement(pools, {"actor": actor})
    return start(placement, {"actor": builder}, runtime=runtime, group=N, log_to_driver=False)


def rows(n: int) -> Batch:
    """The prompts; the first one's responses are long, the others end within the first bucket."""
    batch = Batch(prompt_columns([Prompt(ids, "", "", "") for ids in PROMPTS], n))
    limits = np.full(len(batch), 20, np.int32)
    limits[:n] = NEW
    return batch | {"max_new_tokens": limits}


def generated(m: Models) -> tuple[Columns, Columns, list[int]]:
    """Sampled twice and, a row a prompt, greedily; programs compiled in each of the calls."""
    sampled, greedy = rows(N), rows(1)
    found = sampled | m.actor.generate_sequences(sampled)
    again = m.actor.generate_sequences(sampled)
    np.testing.assert_array_equal(again["input_ids"], found["input_ids"])
    likeliest = greedy | m.actor.generate_sequences(greedy, greedy=True, group=1)
    assert likeliest["input_ids"].any()
    calls = [call for call in m.drain() if call.method == "generate_sequences"]
    return found.resolved(), likeliest.resolved(), [call.compiles for call in calls]


def assert_same(found: Columns, wanted: Columns) -> None:
    """Tokens and lengths bit for bit, log-probs to float32's rounding."""
    assert found["input_ids"].shape[1] == wanted["input_ids"].shape[1]
    for name in ("input_ids", "length", "response_mask", "truncated"):
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)
    for name in ("rollout_log_probs", "rollout_truncated_log_probs"):
        np.testing.assert_allclose(found[name], wanted[name], rtol=0, atol=1e-4, err_msg=name)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights and no stop token: limits alone end a response."""
    return write_tiny_hf(tmp_path_factory.mktemp("model"), eos=None)


@pytest.fixture(scope="module")
def whole(model: Path) -> tuple[Columns, Columns]:
    """What one device generates all at once."""
    with started(model, 0, train=MeshShape()) as m:
        return generated(m)[:2]


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in list(LAYOUTS)[1:]]


@pytest.mark.parametrize("name", [next(iter(LAYOUTS)), *SLOW])
def test_waves_give_the_tokens_of_all_rows_at_once(
    name: str, model: Path, whole: tuple[Columns, Columns]
) -> None:
    """Widths differ: the first prompt's wave has two buckets, others have one."""
    where, sequences = LAYOUTS[name]
    with started(model, sequences, **where) as m:
        *found, compiles = generated(m)
    for ours, wanted in zip(found, whole, strict=True):
        assert_same(ours, wanted)
    assert compiles[1] == 0


def test_a_second_wave_compiles_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    seen = jax.monitoring.register_event_duration_secs_listener
    seen(lambda event, *_, **__: counts.append(1) if "backend_compile" in event else None)
    found: list[int] = []
    waves = Passes.waves

    def watched(self: Passes, shard: Shard, sequences: int = 0) -> Any:
        for wave in waves(self, shard, sequences):
            found.append(len(counts))
            yield wave
        found.append(len(counts))

    monkeypatch.setattr(Passes, "waves", watched)
    batch = Batch(prompt_columns([Prompt(ids, "", "", "") for ids in PROMPTS], N))
    with started(model, 4, train=MeshShape(data=2)) as m:
        assert m.actor.generate_sequences(batch)["length"].all()
    assert len(found) == 1 + 4  # four prompts a replica, one at a time
    first, *later = np.diff(found)
    assert first > 0
    assert later == [0, 0, 0]


@pytest.mark.parametrize(
    ("replicas", "prompts", "sequences", "widths"),
    [
        (2, 10, 0, [5]),
        (2, 10, 12, [3, 3]),  # two parts of five: one filler
        (2, 10, 8, [2, 2, 2]),
        (2, 9, 400, [5]),  # the last replica has four
        (3, 10, 6, [1, 1, 1, 1]),  # four a replica, the last has two
    ],
)
def test_the_prompts_of_each_replica_are_cut_in_equal_parts(
    replicas: int, prompts: int, sequences: int, widths: list[int]
) -> None:
    shape = MeshShape(data=replicas)
    mesh = make_mesh(jax.devices()[:replicas], shape)
    shard = Shard({}, np.arange(prompts * N), prompts * N, N, 0)
    waves = Passes(mesh, train_layout(shape, kv_heads=1)).waves(shard, sequences)
    assert [len(wave) // replicas for wave in waves] == widths
    own = np.concatenate([wave.reshape(replicas, -1) for wave in waves], axis=1)
    for replica, row in enumerate(own):
        per = -(-prompts // replicas)
        real = row[(row >= 0) & (row < prompts)]
        np.testing.assert_array_equal(real, np.arange(prompts)[replica * per :][:per])
    with pytest.raises(ValueError, match=r"generate_sequences = 1 holds no prompt of 2 rows"):
        Passes(mesh, train_layout(shape, kv_heads=1)).waves(shard, 1)


@pytest.mark.ray
@pytest.mark.parametrize("train", [MeshShape(data=4), MeshShape(pipe=2, tensor=2)], ids=str)
def test_processes_agree_on_their_waves(
    train: MeshShape, model: Path, whole: tuple[Columns, Columns]
) -> None:
    """Two processes of two devices: one, or two, have the rows of each replica."""
    with started(model, 8, processes=2, train=train) as m:
        *found, compiles = generated(m)
    for ours, wanted in zip(found, whole, strict=True):
        assert_same(ours, wanted)
    assert compiles[1] == 0
