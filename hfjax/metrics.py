# SPDX-License-Identifier: Apache-2.0
"""Metrics: (sum, count) on devices, verl's names on the host, console, JSONL and TensorBoard."""

import json
import math
import operator
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.text import Text

from hfjax.console import make_console
from hfjax.events import Events
from hfjax.files import host_memory, printable

STEP = "training/global_step"
# verl divides the seconds of generation by response tokens, those of the others by all tokens.
RESPONSE_STAGES = ("gen",)
SEQUENCE_STAGES = ("ref", "values", "adv", "update_critic", "update_actor")
CONSOLE_NAMES = {  # what the console shows of a step, besides all of val-core/, and its words there
    "critic/score/mean": "score",
    "critic/vf_explained_var": "vf_explained_var",
    "cost/score/mean": "cost",
    "lagrange/lambda": "lambda",
    "reward/failed": "rewards failed",
    "cost/failed": "costs failed",
    "actor/loss": "actor loss",
    "actor/pretrain_nll": "text nll",
    "critic/loss": "critic loss",
    "reward_model/loss": "loss",
    "actor/accuracy": "accuracy",
    "reward_model/accuracy": "accuracy",
    "actor/ppo_kl": "ppo_kl",
    "actor/entropy": "entropy",
    "actor/grad_norm": "grad_norm",
    "response_length/mean": "length",
    "response_length/clip_ratio": "truncated",
    "perf/throughput": "tokens/s/device",
}
SAMPLE_COLUMNS = (
    "row_id",
    "data_source",
    "prompt",
    "response",
    "ground_truth",
    "score",
    "truncated",
)
GAP = "training/rollout_probs_diff"  # of probabilities of sampled tokens, rollout and training
SAMPLE_ROWS = 16  # of a step: enough to read, and a long run's file stays small

Scalar = Any  # a 0-d jax.Array or np.ndarray, or a Python number


class Mean(NamedTuple):
    """A mean kept as (sum, count): parts of unequal size merge into the mean of the whole."""

    sum: Scalar
    count: Scalar

    @classmethod
    def of(cls, x: jax.Array, mask: jax.Array) -> "Mean":
        """Over the True entries of `mask`; what stands under False, NaN included, is not read."""
        kept = jnp.where(mask, jnp.asarray(x).astype(jnp.float32), 0.0)
        return cls(kept.sum(), jnp.asarray(mask).sum(dtype=jnp.float32))


class Max(NamedTuple):
    """A maximum: -inf when nothing was seen, NaN once NaN was seen."""

    value: Scalar


class Min(NamedTuple):
    """A minimum: +inf when nothing was seen, NaN once NaN was seen."""

    value: Scalar


class Total(NamedTuple):
    """A sum or a count of events, not divided by anything."""

    value: Scalar


Metric = Mean | Max | Min | Total
JOIN: dict[type, Callable[[Scalar, Scalar], Scalar]] = {
    Mean: operator.add,
    Total: operator.add,
    Max: jnp.maximum,
    Min: jnp.minimum,
}
EMPTY = {Max: -math.inf, Min: math.inf}


def merge(a: Mapping[str, Metric], b: Mapping[str, Metric]) -> dict[str, Metric]:
    """The metrics of two parts as those of the whole, by name; a name in one part only is kept.

    Right for micro-batches, replicas and processes alike, because nothing has been divided yet.
    """
    merged = dict(a)
    for name, metric in b.items():
        kind = type(metric)
        if name in a and type(a[name]) is not kind:
            raise ValueError(f"metric {name!r} is {type(a[name]).__name__} and {kind.__name__}")
        merged[name] = kind(*map(JOIN[kind], a[name], metric)) if name in a else metric
    return merged


def finalize(metrics: Mapping[str, Metric | Scalar]) -> dict[str, float]:
    """Host floats, fetched in one transfer. The mean or maximum of nothing is left out.

    Plain numbers pass through, so that a learning rate can stand beside the means.
    """
    values: dict[str, float] = {}
    for name, metric in jax.device_get(dict(metrics)).items():
        if isinstance(metric, Mean):
            if metric.count != 0:
                values[name] = float(metric.sum) / float(metric.count)
        elif not isinstance(metric, Max | Min):
            values[name] = float(metric.value if isinstance(metric, Total) else metric)
        elif metric.value != EMPTY[type(metric)]:
            values[name] = float(metric.value)
    return values


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float:
    """1 - Var(returns - values) / (Var(returns) + 1e-5), over flat arrays of valid tokens.

    n-1 variances and the 1e-5 as verl's `critic/vf_explained_var`; needs two tokens.
    """
    returns, values = returns.astype(np.float64), values.astype(np.float64)
    return float(1.0 - (returns - values).var(ddof=1) / (returns.var(ddof=1) + 1e-5))


def _spread(name: str, x: np.ndarray) -> dict[str, float]:
    x = np.asarray(x, np.float64)
    values = {"mean": x.mean(), "max": x.max(), "min": x.min()} if x.size else {}
    return {f"{name}/{statistic}": float(value) for statistic, value in values.items()}


def _rollout_gap(rollout: np.ndarray, trainer: np.ndarray) -> dict[str, float]:
    """How far the sampler's probabilities of its own tokens are from the trainer's."""
    p, q = np.exp(rollout.astype(np.float64)), np.exp(trainer.astype(np.float64))
    gap, out = np.abs(p - q), {}
    if p.size:
        out[f"{GAP}_max"] = float(gap.max())
        out[f"{GAP}_mean"] = float(gap.mean())
    if p.size > 1:
        out[f"{GAP}_std"] = float(gap.std(ddof=1))
        if p.std() > 0 and q.std() > 0:  # the correlation with a constant does not exist
            out["training/rollout_actor_probs_pearson_corr"] = float(np.corrcoef(p, q)[0, 1])
    return out


def _lengths(
    columns: Mapping[str, Any], max_prompt_length: int | None, replicas: int
) -> dict[str, float]:
    prompt_B, total_B = np.asarray(columns["prompt_length"]), np.asarray(columns["length"])
    out = _spread("prompt_length", prompt_B) | _spread("response_length", total_B - prompt_B)
    if max_prompt_length is not None:
        out["prompt_length/clip_ratio"] = float((prompt_B >= max_prompt_length).mean())
    if "truncated" in columns:
        out["response_length/clip_ratio"] = float(np.asarray(columns["truncated"]).mean())
    loads = np.array([part.sum() for part in np.array_split(total_B, replicas)])
    out |= _spread("global_seqlen", loads)
    out["global_seqlen/minmax_diff"] = float(loads.max() - loads.min())
    return out


SEEN = (  # columns that batch_metrics reads
    *("length", "prompt_length", "truncated", "score", "response_mask"),
    *("token_level_scores", "token_level_rewards", "advantages", "returns", "values", "entropy"),
    *("rollout_log_probs", "old_log_probs"),
)


def batch_metrics(
    columns: Mapping[str, Any], *, max_prompt_length: int | None = None, replicas: int = 1
) -> dict[str, float]:
    """verl's metrics of one step's batch, from the columns that are there.

    Per-token columns are read at response_mask only; rewards are sums over a row's tokens; lengths
    and scores count every row, masked ones too. Differences from verl: response_length/clip_ratio
    is the share of rows without a stop token (a response that stops on its last allowed token is
    whole); global_seqlen/* are token sums of the `replicas` consecutive parts of the batch. Without
    entropy, old_log_probs are the rollout's own and there is no gap to measure.
    """
    out: dict[str, float] = {}
    if "length" in columns and "prompt_length" in columns:
        out |= _lengths(columns, max_prompt_length, replicas)
    if "score" in columns:
        out |= _spread("critic/score", columns["score"])
    if "response_mask" in columns:
        out = _token_metrics(columns) | out
    return out


def _token_metrics(columns: Mapping[str, Any]) -> dict[str, float]:
    out, mask_BT = {}, np.asarray(columns["response_mask"])
    for name, column in (("score", "token_level_scores"), ("rewards", "token_level_rewards")):
        if column in columns:
            x_BT = np.asarray(columns[column], np.float64)
            out |= _spread(f"critic/{name}", np.where(mask_BT, x_BT, 0.0).sum(-1))
    names = ("advantages", "returns", "values", "entropy", "rollout_log_probs", "old_log_probs")
    tokens = {name: np.asarray(columns[name])[mask_BT] for name in names if name in columns}
    for name in ("advantages", "returns", "values"):
        out |= _spread(f"critic/{name}", tokens[name]) if name in tokens else {}
    if "values" in tokens and "returns" in tokens and mask_BT.sum() > 1:
        out["critic/vf_explained_var"] = explained_variance(tokens["values"], tokens["returns"])
    if "entropy" in tokens and mask_BT.any():
        out["actor/entropy"] = float(tokens["entropy"].mean(dtype=np.float64))
    scored = "entropy" in tokens  # else old_log_probs are the rollout's own
    if scored and "rollout_log_probs" in tokens and "old_log_probs" in tokens:
        out |= _rollout_gap(tokens["rollout_log_probs"], tokens["old_log_probs"])
    return out


_taken_s: dict[str, float] = {}
_spans: list[tuple[str, float, float]] = []


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Times the driver's own work as stage `name`: `with stage("adv")`, or as a decorator.

    Waiting for columns that other processes still compute counts in.
    """
    began_s, start_s = time.time(), time.perf_counter()
    try:
        yield
    finally:
        took_s = time.perf_counter() - start_s
        _taken_s[name] = _taken_s.get(name, 0.0) + took_s
        _spans.append((name, began_s, began_s + took_s))


def taken_seconds() -> dict[str, float]:
    """Seconds by stage since the last call, which starts the next count."""
    taken = dict(_taken_s)
    _taken_s.clear()
    return taken


def taken_spans() -> list[tuple[str, float, float]]:
    """The driver's stages since the last call: name, begin and end by time.time()."""
    spans = list(_spans)
    _spans.clear()
    return spans


def timing_metrics(
    seconds: Mapping[str, float], total_tokens: int, response_tokens: int, *, devices: int
) -> dict[str, float]:
    """verl's timing and perf names from seconds by stage, `step` being the whole step.

    perf/throughput is prompt and response tokens a second a device. perf/cpu_memory_used_gb is what
    this host has in use (GiB, all processes), left out where /proc/meminfo does not exist.
    """
    out = {f"timing_s/{stage}": float(s) for stage, s in seconds.items()}
    for stages, tokens in ((RESPONSE_STAGES, response_tokens), (SEQUENCE_STAGES, total_tokens)):
        for stage in stages:
            if stage in seconds and tokens > 0:
                out[f"timing_per_token_ms/{stage}"] = 1000.0 * seconds[stage] / tokens
    out["perf/total_num_tokens"] = float(total_tokens)
    if seconds.get("step", 0.0) > 0.0:
        out["perf/time_per_step"] = float(seconds["step"])
        out["perf/throughput"] = total_tokens / (seconds["step"] * devices)
    if memory := host_memory():
        used = memory["MemTotal"] - memory["MemAvailable"]
        out["perf/cpu_memory_used_gb"] = used / 2**30
    return out


def sample_rows(rows: int) -> list[int]:
    """The rows that are shown of a step's: pairs of neighbours, evenly spaced.

    So they are of many prompts, and where a prompt has several answers, two of each.
    """
    stride = max(2, rows * 2 // SAMPLE_ROWS // 2 * 2)
    pairs = ((row, row + 1) for row in range(0, rows, stride))
    return [row for pair in pairs for row in pair if row < rows][:SAMPLE_ROWS]


def cut_to_step(path: str | Path, step: float) -> int:
    """Drop a JSONL file's records after `step` and a half-written last line; the last step left.

    -1 when nothing is left. A resumed run repeats the steps after its checkpoint: cut first, and
    each step stands once. The file is replaced whole, so a kill in the middle loses nothing.
    """
    path = Path(path)
    if not path.exists():
        return -1
    kept, last_step = records_until(path, step)
    new = path.with_name(path.name + ".cut")
    with new.open("wb") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
    return last_step


def records_until(path: Path, step: float) -> tuple[list[bytes], int]:
    """The lines of a JSONL file up to a step, a half-written last one left out; their last step."""
    lines, kept, last_step = path.read_bytes().splitlines(), [], -1
    for number, line in enumerate(lines, 1):
        try:
            at = json.loads(line)[STEP]
            if at <= step:
                kept.append(line + b"\n")
                last_step = max(last_step, at)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if number < len(lines):
                raise ValueError(
                    f"{path}, line {number} is not a JSON object with {STEP!r}: remove that line"
                ) from error
    return kept, last_step


def _plain(x: Any) -> Any:
    x = x.item() if isinstance(x, np.generic) else x
    return None if isinstance(x, float) and not math.isfinite(x) else x


def _json_line(record: Mapping[str, Any]) -> str:
    """One strict JSON object: the step first, then names sorted; NaN and infinities are null.

    Floats are written as repr does, the shortest text that reads back as the same bits.
    """
    names = sorted(record, key=lambda name: (name != STEP, name))
    plain = {name: _plain(record[name]) for name in names}
    return json.dumps(plain, allow_nan=False, default=str) + "\n"


def console_block(metrics: Mapping[str, float], step: int, steps: int | None = None) -> Text:
    """One step for the eye: stages with seconds and their share of the step, main numbers."""
    stages = {k[9:]: v for k, v in metrics.items() if k.startswith("timing_s/")}
    step_s = stages.pop("step", 0.0)
    between = ("testing", "save_checkpoint", "commit_checkpoint")
    whole_s = step_s + sum(stages.get(name, 0.0) for name in between)  # not of a step's own time
    text = Text(f"step {step}" + (f"/{steps}" if steps else ""), style="bold")
    text.append(f"  {whole_s:.2f} s" if stages else "", style="bold")
    if stages:
        shares = sorted(stages.items(), key=lambda stage: -stage[1])
        parts = [f"{name} {s:.2f} s {s / max(whole_s, 1e-9):.0%}" for name, s in shares]
        text.append("\n  " + " · ".join(parts), style="not bold dim")
    words = {k: v for k, v in CONSOLE_NAMES.items() if k in metrics}
    words = {k: v for k, v in words.items() if metrics[k] or not k.endswith("/failed")}
    words |= {n: printable(n) for n in sorted(metrics) if n.startswith("val-core/")}  # of the data
    numbers = "   ".join(f"{word} {metrics[name]:.4g}" for name, word in words.items())
    text.append("\n  " + numbers if numbers else "", style="not bold")
    return text


class MetricLog:
    """A run directory's metrics.jsonl, samples.jsonl and TensorBoard events, and the console.

    It goes on where the directory's files end; to resume earlier, `cut_to_step` them first.
    """

    def __init__(
        self,
        out: str | Path,
        *,
        steps: int | None = None,
        console: Console | None = None,
        tensorboard: bool = True,
    ) -> None:
        self.out, self.steps = Path(out), steps
        self._left: dict[str, bytes] = {}  # by file: what is not written yet
        self.console = console or make_console()
        self.out.mkdir(parents=True, exist_ok=True)
        cut_to_step(self.out / "samples.jsonl", math.inf)
        self.last_step = cut_to_step(self.out / "metrics.jsonl", math.inf)
        self._events = Events() if tensorboard else None
        if self._events:
            (self.out / "tensorboard").mkdir(exist_ok=True)
            self._add(f"tensorboard/{self._events.name}", self._events.start(self.last_step + 1))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one step to every place; steps must rise, so that each stands once."""
        if step <= self.last_step:
            raise ValueError(
                f"step {step} after step {self.last_step} in {self.out}/metrics.jsonl: "
                "resume the run, or use a new directory"
            )
        self.last_step = step
        self._add("metrics.jsonl", _json_line({**metrics, STEP: step}).encode())
        if self._events:
            name = f"tensorboard/{self._events.name}"
            self._add(name, self._events.scalars(step, metrics))
        try:
            self.flush()
        finally:
            self.console.print(console_block(metrics, step, self.steps))

    def samples(self, step: int, columns: Mapping[str, Any]) -> None:
        """Append some of a step's prompts, responses and scores to samples.jsonl, an object a row.

        The columns hold the rows to write, those of `sample_rows`.
        """
        names = [name for name in SAMPLE_COLUMNS if name in columns]
        rows = zip(*(columns[name] for name in names), strict=True)
        records = [{**dict(zip(names, row, strict=True)), STEP: step} for row in rows]
        self._add("samples.jsonl", "".join(map(_json_line, records)).encode())
        self.flush()

    def close(self) -> None:
        """Tries a last time to write what a full disk refused."""
        with suppress(OSError):  # said before
            self.flush()

    def flush(self) -> None:
        """Writes what is not written yet: whole lines or none; what fails is kept for later."""
        failed: list[OSError] = []
        for name, data in list(self._left.items()):
            path = self.out / name
            size = path.stat().st_size if path.exists() else 0
            try:
                with open(path, "ab") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())  # the checkpoint that follows is on disk, too
                del self._left[name]
            except OSError as error:
                with suppress(OSError):
                    os.truncate(path, size)
                failed.append(OSError(error.errno, error.strerror, str(path)))
        if failed:
            raise failed[0]

    def _add(self, name: str, data: bytes) -> None:
        self._left[name] = self._left.get(name, b"") + data
