# SPDX-License-Identifier: Apache-2.0
"""Automatic mapping against what it stands for: the arithmetic and the compiled programs.

    python -m benchmarks.mapping compiled [--models 7b ...]
    python -m benchmarks.mapping measured --host FILE.toml [--rounds 5] [--rows FILE.jsonl]
    python -m benchmarks.mapping placements --host FILE.toml [--rounds 3] [--steps 2]

`compiled` puts what hfjax.mapping predicts of the actors and critics of HybridFlow's figure 14
beside what the compiler plans for as many simulated devices. `measured` and `placements` are of
this host, whose devices `hfjax calibrate` measured (benchmarks.predicted, benchmarks.rivals).
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.figure14 import SETUPS, host
from benchmarks.predicted import measured
from benchmarks.rivals import placements
from hfjax.mapping.verify import Job, compile_apart, table
from meshes.layouts import HYBRID
from meshes.mesh import MeshShape
from meshes.placement import RolePlacement

ROWS = 1  # of a replica's micro-batch


def jobs(name: str) -> list[Job]:
    """The actor of a setup on its fewest devices, and critics of its size."""
    setup = SETUPS[name]
    devices = setup.devices[0]
    actor = setup.placed(devices, HYBRID)
    micros = 2 * setup.p
    found = Job(
        config=setup.cfg,
        head="lm",
        placement=actor,
        remat="layer",
        micros=micros,
        rows=ROWS * actor.replicas,
        infer_rows=8 * actor.replicas,
        prompts=16 * actor.mesh_shape.over(actor.generate_batch),
    )
    fsdp = RolePlacement("critic", "all", train=MeshShape(fsdp=devices // 4, tensor=4))
    critics = [replace(actor, role="critic", generate=None), fsdp]
    return [found] + [
        replace(
            found,
            head="value",
            placement=each,
            prompts=0,
            rows=ROWS * each.replicas,
            infer_rows=8 * each.replicas,
        )
        for each in critics
    ]


def compiled(names: Sequence[str]) -> None:
    """Prints a table a role as it is compiled."""
    print(
        f"GB a device, predicted and compiled; {host()}; without fused attention, float16 standing "
        "for bfloat16"
    )
    for job in (job for name in names for job in jobs(name)):
        place = job.placement
        print(
            f"\n{place.role} of {job.config.layers} x {job.config.embed} on {place.base}, zero "
            f"{place.zero}: {job.micros} micro-batches of {job.rows} x {job.tokens} tokens"
        )
        print(table(compile_apart(job)), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mapping")
    parser.add_argument("part", choices=["compiled", "measured", "placements"])
    parser.add_argument("--models", nargs="+", choices=SETUPS, default=list(SETUPS))
    parser.add_argument("--host", type=Path, help="a file that hfjax calibrate wrote here")
    parser.add_argument("--rows", type=Path, help="rows that benchmarks.measured wrote")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0, help="of a placement's turn")
    options = parser.parse_args(arguments)
    if options.part != "compiled" and not options.host:
        parser.error(f"{options.part}: give --host FILE.toml")
    if options.part == "measured":
        return measured(options)
    if options.part == "placements":
        return placements(options)
    compiled(options.models)
    return 0


if __name__ == "__main__":
    sys.exit(main())
