# SPDX-License-Identifier: Apache-2.0
"""One GPU in six minutes: exact numbers, decode bandwidth, training MFU, relay seconds.

`python -m benchmarks.gpu_check [--size tiny|full]`. It uses the engine alone, so that jax, flax,
optax, orbax and numpy are enough; `tiny` runs on a CPU too. Timings are medians of n after one
call that compiles. Weights are random: nothing is downloaded.
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
from hfjax.engine.decode import Decoder
from hfjax.engine.hybrid import Relay
from hfjax.engine.replicas import Replicas
from hfjax.engine.responses import Generation
from hfjax.engine.sampling import Sampling
from hfjax.engine.scoring import Scorer
from hfjax.engine.train import OptimizerConfig, Outputs, Trainer
from hfjax.metrics import finalize
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
EXACT_ROWS, EXACT_PROMPT, EXACT_TOKENS = 16, 24, 32  # sampled where numbers are compared
COLUMNS = (46, 14)  # widths of the table's first two columns


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Dense bf16 FLOP/s and memory bytes/s of a device, from its data sheet."""

    flops: float
    bytes_per_s: float


PEAKS = {  # by jax's device_kind
    "NVIDIA H200": Peak(flops=989e12, bytes_per_s=4.8e12),
    "NVIDIA H100 80GB HBM3": Peak(flops=989e12, bytes_per_s=3.35e12),
    "NVIDIA A100-SXM4-80GB": Peak(flops=312e12, bytes_per_s=2.039e12),
    "NVIDIA A100-SXM4-40GB": Peak(flops=312e12, bytes_per_s=1.555e12),
}

TINY = ModelConfig(
    layers=2, embed=40, heads=8, kv_heads=4, head_dim=6, mlp=56, vocab=96, rope_theta=1e4
)
SMALL = ModelConfig(
    layers=4, embed=256, heads=8, kv_heads=4, head_dim=32, mlp=512, vocab=1024, rope_theta=1e4
)
ONE_B = ModelConfig(  # Llama 3.2 1B's sizes
    layers=16,
    embed=2048,
    heads=32,
    kv_heads=8,
    head_dim=64,
    mlp=8192,
    vocab=128256,
    rope_theta=5e5,
    tied=True,
)


@dataclass(frozen=True, kw_only=True)
class Size:
    """What is measured, in sequences and tokens."""

    exact: ModelConfig  # compared with the host's CPU
    model: ModelConfig  # timed
    decode_batches: tuple[int, ...]  # rows decoded at a time
    prompt_tokens: int
    new_tokens: int  # one segment: no look at the host in between
    train_sequences: int  # of a mini-batch
    micro_sequences: int
    train_tokens: int  # of a row
    repeats: int  # n


SIZES = {
    "tiny": Size(
        exact=TINY,
        model=TINY,
        decode_batches=(1, 4),
        prompt_tokens=8,
        new_tokens=64,
        train_sequences=4,
        micro_sequences=2,
        train_tokens=32,
        repeats=3,
    ),
    "full": Size(
        exact=SMALL,
        model=ONE_B,
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
    """One device, and a model's two layouts on it."""

    def __init__(self, device: jax.Device, cfg: ModelConfig) -> None:
        shape = MeshShape()
        self.cfg = cfg
        self.mesh = make_mesh([device], shape)
        self.train = train_layout(shape, kv_heads=cfg.kv_heads)
        self.generate = generate_layout(shape, kv_heads=cfg.kv_heads)
        self.shapes, self.axes = abstract_params(cfg, "lm")
        self.placed = shardings(self.mesh, self.train, self.axes)
        self.peak = PEAKS.get(device.device_kind)

    def init(self) -> Params:
        """Random float32 weights, born on the device."""
        return init_params(self.cfg, "lm", jax.random.key(0), self.placed)

    def rows(self, array: np.ndarray) -> jax.Array:
        """Rows on the device."""
        return jax.device_put(array, batch_sharding(self.mesh, self.generate))

    def replicas(self, dtype: str) -> Replicas:
        """The weights as passes in `dtype` see them."""
        return Replicas(self.mesh, self.train, self.shapes, self.axes, dtype)

    def relay(self, dtype: str) -> Relay:
        """From training weights to generation weights in `dtype`."""
        return Relay(self.mesh, self.train, self.generate, self.shapes, self.axes, dtype)

    def decoder(self, segment: int = EXACT_TOKENS) -> Decoder:
        """A decoder with compiled programs of its own."""
        return Decoder(self.cfg, self.mesh, self.generate, segment=segment)

    def decode(
        self, decoder: Decoder, params: Params, ids_BP: np.ndarray, sampling: Sampling, new: int
    ) -> Generation:
        """`new` tokens for each prompt; the same programs for every `new`."""
        B, P = ids_BP.shape
        return decoder.generate(
            params,
            self.rows(ids_BP),
            self.rows(np.full(B, P, np.int32)),
            self.rows(np.arange(B, dtype=np.int32)[:, None]),
            jax.random.key(7, impl="threefry2x32"),
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


def bandwidth(bytes_per_s: float, peak: Peak | None) -> str:
    """GB/s, and the share of the device's peak where that is known."""
    text = f"{bytes_per_s / 1e9:.0f} GB/s"
    return text if peak is None else f"{text}, {bytes_per_s / peak.bytes_per_s:.0%} of peak"


def check_numbers(device: jax.Device, cfg: ModelConfig) -> None:
    """Device against CPU, decoding against one pass over the finished rows.

    Float32 twice: with full products, and with the device's default ones (TF32 on NVIDIA).
    """
    here, there = Rig(device, cfg), Rig(jax.devices("cpu")[0], cfg)
    params = jax.tree.map(lambda p: 2 * p, here.init())  # far enough from uniform to tell apart
    on_cpu = jax.device_put(params, there.placed)
    ids_BP = random_ids(cfg, EXACT_ROWS, EXACT_PROMPT)
    drawn_BT = np.asarray(sampled(there, on_cpu, ids_BP).input_ids_BT)
    logits_BTV = teacher_logits(there, on_cpu, drawn_BT)
    for precision in ("highest", "default"):
        with jax.default_matmul_precision(precision):
            gap = float(np.abs(teacher_logits(here, params, drawn_BT) - logits_BTV).max())
            row(f"logits, f32 {precision}: device - CPU", f"{gap:.1e}", "largest difference")
            out = sampled(here, params, ids_BP)
            equal = int((np.asarray(out.input_ids_BT) == drawn_BT).all(axis=1).sum())
            count, note = f"{equal} of {EXACT_ROWS}", f"{EXACT_TOKENS} tokens a row, the same key"
            row(f"sampled, f32 {precision}: rows as on CPU", count, note)
            compare_log_probs(here, params, out, f"f32 {precision}")
            compare_greedy(here, params, ids_BP, f"f32 {precision}")
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    compare_log_probs(here, half, sampled(here, half, ids_BP), "bf16")


def sampled(rig: Rig, params: Params, ids_BP: np.ndarray, *, greedy: bool = False) -> Generation:
    """EXACT_TOKENS tokens for each prompt."""
    sampling = Sampling(max_new_tokens=EXACT_TOKENS, ignore_eos=True, greedy=greedy)
    return rig.decode(rig.decoder(), params, ids_BP, sampling, EXACT_TOKENS)


def teacher_logits(rig: Rig, params: Params, ids_BT: np.ndarray) -> np.ndarray:
    """Float32 logits of one pass over whole rows."""

    def run(params: Params, ids_BT: jax.Array) -> jax.Array:
        return lm_logits(rig.cfg, params, hidden_states(rig.cfg, params, ids_BT))

    return np.asarray(jax.jit(run)(params, rig.rows(ids_BT)))


def compare_greedy(rig: Rig, params: Params, ids_BP: np.ndarray, name: str) -> None:
    """Greedy tokens, one by one with a cache, against the best of one pass over the rows."""
    out = sampled(rig, params, ids_BP, greedy=True)
    ids_BT, mask_BT = np.asarray(out.input_ids_BT), np.asarray(out.response_mask_BT)[:, 1:]
    logits_BTV = teacher_logits(rig, params, ids_BT)[:, :-1]
    wrong_BT = (logits_BTV.argmax(-1) != ids_BT[:, 1:]) & mask_BT
    second_BT, best_BT = np.moveaxis(np.partition(logits_BTV, -2)[..., -2:], -1, 0)
    ties = int((wrong_BT & (best_BT - second_BT < TIE)).sum())
    count = f"{int(wrong_BT.sum())} of {int(mask_BT.sum())}"
    row(f"greedy, {name}: not the teacher's", count, f"{ties} of them ties within {TIE}")


def compare_log_probs(rig: Rig, params: Params, out: Generation, name: str) -> None:
    """Log-probs written while sampling against those the trainer computes of the same tokens."""
    dtype = str(params["final_norm"].dtype)
    scorer = Scorer(rig.cfg, rig.replicas(dtype), with_entropy=False)
    logp_BT, _ = scorer.log_probs(params, out.input_ids_BT)
    mask_BT = np.asarray(out.response_mask_BT)
    gap = np.abs(np.asarray(logp_BT) - np.asarray(out.log_probs_BT))[mask_BT]
    note = f"largest difference; mean {gap.mean():.1e} over {gap.size} tokens"
    row(f"log-probs, {name}: rollout - training", f"{gap.max():.1e}", note)


def check_relay(rig: Rig, params: Params, repeats: int) -> Params:
    """Nothing moves where layout and dtype agree; a cast runs at memory speed. bf16 weights."""
    same, cast = rig.relay("float32"), rig.relay("bfloat16")
    before, after = jax.tree.leaves(params), jax.tree.leaves(same.to_generate(params))
    kept = sum(a is b for a, b in zip(before, after, strict=True))
    seconds = median_s(lambda: same.to_generate(params), repeats)
    note = f"{same.bytes_moved()} bytes move, {kept} of {len(before)} arrays are the training ones"
    row("relay, f32 to f32", f"{seconds * 1e3:.2f} ms", note)
    seconds = median_s(lambda: cast.to_generate(params), repeats)
    moved = sum(p.size * (4 + 2) for p in before)  # float32 read, bf16 written
    note = f"{bandwidth(moved / seconds, rig.peak)}; n={repeats}"
    row("relay, f32 to bf16", f"{seconds * 1e3:.2f} ms", note)
    return cast.to_generate(params)


def check_decode(rig: Rig, params: Params, size: Size) -> None:
    """Milliseconds a decode step, and the bytes a second it has to read.

    A step's time is that of a long answer less that of one token, by the same programs.
    """
    cfg, P, R, n = rig.cfg, size.prompt_tokens, size.new_tokens, size.repeats
    decoder = rig.decoder(segment=R)
    sampling = Sampling(max_new_tokens=R, ignore_eos=True)
    for B in size.decode_batches:
        ids_BP = random_ids(cfg, B, P)

        def run(new: int, ids_BP: np.ndarray = ids_BP) -> jax.Array:
            return rig.decode(decoder, params, ids_BP, sampling, new).input_ids_BT

        whole_s, first_s = median_s(lambda: run(R), n), median_s(lambda: run(1), n)
        step_s = max(whole_s - first_s, 1e-9) / (R - 1)
        read = bytes_read(cfg, params, B, P + R)
        row(f"prefill, {B} x {P} tokens", f"{first_s * 1e3:.1f} ms", f"and one token; n={n}")
        note = f"{B / step_s:.0f} tokens/s; {read / 1e9:.2f} GB a step, "
        note += f"{bandwidth(read / step_s, rig.peak)}; n={n}"
        row(f"decode, {B} rows: a step", f"{step_s * 1e3:.3f} ms", note)
    out = rig.decode(decoder, params, random_ids(cfg, size.decode_batches[-1], P), sampling, R)
    compare_log_probs(rig, params, out, "timed bf16")


def bytes_read(cfg: ModelConfig, params: Params, rows: int, slots: int) -> int:
    """What a decode step has to read: all weights in products, and `slots` keys and values a row.

    All slots of both caches count, written or not: attention masks them, but reads them.
    """
    weights = sum(p.nbytes for p in jax.tree.leaves(params))
    weights -= 0 if cfg.tied else params["embed"].nbytes  # a few of its rows are looked up
    itemsize = params["embed"].dtype.itemsize
    return weights + rows * slots * 2 * cfg.layers * cfg.kv_heads * cfg.head_dim * itemsize


def check_training(rig: Rig, params: Params, size: Size, remat: str) -> None:
    """Seconds of one AdamW update in bf16 with float32 masters; `params` are taken over."""
    cfg, B, T = rig.cfg, size.train_sequences, size.train_tokens
    trainer = Trainer(
        cfg,
        "lm",
        rig.replicas("bfloat16"),
        OptimizerConfig(lr=1e-4),
        likelihood_loss,
        remat=remat,
    )
    shape = (B // size.micro_sequences, size.micro_sequences, T)
    mask_MBT = np.ones(shape, bool)
    mask_MBT[..., 0] = False  # nothing predicts the first token
    micros = [{"input_ids": random_ids(cfg, B, T).reshape(shape), "response_mask": mask_MBT}]
    state = trainer.init_state(params)
    losses: list[float] = []

    def update() -> jax.Array:
        nonlocal state
        state, metrics = trainer.update(state, micros)
        losses.append(finalize(metrics)["loss"])
        return state.updates

    seconds = median_s(update, size.repeats)
    flops_per_s = training_flops_per_token(cfg, T) * B * T / seconds
    mfu = "" if rig.peak is None else f", MFU {flops_per_s / rig.peak.flops:.1%}"
    note = f"{B * T / seconds:.0f} tokens/s, {flops_per_s / 1e12:.1f} TFLOP/s{mfu}"
    name = f"update, {B} x {T} tokens, remat {remat}"
    row(name, f"{seconds * 1e3:.1f} ms", f"{note}; n={size.repeats}")
    row("  its loss, first and last", f"{losses[0]:.3f}", f"{losses[-1]:.3f}, on the same rows")


def training_flops_per_token(cfg: ModelConfig, T: int) -> float:
    """6 for each weight in a matrix product, and causal attention's 6 L H d T.

    Attention: two products of 2 H d T forward, half of each under the diagonal; three times that
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table as it is measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check")
    parser.add_argument("--size", choices=sorted(SIZES), default="full")
    size = SIZES[parser.parse_args(arguments).size]
    device, start_s = jax.devices()[0], time.perf_counter()
    rig = Rig(device, size.model)
    versions = f"jax {jax.__version__}, flax {flax.__version__}, optax {optax.__version__}"
    row("device", str(len(jax.devices())), f"x {device.device_kind}, one used; {versions}")
    count = sum(p.size for p in jax.tree.leaves(rig.shapes))
    row("parameters of the timed model", f"{count / 1e6:.2f} M", "random")

    def done(section: str) -> None:
        gc.collect()
        used = (device.memory_stats() or {}).get("peak_bytes_in_use")
        memory = "" if used is None else f"; at most {used / 2**30:.1f} GiB in use so far"
        row(f"  end of {section}", f"{time.perf_counter() - start_s:.0f} s", f"since start{memory}")

    check_numbers(device, size.exact)
    done("numbers")
    params = rig.init()
    half = check_relay(rig, params, size.repeats)
    done("relay")
    check_decode(rig, half, size)
    del half
    done("decode")
    check_training(rig, params, size, "dots")
    done("training")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
