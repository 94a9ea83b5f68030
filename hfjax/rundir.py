# SPDX-License-Identifier: Apache-2.0
"""A run's directory: opened once, continued only by the same run, exported from."""

import dataclasses
import json
import tomllib
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from hfjax.algorithm import config_class, load_algorithm
from hfjax.config import flat, from_dict, read_toml, to_toml
from hfjax.controller.handle import start
from hfjax.engine.checkpoint import CheckpointStore
from hfjax.metrics import cut_to_step
from meshes.placement import Placement, single_pool

FREE_ON_RESUME = (
    *("deadline_s", "eval_every", "keep_last", "out", "placement", "resume", "runtime"),
    *("save_every", "steps", "epochs", "tensorboard"),
)


def open_directory(
    out: Path, config: Any, placement: Placement, about: dict[str, str]
) -> tuple[int, CheckpointStore]:
    """The last step on disk (0 for a new run); files of later steps are cut.

    `about` names algorithm and model, and says when the run began. A directory in use is refused
    unless it is resumed, and one of another run always, before anything in it changes.
    """
    folder = out / "checkpoints"
    used = (out / "metrics.jsonl").exists() or any(folder.glob("step_*"))
    if used and not config.resume:
        raise ValueError(f"out={out} holds a run; add --resume or choose another directory")
    if config.resume and not used:
        raise ValueError(f"out={out} holds no run to resume; leave --resume out")
    if config.resume:
        _check_same_run(out, config, about)
    store = CheckpointStore(folder, keep_last=config.keep_last)
    done = store.latest() or 0
    for name in ("metrics.jsonl", "samples.jsonl"):
        cut_to_step(out / name, done if done else -1)
    (out / "settings.toml").write_text(to_toml(dataclasses.replace(config, resume=False)))
    (out / "placement.toml").write_text(placement.to_toml())
    (out / "run.json").write_text(json.dumps(about, indent=1) + "\n")
    return done, store


def began(out: Path, *, resume: bool) -> datetime:
    """When the run in `out` was first started: prompts carry no later date, also when resumed."""
    file = out / "run.json"
    if resume and file.exists():
        return datetime.fromisoformat(json.loads(file.read_text())["began"])
    return datetime.now()


def _check_same_run(out: Path, config: Any, about: dict[str, str]) -> None:
    """Refuses to continue another run: only FREE_ON_RESUME may differ from its settings."""
    saved = json.loads((out / "run.json").read_text())
    pairs: dict[str, tuple[Any, Any]] = {name: (saved[name], about[name]) for name in about}
    before = flat(read_toml(out / "settings.toml"))
    now = flat(tomllib.loads(to_toml(config)))
    for name in sorted(before.keys() | now.keys()):
        if name not in FREE_ON_RESUME:
            pairs[name] = (before.get(name), now.get(name))
    differ = [f"{name} was {a!r}, is {b!r}" for name, (a, b) in pairs.items() if a != b]
    if differ:
        raise ValueError(
            f"out={out} holds another run: {'; '.join(differ)}; resume with the same "
            f"settings (free are {', '.join(FREE_ON_RESUME)}) or choose another directory"
        )


def export_run(run: str | Path, directory: str | Path) -> None:
    """Writes the actor of a run's newest checkpoint as a Hugging Face directory."""
    run = Path(run)
    if not (run / "run.json").is_file():
        raise ValueError(f"RUN={run} holds no run.json: it is not a run's directory")
    about = json.loads((run / "run.json").read_text())
    algorithm = load_algorithm(about["algorithm"])
    config = from_dict(
        config_class(algorithm), read_toml(run / "settings.toml"), where=str(run / "settings.toml")
    )
    if Path(directory).exists() and any(Path(directory).iterdir()):
        raise ValueError(f"DIR={directory} is not empty; choose a new directory")
    store = CheckpointStore(run / "checkpoints", keep_last=config.keep_last)
    step = store.latest()
    if step is None:
        raise ValueError(f"RUN={run} has no whole checkpoint to export")
    optimizer = dataclasses.replace(config.actor.optimizer, schedule="constant")
    actor = partial(
        algorithm.roles(config.algorithm)["actor"],
        model=about["model"],
        random=config.init == "random",
        training=dataclasses.replace(config.actor, optimizer=optimizer),
    )
    with start(single_pool(["actor"], 1), {"actor": actor}, runtime="local") as models:
        models.actor.load(path=str(store.path(step) / "actor")).result()
        models.actor.export(directory=str(directory)).result()
    print(f"wrote the actor of step {step} to {directory}")
