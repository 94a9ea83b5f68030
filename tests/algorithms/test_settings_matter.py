# SPDX-License-Identifier: Apache-2.0
"""Every setting of every algorithm changes what a step computes, or is refused by name."""

import dataclasses
from collections.abc import Iterator
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any, get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from algorithms import dpo, grpo, ppo, reinforce_pp, remax, reward_model, rloo, safe_rlhf, sft
from hfjax import rl
from hfjax.batch import Batch
from hfjax.config import KLConfig
from hfjax.engine.train import Outputs
from hfjax.metrics import finalize

ALGORITHMS = (ppo, grpo, remax, rloo, reinforce_pp, safe_rlhf, dpo, reward_model, sft)
B, T = 8, 6
OTHER = {  # values that the batch below tells from the default; others are halves, or 0.3 for 0
    **{"dual_clip": 2.0, "score_clip": 0.5, "value_clip": 0.2, "rollout_cap": 4.0, "target": 0.1},
    **{"dynamic_batches": 2, "cost_window": 4, "aggregation_length": 5, "horizon": 3.0},
    **{"overlong_from": 3, "overlong_buffer": 3},
}
SUM_NORM = "seq-mean-token-sum-norm"
NORM = {"aggregation": SUM_NORM, "aggregation_length": 8}
LONG = {"overlong_from": 2, "overlong_buffer": 2}
BESIDE = {  # what a setting needs beside it
    "rollout_cap": {"rollout_correction": "token"},
    "aggregation_length": NORM,
    **dict.fromkeys(("overlong_from", "overlong_buffer", "overlong_factor"), LONG),
    "kl.where": {"kl.estimator": "k3"},
    "kl.horizon": {"kl.target": 0.1},
    "aggregation": NORM,
}
REFUSED = {  # whatever stands beside
    *((grpo, "kl.where", "reward"), (grpo, "kl.estimator", "k1"), (sft, "aggregation", SUM_NORM)),
    *((grpo, "kl.target", OTHER["target"]), (grpo, "kl.horizon", OTHER["horizon"])),
}


def drawn_columns() -> dict[str, np.ndarray]:
    """Two responses to each of four prompts; the scores of the first prompt are equal."""
    rng = np.random.default_rng(3)
    mask_BT = np.arange(T) >= 1
    mask_BT = mask_BT & (np.arange(T) <= rng.integers(2, T, B)[:, None])
    names = ("old_log_probs", "ref_log_prob", "rollout_log_probs", "rollout_truncated_log_probs")
    more = ("values", "cost_values", "new_log_probs", "new_values")
    columns = {name: rng.normal(0, 1, (B, T)).astype(np.float32) for name in (*names, *more)}
    score_B = rng.normal(0, 2, B).astype(np.float32)
    score_B[1] = score_B[0]
    lengths = {"prompt_length": np.ones(B, int), "length": 1 + mask_BT.sum(-1)}
    cost_B = rng.normal(8, 8, B).astype(np.float32)
    scored = {"score": score_B, "cost": cost_B, "response_mask": mask_BT}
    rows = {"uid": np.arange(B) // 2, "row_id": np.arange(B, dtype=np.int32)}
    return columns | scored | lengths | rows


COLUMNS = drawn_columns()


class Role:
    """Answers calls from COLUMNS; an update is the role's loss on outputs that have moved."""

    def __init__(self, name: str, calls: list[str], settings: dict[str, Any]) -> None:
        self.name, self.calls, self.settings = name, calls, settings

    def _answer(self, call: str, *names: str, rows: int = B, **renamed: str) -> Batch:
        self.calls.append(f"{self.name}.{call}")
        columns = {name: COLUMNS[name] for name in names}
        columns |= {name: COLUMNS[of] for name, of in renamed.items()}
        return Batch({name: x[:rows] for name, x in columns.items()})

    def generate_sequences(self, prompts: Batch, **how: Any) -> Batch:
        names = ("response_mask", "rollout_log_probs", "rollout_truncated_log_probs", "length")
        return self._answer("generate", *names, "prompt_length", rows=len(prompts))

    def compute_log_prob(self, batch: Batch) -> Batch:
        return self._answer("log_prob", "old_log_probs")

    def compute_ref_log_prob(self, batch: Batch) -> Batch:
        return self._answer("ref_log_prob", "ref_log_prob")

    def compute_values(self, batch: Batch) -> Batch:
        return self._answer("values", values="values" if self.name == "critic" else "cost_values")

    def compute_reward(self, batch: Batch, **how: Any) -> Batch:
        return self._answer("reward", "score", rows=len(batch))

    def compute_cost(self, batch: Batch) -> Batch:
        return self._answer("cost", "cost")

    def update(self, batch: Batch, key: str = "loss") -> dict[str, Any]:
        self.calls.append(f"{self.name}.{key}")
        outputs = Outputs(
            log_probs_BT=jnp.asarray(COLUMNS["new_log_probs"]),
            entropy_BT=jnp.asarray(COLUMNS["values"] ** 2),
            values_BT=jnp.asarray(COLUMNS["new_values"]),
            scores_B=jnp.asarray(COLUMNS["score"]),
        )
        columns = {name: jnp.asarray(batch[name]) for name in batch.names}
        total = rl.denominators(columns["response_mask"])
        loss, metrics = self.settings[key](outputs, columns, total)
        found = finalize(metrics) | {"loss": float(loss)}
        return {f"{self.name}/{name}": value for name, value in found.items()}

    update_actor = update_critic = update_reward = update

    def update_pretrain(self, texts: Batch) -> dict[str, Any]:
        return self.update(texts, "pretrain")


@cache
def observed(algorithm: ModuleType, cfg: Any) -> dict[str, Any]:
    """Roles, calls, columns and metrics of two steps."""
    calls: list[str] = []
    table = algorithm.roles(cfg)
    roles = {name: Role(name, calls, part.keywords) for name, part in table.items()}
    prompts = Batch({name: COLUMNS[name] for name in ("uid", "row_id")})
    pairs = Batch({name: COLUMNS[name] for name in ("response_mask", "length", "prompt_length")})
    m = SimpleNamespace(**roles, step=2, rollout_agrees=True, memory={})
    m.more_prompts, m.more_texts = lambda: prompts, lambda: pairs
    found: dict[str, Any] = {"roles": sorted(table), "calls": calls}
    for i in range(2):
        with jax.disable_jit():  # settings are static: each would compile
            batch, metrics = algorithm.step(m, prompts if hasattr(cfg, "kl") else pairs, cfg)
        found |= {f"{i} {name}": np.asarray(batch[name]) for name in batch.names}
        found |= {f"{i} {name}": value for name, value in batch.metrics.result().items()}
        found |= {f"{i} {name}": value for name, value in metrics.items()}
    return found


def differ(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() != other.keys() or any(
        not np.array_equal(np.asarray(one[name]), np.asarray(other[name])) for name in one
    )


def changed(cfg: Any, changes: dict[str, Any]) -> Any:
    """cfg with other values; kl.NAME is one of its block."""
    inner = {name[3:]: value for name, value in changes.items() if name.startswith("kl.")}
    outer = {name: value for name, value in changes.items() if not name.startswith("kl.")}
    block = {"kl": dataclasses.replace(cfg.kl, **inner)} if inner else {}
    return dataclasses.replace(cfg, **outer, **block)


def settings_or_refusal(cfg: Any, changes: dict[str, Any]) -> tuple[Any, str]:
    try:
        return changed(cfg, changes), ""
    except ValueError as error:
        return None, str(error)


def others(hint: Any, name: str, default: Any) -> list[Any]:
    if name in OTHER:
        return [OTHER[name]]
    if get_args(hint):
        return [value for value in get_args(hint) if value != default]
    return [not default] if isinstance(default, bool) else [default / 2 if default else 0.3]


def every_change() -> Iterator[Any]:
    for algorithm in ALGORITHMS:
        cfg = algorithm.Settings()
        for part, prefix in ((cfg, ""), *([(cfg.kl, "kl.")] if hasattr(cfg, "kl") else [])):
            hints = get_type_hints(type(part))
            for field in dataclasses.fields(part):
                name, default = field.name, getattr(part, field.name)
                for value in others(hints[name], name, default) if name != "kl" else ():
                    title = f"{algorithm.__name__[11:]}-{prefix}{name}={value}"
                    yield pytest.param(algorithm, f"{prefix}{name}", value, id=title)


@pytest.mark.parametrize(("algorithm", "name", "value"), every_change())
def test_a_setting_has_an_effect_or_is_refused(
    algorithm: ModuleType, name: str, value: Any
) -> None:
    base = algorithm.Settings()
    cfg, refusal = settings_or_refusal(base, {name: value})
    if refusal:  # it belongs to others, and has an effect beside them
        assert name.removeprefix("kl.") in refusal or str(value) in refusal
        if (algorithm, name, value) in REFUSED:
            return
        assert name in BESIDE, f"refused: {refusal}"
        cfg = changed(base, BESIDE[name] | {name: value})
        base = base if name == "aggregation" else changed(base, BESIDE[name])
    assert differ(observed(algorithm, base), observed(algorithm, cfg))


def test_what_is_compared_is_the_same_for_the_same_settings() -> None:
    for algorithm in ALGORITHMS:
        first = observed(algorithm, algorithm.Settings())
        observed.cache_clear()
        assert not differ(first, observed(algorithm, algorithm.Settings()))


def test_a_divergence_that_is_not_asked_for_needs_no_reference() -> None:
    for algorithm in (ppo, grpo, remax, rloo, reinforce_pp, safe_rlhf):
        assert "reference" not in algorithm.roles(algorithm.Settings(kl=KLConfig(where="none")))
