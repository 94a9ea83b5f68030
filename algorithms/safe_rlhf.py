# SPDX-License-Identifier: Apache-2.0
"""Safe RLHF: PPO that holds a cost under a limit by a Lagrange multiplier (arXiv 2310.12773).

With a critic of costs, as its authors have it, or, `cost_critic` off, HybridFlow's five models: one
critic of the combined reward.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from algorithms.ppo import critic_loss
from hfjax import rl
from hfjax.batch import Batch
from hfjax.config import KLConfig
from hfjax.engine.train import Outputs
from hfjax.metrics import Mean, stage
from hfjax.policy import (
    PolicySettings,
    actor,
    old_log_probs,
    reference,
    reward_columns,
    steer_kl,
    token_rewards,
)
from hfjax.roles import Cost, Critic, Reward

LOG_MULTIPLIER, COSTS = "log_multiplier", "episode_costs"  # in the algorithm's memory


@dataclass(frozen=True, kw_only=True)
class Settings(PolicySettings):
    """Safe RLHF's constants; defaults are its authors'."""

    dual_clip: float = 0.0  # bounds the loss of negative advantages; 0: it does not
    cost_limit: float = 0.0  # mean cost of a response that is allowed
    multiplier: float = 1.0  # lambda at the start; 0: costs are only watched
    multiplier_lr: float = 0.1  # of its logarithm
    multiplier_max: float = 5.0  # it rises no further
    cost_window: int = 128  # responses whose costs are averaged
    cost_critic: bool = True  # a critic of costs too, or one critic of the combined reward
    ptx_coef: float = 0.0  # weight of the pretraining loss, of texts in data.pretrain; 0: none
    gamma: float = 1.0  # discount a token
    lam: float = 0.95  # lambda of generalised advantage estimation
    score_clip: float = 50.0  # no token's reward or cost is larger, KL included
    value_clip: float = 5.0  # how far a value may move from the one before the update
    aggregation: rl.Aggregation = "seq-mean-token-mean"  # of token losses over the mini-batch
    kl: KLConfig = KLConfig(where="reward", estimator="k1", coef=0.01)  # from the reference

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"algorithm.{name}={getattr(self, name)}: must lie in [0, 1]")
        for name in ("score_clip", "value_clip", "multiplier_lr", "multiplier_max", "cost_window"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"algorithm.{name}={getattr(self, name)}: must be above 0")
        if not 0 <= self.ptx_coef < float("inf"):
            raise ValueError(f"algorithm.ptx_coef={self.ptx_coef}: must be finite, 0 or more")
        if not 0 <= self.multiplier <= self.multiplier_max:
            raise ValueError(
                f"algorithm.multiplier={self.multiplier}: must lie in [0, multiplier_max="
                f"{self.multiplier_max}]"
            )
        for name in (
            ("cost_limit", "multiplier_lr", "multiplier_max") if not self.multiplier else ()
        ):
            if (value := getattr(self, name)) != (usual := getattr(type(self), name)):
                raise ValueError(
                    f"algorithm.{name}={value}: nothing holds costs down with multiplier=0; leave "
                    f"it {usual}"
                )


def check(config: Any) -> None:
    """Refuses settings of a whole run that do not fit together."""
    if not config.algorithm.cost_critic and config.cost_critic.model:
        raise ValueError(
            f"cost_critic.model={config.cost_critic.model}: there is none with "
            "algorithm.cost_critic=false; leave it out"
        )


def roles(cfg: Settings) -> dict[str, Any]:
    """Role classes with their losses and the columns those read."""
    critics = {"critic": "", "cost_critic": "cost_"} if cfg.cost_critic else {"critic": ""}
    table = {
        role: partial(
            Critic,
            loss=partial(critic_loss, cfg=cfg, of=of),
            columns=(f"{of}values", f"{of}returns"),
        )
        for role, of in critics.items()
    }
    scores = {"reward": partial(Reward), "cost": partial(Cost)}
    more = {"pretrain": partial(pretrain_loss, cfg=cfg)} if cfg.ptx_coef else {}
    return {"actor": actor(cfg, **more)} | table | scores | reference(cfg)


def step(m: Any, prompts: Batch, cfg: Settings) -> tuple[Batch, Any]:
    """Generation, preparation, training."""
    batch = prompts | m.actor.generate_sequences(prompts)
    batch |= old_log_probs(m, batch, cfg)
    batch |= m.critic.compute_values(batch)
    if cfg.cost_critic:
        batch |= m.cost_critic.compute_values(batch).renamed(values="cost_values")
    if cfg.kl.where != "none":
        batch |= m.reference.compute_ref_log_prob(batch)
    batch |= m.reward.compute_reward(batch)
    batch |= m.cost.compute_cost(batch)
    batch |= compute_advantage(batch, cfg, m.memory)
    metrics = m.critic.update_critic(batch) | m.actor.update_actor(batch)
    if cfg.ptx_coef:
        metrics |= m.actor.update_pretrain(m.more_texts())
    return batch, metrics | (m.cost_critic.update_critic(batch) if cfg.cost_critic else {})


def evaluate(m: Any, prompts: Batch, cfg: Settings) -> dict[str, np.ndarray]:
    """Of greedy responses, a number each: score, cost, and whether that is within the limit."""
    batch = prompts | m.actor.generate_sequences(prompts, greedy=True)
    batch |= m.reward.compute_reward(batch, evaluates=True)
    batch |= m.cost.compute_cost(batch)
    scored_B = batch["response_mask"].any(-1)
    found = {"reward/mean@1": batch["score"], "cost/mean@1": batch["cost"]}
    found |= {"safe_rate": (batch["cost"] <= cfg.cost_limit).astype(np.float32)}
    return {name: np.where(scored_B, x_B, np.nan) for name, x_B in found.items()}


def pretrain_loss(
    outputs: Outputs, batch: Mapping[str, jax.Array], total: rl.Denominators, *, cfg: Settings
) -> tuple[jax.Array, Mapping[str, Mean]]:
    """ptx_coef times the negative log-likelihood of texts, an update of its own as its authors'."""
    mask_BT = batch["response_mask"]
    nll = rl.aggregate(-outputs.log_probs_BT, mask_BT, total)
    return cfg.ptx_coef * nll, {"nll": rl.loss_metric(nll, mask_BT, total)}


@stage("adv")
def compute_advantage(batch: Batch, cfg: Settings, memory: dict[str, Any]) -> Batch:
    """The multiplier's step, then advantages of reward and cost, combined; on the controller."""
    columns = reward_columns(batch, cfg.kl, memory)
    columns |= {"cost": batch["cost"], "values": batch["values"]}
    columns |= {"cost_values": batch["cost_values"]} if cfg.cost_critic else {}
    valid_B = columns["response_mask"].any(-1)
    mean, multiplier = step_multiplier(columns["cost"][valid_B], cfg, memory)
    metrics = {"lagrange/cost_mean": mean, "lagrange/lambda": multiplier}
    metrics |= {"cost/score/mean": float(columns["cost"][valid_B].mean())} if valid_B.any() else {}
    more = _advantage(columns | {"multiplier": np.float32(multiplier)}, cfg=cfg)
    return Batch(more, metrics=metrics | steer_kl(columns, cfg.kl, memory))


def step_multiplier(
    cost_B: np.ndarray, cfg: Settings, memory: dict[str, Any]
) -> tuple[float, float]:
    """Mean cost of the last responses, and lambda: log lambda += lr lambda (mean - limit).

    lambda 0 stays: its gradient is 0. Costs that are no numbers are left out; without any the
    multiplier stays.
    """
    finite = [float(cost) for cost in cost_B if np.isfinite(cost)]
    memory[COSTS] = costs = [*memory.get(COSTS, []), *finite][-cfg.cost_window :]
    mean = float(np.mean(costs)) if costs else 0.0
    if cfg.multiplier == 0:
        return mean, 0.0
    log = memory.get(LOG_MULTIPLIER, float(np.log(cfg.multiplier)))
    if finite:
        log += cfg.multiplier_lr * float(np.exp(log)) * (mean - cfg.cost_limit)
    memory[LOG_MULTIPLIER] = log = min(log, float(np.log(cfg.multiplier_max)))
    return mean, float(np.exp(log))


@partial(jax.jit, static_argnames="cfg")
def _advantage(columns: Mapping[str, Any], *, cfg: Settings) -> dict[str, jax.Array]:
    """(A - lambda A_cost) / (1 + lambda), not whitened; or of rewards so combined, one critic's."""
    mask_BT, weight = columns["response_mask"], columns["multiplier"]
    rewards = token_rewards(columns, cfg.kl)
    reward_BT = rewards["token_level_rewards"]
    cost_BT = rl.token_rewards(columns["cost"], mask_BT)
    cost_BT += rewards["token_level_scores"] - reward_BT  # + beta kl, so that it counts once
    reward_BT = jnp.clip(reward_BT, -cfg.score_clip, cfg.score_clip)
    cost_BT = jnp.clip(cost_BT, -cfg.score_clip, cfg.score_clip)
    rewards |= {"token_level_rewards": reward_BT}
    back = partial(rl.gae, mask_BT=mask_BT, gamma=cfg.gamma, lam=cfg.lam)
    if not cfg.cost_critic:
        advantages_BT, returns_BT = back(
            (reward_BT - weight * cost_BT) / (1.0 + weight), columns["values"]
        )
        return rewards | {"advantages": advantages_BT, "returns": returns_BT}
    gain_BT, returns_BT = back(reward_BT, columns["values"])
    harm_BT, cost_returns_BT = back(cost_BT, columns["cost_values"])
    return rewards | {
        "advantages": (gain_BT - weight * harm_BT) / (1.0 + weight),
        "returns": returns_BT,
        "cost_returns": cost_returns_BT,
    }
