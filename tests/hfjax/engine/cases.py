# SPDX-License-Identifier: Apache-2.0
"""A tiny model with weights large enough to matter, a mini-batch with holes, and a loss."""

import jax
import jax.numpy as jnp
import numpy as np

from hfjax.engine.replicas import Replicas
from hfjax.engine.train import OptimizerConfig, Trainer
from hfjax.metrics import Max, Mean, Min, Total
from hfjax.models.llama import ModelConfig, abstract_params
from hfjax.rl import aggregate
from meshes.layouts import train_layout
from meshes.mesh import MeshShape, make_mesh

CFG = ModelConfig(
    layers=2, embed=40, heads=8, kv_heads=4, head_dim=6, mlp=56, vocab=96, rope_theta=10_000.0
)
LUT = ModelConfig(
    layers=1,
    embed=16,
    heads=4,
    kv_heads=4,
    head_dim=4,
    mlp=8,
    vocab=16,
    rope_theta=10_000.0,
    norm_eps=1e-9,
)
SHAPES = {
    "one device": MeshShape(),
    "data 8": MeshShape(data=8),
    "data 2 x tensor 4": MeshShape(data=2, tensor=2, tensor_micro=2),
    "fsdp 4 x tensor 2": MeshShape(fsdp=4, tensor=2),
}
COLUMNS = ("advantages", "old_log_probs")


def lay_out(shape, cfg=CFG):
    mesh = make_mesh(jax.devices()[: shape.devices], shape)
    return mesh, train_layout(shape, kv_heads=cfg.kv_heads)


def host_params(cfg=CFG, head="lm", seed=0):
    """Random float32 weights of size 0.2 (heads included), norms around 1."""
    rng = np.random.default_rng(seed)
    shapes, axes = abstract_params(cfg, head)

    def draw(shape, axes):
        noise = 0.2 * rng.standard_normal(shape.shape).astype(np.float32)
        return noise + np.float32("norm" in axes)

    return jax.tree.map(draw, shapes, axes)


def lut_params(head="lm", **leaves):
    """Hidden state after any token = 4 x one-hot(token): the head is a table of next tokens."""
    shapes, axes = abstract_params(LUT, head)
    params = jax.tree.map(
        lambda shape, axes: np.full(shape.shape, float("norm" in axes), np.float32), shapes, axes
    )
    return params | {"embed": np.eye(16, dtype=np.float32)} | leaves


def replicas_of(shape, head="lm", cfg=CFG, *, dtype="float32", relay="hybrid", **layout):
    mesh, _ = lay_out(shape, cfg)
    layout = train_layout(shape, kv_heads=cfg.kv_heads, relay=relay, **layout)
    return Replicas(mesh, layout, *abstract_params(cfg, head), dtype, relay=relay)


def place_params(params, shape, head="lm", cfg=CFG):
    return jax.device_put(params, replicas_of(shape, head, cfg).state_shardings)


def make_trainer(
    loss,
    shape,
    *,
    head="lm",
    cfg=CFG,
    optimizer=None,
    compute_dtype="float32",
    zero=3,
    sequence_parallel=False,
    **options,
):
    layout = {"zero": zero, "sequence_parallel": sequence_parallel}
    replicas = replicas_of(shape, head, cfg, dtype=compute_dtype, **layout)
    optimizer = optimizer or OptimizerConfig(lr=1e-2)
    return Trainer(cfg, head, replicas, optimizer, loss, zero=zero, **options)


def make_batch(rows=8, width=20, seed=1, vocab=CFG.vocab):
    """Rows of different lengths; a hole in one response, one response left out whole."""
    rng = np.random.default_rng(seed)
    prompt_length = rng.integers(1, 6, rows).astype(np.int32)
    length = prompt_length + rng.integers(1, width - 6, rows).astype(np.int32)
    length[0] = width
    at = np.arange(width)[None]
    mask = (at >= prompt_length[:, None]) & (at < length[:, None])
    mask[0, width // 2] = False
    mask[-1] = False
    return {
        "input_ids": rng.integers(0, vocab, (rows, width)).astype(np.int32),
        "prompt_length": prompt_length,
        "length": length,
        "response_mask": mask,
        "advantages": rng.standard_normal((rows, width)).astype(np.float32),
        "old_log_probs": -4 + 0.3 * rng.standard_normal((rows, width)).astype(np.float32),
    }


def lm_loss(outputs, batch, denominators, mode="token-mean"):
    """Ratio times advantage, less some entropy; one metric of each kind."""
    mask = batch["response_mask"]
    delta = jnp.where(mask, outputs.log_probs_BT - batch["old_log_probs"], 0.0)
    per_token = -jnp.exp(delta) * jnp.where(mask, batch["advantages"], 0.0)
    per_token -= 0.1 * outputs.entropy_BT
    metrics = {
        "delta": Mean.of(delta, mask),
        "most": Max(jnp.where(mask, delta, -jnp.inf).max()),
        "least": Min(jnp.where(mask, delta, jnp.inf).min()),
        "tokens": Total(mask.sum(dtype=jnp.float32)),
    }
    return aggregate(per_token, mask, denominators, mode), metrics


def value_loss(outputs, batch, denominators):
    error = outputs.values_BT - jnp.where(batch["response_mask"], batch["advantages"], 0.0)
    mask = batch["response_mask"]
    return aggregate(error**2, mask, denominators), {"error": Mean.of(error, mask)}


def score_loss(outputs, batch, denominators):
    valid_B = batch["response_mask"].any(-1)
    per_row_B = jnp.where(valid_B, jnp.log1p(jnp.exp(-outputs.scores_B)), 0.0)
    loss = per_row_B.sum() / denominators.sequences.astype(jnp.float32)
    return loss, {"score": Mean.of(outputs.scores_B, valid_B)}


LOSSES = {"lm": lm_loss, "value": value_loss, "score": score_loss}


def assert_close(a, b, tolerance=1e-5):
    """Every leaf, relative to the largest number of that leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(a)
    for (path, x), y in zip(leaves, jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        scale = max(1.0, float(np.abs(y).max(initial=0.0)))
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * scale, err_msg=name)
