# SPDX-License-Identifier: Apache-2.0
"""The outer loop: prompts in, steps of an algorithm, evaluation, checkpoints, metrics out."""

import dataclasses
import itertools
import json
import logging
import math
import signal
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial, reduce
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from hfjax.algorithm import algorithm_name, config_class, load_algorithm
from hfjax.batch import Batch, Metrics
from hfjax.config import flat, from_dict, read_toml
from hfjax.controller.calls import CallRecord
from hfjax.controller.handle import RECEIVE, SEND, start
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
from hfjax.rundir import began, check_state, find_run, open_directory
from hfjax.timeline import Timeline
from hfjax.tokenizer import load_tokenizer

log = logging.getLogger(__name__)

STAGES = {  # method -> verl's name of the stage
    "generate_sequences": "gen",
    "compute_reward": "reward",
    "compute_log_prob": "old_log_prob",
    "compute_ref_log_prob": "ref",
    "compute_values": "values",
}
MAX_REFUSED = 10  # steps in a row with a non-finite update, after which a run ends


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
    with Run(algorithm, config) as run:
        run.train()
    return run.out


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

    def __init__(self, algorithm: ModuleType, config: Any) -> None:
        """Everything that can be wrong is looked for before a process starts."""
        self.algorithm, self.config = algorithm, config
        now = began(Path(config.out), resume=config.resume)
        self.plan = plan = prepare(algorithm, config, now)
        self.tokenizer = load_tokenizer(plan.model)
        name = algorithm_name(algorithm)
        self.out = Path(config.out or time.strftime(f"runs/{Path(name).stem}-%Y%m%d-%H%M%S"))
        about = {"algorithm": name, "model": plan.model, "began": now.isoformat()}
        self.done, self.store = find_run(self.out, config, about)
        if self.done:
            check_state(plan, self.store, self.done)
        self.console = Console(soft_wrap=True, highlight=False)
        self.refused = 0
        self.ahead: Issued | None = None  # the last step, while its record is not written
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
        self.models.rollout_agrees = plan.rollout_agrees
        self.models.more_prompts = lambda: Batch(plan.source.next_batch())
        if texts := plan.texts:
            self.models.more_texts = lambda: Batch(texts.next_batch())
        try:  # nothing is written before
            if self.done:
                self.models.memory |= self.store.load_meta(self.done).get("memory", {})
            self.store.make_root()
            open_directory(self.out, self.done, config, plan.placement, about)
            self.timeline = Timeline(self.out / "trace.json", self.done) if config.trace else None
            self.log = MetricLog(
                self.out, steps=plan.steps, console=self.console, tensorboard=config.tensorboard
            )
        except BaseException:
            self.models.shutdown()
            raise
        self.console.print(f"run directory: {self.out}")

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.log.close()
        finally:
            self.models.shutdown()

    def train(self) -> None:
        """Steps from the last checkpoint, or from 0, to the end."""
        with self._stoppable() as stop, Progress(console=self.console) as progress:
            bar = progress.add_task("steps", total=self.plan.steps, completed=self.done)
            if self.log.last_step < 0 and self.plan.held_out:
                self.log.write(0, self.evaluate(0))
            while self.done < self.plan.steps and not stop.is_set():
                step = self.done + (2 if self.ahead else 1)
                self.issue(step)
                evaluates = self._due(self.config.eval_every, step)
                saves = self._due(self.config.save_every, step) or stop.is_set()
                if evaluates or saves or not self.models.waits:
                    self.complete(evaluates=evaluates, saves=saves)
                progress.update(bar, completed=self.done)
            if self.ahead:
                self.complete()
        if stop.is_set() and self.done < self.plan.steps:
            if self.done and self.store.latest() != self.done:
                self.save_roles(self.done)
                self.commit(self.done)
            self.console.print(f"stopped after step {self.done}; --resume continues {self.out}")
            raise KeyboardInterrupt
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
        self._stop_if_stuck(record)
        record |= self.evaluate(step) if evaluates else {}
        record |= self.save_roles(step) if saves else {}
        self.log.write(step, record)  # before: no checkpoint stands without its record
        if saves:
            self.commit(step)
        self.done = step

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
        seconds = _seconds(calls := self._drained(step, issued.spans))
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
            self.log.samples(step, self._samples(batch))
        return record

    def _drained(self, step: int, spans: list[tuple[str, float, float]]) -> list[CallRecord]:
        """Waits for the calls up to a step; those that are new, which the timeline gets too."""
        calls = self.models.drain(step)
        if self.timeline:
            self.timeline.write(calls, spans, step)
        return calls

    def _plain_memory(self, step: int) -> None:
        """The algorithm's memory as a checkpoint has it."""
        try:
            self.models.memory = json.loads(json.dumps(self.models.memory))
        except TypeError as error:
            told = f"m.memory={self.models.memory!r} must be what JSON holds"
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

    def _stop_if_stuck(self, record: Mapping[str, float]) -> None:
        """Ends a run whose updates are refused again and again; its weights are still finite."""
        ends = ("/skipped", "/pretrain_skipped")
        kinds = [name.removesuffix("skipped") for name in record if name.endswith(ends)]
        refused = any(record[f"{k}skipped"] > record.get(f"{k}empty", 0.0) for k in kinds)
        self.refused = self.refused + 1 if refused else 0
        if self.refused >= MAX_REFUSED:
            raise RuntimeError(
                f"{MAX_REFUSED} steps in a row had updates that were not finite (*/skipped in "
                f"{self.out}/metrics.jsonl); look at rewards, learning rate and coefficients"
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
        parts = [self._evaluated(Batch(columns), count) for columns, count in batches]
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

    def save_roles(self, step: int) -> dict[str, float]:
        """Writes every trained role's state; the checkpoint shows when it is committed."""
        start_s = time.perf_counter()
        folder, models = self.store.begin(step), self.models
        for reply in [getattr(models, r).save(path=str(folder / r)) for r in self.plan.trained]:
            reply.result()
        self._drained(step, taken_spans())
        return {"timing_s/save_checkpoint": time.perf_counter() - start_s}

    def commit(self, step: int) -> None:
        """Completes the checkpoint by the data cursor, the step and the algorithm's memory."""
        memory = dict(self.models.memory)
        meta = {"step": step, "data": self.plan.source.state_dict(), "memory": memory}
        if self.plan.texts:
            meta["texts"] = self.plan.texts.state_dict()
        self.store.commit(step, meta)

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
    for transfer, group in itertools.groupby(calls, lambda call: call.method in (SEND, RECEIVE)):
        found = list(group)
        for stage, call in ((STAGES.get(c.method, c.method), c) for c in found if not transfer):
            seconds[stage] = seconds.get(stage, 0.0) + call.end_s - call.start_s
        if transfer:  # between pools, side by side: what lies between calls counts too
            took_s = max(call.end_s for call in found) - min(call.start_s for call in found)
            seconds["update_weights"] = seconds.get("update_weights", 0.0) + took_s
    return seconds
