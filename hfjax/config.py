# SPDX-License-Identifier: Apache-2.0
"""Typed settings: frozen dataclasses, read from TOML, overridden on the command line."""

import dataclasses
import difflib
import math
import tomllib
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import tomli_w

from hfjax.engine.train import OptimizerConfig
from hfjax.items import DataConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How responses are sampled."""

    n: int = 1  # responses a prompt
    max_new_tokens: int = 256  # longest response in tokens, stop token included
    min_new_tokens: int = 0  # stop tokens are forbidden before this many
    temperature: float = 1.0  # logits are divided by it in every pass; 0 is greedy
    top_k: int = 0  # keep the k likeliest tokens; 0 keeps all
    top_p: float = 1.0  # keep the smallest set with this much probability
    min_p: float = 0.0  # drop tokens below this share of the likeliest one
    ignore_eos: bool = False  # run every row to max_new_tokens

    @property
    def truncates(self) -> bool:
        """Whether some tokens may not be drawn that have a probability."""
        filters = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return filters or self.min_new_tokens > 0

    def __post_init__(self) -> None:
        _require(self.n >= 1, "rollout.n", self.n, "at least 1")
        _require(self.max_new_tokens >= 1, "rollout.max_new_tokens", self.max_new_tokens, "1 up")
        legal = 0 <= self.min_new_tokens <= self.max_new_tokens
        _require(legal, "rollout.min_new_tokens", self.min_new_tokens, "0 to max_new_tokens")
        legal = 0 <= self.temperature < math.inf
        _require(legal, "rollout.temperature", self.temperature, "0 (greedy) or more, and finite")
        _require(self.top_k >= 0, "rollout.top_k", self.top_k, "0 (off) or a count")
        _require(0 < self.top_p <= 1, "rollout.top_p", self.top_p, "in (0, 1]")
        _require(0 <= self.min_p <= 1, "rollout.min_p", self.min_p, "in [0, 1]")
        legal = not (self.ignore_eos and self.min_new_tokens)
        rule = "0 with rollout.ignore_eos, which lets no response stop"
        _require(legal, "rollout.min_new_tokens", self.min_new_tokens, rule)
        legal = self.temperature > 0 or self.n == 1
        rule = "above 0 with n > 1: greedy rows of one prompt are equal"
        _require(legal, "rollout.temperature", self.temperature, rule)
        for name in ("top_k", "top_p", "min_p") if self.temperature == 0 else ():
            value, off = getattr(self, name), getattr(RolloutConfig, name)
            rule = f"{off} with rollout.temperature=0: every filter keeps the likeliest token"
            _require(value == off, f"rollout.{name}", value, rule)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How one model is updated. Sizes count sequences (responses) over all replicas."""

    optimizer: OptimizerConfig = OptimizerConfig()
    minibatch_sequences: int = 0  # rows an optimizer update; 0 takes the whole batch
    micro_sequences: int = 0  # rows a forward and backward pass; 0 takes the mini-batch
    micro_tokens: int = 0  # instead: at most this many padded tokens a pass; 0 is off
    epochs: int = 1  # passes over the batch a step
    compute_dtype: Literal["float32", "bfloat16"] = "float32"  # of matrix products; master: f32
    remat: Literal["none", "layer", "dots"] = "none"  # what the backward pass recomputes

    def __post_init__(self) -> None:
        for name in ("minibatch_sequences", "micro_sequences", "micro_tokens"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "0 or a count")
        _require(self.epochs >= 1, "epochs", self.epochs, "at least 1")
        both = self.micro_sequences and self.micro_tokens
        given = f"{self.micro_sequences} and {self.micro_tokens}"
        _require(not both, "micro_sequences and micro_tokens", given, "one of the two")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticConfig(TrainingConfig):
    """How a trained role beside the main one is updated, and which model it starts from."""

    model: str = ""  # as `model`, of any size or family, with its token ids; empty: `model`


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Where scores come from: a Python function, or a score model's directory."""

    function: str = ""  # 'module:function' or 'file.py:function'
    model: str = ""  # a Hugging Face directory with a score head
    eval_function: str = ""  # scores the evaluation instead of `function`
    workers: int = 2  # processes that run the function
    deadline_s: float = 30.0  # seconds one response may take
    on_error: Literal["fail", "skip"] = "fail"  # skip: the row is left out of training

    section: ClassVar[str] = "reward"

    def __post_init__(self) -> None:
        at = self.section
        _require(self.workers >= 1, f"{at}.workers", self.workers, "at least 1")
        _require(self.deadline_s > 0, f"{at}.deadline_s", self.deadline_s, "seconds above 0")
        both = bool(self.function) and bool(self.model)
        rule = f"left out with {at}.model={self.model}, which scores instead; set one of the two"
        _require(not both, f"{at}.function", self.function, rule)
        for field in dataclasses.fields(self) if self.model else ():
            value = getattr(self, field.name)
            legal = field.name == "model" or value == field.default
            rule = f"left at {field.default!r} with {at}.model: it is for functions"
            _require(legal, f"{at}.{field.name}", value, rule)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostConfig(RewardConfig):
    """Where costs come from, as scores do."""

    section: ClassVar[str] = "cost"


@dataclasses.dataclass(frozen=True, kw_only=True)
class KLConfig:
    """The one block of settings for the divergence from the reference model."""

    where: Literal["none", "reward", "loss"] = "none"  # subtracted from rewards or added to loss
    estimator: Literal["k1", "k2", "k3"] = "k3"  # k1 log ratio, k2 half its square, k3 low variance
    coef: float = 0.001  # its weight; with a target, at the start
    target: float = 0.0  # KL that coef is steered to, of kl.where=reward; 0: coef stays
    horizon: float = 10_000.0  # sequences over which it is steered

    def __post_init__(self) -> None:
        legal = (self.where, self.estimator) != ("loss", "k1")
        rule = "k2 or k3 with kl.where=loss, where k1's gradient is 0 on average"
        _require(legal, "kl.estimator", self.estimator, rule)
        _require(0 <= self.coef < math.inf, "kl.coef", self.coef, "0 or more, and finite")
        legal = self.target == 0 or (0 < self.target < math.inf and self.where == "reward")
        rule = "0, or above it with kl.where=reward: only a coefficient in the reward is steered"
        _require(legal, "kl.target", self.target, rule)
        _require(0 < self.horizon < math.inf, "kl.horizon", self.horizon, "above 0, and finite")
        legal = self.target == 0 or self.coef > 0
        _require(legal, "kl.coef", self.coef, "above 0 with kl.target, which multiplies it")
        legal = self.target > 0 or self.horizon == KLConfig.horizon
        _require(legal, "kl.horizon", self.horizon, f"{KLConfig.horizon} without kl.target")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What every run has; a run adds the sections that its algorithm's roles need."""

    model: str = "embedded"  # embedded, smollm2, a Hugging Face directory or a .gguf file
    init: Literal["pretrained", "random"] = "pretrained"  # random: config.json only, new weights
    placement: str = ""  # a TOML file or a preset; empty: one pool over the devices found
    runtime: Literal["ray", "local"] = "ray"  # processes, or everything in this one
    out: str = ""  # the run's directory; empty: runs/ALGORITHM-DATE-TIME
    steps: int = 0  # iterations; 0: until the epochs end
    epochs: int = 1  # passes over the training prompts, when steps is 0
    seed: int = 0  # of shuffling, sampling and new weights
    save_every: int = 0  # steps between checkpoints; 0: only the last step
    keep_last: int = 2  # checkpoints kept
    keep_best: str = ""  # and that with the highest value of this metric, '-' before it: lowest
    on_save_error: Literal["stop", "continue"] = "stop"  # where a checkpoint cannot be written
    max_restarts: int = 0  # times a run goes on from its last checkpoint after a failure
    eval_every: int = 0  # steps between evaluations; 0: before and after training only
    resume: bool = False  # continue from the newest whole checkpoint in out
    deadline_s: float = 1800.0  # longest wait for any call
    start_deadline_s: float = 180.0  # longest wait for the pools' processes to start, and to meet
    tensorboard: bool = True  # write TensorBoard events beside metrics.jsonl
    trace: bool = False  # write every call's begin, end, rows, tokens and bytes to trace.json

    def __post_init__(self) -> None:
        _require(bool(self.out) or not self.resume, "out", repr(self.out), "set with --resume")
        for name in ("steps", "save_every", "eval_every", "seed", "max_restarts"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        _require(self.seed < 2**32, "seed", self.seed, "below 2**32: keys have 32 bits")
        for name in ("epochs", "keep_last"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("deadline_s", "start_deadline_s"):
            legal = 0 < getattr(self, name) < math.inf
            _require(legal, name, getattr(self, name), "seconds above 0, and finite")


SECTIONS: dict[str, type] = {
    "data": DataConfig,
    "rollout": RolloutConfig,
    "actor": TrainingConfig,
    "critic": CriticConfig,
    "reward": RewardConfig,
    "cost": CostConfig,
}


def read_toml(path: str | Path) -> dict[str, Any]:
    """The table in a TOML file; a syntax error names the file, line and column."""
    try:
        return tomllib.loads(Path(path).read_text())
    except FileNotFoundError:
        raise ValueError(f"config={path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"config={path}: cannot be read as TOML: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: not valid TOML: {error}") from None


def from_dict(cls: type, table: Mapping[str, Any], *, where: str, base: Any = None) -> Any:
    """An instance of the dataclass `cls`: `base` (or the defaults) with the table's values.

    Raises ValueError naming section and key for unknown keys (with the nearest legal one),
    wrong types and illegal values.
    """
    check_names(cls, _dotted(table), where=where)
    return _from_table(cls, table, where, cls() if base is None else base)


def _from_table(cls: type, table: Mapping[str, Any], where: str, base: Any) -> Any:
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in table.items():
        kind = hints[key]
        if dataclasses.is_dataclass(kind):
            if not isinstance(value, Mapping):
                raise ValueError(f"{where}: {key}={value!r} must be a table [{key}]")
            inner = getattr(base, key)
            values[key] = _from_table(typing.cast(type, kind), value, f"{where} [{key}]", inner)
        else:
            values[key] = _typed(kind, value, f"{where}: {key}")
    try:
        return dataclasses.replace(base, **values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def setting_names(cls: type) -> dict[str, Any]:
    """Every setting of a dataclass by dotted name, as actor.optimizer.lr, with its type."""
    names: dict[str, Any] = {}
    for name, kind in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(kind):
            inner = setting_names(typing.cast(type, kind))
            names |= {f"{name}.{rest}": leaf for rest, leaf in inner.items()}
        else:
            names[name] = kind
    return names


def check_names(cls: type, names: Iterable[str], *, where: str) -> None:
    """Refuses dotted names that are no setting or section of `cls`, with the nearest that is."""
    legal = setting_names(cls)
    sections = {name.rpartition(".")[0] for name in legal}
    for name in names:
        if name in legal or any(f"{section}.".startswith(f"{name}.") for section in sections):
            continue
        top = name.partition(".")[0]
        if top in SECTIONS and top not in sections:
            used = ", ".join(sorted(section for section in sections if section))
            raise ValueError(
                f"{where}: section [{top}] is not used by this algorithm; its sections: {used}"
            )
        section, _, key = name.rpartition(".")
        section = section if section in sections else ""
        same = [each.rpartition(".")[2] for each in legal if each.rpartition(".")[0] == section]
        at = f" in [{section}]" if section else ""
        raise ValueError(
            f"{where}: unknown key '{name.removeprefix(f'{section}.')}'{at}; did you mean "
            f"'{_nearest(key, section, legal)}'? legal keys{at}: {', '.join(sorted(same))}"
        )


def _nearest(key: str, section: str, legal: Iterable[str]) -> str:
    """The likeliest meant: so named or nearly so, the same section first; learning_rate is lr."""
    initials = "".join(word[:1] for word in key.replace("-", "_").split("_"))

    def likeness(name: str) -> tuple[float, bool]:
        at, _, leaf = name.rpartition(".")
        alike = difflib.SequenceMatcher(None, key, leaf).ratio()
        return max(alike, 0.9 * (leaf == initials)) + 0.1 * (at == section), at == section

    return max(legal, key=likeness)


def _dotted(table: Mapping[str, Any]) -> Iterator[str]:
    """Dotted names of a table's keys; an empty section counts as a key."""
    for key, value in table.items():
        inner = list(_dotted(value)) if isinstance(value, Mapping) else []
        yield from (f"{key}.{name}" for name in inner) if inner else [key]


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested table by dotted names: {"actor.optimizer.lr": 1e-6, ...}."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        nested = isinstance(value, Mapping)
        found |= flat(value, f"{prefix}{name}.") if nested else {prefix + name: value}
    return found


def to_toml(config: Any) -> str:
    """The settings as TOML; reading it back gives the same settings."""
    return tomli_w.dumps(dataclasses.asdict(config))


def _typed(kind: Any, value: Any, where: str) -> Any:
    """`value` if it is of the annotated kind (an int is a float), else ValueError."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        if value not in args:
            raise ValueError(f"{where}={value!r}; use one of {', '.join(map(str, args))}")
        return value
    if origin in (tuple, list):
        if not isinstance(value, list | tuple):
            raise ValueError(f"{where}={value!r}; use a list")
        return tuple(_typed(args[0], v, where) for v in value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{where}={value!r} is {type(value).__name__}; use a {kind.__name__}")
    return value


def _require(legal: bool, name: str, value: Any, rule: str) -> None:
    if not legal:
        raise ValueError(f"{name}={value}: must be {rule}")
