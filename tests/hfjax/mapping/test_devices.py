# SPDX-License-Identifier: Apache-2.0
"""Accelerators and profiles: what is read, what is refused, what a mixed pool is."""

import itertools
from dataclasses import fields

import pytest

from hfjax.mapping.devices import (
    Device,
    load_devices,
    load_profile,
    on_curve,
    parse_devices,
    slowest,
)

RATES = ("flops", "memory_bytes", "memory_bytes_s", "link_bytes_s", "network_bytes_s")


def test_the_known_devices_are_read_and_a_likeness_takes_over_the_rest() -> None:
    known = load_devices()
    assert {"a100-80g", "a100-40g", "a800-80g", "h100", "h200"} <= set(known)
    assert known["a800-80g"].flops == known["a100-80g"].flops == 312e12
    assert known["a800-80g"].link_bytes_s == 200e9
    assert known["h200"].flops == known["h100"].flops


def test_a_cluster_is_read_and_equal_machines_are_counted_together() -> None:
    cluster = parse_devices("8xa100-80g+8xh100+8xa100-80g")
    assert [(device.name, count) for device, count in cluster] == [("a100-80g", 16), ("h100", 8)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a100-80g", "COUNTxDEVICE"),
        ("0xa100-80g", "COUNTxDEVICE"),
        ("-8xa100-80g", "COUNTxDEVICE"),
        ("8xa100-80", "did you mean 'a100-80g'"),
        ("8xtpu-v5", "use a100-80g"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused_with_what_could(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_devices(text)


def test_a_device_without_memory_is_refused(tmp_path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[device.mine]\nlike = "a100-80g"\nmemory_bytes = 0\n')
    with pytest.raises(ValueError, match="mine: memory_bytes = 0: must be above 0"):
        load_devices(file)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[device.mine]\nlike = "b100"\n', "is no other device; use a100-80g"),
        ('[device.mine]\nlike = "h100"\nflop = 1e12\n', "did you mean 'flops'"),
        ("[device.mine]\nflops = 1e12\n", "lacks the key 'memory_bytes'"),
        ('[device.mine]\nlike = "mine"\n', "is no other device"),
        ('[device.a]\nlike = "b"\n[device.b]\nlike = "a"\n', "is no other device"),
        ('[device.mine]\nlike = "h100"\nnode = 2.5\n', "node = 2.5: must be a whole number"),
        ('[device.mine]\nlike = "h100"\nflops = "fast"\n', "flops = .*: must be a number"),
        ('[device.mine]\nlike = "h100"\nmatmul = [1, 2]\n', "must be 2 numbers in a list"),
        ('[device.mine]\nlike = "h100"\nprofile = { step = 1 }\n', "did you mean 'step_s'"),
        ("device = 3\n", "must be a table"),
        ("[device", "mine.toml"),
    ],
)
def test_a_devices_file_that_is_wrong_is_refused(tmp_path, text: str, said: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=said):
        load_devices(file)


def test_an_unknown_profile_is_refused_with_the_near_one() -> None:
    with pytest.raises(ValueError, match="did you mean 'eager-2024'"):
        load_profile("eager-2023")


def test_a_mixed_pool_is_as_slow_and_small_as_the_worst_of_it() -> None:
    known = load_devices()
    a, h = known["a100-80g"], known["h100"]
    pool = slowest([h, a, h])
    assert pool.name == "a100-80g+h100"
    assert all(getattr(pool, name) == min(getattr(a, name), getattr(h, name)) for name in RATES)
    assert slowest([a, a]) == a


def test_a_curve_goes_through_its_points_and_time_never_falls_with_size() -> None:
    for device in load_devices().values():
        assert all(on_curve(device.matmul, x) == pytest.approx(y) for x, y in device.matmul)
        sizes = [10 ** (k / 8) for k in range(32, 130)]
        for seconds in (device.product_s, device.copy_s):
            took = [seconds(size) for size in sizes]
            assert all(a <= b for a, b in itertools.pairwise(took))


def test_every_field_of_a_device_can_be_written_in_a_file(tmp_path) -> None:
    names = {field.name for field in fields(Device)} - {"name", "profile", "collective"}
    file = tmp_path / "mine.toml"
    lines = ["[device.mine]", 'like = "a100-80g"', "fresh_bytes_s = 2e8"]
    lines += ["profile = { step_s = 1e-3, layer_s = 1e-4, collective_s = 1e-5 }"]
    lines += ["collective = { 2 = [1e-5, 1e9], 8 = [2e-5, 2e9] }"]
    file.write_text("\n".join(lines))
    mine = load_devices(file)["mine"]
    assert mine.collective == {2: (1e-5, 1e9), 8: (2e-5, 2e9)}
    assert mine.profile is not None
    assert mine.profile.layer_s == 1e-4
    assert mine.fresh_s(4e8) == 2
    assert "fresh_bytes_s" in names
