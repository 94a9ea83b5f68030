# SPDX-License-Identifier: Apache-2.0
"""A run's directory: opened once, continued only by the same run, exported from."""

import dataclasses
import fcntl
import json
import logging
import os
import shutil
import socket
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from hfjax.algorithm import config_class, load_algorithm, main_role
from hfjax.config import flat, from_dict, read_toml, to_toml
from hfjax.engine.checkpoint import check_role, restore_role
from hfjax.engine.store import CheckpointStore
from hfjax.files import read_json
from hfjax.metrics import cut_to_step, records_until
from hfjax.models.hf import load_config, save_hf
from hfjax.models.llama import abstract_params
from hfjax.prepare import Plan
from hfjax.roles import role_class, saved_state
from hfjax.tokenizer import load_tokenizer
from meshes.placement import Placement

log = logging.getLogger(__name__)

FREE_ON_RESUME = (
    *("check_every", "deadline_s", "eval_every", "keep_best", "keep_last", "max_restarts"),
    *("on_save_error", "out", "placement", "resume", "runtime", "save_every", "start_deadline_s"),
    *("steps", "epochs", "tensorboard", "trace"),
)
LOCK = "run.lock"
# What a run that ended before its first record has left, with files that were not replaced yet.
OWN = {"checkpoints", LOCK, "tensorboard", "trace.json"}
OWN |= {
    f"{name}{new}"
    for name in ("settings.toml", "placement.toml", "run.json")
    for new in ("", ".new")
}


def find_run(
    out: Path, config: Any, about: dict[str, Any], tell: Callable[[str], object] = log.info
) -> tuple[int, CheckpointStore]:
    """The last step on disk, 0 for a new run; nothing is written. What takes long is told before.

    `about` names algorithm and model, says when the run began, and has the fingerprints of models
    that nothing trains. A directory in use is refused
    unless it is resumed, and one of another run always.
    """
    folder = out / "checkpoints"
    used = (out / "metrics.jsonl").exists() or any(folder.glob("step_*"))
    if used and not config.resume:
        raise ValueError(f"out={out} holds a run; add --resume or choose another directory")
    there = {path.name for path in out.iterdir()} if out.is_dir() else set[str]()
    if not used and "run.json" not in there and there - OWN:
        raise ValueError(f"out={out} holds files of something else; choose another directory")
    if config.resume and not there:
        raise ValueError(f"out={out} holds no run to resume; leave --resume out")
    if used and "run.json" not in there:
        raise ValueError(f"out={out}: run.json is missing, which says whose run it is; put it back")
    if config.resume and "run.json" in there:
        _check_same_run(out, config, about)
    parent = next(path for path in (out, *out.absolute().parents) if path.exists())
    try:
        os.rmdir(tempfile.mkdtemp(dir=parent))  # access() knows no read-only or special systems
    except OSError as error:
        raise ValueError(
            f"out={out}: nothing can be made in {parent}: {error.strerror}; use another directory"
        ) from error
    for file in (out / "metrics.jsonl", out / "samples.jsonl"):
        if file.exists():
            records_until(file, 0)
    store = CheckpointStore(folder, config.keep_last, config.keep_best)
    done = store.latest(tell=tell) or 0
    if 0 < config.steps < done:
        raise ValueError(f"steps={config.steps}: {out} is at step {done}; set steps above that")
    return done, store


@contextmanager
def hold(out: Path) -> Iterator[bool]:
    """Keeps other processes out of a run's directory; whether it is there to be held.

    The kernel lets go of it when this process ends, in whatever way.
    """
    try:
        names = set(os.listdir(out)) if out.is_dir() else set[str]()
        own = "run.json" in names or (names and names <= OWN)
        file = (out / LOCK).open("a+") if own else None
    except OSError:  # not a directory to write in, which is said later
        file = None
    if file is None:
        yield False
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(
                f"out={out} is in use by {file.read() or 'another process'}; wait for it, stop it "
                "or choose another directory"
            ) from None
        except OSError as error:
            log.warning("%s cannot be locked (%s): let no other run use it", out, error)
        with suppress(OSError):  # a full disk
            file.truncate(0)
            os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield True


def check_state(plan: Plan, store: CheckpointStore, done: int) -> None:
    """Refuses the checkpoint of step `done` for other data or models; the data goes on after it."""
    meta = store.load_meta(done)
    for key, source in (("data", plan.source), ("texts", plan.texts)):
        if source is None:
            continue
        try:
            source.load_state_dict(meta[key])
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"checkpoint {store.path(done)}: its meta.json does not say where {key!r} goes on "
                f"({type(error).__name__}: {error}); remove that checkpoint to go on from the one "
                "before, or choose another directory with `out`"
            ) from error
    for role in plan.trained:
        builder = plan.builders[role]
        model, training = builder.keywords["model"], builder.keywords["training"]
        shapes = saved_state(model, role_class(builder).head, training.optimizer)
        check_role(store.path(done) / role, shapes)


def open_directory(
    out: Path, done: int, config: Any, placement: Placement, about: dict[str, Any]
) -> None:
    """Cuts what came after step `done` and writes the run's settings; each file changes whole."""
    for name in ("metrics.jsonl", "samples.jsonl"):
        cut_to_step(out / name, done if done else -1)
    texts = {
        "settings.toml": to_toml(dataclasses.replace(config, resume=False)),
        "placement.toml": placement.to_toml(),
        "run.json": json.dumps(about, indent=1) + "\n",
    }
    for name, text in texts.items():
        (out / f"{name}.new").write_text(text)
        os.replace(out / f"{name}.new", out / name)


def began(out: Path, *, resume: bool) -> datetime:
    """When the run in `out` was first started: prompts carry no later date, also when resumed."""
    file = out / "run.json"
    if not (resume and file.exists()):
        return datetime.now()
    found = _about(out)["began"]
    try:
        return datetime.fromisoformat(found)
    except ValueError as error:
        raise ValueError(f"{file}: began={found!r:.60} is no date and time") from error


def _about(out: Path) -> dict[str, Any]:
    """What run.json says of a run."""
    about = read_json(out / "run.json")
    for name in ("algorithm", "model", "began"):
        if not isinstance(about.get(name), str):
            raise ValueError(
                f"{out / 'run.json'}: {name}={about.get(name)!r:.60} must be a text: the file is "
                "damaged; mend it or start a new run in another directory"
            )
    return about


def _check_same_run(out: Path, config: Any, about: dict[str, Any]) -> None:
    """Refuses to continue another run: only FREE_ON_RESUME may differ from its settings."""
    saved = _about(out)
    pairs = {name: (saved.get(name), value) for name, value in about.items() if name != "frozen"}
    if saved["algorithm"] != about["algorithm"]:
        was, now = pairs["algorithm"]
        raise ValueError(f"out={out} holds a run of {was}, not of {now}; choose another directory")
    marks = saved.get("frozen")
    marks = marks if isinstance(marks, dict) else {}
    changed = [role for role, mark in about["frozen"].items() if marks.get(role, mark) != mark]
    if changed:
        raise ValueError(
            f"out={out}: the weights of {' and '.join(changed)}, which nothing trains, are not "
            "those that this run began with; put them back or choose another directory"
        )
    before = flat(read_toml(out / "settings.toml"))
    after = flat(tomllib.loads(to_toml(config)))
    for name in sorted(before.keys() | after.keys()):
        if name not in FREE_ON_RESUME:
            pairs[name] = (before.get(name), after.get(name))
    differ = [f"{name} was {a!r}, is {b!r}" for name, (a, b) in pairs.items() if a != b]
    if differ:
        raise ValueError(
            f"out={out} holds another run: {'; '.join(differ)}; resume with the same "
            f"settings (free are {', '.join(FREE_ON_RESUME)}) or choose another directory"
        )


def export_run(run: str | Path, directory: str | Path, *, best: bool = False) -> None:
    """Writes the actor, or what was trained, of a run as a Hugging Face directory.

    That of the last checkpoint, or the `best` by the run's `keep_best`.
    """
    run = Path(run)
    if not (run / "run.json").is_file():
        raise ValueError(f"RUN={run} holds no run.json: it is not a run's directory")
    about = _about(run)
    algorithm = load_algorithm(about["algorithm"])
    file = run / "settings.toml"
    config = from_dict(config_class(algorithm), read_toml(file), where=str(file))
    directory = _new_directory(Path(directory))
    store = CheckpointStore(run / "checkpoints", config.keep_last, config.keep_best)
    step = store.best() if best else store.latest(contents=False)  # which names those left out
    if step is None:
        of = f" with a value of keep_best={config.keep_best!r}" if best else ""
        raise ValueError(f"RUN={run} has no whole checkpoint{of} to export")
    roles = algorithm.roles(config.algorithm)
    role = main_role(roles)
    model, head = about["model"], role_class(roles[role]).head
    shapes, _ = abstract_params(load_config(model), head)
    here = SingleDeviceSharding(jax.devices("cpu")[0])  # host memory, whatever holds the run
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), shapes)
    older = [] if best else [other for other in store.steps() if other < step]
    step, saved = _restored(store, [step, *reversed(older)], role, {"params": wanted})
    with _whole(directory) as new:
        save_hf(saved["params"], load_config(model), head, model, new)
        if model.endswith(".gguf"):
            load_tokenizer(model).save(new)
    print(f"wrote the {role} of step {step} to {directory}")


def _restored(
    store: CheckpointStore, steps: Sequence[int], role: str, wanted: Any
) -> tuple[int, Any]:
    """The first of the steps whose arrays of the role are as they were written, and those."""
    for step in steps[:-1]:
        try:
            return step, restore_role(store.path(step) / role, wanted, whole=False)
        except ValueError as error:
            log.warning("%s; the one before it is used", error)
    return steps[-1], restore_role(store.path(steps[-1]) / role, wanted, whole=False)


def _new_directory(directory: Path) -> Path:
    """Where an export goes, refused where it could not be put there whole."""
    where, directory = f"DIR={directory}", directory.resolve()
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{where} is a file; choose a new directory")
    if directory.is_dir() and any(directory.iterdir()):
        raise ValueError(f"{where} is not empty; choose a new directory")
    if directory.is_mount():
        raise ValueError(f"{where} is a mount point; choose a new directory inside it")
    if (new := _unfinished(directory)).exists():
        raise ValueError(f"{where}: {new} is left from an export that was killed; remove it")
    return directory


def _unfinished(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.tmp")


@contextmanager
def _whole(directory: Path) -> Iterator[Path]:
    """A directory to write to, which gets its name at the end; after a failure nothing is left."""
    new = _unfinished(directory)
    try:
        new.mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"DIR={directory}: {new} cannot be made: {error.strerror}") from error
    try:
        yield new
        os.rename(new, directory)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
