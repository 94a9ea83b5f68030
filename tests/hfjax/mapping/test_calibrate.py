# SPDX-License-Identifier: Apache-2.0
"""Calibration finds the costs that seconds were made from, and writes what can be read back."""

import math
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hfjax import cli
from hfjax.mapping import calibrate


def test_latency_and_bandwidth_come_back_from_their_own_seconds() -> None:
    rows = [{"bytes": b, "seconds": 3e-5 + b / 2e9} for b in (1e3, 3e4, 1e6, 4e6)]
    assert calibrate.line(rows) == pytest.approx((3e-5, 2e9), rel=1e-6)


def test_a_latency_is_never_below_zero() -> None:
    """Larger messages that are relatively slower would ask for one."""
    rows = [{"bytes": b, "seconds": b / 2e9 * (1 + b / 1e6)} for b in (1e5, 1e6, 2e6)]
    latency_s, bytes_s = calibrate.line(rows)
    assert (latency_s, 0 < bytes_s < 2e9) == (calibrate.LEAST_S, True)


def test_a_bandwidth_is_finite_where_size_made_no_difference() -> None:
    rows = [{"bytes": b, "seconds": s} for b, s in ((1e3, 2e-4), (1e6, 1e-4))]
    latency_s, bytes_s = calibrate.line(rows)
    assert latency_s > 0
    assert bytes_s == pytest.approx(1e10)


def test_fixed_costs_come_back_from_their_own_seconds() -> None:
    decode = [
        {"layers": n, "hops": hops, "seconds": 2e-4 + n * 3e-5 + hops * 4e-5}
        for n, hops in ((2, 0), (10, 0), (2, 16), (10, 48))
    ]
    assert calibrate.decode_cost(decode) == pytest.approx((2e-4, 3e-5, 4e-5))
    train = [
        {"layers": n, "micros": m, "seconds": 5e-3 + m * 4e-4 + m * n * 1e-4}
        for n, m in ((2, 1), (10, 1), (10, 4))
    ]
    assert calibrate.train_cost(train) == pytest.approx((5e-3, 4e-4, 1e-4))
    infer = [{"layers": n, "seconds": 1e-3 + n * 8e-5} for n in (2, 10)]
    assert calibrate.infer_cost(infer) == pytest.approx((1e-3, 8e-5))


def test_costs_stay_positive_when_the_seconds_are_noise() -> None:
    rows = [{"layers": n, "hops": 0, "seconds": s} for n, s in ((2, 3e-4), (10, 1e-4), (2, -1e-5))]
    assert all(0 < cost < 1 for cost in calibrate.decode_cost(rows))
    assert all(0 < cost < 1 for cost in calibrate.decode_cost(rows[-1:]))


def test_a_larger_product_takes_no_less_time() -> None:
    rows = [{"operations": n, "seconds": s} for n, s in ((10, 2.0), (30, 1.0), (90, 3.0))]
    assert calibrate.rates(rows, "operations") == [(10, 5.0), (30, 15.0), (90, 30.0)]


def numbers(tree: Any) -> Iterator[float]:
    if isinstance(tree, dict | list):
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from numbers(each)
    elif not isinstance(tree, str | bool):
        yield tree


@pytest.fixture(scope="module")
def found() -> calibrate.Found:
    """Of two simulated devices, at sizes too small to mean anything."""
    return calibrate.measure(2, "tiny", print)


@pytest.mark.slow
def test_a_child_measures_its_devices_together(found: calibrate.Found, tmp_path: Path) -> None:
    document = tomllib.loads(calibrate.table("mine", found))
    device = document["device"]["mine"]
    assert (device["node"], device["shares"], list(device["collective"])) == (2, 2, ["2"])
    assert document["measured"]["mine"]["dtype"] == "float32"
    assert all(0 < number < math.inf for number in numbers(document))
    assert max(share for _, share in device["matmul"]) == 1


@pytest.mark.slow
def test_one_device_has_no_collectives(found: calibrate.Found) -> None:
    alone = [row for row in found["decode"] if not row["hops"]]
    one = {**found, "host": {**found["host"], "devices": 1}, "collectives": [], "decode": alone}
    document = tomllib.loads(calibrate.table("one", one))
    assert "collective" not in document["device"]["one"]
    assert "all-gather" not in document["measured"]["one"]
    assert all(0 < number < math.inf for number in numbers(document))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--devices 0", "--devices 0: simulate at least 1"),
        ("--devices two", "invalid int value: 'two'"),
        ("--name a+b", "use letters, digits"),
        ("--out host.json", "ends in .toml"),
        ("--out nowhere/host.toml", "is no directory"),
        ("--out {here}/old.toml", "exists: remove it"),
        ("--repeat 3", "unrecognized arguments"),
    ],
)
def test_options_that_cannot_work_are_refused_before_measuring(
    options: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old.toml").write_text("")
    status = cli.main(["calibrate", *options.format(here=tmp_path).split()])
    assert (status, said in capsys.readouterr().err) == (2, True)


@pytest.mark.slow
def test_the_command_writes_the_file(
    found: calibrate.Found, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "measure", lambda devices, *_: {**found, "asked": devices})
    assert cli.main(["calibrate", "--devices", "2", "--out", str(tmp_path / "host.toml")]) == 0
    assert list(tomllib.loads((tmp_path / "host.toml").read_text())["device"]) == ["cpu2"]
