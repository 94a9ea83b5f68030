# SPDX-License-Identifier: Apache-2.0
"""What cannot work is refused before a process starts or a file is written."""

import dataclasses
import json
import types
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow
import pyarrow.parquet
import pytest

import hfjax
from algorithms import grpo, ppo, safe_rlhf, sft
from hfjax import cli
from hfjax.actor import Actor
from hfjax.algorithm import config_class
from hfjax.config import RolloutConfig, TrainingConfig, from_dict, to_toml
from hfjax.controller.handle import start
from hfjax.controller.worker import RoleError
from hfjax.prepare import prepare
from hfjax.run import Run, default_config
from meshes.placement import Placement, parse_placement
from tests.fixtures import path_table, write_lut, write_tiny_hf
from tests.test_run import EOS, prompts_file, tuning

NOW = datetime(2026, 1, 2)


def test_the_algorithms_own_settings_are_an_override_of_train(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`train(ppo, algorithm={...})`: the name of the section is no name of a parameter."""
    seen: list[Any] = []

    class Watched:
        out = Path("run")

        def __init__(self, algorithm: Any, config: Any, restarts: int = 0) -> None:
            seen.append(config)

        def __enter__(self) -> "Watched":
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def train(self) -> None:
            pass

    monkeypatch.setattr("hfjax.run.Run", Watched)
    hfjax.train(ppo, algorithm={"gamma": 0.9})
    assert seen[0].algorithm.gamma == 0.9
    assert "gamma = 0.9" in to_toml(seen[0])


def asked(folder: Path, model: Path, **settings: Any) -> Any:
    """Settings of a GRPO run of `model` on four prompts, in a directory that is not there yet."""
    table: dict[str, Any] = {
        "model": str(model),
        "runtime": "local",
        "out": str(folder / "run"),
        "data": {
            "train": prompts_file(folder / "train.jsonl", [[3]] * 4),
            "prompts_per_step": 4,
            "max_prompt_tokens": 64,
        },
        "rollout": {"n": 2, "max_new_tokens": 4},
        "reward": {"function": "hfjax.arithmetic:sum_reward"},
    }
    return from_dict(config_class(grpo), table | settings, where="test")


def refused(config: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """The message of a refusal that started no process and left no directory."""
    opened = "hfjax.controller.pool.LocalRuntime.open"
    monkeypatch.setattr(opened, lambda *_: pytest.fail("pools were opened"))
    with pytest.raises((ValueError, RoleError)) as caught:
        Run(grpo, config)
    assert isinstance(caught.value, ValueError) or caught.value.refusal
    assert not Path(config.out).exists()
    return str(caught.value)


def test_a_reward_function_that_is_not_there_is_refused_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_lut(tmp_path / "model", path_table(3, EOS))
    config = asked(tmp_path, model, reward={"function": "nope:f"})
    message = refused(config, monkeypatch)
    assert "reward.function: 'nope:f': no module 'nope' on the path" in message


@pytest.mark.parametrize("name", ["function", "eval_function"])
def test_a_reward_file_that_is_not_there_is_refused_before_any_process(
    tmp_path: Path, name: str
) -> None:
    reward = {"function": "hfjax.arithmetic:sum_reward", name: "nowhere.py:f"}
    config = asked(tmp_path, write_lut(tmp_path / "model", path_table(3, EOS)), reward=reward)
    with pytest.raises(ValueError, match=rf"reward.{name}: 'nowhere.py:f': no file 'nowhere.py'"):
        prepare(grpo, config, NOW)


@pytest.mark.parametrize("out", ["/proc/run", "/dev/null", "/dev/null/run"])
def test_a_place_where_nothing_can_be_made_is_refused_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    model = write_lut(tmp_path / "model", path_table(3, EOS))
    config = dataclasses.replace(asked(tmp_path, model), out=out)
    monkeypatch.setattr("hfjax.run.start", lambda *_, **__: pytest.fail("processes were started"))
    with pytest.raises(ValueError, match=f"out={out}: nothing can be made in /"):
        Run(grpo, config)


def test_a_model_without_its_tokenizers_settings_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_lut(tmp_path / "model", path_table(3, EOS))
    prepare(grpo, asked(tmp_path, model), NOW)
    assert not caplog.messages
    (model / "tokenizer_config.json").unlink()
    with suppress(ValueError):  # that no token ends a response
        prepare(grpo, asked(tmp_path, model), NOW)
    assert "tokenizer_config.json is missing: BOS, EOS and the chat template" in caplog.text


def test_weights_that_are_not_there_are_refused_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_lut(tmp_path / "model", path_table(3, EOS))
    (model / "model.safetensors").unlink()
    assert str(model) in refused(asked(tmp_path, model), monkeypatch)


def test_weights_of_another_shape_are_refused_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_lut(tmp_path / "model", path_table(3, EOS))
    raw = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(raw | {"intermediate_size": 16}))
    assert "config.json says (16, 16)" in refused(asked(tmp_path, model), monkeypatch)


def test_a_reward_model_without_a_score_head_is_refused_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_lut(tmp_path / "model", path_table(3, EOS))
    message = refused(asked(tmp_path, model, reward={"model": str(model)}), monkeypatch)
    assert "needs a score head" in message


def test_a_reward_model_is_planned_without_training_settings(tmp_path: Path) -> None:
    model = write_lut(tmp_path / "model", path_table(3, EOS))
    scores = write_lut(tmp_path / "scores", scores=[0.0] * 16)
    plan = prepare(grpo, asked(tmp_path, model, reward={"model": str(scores)}), NOW)
    assert plan.builders["reward"].keywords == {"model": str(scores)}


@pytest.mark.parametrize(
    ("eos", "message"), [(None, "names no end token"), ([2, 99], "end token 99 of")]
)
def test_responses_that_nothing_can_end_are_refused(
    eos: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_lut(tmp_path / "model", path_table(3, EOS), eos=eos)
    assert message in refused(asked(tmp_path, model), monkeypatch)


def test_end_tokens_that_are_forbidden_for_a_while_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Log-probabilities, and the KL with them, are those of the whole vocabulary."""
    model = write_tiny_hf(tmp_path / "model")
    for least in (0, 2):
        caplog.clear()
        rollout = {"n": 2, "max_new_tokens": 4, "min_new_tokens": least}
        prepare(grpo, asked(tmp_path, model, rollout=rollout), NOW)
        assert ("rollout.min_new_tokens=2: the end tokens" in caplog.text) == (least > 0)


def test_an_evaluation_batch_has_64_rows_or_a_steps(tmp_path: Path) -> None:
    """It was 512 rows for every run: steps of 8 and of 128 rows, 100 held-out prompts."""
    held_out = prompts_file(tmp_path / "eval.jsonl", [[3]] * 100)
    config = asked(tmp_path, write_lut(tmp_path / "model", path_table(3, EOS)))
    data = dataclasses.replace(config.data, eval=held_out)
    config = dataclasses.replace(config, data=data)
    assert prepare(grpo, config, NOW).eval_items == 64
    wide = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, n=32))
    assert prepare(grpo, wide, NOW).eval_items == 100


def test_a_role_that_is_no_partial_is_named() -> None:
    module = types.ModuleType("loose")
    vars(module).update(vars(grpo), roles=lambda cfg: {"actor": Actor})
    with pytest.raises(ValueError, match=r"Actor.* must be a functools\.partial of its class"):
        config_class(module)


def test_a_trained_role_of_any_name_has_its_own_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second critic, and a subclass of the actor that still generates."""

    class Twin(Actor):
        pass

    def roles(cfg: Any) -> dict[str, Any]:
        table = ppo.roles(cfg)
        actor = table["actor"]
        twin = partial(Twin, **actor.keywords)
        return table | {"actor": twin, "judge": table["critic"]}

    module = types.ModuleType("twins")
    vars(module).update(vars(ppo), roles=roles)
    cls = config_class(module)
    config = asked(tmp_path, write_lut(tmp_path / "model", path_table(3, EOS)))
    table = dataclasses.asdict(config)
    del table["algorithm"]
    config = from_dict(cls, table | {"judge": {"epochs": 3}}, where="test")
    plan = prepare(module, config, NOW)
    assert plan.trained == ["actor", "critic", "judge"]
    assert plan.builders["judge"].keywords["training"].epochs == 3
    assert plan.builders["actor"].keywords["rollout"] == config.rollout
    infer = {role: place.infer is not None for role, place in plan.placement.roles.items()}
    assert infer == {"actor": False, "critic": False, "judge": False, "reference": True}


def test_without_a_placement_ray_is_told_the_platform_whose_devices_were_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Ray detects may be GPUs that this JAX cannot use."""
    started: list[Placement] = []
    monkeypatch.setattr("hfjax.run.start", lambda *given, **_: Mock(started.append(given[0])))
    Run(sft, tuning(tmp_path, placement="", runtime="ray", steps=1))
    assert (started[0].platform, started[0].devices) == ("cpu", 8)


def test_a_jax_that_hangs_while_it_looks_for_devices_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hfjax.prepare.LOOK_TIMEOUT_S", 0.001)
    with pytest.raises(ValueError, match=r"did not find devices within 0\.001 s; set --placement"):
        Run(sft, tuning(tmp_path, placement="", runtime="ray"))


def test_a_reward_model_with_another_tokenizer_is_refused_by_the_first_token(
    tmp_path: Path,
) -> None:
    """As many tokens, two of them swapped: no id is outside, and every score would be wrong."""
    model = write_tiny_hf(tmp_path / "model")
    judge = write_tiny_hf(tmp_path / "judge", head="score")
    config = asked(tmp_path, model, reward={"model": str(judge)})
    prepare(grpo, config, NOW)
    file = judge / "tokenizer.json"
    swapped = json.loads(file.read_text())
    swapped["model"]["vocab"] |= {"t7": 8, "t8": 7}
    file.write_text(json.dumps(swapped))
    message = r"judge' has another tokenizer .*: id 7 is 't8' there and 't7' here"
    with pytest.raises(ValueError, match=message):
        prepare(grpo, config, NOW)


def test_a_score_model_takes_the_place_of_the_embedded_recipes_reward(tmp_path: Path) -> None:
    """By the command line, a TOML file and Python alike."""
    file = tmp_path / "given.toml"
    file.write_text('[reward]\nmodel = "judge"')
    configs = (
        cli.parse(ppo, ["--reward.model", "judge"]),
        cli.parse(ppo, ["--config", str(file)]),
        default_config(ppo, "embedded", own=["reward.model"]),
    )
    for config in configs:
        assert config.reward.function == ""
        assert config.data.train == "sums"  # the rest of the recipe stays
    assert [config.reward.model for config in configs] == ["judge", "judge", ""]


def test_the_embedded_recipes_scores_are_for_its_own_data_alone() -> None:
    """Costs of the embedded task would hold down what nobody asked them to."""
    config = cli.parse(safe_rlhf, ["--data", "mine.jsonl"])
    assert (config.reward.function, config.cost.function) == ("", "")
    config = cli.parse(safe_rlhf, ["--cost.model", "judge"])
    assert (config.reward.function, config.cost.function) != ("", "")
    assert config.cost.function == ""


@pytest.mark.parametrize(("role", "wrong"), [("reference", "train"), ("actor", "infer")])
def test_a_placement_knows_which_roles_are_updated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, wrong: str
) -> None:
    right = {"train": "infer", "infer": "train"}[wrong]
    text = '[pool.a]\ndevices = 1\n[actor]\npool = "a"\ntrain = { data = 1 }\n'
    text += '[reference]\npool = "a"\ninfer = { data = 1 }\n'
    head, section, tail = text.partition(f"[{role}]")
    file = tmp_path / "placement.toml"
    file.write_text(head + section + tail.replace(f"{right} =", f"{wrong} =", 1))
    model = write_lut(tmp_path / "model", path_table(3, EOS))
    message = refused(asked(tmp_path, model, placement=str(file)), monkeypatch)
    assert f"[{role}] {wrong}: " in message
    assert f"write {right} in its place" in message
    both = section + tail.replace(f"{right} =", f"{wrong} = {{ data = 1 }}\n{right} =", 1)
    file.write_text(head + both)
    if role == "reference":
        message = refused(asked(tmp_path, model, placement=str(file)), monkeypatch)
        assert "[reference] train: this role only computes; remove it" in message
    else:
        prepare(grpo, asked(tmp_path, model, placement=str(file)), NOW)


def test_a_directory_with_other_files_is_no_place_for_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_lut(tmp_path / "model", path_table(3, EOS))
    config = dataclasses.replace(asked(tmp_path, model), out=str(model))
    monkeypatch.setattr("hfjax.run.start", lambda *_, **__: pytest.fail("processes were started"))
    with pytest.raises(ValueError, match="holds files of something else"):
        Run(grpo, config)


def test_settings_without_defaults_are_refused_by_name() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Settings:
        scale: float

    module: Any = types.SimpleNamespace(__name__="mine", Settings=Settings, roles=grpo.roles)
    with pytest.raises(ValueError, match=r"mine: .*defaults alone: .*'scale'"):
        config_class(module)


REFUSALS = {  # algorithm, a TOML file, arguments, and what the message must name
    "top level": ("ppo", "learning_rate = 1e-4", "", ["learning_rate", "actor.optimizer.lr"]),
    "misspelt": ("ppo", "[algorithm]\nclip_ration = 0.1", "", ["clip_ration", "algorithm.clip_"]),
    "hyphen": ("ppo", "[actor]\nmicro-sequences = 2", "", ["actor", "micro_sequences"]),
    "text": ("ppo", "[actor.optimizer]\nlr = 'fast'", "", ["optimizer", "lr", "fast", "float"]),
    "broken": ("ppo", "[actor]\nx = = 1", "", ["line 2, column 5"]),
    "contradiction": (
        *("ppo", "[actor]\nmicro_tokens = 4\nmicro_sequences = 4", ""),
        ["actor", "micro_sequences", "micro_tokens", "one of the two"],
    ),
    "choice": ("ppo", "[actor]\nremat = 'some'", "", ["remat", "some", "none, layer, dots"]),
    "other section": ("grpo", "[critic]\nepochs = 1", "", ["[critic]", "grpo", "actor"]),
    "not a table": ("ppo", "actor = 3", "", ["actor", "table"]),
    "no file": ("ppo", None, "--config nowhere.toml", ["nowhere.toml", "no such file"]),
    "option": ("ppo", None, "--learning-rate 1", ["learning_rate", "actor.optimizer.lr"]),
    "option of a section": ("ppo", None, "--actor.lr 1", ["lr", "[actor]", "actor.optimizer.lr"]),
    "option's value": ("ppo", None, "--actor.optimizer.lr fast", ["actor.optimizer.lr", "fast"]),
    "option's choice": ("ppo", None, "--actor.remat some", ["actor.remat", "some", "layer"]),
    "additive form": ("ppo", None, "+actor.optimizer.lr=1", ["+actor.optimizer.lr", "--"]),
    "value of a switch": ("ppo", None, "--resume true --out x", ["true", "switch"]),
    "unused section": ("grpo", None, "--critic.epochs 2", ["[critic]", "grpo", "rollout"]),
    "algorithm": ("pp0", None, "", ["pp0", "ppo", "grpo", "sft"]),
    "model": ("ppo", None, "--model nowhere", ["model", "nowhere", "embedded"]),
    "placement": ("ppo", None, "--placement nowhere", ["placement", "nowhere", "colocate"]),
    "micro-batch": (
        *("ppo", None, "--actor.micro-sequences 3"),
        ["actor.micro_sequences=3", "4 rows", "multiple of 8"],
    ),
    "micro-batch of tokens": (
        *("ppo", None, "--critic.micro-tokens 200"),
        ["critic.micro_tokens=200", "at least 8 x "],
    ),
    "a group of one": ("grpo", None, "--rollout.n 1", ["rollout.n=1", "2 or more"]),
    "reward": ("grpo", None, "--reward.workers 0", ["reward.workers=0", "at least 1"]),
    "a seed of more than 32 bits": ("ppo", None, "--seed 4294967296", ["seed=4294967296", "2**32"]),
    "greedy groups": (
        *("grpo", None, "--rollout.temperature 0 --rollout.n 2"),
        ["rollout.temperature=0", "n > 1", "equal"],
    ),
    "a least length without stops": (
        *("ppo", None, "--rollout.ignore-eos --rollout.min-new-tokens 2"),
        ["rollout.min_new_tokens=2", "rollout.ignore_eos"],
    ),
    "evaluation of nothing": ("ppo", None, "--eval-every 2", ["eval_every=2", "data.eval"]),
    "a loss without gradient": (
        *("grpo", None, "--algorithm.kl.estimator k1"),
        ["kl.estimator=k1", "kl.where=loss", "k2 or k3"],
    ),
    "a loss without gradient, from PPO's reward": (
        *("ppo", None, "--algorithm.kl.where loss"),
        ["kl.estimator=k1", "kl.where=loss", "k2 or k3"],
    ),
    "workers of a score model": (
        *("ppo", "[reward]\nmodel = 'DIR'\nworkers = 4", ""),
        ["reward.workers=4", "2 with reward.model"],
    ),
    "skipped rows of a score model": (
        *("ppo", "[reward]\nmodel = 'DIR'\non_error = 'skip'", ""),
        ["reward.on_error=skip", "reward.model"],
    ),
    "dual clip": ("ppo", None, "--algorithm.dual-clip 1", ["dual_clip=1.0", "> 1", "3.0"]),
    "dual clip in a file": ("grpo", "[algorithm]\ndual_clip = 0.5", "", ["dual_clip=0.5", "> 1"]),
    "mini-batch": (
        *("ppo", None, "--actor.minibatch-sequences 3"),
        ["minibatch_sequences=3", "4 rows", "[1, 2, 4]"],
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_meant_is_refused_by_name(
    case: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exit status 2 before a model is built; the message names key, section and a legal choice."""
    algorithm, toml, arguments, named = REFUSALS[case]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hfjax.run.start", lambda *_, **__: pytest.fail("processes were started"))
    base = [
        *("--model", str(write_lut(tmp_path / "model", path_table(3, EOS)))),
        *("--data", prompts_file(tmp_path / "train.jsonl", [[3]] * 4)),
        *("--reward.function", "hfjax.arithmetic:sum_reward", "--runtime", "local"),
        *("--data.prompts-per-step", "4", "--data.max-prompt-tokens", "64"),
    ]
    if toml is not None:
        Path("given.toml").write_text(toml)
        base += ["--config", "given.toml"]
    try:
        status = cli.main(["train", algorithm, *base, *arguments.split()])
    except SystemExit as error:
        status = error.code
    message = capsys.readouterr().err
    assert status == 2
    assert [name for name in named if name not in message] == []


BROKEN = b'{"prompt": "t3", "ground_truth": ""}\n{"prompt": "t5", "gro\n'
QUESTIONS = ["t3"] * 37 + [None] + ["t4"] * 3
DATA_REFUSALS = {  # a file's content, arguments, and what the message must name
    "broken line": (BROKEN, "", ["rows.jsonl", "line 2", "data.bad_rows='skip'"]),
    "no answer column": (
        *({"question": ["t3"], "answer": ["t4"]}, "--data.prompt-key question"),
        ["'ground_truth'", "it has answer, question", "data.answer_key"],
    ),
    "null prompt": (
        *({"question": QUESTIONS}, "--data.prompt-key question --data.answer-key="),
        ["row 37 (from 0)", "question is missing"],
    ),
    "too long": (
        *({"prompt": ["t3", "t3 t4 t5"], "ground_truth": ["", ""]}, "--data.max-prompt-tokens 2"),
        ["row 1 (from 0)", "data.max_prompt_tokens=2", "filter, left, right, middle"],
    ),
    "directory": (None, "", ["data.train=", "a directory", "give a file's path"]),
    "fewer than a step": (
        *({"prompt": ["t3"] * 3, "ground_truth": [""] * 3}, ""),
        ["data.prompts_per_step=8", "3 usable rows", "at most 3"],
    ),
}


@pytest.mark.parametrize("case", DATA_REFUSALS)
def test_data_that_cannot_be_used_ends_the_command_before_anything_starts(
    case: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exit status 2, no weights read and no run directory; rows are numbered, not shown."""
    content, arguments, named = DATA_REFUSALS[case]
    for name in ("hfjax.run.start", "hfjax.models.hf.load_params", "hfjax.rewards.RewardPool"):
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail("something was started"))
    if content is None:
        file = tmp_path
    elif isinstance(content, bytes):
        file = tmp_path / "rows.jsonl"
        file.write_bytes(content)
    else:
        file = tmp_path / "rows.parquet"
        pyarrow.parquet.write_table(pyarrow.table(content), file)
    model, out = write_lut(tmp_path / "model", path_table(3, EOS)), tmp_path / "run"
    base = ["--model", str(model), "--data", str(file), "--out", str(out), "--rollout.n", "2"]
    assert cli.main(["train", "grpo", *base, *arguments.split()]) == 2
    message = capsys.readouterr().err
    assert [name for name in named if name not in message] == []
    assert "t5" not in message
    assert not out.exists()


TWO_POOLS = """
[pool.policy]
devices = 4
[pool.rollout]
devices = 4
[actor]
pool = "policy"
train = { data = 4 }
relay = "two-copies"
generate_pool = "rollout"
generate = { tensor = 4 }
[reference]
pool = "policy"
infer = { data = 4 }
"""


def test_a_second_copy_that_its_pool_cannot_divide_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_lut(tmp_path / "model", path_table(3, EOS))
    text = TWO_POOLS.replace("{ tensor = 4 }", "{ tensor = 64 }")
    text = text.replace("[pool.rollout]\ndevices = 4", "[pool.rollout]\ndevices = 64")
    (tmp_path / "placed.toml").write_text(text)
    config = asked(tmp_path, model, placement=str(tmp_path / "placed.toml"))
    message = refused(config, monkeypatch)
    assert r"[actor] generate on the devices of [pool.rollout]: layout" in message


def test_an_actor_that_generates_in_its_own_way_has_no_second_copy(tmp_path: Path) -> None:
    class Own(Actor):
        def generate_sequences(self, shard: Any, *, greedy: bool = False) -> Any:
            raise NotImplementedError

    model = write_lut(tmp_path / "model", path_table(3, EOS))
    placement = parse_placement(TWO_POOLS).only(["actor"])
    builder = partial(Own, model=str(model), rollout=RolloutConfig(), training=TrainingConfig())
    with pytest.raises(ValueError, match=r"\[actor\] relay = 'two-copies' .* of its own"):
        start(placement, {"actor": builder}, runtime="local")


SIZED = """
[pool.all]
devices = 2
[actor]
pool = "all"
train = { data = 2 }
micro_sequences = 4
remat = "layer"
generate_sequences = 4
[reference]
pool = "all"
infer = { data = 2 }
"""


def sized_by(folder: Path, placement: str, **settings: Any) -> Any:
    """Settings of eight rows under a placement's text."""
    (folder / "placement.toml").write_text(placement)
    model = write_lut(folder / "model", path_table(3, EOS))
    return asked(folder, model, placement=str(folder / "placement.toml"), **settings)


SIZES = {  # the run's own settings, and what is used
    "none": ({}, (4, 0, "layer")),
    "rows": ({"micro_sequences": 8}, (8, 0, "layer")),
    "tokens": ({"micro_tokens": 512, "remat": "dots"}, (0, 512, "dots")),
}


@pytest.mark.parametrize("case", SIZES)
def test_what_a_run_leaves_open_is_as_its_placement_says(case: str, tmp_path: Path) -> None:
    given, used = SIZES[case]
    plan = prepare(grpo, sized_by(tmp_path, SIZED, actor=given), NOW)
    training = plan.builders["actor"].keywords["training"]
    assert (training.micro_sequences, training.micro_tokens, training.remat) == used
    micro = f"{used[1]} tokens" if used[1] else used[0]
    assert f"{micro} a micro-batch, remat {used[2]}; actor generates 4 rows" in plan.sizes()


SIZE_REFUSALS = {  # a change of the placement, settings, and the message
    "a micro-batch with a rest": (
        ("micro_sequences = 4", "micro_sequences = 6"),
        {},
        r"placement .*toml: \[actor\] micro_sequences=6 must divide the 8 rows .*one of \[2, 4, 8",
    ),
    "a micro-batch above the mini-batch": (
        ("", ""),
        {"actor": {"minibatch_sequences": 2}},
        r"\[actor\] micro_sequences=4 must divide the 2 rows of a mini-batch \(2 = 0 x 4 \+ 2\)",
    ),
    "half a prompt": (
        ("generate_sequences = 4", "generate_sequences = 6"),
        {},
        r"\[actor\] generate_sequences = 6 must be a multiple of 4: 2 replicas of generation x "
        r"2 responses a prompt; use 4 or 8",
    ),
    "less than a prompt": (
        ("generate_sequences = 4", "generate_sequences = 1"),
        {},
        r"generate_sequences = 1 must be .*; use 4, or leave it out",
    ),
    "a second copy's waves": (
        (
            "generate_sequences",
            'relay = "two-copies"\ngenerate_pool = "more"\ngenerate_sequences',
        ),
        {},
        r"\[actor\] generate_sequences = 4 must be a multiple of 6: 3 replicas",
    ),
}


@pytest.mark.parametrize("case", SIZE_REFUSALS)
def test_sizes_of_a_placement_that_do_not_fit_the_run_are_refused_with_it(
    case: str, tmp_path: Path
) -> None:
    change, settings, message = SIZE_REFUSALS[case]
    text = SIZED.replace(*change, 1)
    text += "[pool.more]\ndevices = 3\n" if "copy" in case else ""
    with pytest.raises(ValueError, match=message):
        prepare(grpo, sized_by(tmp_path, text, **settings), NOW)


def test_a_role_that_generates_nothing_has_no_waves(tmp_path: Path) -> None:
    text = '[pool.a]\ndevices = 1\n[actor]\npool = "a"\ntrain = { data = 1 }\n'
    (tmp_path / "waves.toml").write_text(f"{text}generate_sequences = 2\n")
    config = tuning(tmp_path, placement=str(tmp_path / "waves.toml"))
    with pytest.raises(ValueError, match=r"\[actor\] generate_sequences = 2: .* nothing"):
        prepare(sft, config, NOW)
