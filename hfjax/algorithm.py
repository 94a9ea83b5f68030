# SPDX-License-Identifier: Apache-2.0
"""Finds an algorithm's module by name, and the settings that a run of it has.

A module has Settings, roles(cfg) and step(m, prompts, cfg). It may have DATA, the kind of its rows
(hfjax.items); check(config), which refuses settings of a whole run before anything starts; and
evaluate(m, batch, cfg), named numbers (one a row, or one a pair; NaN: none) whose means are
reported, a mean for each data_source.
"""

import dataclasses
import importlib
import importlib.util
import re
import sys
import typing
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from hfjax.batch import Batch
from hfjax.config import SECTIONS, CriticConfig, RunConfig, TrainingConfig, setting_names
from hfjax.controller.graph import Node, trace
from hfjax.items import PROMPTS, Example, Pair, Prompt
from hfjax.rewards import FunctionCost, FunctionReward
from hfjax.roles import TrainedRole, role_class

PARTS = ("Settings", "roles", "step")  # what makes a module an algorithm


def algorithm_names() -> list[str]:
    """The algorithms that ship with the package."""
    spec = importlib.util.find_spec("algorithms")
    folders = (spec.submodule_search_locations or []) if spec else []
    return sorted(p.stem for f in folders for p in Path(f).glob("*.py") if p.stem != "__init__")


def load_algorithm(name: str) -> ModuleType:
    """The module called `name`: ppo, package.module, or a path to a .py file."""
    if name.endswith(".py"):
        module = _from_file(Path(name).resolve())
    else:
        module = _from_package(name if "." in name else f"algorithms.{name}", name)
    missing = [part for part in PARTS if not hasattr(module, part)]
    if missing:
        raise ValueError(f"algorithm={name}: {module.__name__} lacks {', '.join(missing)}")
    return module


def algorithm_name(module: ModuleType) -> str:
    """The name by which load_algorithm finds the module again."""
    name = module.__name__
    if "." in name or module.__file__ is None:
        return name.removeprefix("algorithms.")
    return module.__file__


def main_role(roles: Mapping[str, Any]) -> str:
    """The role that is evaluated and exported: the actor, or the one that is trained."""
    trained = [role for role, b in roles.items() if issubclass(role_class(b), TrainedRole)]
    if not trained:
        raise ValueError(f"roles() has {', '.join(roles)}: none of them is trained")
    return "actor" if "actor" in trained else trained[0]


def dataflow(
    algorithm: ModuleType, settings: Any, scores: Collection[str] = (), *, agrees: bool = False
) -> list[Node]:
    """The calls of one step under these settings, from two prompts of two answers each.

    `scores` names the roles whose scores are a function's (reward, cost), not a model's; where
    rollout and training agree (`agrees`), the step is one that does not score what was sampled.
    """
    kind = getattr(algorithm, "DATA", PROMPTS)
    example = Example([1, 2, 3], [False, True, True])
    item = {"prompts": Prompt([1, 2], "", "", ""), "pairs": Pair(example, example)}.get(
        kind.name, example
    )
    given = Batch(kind.collate([item, item], 2 // kind.rows))
    functions = {"reward": partial(FunctionReward), "cost": partial(FunctionCost)}
    builders = algorithm.roles(settings) | {role: functions[role] for role in scores}
    return trace(algorithm.step, builders, settings, given, agrees=agrees)


def config_class(algorithm: ModuleType) -> type:
    """RunConfig plus the sections that the algorithm's roles use, plus its own Settings."""
    settings = algorithm.Settings
    try:
        roles = algorithm.roles(settings())
    except TypeError as error:
        raise ValueError(
            f"{algorithm.__name__}: Settings() must work with defaults alone: {error}"
        ) from error
    trained = [role for role, b in roles.items() if issubclass(role_class(b), TrainedRole)]
    kinds = {"data": SECTIONS["data"]} | dict.fromkeys(trained, CriticConfig)
    kinds |= {main_role(roles): TrainingConfig} if trained else {}
    kinds |= {n: SECTIONS[n] for n in ("reward", "rollout") if "reward" in roles}
    kinds |= {n: SECTIONS[n] for n in ("cost",) if "cost" in roles}
    fields = [(n, kind, dataclasses.field(default=kind())) for n, kind in kinds.items()]
    fields.append(("algorithm", settings, dataclasses.field(default=settings())))
    cls = dataclasses.make_dataclass(
        RunConfig.__name__, fields, bases=(RunConfig,), frozen=True, kw_only=True
    )
    cls.__module__ = RunConfig.__module__  # --help reads the comments in that class's source
    for name, kind in setting_names(cls).items():
        if type(None) in typing.get_args(kind):
            raise ValueError(f"setting {name}: TOML has no None; let a value such as 0 mean off")
    return cls


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"algorithm={path}: no such file")
    # random.py must not hide the library's; workers cannot import the name: they get it by value
    name = "algorithm_" + re.sub(r"\W", "_", path.stem)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.append(str(path.parent))  # its neighbours
    spec.loader.exec_module(module)
    return module


def _from_package(full: str, name: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path:  # where `python -m` looks, and a console script does not
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(full)
    except ModuleNotFoundError as error:
        parents = {full[:i] for i, c in enumerate(full) if c == "."} | {full}
        if error.name not in parents:
            raise
    shipped = ", ".join(algorithm_names())
    raise ValueError(
        f"algorithm={name}: no module {full}; use one of {shipped}, package.module or a .py file"
    )
