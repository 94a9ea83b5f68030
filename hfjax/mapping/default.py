# SPDX-License-Identifier: Apache-2.0
"""The placement of a run that names none: planned for the devices of this host."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

from hfjax.algorithm import dataflow, main_role
from hfjax.config import TrainingConfig
from hfjax.engine.microbatch import legal_micro_sequences
from hfjax.mapping.devices import load_devices, load_profile
from hfjax.mapping.options import Pricer
from hfjax.mapping.report import placement_of
from hfjax.mapping.search import search
from hfjax.mapping.work import Model, Problem, Workload, problem
from hfjax.models.hf import load_config
from hfjax.roles import ModelRole, TrainedRole, role_class
from meshes.layouts import either
from meshes.placement import Placement, RolePlacement

log = logging.getLogger(__name__)

PROFILE = "hfjax"
KINDS = {  # jax's device_kind without its maker: those whose links devices.toml has
    "A100-SXM4-80GB": "a100-80g",
    "A100-SXM4-40GB": "a100-40g",
    "A800-SXM4-80GB": "a800-80g",
    "H100 80GB HBM3": "h100",
    "H200": "h200",
}


@dataclass(frozen=True)
class Found:
    """The devices that JAX finds on this host."""

    platform: str | None  # None: this process's, whatever it is
    kind: str  # as JAX calls it
    count: int


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a step of a run is made of; lengths are the longest there can be."""

    prompts: int
    n: int
    prompt_tokens: int
    row_tokens: int


def default_placement(
    algorithm: ModuleType,
    settings: Any,
    builders: Mapping[str, partial[Any]],
    sizes: Sizes,
    found: Found,
    check: Callable[[Placement], Any],
) -> Placement | None:
    """The quickest placement on the devices found that passes the run's own `check`.

    `settings` are the algorithm's, `builders` its roles with a run's bound. None, with a line that
    says why, where nothing can be planned; one device, and simulated ones, which share their cores,
    are not worth a line.
    """
    if found.kind == "cpu" or found.count == 1:
        return None
    name = KINDS.get(found.kind.removeprefix("NVIDIA "))
    if name is None:
        return _unplanned(f"the mapper knows {either(KINDS)}, and no {found.kind!r}")
    device = load_devices()[name]
    device = replace(device, node=max(device.node, found.count))  # one machine
    main = builders[main_role(builders)]
    task = _problem(algorithm, settings, builders, sizes)
    itemsize = 4 if main.keywords["training"].compute_dtype == "float32" else 2
    pricer = Pricer(problem=task, profile=load_profile(PROFILE), itemsize=itemsize)
    cluster = ((device, found.count),)
    try:
        moved = partial(pricer.columns_s, cluster)
        plans = search(task, cluster, pricer.options, transfer_s=moved).plans
    except ValueError as error:
        return _unplanned(str(error))
    refusal: ValueError | None = None
    for plan in plans:
        planned = placement_of(plan, cluster, task.work)
        roles = {
            role: _cut(place, builders[role], task.work.rows)
            for role, place in planned.roles.items()
        }
        placement = Placement(planned.pools, roles, found.platform)
        try:
            check(placement)
        except ValueError as error:
            refusal = error
            continue
        return placement
    return _unplanned(f"what was planned does not suit the run: {refusal}")


def _unplanned(why: str) -> None:
    log.warning("no placement planned, every role is on all devices: %s", why)


def _problem(
    algorithm: ModuleType, settings: Any, builders: Mapping[str, partial[Any]], sizes: Sizes
) -> Problem:
    """The run's step as the mapper takes it."""
    training: TrainingConfig = builders[main_role(builders)].keywords["training"]
    rows = sizes.prompts * sizes.n
    work = Workload(
        prompts=sizes.prompts,
        n=sizes.n,
        prompt_tokens=sizes.prompt_tokens,
        response_tokens=sizes.row_tokens - sizes.prompt_tokens,
        updates=rows // (training.minibatch_sequences or rows),
        epochs=training.epochs,
    )
    models: dict[str, Model] = {}
    for role, builder in builders.items():
        kind = role_class(builder)
        if issubclass(kind, ModelRole):
            config = load_config(builder.keywords["model"])
            trained = issubclass(kind, TrainedRole)
            together = builder.keywords.get("rows_together", 1)
            models[role] = Model(
                config=config, head=kind.head, trained=trained, rows_together=together
            )
    functions = [role for role in builders if role not in models]
    agrees = bool(builders[main_role(builders)].keywords.get("measured_loss"))
    nodes = dataflow(algorithm, settings, functions, agrees=agrees)
    return problem(nodes, models, work)


def _cut(place: RolePlacement, builder: partial[Any], rows: int) -> RolePlacement:
    """With the micro-batch that the role's own mini-batch can be cut into, the nearest below."""
    if not place.micro_sequences:
        return place
    training: TrainingConfig = builder.keywords["training"]
    unit = place.replicas * builder.keywords.get("rows_together", 1)
    legal = legal_micro_sequences(training.minibatch_sequences or rows, unit)
    below = [size for size in legal if size <= place.micro_sequences]
    return replace(place, micro_sequences=max(below, default=min(legal, default=0)))
