# SPDX-License-Identifier: Apache-2.0
"""hfjax on a fixed workload, in one process: whole steps of GRPO and PPO, or a part of one.

    python -m benchmarks.peer_job KIND --model DIR --size tiny [--runtime ray] [--out FILE]

The model is a random Llama in Hugging Face format, float32, on one device. KIND is grpo or ppo
(`hfjax.train`, as a user calls it), generate (the decoder alone) or update (a reference pass and an
update of GRPO). Every response has the same length, so tokens a step are fixed. It prints one JSON
line.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.steps import Compiles, Line, Meter, wait_idle


@dataclass(frozen=True, kw_only=True)
class Size:
    """Prompts and responses of a step, and the Llama that `--model` must hold."""

    prompts: int
    n: int
    prompt: int  # tokens
    response: int
    hidden: int
    layers: int
    mlp: int
    vocab: int
    heads: int = 8
    kv_heads: int = 4


SIZES = {
    "tiny": Size(prompts=8, n=4, prompt=32, response=64, hidden=256, layers=4, mlp=704, vocab=4096),
    "small": Size(
        prompts=4, n=4, prompt=64, response=128, hidden=512, layers=8, mlp=1408, vocab=8192
    ),
}
OPTIMIZER: dict[str, Any] = {"lr": 1e-5, "weight_decay": 0.0, "grad_clip": 1.0}
KL_COEF = 0.04


def even_share(
    prompts: Sequence[str], responses: Sequence[str], ground_truths: Sequence[Any]
) -> list[float]:
    """Share of a response's words that end with an even digit."""

    def share(text: str) -> float:
        words = text.split()
        return sum(word[-1] in "02468" for word in words) / max(len(words), 1)

    return [share(text) for text in responses]


def prompt_ids(size: Size, steps: int) -> np.ndarray:
    """(steps, B, P) ordinary ids: 0 to 2 are special."""
    rng = np.random.RandomState(1)
    return rng.randint(3, size.vocab, size=(steps, size.prompts, size.prompt)).astype(np.int32)


def train(kind: str, size: Size, options: argparse.Namespace, meter: Meter) -> Line:
    """`hfjax.train` for warm-up and measured steps and one that is left out: it saves."""
    import hfjax

    steps = options.warmup + options.steps + 1
    ids = prompt_ids(size, steps)
    repeats = size.n if kind == "ppo" else 1  # without groups, a prompt stands there n times
    optimizer = {"optimizer": OPTIMIZER}
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        lines = [json.dumps({"prompt": row.tolist()}) for row in ids.reshape(-1, size.prompt)]
        rows.write_text("\n".join(line for line in lines for _ in range(repeats)) + "\n")
        aggregation = "seq-mean-token-mean"
        algorithm: dict[str, Any] = {"kl": {"coef": KL_COEF}, "aggregation": aggregation}
        table: dict[str, Any] = {
            "model": options.model,
            "runtime": options.runtime,
            "out": str(Path(folder) / "run"),
            "steps": steps,
            "tensorboard": False,
            "check_every": 0,
            "data": {
                "train": str(rows),
                "answer_key": "",
                "prompts_per_step": size.prompts * repeats,
                "max_prompt_tokens": size.prompt,
                "shuffle": False,
            },
            "rollout": {
                "n": size.n // repeats,
                "max_new_tokens": size.response,
                "ignore_eos": True,
            },
            "reward": {"function": f"{__file__}:even_share", "workers": 1},
            "actor": optimizer,
            "algorithm": algorithm,
        }
        table |= {"critic": optimizer} if kind == "ppo" else {}
        meter.first = Path(folder) / "run/metrics.jsonl"
        with redirect_stdout(sys.stderr):
            out = hfjax.train(kind, **table)
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    others = meter.mean_others()
    records = [r for r in records if "timing_s/step" in r][: options.warmup + options.steps]
    for record in records:
        seconds = {
            name.removeprefix("timing_s/"): value
            for name, value in record.items()
            if name.startswith("timing_s/")
        }
        meter.add(seconds.pop("step"), others=others, **seconds)
    return {"xla_compiles_per_step": [int(r["perf/compiles"]) for r in records]}


def generate(size: Size, options: argparse.Namespace, meter: Meter) -> Line:
    """The decoder, from prompts on the host to texts on the host."""
    import jax
    import jax.numpy as jnp

    from hfjax.engine.decode import Decoder
    from hfjax.engine.sampling import Sampling
    from hfjax.tokenizer import load_tokenizer

    cfg, params, mesh, layouts = _model(options.model)
    decoder = Decoder(cfg, mesh, layouts["generate"])
    tokenizer = load_tokenizer(options.model)
    sampling = Sampling(max_new_tokens=size.response, n=size.n, ignore_eos=True, stop_ids=(1,))
    rows = jnp.arange(size.prompts * size.n).reshape(size.prompts, size.n)
    length = jnp.full(size.prompts, size.prompt)
    compiles = Compiles()
    for number, ids in enumerate(prompt_ids(size, options.warmup + options.steps)):
        key = jax.random.key(number)
        with meter.step(), compiles.step():
            drawn = decoder.generate(params, jnp.asarray(ids), length, rows, key, sampling)
            found = np.asarray(drawn.input_ids_BT)[:, size.prompt :]
            texts = [tokenizer.decode(row.tolist()) for row in found]
        assert found.shape[1] == size.response
        assert len(texts) == size.prompts * size.n
    return {"xla_compiles_per_step": compiles.by_step}


def update(size: Size, options: argparse.Namespace, meter: Meter) -> Line:
    """The reference's pass over given responses, then one update of GRPO."""
    import jax

    from hfjax.config import KLConfig
    from hfjax.controller.protocol import Shard
    from hfjax.engine.microbatch import cut_micros
    from hfjax.engine.passes import Passes
    from hfjax.engine.replicas import Replicas
    from hfjax.engine.scoring import Scorer
    from hfjax.engine.train import OptimizerConfig, Trainer
    from hfjax.models.llama import abstract_params
    from hfjax.policy import PolicySettings, policy_loss
    from hfjax.roles import WIDTH_BUCKET

    cfg, params, mesh, layouts = _model(options.model)
    replicas = Replicas(mesh, layouts["train"], *abstract_params(cfg, "lm"), "float32")
    kl = KLConfig(where="loss", coef=KL_COEF)
    settings = PolicySettings(kl=kl, aggregation="seq-mean-token-mean")
    names = ("old_log_probs", "advantages", "ref_log_prob")
    trainer = Trainer(
        *(cfg, "lm", replicas, OptimizerConfig(**OPTIMIZER)),
        partial(policy_loss, cfg=settings),
        columns=names,
    )
    scorer = Scorer(cfg, replicas, with_entropy=False)
    passes = Passes(mesh, layouts["train"])
    reference = jax.tree.map(lambda x: x.copy(), params)
    state, compiles = trainer.init_state(params), Compiles()
    rng, shape = np.random.RandomState(2), (size.prompts * size.n, size.prompt + size.response)
    mask = np.broadcast_to(np.arange(shape[1]) >= size.prompt, shape)
    for ids in prompt_ids(size, options.warmup + options.steps):
        responses = rng.randint(3, size.vocab, size=(len(ids) * size.n, size.response))
        whole = np.concatenate([np.repeat(ids, size.n, axis=0), responses], axis=1)
        rows = {"input_ids": whole.astype(np.int32), "response_mask": mask}
        rows["length"] = np.full(len(whole), shape[1], np.int32)
        scores = rng.standard_normal((len(whole), 1)).astype(np.float32)
        rows |= {"advantages": np.where(mask, scores, np.float32(0))}
        shard = Shard(rows, np.arange(len(whole)), len(whole), size.n, 0)

        def log_probs(weights: Any, shard: Shard = shard) -> np.ndarray:
            compute = partial(scorer.log_probs, weights)
            return passes.over_responses(shard, WIDTH_BUCKET, compute)[0]

        rows["old_log_probs"] = log_probs(replicas.weights(state.params))  # the rollout's in a run
        with meter.step(), compiles.step():
            rows["ref_log_prob"] = log_probs(reference)
            cut = cut_micros(rows, replicas=1, bucket=WIDTH_BUCKET, shared=size.n)
            state, _ = trainer.update(state, cut)
            jax.block_until_ready(state)
    return {"xla_compiles_per_step": compiles.by_step}


def _model(folder: str) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Config, float32 weights, a mesh of one device, layouts."""
    import jax

    from hfjax.models.hf import load_config, load_params
    from meshes.layouts import HYBRID, generate_layout, train_layout
    from meshes.mesh import MeshShape, make_mesh

    cfg, shape = load_config(folder), MeshShape()
    mesh = make_mesh(jax.devices()[:1], shape)
    layouts = {
        "train": train_layout(shape, kv_heads=cfg.kv_heads),
        "generate": generate_layout(shape, kv_heads=cfg.kv_heads, relay=HYBRID),
    }
    return cfg, load_params(folder, cfg, "lm"), mesh, layouts


KINDS: Mapping[str, Callable[..., Line]] = {
    "grpo": partial(train, "grpo"),
    "ppo": partial(train, "ppo"),
    "generate": generate,
    "update": update,
}


def check_model(folder: str, size: Size) -> None:
    """Refuses another model than the workload's."""
    found = json.loads((Path(folder) / "config.json").read_text())
    wanted = {
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "intermediate_size": size.mlp,
        "vocab_size": size.vocab,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
    }
    wrong = {name: found.get(name) for name in wanted if found.get(name) != wanted[name]}
    if wrong:
        raise ValueError(f"--model {folder}: config.json has {wrong}, the workload {wanted}")


def dump_logits(size: Size, options: argparse.Namespace) -> None:
    """Logits (B, P, V) of the first prompts, to compare implementations by."""
    from hfjax.models.llama import hidden_states, lm_logits

    cfg, params, *_ = _model(options.model)
    ids = prompt_ids(size, 1)[0].astype(np.int32)
    np.save(options.dump_logits, lm_logits(cfg, params, hidden_states(cfg, params, ids)))


def job(options: argparse.Namespace) -> None:
    """Measures one kind of work, prints a line and appends it to `--out`."""
    size = SIZES[options.size]
    check_model(options.model, size)
    if options.dump_logits:
        return dump_logits(size, options)
    wait_idle(options.wait_idle)
    meter = Meter(options.warmup)
    more = KINDS[options.kind](size, options, meter)
    rows = size.prompts * size.n
    whole = options.kind != "generate"
    tokens = rows * (size.response + (size.prompt if whole else 0))
    named = f"hfjax_{options.kind}"
    named += f"_{options.runtime}" if options.kind in ("grpo", "ppo") else ""
    packages = ", ".join(f"{name} {version(name)}" for name in ("jax", "jaxlib", "flax"))
    line = {"name": named, "workload": options.size, "kind": options.kind}
    line |= meter.line(tokens) | more | {"notes": "", "framework_version": packages}
    text = json.dumps(line)
    print(text, flush=True)
    if options.out:
        with open(options.out, "a") as file:
            file.write(text + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peer_job")
    parser.add_argument("kind", choices=list(KINDS))
    parser.add_argument("--model", required=True, help="a Hugging Face directory")
    parser.add_argument("--size", default="tiny", choices=list(SIZES))
    parser.add_argument("--runtime", default="local", choices=["local", "ray"])
    parser.add_argument("--workload", help="not read: jobs of others have theirs in it")
    parser.add_argument("--steps", type=int, default=8, help="measured")
    parser.add_argument("--warmup", type=int, default=2, help="before them")
    parser.add_argument("--wait-idle", type=float, default=0.0, help="seconds, at most")
    parser.add_argument("--out", help="a file that the line is appended to")
    parser.add_argument("--dump-logits", help="a file for the logits of the first prompts, no more")
    job(parser.parse_args(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
