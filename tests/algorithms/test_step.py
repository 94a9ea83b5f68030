# SPDX-License-Identifier: Apache-2.0
"""The step functions read like the paper's figure, and their host arithmetic is right."""

import ast
import inspect
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from algorithms import dpo, grpo, ppo, reinforce_pp, remax, reward_model, rloo, safe_rlhf, sft
from hfjax import rl
from hfjax.batch import Batch
from hfjax.config import KLConfig
from hfjax.engine.train import Outputs


@pytest.mark.parametrize(
    "algorithm", [ppo, grpo, remax, rloo, reinforce_pp, safe_rlhf, dpo, reward_model, sft]
)
def test_a_step_has_at_most_twelve_lines(algorithm: ModuleType) -> None:
    tree = ast.parse(inspect.getsource(algorithm.step)).body[0]
    assert isinstance(tree, ast.FunctionDef)
    assert tree.end_lineno is not None
    most = 14 if algorithm is safe_rlhf else 12
    assert tree.end_lineno - tree.body[0].lineno <= most


def _batch() -> Batch:
    mask_BT = np.array([[0, 1, 1, 0], [0, 1, 1, 1]], bool)
    return Batch(
        score=np.array([1.0, 3.0], np.float32),
        response_mask=mask_BT,
        values=np.where(mask_BT, np.float32(0.5), np.float32(np.nan)),
        old_log_probs=np.where(mask_BT, np.float32(-1), np.float32(0)),
        ref_log_prob=np.where(mask_BT, np.float32(-1.5), np.float32(0)),
        uid=np.array([0, 0]),
    )


def test_kl_is_taken_from_the_reward_and_the_score_lands_on_the_last_token() -> None:
    cfg = ppo.Settings(kl=KLConfig(where="reward", estimator="k1", coef=0.1))
    columns = ppo.compute_advantage(_batch(), cfg, {})
    # k1 = -1 - -1.5 = 0.5 a token, times 0.1
    expected = [[0, -0.05, 0.95, 0], [0, -0.05, -0.05, 2.95]]
    np.testing.assert_allclose(columns["token_level_rewards"], expected, atol=1e-6)
    returns = [[0, 0.90, 0.95, 0], [0, 2.85, 2.90, 2.95]]  # gamma = lambda = 1
    np.testing.assert_allclose(columns["returns"], returns, atol=1e-6)
    advantages = columns["advantages"][_batch()["response_mask"]]
    assert abs(advantages.mean()) < 1e-6
    assert abs(advantages.std(ddof=1) - 1) < 1e-5


def test_the_group_is_the_baseline() -> None:
    columns = grpo.compute_advantage(_batch(), grpo.Settings())
    # scores 1 and 3: mean 2, deviation sqrt(2) with n-1
    expected = [[0, -0.70711, -0.70711, 0], [0, 0.70711, 0.70711, 0.70711]]
    np.testing.assert_allclose(columns["advantages"], expected, atol=1e-5)
    assert columns.metrics.result() == {"critic/flat_groups": 0}
    level = _batch() | {"score": np.array([3.0, 3.0], np.float32)}
    assert grpo.compute_advantage(level, grpo.Settings()).metrics.result() == {
        "critic/flat_groups": 1
    }


def test_kl_inside_the_reward_is_refused_where_scores_are_compared_by_group() -> None:
    with pytest.raises(ValueError, match=r"kl\.where=reward.*loss or none"):
        grpo.Settings(kl=KLConfig(where="reward"))


def test_remax_takes_the_greedy_score_from_what_is_to_come() -> None:
    """The greedy reward of row 1's prompt failed: it has no baseline, and is not trained."""
    cfg = remax.Settings(kl=KLConfig(where="reward", estimator="k1", coef=0.1))
    greedy = Batch(
        score=np.array([0.25, 9.0], np.float32),
        response_mask=np.array([[0, 1, 0], [0, 0, 0]], bool),
    )
    batch = _batch() | {"uid": np.array([4, 7])}
    columns = remax.compute_advantage(batch, greedy, cfg, {})
    expected = [[0, 0.90 - 0.25, 0.95 - 0.25, 0], [0, 0, 0, 0]]
    np.testing.assert_allclose(columns["advantages"], expected, atol=1e-6)
    assert columns["response_mask"].any(-1).tolist() == [True, False]


def test_responses_of_a_prompt_share_the_baseline_of_remax() -> None:
    mask_BT = np.ones((4, 2), bool)
    score_B = np.arange(4, dtype=np.float32)
    batch = Batch(score=score_B, response_mask=mask_BT, uid=np.array([9, 9, 3, 3]))
    greedy = batch.select(rl.first_rows(batch["uid"]))  # of prompt 3, then of prompt 9
    assert greedy["score"].tolist() == [2, 0]
    cfg = remax.Settings(kl=KLConfig(where="none"))
    found = remax.compute_advantage(batch, greedy, cfg, {})["advantages"]
    assert found[:, 0].tolist() == [0, 1, 0, 1]


def test_rloo_compares_a_response_with_the_others() -> None:
    """Rewards with their KL are 0.90 and 2.85."""
    cfg = rloo.Settings(kl=KLConfig(where="reward", estimator="k1", coef=0.1))
    columns = rloo.compute_advantage(_batch(), cfg, {})
    expected = [[0, -1.95, -1.95, 0], [0, 1.95, 1.95, 1.95]]
    np.testing.assert_allclose(columns["advantages"], expected, atol=1e-6)


@pytest.mark.parametrize("baseline", ["none", "group"])
def test_reinforce_pp_whitens_returns_over_the_batch(baseline: str) -> None:
    cfg = reinforce_pp.Settings(kl=KLConfig(where="none"), baseline=baseline)
    columns = reinforce_pp.compute_advantage(_batch(), cfg, {})
    score_B = np.array([1.0, 3.0]) if baseline == "none" else np.array([-1.0, 1.0])
    tokens = np.repeat(score_B, [2, 3])
    white = (tokens - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    found = columns["advantages"][_batch()["response_mask"]]
    np.testing.assert_allclose(found, white, rtol=1e-5)


def test_a_response_that_runs_long_loses_reward() -> None:
    """DAPO: 2 tokens are free, 4 cost 1; rows of 2 and 3 tokens lose 0 and 0.5."""
    lengths = {"prompt_length": np.array([1, 1]), "length": np.array([3, 4])}
    batch = _batch() | lengths
    plain, shaped = (
        grpo.compute_advantage(batch, grpo.Settings(normalize="none", **more))["advantages"]
        for more in ({}, {"overlong_from": 2, "overlong_buffer": 2})
    )
    assert plain[:, 1].tolist() == [-1.0, 1.0]
    assert shaped[:, 1].tolist() == [-0.75, 0.75]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"overlong_from": 5}, "overlong_from=5, overlong_buffer=0"),
        ({"aggregation_length": 8}, "aggregation_length=8: only aggregation 'seq-mean"),
        ({"aggregation": "seq-mean-token-sum-norm"}, "divides by a constant length"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grpo.Settings(**settings)


def test_the_kl_coefficient_is_steered_and_remembered() -> None:
    """The KL is 0.5 a token in both rows, 0.2 above its target by more than a fifth."""
    kl = KLConfig(where="reward", estimator="k1", coef=0.1, target=0.1, horizon=100)
    cfg, memory = rloo.Settings(kl=kl), {}
    first = rloo.compute_advantage(_batch(), cfg, memory)
    assert first.metrics["actor/reward_kl_penalty"] == pytest.approx(0.5)
    assert first.metrics["actor/reward_kl_penalty_coeff"] == pytest.approx(0.1)
    assert memory == {"kl_coef": pytest.approx(0.1 * (1 + 0.2 * 2 / 100))}
    second = rloo.compute_advantage(_batch(), cfg, memory)
    assert second.metrics["actor/reward_kl_penalty_coeff"] == pytest.approx(memory["kl_coef"], 0.01)


def _costly() -> Batch:
    more = {"cost": np.array([1.0, 0.0], np.float32), "cost_values": np.zeros((2, 4), np.float32)}
    return _batch() | more


def test_the_multiplier_rises_with_the_cost_of_the_last_responses() -> None:
    """log lambda += 0.1 x 1 x (0.5 - 0.2); then a window of three: (1 + 0 + 0) / 3 is left."""
    cfg = safe_rlhf.Settings(cost_limit=0.2, cost_window=3)
    memory: dict = {}
    assert safe_rlhf.step_multiplier(np.array([1.0, 0.0]), cfg, memory) == (
        0.5,
        pytest.approx(np.exp(0.03)),
    )
    mean, multiplier = safe_rlhf.step_multiplier(np.array([0.0, 0.0]), cfg, memory)
    assert (mean, memory["episode_costs"]) == (0.0, [0.0, 0.0, 0.0])
    assert multiplier == pytest.approx(np.exp(0.03 + 0.1 * np.exp(0.03) * -0.2))
    for _ in range(200):
        _, multiplier = safe_rlhf.step_multiplier(np.array([9.0]), cfg, memory)
    assert multiplier == pytest.approx(5.0)
    off = safe_rlhf.Settings(multiplier=0.0)
    assert safe_rlhf.step_multiplier(np.array([9.0]), off, {}) == (9.0, 0.0)


@pytest.mark.parametrize("two", [True, False])
def test_the_combined_reward_carries_the_kl_once(two: bool) -> None:
    """With values 0 and lambda, gamma 1: what is to come of (r - l c) / (1 + l) - beta kl."""
    kl = KLConfig(where="reward", estimator="k1", coef=0.1)
    cfg = safe_rlhf.Settings(
        kl=kl, lam=1.0, cost_critic=two, multiplier=2.0, cost_limit=0.5, multiplier_lr=1e-9
    )
    batch = _costly() | {"values": np.zeros((2, 4), np.float32)}
    columns = safe_rlhf.compute_advantage(batch, cfg, {})
    last = (1.0 - 2.0 * 1.0) / 3.0 - 0.05, (3.0 - 2.0 * 0.0) / 3.0 - 0.05
    expected = [[0, last[0] - 0.05, last[0], 0], [0, last[1] - 0.1, last[1] - 0.05, last[1]]]
    np.testing.assert_allclose(columns["advantages"], expected, atol=1e-5)
    assert ("cost_returns" in columns) == two


def test_rewards_and_costs_of_tokens_are_clipped() -> None:
    cfg = safe_rlhf.Settings(kl=KLConfig(where="none"), score_clip=0.5, multiplier_lr=1e-9)
    batch = _costly() | {"values": np.zeros((2, 4), np.float32)}
    columns = safe_rlhf.compute_advantage(batch | {"cost": np.array([9.0, -9.0])}, cfg, {})
    assert columns["token_level_rewards"].max() == 0.5
    assert columns["cost_returns"].max() == 0.5
    assert columns["cost_returns"].min() == -0.5


def test_without_a_multiplier_costs_are_only_watched() -> None:
    cfg = safe_rlhf.Settings(multiplier=0.0, lam=1.0)
    safe = safe_rlhf.compute_advantage(_costly(), cfg, {})
    same = {"kl": cfg.kl, "lam": 1.0, "aggregation": cfg.aggregation, "value_clip": 5.0}
    plain = ppo.compute_advantage(_batch(), ppo.Settings(**same), {})
    np.testing.assert_allclose(safe["returns"], plain["returns"], rtol=1e-6)


def test_flat_groups_make_room_for_others() -> None:
    """Groups 0 and 2 of three are flat; a new batch brings two that are not, and one that is."""

    class Role:
        def generate_sequences(self, prompts: Batch) -> Batch:
            return Batch(response_mask=np.ones((len(prompts), 2), bool))

        def compute_reward(self, batch: Batch) -> Batch:
            return Batch(score=scores.pop())

    def a_batch() -> Batch:
        rows = np.arange(6, dtype=np.int32)
        return Batch(row_id=rows, uid=rows.astype(np.int64) // 2)

    scores = [np.array([0, 1, 5, 6, 7, 7], np.float32), np.array([1, 1, 2, 3, 4, 4], np.float32)]
    m = SimpleNamespace(actor=Role(), reward=Role(), more_prompts=a_batch)
    first = a_batch() | {"response_mask": np.ones((6, 2), bool)}
    batch = grpo.refilled(m, first, 3)
    assert batch["score"].tolist() == [2, 3, 0, 1, 5, 6]
    assert batch["row_id"].tolist() == [2, 3, 6, 7, 8, 9]
    assert len(np.unique(batch["uid"])) == 3
    assert scores == []  # no third batch was asked for
    assert batch.metrics.result() == {"dynamic/batches": 2.0, "dynamic/flat": 0.0}


def test_the_multiplier_sees_the_mean_cost_and_stays_finite() -> None:
    """Costs 1, 3, 2, 2 exceed their limit of 1 by 1: 0.5 exp(0.05), however many there are."""
    cfg = safe_rlhf.Settings(cost_limit=1.0, multiplier=0.5)
    for cost_B in (np.array([1.0, 3, 2, 2]), np.array([1.0, 3, 2, 2] * 2)):
        memory: dict = {}
        assert safe_rlhf.step_multiplier(cost_B, cfg, memory)[1] == pytest.approx(0.52564, abs=1e-5)
    last = 0.52564
    for _ in range(100):
        _, multiplier = safe_rlhf.step_multiplier(np.zeros(128), cfg, memory)
        assert 0 < multiplier < last
        last = multiplier
    calm = safe_rlhf.Settings(cost_limit=0.0, multiplier=0.5)
    assert safe_rlhf.step_multiplier(np.zeros(4), calm, {})[1] == pytest.approx(0.5)


def test_a_cost_that_is_no_number_moves_nothing() -> None:
    cfg, memory = safe_rlhf.Settings(), {}
    assert safe_rlhf.step_multiplier(np.array([np.nan, np.inf]), cfg, memory) == (0.0, 1.0)
    assert safe_rlhf.step_multiplier(np.array([]), cfg, memory) == (0.0, 1.0)
    assert memory["episode_costs"] == []


def test_costs_have_a_critic_of_their_own() -> None:
    """Rewards of 7, no costs: returns of costs are 0; advantages 1 and 3 give (1 - 3) / 2."""
    cfg = safe_rlhf.Settings(kl=KLConfig(where="none"), multiplier_lr=1e-9, lam=1.0)
    zeros_BT = np.zeros((2, 4), np.float32)
    plain = {"score": np.full(2, 7, np.float32), "cost": np.zeros(2, np.float32)}
    columns = safe_rlhf.compute_advantage(_costly() | plain | {"values": zeros_BT}, cfg, {})
    assert not np.asarray(columns["cost_returns"]).any()
    both = {"score": np.ones(2, np.float32), "cost": np.full(2, 3, np.float32)}
    columns = safe_rlhf.compute_advantage(_costly() | both | {"values": zeros_BT}, cfg, {})
    found = columns["advantages"][_batch()["response_mask"]]
    np.testing.assert_allclose(found, -1.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("sampled", "greedy", "wanted"), [([3, 1], [2, 2], [1, -1]), ([1, 1], [0, 0], [1, 1])]
)
def test_remax_rewards_what_beats_the_greedy_response(
    sampled: list, greedy: list, wanted: list
) -> None:
    mask_BT = np.array([[0, 1, 1], [0, 1, 0]], bool)
    batch, baseline = (
        Batch(score=np.array(score, np.float32), response_mask=mask_BT, uid=np.arange(2))
        for score in (sampled, greedy)
    )
    cfg = remax.Settings(kl=KLConfig(where="none"))
    found = remax.compute_advantage(batch, baseline, cfg, {})["advantages"]
    np.testing.assert_allclose(found, mask_BT * np.array(wanted)[:, None])


def test_the_pretraining_loss_is_weighed() -> None:
    logp_BT = np.array([[0.0, -1.0, -3.0]], np.float32)
    mask_BT = np.array([[False, True, True]])
    outputs, batch = Outputs(log_probs_BT=logp_BT), {"response_mask": mask_BT}
    cfg = safe_rlhf.Settings(ptx_coef=16.0)
    loss, metrics = safe_rlhf.pretrain_loss(outputs, batch, rl.denominators(mask_BT), cfg=cfg)
    assert (float(loss), float(metrics["nll"].sum)) == (32.0, 2.0)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_missing_baseline_is_an_error(rows: int) -> None:
    batch = _batch() | {"uid": np.array([4, 7])}
    greedy = Batch(score=np.zeros(rows, np.float32), response_mask=np.ones((rows, 3), bool))
    with pytest.raises(ValueError, match=f"{rows} greedy responses to 2 prompts"):
        remax.compute_advantage(batch, greedy, remax.Settings(kl=KLConfig(where="none")), {})
    with pytest.raises(KeyError, match="score"):
        remax.compute_advantage(batch, batch.columns("response_mask"), remax.Settings(), {})


def test_greedy_rows_are_scored_and_neither_trained_nor_counted() -> None:
    """Two prompts of two responses: four rows are trained, two more have a reward."""
    seen: dict[str, list[Batch]] = {"reward": [], "trained": []}

    class Role:
        def generate_sequences(
            self, prompts: Batch, *, greedy: bool = False, group: int = 2
        ) -> Any:
            mask_BT = np.ones((len(prompts), 2), bool)
            return Batch(response_mask=mask_BT, greedy=np.full(len(prompts), greedy))

        def compute_log_prob(self, batch: Batch) -> Batch:
            assert not batch["greedy"].any()
            return Batch(old_log_probs=np.zeros((len(batch), 2), np.float32))

        def compute_reward(self, batch: Batch, group: int = 2) -> Batch:
            seen["reward"].append(batch)
            return Batch(score=np.arange(len(batch), dtype=np.float32))

        def update_actor(self, batch: Batch) -> dict:
            seen["trained"].append(batch)
            return {}

    m = SimpleNamespace(actor=Role(), reward=Role(), memory={}, step=1, rollout_agrees=False)
    cfg = remax.Settings(kl=KLConfig(where="none"))
    counted, _ = remax.step(m, Batch(uid=np.array([0, 0, 1, 1])), cfg)
    assert [batch["greedy"].tolist() for batch in seen["reward"]] == [[False] * 4, [True] * 2]
    for batch in (counted, *seen["trained"]):
        assert batch["greedy"].tolist() == [False] * 4
    assert counted["advantages"][:, 0].tolist() == [0, 1, 1, 2]  # 0 to 3, less 0 and 1
