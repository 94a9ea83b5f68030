# SPDX-License-Identifier: Apache-2.0
"""One GPU in six minutes: exact numbers, decode bandwidth, training MFU, relay seconds.

`python -m benchmarks.gpu_check [--size tiny|full]`. It uses the engine alone, so that jax, flax,
optax, orbax and numpy are enough; `tiny` runs on a CPU too. Timings are medians after one warm-up
that compiles. Weights are random: nothing is downloaded.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax

from hfjax import rl
from hfjax.engine.decode import Decoder, Generation
from hfjax.engine.hybrid import Relay
from hfjax.engine.sampling import Sampling
from hfjax.engine.scoring import Scorer
from hfjax.engine.train import OptimizerConfig, Outputs, Trainer
from hfjax.models.llama import (
    ModelConfig,
    Params,
    abstract_params,
    hidden_states,
    init_params,
    lm_logits,
)
from meshes.layouts import batch_sharding, generate_layout, shardings, train_layout
from meshes.mesh import MeshShape, make_mesh

TIE = 1e-5  # two candidates closer than this in float32: either may win
COLUMNS = (40, 16)  # widths of the table's first two columns


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Dense bf16 matrix FLOP/s and memory bytes/s of a device, from its data sheet."""

    flops: float
    bytes_per_s: float


PEAKS = {  # by jax's device_kind
    "NVIDIA H200": Peak(flops=989e12, bytes_per_s=4.8e12),
    "NVIDIA H100 80GB HBM3": Peak(flops=989e12, bytes_per_s=3.35e12),
    "NVIDIA A100-SXM4-80GB": Peak(flops=312e12, bytes_per_s=2.039e12),
    "NVIDIA A100-SXM4-40GB": Peak(flops=312e12, bytes_per_s=1.555e12),
}

SMALL = ModelConfig(  # for exactness: small enough to compare with the host's CPU
    layers=4, embed=256, heads=8, kv_heads=4, head_dim=32, mlp=512, vocab=1024, rope_theta=1e4
)


@dataclass(frozen=True, kw_only=True)
class Size:
    """What is measured, in sequences and tokens."""

    model: ModelConfig
    decode_batches: tuple[int, ...]  # rows decoded at a time
    prompt_tokens: int
    new_tokens: int  # one segment: no look at the host in between
    train_sequences: int  # of a mini-batch
    micro_sequences: int
    train_tokens: int  # of a row
    repeats: int


SIZES = {
    "tiny": Size(
        model=ModelConfig(
            layers=2, embed=40, heads=8, kv_heads=4, head_dim=6, mlp=56, vocab=96, rope_theta=1e4
        ),
        decode_batches=(1, 4),
        prompt_tokens=8,
        new_tokens=8,
        train_sequences=4,
        micro_sequences=2,
        train_tokens=32,
        repeats=2,
    ),
    "full": Size(
        model=ModelConfig(  # Llama 3.2 1B's shape
            layers=16,
            embed=2048,
            heads=32,
            kv_heads=8,
            head_dim=64,
            mlp=8192,
            vocab=128256,
            rope_theta=5e5,
            tied=True,
        ),
        decode_batches=(1, 16, 64),
        prompt_tokens=128,
        new_tokens=256,
        train_sequences=16,
        micro_sequences=8,
        train_tokens=2048,
        repeats=5,
    ),
}


class Rig:
    """One device with a model's two layouts on it."""

    def __init__(self, device: jax.Device, cfg: ModelConfig) -> None:
        shape = MeshShape()
        self.cfg, self.device = cfg, device
        self.mesh = make_mesh([device], shape)
        self.train = train_layout(shape, kv_heads=cfg.kv_heads)
        self.generate = generate_layout(shape, kv_heads=cfg.kv_heads)
        self.shapes, self.axes = abstract_params(cfg, "lm")

    def init(self, dtype: Any = jnp.float32) -> Params:
        """Random weights, born on the device."""
        placed = shardings(self.mesh, self.train, self.axes)
        return init_params(self.cfg, "lm", jax.random.key(0), placed, dtype)

    def rows(self, array: np.ndarray) -> jax.Array:
        """Rows on the device."""
        return jax.device_put(array, batch_sharding(self.mesh, self.generate))

    def relay(self, dtype: str) -> Relay:
        """Training weights to generation weights in `dtype`."""
        return Relay(self.mesh, self.train, self.generate, self.shapes, self.axes, dtype)

    def decode(
        self, decoder: Decoder, params: Params, prompts_BP: np.ndarray, sampling: Sampling, new: int
    ) -> Generation:
        """`new` tokens for each prompt; the same programs for every `new`."""
        B, P = prompts_BP.shape
        return decoder.generate(
            params,
            self.rows(prompts_BP),
            self.rows(np.full(B, P, np.int32)),
            self.rows(np.arange(B, dtype=np.int32)[:, None]),
            jax.random.key(7),
            sampling,
            max_new_B=self.rows(np.full(B, new, np.int32)),
        )


def random_ids(cfg: ModelConfig, rows: int, width: int) -> np.ndarray:
    """Uniform token ids (rows, width)."""
    return np.random.default_rng(0).integers(0, cfg.vocab, (rows, width)).astype(np.int32)


def row(name: str, value: str, note: str = "") -> None:
    """One line of the table, at once: what was measured stays when a later check fails."""
    left, right = COLUMNS
    print(f"{name:<{left}} {value:>{right}}  {note}".rstrip(), flush=True)


def median_s(call: Callable[[], Any], repeats: int) -> float:
    """Median seconds of `call` until its arrays are there, after one call that compiles."""
    jax.block_until_ready(call())
    seconds = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start_s)
    return statistics.median(seconds)


def share(value: float, peak: float | None) -> str:
    """How much of the device's peak, where that is known."""
    return "peak of this device unknown" if peak is None else f"{value / peak:.1%} of {peak:.4g}"


def sharpened(params: Params) -> Params:
    """Weights twice as large: distributions far enough from uniform to be worth comparing."""
    return jax.tree.map(lambda p: 2 * p, params)


def check_numbers(device: jax.Device) -> None:
    """Small model: device against CPU, decoding against one pass over the finished rows."""
    cpu = jax.devices("cpu")[0]
    here, there = Rig(device, SMALL), Rig(cpu, SMALL)
    params = sharpened(here.init())
    host = jax.device_put(params, shardings(there.mesh, there.train, there.axes))
    ids_BP = random_ids(SMALL, 16, 24)
    sampling = Sampling(max_new_tokens=40, ignore_eos=True)
    expected = teacher(there, host, np.concatenate([ids_BP, ids_BP], axis=1))
    drawn = np.asarray(there.decode(_decoder(there), host, ids_BP, sampling, 40).input_ids_BT)
    for precision in ("highest", "default"):
        with jax.default_matmul_precision(precision):
            found = teacher(here, params, np.concatenate([ids_BP, ids_BP], axis=1))
            gap = float(np.abs(found[0] - expected[0]).max())
            row(f"logits f32 {precision}: |device - CPU|", f"{gap:.1e}", "maximum")
            tokens = np.asarray(
                here.decode(_decoder(here), params, ids_BP, sampling, 40).input_ids_BT
            )
            equal = int((tokens == drawn).all(axis=1).sum())
            row(f"sampled f32 {precision}: rows as on CPU", f"{equal} of 16", "40 tokens a row")
            compare_greedy(here, params, ids_BP, precision)
            compare_log_probs(here, params, ids_BP, sampling, f"f32 {precision}")
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    compare_log_probs(here, half, ids_BP, sampling, "bf16")


def _decoder(rig: Rig) -> Decoder:
    return Decoder(rig.cfg, rig.mesh, rig.generate)


def teacher(rig: Rig, params: Params, ids_BT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits of one pass over whole rows, and how far the best is ahead of the next best."""

    def run(params: Params, ids_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits_BTV = lm_logits(rig.cfg, params, hidden_states(rig.cfg, params, ids_BT))
        best_BT2, _ = jax.lax.top_k(logits_BTV, 2)
        return logits_BTV, best_BT2[..., 0] - best_BT2[..., 1]

    return jax.device_get(jax.jit(run)(params, rig.rows(ids_BT)))


def compare_greedy(rig: Rig, params: Params, ids_BP: np.ndarray, name: str) -> None:
    """Greedy tokens, token by token with a cache, against the best of one pass over the rows."""
    sampling = Sampling(max_new_tokens=40, ignore_eos=True, greedy=True)
    out = rig.decode(_decoder(rig), params, ids_BP, sampling, 40)
    ids_BT, mask_BT = np.asarray(out.input_ids_BT), np.asarray(out.response_mask_BT)[:, 1:]
    logits_BTV, lead_BT = teacher(rig, params, ids_BT)
    wrong_BT = (logits_BTV.argmax(-1)[:, :-1] != ids_BT[:, 1:]) & mask_BT
    ties = int((wrong_BT & (lead_BT[:, :-1] < TIE)).sum())
    row(
        f"greedy f32 {name}: not the teacher's",
        f"{int(wrong_BT.sum())} of {int(mask_BT.sum())}",
        f"{ties} of them ties within {TIE}",
    )


def compare_log_probs(
    rig: Rig, params: Params, ids_BP: np.ndarray, sampling: Sampling, name: str
) -> None:
    """Log-probs written while sampling against those the trainer computes of the same tokens."""
    out = rig.decode(_decoder(rig), params, ids_BP, sampling, sampling.max_new_tokens)
    dtype = str(params["final_norm"].dtype)
    scorer = Scorer(rig.cfg, rig.mesh, rig.train, compute_dtype=dtype, with_entropy=False)
    logp_BT, _ = scorer.log_probs(params, out.input_ids_BT)
    mask_BT = np.asarray(out.response_mask_BT)
    gap = np.abs(np.asarray(logp_BT) - np.asarray(out.log_probs_BT))[mask_BT]
    row(
        f"log-probs {name}: |rollout - train|",
        f"{gap.max():.1e}",
        f"maximum; mean {gap.mean():.1e} over {gap.size} tokens",
    )


def check_relay(rig: Rig, params: Params, peak: Peak | None, repeats: int) -> Params:
    """Nothing moves where layout and dtype agree; a cast runs at memory speed. bf16 weights."""
    same = rig.relay("float32")
    kept = sum(
        a is b
        for a, b in zip(
            jax.tree.leaves(params), jax.tree.leaves(same.to_generate(params)), strict=True
        )
    )
    count = len(jax.tree.leaves(params))
    seconds = median_s(lambda: same.to_generate(params), repeats)
    row(
        "relay f32 -> f32",
        f"{seconds * 1e3:.2f} ms",
        f"{same.bytes_moved()} bytes move, {kept} of {count} arrays are the training ones",
    )
    cast = rig.relay("bfloat16")
    seconds = median_s(lambda: cast.to_generate(params), repeats)
    moved = sum(p.size * (4 + 2) for p in jax.tree.leaves(params))  # read float32, write bf16
    rate = moved / seconds
    note = f"{rate / 1e9:.0f} GB/s, {share(rate, peak and peak.bytes_per_s)}; n={repeats}"
    row("relay f32 -> bf16", f"{seconds * 1e3:.2f} ms", note)
    return cast.to_generate(params)


def check_decode(rig: Rig, params: Params, size: Size, peak: Peak | None) -> None:
    """Milliseconds a decode step and the bytes it has to read a second.

    A step reads every weight (an embedding that is not the head too: a few rows) and all slots of
    both caches. Its time is that of a long answer less that of one token, by the same programs.
    """
    cfg, P, R = rig.cfg, size.prompt_tokens, size.new_tokens
    decoder = Decoder(cfg, rig.mesh, rig.generate, segment=R)
    sampling = Sampling(max_new_tokens=R, ignore_eos=True)
    weights = sum(p.nbytes for p in jax.tree.leaves(params))
    weights -= 0 if cfg.tied else params["embed"].nbytes
    slot_bytes = 2 * cfg.layers * cfg.kv_heads * cfg.head_dim * params["embed"].dtype.itemsize
    for B in size.decode_batches:
        ids_BP = random_ids(cfg, B, P)

        def run(new: int, ids_BP: np.ndarray = ids_BP) -> jax.Array:
            return rig.decode(decoder, params, ids_BP, sampling, new).input_ids_BT

        first_s, whole_s = (
            median_s(lambda: run(1), size.repeats),
            median_s(lambda: run(R), size.repeats),
        )
        step_s = max(whole_s - first_s, 1e-9) / (R - 1)
        read = weights + B * (P + R) * slot_bytes
        rate = read / step_s
        row(f"prefill, {B} x {P} tokens", f"{first_s * 1e3:.1f} ms", "with the first token")
        row(
            f"decode, {B} rows: a step",
            f"{step_s * 1e3:.3f} ms",
            f"{B / step_s:.0f} tokens/s; {read / 1e9:.2f} GB read, {rate / 1e9:.0f} GB/s, "
            f"{share(rate, peak and peak.bytes_per_s)}; n={size.repeats}",
        )
    compare_log_probs(
        rig, params, random_ids(cfg, size.decode_batches[-1], P), sampling, "bf16 here"
    )


def training_flops_per_token(cfg: ModelConfig, T: int) -> float:
    """6 for each weight in a matrix product, and causal attention's 6 L H d T.

    Attention: two products of 2 H d T forward, half of them under the diagonal, three times that
    with the backward pass. What remat and the chunked head compute again is not counted.
    """
    D, H, K, d = cfg.embed, cfg.heads, cfg.kv_heads, cfg.head_dim
    weights = cfg.layers * (2 * D * H * d + 2 * D * K * d + 3 * D * cfg.mlp) + D * cfg.padded_vocab
    return 6.0 * weights + 6.0 * cfg.layers * H * d * T


def likelihood_loss(
    outputs: Outputs, batch: Mapping[str, jax.Array], total: rl.Denominators
) -> tuple[jax.Array, dict[str, Any]]:
    """Mean negative log-likelihood."""
    assert outputs.log_probs_BT is not None
    return rl.aggregate(-outputs.log_probs_BT, batch["response_mask"], total), {}


def check_training(rig: Rig, params: Params, size: Size, peak: Peak | None, remat: str) -> None:
    """Seconds of one AdamW update in bf16 with float32 masters; `params` are taken over."""
    cfg, B, T = rig.cfg, size.train_sequences, size.train_tokens
    optimizer = OptimizerConfig(lr=1e-5)
    options = {"compute_dtype": "bfloat16", "remat": remat}
    trainer = Trainer(
        cfg, "lm", rig.mesh, rig.train, rig.axes, optimizer, likelihood_loss, **options
    )
    shape = (B // size.micro_sequences, size.micro_sequences, T)
    mask_MBT = np.ones(shape, bool)
    mask_MBT[..., 0] = False  # nothing predicts the first token
    micros = [{"input_ids": random_ids(cfg, B, T).reshape(shape), "response_mask": mask_MBT}]
    state = trainer.init_state(params)
    losses: list[float] = []

    def update() -> Any:
        nonlocal state
        state, metrics = trainer.update(state, micros)
        losses.append(float(metrics["loss"].sum))
        return state.updates

    seconds = median_s(update, size.repeats)
    flops = training_flops_per_token(cfg, T) * B * T
    row(
        f"update, {B} x {T} tokens, remat {remat}",
        f"{seconds * 1e3:.1f} ms",
        f"{B * T / seconds:.0f} tokens/s, {flops / seconds / 1e12:.1f} TFLOP/s, MFU "
        f"{share(flops / seconds, peak and peak.flops)}; n={size.repeats}",
    )
    row("  loss, first and last update", f"{losses[0]:.3f}", f"{losses[-1]:.3f}")


def peak_memory(device: jax.Device, name: str) -> None:
    """The most bytes in use so far, where the device counts them."""
    stats = device.memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        row(
            f"  memory so far, after {name}",
            f"{stats['peak_bytes_in_use'] / 2**30:.1f} GiB",
            "peak",
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; the sections' seconds stand after them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument("--size", choices=sorted(SIZES), default="full")
    size = SIZES[parser.parse_args(arguments).size]
    device = jax.devices()[0]
    peak = PEAKS.get(device.device_kind)
    versions = {"jax": jax.__version__, "flax": flax.__version__, "optax": optax.__version__}
    row("device", device.device_kind, ", ".join(f"{k} {v}" for k, v in versions.items()))
    rig = Rig(device, size.model)
    count = sum(p.size for p in jax.tree.leaves(rig.shapes))
    row("model", f"{count / 1e6:.1f} M", "parameters of the timed model, random")

    start_s = time.perf_counter()

    def done(name: str) -> None:
        gc.collect()
        peak_memory(device, name)
        row(f"  {name} took", f"{time.perf_counter() - start_s:.0f} s", "since the start")

    check_numbers(device)
    done("numbers")
    params = rig.init()
    half = check_relay(rig, params, peak, size.repeats)
    done("relay")
    check_decode(rig, half, size, peak)
    del half
    done("decode")
    check_training(rig, params, size, peak, "dots")
    done("training")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
