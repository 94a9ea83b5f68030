# SPDX-License-Identifier: Apache-2.0
"""The outer loop: prompts in, steps of an algorithm, evaluation, checkpoints, metrics out."""

import dataclasses
import itertools
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, reduce
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from hfjax.algorithm import algorithm_name, config_class
from hfjax.batch import Batch
from hfjax.config import TrainingConfig, from_dict, read_toml
from hfjax.controller.calls import CallRecord
from hfjax.controller.handle import start
from hfjax.data import extent, make_sources
from hfjax.engine.microbatch import check_micro_sequences, check_micro_tokens
from hfjax.items import PROMPTS
from hfjax.metrics import (
    Mean,
    Metric,
    MetricLog,
    batch_metrics,
    finalize,
    merge,
    sample_rows,
    taken_seconds,
    timing_metrics,
)
from hfjax.models.hf import load_config, resolve_model
from hfjax.rewards import FunctionReward
from hfjax.roles import WIDTH_BUCKET, Reward, TrainedRole, check_model, role_class
from hfjax.rundir import began, open_directory
from hfjax.tokenizer import check_vocabulary, load_tokenizer
from meshes.placement import Placement, load_placement, single_pool

log = logging.getLogger(__name__)

STAGES = {  # method -> verl's name of the stage
    "generate_sequences": "gen",
    "compute_reward": "reward",
    "compute_log_prob": "old_log_prob",
    "compute_ref_log_prob": "ref",
    "compute_values": "values",
}
LOOK_TIMEOUT_S = 120
MAX_REFUSED = 10  # steps in a row with a non-finite update, after which a run ends
EVAL_ROWS = 512  # rows of one evaluation batch


def train(algorithm: ModuleType, config: Any = None, **overrides: Any) -> Path:
    """Runs `algorithm` under `config`, or its defaults with `overrides`; the run's directory.

    Overrides name top-level settings, with a dict for a section:
    `train(algorithms.grpo, steps=20, rollout={"n": 8})`.
    """
    if config is None:
        own_data = "train" in overrides.get("data", {})
        model = overrides.get("model", "embedded")
        config = default_config(algorithm, model, own_data=own_data)
        config = from_dict(type(config), overrides, where="train()", base=config)
    elif overrides:
        raise ValueError("train() takes a config or overrides, not both")
    with Run(algorithm, config) as run:
        run.train()
    return run.out


def default_config(
    algorithm: ModuleType, model: str, file: str = "", *, own_data: bool = False
) -> Any:
    """Defaults, for the embedded model those of its recipe, then the TOML file's settings.

    With `own_data` the recipe's files and reward are left out: they belong to each other.
    """
    cls = config_class(algorithm)
    config = cls()
    if model == "embedded":
        name = "recipe.toml" if hasattr(config, "rollout") else "recipe_sft.toml"
        recipe = resolve_model(model) / name
        known = {field.name for field in dataclasses.fields(cls)}
        table = {name: value for name, value in read_toml(recipe).items() if name in known}
        if own_data:
            table.pop("reward", None)
            table["data"] = {k: v for k, v in table["data"].items() if k not in ("train", "eval")}
        config = from_dict(cls, table, where=str(recipe), base=config)
    if file:
        config = from_dict(cls, read_toml(file), where=file, base=config)
    return config


class Run:
    """One training run in one directory; a context manager that ends its processes."""

    def __init__(self, algorithm: ModuleType, config: Any) -> None:
        """Everything that can be wrong is looked for before a process starts."""
        self.algorithm, self.config = algorithm, config
        getattr(algorithm, "check", lambda config: None)(config)
        self.roles: dict[str, Callable[..., Any]] = algorithm.roles(config.algorithm)
        self.rollout = getattr(config, "rollout", None)
        n = self.rollout.n if self.rollout else 1
        self.model = str(resolve_model(config.model).resolve())
        kind = getattr(algorithm, "DATA", PROMPTS)
        data = config.data
        if self.rollout and config.reward.model:
            data = dataclasses.replace(data, answer_key="")  # a score model needs no answer
        now = began(Path(config.out), resume=config.resume)
        self.source, self.held_out = make_sources(
            data, self.model, kind=kind, n=n, seed=config.seed, now=now
        )
        self.tokenizer = load_tokenizer(self.model)
        self.steps = config.steps or config.epochs * self.source.steps_per_epoch
        self.rows = config.data.prompts_per_step * n
        builders = self._builders()
        self.placement = self._placement(builders)
        tokens, highest_id = self._extent()
        for role, builder in builders.items():
            if role in self.placement.roles:
                self._check_micro(role, tokens)
                check_model(builder, self.placement.roles[role].mesh_shape, tokens, highest_id)
                if (model := builder.keywords["model"]) != self.model:
                    check_vocabulary(self.tokenizer, load_tokenizer(model))
        name = algorithm_name(algorithm)
        self.out = Path(config.out or time.strftime(f"runs/{Path(name).stem}-%Y%m%d-%H%M%S"))
        about = {"algorithm": name, "model": self.model, "began": now.isoformat()}
        self.done, self.store = open_directory(self.out, config, self.placement, about)
        self.console = Console(soft_wrap=True, highlight=False)
        self.refused = 0
        self.console.print(f"run directory: {self.out}")
        self.console.print(self.placement.table())
        self.console.print(self._sizes())
        self.log = MetricLog(
            self.out, steps=self.steps, console=self.console, tensorboard=config.tensorboard
        )
        self.console.print("starting pools")
        self.models = start(
            self.placement,
            builders,
            runtime=config.runtime,
            deadline_s=config.deadline_s,
            group=n,
            log_to_driver=False,
        )
        self.trained = [k for k, b in builders.items() if issubclass(role_class(b), TrainedRole)]
        if self.done:
            try:
                self._restore()
            except BaseException:
                self.__exit__()
                raise

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *error: object) -> None:
        self.log.close()
        self.models.shutdown()

    def train(self) -> None:
        """Steps from the last checkpoint, or from 0, to the end."""
        with self._stoppable() as stop, Progress(console=self.console) as progress:
            bar = progress.add_task("steps", total=self.steps, completed=self.done)
            if self.log.last_step < 0 and self.held_out:
                self.log.write(0, self.evaluate(0))
            while self.done < self.steps and not stop.is_set():
                step = self.done + 1
                record = self.step(step)
                self._stop_if_stuck(record)
                if self._due(self.config.eval_every, step):
                    record |= self.evaluate(step)
                if self._due(self.config.save_every, step) or stop.is_set():
                    record |= self.save(step)
                self.log.write(step, record)
                self.done = step
                progress.update(bar, completed=step)
        if stop.is_set():
            if self.done and self.store.latest() != self.done:
                self.save(self.done)
            self.console.print(f"stopped after step {self.done}; --resume continues {self.out}")
            raise KeyboardInterrupt

    def step(self, step: int) -> dict[str, float]:
        """One iteration of the algorithm; its metrics under verl's names."""
        start_s = time.perf_counter()
        self.models.step = step
        prompts = Batch(self.source.next_batch())
        batch, metrics = self.algorithm.step(self.models, prompts, self.config.algorithm)
        record = dict(batch.metrics.result()) | dict(metrics.result())
        columns = batch.resolved()
        calls = self.models.drain()
        seconds = _seconds(calls) | taken_seconds() | {"step": time.perf_counter() - start_s}
        tokens = int(columns["length"].sum()), int(columns["response_mask"].sum())
        record |= batch_metrics(columns, max_prompt_length=self.config.data.max_prompt_tokens)
        record |= timing_metrics(seconds, *tokens, devices=self.placement.devices)
        record["training/epoch"] = self.source.epoch
        record["perf/compiles"] = sum(call.compiles for call in calls)
        if self.rollout:
            self.log.samples(step, self._samples(Batch(columns)))
        return record

    def _stop_if_stuck(self, record: Mapping[str, float]) -> None:
        """Ends a run whose updates are refused again and again; its weights are still finite."""
        roles = [role.removesuffix("/skipped") for role in record if role.endswith("/skipped")]
        refused = any(record[f"{r}/skipped"] > record.get(f"{r}/empty", 0.0) for r in roles)
        self.refused = self.refused + 1 if refused else 0
        if self.refused >= MAX_REFUSED:
            raise RuntimeError(
                f"{MAX_REFUSED} steps in a row had updates that were not finite (*/skipped in "
                f"{self.out}/metrics.jsonl); look at rewards, learning rate and coefficients"
            )

    def _samples(self, batch: Batch) -> dict[str, Any]:
        """The columns of the rows to show; response texts too where no reward decoded them."""
        columns = batch.select(sample_rows(len(batch))).resolved()
        if "response" in columns:
            return columns
        rows = zip(*(columns[n] for n in ("input_ids", "prompt_length", "length")), strict=True)
        return columns | {"response": [self.tokenizer.decode(x[p:end]) for x, p, end in rows]}

    def evaluate(self, step: int) -> dict[str, float]:
        """Greedy scores of the held-out prompts, or the loss of held-out examples."""
        if self.held_out is None:
            return {}
        start_s = time.perf_counter()
        models, group = self.models, self.models.group
        models.step, models.group = step, 1
        batches = self.held_out.batches(min(EVAL_ROWS, len(self.held_out.items)))
        parts = [self._evaluated(Batch(columns), count) for columns, count in batches]
        models.group = group
        models.drain()
        means = finalize(reduce(merge, parts))
        record = {f"val-core/{name}": mean for name, mean in means.items()}
        if (failed := record.pop("val-core/failed", 0.0)) > 0:
            record["val-aux/failed"] = failed  # share of rows without a score
        return record | {"timing_s/testing": time.perf_counter() - start_s}

    def _evaluated(self, batch: Batch, count: int) -> dict[str, Metric]:
        """Means over the first `count` rows, not divided yet."""
        if self.rollout is None:
            batch |= self.models.actor.compute_log_prob(batch)
            mask = batch["response_mask"][:count]
            nll = -batch["old_log_probs"][:count][mask].astype(np.float64)
            return {"nll": Mean(float(nll.sum()), float(nll.size))}
        batch |= self.models.actor.generate_sequences(batch, greedy=True)
        batch |= self.models.reward.compute_reward(batch, evaluates=True)
        found: dict[str, Metric] = {}
        sources = batch["data_source"] if "data_source" in batch else [""] * count
        scored = batch["response_mask"].any(axis=-1)  # the function failed on the others
        rows = zip(sources, batch["score"], scored, strict=True)
        for source, score, ok in itertools.islice(rows, count):
            name = f"{source or 'all'}/reward/mean@1"
            found = merge(found, {"failed": Mean(0.0 if ok else 1.0, 1.0)})
            found = merge(found, {name: Mean(float(score), 1.0)} if ok else {})
        return found

    def save(self, step: int) -> dict[str, float]:
        """A checkpoint of every trained role, the data cursor and the step."""
        start_s = time.perf_counter()
        folder = self.store.begin(step)
        for reply in [getattr(self.models, r).save(path=str(folder / r)) for r in self.trained]:
            reply.result()
        self.store.commit(step, {"step": step, "data": self.source.state_dict()})
        self.models.drain()
        return {"timing_s/save_checkpoint": time.perf_counter() - start_s}

    def _restore(self) -> None:
        folder = self.store.path(self.done)
        for reply in [getattr(self.models, r).load(path=str(folder / r)) for r in self.trained]:
            reply.result()
        self.source.load_state_dict(self.store.load_meta(self.done)["data"])
        self.models.drain()
        self.console.print(f"resuming {self.out} after step {self.done}")

    def _due(self, every: int, step: int) -> bool:
        return step == self.steps or (every > 0 and step % every == 0)

    def _check_micro(self, role: str, tokens: int) -> None:
        """Refuses micro-batches that cannot be cut, for rows of up to `tokens` tokens."""
        training = getattr(self.config, role, None)
        if not isinstance(training, TrainingConfig):
            return
        replicas = self.placement.roles[role].mesh_shape.replicas
        if training.micro_sequences:
            rows = training.minibatch_sequences or self.rows
            check_micro_sequences(training.micro_sequences, rows, replicas, f"{role}.")
        if training.micro_tokens:
            limit = training.micro_tokens
            check_micro_tokens(limit, tokens, replicas, WIDTH_BUCKET, f"{role}.")

    def _extent(self) -> tuple[int, int]:
        """Tokens of the longest row there can be, and the highest id, the actor's own included."""
        sets = [self.source.items] + ([self.held_out.items] if self.held_out else [])
        lengths, ids = zip(*map(extent, sets), strict=True)
        if self.rollout is None:
            return max(lengths), max(ids)
        vocab = load_config(self.model).vocab
        return max(lengths) + self.rollout.max_new_tokens, max(*ids, vocab - 1)

    def _builders(self) -> dict[str, partial[Any]]:
        """The algorithm's roles with the run's settings bound to them."""
        config = self.config
        weights = {"model": self.model, "random": config.init == "random", "seed": config.seed}
        bound: dict[str, partial[Any]] = {}
        for role, builder in self.roles.items():
            assert isinstance(builder, partial), f"roles()[{role!r}] must be a functools.partial"
            if role in ("actor", "critic"):
                training = self._training(getattr(config, role))
                more = {"rollout": self.rollout} if role == "actor" else {}
                bound[role] = partial(builder, **weights, training=training, **more)
            elif builder.func is Reward:
                bound[role] = self._reward(builder)
            else:
                temperature = self.rollout.temperature if self.rollout else 1.0
                dtype = config.actor.compute_dtype
                bound[role] = partial(
                    builder, **weights, compute_dtype=dtype, temperature=temperature
                )
        return bound

    def _training(self, training: Any) -> Any:
        """The settings with the schedule sized in this run's optimizer updates."""
        minibatch = training.minibatch_sequences or self.rows
        if self.rows % minibatch:
            legal = [k for k in range(1, self.rows + 1) if self.rows % k == 0]
            raise ValueError(
                f"minibatch_sequences={minibatch} does not divide the {self.rows} rows of a step "
                f"(data.prompts_per_step x rollout.n); use one of {legal}"
            )
        if training.optimizer.schedule == "constant" or training.optimizer.total_steps:
            return training
        updates = self.steps * training.epochs * (self.rows // minibatch)
        optimizer = dataclasses.replace(training.optimizer, total_steps=updates)
        return dataclasses.replace(training, optimizer=optimizer)

    def _reward(self, builder: partial[Any]) -> partial[Any]:
        reward = self.config.reward
        if reward.model:
            return partial(builder, model=str(resolve_model(reward.model)))
        if not reward.function:
            raise ValueError("reward: set reward.function=module:function or reward.model=DIR")
        return partial(FunctionReward, model=self.model, reward=reward)

    def _placement(self, builders: Mapping[str, partial[Any]]) -> Placement:
        placed = [k for k, b in builders.items() if not getattr(b.func, "on_driver", False)]
        if self.config.placement:
            return load_placement(self.config.placement, placed)
        platform, devices = _devices_found(self.config.runtime)
        return single_pool(placed, devices, platform=platform)

    def _sizes(self) -> str:
        """What a step is made of: prompts x n -> rows -> mini-batch -> micro-batch."""
        prompts = self.config.data.prompts_per_step
        parts = [f"a step: {prompts} prompts x {self.rows // prompts} = {self.rows} rows"]
        for role in ("actor", "critic"):
            if t := getattr(self.config, role, None):
                mini = t.minibatch_sequences or self.rows
                micro = f"{t.micro_tokens} tokens" if t.micro_tokens else t.micro_sequences or mini
                updates = t.epochs * (self.rows // mini)
                parts.append(f"{role}: {updates} x {mini} rows an update, {micro} a micro-batch")
        return f"{'; '.join(parts)}; {self.steps} steps"

    @contextmanager
    def _stoppable(self) -> Iterator[threading.Event]:
        """Ctrl-C lets the step end and saves it; a second one stops at once."""
        stop = threading.Event()

        def on_signal(number: int, frame: FrameType | None) -> None:
            if stop.is_set():
                raise KeyboardInterrupt
            stop.set()
            self.console.print("stopping after this step; Ctrl-C again stops at once")

        if threading.current_thread() is not threading.main_thread():
            yield stop
            return
        before = signal.signal(signal.SIGINT, on_signal)
        try:
            yield stop
        finally:
            signal.signal(signal.SIGINT, before)


def _seconds(calls: list[CallRecord]) -> dict[str, float]:
    """Seconds by stage: from the first process that began a call to the last that ended."""
    seconds: dict[str, float] = {}
    for call in calls:
        stage = STAGES.get(call.method, call.method)
        seconds[stage] = seconds.get(stage, 0.0) + call.end_s - call.start_s
    return seconds


def _devices_found(runtime: str) -> tuple[str | None, int]:
    """Platform (None: this process's) and devices of this host.

    For runtime ray a child process looks, so that this one holds none.
    """
    if runtime == "local":
        import jax

        return None, len(jax.devices())
    code = "import jax; print(jax.default_backend(), len(jax.devices()))"
    look = [sys.executable, "-c", code]
    try:
        found = subprocess.run(look, capture_output=True, text=True, timeout=LOOK_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"JAX did not find devices within {LOOK_TIMEOUT_S} s; set --placement"
        ) from None
    if found.returncode:
        raise ValueError(f"JAX found no devices; set --placement: {found.stderr[-500:]}")
    platform, devices = found.stdout.split()[-2:]
    return platform, int(devices)
