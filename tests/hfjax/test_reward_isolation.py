# SPDX-License-Identifier: Apache-2.0
"""What a reward function cannot do to the run: eat its memory, flood it, fork it, talk for it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hfjax.reward_process import MOST_REASON, Scored, decoded, encoded
from hfjax.rewards import LAST_BYTES, SHOWN_BYTES, RewardError, RewardPool
from tests.fixtures import write_tiny_hf

FUNCTIONS = """
import os, pickle, signal, subprocess, sys, time
KEPT = []
def eats(prompts, responses, truths):
    for prompt in prompts:
        if prompt == "3": KEPT.append(bytearray(4 << 30))
    return [1.0] * len(prompts)
def prints(prompts, responses, truths):
    for _ in range(80):
        print("x" * 65535)
        print("y" * 65535, file=sys.stderr)
    return [1.0] * len(prompts)
def colours(prompts, responses, truths):
    print("\\033[31mred\\a")
    raise ValueError("\\033]0;title\\a" + "z" * 100000)
def alarms(prompts, responses, truths):
    for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if prompts[0] == "sleep": time.sleep(3600)
    if prompts[0] == "alarm":
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(1)
        time.sleep(3600)
    return [1.0] * len(prompts)
def forks(prompts, responses, truths):
    os.fork()
    return [float(os.getpid())] * len(prompts)
def forges(prompts, responses, truths):
    class Run:
        def __reduce__(self): return os.mkdir, (truths[0],)
    message = pickle.dumps(Run())
    for end in range(3, 99):
        if os.path.exists(path := f"/proc/self/fd/{end}") and "socket" in os.readlink(path):
            os.write(end, len(message).to_bytes(4, "big") + message)
    return [1.0] * len(prompts)
def ends(prompts, responses, truths):
    for prompt in prompts:
        if prompt in truths[0].split(","): os.kill(os.getpid(), int(truths[0].split(",")[0]))
    return [1.0] * len(prompts)
def speaks(prompts, responses, truths):
    for byte in "\u00e9".encode():
        os.write(1, bytes([byte]))
        time.sleep(0.1)
    print("x" * 100000 + "\\nlibrary: cannot open \u00e9", flush=True)
    os._exit(7)
def terminated(prompts, responses, truths):
    os.kill(os.getpid(), signal.SIGTERM)
    program = subprocess.Popen(["sleep", "600"])
    copy = os.fork() or time.sleep(600)
    time.sleep(0.5)  # Python drops signals of its first moments
    program.terminate()
    os.kill(copy, signal.SIGTERM)
    ended = program.wait(), -os.waitpid(copy, 0)[1]
    return [float(ended == (-15, -15))] * len(prompts)
def adjusted(prompts, responses, truths):
    return [float(open("/proc/self/oom_score_adj").read())] * len(prompts)
"""
ROWS = [str(i) for i in range(8)]


@pytest.fixture
def functions(tmp_path: Path) -> str:
    (tmp_path / "isolated.py").write_text(FUNCTIONS)
    return f"{tmp_path}/isolated.py"


def scored(function: str, rows: list[str], truth: str = "", **settings: Any) -> Any:
    with RewardPool(function, **({"workers": 1, "on_error": "skip"} | settings)) as pool:
        return pool.score(rows, rows, [truth] * len(rows))


def test_memory_is_bounded_and_only_the_row_that_takes_it_fails(
    functions: str, caplog: pytest.LogCaptureFixture
) -> None:
    scores, failed = scored(f"{functions}:eats", ROWS, memory_gb=2.0)
    assert failed.tolist() == [row == "3" for row in ROWS]
    assert scores.tolist() == [float(row != "3") for row in ROWS]
    assert "MemoryError" in caplog.text
    assert "a process may allocate reward.memory_gb=2: raise that" in caplog.text


def test_memory_that_a_module_lacks_names_its_bound(tmp_path: Path) -> None:
    (tmp_path / "big.py").write_text("KEPT = bytearray(4 << 30)\n")
    with pytest.raises(ValueError, match=r"MemoryError\n.*\n.* cost.memory_gb=1: raise that"):
        RewardPool(f"{tmp_path}/big.py:f", memory_gb=1.0, section="cost")


def test_a_crash_names_the_bound_of_memory(
    functions: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert scored(f"{functions}:ends", ROWS, "6")[1].tolist() == [row == "6" for row in ROWS]
    assert (
        "(exit status -6: for want of memory? It may allocate reward.memory_gb=16)" in caplog.text
    )


def test_processes_that_the_kernel_kills_again_and_again_are_no_rows_fault(
    functions: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [*ROWS, "9"]
    assert scored(f"{functions}:ends", rows, "9")[1].tolist() == [row == "9" for row in rows]
    assert "row 8 ended its process (exit status -9: killed by the kernel" in caplog.text
    with pytest.raises(RewardError, match=r"rows 3 and 8 .*killed by the kernel, for want of mem"):
        scored(f"{functions}:ends", rows, "9,3")


def test_the_kernel_takes_a_reward_process_first(functions: str) -> None:
    assert scored(f"{functions}:adjusted", ROWS)[0].tolist() == [1000.0] * 8


def test_megabytes_of_prints_neither_block_nor_flood(
    functions: str, capfd: pytest.CaptureFixture[str]
) -> None:
    began_s = time.monotonic()
    _, failed = scored(f"{functions}:prints", ROWS, deadline_s=20.0)
    assert not failed.any()
    assert time.monotonic() - began_s < 15
    shown = capfd.readouterr()
    assert len(shown.out + shown.err) < 2 * SHOWN_BYTES
    assert f"printed more than {SHOWN_BYTES} bytes" in shown.err


def test_the_last_words_of_a_process_are_told_however_much_it_printed(
    functions: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RewardError, match=r"row 0 ended .*7\); it printed last:\n") as caught:
        scored(f"{functions}:speaks", ["0"], on_error="fail")
    assert str(caught.value).endswith("x\nlibrary: cannot open \u00e9")
    assert len(str(caught.value)) < LAST_BYTES + 500
    shown = capfd.readouterr().err
    assert "library:" not in shown
    assert shown.startswith("\u00e9x")


def test_what_it_prints_or_raises_cannot_steer_the_terminal(
    functions: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RewardError, match=r"row 0 raised") as caught:
        scored(f"{functions}:colours", ["0"], on_error="fail")
    shown = capfd.readouterr().err
    assert "\\x1b[31mred\\x07" in shown
    assert not {"\x1b", "\x07"} & set(shown + str(caught.value))
    assert len(str(caught.value)) < MOST_REASON + 500


@pytest.mark.parametrize("row", ["sleep", "alarm"])
def test_signals_that_it_takes_over_do_not_keep_it_alive(functions: str, row: str) -> None:
    scores, failed = scored(f"{functions}:alarms", [row, "1"], deadline_s=2.0)
    assert failed.tolist() == [True, False]
    assert scores.tolist() == [0.0, 1.0]


def test_sigterm_to_all_of_a_job_ends_what_it_started_and_not_itself(functions: str) -> None:
    scores, failed = scored(f"{functions}:terminated", ["1"], deadline_s=20.0)
    assert (scores.tolist(), failed.tolist()) == ([1.0], [False])


def test_it_ends_with_its_controller_whatever_signals_it_ignores(functions: str) -> None:
    code = (
        "import sys; from hfjax.rewards import RewardPool\n"
        f"pool = RewardPool({functions + ':alarms'!r}, workers=1, deadline_s=60.0)\n"
        "print(pool._workers[0]._process.pid, flush=True)\n"
        "pool.score(['sleep'], [''], [''])"
    )
    controller = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert controller.stdout is not None
    pid = int(controller.stdout.readline())
    time.sleep(0.5)
    controller.send_signal(signal.SIGKILL)
    controller.communicate()
    until = time.monotonic() + 5
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}")


def test_a_function_that_forks_answers_once(functions: str) -> None:
    with RewardPool(f"{functions}:forks", workers=1) as pool:
        answers = [pool.score(ROWS, ROWS, ROWS)[0].tolist() for _ in range(3)]
    assert len({score for scores in answers for score in scores}) == 1


def test_nothing_that_it_sends_runs_in_the_controller(
    functions: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mark = tmp_path / "made"
    _, failed = scored(f"{functions}:forges", ["0"], str(mark))
    assert failed.all()
    assert "is no answer" in caplog.text
    assert not mark.exists()


@pytest.mark.parametrize(
    "message",
    [
        *(b"", b"\xff", b"[]", b"3", b"[" * 5000, b'["scores", [1.0], 3]', b'["other", [], ""]'),
        *(b'["scores", [1.0], ""]', b'["scores", [1.0, NaN], ""]', b'["row", [1.0], ""]'),
    ],
    ids=lambda message: repr(message[:24]),
)
def test_an_answer_has_its_form(message: bytes) -> None:
    assert decoded(message, 2) is None
    answer = Scored("scores", [0.1, 2.0])
    assert decoded(encoded(answer), 2) == answer


SETTINGS = """
model = "{folder}/model"
placement = "{folder}/placement.toml"
runtime = "local"
steps = 1
tensorboard = false
out = "{folder}/run"
[data]
train = "{folder}/rows.jsonl"
prompts_per_step = 8
shuffle = false
[rollout]
max_new_tokens = 4
[reward]
function = "{folder}/trouble.py:trouble"
deadline_s = 2.0
on_error = "{policy}"
"""
TROUBLE = """
import os, re, time
def trouble(prompts, responses, truths):
    scores = []
    for prompt in prompts:
        if prompt == "t3": raise KeyError("boom in row three")
        if prompt == "t4": time.sleep(3600)
        if prompt == "t5": re.match(r"(a+)+$", "a" * 60 + "b")
        if prompt == "t6": os._exit(3)
        scores.append(1.0)
    return scores
"""


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["skip", "fail"])
def test_rows_that_raise_sleep_spin_and_exit_in_a_run(tmp_path: Path, policy: str) -> None:
    """Status, what is said, the masked rows and their number; nobody is left."""
    import json

    from meshes.mesh import MeshShape
    from tests.fixtures import placed
    from tests.hfjax.test_rewards import left_running

    write_tiny_hf(tmp_path / "model")
    placed(tmp_path / "placement.toml", MeshShape(), "actor", "reference")
    rows = [{"prompt": f"t{i}", "ground_truth": ""} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "trouble.py").write_text(TROUBLE)
    settings = SETTINGS.format(folder=tmp_path, policy=policy)
    (tmp_path / "settings.toml").write_text(settings)
    command = [sys.executable, "-m", "hfjax.cli", "train", "reinforce_pp"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    ran = subprocess.run(
        [*command, "--config", str(tmp_path / "settings.toml")],
        **{"capture_output": True, "text": True, "timeout": 300, "env": environment},
    )
    assert left_running(str(tmp_path / "trouble.py")) == []
    if policy == "fail":
        assert ran.returncode == 1
        assert "KeyError: 'boom in row three'" in ran.stderr
        assert "row 3 raised" in ran.stderr
        return
    assert ran.returncode == 0, ran.stderr
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    record = json.loads(lines[-1])
    assert record["reward/failed"] == 4
    assert record["timing_s/reward"] < 15
    assert "4 of 8 rows failed" in ran.stderr
