# SPDX-License-Identifier: Apache-2.0
"""`hfjax plan`: the best placements of an algorithm's step on some devices, with reasons."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Literal

from hfjax.algorithm import dataflow, main_role
from hfjax.mapping.work import Model, Problem, Workload, problem
from hfjax.models.shapes import model_shape
from hfjax.rewards import FunctionReward
from hfjax.roles import ModelRole, Reward, TrainedRole, role_class

FUNCTION = "function"  # the reward "model" that is none
AUTO = "auto"


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
