# SPDX-License-Identifier: Apache-2.0
"""What a device holds: a training state in every stage of ZeRO, the programs of the 70B actor.

Printed by `python -m benchmarks.transition zero` and `compile70b`.
"""

import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from benchmarks.figure14 import HALF, Rig, Setup, host
from benchmarks.gpu_check import likelihood_loss
from hfjax.engine.meter import held_bytes, memory, meter
from hfjax.engine.replicas import Replicas
from hfjax.engine.sampling import Sampling
from hfjax.engine.train import OptimizerConfig, Trainer
from hfjax.mapping.programs import Programs
from hfjax.models.llama import ModelConfig, abstract_params, init_params
from meshes.layouts import EMBED, HYBRID, train_layout
from meshes.mesh import MeshShape, make_mesh

HELD = ModelConfig(
    layers=4,
    embed=256,
    heads=8,
    kv_heads=4,
    head_dim=32,
    mlp=512,
    vocab=1024,
    rope_theta=1e4,
)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What the compiled programs are given."""

    micros: int  # micro-batches in flight in the pipeline
    rows: int  # of a micro-batch
    tokens: int  # of a row, half of them the prompt's
    prompts: int


WORK = Work(micros=16, rows=4, tokens=2048, prompts=256)


def zero(cfg: ModelConfig, devices: int) -> str:
    """The table of what a device holds, by stage of ZeRO and dtype of computation."""
    lines = [
        f"Bytes a device of parameters that ZeRO shards, held in arrays on {devices} simulated "
        f"devices (apart: norms, counters); {host()}\n"
        "ZeRO (arXiv 1910.02054 §5): weights 4 or 2 bytes a parameter, gradients 4, master and "
        f"moments 12, each / {devices} where the stage shards it; "
        "0: the master's own arrays",
        f"{'dtype':10}{'stage':12}" + f"{'weights':>12}{'formula':>12}{'gradients':>12}"
        f"{'formula':>12}{'optimizer':>12}{'formula':>12}{'apart':>9}",
    ]
    for dtype in ("float32", "bfloat16"):
        for stage in range(4):
            held, apart, count = zero_row(cfg, devices, dtype, stage)
            sizes = (jnp.dtype(dtype).itemsize, 4, 12)
            shards = (devices if stage >= least else 1 for least in (3, 2, 1))
            ideal = (count * size // n for size, n in zip(sizes, shards, strict=True))
            cells = "".join(f"{h:12,}{i:12,}" for h, i in zip(held, ideal, strict=True))
            name = f"ZeRO-{stage}" if stage else "replicated"
            lines.append(f"{dtype:10}{name:12}{cells}{apart:9,}")
    return "\n".join(lines)


def zero_row(
    cfg: ModelConfig, devices: int, dtype: str, stage: int
) -> tuple[tuple[int, int, int], int, int]:
    """Held bytes of weights, gradient sums and optimizer; those apart; parameters sharded."""
    shape = MeshShape(fsdp=devices) if stage else MeshShape(data=devices)
    layout = train_layout(shape, kv_heads=cfg.kv_heads, zero=stage or 3)
    shapes, axes = abstract_params(cfg, "lm")
    replicas = Replicas(make_mesh(jax.devices()[:devices], shape), layout, shapes, axes, dtype)
    trainer = Trainer(cfg, "lm", replicas, OptimizerConfig(), likelihood_loss, zero=stage or 1)
    state = trainer.init_state(init_params(cfg, "lm", jax.random.key(0), replicas.state_shardings))
    weights, scattered = replicas.weights(state.params), stage > 1
    sums = jax.jit(
        lambda w: replicas.scatter(replicas.stack(w)) if scattered else replicas.stack(w),
        out_shardings=replicas.gradient_shardings(scattered=scattered),
    )(state.params)  # as the gradients of float32 masters lie
    flat: Any = flatten_dict(axes)
    sharded = {name[-1] for name in flat if EMBED in flat[name]}
    parts: Any = [split(tree, sharded) for tree in (state, [state, weights], sums)]
    (optimizer, _), (both, b), (gradients, g) = ([most(x) for x in pair] for pair in parts)
    count = sum(leaf.size for leaf in split(shapes, sharded)[0])
    return (both - optimizer, gradients, optimizer), b + g, count


def split(tree: Any, names: set[str]) -> tuple[list[Any], list[Any]]:
    """Leaves of the parameters of these names, moments included, and all others."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    parts: tuple[list[Any], list[Any]] = ([], [])
    for path, leaf in leaves:
        parts[getattr(path[-1], "key", None) not in names].append(leaf)
    return parts


def most(tree: Any) -> int:
    """Bytes on the device that holds most."""
    return max(held_bytes(tree).values(), default=0)


def compiled(setup: Setup, devices: int, work: Work) -> str:
    """The table of an actor's programs: seconds to compile, bytes a device."""
    half = work.tokens // 2
    lines = [
        f"Actor {setup.p}-{setup.t}-{devices // (setup.p * setup.t)} to p_g-t_g {setup.p_g}-"
        f"{setup.t_g}: {work.micros} micro-batches of {work.rows} x {work.tokens} tokens, "
        f"{work.prompts} prompts of {half} and {half} new tokens; compiled ahead of time for "
        f"{devices} simulated devices; {host()}\n"
        "GB a device, float16 standing for bfloat16; without fused attention: temporaries are an "
        "upper bound",
        f"{'program':12}{'seconds':>9}{'arguments':>11}{'outputs':>9}{'in place':>10}{'temps':>9}"
        f"{'total':>9}{'received':>10}",
    ]
    rig = Rig(setup, devices, HYBRID, HALF)
    for name, lowered in [*training(rig, work), *moving(rig), *generation(rig, work.prompts, half)]:
        start_s = time.perf_counter()
        program = lowered.compile()
        took_s, used = time.perf_counter() - start_s, memory(program)
        sizes = (used.argument_bytes, used.output_bytes, used.alias_bytes, used.temp_bytes)
        received = meter(program, mesh=rig.mesh, trips=half).bytes_received
        widths = zip((*sizes, used.total_bytes, received), (11, 9, 10, 9, 9, 10), strict=True)
        lines.append(f"{name:12}{took_s:9.2f}" + "".join(f"{x / 1e9:{w}.2f}" for x, w in widths))
    return "\n".join(lines)


def training(rig: Rig, work: Work) -> list[tuple[str, Any]]:
    """An update: weights cast, micro-batches through the pipeline, gradients reduced, AdamW."""
    found = programs(rig).training(work.micros, work.rows, work.tokens, remat="layer")
    return list(found.items())


def moving(rig: Rig) -> list[tuple[str, Any]]:
    """The relay, bucket by bucket."""
    return list(programs(rig).relay().items())


def generation(rig: Rig, prompts: int, tokens: int) -> list[tuple[str, Any]]:
    """Prefill, and all new tokens as one segment; as many as a prompt has."""
    sampling = Sampling(max_new_tokens=tokens, ignore_eos=True)
    return list(programs(rig).generation(prompts, tokens, sampling).items())


def programs(rig: Rig) -> Programs:
    """The actor's."""
    return Programs(rig.cfg, "lm", rig.placement, rig.dtype)
