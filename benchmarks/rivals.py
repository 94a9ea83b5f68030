# SPDX-License-Identifier: Apache-2.0
"""PPO's seconds a step under rival placements of 8 simulated devices, predicted and measured.

One of them is what the mapper plans for these devices. Runs are those of `hfjax train ppo --runtime
local`, all in one process, and take turns a step at a time; their first steps are left out.
"""

import argparse
import json
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from algorithms import ppo
from benchmarks.figure14 import host
from benchmarks.predicted import ITEMSIZE, Pair, host_engine, order, pairs_text
from hfjax.algorithm import config_class
from hfjax.config import from_dict
from hfjax.controller.worker import join
from hfjax.mapping.devices import Device, load_profile
from hfjax.mapping.options import Pricer
from hfjax.mapping.plan import plan_class, planned
from hfjax.mapping.report import placement_of
from hfjax.mapping.search import search
from hfjax.mapping.simulate import period_s, play
from hfjax.mapping.work import Kind, Option, Problem, Workload
from hfjax.models.hf import resolve_model, save_hf
from hfjax.models.llama import Head, ModelConfig, abstract_params
from hfjax.run import Run
from meshes.mesh import MeshShape
from meshes.placement import Placement, Pool, RolePlacement

DEVICES, STEPS, ROUNDS = 8, 2, 3  # steps of a turn, turns that count
WARM = 2  # first steps of each run, which compile
NEAR = 1.10  # of the best that is measured
COPIED = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")
WORDS = (4, 14)  # token ids that the embedded tokenizer has text for
PLANNED = "planned"
TRAINED = ("actor", "critic")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A model of 6 million parameters and a step, large enough for devices to work."""

    layers: int = 8
    embed: int = 256
    heads: int = 8
    kv_heads: int = 4
    mlp: int = 688
    vocab: int = 1024
    rows: int = 32
    prompt: int = 32
    response: int = 32

    @property
    def cfg(self) -> ModelConfig:
        return ModelConfig(
            layers=self.layers,
            embed=self.embed,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.embed // self.heads,
            mlp=self.mlp,
            vocab=self.vocab,
            rope_theta=1e4,
        )


def together(devices: int = DEVICES, generate: MeshShape | None = None, **shape: int) -> Placement:
    """Every role on all devices, in one layout."""
    return apart({("actor", "critic", "reference", "reward"): (devices, shape)}, generate)


def apart(
    pools: Mapping[tuple[str, ...], tuple[int, Mapping[str, int]]],
    generate: MeshShape | None = None,
) -> Placement:
    """A pool for each tuple of roles: its devices, and the layout of all its roles."""
    roles: dict[str, RolePlacement] = {}
    names = {each: "-".join(each) for each in pools}
    for each, (_, sizes) in pools.items():
        for role in each:
            where: dict[str, Any] = {"train" if role in TRAINED else "infer": MeshShape(**sizes)}
            if role == "actor":
                where["generate"] = generate or MeshShape()
            roles[role] = RolePlacement(role, names[each], **where)
    found = {names[each]: Pool(names[each], devices) for each, (devices, _) in pools.items()}
    return Placement(found, roles, "cpu")


RIVALS = {
    "together, data 8": together(data=8),
    "together, fsdp 8": together(fsdp=8),
    "together, data 4 tensor 2": together(data=4, tensor=2),
    "the same, tensor 2 generates": together(generate=MeshShape(tensor=2), data=4, tensor=2),
    "together, pipe 2 data 4": together(pipe=2, data=4),
    "split 4 + 4": apart(
        {("actor", "reference"): (4, {"data": 4}), ("critic", "reward"): (4, {"data": 4})}
    ),
    "critic alone 4 + 4": apart(
        {("actor", "reference", "reward"): (4, {"fsdp": 4}), ("critic",): (4, {"fsdp": 4})}
    ),
    "standalone 4 + 2 + 1 + 1": apart(
        {
            ("actor",): (4, {"fsdp": 4}),
            ("critic",): (2, {"fsdp": 2}),
            ("reference",): (1, {"data": 1}),
            ("reward",): (1, {"data": 1}),
        }
    ),
}


def write_models(folder: Path, sizes: Sizes) -> tuple[Path, Path]:
    """Folders of a policy and of a score model, with new weights and the embedded tokenizer."""
    heads: dict[str, Head] = {"policy": "lm", "score": "score"}
    draw = np.random.default_rng(0)
    for name, head in heads.items():
        shapes, _ = abstract_params(sizes.cfg, head, jnp.float32)
        params = jax.tree.map(lambda s: draw.normal(0, 0.02, s.shape).astype(np.float32), shapes)
        save_hf(params, sizes.cfg, head, None, folder / name)
        for file in COPIED:
            shutil.copy(resolve_model("embedded") / file, folder / name / file)
    return folder / "policy", folder / "score"


def step_of(sizes: Sizes, folder: Path) -> Problem:
    """The step that these runs take."""
    config = plan_class(ppo)(
        model=str(folder / "policy"),
        dtype="float32",
        prompts=sizes.rows,
        prompt_tokens=sizes.prompt,
        response_tokens=sizes.response,
        updates=1,
    )
    return planned(ppo, config)


def plan(problem: Problem, device: Device) -> Placement:
    """What the mapper chooses for these devices."""
    pricer = Pricer(problem=problem, profile=load_profile("hfjax"), itemsize=ITEMSIZE)
    cluster = ((device, DEVICES),)
    found = search(problem, cluster, pricer.options)
    placement = placement_of(found.best, cluster, problem.work)
    return replace(placement, platform="cpu")


def predicted_s(problem: Problem, device: Device, placement: Placement) -> float:
    """Seconds of a step, one among others; pools share the host's cores."""
    return period_s(
        play(
            problem,
            {role: placement.roles[role].pool for role in problem.models},
            call_seconds(problem, device, placement),
            devices={name: pool.devices for name, pool in placement.pools.items()},
            shares=device.shares,
        )
    )


def call_seconds(problem: Problem, device: Device, placement: Placement) -> dict[int, float]:
    """Of each call, all devices of the host busy."""
    pricer = Pricer(problem=problem, profile=load_profile("hfjax"), itemsize=ITEMSIZE)
    found: dict[int, float] = {}
    for role in problem.models:
        option = option_of(placement.roles[role], problem.work)
        priced = pricer.price(role, device, option)
        found |= priced.seconds
        scores = [call.number for call in problem.of(role) if call.kind is Kind.INFER]
        if option.train and option.infer and scores:
            found[scores[0]] += pricer.costs(role, device).move_seconds(option)
    return found


def option_of(place: RolePlacement, work: Workload) -> Option:
    """A placement file's section as the mapper prices it."""
    found = Option(
        train=place.train,
        infer=place.infer,
        generate=place.generate,
        zero=place.zero,
        sequence_parallel=place.sequence_parallel,
        relay=place.relay,
        remat=place.remat or "none",
        micro_sequences=place.micro_sequences,
    )
    if place.generate_sequences:
        found = replace(found, waves=math.ceil(work.rows / place.generate_sequences))
    return found


def config_of(folder: Path, name: str, placement: Placement, sizes: Sizes) -> Any:
    """Settings of a run; rows are all as long as they may be."""
    home = folder / name.replace(" ", "-")
    home.mkdir()
    (home / "placement.toml").write_text(placement.to_toml())
    table = {
        "model": str(folder / "policy"),
        "runtime": "local",
        "placement": str(home / "placement.toml"),
        "out": str(home / "run"),
        "steps": 10_000,  # no run comes to its end
        "tensorboard": False,
        "data": {
            "train": str(folder / "train.jsonl"),
            "prompts_per_step": sizes.rows,
            "max_prompt_tokens": sizes.prompt,
        },
        "rollout": {"max_new_tokens": sizes.response, "ignore_eos": True},
        "reward": {"model": str(folder / "score")},
        "actor": {"optimizer": {"lr": 1e-6}},
        "critic": {"optimizer": {"lr": 1e-6}},
    }
    return from_dict(config_class(ppo), table, where=name)


def write_prompts(file: Path, sizes: Sizes) -> None:
    """Prompts of one length."""
    draw = np.random.default_rng(0)
    rows = draw.integers(*WORDS, (2 * sizes.rows, sizes.prompt)).tolist()
    lines = [json.dumps({"prompt": ids, "ground_truth": ""}) for ids in rows]
    file.write_text("".join(f"{line}\n" for line in lines))


Records = Mapping[str, list[list[dict[str, float]]]]  # of a placement's turns


def taken_in_turn(
    folder: Path, placements: Mapping[str, Placement], sizes: Sizes, rounds: int, steps: int
) -> Records:
    """Records of each placement's steps, by turn, after those that compile."""
    begin_s, outs = time.perf_counter(), {}
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(sys.stderr))
        runs: dict[str, Run] = {}
        for number in range(rounds + 1):
            for name, placement in placements.items():
                if not number:
                    run = Run(ppo, config_of(folder, name, placement, sizes))
                    runs[name] = stack.enter_context(run)
                    outs[name] = run.out
                run = runs[name]
                for _ in range(steps if number else WARM):
                    run.issue(run.done + 1)
                    run.complete()
                spent_s = time.perf_counter() - begin_s
                print(f"{spent_s:6.0f} s  round {number}  {name}", file=sys.stderr, flush=True)
    found = {}
    for name, out in outs.items():
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        records = [record for record in records if record["training/global_step"] > WARM]
        found[name] = [records[i : i + steps] for i in range(0, len(records), steps)]
    return found


def pairs_of(records: Records, predicted: Mapping[str, float]) -> list[Pair]:
    """Medians of the turns' medians, and the least and most of these."""
    found = []
    for name, turns in records.items():
        medians = [statistics.median(step["timing_s/step"] for step in turn) for turn in turns]
        measured_s = min(medians), statistics.median(medians), max(medians)
        found.append(Pair(name, predicted[name], measured_s))
    return found


def near(pairs: Sequence[Pair]) -> tuple[bool, str]:
    """Whether the planned one is as good as the best measured, and the numbers."""
    ours = next(pair for pair in pairs if pair.name == PLANNED)
    best = min(pairs, key=lambda pair: pair.measured_s[1])
    most_s = max(NEAR * best.measured_s[1], best.measured_s[2])
    fine = ours.measured_s[1] <= most_s
    text = (
        f"planned: {ours.measured_s[1]:.3f} s; best measured: {best.name}, "
        f"{best.measured_s[1]:.3f} s (repeats to {best.measured_s[2]:.3f}): at most {most_s:.3f} s "
        f"{'is kept' if fine else 'is not kept'}"
    )
    return fine, text


def placements(options: argparse.Namespace) -> int:
    """Exit status 1 where the planned placement is not near the best that is measured."""
    sizes = Sizes()
    device = host_engine(options.host, DEVICES).device
    join(platform="cpu", devices=DEVICES, rank=0, processes=1, coordinator="")
    with tempfile.TemporaryDirectory(prefix="hfjax-rivals-") as name:
        folder = Path(name)
        write_models(folder, sizes)
        write_prompts(folder / "train.jsonl", sizes)
        problem = step_of(sizes, folder)
        rivals = RIVALS | {PLANNED: plan(problem, device)}
        predicted = {name: predicted_s(problem, device, each) for name, each in rivals.items()}
        rounds, steps = options.rounds or ROUNDS, options.steps or STEPS
        records = taken_in_turn(folder, rivals, sizes, rounds, steps)
    print(
        f"PPO, {sizes.cfg.layers} layers of {sizes.embed}, {sizes.rows} rows of {sizes.prompt} + "
        f"{sizes.response} tokens; {DEVICES} simulated devices, {device.name}; {host()}\n"
        f"medians of {rounds} turns of {steps} steps (least-most); planned:\n"
    )
    print(rivals[PLANNED].to_toml())
    pairs = pairs_of(records, predicted)
    print(pairs_text("placement", pairs, "least-most"))
    print(f"rank correlation {order(pairs):.2f} of {len(pairs)}")
    fine, text = near(pairs)
    print(text)
    return 0 if fine else 1
