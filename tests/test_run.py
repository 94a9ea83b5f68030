# SPDX-License-Identifier: Apache-2.0
"""Whole runs on tiny checkpoints: what users of other stacks saw go wrong must go right here."""

import dataclasses
import json
import logging
import signal
import types
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from algorithms import grpo, ppo, sft
from hfjax.algorithm import config_class
from hfjax.batch import Batch
from hfjax.config import from_dict, read_toml
from hfjax.controller.calls import CallRecord
from hfjax.metrics import Max
from hfjax.models.hf import load_config, load_params
from hfjax.models.llama import hidden_states, lm_logits
from hfjax.run import Run, train
from hfjax.rundir import export_run
from hfjax.timeline import stage_seconds
from meshes.mesh import MeshShape
from tests.fixtures import path_table, placed, write_lut, write_tiny_hf, write_tokenizer

EOS = 2
TOKENS_BT = np.array([[3, 4, 5, 6, 7], [8, 95, 0, 1, 2]], np.int32)


def word_reward(prompts: list[str], responses: list[str], truths: list[str]) -> list[float]:
    """1 for a response with any word in it, 0 for the bare end token."""
    return [float(bool(response)) for response in responses]


def prompts_file(path: Path, prompts: list[Any]) -> str:
    """A JSONL file of prompts, texts or ids."""
    lines = [json.dumps({"prompt": prompt, "ground_truth": ""}) for prompt in prompts]
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def configured(program: Any, folder: Path, model: Path, prompts: list[Any], **settings: Any) -> Any:
    """Settings of a small local run on one device, all of them overridable by section."""
    placement = folder / "placement.toml"
    roles = ("actor", "critic", "reference") if program is ppo else ("actor", "reference")
    if not placement.exists():
        placed(placement, MeshShape(), *roles)
    table: dict[str, Any] = {
        "model": str(model),
        "runtime": "local",
        "placement": str(placement),
        "out": str(folder / "run"),
        "steps": 1,
        "tensorboard": False,
        "data": {
            "train": prompts_file(folder / "train.jsonl", prompts),
            "prompts_per_step": len(prompts),
            "max_prompt_tokens": 64,
        },
        "rollout": {"max_new_tokens": 8, "n": 2 if program is grpo else 1},
        "reward": {"function": f"{__file__}:word_reward", "workers": 1},
        "actor": {"optimizer": {"lr": 0.0}},
    }
    for name, value in settings.items():
        known = table.get(name)
        table[name] = known | value if isinstance(known, dict) else value
    return from_dict(config_class(program), table, where="test")


def watched(algorithm: types.ModuleType) -> tuple[Any, list[dict[str, Any]]]:
    """The algorithm, and the list that its steps' batches will be appended to."""
    batches: list[dict[str, Any]] = []
    module = types.ModuleType(algorithm.__name__)
    vars(module).update(vars(algorithm))

    def step(models: Any, prompts: Batch, cfg: Any) -> tuple[Batch, Any]:
        batch, metrics = algorithm.step(models, prompts, cfg)
        batches.append(batch.resolved())
        return batch, metrics

    def roles(cfg: Any) -> dict[str, Any]:
        table = algorithm.roles(cfg)
        losses = ("loss", "measured_loss")
        given = {name: table["actor"].keywords.get(name) for name in losses}
        watched = {name: with_gap(loss) for name, loss in given.items() if loss}
        table["actor"] = partial(table["actor"], **watched)
        return table

    vars(module).update(step=step, roles=roles)
    return module, batches


def with_gap(loss: Any) -> Any:
    """The loss with a metric more: the largest |ratio - 1| of any token in any mini-batch."""

    def measured(outputs: Any, batch: Any, total: Any) -> Any:
        value, metrics = loss(outputs, batch, total)
        ratio_BT = jnp.exp(outputs.log_probs_BT - batch["old_log_probs"])
        gap_BT = jnp.where(batch["response_mask"], jnp.abs(ratio_BT - 1), 0)
        return value, metrics | {"ratio_gap": Max(gap_BT.max())}

    return measured


def records(run: Path) -> list[dict[str, Any]]:
    """What a run's metrics.jsonl holds."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "micro", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_the_ratio_is_one_before_any_update(
    tmp_path: Path, micro: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Dropout in the configuration is not applied: scoring and training see the same policy."""
    model = write_tiny_hf(tmp_path / "model", attention_dropout=0.1)
    config = configured(
        ppo,
        tmp_path,
        model,
        [[3, 4, 5], [6, 7], [8, 9, 10, 11, 12], [13]],
        rollout={"n": 4},
        actor={"epochs": 2, "minibatch_sequences": 4, "micro_sequences": micro},
    )
    (record,) = records(train(watched(ppo)[0], config))
    assert caplog.text.count("dropout is not applied") == 1  # though every role reads the file
    assert record["actor/ratio_gap"] <= 1e-5
    assert abs(record["actor/ppo_kl_k3"]) <= 1e-9
    assert record["actor/pg_clipfrac"] == 0


@pytest.mark.slow
def test_the_ratio_is_one_in_bfloat16_for_one_shape_of_pass(tmp_path: Path) -> None:
    """Log-softmax is in float32; the gap to the sampler is a metric of its own."""
    config = configured(
        ppo,
        tmp_path,
        write_tiny_hf(tmp_path / "model"),
        [[3, 4, 5], [6, 7], [8, 9, 10, 11, 12], [13]],
        actor={"epochs": 2, "compute_dtype": "bfloat16"},
    )
    (record,) = records(train(watched(ppo)[0], config))
    assert record["actor/ratio_gap"] <= 1e-6
    assert 0 <= record["training/rollout_probs_diff_max"] < 0.05


def p_of_end(batch: dict[str, Any]) -> float:
    """The probability of the end token where the only other choice is one other token."""
    p = float(np.exp(batch["old_log_probs"][0, 1]))
    return p if batch["input_ids"][0, 1] == EOS else 1 - p


def test_a_bare_end_token_is_trained_away(tmp_path: Path) -> None:
    """3 is followed by the end token or by 4, evenly; the reward prefers 4."""
    table = path_table(4, EOS)
    table[3, [EOS, 4]] = 30.0
    algorithm, batches = watched(grpo)
    config = configured(
        grpo,
        tmp_path,
        write_lut(tmp_path / "model", table),
        [[3], [3]],
        steps=2,
        rollout={"n": 8},
        actor={"optimizer": {"lr": 1e-3}},
    )
    first, second = records(train(algorithm, config))
    bare = batches[0]["length"] == 2
    assert 0 < bare.sum() < len(bare)
    assert [r for r, b in zip(batches[0]["response"], bare, strict=True) if b] == [""] * bare.sum()
    assert (batches[0]["response_mask"][bare].sum(axis=1) == 1).all()
    assert all(np.isfinite(first[f"actor/{name}"]) for name in ("pg_loss", "grad_norm"))
    np.testing.assert_allclose(first["response_length/min"], 1)
    p_end = [p_of_end(batch) for batch in batches]
    np.testing.assert_allclose(p_end[0], 0.5, atol=1e-5)
    assert p_end[1] < 0.49
    assert np.isfinite(second["actor/grad_norm"])


def test_each_stop_id_of_the_generation_config_and_the_tokenizers_ends_a_response(
    tmp_path: Path,
) -> None:
    """Both configs say [9], the tokenizer's end token alone is 1: both end a response."""
    table = path_table(3, 4, 1) + path_table(5, 6, 9)
    model = write_lut(tmp_path / "model", table, eos=[9])
    write_tokenizer(model, 16, eos=1)
    algorithm, batches = watched(grpo)
    (record,) = records(
        train(algorithm, configured(grpo, tmp_path, model, [[3], [5]], rollout={"n": 2}))
    )
    (batch,) = batches
    assert batch["length"].tolist() == [3] * 4
    ends = {tuple(row[:3].tolist()) for row in batch["input_ids"]}
    assert ends == {(3, 4, 1), (5, 6, 9)}
    assert batch["response_mask"].sum(axis=1).tolist() == [2] * 4
    assert not batch["truncated"].any()
    assert record["response_length/clip_ratio"] == 0


def test_temperature_is_in_the_stored_and_in_the_recomputed_log_probs(tmp_path: Path) -> None:
    """Logits 2, 1, 0 at temperature 0.5 are 4, 2, 0."""
    table = np.full((16, 16), -30, np.float32)
    table[3, [4, 5, 6]] = 2, 1, 0
    algorithm, batches = watched(grpo)
    config = configured(
        grpo,
        tmp_path,
        write_lut(tmp_path / "model", table),
        [[3]] * 20,
        rollout={"n": 100, "temperature": 0.5, "max_new_tokens": 1},
    )
    (record,) = records(train(algorithm, config))
    (batch,) = batches
    token, expected = batch["input_ids"][:, 1], np.array([-0.14293, -2.14293, -4.14293])
    assert set(token) == {4, 5, 6}
    for name in ("rollout_log_probs", "old_log_probs", "ref_log_prob"):
        np.testing.assert_allclose(batch[name][:, 1], expected[token - 4], atol=2e-5)
    share = np.bincount(token, minlength=7)[4:] / 2000
    np.testing.assert_allclose(share, [0.867, 0.117, 0.016], atol=0.03)
    assert record["actor/ratio_gap"] <= 1e-5


@pytest.mark.slow
def test_replicas_draw_different_samples_and_any_number_of_them_the_same_set(
    tmp_path: Path,
) -> None:
    """A prompt listed twice, n=2, flat logits over 1000 words: a repeat has chance 1e-23."""
    model = write_lut(tmp_path / "model", np.zeros((1000, 1000), np.float32))

    def drawn(replicas: int, seed: int = 0) -> list[set[tuple[int, ...]]]:
        folder = tmp_path / f"{replicas}-{seed}"
        folder.mkdir()
        placed(folder / "placement.toml", MeshShape(data=replicas), "actor")
        algorithm, batches = watched(grpo)
        config = configured(
            grpo,
            folder,
            model,
            [[3], [3]],
            steps=2,
            seed=seed,
            rollout={"n": 2, "ignore_eos": True},
            algorithm={"kl": {"where": "none"}},
        )
        train(algorithm, config)
        return [{tuple(row[1:9].tolist()) for row in batch["input_ids"]} for batch in batches]

    first, second = drawn(1)
    assert len(first) == len(second) == 4
    assert not first & second
    assert drawn(2) == drawn(4) == [first, second]
    assert not drawn(1, seed=1)[0] & first


def test_a_last_partial_batch_is_announced_and_evaluation_drops_no_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_lut(tmp_path / "model", path_table(3, 4, EOS) + path_table(5, EOS))
    held_out = prompts_file(tmp_path / "eval.jsonl", [[3]] * 5 + [[5]] * 2)
    config = configured(
        grpo,
        tmp_path,
        model,
        [[3]] * 10,
        steps=0,
        epochs=2,
        data={"prompts_per_step": 4, "eval": held_out},
        rollout={"n": 2},
    )
    with caplog.at_level(logging.WARNING):
        found = records(train(grpo, config))
    assert "2 steps per epoch; 2 rows dropped" in caplog.text
    assert [record["training/global_step"] for record in found] == [0, 1, 2, 3, 4]
    np.testing.assert_allclose(found[-1]["val-core/all/reward/mean@1"], 5 / 7)
    assert found[-1]["critic/flat_groups"] == 1  # the table leaves no choice: all scores are 1


@pytest.mark.slow
def test_after_the_first_step_of_a_shape_nothing_compiles(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of 3 to 60 tokens, responses of 1 to 32; JAX's own lines count, the controller's too.

    Between the steps comes an evaluation whose last batch is filled up; the epoch's last rows are
    no batch; and the optional column of limits is there in every second step only.
    """
    rng = np.random.default_rng(0)
    lengths = ([*range(3, 61, 6), 60] * 4)[:42]
    prompts = [rng.integers(3, 96, length).tolist() for length in lengths]
    algorithm, batches = watched(ppo)
    plain = algorithm.step

    def step(models: Any, prompts: Batch, cfg: Any) -> tuple[Batch, Any]:
        limits = {"max_new_tokens": np.full(len(prompts), 32, np.int32)} if models.step % 2 else {}
        return plain(models, prompts | limits, cfg)

    algorithm.step = step
    monkeypatch.setattr("hfjax.prepare.EVAL_ROWS", 4)
    config = configured(
        ppo,
        tmp_path,
        write_tiny_hf(tmp_path / "model", eos=list(range(5))),
        prompts,
        steps=12,
        eval_every=3,
        data={
            "prompts_per_step": 4,
            "eval": prompts_file(tmp_path / "eval.jsonl", prompts[:10]),
            "shuffle": False,
        },
        rollout={"n": 2, "max_new_tokens": 32},
        actor={"optimizer": {"lr": 1e-4}},
    )

    def counted(method: Any, counts: list[int]) -> Any:
        def call(step: int) -> Any:
            caplog.clear()
            result = method(step)
            counts.append(sum(r.getMessage().startswith("Compiling") for r in caplog.records))
            return result

        return call

    in_steps: list[int] = []
    in_evaluations: list[int] = []
    with Run(algorithm, config) as run, jax.log_compiles(), caplog.at_level(logging.WARNING):
        run.step = counted(run.step, in_steps)
        run.evaluate = counted(run.evaluate, in_evaluations)
        run.train()
        programs = run.models.actor.pool.worker.roles["actor"].generation.decoder.programs
    widths = [
        (batch["prompt_ids"].shape[1], batch["input_ids"].shape[1], -(-batch["length"].max() // 32))
        for batch in batches
    ]
    assert {batch["length"].max() > 64 for batch in batches} == {True, False}
    found = {r["training/global_step"]: r for r in records(run.out)}
    again = [step for step in range(1, 13) if widths[step - 1] in widths[: step - 1]]
    assert len(again) >= 6
    assert {step: in_steps[step - 1] for step in again} == dict.fromkeys(again, 0)
    assert {step: found[step]["perf/compiles"] for step in again} == dict.fromkeys(again, 0)
    assert in_steps[0] >= found[1]["perf/compiles"] > 0
    assert in_evaluations[0] > 0
    assert in_evaluations[1:] == [0] * 4
    assert programs <= len({width[0] for width in widths}) + 2  # and two widths of greedy prompts


def test_the_prompt_that_is_cut_is_generated_from_and_trained_on(tmp_path: Path) -> None:
    """558 ids, limit 512, the last ones kept: one row of ids for sampler, scores and update."""
    ids = np.random.default_rng(0).integers(3, 96, 558).tolist()
    algorithm, batches = watched(grpo)
    config = configured(
        grpo,
        tmp_path,
        write_tiny_hf(tmp_path / "model", max_position_embeddings=1024),
        [ids, [3]],
        data={"truncation": "left", "max_prompt_tokens": 512, "shuffle": False},
        rollout={"n": 2, "max_new_tokens": 2},
    )
    (record,) = records(train(algorithm, config))
    (batch,) = batches
    assert batch["prompt_length"].tolist() == [512, 512, 1, 1]
    for row in (0, 1):
        assert batch["prompt_ids"][row, :512].tolist() == ids[-512:]
        assert batch["input_ids"][row, :512].tolist() == ids[-512:]
        assert batch["response_mask"][row].nonzero()[0][0] == 512
    np.testing.assert_allclose(batch["rollout_log_probs"], batch["old_log_probs"], atol=1e-5)
    assert record["actor/ratio_gap"] <= 1e-5
    assert record["prompt_length/clip_ratio"] == 0.5


def tuning(folder: Path, **settings: Any) -> Any:
    """Settings of a fine-tuning run on two demonstrations."""
    rows = [{"prompt": "t3", "response": "t4 t5"}, {"prompt": "t6", "response": "t7"}]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = {
        "model": str(write_tiny_hf(folder / "model")),
        "runtime": "local",
        "placement": placed(folder / "placement.toml", MeshShape(), "actor"),
        "out": str(folder / "run"),
        "tensorboard": False,
        "data": {"train": str(folder / "train.jsonl"), "prompts_per_step": 2, "max_tokens": 64},
        "actor": {"optimizer": {"lr": 1e-2}},
    }
    return from_dict(config_class(sft), table | settings, where="test")


def test_fine_tuning_learns_the_demonstrations(tmp_path: Path) -> None:
    found = records(train(sft, tuning(tmp_path, steps=15)))
    assert found[-1]["actor/nll"] < 0.2 < found[0]["actor/nll"]


def tied_and_exported(folder: Path) -> tuple[Path, np.ndarray]:
    """The export of a tied model after a step of fine-tuning; its logits while it was trained."""
    start = write_tiny_hf(folder / "tied", tie_word_embeddings=True)
    config = tuning(folder, steps=1, model=str(start))
    with Run(sft, config) as run:
        run.train()
        role = run.models.actor.pool.worker.roles["actor"]
        x_BTD = hidden_states(role.config, role.weights(), jnp.asarray(TOKENS_BT))
        logits_BTV = np.asarray(lm_logits(role.config, role.weights(), x_BTD))
    export_run(config.out, folder / "exported")
    return folder / "exported", logits_BTV


def test_a_tied_model_is_trained_and_exported_as_one(tmp_path: Path) -> None:
    """No head in the file, stale or not; the embedding is the trained one."""
    exported, logits_BTV = tied_and_exported(tmp_path)
    before, after = (load_file(d / "model.safetensors") for d in (tmp_path / "tied", exported))
    assert after.keys() == before.keys()
    assert "lm_head.weight" not in after
    name = "model.embed_tokens.weight"
    assert np.abs(after[name] - before[name]).max() > 1e-3
    cfg = load_config(exported)
    params = load_params(exported, cfg, "lm")
    x_BTD = hidden_states(cfg, params, jnp.asarray(TOKENS_BT))
    np.testing.assert_allclose(lm_logits(cfg, params, x_BTD), logits_BTV, atol=1e-5)


@pytest.mark.hf
def test_a_trained_tied_model_has_its_logits_in_transformers(tmp_path: Path) -> None:
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
    exported, logits_BTV = tied_and_exported(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    with torch.no_grad():
        found_BTV = model.eval()(torch.tensor(TOKENS_BT)).logits.numpy()
    scale = np.abs(logits_BTV).max()
    np.testing.assert_allclose(found_BTV, logits_BTV, rtol=1e-5, atol=1e-5 * scale)


def test_stages_share_no_second_and_each_replica_counts_its_own_tokens(tmp_path: Path) -> None:
    """Rows of 3, 3 and 2, 2 tokens on two replicas; the relay is no part of gen."""
    model = write_lut(tmp_path / "model", path_table(3, 4, EOS) + path_table(5, EOS))
    placed(tmp_path / "placement.toml", MeshShape(data=2), "actor")
    config = configured(
        grpo,
        tmp_path,
        model,
        [[3], [5]],
        data={"shuffle": False},
        algorithm={"kl": {"where": "none"}},
    )
    (record,) = records(train(grpo, config))
    assert [record[f"global_seqlen/{name}"] for name in ("max", "min", "minmax_diff")] == [6, 4, 2]
    stages = {k: v for k, v in record.items() if k.startswith("timing_s/")}
    step_s = stages.pop("timing_s/step")
    del stages["timing_s/save_checkpoint"]  # comes after the step
    assert {"timing_s/gen", "timing_s/update_weights"} <= stages.keys()
    assert sum(stages.values()) <= step_s


def test_ctrl_c_in_the_last_step_leaves_a_finished_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted = types.ModuleType("interrupted")
    vars(interrupted).update(vars(sft))

    def step(models: Any, prompts: Batch, cfg: Any) -> tuple[Batch, Any]:
        signal.raise_signal(signal.SIGINT)
        return sft.step(models, prompts, cfg)

    vars(interrupted).update(step=step)
    out = train(interrupted, tuning(tmp_path, steps=1))
    assert [record["training/global_step"] for record in records(out)] == [1]
    assert "--resume" not in capsys.readouterr().out


def test_a_run_directory_is_used_once_and_its_settings_read_back(tmp_path: Path) -> None:
    config = tuning(tmp_path, steps=1)
    out = train(sft, config)
    saved = from_dict(config_class(sft), read_toml(out / "settings.toml"), where="settings.toml")
    assert dataclasses.asdict(saved) == dataclasses.asdict(config)
    with pytest.raises(ValueError, match="holds a run; add --resume or choose another directory"):
        Run(sft, config)
    train(sft, dataclasses.replace(config, steps=2, resume=True))
    with pytest.raises(ValueError, match=r"steps=1: .* is at step 2; set steps above that"):
        Run(sft, dataclasses.replace(config, resume=True))


def test_an_error_in_an_algorithms_step_is_no_refusal_of_settings(tmp_path: Path) -> None:
    """It names the step, and the traceback of its cause is shown."""
    wrong = types.ModuleType("wrong")
    vars(wrong).update(vars(sft), step=lambda models, prompts, cfg: (prompts, {}, {}))
    with pytest.raises(RuntimeError, match=r"\.step failed in step 1") as caught:
        train(wrong, tuning(tmp_path, steps=1))
    assert "too many values to unpack" in str(caught.value.__cause__)


def test_a_date_in_the_chat_template_is_that_of_the_runs_beginning_when_it_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template writes the microsecond, which would change the prompts as another day does."""
    monkeypatch.setattr("hfjax.run.start", Mock())
    model = write_lut(tmp_path / "model", path_table(3, EOS))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{% for digit in strftime_now('%f') %}t{{ digit }} {% endfor %}"
    (model / "tokenizer_config.json").write_text(json.dumps(settings))

    def prompts(out: str, resume: bool) -> list[int]:
        message = {"role": "user", "content": "t3"}
        config = configured(grpo, tmp_path, model, [[message]], out=out, resume=resume)
        return Run(grpo, config).plan.source.items[0].ids

    out, other = str(tmp_path / "run"), str(tmp_path / "other")
    first = prompts(out, resume=False)
    (tmp_path / "run" / "metrics.jsonl").touch()
    assert prompts(out, resume=True) == first != prompts(other, resume=False)


def test_another_run_is_not_continued_and_its_files_stay_as_they_are(tmp_path: Path) -> None:
    config = tuning(tmp_path, steps=1)
    out = train(sft, config)
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    slower = dataclasses.replace(config.actor.optimizer, lr=1e-4)
    other = dataclasses.replace(
        config, resume=True, actor=dataclasses.replace(config.actor, optimizer=slower)
    )
    with pytest.raises(ValueError, match=r"actor\.optimizer\.lr was 0\.01, is 0\.0001"):
        Run(sft, other)
    assert before == {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}


def test_ids_outside_the_vocabulary_are_refused_before_anything_starts(tmp_path: Path) -> None:
    config = configured(grpo, tmp_path, write_tiny_hf(tmp_path / "model"), [[3, 4], [5, 95]])
    assert Run(grpo, config).__exit__() is None  # 95 is the last of 96
    raw = json.loads((tmp_path / "model" / "config.json").read_text())
    write_tiny_hf(tmp_path / "small", vocab_size=raw["vocab_size"] // 2)
    for file in ("tokenizer.json", "tokenizer_config.json"):  # of the bigger model
        (tmp_path / "small" / file).write_bytes((tmp_path / "model" / file).read_bytes())
    mixed = dataclasses.replace(config, model=str(tmp_path / "small"), out=str(tmp_path / "second"))
    with pytest.raises(ValueError, match=r"token id 95 .* outside the vocabulary of 48"):
        Run(grpo, mixed)


def test_a_transfer_between_pools_takes_from_its_first_call_to_its_last() -> None:
    """Also what lies between its calls: the way through host memory."""
    spans = [("send_weights", 0, 1), ("receive_weights", 3, 4), ("send_weights", 1, 2)]
    spans += [("receive_weights", 4, 6), ("generate_sequences", 6, 9), ("update_actor", 9, 10)]
    spans += [("send_weights", 10, 11), ("receive_weights", 11, 13)]
    calls = [
        CallRecord(i, 1, "actor", method, "pool", start, end, 0, frozenset())
        for i, (method, start, end) in enumerate(spans)
    ]
    assert stage_seconds(calls) == {"update_weights": 6 + 3, "gen": 3, "update_actor": 1}
