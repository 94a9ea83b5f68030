# SPDX-License-Identifier: Apache-2.0
"""A run's directory: exports are whole or not there, what a checkpoint lacks is named."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hfjax.rundir
from hfjax.config import to_toml
from hfjax.data import Source
from hfjax.engine.store import CheckpointStore
from hfjax.models.hf import load_config, load_params
from hfjax.rundir import check_state, export_run
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
