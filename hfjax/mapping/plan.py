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
from hfjax.items import PROMPTS
from hfjax.mapping.devices import Cluster, load_profile, parse_devices, slowest
from hfjax.mapping.options import Pricer
from hfjax.mapping.partitions import set_partitions
from hfjax.mapping.prices import Objective
from hfjax.mapping.report import (
    counted,
    objectives_text,
    placement_of,
    plans_table,
    rejected_text,
    timeline_text,
)
from hfjax.mapping.search import Found, Plan, needs_of, search
from hfjax.mapping.simulate import write_trace
from hfjax.mapping.verify import jobs, table, verify
from hfjax.mapping.work import Model, Problem, Workload, problem
from hfjax.models.shapes import model_shape
from hfjax.rewards import FunctionReward
from hfjax.roles import ModelRole, Reward, TrainedRole, role_class
from meshes.layouts import divisors
from meshes.placement import Placement
from meshes.toml import bare_key

FUNCTION = "function"  # the reward "model" that is none
AUTO = "auto"
MOST_ROWS = 2**22  # of a step
DEFAULT_DEVICE = "a100-80g"


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

    def check(self) -> None:
        """Refuses what cannot be planned, before anything is."""
        for name in ("prompts", "n", "prompt_tokens", "response_tokens", "updates", "epochs"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name}={value}: must be 1 or more")
        rows = self.prompts * self.n
        if rows > MOST_ROWS:
            raise ValueError(f"prompts={self.prompts} x n={self.n}: use at most {MOST_ROWS} rows")
        if rows % self.updates:
            near = sorted(sorted(divisors(rows), key=lambda k: abs(k - self.updates))[:5])
            raise ValueError(
                f"updates={self.updates} does not divide the {rows} rows of a step (prompts x n); "
                f"use one of {', '.join(map(str, near))}"
            )
        for name in ("out", "trace"):
            path = Path(value := getattr(self, name))
            if value and (path.exists() or not path.parent.is_dir()):
                raise ValueError(f"{name}={value}: must be a new file in a directory that exists")

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
        together = builder.keywords.get("rows_together", 1)
        models[role] = Model(config=shape, head=kind.head, trained=trained, rows_together=together)
    functions = scores if reward == FUNCTION else []
    agrees = config.dtype == "float32"
    nodes = dataflow(algorithm, config.algorithm, functions, agrees=agrees)
    kind = getattr(algorithm, "DATA", PROMPTS)  # an item of pairs is two rows
    work = dataclasses.replace(config.work, n=config.n * kind.rows)
    _check(work, models)
    return problem(nodes, models, work)


def _check(work: Workload, models: Mapping[str, Model]) -> None:
    """Refuses rows that a model has no positions for."""
    for role, model in models.items():
        if work.row_tokens > (most := model.config.max_positions):
            raise ValueError(
                f"prompt_tokens={work.prompt_tokens} + response_tokens={work.response_tokens}: "
                f"the {role}'s model has {most} positions; use fewer tokens"
            )


def cluster_of(config: Any, pricer: Pricer) -> Cluster:
    """The devices that are planned for; `auto`: the fewest that hold every role."""
    files = [config.host] if config.host else []
    kind = config.devices.removeprefix(AUTO)
    if kind == config.devices:
        return parse_devices(config.devices, *files)
    ((device, _),) = parse_devices(f"1x{kind.removeprefix('x') or DEFAULT_DEVICE}", *files)
    needs = needs_of(pricer.problem, ((device, 1),), pricer.options)
    fits = [needs.fewest(sets) for sets in set_partitions(tuple(pricer.problem.models))]
    if not any(fits):
        raise ValueError(needs.refusal(()))
    return ((device, min(count for count in fits if count)),)


def plan(algorithm: ModuleType, config: Any) -> str:
    """The text that `hfjax plan` prints; writes the files that were asked for."""
    config.check()
    task = planned(algorithm, config)
    if not task.models:
        raise ValueError(f"{algorithm.__name__}: no call of a step runs on devices")
    itemsize = 2 if config.dtype == "bfloat16" else 4
    pricer = Pricer(problem=task, profile=load_profile(config.profile), itemsize=itemsize)
    cluster = cluster_of(config, pricer)
    founds = {
        objective: searched(pricer, cluster, objective)
        for objective in dict.fromkeys((config.objective, "time", "paper"))
    }
    found = founds[config.objective]
    if isinstance(found, ValueError):
        raise found
    parts = [_head(config, task, cluster), plans_table(found, task, cluster)]
    if len(cluster) > 1:
        parts.append(_as_if_equal(pricer, cluster, config.objective, found.best))
    parts += [
        objectives_text(founds),
        "the best, simulated: an iteration among others\n" + timeline_text(found.best),
    ]
    if found.rejected:
        parts.append("not among them\n" + rejected_text(found.rejected))
    if config.verify:
        parts.append(_verified(task, cluster, found.best))
    parts.append(
        _written(config, placement_of(found.best, cluster, task.work), cluster, found.best)
    )
    return "\n\n".join(parts)


def searched(pricer: Pricer, cluster: Cluster, objective: Objective) -> Found | ValueError:
    """What an objective chooses; the refusal where nothing fits."""
    pricer = dataclasses.replace(pricer, one_layout=objective == "paper")
    moved = partial(pricer.columns_s, cluster)
    try:
        return search(
            pricer.problem, cluster, pricer.options, objective=objective, transfer_s=moved
        )
    except ValueError as error:
        return error


def _head(config: Any, task: Problem, cluster: Cluster) -> str:
    work = task.work
    on = " + ".join(f"{count} x {device.name}" for device, count in cluster)
    return (
        f"simulated: {on}, profile {config.profile}, {config.dtype}; a step of {work.prompts} "
        f"prompts x {work.n}, {work.prompt_tokens} + {work.response_tokens} tokens, "
        f"{work.updates} updates"
    )


def _as_if_equal(pricer: Pricer, cluster: Cluster, objective: Objective, best: Plan) -> str:
    """What the best plan for a mixed cluster gains over taking every device for the worst."""
    worst = slowest([device for device, _ in cluster])
    count = sum(count for _, count in cluster)
    other = searched(pricer, ((worst, count),), objective)
    name = f"taken for {count} equal devices, each as slow and small as the worst"
    if isinstance(other, ValueError):
        return f"{name}: nothing fits"
    gain = other.best.seconds / best.seconds
    return f"{name}: {other.best.seconds:.1f} s a step, {gain:.2f} times as long"


def _verified(task: Problem, cluster: Cluster, best: Plan) -> str:
    """Finalists are compiled: what a device holds and moves, predicted and compiled."""
    tables = []
    for pool in best.pools:
        kinds = [d for (d, _), n in zip(cluster, pool.devices, strict=True) if n]
        for role, option in pool.options.items():
            made = jobs(role, task.models[role], option, task.work)
            rows = verify(made, slowest(kinds).memory_bytes)
            tables.append(f"{role}, compiled for {sum(pool.devices)} devices\n{table(rows)}")
    return "\n\n".join(tables)


def _written(config: Any, placement: Placement, cluster: Cluster, best: Plan) -> str:
    """The placement, or where it is now; of which kind each pool is, where there are several."""
    kinds = [
        f"# [pool.{bare_key(pool)}] is for {counted(each, cluster)}\n"
        for pool, each in zip(placement.pools, best.pools, strict=True)
    ]
    text = "".join([*(kinds if len(cluster) > 1 else ()), placement.to_toml()])
    lines = [text]
    if config.out:
        Path(config.out).write_text(text)
        lines = [f"placement: {config.out}"]
    if config.trace:
        write_trace(config.trace, best.played)
        lines.append(f"timeline: {config.trace}")
    return "\n".join(lines)
