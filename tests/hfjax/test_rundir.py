# SPDX-License-Identifier: Apache-2.0
"""A run's directory: exports are whole or not there, what a checkpoint lacks is named."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hfjax.rundir
from algorithms import sft
from hfjax.config import RunConfig, to_toml
from hfjax.data import Source
from hfjax.engine.store import CheckpointStore
from hfjax.models.hf import load_config, load_params
from hfjax.run import train
from hfjax.rundir import check_state, export_run, find_run
from tests.test_run import tuning


def test_an_export_is_there_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tuning(tmp_path)
    run, out = Path(config.out), tmp_path / "new" / "exported"
    for folder in (run, out):
        folder.mkdir(parents=True)
    (run / "settings.toml").write_text(to_toml(config))
    about = {"algorithm": "sft", "model": config.model, "began": "2020-01-01"}
    (run / "run.json").write_text(json.dumps(about))
    params = load_params(config.model, load_config(config.model), "lm")
    monkeypatch.setattr(CheckpointStore, "latest", lambda self, **_: 1)
    monkeypatch.setattr(hfjax.rundir, "restore_role", lambda *_, **__: {"params": params})

    def fills_the_disk(*given: Any) -> None:
        Path(given[-1], "model.safetensors").write_bytes(b"half")
        assert not list(out.iterdir())
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(hfjax.rundir, "save_hf", fills_the_disk)
        with pytest.raises(OSError, match="No space"):
            export_run(run, out)
    assert list(tmp_path.glob("new/**/*")) == [out]
    unfinished = out.with_name("exported.tmp")
    unfinished.mkdir()
    with pytest.raises(ValueError, match=r"exported: .*exported.tmp is left from an export"):
        export_run(run, out)
    unfinished.rmdir()
    export_run(run, out)
    assert [path.name for path in out.parent.iterdir()] == ["exported"]
    assert load_config(out) == load_config(tmp_path / "model")
    with pytest.raises(ValueError, match="not empty"):
        export_run(run, out)
    with pytest.raises(ValueError, match="is a file"):
        export_run(run, out / "config.json")


@pytest.mark.parametrize("data", [{}, {"data": None}, {"data": {"epoch": 1}}])
def test_a_checkpoint_that_does_not_say_where_the_data_goes_on_is_refused(
    tmp_path: Path, data: dict[str, Any]
) -> None:
    store = CheckpointStore(tmp_path, 1)
    store.path(3).mkdir(parents=True)
    (store.path(3) / "meta.json").write_text(json.dumps(data))
    source = Source([1, 2], lambda items, n: {}, batch=1)
    plan: Any = SimpleNamespace(source=source, texts=None, trained=())
    with pytest.raises(ValueError, match=r"step_.*meta.json does not say where 'data' goes on"):
        check_state(plan, store, 3)


def test_a_run_that_ended_before_its_first_record_is_resumed(tmp_path: Path) -> None:
    """Its samples were written, the disk was full then."""
    out = tmp_path / "run"
    out.mkdir()
    for name in ("run.json", "samples.jsonl", "trace.json.new"):
        (out / name).write_text("")
    config = RunConfig(out=str(out))
    assert find_run(out, config, {})[0] == 0
    (out / "run.json").unlink()
    with pytest.raises(ValueError, match="files of something else"):
        find_run(out, config, {})


def test_what_is_exported_is_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A damaged newest checkpoint is named, and the one before it exported."""
    config = tuning(tmp_path, steps=2, save_every=1)
    out = train(sft, config)
    newest = out / "checkpoints" / "step_00000002"
    file = max(newest.rglob("d/*"), key=lambda path: path.stat().st_size)
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    export_run(out, tmp_path / "exported")
    assert re.search("step_00000002.* is damaged.*the one before it is used", caplog.text)
    assert load_config(tmp_path / "exported") == load_config(tmp_path / "model")
