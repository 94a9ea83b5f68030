# SPDX-License-Identifier: Apache-2.0
"""The outer loop: prompts in, steps of an algorithm, evaluation, checkpoints, metrics out."""

import dataclasses
import json
import logging
import math
import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack, suppress
from functools import partial, reduce
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from rich.progress import Progress

from hfjax.algorithm import algorithm_name, config_class, load_algorithm
from hfjax.batch import Batch, Metrics
from hfjax.config import flat, from_dict, read_toml
from hfjax.console import make_console
from hfjax.controller.calls import CallRecord
from hfjax.controller.handle import start
from hfjax.files import fingerprint
from hfjax.guard import Guard
from hfjax.items import PROMPTS
from hfjax.metrics import (
    GAP,
    SAMPLE_COLUMNS,
    SEEN,
    Mean,
    Metric,
    MetricLog,
    batch_metrics,
    finalize,
    merge,
    sample_rows,
    taken_seconds,
    taken_spans,
    timing_metrics,
)
from hfjax.models.hf import resolve_model
from hfjax.policy import APART, LARGEST_GAP, greedy_scores
from hfjax.prepare import prepare
from hfjax.rundir import began, check_state, find_run, hold, open_directory
from hfjax.saving import WRITTEN, SaveError, Saves, check_best, recording
from hfjax.stopping import Restarts, Stop, Stopped, at_once, handled
from hfjax.timeline import Timeline, stage_seconds
from hfjax.tokenizer import load_tokenizer

log = logging.getLogger(__name__)


def train(algorithm: ModuleType | str, /, config: Any = None, **overrides: Any) -> Path:
    """Runs `algorithm` under `config`, or its defaults with `overrides`; the run's directory.

    `algorithm` is a module, or the name by which `hfjax train` finds it.
    Overrides name top-level settings, with a dict for a section:
    `train(algorithms.grpo, steps=20, rollout={"n": 8})`.
    """
    if isinstance(algorithm, str):
        algorithm = load_algorithm(algorithm)
    if config is None:
        model = overrides.get("model", "embedded")
        config = default_config(algorithm, model, own=flat(overrides))
        config = from_dict(type(config), overrides, where="train()", base=config)
    elif overrides:
        raise ValueError("train() takes a config or overrides, not both")
    restarts, last = Restarts(config.max_restarts), None
    with handled(at_once):
        while True:
            run = None
            try:
                with Run(algorithm, config, restarts.count) as run:
                    run.train()
                    return run.out
            except Exception as error:
                starts = run is None
                if run:
                    config = dataclasses.replace(config, out=str(run.out), resume=True)
                    last = run.models.step, run.saves.newest, run.console
                if not last or not restarts.again(error, *last, starts=starts):
                    raise


def default_config(
    algorithm: ModuleType, model: str, file: str = "", *, own: Collection[str] = ()
) -> Any:
    """Defaults, for the embedded model those of its recipe, then the TOML file's settings.

    `own` names settings that come after them, or from the file. With data of one's own the recipe's
    files, reward, cost and eval_every are left out, with a score model the function it replaces.
    """
    cls = config_class(algorithm)
    config = cls()
    given = read_toml(file) if file else {}
    if model == "embedded":
        kind = getattr(algorithm, "DATA", PROMPTS)
        recipe = resolve_model(model) / f"recipe_{kind.name}.toml"
        known = {field.name for field in dataclasses.fields(cls)}
        table = {name: value for name, value in read_toml(recipe).items() if name in known}
        own = {*own, *flat(given)}
        scores = ("reward", "cost")
        if "data.train" in own:
            table = {k: v for k, v in table.items() if k not in (*scores, "eval_every")}
            table["data"] = {k: v for k, v in table["data"].items() if k not in ("train", "eval")}
        for name in scores:
            if f"{name}.model" in own:
                table.pop(name, None)
        config = from_dict(cls, table, where=str(recipe), base=config)
    return from_dict(cls, given, where=file, base=config) if file else config


@dataclasses.dataclass(frozen=True)
class Issued:
    """A step whose calls have been sent; its record waits for them."""

    step: int
    start_s: float  # time.perf_counter()
    epoch: int
    batch: Batch
    metrics: Metrics  # of the updates
    seconds: dict[str, float]  # of the driver's own stages
    spans: list[tuple[str, float, float]]


class Run:
    """One training run in one directory; a context manager that ends its processes.

    A step is issued before the updates of the last one are waited for, so that pools of their own
    overlap: a critic's update and the next generation. What a step's record decides comes one step
    late therefore: sampled tokens are scored in every step from the next but one after a gap
    between rollout and training, and a run whose updates are refused has begun one more.
    """

    def __init__(self, algorithm: ModuleType, config: Any, restarts: int = 0) -> None:
        """Everything that can be wrong is looked for before a process starts."""
        self.algorithm, self.config, self.restarts = algorithm, config, restarts
        self.console = make_console()
        self.record: Mapping[str, float] = {}  # of the last step
        self.ahead: Issued | None = None  # the last step, while its record is not written
        with ExitStack() as scope:
            self._open(scope)
            self._scope = scope.pop_all()
        self.console.print(f"run directory: {self.out}", markup=False)

    def _open(self, scope: ExitStack) -> None:
        """The run's directory, pools and files; `scope` ends them."""
        config, name = self.config, algorithm_name(self.algorithm)
        self.out = Path(config.out or time.strftime(f"runs/{Path(name).stem}-%Y%m%d-%H%M%S"))
        held = scope.enter_context(hold(self.out))
        now = began(self.out, resume=config.resume)
        self.plan = plan = prepare(self.algorithm, config, now)
        self.tokenizer = load_tokenizer(plan.model)
        frozen = {role: fingerprint(model) for role, model in plan.frozen().items()}
        about = {"algorithm": name, "model": plan.model, "began": now.isoformat(), "frozen": frozen}
        self.done, self.store = find_run(self.out, config, about, self.console.print)
        if self.done:
            check_state(plan, self.store, self.done)
        elif config.resume:
            self.console.print(f"{self.out} has no checkpoint yet: starting over")
        check_best(config, plan.held_out)
        self.console.print(plan.placement.table())
        self.console.print(plan.sizes())
        self.console.print("starting pools")
        self.models = start(
            plan.placement,
            self._builders(),
            runtime=config.runtime,
            deadline_s=config.deadline_s,
            start_deadline_s=config.start_deadline_s,
            group=plan.n,
            log_to_driver=False,
        )
        scope.callback(self.models.shutdown)
        self.models.rollout_agrees = plan.rollout_agrees
        self.models.more_prompts = lambda: Batch(plan.source.next_batch())
        if texts := plan.texts:
            self.models.more_texts = lambda: Batch(texts.next_batch())
        if self.done:
            self.models.memory |= self.store.load_meta(self.done).get("memory", {})
        self.store.make_root()  # nothing is written before
        if not held:  # the directory is new: perhaps to another run, too
            scope.enter_context(hold(self.out))
            find_run(self.out, config, about)
        open_directory(self.out, self.done, config, plan.placement, about)
        self.timeline = Timeline(self.out / "trace.json", self.done) if config.trace else None
        self.log = MetricLog(
            self.out, steps=plan.steps, console=self.console, tensorboard=config.tensorboard
        )
        scope.callback(self.log.close)
        self.saves = Saves(
            *(self.store, self.models, plan.trained, self.done),
            *(config.on_save_error, self.log.flush),
        )
        self.guard = Guard(self.models, config.check_every, self.out)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *error: object) -> None:
        self._scope.close()

    def train(self) -> None:
        """Steps from the last checkpoint, or from 0, to the end."""
        try:
            self._train()
        except Exception:
            if not self.models.calls.failure:  # the pools live: what they are writing is kept
                with suppress(Exception):
                    self.saves.finish()
            raise

    def _train(self) -> None:
        stop = Stop()
        with handled(stop.on_signal), Progress(console=self.console) as progress:
            bar = progress.add_task("steps", total=self.plan.steps, completed=self.done)
            if not self.done and self.log.last_step < 0 and self.plan.held_out:
                record = self.evaluate(0)
                with recording(self.config.on_save_error):
                    self.log.write(0, record)
            while self.done < self.plan.steps and not stop:
                step = self.done + (2 if self.ahead else 1)
                self.issue(step)
                evaluates = self._due(self.config.eval_every, step)
                saves = self._due(self.config.save_every, step) or bool(stop)
                if evaluates or saves or not self.models.waits:
                    self.complete(evaluates=evaluates, saves=saves)
                progress.update(bar, completed=self.done)
            if self.ahead:
                self.complete()
            self.saves.finish()
            if stop and self.done and self.saves.newest != self.done:
                self.save(self.done, self.record)
                self.saves.finish()
        if self.saves.newest != self.done:
            raise SaveError(f"step {self.done}, the last, could not be saved in {self.out}")
        if stop and self.done < self.plan.steps:
            self.console.print(f"stopped after step {self.done}; --resume continues {self.out}")
            raise Stopped(stop.number)
        self.console.print(f"finished after step {self.done}: {self.out}")

    def issue(self, step: int) -> None:
        """Sends a step's calls, then completes the step before it, if it is not yet."""
        try:
            issued = self.step(step)
        except Exception:
            with suppress(Exception):  # where workers failed the record before is lost too
                self.complete()
            raise
        before, self.ahead = self.ahead, issued
        if before:
            self._written(before, self.finish(before, issued.start_s))

    def complete(self, *, evaluates: bool = False, saves: bool = False) -> None:
        """Waits for the last step; its record with evaluation and checkpoint, if it is their turn.

        Both see the weights of this step: nothing has been issued after it.
        """
        issued, self.ahead = self.ahead, None
        assert issued is not None
        self._written(issued, self.finish(issued), evaluates=evaluates, saves=saves)

    def _written(
        self,
        issued: Issued,
        record: dict[str, float],
        *,
        evaluates: bool = False,
        saves: bool = False,
    ) -> None:
        step = issued.step
        self.guard.watch(step, record, issued.batch)
        record |= self.evaluate(step) if evaluates else {}
        record |= self.save(step, record) if saves else {}
        if self.config.max_restarts:
            record["perf/restarts"] = self.restarts
        with recording(self.config.on_save_error):
            self.log.write(step, record)
        self.done, self.record = step, record
        self.saves.poll()

    def step(self, step: int) -> Issued:
        """One iteration of the algorithm; calls may still be under way."""
        start_s = time.perf_counter()
        self.models.step = step
        prompts = Batch(self.plan.source.next_batch())
        try:
            batch, metrics = self.algorithm.step(self.models, prompts, self.config.algorithm)
        except ValueError as error:  # no refusal of settings: it is past the time for these
            raise RuntimeError(f"{self.algorithm.__name__}.step failed in step {step}") from error
        self._plain_memory(step)
        self.guard.ask(step)
        epoch = self.plan.source.epoch
        return Issued(step, start_s, epoch, batch, metrics, taken_seconds(), taken_spans())

    def finish(self, issued: Issued, until_s: float | None = None) -> dict[str, float]:
        """Waits for a step's calls; its metrics under verl's names.

        `until_s` is when the next step began: an iteration ends there, or with the last call.
        """
        step, batch = issued.step, issued.batch
        try:
            record = dict(batch.metrics.result()) | dict(issued.metrics.result())
            columns = batch.columns(*(n for n in SEEN if n in batch)).resolved()
        except ValueError as error:
            raise RuntimeError(f"{self.algorithm.__name__}.step failed in step {step}") from error
        seconds = stage_seconds(calls := self._drained(step, issued.spans))
        self.guard.judge(step)
        if "gen" in seconds:  # the relay is part of that call, but a stage of its own
            relay_s = record.get("timing_s/update_weights", 0.0)
            seconds["gen"] -= relay_s
            seconds.setdefault("update_weights", relay_s)
        until_s = time.perf_counter() if until_s is None else until_s
        seconds |= issued.seconds | {"step": until_s - issued.start_s}
        tokens = int(columns["length"].sum()), int(columns["response_mask"].sum())
        record |= batch_metrics(
            columns,
            max_prompt_length=self.config.data.max_prompt_tokens,
            replicas=self.plan.placement.roles[self.plan.main].replicas,
        )
        self._watch_rollout(step, record)
        record |= timing_metrics(seconds, *tokens, devices=self.plan.placement.devices)
        record["training/epoch"] = issued.epoch
        record["perf/compiles"] = sum(call.compiles for call in calls)
        if self.plan.rollout:
            with recording(self.config.on_save_error):
                self.log.samples(step, self._samples(batch))
        return record

    def _drained(self, step: int, spans: list[tuple[str, float, float]]) -> list[CallRecord]:
        """Waits for the calls up to a step; those that are new, which the timeline gets too."""
        calls = self.models.drain(step)
        if self.timeline:
            with recording(self.config.on_save_error):
                self.timeline.write(calls, spans, step)
        return [call for call in calls if call.method != WRITTEN]

    def _plain_memory(self, step: int) -> None:
        """The algorithm's memory as a checkpoint has it."""
        try:
            plain = json.dumps(self.models.memory, allow_nan=False)
            self.models.memory = json.loads(plain)
        except (TypeError, ValueError) as error:
            told = f"m.memory={self.models.memory!r} must be what JSON holds, and finite"
            raise RuntimeError(f"step {step} of {self.algorithm.__name__}: {told}") from error

    def _watch_rollout(self, step: int, record: Mapping[str, float]) -> None:
        """After a gap between sampling and training, sampled tokens are scored in every step.

        That begins with the next step but one: the next may have been issued.
        """
        if not self.plan.rollout_agrees or APART in self.models.memory:
            return
        gap = record.get(f"{GAP}_max", 0.0)
        if not gap <= LARGEST_GAP:
            self.models.memory[APART] = step + 2
            log.warning(
                "%s_max=%g is above %g: rollout and training differ by more than rounding; "
                "log-probs before the update are computed in every step from step %d on",
                *(GAP, gap, LARGEST_GAP, step + 2),
            )

    def _samples(self, batch: Batch) -> dict[str, Any]:
        """The columns of the rows to show; response texts too where no reward decoded them."""
        names = (*SAMPLE_COLUMNS, "input_ids", "prompt_length", "length")
        shown = batch.columns(*dict.fromkeys(name for name in names if name in batch))
        columns = shown.select(sample_rows(len(batch))).resolved()
        if "response" in columns:
            return columns
        rows = zip(*(columns[n] for n in ("input_ids", "prompt_length", "length")), strict=True)
        return columns | {"response": [self.tokenizer.decode(x[p:end]) for x, p, end in rows]}

    def evaluate(self, step: int) -> dict[str, float]:
        """Greedy scores of the held-out prompts, or the loss of held-out examples."""
        if self.plan.held_out is None:
            return {}
        start_s = time.perf_counter()
        models, group = self.models, self.models.group
        models.step, models.group = step, 1
        batches = self.plan.held_out.batches(self.plan.eval_items)
        try:
            parts = [self._evaluated(Batch(columns), count) for columns, count in batches]
        except ValueError as error:
            raise RuntimeError(f"evaluation failed after step {step}: {error}") from error
        models.group = group
        self._drained(step, taken_spans())
        means = finalize(reduce(merge, parts))
        record = {f"val-core/{name}": mean for name, mean in means.items()}
        if (failed := record.pop("val-core/failed", 0.0)) > 0:
            record["val-aux/failed"] = failed  # share of rows without a score
        return record | {"timing_s/testing": time.perf_counter() - start_s}

    def _evaluated(self, batch: Batch, count: int) -> dict[str, Metric]:
        """Means over the first `count` rows, not divided yet."""
        evaluate = getattr(self.algorithm, "evaluate", greedy_scores)
        if evaluate is greedy_scores and self.plan.rollout is None:
            batch |= self.models.actor.compute_log_prob(batch)
            mask = batch["response_mask"][:count]
            nll = -batch["old_log_probs"][:count][mask].astype(np.float64)
            return {"nll": Mean(float(nll.sum()), float(nll.size))}
        numbers = evaluate(self.models, batch, self.config.algorithm)
        found: dict[str, Metric] = {}
        sourced = "data_source" in batch
        for name, x in numbers.items():
            real = np.asarray(x, np.float64)[: len(x) * count // len(batch)]
            for row, number in enumerate(real):
                full = f"{batch['data_source'][row] or 'all'}/{name}" if sourced else name
                ok = math.isfinite(number)  # the function failed on the others
                found = merge(found, {"failed": Mean(0.0 if ok else 1.0, 1.0)})
                found = merge(found, {full: Mean(float(number), 1.0)} if ok else {})
        return found

    def save(self, step: int, record: Mapping[str, float]) -> dict[str, float]:
        """Begins the checkpoint of a step: roles, data cursor and the algorithm's memory."""
        self.guard.check(step)
        memory = dict(self.models.memory)
        meta = {"step": step, "data": self.plan.source.state_dict(), "memory": memory}
        if self.plan.texts:
            meta["texts"] = self.plan.texts.state_dict()
        seconds = self.saves.begin(step, meta, record)
        self._drained(step, taken_spans())
        return seconds

    def _builders(self) -> dict[str, partial[Any]]:
        """The plan's builders; those of trained roles take up the checkpoint's state."""
        builders = dict(self.plan.builders)
        if self.done:
            self.console.print(f"resuming {self.out} after step {self.done}")
            folder = self.store.path(self.done)
            for role in self.plan.trained:
                builders[role] = partial(builders[role], checkpoint=str(folder / role))
        return builders

    def _due(self, every: int, step: int) -> bool:
        return step == self.plan.steps or (every > 0 and step % every == 0)
