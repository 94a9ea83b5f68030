# SPDX-License-Identifier: Apache-2.0
"""Reward functions of all manners: right, wrong in number, raising, sleeping, spinning, dying."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from hfjax.reward_process import call_reward, load_reward
from hfjax.rewards import RewardError, RewardPool

FUNCTIONS = """
import fractions, os, re, subprocess, sys, time
import numpy as np
CALLS = []
RETURNS = {
    "one": [1.0], "seven": [1.0] * 7, "number": 1.0, "text": "123456", "none": None,
    "a None": [1, 1, 1, None, 1, 1], "a NaN": [1, float("nan")] * 3, "a string": [1, "1"] * 3,
    "an array": [[1.0], 1] * 3, "infinity": [float("inf")] * 6, "no float32": [1e39] * 6,
}
def returns(prompts, responses, truths):
    return RETURNS[truths[0]] if len(prompts) > 1 else [RETURNS[truths[0]][int(prompts[0])]]
def scalars(prompts, responses, truths):
    quarter = fractions.Fraction(1, 4)
    return (v for v in [np.float32(0.5), np.int64(2), True, np.bool_(True), 3, quarter])
def array(prompts, responses, truths):
    return np.arange(len(prompts), dtype=np.float64)
def trouble(prompts, responses, truths):
    scores = []
    for prompt in prompts:
        if prompt == "3": raise KeyError("boom in row three")
        if prompt == "4": time.sleep(3600)
        if prompt == "5": re.match(r"(a+)+$", "a" * 60 + "b")
        if prompt == "6": os._exit(3)
        scores.append(float(prompt))
    return scores
def leaves(prompts, responses, truths):
    subprocess.Popen([sys.executable, "-c", f"import time  # {truths[0]}\\ntime.sleep(3600)"])
    time.sleep(3600)
def slow(prompts, responses, truths):
    time.sleep(0.1 * len(prompts))
    return [float(os.getpid())] * len(prompts)
def half(prompts, responses, truths):
    for end in range(3, 99):
        if os.path.exists(path := f"/proc/self/fd/{end}") and "socket" in os.readlink(path):
            os.write(end, b"\\0\\0\\0\\7h")  # a message of seven bytes, cut short
    time.sleep(3600)
def exits(prompts, responses, truths):
    sys.exit("enough")
def count(prompts, responses, truths):
    CALLS.append(len(prompts))
    return [float(len(prompts))] * len(prompts)
def process(prompts, responses, truths):
    return [float(os.getpid())] * len(prompts)
def two(prompts, responses):
    return []
def light(prompts, responses, truths):
    return [float("jax" in sys.modules or "flax" in sys.modules)] * len(prompts)
"""
ROWS = [str(i) for i in range(8)]


@pytest.fixture
def functions(tmp_path):
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    return f"{tmp_path}/functions.py"


def score(pool, rows, truth=""):
    return pool.score(rows, rows, [truth] * len(rows))


def left_running(mark):
    """Processes with the mark that are still there after up to five seconds: dying takes some."""
    until = time.monotonic() + 5
    while (found := running(mark)) and time.monotonic() < until:
        time.sleep(0.02)
    return found


def running(mark):
    """Processes whose command line holds the mark."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


def test_scores_are_float32_and_nothing_failed():
    with RewardPool("hfjax.arithmetic:sum_reward", workers=2) as pool:
        prompts = ["1+1="] * 20
        scores, failed = pool.score(prompts, ["2"] * 19 + ["3"], ["2"] * 20)
    assert scores.dtype == np.float32
    assert scores.tolist() == [1.0] * 19 + [0.0]
    assert failed.tolist() == [False] * 20


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ("one", "6 expected, 1 received"),
        ("seven", "6 expected, 7 received"),
        ("number", "list of 6 scores, returned a float"),
        ("text", "returned a str"),
        ("none", "returned a NoneType"),
        ("a None", "row 3 returned None, not a finite number"),
        ("a NaN", "row 1 returned nan"),
        ("a string", "row 1 returned '1'"),
        ("an array", r"row 0 returned \[1.0\]"),
        ("infinity", "row 0 returned inf"),
        ("no float32", r"row 0 returned 1e\+39"),
    ],
)
def test_what_is_not_one_number_a_response_is_an_error(functions, truth, message):
    with (
        RewardPool(f"{functions}:returns", workers=1) as pool,
        pytest.raises(RewardError, match=f"reward .*:returns.*{message}"),
    ):
        score(pool, ROWS[:6], truth)


def test_wrong_number_of_scores_fails_even_when_rows_may_be_skipped(functions):
    with RewardPool(f"{functions}:returns", workers=2, on_error="skip") as pool:
        with pytest.raises(RewardError, match="6 expected, 1 received"):
            score(pool, ROWS[:6], "one")
        scores, failed = score(pool, ROWS[:6], "a None")
    assert failed.tolist() == [False, False, False, True, False, False]
    assert scores.tolist() == [1, 1, 1, 0, 1, 1]


def test_numpy_int_bool_and_generators_are_accepted(functions):
    with RewardPool(f"{functions}:scalars", workers=1) as pool:
        assert score(pool, ROWS[:6])[0].tolist() == [0.5, 2, 1, 1, 3, 0.25]
    with RewardPool(f"{functions}:array", workers=1) as pool:
        assert score(pool, ROWS[:6])[0].tolist() == [0, 1, 2, 3, 4, 5]


def test_skip_marks_the_rows_that_raise_sleep_spin_or_die(functions, caplog):
    started = time.monotonic()
    pool = RewardPool(f"{functions}:trouble", workers=2, deadline_s=1.0, on_error="skip")
    scores, failed = score(pool, ROWS)
    assert time.monotonic() - started < 15
    assert scores.tolist() == [0, 1, 2, 0, 0, 0, 0, 7]
    assert failed.tolist() == [False] * 3 + [True] * 4 + [False]
    assert "4 of 8 rows failed; row 3 raised" in caplog.text
    assert "boom in row three" in caplog.text
    scores, failed = score(pool, ["1", "2", "7"])  # the pool is whole again
    assert (scores.tolist(), failed.any()) == ([1, 2, 7], False)
    pool.close()
    assert left_running(functions) == []


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("3", r"(?s)row 1 raised.*in trouble.*KeyError: 'boom in row three'"),
        ("4", "row 1 took longer than 0.5 s"),
        ("5", "row 1 took longer than 0.5 s"),
        ("6", r"row 1 ended its process \(exit status 3\)"),
    ],
)
def test_fail_names_the_row_and_what_it_did(functions, row, message):
    with RewardPool(f"{functions}:trouble", workers=1, deadline_s=0.5) as pool:
        with pytest.raises(RewardError, match=message):
            score(pool, ["0", row, "2"])
        assert left_running(functions) == []  # nothing is left running with half a batch


def test_sys_exit_in_a_reward_is_its_failure(functions):
    with RewardPool(f"{functions}:exits", workers=1, on_error="skip") as pool:
        assert score(pool, ROWS)[1].all()


def test_processes_that_a_reward_started_end_with_it(functions, tmp_path):
    mark = f"left by {tmp_path}"
    with RewardPool(f"{functions}:leaves", workers=1, deadline_s=1.0, on_error="skip") as pool:
        assert score(pool, ["0"], mark)[1].all()
    assert left_running(mark) == []


def test_a_worker_that_stopped_reading_a_big_batch_is_ended_in_time(functions):
    with RewardPool(f"{functions}:process", workers=1, deadline_s=0.5, on_error="skip") as pool:
        for pid in running(functions):
            os.kill(pid, signal.SIGSTOP)
        started = time.monotonic()
        _, failed = score(pool, ["x" * 4_000_000])  # more than a socket's buffer holds
    assert failed.all()
    assert time.monotonic() - started < 10


def test_a_worker_that_answers_half_is_ended_in_time(functions):
    with (
        RewardPool(f"{functions}:half", workers=1, deadline_s=0.5) as pool,
        pytest.raises(RewardError, match=r"row 0 took longer than 0\.5 s"),
    ):
        score(pool, ["0"])


def test_slow_functions_are_given_time_once_their_pace_is_known(functions):
    with RewardPool(f"{functions}:slow", workers=2, deadline_s=0.6, on_error="skip") as pool:
        (first, _), (second, failed) = score(pool, ROWS * 2), score(pool, ROWS * 2)
    assert set(first) == set(second)  # 8 rows a worker take 0.8 s, and no worker is killed for it
    assert not failed.any()


def test_batch_is_cut_into_chunks_but_never_into_single_rows(functions):
    with RewardPool(f"{functions}:count", workers=3) as pool:
        assert score(pool, ROWS)[0].tolist() == [8.0] * 8
        assert score(pool, ROWS * 6)[0].tolist() == [16.0] * 48
        assert score(pool, [])[0].shape == (0,)


def test_a_worker_that_died_while_idle_is_replaced(functions):
    with RewardPool(f"{functions}:process", workers=1) as pool:
        first = int(score(pool, ["0"])[0][0])
        for pid in running(functions):
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
        scores, failed = score(pool, ["0"])
    assert not failed.any()
    assert int(scores[0]) != first


def test_workers_are_free_of_jax(functions):
    with RewardPool(f"{functions}:light", workers=1) as pool:
        assert score(pool, ROWS)[0].tolist() == [0.0] * 8


def test_a_short_batch_costs_milliseconds():
    with RewardPool("hfjax.arithmetic:sum_reward", workers=2) as pool:
        texts = ["37+58="] * 512, ["95"] * 512, ["95"] * 512
        pool.score(*texts)
        seconds = []
        for _ in range(5):
            started = time.perf_counter()
            pool.score(*texts)
            seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.05  # 1 ms on an idle machine


@pytest.fixture
def ctrl_c():
    """A process that a shell started in the background ignores it, and so does its Python."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_the_call_and_its_processes(functions):
    pool = RewardPool(f"{functions}:trouble", workers=1, deadline_s=60.0)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        score(pool, ["4"])
    assert left_running(functions) == []
    pool.close()


def test_no_process_outlives_a_controller_that_is_killed(functions):
    code = (
        "import sys; from hfjax.rewards import RewardPool\n"
        f"pool = RewardPool({functions + ':trouble'!r}, workers=2, deadline_s=60.0)\n"
        "print('ready', flush=True); sys.stdin.read()"
    )
    controller = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert controller.stdout is not None
    assert controller.stdout.readline() == b"ready\n"
    controller.kill()
    controller.communicate()
    assert left_running(f"{functions}:trouble") == []


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("sum_reward", "use 'package.module:function' or 'file.py:function'"),
        ("hfjax.nowhere:f", "no module 'hfjax.nowhere'"),
        ("nowhere.py:f", r"no file 'nowhere.py' in /"),
        ("hfjax.arithmetic:sum_rewards", "no function 'sum_rewards'.*it has .*sum_reward"),
        ("{functions}:two", r"must accept three lists, \(prompts, responses, ground_truths\)"),
    ],
)
def test_functions_that_cannot_be_loaded(functions, spec, message):
    with pytest.raises(ValueError, match=message):
        load_reward(spec.format(functions=functions))


def test_a_broken_module_is_refused_at_construction_with_its_traceback(tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_of_the_kind\n")
    with pytest.raises(ValueError, match=r"(?s)broken.py.*nothing_of_the_kind"):
        RewardPool(f"{tmp_path}/broken.py:f", workers=1)


def test_a_module_file_sees_its_neighbours(tmp_path):
    (tmp_path / "neighbour.py").write_text("SCORE = 4.0\n")
    text = "import neighbour\ndef f(p, r, g):\n    return [neighbour.SCORE] * len(r)\n"
    (tmp_path / "math.py").write_text(text)
    with RewardPool(f"{tmp_path}/math.py:f", workers=1) as pool:
        assert score(pool, ["a", "b"])[0].tolist() == [4.0, 4.0]


@pytest.mark.parametrize(
    "setting", [{"workers": 0}, {"deadline_s": 0.0}, {"on_error": "ignore"}], ids=str
)
def test_settings_are_checked(setting):
    (name,) = setting
    with pytest.raises(ValueError, match=f"reward.{name}="):
        RewardPool("hfjax.arithmetic:sum_reward", **setting)


def test_columns_of_different_length_are_refused():
    with (
        RewardPool("hfjax.arithmetic:sum_reward", workers=1) as pool,
        pytest.raises(ValueError, match="differ in number: 2, 1, 2"),
    ):
        pool.score(["a", "b"], ["a"], ["a", "b"])


def test_checks_need_no_process():
    answer = call_reward(lambda p, r, g: [1, 2], (["a", "b"], ["a", "b"], ["", ""]))
    assert (answer.kind, answer.scores) == ("scores", [1.0, 2.0])
