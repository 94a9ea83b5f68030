# SPDX-License-Identifier: Apache-2.0
"""What a run will do, checked on the driver: no process has been started, no file written."""

import dataclasses
import logging
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from hfjax.actor import Actor, stop_ids
from hfjax.algorithm import main_role
from hfjax.config import CriticConfig, RolloutConfig, TrainingConfig
from hfjax.controller.handle import NO_COPY
from hfjax.data import HeldOut, Source, extent, make_sources, make_texts
from hfjax.engine.microbatch import check_micro_sequences, check_micro_tokens
from hfjax.items import PROMPTS
from hfjax.mapping.default import Found, Sizes, default_placement
from hfjax.models.hf import check_files, load_config, resolve_model
from hfjax.reward_process import place_of
from hfjax.rewards import FunctionCost, FunctionReward
from hfjax.roles import (
    Cost,
    ModelRole,
    Reward,
    TrainedRole,
    check_model,
    role_class,
)
from hfjax.tokenizer import check_vocabulary, load_tokenizer
from meshes.layouts import either
from meshes.placement import Placement, load_placement, single_pool

log = logging.getLogger(__name__)

LOOK_TIMEOUT_S = 120
EVAL_ROWS = 64  # an evaluation batch has these, or a step's rows where they are more


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A run whose settings, model, data and placement fit together."""

    config: Any
    model: str  # its files, absolute
    source: Source  # of training batches
    held_out: HeldOut | None
    texts: Source | None  # of a pretraining loss
    n: int  # rows a prompt
    steps: int
    builders: Mapping[str, partial[Any]]  # a role's class with its settings
    placement: Placement

    @property
    def rollout(self) -> RolloutConfig | None:
        """None where nothing is generated."""
        return getattr(self.config, "rollout", None)

    @property
    def rows(self) -> int:
        """Rows of a step."""
        return self.config.data.prompts_per_step * self.n

    @property
    def eval_items(self) -> int:
        """Items of an evaluation batch: 64 rows' or a step's, no more than there are."""
        if self.held_out is None:
            return 0
        items = max(EVAL_ROWS, self.rows) // self.held_out.rows
        return min(items, len(self.held_out.items))

    @property
    def main(self) -> str:
        """The role that is evaluated and exported."""
        return main_role(self.builders)

    @property
    def rollout_agrees(self) -> bool:
        """Whether updates measure, so that no pass before them has to."""
        return bool(self.builders[self.main].keywords.get("measured_loss"))

    @property
    def trained(self) -> list[str]:
        """Roles with a training state."""
        return [k for k, b in self.builders.items() if issubclass(role_class(b), TrainedRole)]

    def frozen(self) -> dict[str, str]:
        """The models of roles that read the same weights whenever the run starts or resumes."""
        builders = {k: b for k, b in self.builders.items() if k in self.placement.roles}
        read = {k: b.keywords for k, b in builders.items() if k not in self.trained}
        return {role: kw["model"] for role, kw in read.items() if not kw.get("random")}

    def sizes(self) -> str:
        """What a step is made of: prompts x n -> rows -> mini-batch -> micro-batch."""
        prompts = self.config.data.prompts_per_step
        parts = [f"a step: {prompts} prompts x {self.n} = {self.rows} rows"]
        for role in self.trained:
            t = self.builders[role].keywords["training"]
            mini = t.minibatch_sequences or self.rows
            micro = f"{t.micro_tokens} tokens" if t.micro_tokens else t.micro_sequences or mini
            updates = t.epochs * (self.rows // mini)
            again = f", remat {t.remat}" if t.remat != "none" else ""
            parts.append(f"{role}: {updates} x {mini} rows an update, {micro} a micro-batch{again}")
            if waves := self.placement.roles[role].generate_sequences:
                parts.append(f"{role} generates {waves} rows at a time")
        return f"{'; '.join(parts)}; {self.steps} steps"


def prepare(algorithm: ModuleType, config: Any, now: datetime) -> Plan:
    """The plan of a run that began at `now`; ValueError names what cannot work."""
    if config.runtime == "ray":
        jax.config.update("jax_platforms", "cpu")  # the accelerators are the workers'
    getattr(algorithm, "check", lambda config: None)(config)
    rollout = getattr(config, "rollout", None)
    kind = getattr(algorithm, "DATA", PROMPTS)
    n = rollout.n if rollout else kind.rows
    model = _files(config.model, "model")
    about = Path(model) / "tokenizer_config.json"
    if about.parent.is_dir() and not about.is_file():
        log.warning("%s is missing: BOS, EOS and the chat template are not known", about)
    data = config.data
    if rollout and all(each.model for each in _scores(config)):
        data = dataclasses.replace(data, answer_key="")  # score models need no answers
    copies = n // kind.rows
    source, held_out = make_sources(data, model, kind=kind, n=copies, seed=config.seed, now=now)
    if config.eval_every and held_out is None:
        raise ValueError(f"eval_every={config.eval_every}: set data.eval too, or leave it 0")
    steps = config.steps or config.epochs * source.steps_per_epoch
    rows = config.data.prompts_per_step * n
    builders = _builders(algorithm.roles(config.algorithm), config, model, (rows, steps))
    if config.placement:
        found, placement = None, _named_placement(config, builders)
    else:
        found = _devices_found(config.runtime)
        placement = _all_devices(builders, found)
    plan = Plan(
        config=config,
        model=model,
        source=source,
        held_out=held_out,
        texts=_texts(config, builders, model),
        n=n,
        steps=steps,
        builders=builders,
        placement=placement,
    )
    sizes, highest_id = _extent(plan)
    check = partial(_placed, plan, sizes.row_tokens, highest_id)
    if found:
        what = algorithm, config.algorithm, builders
        placement = default_placement(*what, sizes, found, check) or placement
    plan = check(placement)
    for builder in (builders[role] for role in plan.placement.roles):
        _check_weights(builder)
        if (other := builder.keywords["model"]) != model:
            check_vocabulary(load_tokenizer(model), load_tokenizer(other))
    if rollout:
        _check_stops(model, rollout)
    return plan


def _placed(plan: Plan, tokens: int, highest_id: int, placement: Placement) -> Plan:
    """The plan on a placement that its models, rows and micro-batches fit."""
    builders = _sized(plan.builders, placement)
    plan = dataclasses.replace(plan, builders=builders, placement=placement)
    for role in plan.trained:
        _check_micro(plan, role, tokens)
    for role, place in placement.roles.items():
        if place.generate_sequences:
            _check_waves(plan, role)
        check_model(builders[role], place, tokens, highest_id)
        if second := placement.rollout(role):
            if not builders[role].keywords.get("rollout"):
                raise ValueError(f"[{role}] generate_pool: {NO_COPY}")
            try:
                check_model(builders[role], second, tokens, highest_id)
            except ValueError as error:
                where = f"[{role}] generate on the devices of [pool.{second.pool}]"
                raise ValueError(f"{where}: {error}") from error
    return plan


def _builders(
    roles: Mapping[str, Any], config: Any, model: str, size: tuple[int, int]
) -> dict[str, partial[Any]]:
    """The algorithm's roles with the run's settings bound; `size` is rows of a step, and steps."""
    rollout = getattr(config, "rollout", None)
    weights = {"model": model, "random": config.init == "random", "seed": config.seed}
    bound: dict[str, partial[Any]] = {}
    for role, builder in roles.items():
        kind = role_class(builder)
        if issubclass(kind, TrainedRole):
            if not hasattr(config, role):
                raise ValueError(
                    f"role {role!r} is trained and has no settings: roles(Settings()), of the "
                    "defaults, must name it too"
                )
            updates = 1 if builder.keywords.get("pretrain") else 0
            training = _training(role, getattr(config, role), *size, updates)
            more: dict[str, Any] = {}
            if issubclass(kind, Actor):
                more |= {"rollout": rollout}
                if rollout and not _agrees(kind, training, rollout):
                    more |= {"measured_loss": None}
            if isinstance(training, CriticConfig) and training.model:
                more["model"] = _files(training.model, f"{role}.model")
            bound[role] = partial(builder, **(weights | more), training=training)
        elif issubclass(kind, Reward):
            bound[role] = _reward(builder, getattr(config, kind.section), model)
        elif issubclass(kind, ModelRole):
            temperature = rollout.temperature if rollout else 1.0
            dtype = getattr(config, main_role(roles)).compute_dtype
            bound[role] = partial(builder, **weights, compute_dtype=dtype, temperature=temperature)
        else:
            bound[role] = builder
    return bound


def _files(name: str, setting: str) -> str:
    """A model's files, absolute: workers may run in another directory."""
    return str(resolve_model(name, setting).resolve())


def _training(role: str, training: Any, rows: int, steps: int, more: int) -> Any:
    """The settings with the schedule sized in this run's optimizer updates, `more` a step."""
    minibatch = training.minibatch_sequences or rows
    if rows % minibatch:
        legal = [k for k in range(1, rows + 1) if rows % k == 0]
        raise ValueError(
            f"{role}.minibatch_sequences={minibatch} does not divide the {rows} rows of a step "
            f"(data.prompts_per_step x responses or answers a prompt); use one of {legal}"
        )
    if training.optimizer.schedule == "constant" or training.optimizer.total_steps:
        return training
    updates = steps * (training.epochs * (rows // minibatch) + more)
    optimizer = dataclasses.replace(training.optimizer, total_steps=updates)
    return dataclasses.replace(training, optimizer=optimizer)


def _agrees(kind: type, training: TrainingConfig, rollout: RolloutConfig) -> bool:
    """Whether log-probs while sampling are training's to rounding."""
    names = ("generate_sequences", "compute_log_prob")
    own = all(getattr(kind, name, None) is getattr(Actor, name) for name in names)
    return own and training.compute_dtype == "float32" and not rollout.truncates


def _reward(builder: partial[Any], reward: Any, model: str) -> partial[Any]:
    """The score model on devices, or the function beside the controller."""
    kind = role_class(builder)
    section = kind.section
    if reward.model:
        return partial(builder, model=_files(reward.model, f"{section}.model"))
    if not reward.function:
        raise ValueError(
            f"{section}: set {section}.function=module:function or {section}.model=DIR"
        )
    for name, spec in (("function", reward.function), ("eval_function", reward.eval_function)):
        try:
            _ = spec and place_of(spec)
        except ValueError as error:
            raise ValueError(f"{section}.{name}: {error}") from None
    if issubclass(kind, Cost):
        if reward.eval_function:
            raise ValueError("cost.eval_function: evaluations take cost.function; leave it out")
        return partial(FunctionCost, model=model, reward=reward)
    return partial(FunctionReward, model=model, reward=reward)


def _texts(config: Any, builders: Mapping[str, partial[Any]], model: str) -> Source | None:
    """Texts for the pretraining loss; refuses one without the other."""
    wanted = any(builder.keywords.get("pretrain") for builder in builders.values())
    if wanted and not config.data.pretrain:
        raise ValueError(
            "data.pretrain='': the algorithm has a loss on texts; name a file with a column `text` "
            "or leave that loss out (algorithm.ptx_coef=0 of safe_rlhf)"
        )
    if config.data.pretrain and not wanted:
        raise ValueError(
            f"data.pretrain={config.data.pretrain}: the algorithm has no loss on texts; leave it "
            "out, or ask for one (algorithm.ptx_coef above 0 of safe_rlhf)"
        )
    return make_texts(config.data, model, seed=config.seed)


def _scores(config: Any) -> list[Any]:
    """The sections that say where scores come from."""
    return [getattr(config, name) for name in ("reward", "cost") if hasattr(config, name)]


def _named_placement(config: Any, builders: Mapping[str, partial[Any]]) -> Placement:
    """The file or preset that the run names."""
    placed, frozen = _on_devices(builders)
    placement = load_placement(config.placement, placed)
    for role, place in placement.roles.items():
        where = f"placement {config.placement}: [{role}]"
        if role in frozen and place.train:
            mend = "remove it" if place.infer else "write infer in its place"
            raise ValueError(f"{where} train: this role only computes; {mend}")
        if role not in frozen and not place.train:
            raise ValueError(
                f"{where} infer: this role is updated; write train in its place, or add it"
            )
    return placement


def _all_devices(builders: Mapping[str, partial[Any]], found: Found) -> Placement:
    """Every role on all devices found."""
    placed, frozen = _on_devices(builders)
    return single_pool(placed, found.count, frozen=frozen, platform=found.platform)


def _on_devices(builders: Mapping[str, partial[Any]]) -> tuple[list[str], list[str]]:
    """Roles that need a pool, and those of them that are never updated."""
    placed = [k for k, b in builders.items() if not getattr(b.func, "on_driver", False)]
    return placed, [k for k in placed if not issubclass(role_class(builders[k]), TrainedRole)]


def _devices_found(runtime: str) -> Found:
    """The devices of this host; for runtime ray a child process looks: this one holds none."""
    if runtime == "local":
        devices = jax.devices()
        return Found(None, devices[0].device_kind, len(devices))
    code = "import jax; d = jax.devices(); print(jax.default_backend(), len(d), d[0].device_kind)"
    look = [sys.executable, "-c", code]
    try:
        found = subprocess.run(look, capture_output=True, text=True, timeout=LOOK_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"JAX did not find devices within {LOOK_TIMEOUT_S} s; set --placement"
        ) from None
    if found.returncode:
        raise ValueError(f"JAX found no devices; set --placement: {found.stderr[-500:]}")
    platform, devices, kind = found.stdout.strip().splitlines()[-1].split(maxsplit=2)
    return Found(platform, kind, int(devices))


def _sized(builders: Mapping[str, partial[Any]], placement: Placement) -> dict[str, partial[Any]]:
    """With the placement's micro-batches and rematerialisation where the run leaves them open."""
    sized = dict(builders)
    for role, place in placement.roles.items():
        training = builders[role].keywords.get("training")
        if training is None:
            continue
        given: dict[str, Any] = {}
        if place.micro_sequences and not (training.micro_sequences or training.micro_tokens):
            given["micro_sequences"] = place.micro_sequences
        if place.remat and training.remat == TrainingConfig.remat:
            given["remat"] = place.remat
        if given:
            sized[role] = partial(builders[role], training=dataclasses.replace(training, **given))
    return sized


def _extent(plan: Plan) -> tuple[Sizes, int]:
    """The longest prompts and rows there can be, and the highest id, the actor's own included."""
    sets = [plan.source.items, *([plan.held_out.items] if plan.held_out else [])]
    lengths, ids = zip(*map(extent, sets), strict=True)
    prompt, longest, highest = max(lengths), max(lengths), max(ids)
    if plan.rollout:
        longest += plan.rollout.max_new_tokens
        highest = max(highest, load_config(plan.model).vocab - 1)
    if plan.texts:  # nothing is generated after them
        text, highest_of_text = extent(plan.texts.items)
        longest, highest = max(longest, text), max(highest, highest_of_text)
    prompts = plan.config.data.prompts_per_step
    sizes = Sizes(prompts=prompts, n=plan.n, prompt_tokens=prompt, row_tokens=longest)
    return sizes, highest


def _check_micro(plan: Plan, role: str, tokens: int) -> None:
    """Refuses micro-batches that cannot be cut, for rows of up to `tokens` tokens."""
    training = plan.builders[role].keywords["training"]
    own = getattr(plan.config, role).micro_sequences == training.micro_sequences
    file = plan.config.placement or "planned"
    where = f"{role}." if own else f"placement {file}: [{role}] "
    place = plan.placement.roles[role]
    together = plan.builders[role].keywords.get("rows_together", 1)
    unit = place.replicas * together
    if training.minibatch_sequences % together:
        raise ValueError(
            f"{role}.minibatch_sequences={training.minibatch_sequences} splits rows that belong "
            f"together; use a multiple of {together}"
        )
    if training.micro_sequences:
        rows = training.minibatch_sequences or plan.rows
        check_micro_sequences(training.micro_sequences, rows, unit, where)
        if plan.builders[role].keywords.get("pretrain"):
            texts = plan.config.data.prompts_per_step  # a step's
            micro = min(training.micro_sequences, texts)
            check_micro_sequences(micro, texts, unit, f"data.pretrain: {where}")
    if training.micro_tokens and place.base.pipe > 1:
        raise ValueError(
            f"{role}.micro_tokens={training.micro_tokens}: a pipeline of pipe={place.base.pipe} "
            f"passes micro-batches of one shape; use {role}.micro_sequences"
        )
    if training.micro_tokens:
        check_micro_tokens(training.micro_tokens, tokens, unit, f"{role}.")


def _check_waves(plan: Plan, role: str) -> None:
    """Refuses waves that are not whole prompts on every replica of generation."""
    place = plan.placement.rollout(role) or plan.placement.roles[role]
    where = f"[{role}] generate_sequences = {place.generate_sequences}"
    if not plan.builders[role].keywords.get("rollout"):
        raise ValueError(f"{where}: this role generates nothing; remove it")
    replicas = place.mesh_shape.over(place.generate_batch)
    unit = replicas * plan.n
    if place.generate_sequences % unit:
        below = place.generate_sequences // unit * unit
        legal = [rows for rows in (below, below + unit) if rows]
        raise ValueError(
            f"{where} must be a multiple of {unit}: {replicas} replicas of generation x "
            f"{plan.n} responses a prompt; use {either(legal)}, or leave it out"
        )


def _check_weights(builder: partial[Any]) -> None:
    """Refuses files that lack a parameter of the role's model; new weights need none."""
    role, settings = role_class(builder), builder.keywords
    if issubclass(role, ModelRole) and not settings.get("random"):
        check_files(settings["model"], load_config(settings["model"]), role.files_head())


def _check_stops(model: str, rollout: RolloutConfig) -> None:
    """Refuses responses that nothing can end."""
    ids, vocab = stop_ids(model), load_config(model).vocab
    if not ids and not rollout.ignore_eos:
        raise ValueError(
            f"{model} names no end token (eos_token_id in its configs, eos_token of the "
            "tokenizer); add one, or set rollout.ignore_eos"
        )
    if ids and max(ids) >= vocab:
        raise ValueError(
            f"end token {max(ids)} of {model} is outside its vocabulary of {vocab}; mend "
            "eos_token_id in its configs, or use the tokenizer that belongs to it"
        )
    if rollout.min_new_tokens:
        log.warning(
            "rollout.min_new_tokens=%d: the end tokens that it forbids keep their share in all "
            "log-probabilities and KL, of policy and reference alike; "
            "algorithm.rollout_correction weighs what was sampled without them",
            rollout.min_new_tokens,
        )
