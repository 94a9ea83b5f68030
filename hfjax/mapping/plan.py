# SPDX-License-Identifier: Apache-2.0
"""`hfjax plan`: the best placements of an algorithm's step on some devices, with reasons."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from hfjax.algorithm import dataflow, main_role
from hfjax.mapping.devices import Cluster, load_profile, parse_devices
from hfjax.mapping.options import Pricer
from hfjax.mapping.report import (
    objectives_text,
    placement_of,
    plans_table,
    rejected_text,
    timeline_text,
)
from hfjax.mapping.search import Found, search
from hfjax.mapping.simulate import write_trace
from hfjax.mapping.work import Model, Problem, Workload, problem
from hfjax.models.shapes import model_shape
from hfjax.rewards import FunctionReward
from hfjax.roles import ModelRole, Reward, TrainedRole, role_class

FUNCTION = "function"  # the reward "model" that is none
AUTO = "auto"
DEFAULT_DEVICE = "a100-80g"
MOST_DEVICES = 1024  # that auto tries


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What is planned for; rows are all as long as the longest may be."""

    devices: str = AUTO  # 16xa100-80g, 8xa100-80g+8xh100; auto or autoxh100: the fewest that fit
    model: str = "llama2-7b"  # of actor and reference: a known shape, a config.json or a model
    critic: str = ""  # of trained roles beside it, and of score models; empty: model
    reward: str = ""  # of score models; empty: critic; function: Python code beside the driver
    objective: Literal["time", "cost", "paper"] = "time"  # seconds, device-seconds, or d_cost
    profile: str = "hfjax"  # what an engine adds to the devices' time
    host: str = ""  # a file that `hfjax calibrate` wrote, with more devices
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of computation
    prompts: int = 1024  # a step
    n: int = 1  # responses a prompt
    prompt_tokens: int = 1024
    response_tokens: int = 1024
    updates: int = 8  # optimizer updates of a trained role a step and epoch
    epochs: int = 1
    out: str = ""  # the placement file to write
    trace: str = ""  # the timeline of the best to write, for Perfetto
    verify: bool = False  # compile the best ahead of time and compare

    def __post_init__(self) -> None:
        for name in ("prompts", "n", "prompt_tokens", "response_tokens", "updates", "epochs"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name}={value}: must be 1 or more")
        rows = self.prompts * self.n
        if rows % self.updates:
            legal = [k for k in range(1, rows + 1) if rows % k == 0]
            near = sorted(sorted(legal, key=lambda k: abs(k - self.updates))[:5])
            raise ValueError(
                f"updates={self.updates} does not divide the {rows} rows of a step (prompts x n); "
                f"use one of {', '.join(map(str, near))}"
            )

    @property
    def work(self) -> Workload:
        names = [field.name for field in dataclasses.fields(Workload)]
        return Workload(**{name: getattr(self, name) for name in names})


def plan_class(algorithm: ModuleType) -> type:
    """PlanConfig with the algorithm's own settings."""
    settings = algorithm.Settings
    fields = [("algorithm", settings, dataclasses.field(default=settings()))]
    cls = dataclasses.make_dataclass(
        PlanConfig.__name__, fields, bases=(PlanConfig,), frozen=True, kw_only=True
    )
    cls.__module__ = PlanConfig.__module__  # --help reads the comments in that class's source
    return cls


def planned(algorithm: ModuleType, config: Any) -> Problem:
    """The algorithm's step with the models and sizes of a PlanConfig."""
    roles: Mapping[str, partial[Any]] = algorithm.roles(config.algorithm)
    main = main_role(roles)
    critic = config.critic or config.model
    reward = config.reward or critic
    scores = [role for role, b in roles.items() if issubclass(role_class(b), Reward)]
    if reward == FUNCTION:
        roles = {r: partial(FunctionReward) if r in scores else b for r, b in roles.items()}
    models: dict[str, Model] = {}
    for role, builder in roles.items():
        kind = role_class(builder)
        if not issubclass(kind, ModelRole):
            continue
        trained = issubclass(kind, TrainedRole)
        setting, name = "model", config.model
        if role in scores:
            setting, name = "reward", reward
        elif trained and role != main:
            setting, name = "critic", critic
        shape = model_shape(name, setting)
        models[role] = Model(config=shape, head=kind.head, trained=trained)
    functions = scores if reward == FUNCTION else []
    agrees = config.dtype == "float32"
    nodes = dataflow(algorithm, config.algorithm, functions, agrees=agrees)
    return problem(nodes, models, config.work)


def cluster_of(config: Any, options: Pricer) -> Cluster:
    """The devices that are planned for; `auto` grows the fewest that hold every role."""
    files = [config.host] if config.host else []
    kind = config.devices.removeprefix(AUTO)
    if kind == config.devices:
        return parse_devices(config.devices, *files)
    name = kind.removeprefix("x") or DEFAULT_DEVICE
    ((device, _),) = parse_devices(f"1x{name}", *files)
    roles = options.problem.models
    for count in range(1, MOST_DEVICES + 1):
        cluster = ((device, count),)
        if all(options.options(role, device, count) for role in roles):
            try:
                search(options.problem, cluster, options.options, objective="cost", keep=1)
            except ValueError:
                continue
            return cluster
    raise ValueError(
        f"devices={config.devices}: {MOST_DEVICES} x {name} do not hold the models; "
        "name the devices, or take a larger kind"
    )


def plan(algorithm: ModuleType, config: Any) -> str:
    """The text that `hfjax plan` prints; writes the files that were asked for."""
    task = planned(algorithm, config)
    if not task.models:
        raise ValueError(f"{algorithm.__name__}: no call of a step runs on devices")
    itemsize = 2 if config.dtype == "bfloat16" else 4
    profile = load_profile(config.profile)
    pricer = Pricer(problem=task, profile=profile, itemsize=itemsize)
    cluster = cluster_of(config, pricer)
    founds: dict[str, Found] = {}
    for objective in dict.fromkeys((config.objective, "time", "paper")):
        founds[objective] = search(task, cluster, pricer.options, objective=objective)
    found = founds[config.objective]
    best = found.best
    text = "\n\n".join(
        (
            _head(config, task, cluster),
            plans_table(found, task, cluster),
            objectives_text(founds),
            "the best, simulated; one iteration among others\n" + timeline_text(best),
            "not among them\n" + rejected_text(found.rejected),
        )
    )
    placement = placement_of(best, cluster, task.work)
    if config.out:
        Path(config.out).write_text(placement.to_toml())
        text += f"\n\nplacement written to {config.out}"
    else:
        text += f"\n\n{placement.to_toml()}"
    if config.trace:
        write_trace(config.trace, best.played)
        text += f"\ntimeline written to {config.trace}"
    return text


def _head(config: Any, task: Problem, cluster: Cluster) -> str:
    work = task.work
    on = " + ".join(f"{count} x {device.name}" for device, count in cluster)
    return (
        f"simulated: {on}, profile {config.profile}, {config.dtype}; a step of {work.prompts} "
        f"prompts x {work.n}, {work.prompt_tokens} + {work.response_tokens} tokens, "
        f"{work.updates} updates"
    )
