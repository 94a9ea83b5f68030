# SPDX-License-Identifier: Apache-2.0
"""What a pipeline wastes: seconds and ticks of m micro-batches against the ideal (m + p - 1) / m.

    python -m benchmarks.bubble [--stages 4] [--micros 2 4 8 16]

On simulated devices, which share the cores of this host: an idle stage still computes (on rows that
nobody reads), so what is measured is the work of all ticks, not the wait of a stage on its own GPU.
"""

import argparse
import os
import statistics
import time
from collections.abc import Sequence

from benchmarks.figure14 import host

ROWS, TOKENS, REPEATS = 4, 64, 5  # of a micro-batch; timed updates, of which the median counts


def measured(stages: int, micros: int) -> tuple[float, int]:
    """Median seconds of one mini-batch's gradients, and the ticks that its forward pass takes."""
    import jax
    import numpy as np

    from benchmarks.gpu_check import likelihood_loss
    from hfjax.engine.meter import meter
    from hfjax.engine.replicas import Replicas
    from hfjax.engine.train import OptimizerConfig, Trainer
    from hfjax.models.llama import ModelConfig, abstract_params, init_params
    from meshes.layouts import train_layout
    from meshes.mesh import MeshShape, make_mesh

    cfg = ModelConfig(
        layers=2 * stages,
        embed=128,
        heads=4,
        kv_heads=4,
        head_dim=32,
        mlp=512,
        vocab=256,
        rope_theta=1e4,
    )
    shape = MeshShape(pipe_micro=stages)
    mesh = make_mesh(jax.devices()[:stages], shape)
    layout = train_layout(shape, kv_heads=cfg.kv_heads)
    replicas = Replicas(mesh, layout, *abstract_params(cfg, "lm"), "float32")
    trainer = Trainer(cfg, "lm", replicas, OptimizerConfig(), likelihood_loss)
    params = init_params(cfg, "lm", jax.random.key(0), replicas.state_shardings)
    columns = {
        "input_ids": np.ones((micros, ROWS, TOKENS), np.int32),
        "response_mask": np.ones((micros, ROWS, TOKENS), bool),
    }
    shapes = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in columns.items()}
    traffic = meter(trainer.lowered(shapes)["accumulate"].compile(), mesh=mesh)
    permutes = [c.trips for c in traffic.collectives if c.kind == "collective-permute"]
    seconds = []
    for _ in range(REPEATS + 1):  # the first compiles
        begin_s = time.perf_counter()
        jax.block_until_ready(trainer.gradients(params, [columns])[1])
        seconds.append(time.perf_counter() - begin_s)
    return statistics.median(seconds[1:]), permutes[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; 1 where the schedule has other ticks than m + p - 1."""
    parser = argparse.ArgumentParser(description="The bubble of a pipeline")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--micros", type=int, nargs="+", default=[2, 4, 8, 16])
    options = parser.parse_args(arguments)
    p = options.stages
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={p}"
    rows = [(m, *measured(p, m)) for m in options.micros]
    tick_s = min(seconds / ticks for _, seconds, ticks in rows)
    print(f"p = {p} stages, {ROWS} x {TOKENS} tokens a micro-batch, median of {REPEATS}; {host()}")
    print("simulated devices share the cores: idle ticks cost work here, on GPUs they cost waiting")
    print("   m  ticks  idle a stage  (m+p-1)/m  seconds  seconds a micro-batch / a tick")
    for m, seconds, ticks in rows:
        ideal, found = (m + p - 1) / m, seconds / m / tick_s
        print(f"{m:4}  {ticks:5}  {ticks - m:12}  {ideal:9.3f}  {seconds:7.3f}  {found:9.3f}")
    return 0 if all(ticks == m + p - 1 for m, _, ticks in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
