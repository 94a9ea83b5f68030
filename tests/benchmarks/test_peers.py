# SPDX-License-Identifier: Apache-2.0
"""Each kind of job on a tiny model: fixed tokens, nothing compiled after warm-up, one line."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import peer_job, peers
from tests.fixtures import slow_but, write_tiny_hf

MICRO = peer_job.Size(prompts=2, n=2, prompt=5, response=6, hidden=40, layers=2, mlp=56, vocab=96)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(peer_job.SIZES, "tiny", MICRO)
    return write_tiny_hf(tmp_path / "model-tiny")


@pytest.mark.parametrize("kind", slow_but(peer_job.KINDS, "generate"))
def test_a_job_tells_what_its_steps_took(
    kind: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "lines.jsonl"
    options = ["--steps", "2", "--warmup", "2", "--out", str(out)]
    assert peer_job.main([kind, "--model", str(model), *options]) == 0
    line = json.loads(capsys.readouterr().out)
    assert json.loads(out.read_text()) == line
    assert (line["kind"], line["workload"], line["steps"]) == (kind, "tiny", 2)
    tokens = 4 * 6 if kind == "generate" else 4 * 11
    assert line["tokens_per_s"] == pytest.approx(tokens / line["step_s_median"], rel=0.05)
    assert line["xla_compiles_per_step"][2:] == [0, 0]
    assert line["peak_rss_all_mb"] > 50
    assert line["first_step_done_s"] > 0
    if kind in ("grpo", "ppo"):
        parts = line["gen_s_median"] + line["update_actor_s_median"] + line["ref_s_median"]
        assert 0 < parts < 1.5 * line["step_s_median"]


def test_another_model_than_the_workload_s_is_refused(model: Path) -> None:
    write_tiny_hf(model, num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"'num_hidden_layers': 3"):
        peer_job.main(["update", "--model", str(model)])


def test_logits_are_given_for_comparison(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "logits.npy"
    peer_job.main(["update", "--model", str(model), "--dump-logits", str(file)])
    assert np.load(file).shape == (2, 5, 96)


JOB = """import json, sys
line = {"name": sys.argv[1], "workload": "tiny", "kind": "grpo", "peak_rss_mb": 7}
line["step_s_median"] = float(sys.argv[2])
open(sys.argv[sys.argv.index("--out") + 1], "a").write(json.dumps(line) + "\\n")
sys.exit(sys.argv[1] == "bad")
"""


def test_jobs_run_in_turn_and_are_compared_by_medians(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    jobs = [f"{sys.executable} {script} {name} {s}" for name, s in (("one", 3.0), ("two", 2.0))]
    options = ["--models", "m", "--sizes", "tiny", "--rounds", "2", "--out", str(tmp_path / "o")]
    assert peers.main([*options, "--job", jobs[0], "--job", jobs[1]]) == 0
    out, err = capsys.readouterr()
    rows = [line.split() for line in out.splitlines()[1:]]
    assert [(row[1], row[-2]) for row in rows] == [("two", "1.00"), ("one", "1.50")]
    assert [line.split()[-2] for line in err.splitlines()] == ["one", "two", "one", "two"]
    assert peers.main([*options, "--job", f"{sys.executable} {script} bad 1"]) == 1


def test_a_job_that_hangs_or_is_not_there_is_a_failure_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script, out = tmp_path / "job.py", tmp_path / "o"
    script.write_text("import sys, time\ntime.sleep(60 * (sys.argv[1] == 'hangs'))\n" + JOB)
    out.mkdir()
    (out / "results.jsonl").write_text("of an earlier rotation\n")
    monkeypatch.setattr(peers, "LIMIT_S", 2.0)
    jobs = [f"{sys.executable} {script} hangs 1", "/nowhere", f"{sys.executable} {script} well 1"]
    options = ["--models", "m", "--sizes", "tiny", "--rounds", "1", "--out", str(out)]
    for job in jobs:
        options += ["--job", job]
    assert peers.main(options) == 1
    shown = capsys.readouterr().out
    assert "not finished after 2 s" in shown
    assert "No such file or directory: '/nowhere'" in shown
    assert shown.splitlines()[-1].split()[1] == "well"
