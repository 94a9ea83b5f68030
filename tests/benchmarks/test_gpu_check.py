# SPDX-License-Identifier: Apache-2.0
"""The GPU check at tiny size, on one CPU device and without the packages a bare GPU host lacks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ABSENT = (
    "chex",
    "gguf",
    "jinja2",
    "matplotlib",
    "pyarrow",
    "ray",
    "safetensors",
    "tensorboardX",
    "tokenizers",
    "tomli_w",
    "tyro",
)
RUN = f"""import sys
sys.modules.update(dict.fromkeys({ABSENT}))  # importing one of them raises
from benchmarks.gpu_check import main
sys.exit(main(["--size", "tiny"]))"""


@pytest.mark.slow
def test_tiny_check_runs_without_other_packages_and_finds_no_fault() -> None:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, "-c", RUN], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    table = {line[:46].strip(): line[46:].split() for line in done.stdout.splitlines()}
    for precision in ("highest", "default"):
        assert table[f"greedy, f32 {precision}: not the teacher's"][:1] == ["0"]
        assert float(table[f"log-probs, f32 {precision}: rollout - training"][0]) < 1e-4
        assert table[f"sampled, f32 {precision}: rows as on CPU"][:3] == ["16", "of", "16"]
    assert table["relay, f32 to f32"][2:5] == ["0", "bytes", "move,"]
    first, last = table["its loss, first and last"][:2]
    assert float(last.rstrip(",")) < float(first)
    assert "end of training" in table
