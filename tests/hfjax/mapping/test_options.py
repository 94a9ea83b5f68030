# SPDX-License-Identifier: Apache-2.0
"""The ways a role may run: all legal, all fit, and nothing better was left out."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hfjax.mapping.devices import load_devices, load_profile
from hfjax.mapping.options import ALIKE, Pricer, pareto
from hfjax.mapping.work import USABLE, Call, Kind, Model, Option, Problem, Workload
from hfjax.models.llama import ModelConfig, abstract_params
from meshes.layouts import check, generate_layout, state_layout, train_layout
from meshes.mesh import MeshShape
from meshes.placement import RolePlacement

A100 = load_devices()["a100-80g"]
CALLS = (
    Call(0, "actor", "generate_sequences", Kind.GENERATE, frozenset(), 64),
    Call(1, "actor", "compute_log_prob", Kind.INFER, frozenset({0}), 64),
    Call(2, "critic", "compute_values", Kind.INFER, frozenset({0}), 64),
    Call(3, "critic", "update_critic", Kind.TRAIN, frozenset({2}), 64),
    Call(4, "actor", "update_actor", Kind.TRAIN, frozenset({1}), 64),
)
WORK = Workload(prompts=64, prompt_tokens=128, response_tokens=128, updates=4)


def pricer(config: ModelConfig, profile: str = "hfjax", **model: int) -> Pricer:
    models = {
        "actor": Model(config=config, head="lm", trained=True, generates=True),
        "critic": Model(config=config, head="value", trained=True, **model),
    }
    return Pricer(problem=Problem(CALLS, models, WORK), profile=load_profile(profile))


def a_model(**sizes: int) -> ModelConfig:
    base = {"layers": 8, "embed": 512, "heads": 8, "kv_heads": 4, "head_dim": 64, "mlp": 1024}
    return ModelConfig(**(base | sizes), vocab=1000, rope_theta=1e4)


def placed(option: Option) -> RolePlacement:
    return RolePlacement(
        "actor",
        "all",
        train=option.train,
        infer=option.infer,
        generate=option.generate,
        zero=option.zero,
        sequence_parallel=option.sequence_parallel,
        relay=option.relay,
    )


@pytest.mark.parametrize(
    "sizes",
    [
        {"heads": 8, "kv_heads": 2},
        {"heads": 6, "kv_heads": 2, "layers": 7},
        {"heads": 12, "kv_heads": 4, "mlp": 1028, "embed": 384},
        {"heads": 9, "kv_heads": 3, "layers": 30, "embed": 576, "mlp": 1536},
    ],
)
@pytest.mark.parametrize("devices", [1, 6, 8, 12])
def test_no_way_is_illegal_for_the_model(sizes: dict[str, int], devices: int) -> None:
    config, costs = a_model(**sizes), pricer(a_model(**sizes))
    for role in ("actor", "critic"):
        found = costs.options(role, A100, devices)
        assert found
        for option in found:
            place = placed(option)
            for each in {place, place.scoring}:
                shape = each.mesh_shape
                padded = replace(config, vocab_multiple=shape.tensor * shape.tensor_micro)
                shapes, axes = abstract_params(padded, "lm")
                layout = train_layout(shape, kv_heads=config.kv_heads, zero=each.zero)
                generate = generate_layout(shape, kv_heads=config.kv_heads)
                for one in (layout, state_layout(layout), generate):
                    check(shape, one, shapes, axes)
                assert shape.devices == devices


def test_micro_batches_divide_the_mini_batch_and_keep_pairs_together() -> None:
    costs = pricer(a_model(), rows_together=2)
    rows = WORK.rows // WORK.updates
    for devices in (1, 2, 8):
        for option in costs.options("critic", A100, devices):
            assert option.train is not None
            unit = option.train.data * option.train.fsdp * 2
            size = option.micro_sequences or math.ceil(rows / unit) * unit
            assert size % unit == 0
            assert not option.micro_sequences or rows % size == 0


def test_every_way_fits_the_device_by_itself() -> None:
    small = replace(A100, name="small", memory_bytes=1.5e9)
    costs = pricer(a_model())
    for role in ("actor", "critic"):
        for option in costs.options(role, small, 4):
            assert option.resident_bytes + option.working_bytes <= USABLE * 1.5e9
    assert not costs.options("actor", replace(A100, name="tiny", memory_bytes=1e6), 4)


def test_one_layout_a_model_scores_as_it_trains() -> None:
    several = pricer(a_model(layers=6), "eager-2024")
    one = replace(several, one_layout=True)
    assert all(option.infer is None for option in one.options("actor", A100, 4))


def test_an_engine_without_waves_holds_every_row_at_once() -> None:
    costs = pricer(a_model())
    whole = replace(costs, profile=replace(costs.profile, waves=False))
    assert {option.waves for option in whole.options("actor", A100, 4)} == {1}


def test_columns_take_the_network_of_the_fewer_machines() -> None:
    h100, call = load_devices()["h100"], replace(CALLS[0], bytes_out=25e9)
    moved = pricer(a_model()).columns_s
    cluster = ((A100, 16), (h100, 16))
    assert moved(cluster, call, (8, 0), (16, 0)) == pytest.approx(1 / 0.9, rel=1e-3)
    assert moved(cluster, call, (0, 16), (0, 16)) == pytest.approx(25 / 800 / 0.9, rel=1e-3)
    assert moved(cluster, call, (8, 0), (0, 8)) == pytest.approx(1 / 0.9, rel=1e-3)  # the slower's


ways = st.builds(
    Option,
    train=st.just(MeshShape()),
    seconds=st.fixed_dictionaries({0: st.floats(0.1, 9), 1: st.floats(0.1, 9)}),
    resident_bytes=st.floats(1e9, 9e9),
    working_bytes=st.floats(1e9, 9e9),
)


@settings(deadline=None, max_examples=25)
@given(st.lists(ways, min_size=1, max_size=12))
def test_what_is_dropped_is_beaten_to_within_what_counts_as_alike(options: list[Option]) -> None:
    kept = pareto(options)

    def numbers(o: Option) -> tuple[float, ...]:
        return (o.seconds[0], o.seconds[1], o.resident_bytes, o.working_bytes)

    for option in options:
        assert any(
            all(
                a <= b * (1 + ALIKE) * (1 + 1e-9)
                for a, b in zip(numbers(k), numbers(option), strict=True)
            )
            for k in kept
        )
    assert pareto(kept) == kept
