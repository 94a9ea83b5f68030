# SPDX-License-Identifier: Apache-2.0
"""Metrics that do not depend on the cut, verl's names, and files where each step stands once."""

import io
import json
import math
import re
import resource
import struct
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import masked_crc32c

from hfjax import metrics
from hfjax.metrics import STEP, Max, Mean, MetricLog, Min, Total, cut_to_step


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def quiet_log(out, **options):
    return MetricLog(out, console=Console(file=io.StringIO()), tensorboard=False, **options)


# --- merging


def test_unequal_ranks_merge_into_the_whole_and_not_into_a_mean_of_means():
    """3 of 12 and 3 of 4 clipped: 6/16 = 0.375, a mean of means would say 0.5; maximum 9, not 5."""
    f = jnp.float32
    ranks = [
        {"clip": Mean(f(3), f(12)), "top": Max(f(1)), "low": Min(f(1)), "tokens": Total(f(12))},
        {"clip": Mean(f(3), f(4)), "top": Max(f(9)), "low": Min(f(9)), "tokens": Total(f(4))},
    ]
    whole = {"clip": 0.375, "top": 9.0, "low": 1.0, "tokens": 16.0}
    assert metrics.finalize(metrics.merge(*ranks)) == whole
    assert metrics.finalize(jax.jit(metrics.merge)(*ranks)) == whole
    assert metrics.merge({}, ranks[0]) == ranks[0]
    with pytest.raises(ValueError, match="'clip' is Mean and Max"):
        metrics.merge(ranks[0], {"clip": Max(f(1))})


@settings(max_examples=25, deadline=None)
@given(st.lists(st.booleans(), min_size=8, max_size=8), st.sampled_from([1, 2, 4, 8]))
def test_a_mean_is_the_same_for_every_cut(kept, size):
    x, mask = jnp.arange(8, dtype=jnp.float32), np.array(kept)
    total = {}
    for i in range(0, 8, size):
        total = metrics.merge(total, {"x": Mean.of(x[i : i + size], mask[i : i + size])})
    want = {"x": float(np.arange(8)[mask].mean())} if mask.any() else {}
    assert metrics.finalize(total) == pytest.approx(want)


def test_nothing_seen_is_left_out_and_nan_is_not_hidden():
    values = metrics.finalize(
        {
            "none": Mean.of(jnp.array([jnp.nan]), jnp.array([False])),
            "empty": Max(jnp.float32(-jnp.inf)),
            "bad": Mean.of(jnp.array([jnp.nan, 1]), jnp.array([True, True])),
            "top": metrics.merge({"a": Max(jnp.float32(jnp.nan))}, {"a": Max(jnp.float32(1))})["a"],
            "lr": 1e-6,
        }
    )
    assert set(values) == {"bad", "top", "lr"}
    assert math.isnan(values["bad"])
    assert math.isnan(values["top"])
    assert values["lr"] == 1e-6


# --- names


def a_batch():
    nan = np.nan
    return {
        "prompt_length": np.array([2, 1]),
        "length": np.array([4, 5]),
        "truncated": np.array([False, True]),
        "response_mask": np.array([[0, 0, 1, 1, 0], [0, 1, 1, 0, 1]], bool),
        "token_level_scores": np.array([[0, 0, 0, 3, 0], [0, 0, 0, nan, 1]], np.float32),
        "token_level_rewards": np.array([[0, 0, -1, 3, nan], [0, 0, 0, 0, 1]], np.float32),
        "advantages": np.array([[9, 9, 1, 2, nan], [9, 3, 4, 9, 0]], np.float32),
        "returns": np.array([[9, 9, 1, 2, nan], [9, 3, 4, 9, 5]], np.float32),
        "values": np.array([[9, 9, 1, 2, nan], [9, 3, 4, 9, 4]], np.float32),
        "entropy": np.array([[9, 9, 1, 1, nan], [9, 1, 1, 9, 6]], np.float32),
        "rollout_log_probs": np.log([[1, 1, 0.5, 0.25, nan], [1, 0.1, 0.2, 1, 0.4]]),
        "old_log_probs": np.log([[1, 1, 0.5, 0.25, nan], [1, 0.1, 0.2, 1, 0.5]]),
    }


def test_batch_metrics_read_only_trained_tokens_and_carry_verls_names():
    got = metrics.batch_metrics(a_batch(), max_prompt_length=2, replicas=2)
    p, q = [0.5, 0.25, 0.1, 0.2, 0.4], [0.5, 0.25, 0.1, 0.2, 0.5]
    want = {
        "critic/score/mean": 2, "critic/score/max": 3, "critic/score/min": 1,
        "critic/rewards/mean": 1.5, "critic/rewards/max": 2, "critic/rewards/min": 1,
        "critic/advantages/mean": 2, "critic/advantages/max": 4, "critic/advantages/min": 0,
        "critic/returns/mean": 3, "critic/returns/max": 5, "critic/returns/min": 1,
        "critic/values/mean": 2.8, "critic/values/max": 4, "critic/values/min": 1,
        "critic/vf_explained_var": 1 - 0.2 / (2.5 + 1e-5),  # residuals 0,0,0,0,1; returns 1..5
        "actor/entropy": 2,
        "response_length/mean": 3, "response_length/max": 4, "response_length/min": 2,
        "response_length/clip_ratio": 0.5,
        "prompt_length/mean": 1.5, "prompt_length/max": 2, "prompt_length/min": 1,
        "prompt_length/clip_ratio": 0.5,
        "global_seqlen/mean": 4.5, "global_seqlen/max": 5, "global_seqlen/min": 4,
        "global_seqlen/minmax_diff": 1,
        "training/rollout_probs_diff_max": 0.1, "training/rollout_probs_diff_mean": 0.02,
        "training/rollout_probs_diff_std": math.sqrt(0.002),  # (4 * 0.02^2 + 0.08^2) / 4
        "training/rollout_actor_probs_pearson_corr": float(np.corrcoef(p, q)[0, 1]),
    }  # fmt: skip
    assert got == pytest.approx(want, rel=1e-5)


def test_lengths_and_scores_count_masked_rows_that_losses_leave_out():
    batch = a_batch()
    batch["response_mask"][1] = False
    got = metrics.batch_metrics(batch | {"score": np.array([3.0, 1.0], np.float32)})
    assert (got["response_length/min"], got["response_length/max"]) == (2, 4)
    assert got["critic/score/mean"] == 2
    assert got["critic/advantages/mean"] == 1.5


def test_only_the_columns_present_are_measured_and_an_empty_mask_is_no_error():
    assert metrics.batch_metrics({}) == {}
    assert set(metrics.batch_metrics({"score": [1.0]})) == {
        f"critic/score/{statistic}" for statistic in ("mean", "max", "min")
    }
    batch = a_batch()
    batch["response_mask"][:] = False
    got = metrics.batch_metrics(batch)
    assert not any("values" in name or "rollout" in name or "entropy" in name for name in got)
    assert not any(math.isnan(value) for value in got.values())
    names = ("rollout_log_probs", "old_log_probs", "response_mask", "entropy")
    one = {name: a_batch()[name][:1, 2:3] for name in names}
    gaps = {k: v for k, v in metrics.batch_metrics(one).items() if k.startswith("training/")}
    assert metrics.batch_metrics({k: v for k, v in one.items() if k != "entropy"}) == {}
    assert gaps == {
        "training/rollout_probs_diff_max": 0,
        "training/rollout_probs_diff_mean": 0,
    }


def test_timing_metrics_divide_generation_by_response_tokens_and_the_rest_by_all():
    seconds = {"step": 4.0, "gen": 2.0, "update_actor": 1.0, "reward": 0.5}
    got = metrics.timing_metrics(seconds, 1000, 400, devices=8)
    assert got.pop("perf/cpu_memory_used_gb", 1.0) > 0
    assert got == {
        "timing_s/step": 4.0,
        "timing_s/gen": 2.0,
        "timing_s/update_actor": 1.0,
        "timing_s/reward": 0.5,
        "timing_per_token_ms/gen": 5.0,
        "timing_per_token_ms/update_actor": 1.0,
        "perf/total_num_tokens": 1000.0,
        "perf/time_per_step": 4.0,
        "perf/throughput": 1000 / (4 * 8),
    }
    assert "timing_per_token_ms/gen" not in metrics.timing_metrics(seconds, 0, 0, devices=1)


def test_stages_of_the_driver_add_up_until_they_are_taken():
    @metrics.stage("adv")
    def work(x: int) -> int:
        return x + 1

    metrics.taken_seconds()
    assert work(1) + work(2) == 5
    with pytest.raises(RuntimeError), metrics.stage("reward"):
        raise RuntimeError
    taken = metrics.taken_seconds()
    assert set(taken) == {"adv", "reward"}
    assert min(taken.values()) >= 0
    assert metrics.taken_seconds() == {}


# --- files


def test_equal_runs_write_equal_bytes_and_floats_read_back_exactly(tmp_path):
    values = {"b": 0.1 + 0.2, "a": np.float32(0.1), "c": 1e-300, "nan": math.nan, "inf": -math.inf}
    for name, order in (("one", list(values)), ("two", list(reversed(values)))):
        log = quiet_log(tmp_path / name)
        for step in (0, 1):
            log.write(step, {k: values[k] for k in order})
        log.close()
    one, two = (tmp_path / name / "metrics.jsonl" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    row = read(one)[1]
    assert list(row) == [STEP, "a", "b", "c", "inf", "nan"]
    assert row == {STEP: 1, "a": float(np.float32(0.1)), "b": 0.1 + 0.2, "c": 1e-300} | {
        "inf": None,
        "nan": None,
    }


@pytest.mark.parametrize(
    ("rows", "n", "prompts"), [(512, 16, 8), (128, 16, 8), (8, 2, 4), (3, 3, 1)]
)
def test_samples_are_of_many_prompts_also_when_each_has_many_rows(rows, n, prompts):
    shown = metrics.sample_rows(rows)
    assert len(shown) == min(rows, metrics.SAMPLE_ROWS)
    assert len({row // n for row in shown}) == prompts
    assert shown == sorted(set(shown))
    assert max(shown) < rows
    assert all(row + 1 in shown for row in shown[:-1:2])


def test_after_a_resume_each_step_stands_once(tmp_path):
    log = quiet_log(tmp_path)
    columns = {"prompt": ["p"] * 2, "response": ["é", "\ud800"], "score": np.float32([0.5, np.nan])}
    for step in range(4):
        log.write(step, {"loss": float(step)})
        log.samples(step, columns)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"training/global_step": 4, "lo')  # killed while writing
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert cut_to_step(tmp_path / name, 2) == 2
    log = quiet_log(tmp_path)
    for step in (3, 4):
        log.write(step, {"loss": 10.0 * step})
        log.samples(step, columns)
    rows = read(tmp_path / "metrics.jsonl")
    assert [(row[STEP], row["loss"]) for row in rows] == [(0, 0), (1, 1), (2, 2), (3, 30), (4, 40)]
    samples = read(tmp_path / "samples.jsonl")
    assert [row[STEP] for row in samples] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert samples[1] == {STEP: 0, "prompt": "p", "response": "\ud800", "score": None}


def test_a_half_written_line_is_dropped_and_a_broken_one_inside_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert cut_to_step(path, 3) == -1
    whole = '{"training/global_step": 1}\n{"training/global_step": 2}'
    for tail in ('\n{"training/glo', "\n\x00\x00", "\n"):
        path.write_text(whole + tail)
        assert cut_to_step(path, math.inf) == 2
        assert path.read_text() == whole + "\n"
    path.write_text('{"training/global_step": 1}\n{"loss": 2}\n{"training/global_step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2 .*remove that line"):
        cut_to_step(path, 3)


def test_a_used_directory_is_not_overwritten(tmp_path):
    quiet_log(tmp_path).write(0, {"loss": 1.0})
    with pytest.raises(ValueError, match=r"step 0 after step 0.*new directory"):
        quiet_log(tmp_path).write(0, {"loss": 2.0})
    assert read(tmp_path / "metrics.jsonl") == [{STEP: 0, "loss": 1.0}]


def test_console_shows_stages_with_shares_and_the_main_numbers():
    values = {"timing_s/step": 4.0, "timing_s/gen": 3.0, "timing_s/adv": 0.5, "actor/lr": 1e-6}
    values |= {"critic/score/mean": 0.123456, "val-core/sums/acc/mean@1": math.nan}
    lines = metrics.console_block(values, 3, 10).plain.splitlines()
    assert lines[0] == "step 3/10  4.00 s"
    assert lines[1].split(" · ") == ["  gen 3.00 s 75%", "adv 0.50 s 12%"]
    assert lines[2].strip() == "score 0.1235   val-core/sums/acc/mean@1 nan"


def test_tensorboard_gets_every_number_and_what_a_full_disk_refused(tmp_path: Path) -> None:
    """Step 2 reaches the file with step 3; a record has a length, two sums and its bytes."""
    log = MetricLog(tmp_path, console=Console(file=io.StringIO()))
    log.write(1, {"critic/score/mean": 0.5})
    (file,) = (tmp_path / "tensorboard").iterdir()
    size, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 5, most))
    try:
        with pytest.raises(OSError, match=r"metrics\.jsonl|tfevents"):
            log.write(2, {"critic/score/mean": 0.25})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    log.write(3, {"critic/score/mean": 0.125, "actor/lr": math.nan})
    log.close()
    messages: Any = event_pb2
    data, found = file.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert struct.unpack("<I", data[8:12]) == (masked_crc32c(data[:8]),)
        assert struct.unpack("<I", data[12 + length :][:4]) == (masked_crc32c(data[12:][:length]),)
        event = messages.Event.FromString(data[12:][:length])
        found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        data = data[16 + length :]
    scores = [(step, "critic/score/mean", 2.0**-step) for step in (1, 2, 3)]
    assert found[:3] == scores
    assert found[3][:2] == (3, "actor/lr")
    assert math.isnan(found[3][2])


def test_lines_that_a_full_disk_refuses_are_written_whole_the_next_time(tmp_path: Path) -> None:
    """No file may grow beyond the middle of the second line."""
    log, path = quiet_log(tmp_path), tmp_path / "metrics.jsonl"
    log.write(1, {"actor/lr": 0.5})
    before, (size, most) = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, most))
    try:
        for write in (lambda: log.write(2, {"actor/lr": 0.25}), log.flush):
            with pytest.raises(OSError, match=re.escape(str(path))):
                write()
            assert path.read_bytes() == before
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    log.write(3, {"actor/lr": 0.125})
    found = [json.loads(line)["actor/lr"] for line in path.read_text().splitlines()]
    assert found == [0.5, 0.25, 0.125]
    log.flush()
