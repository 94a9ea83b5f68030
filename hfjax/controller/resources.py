# SPDX-License-Identifier: Apache-2.0
"""What pools ask of a Ray cluster, and whether it could ever give it."""

from collections import Counter
from collections.abc import Mapping, Sequence

from meshes import placement as spec

RESOURCES = {"cpu": "CPU", "gpu": "GPU"}  # platform -> the Ray resource that counts its devices


def check_feasible(
    pools: Sequence[spec.Pool], platform: str, nodes: Sequence[Mapping[str, float]]
) -> None:
    """Refuses pools that the cluster could not hold even if it were empty."""
    have = Counter[str]()
    for node in nodes:
        have.update({kind: node.get(kind, 0) for kind in ("CPU", "GPU")})
    need = Counter[str]()
    for pool in pools:
        bundle = bundle_of(pool, platform)
        need.update({kind: count * pool.processes for kind, count in bundle.items()})
        if not any(all(node.get(k, 0) >= n for k, n in bundle.items()) for node in nodes):
            biggest = max((node.get(RESOURCES[platform], 0) for node in nodes), default=0)
            raise ValueError(
                f"[pool.{pool.name}] a process asks for {total(bundle)} of one node, the biggest "
                f"node has {biggest:g} {RESOURCES[platform]}; use more processes or fewer devices"
            )
    if any(need[kind] > have[kind] for kind in need):
        raise ValueError(
            f"{request(pools, platform)}, the cluster has {total(have)} on {len(nodes)} "
            "node(s); give the pools fewer processes or devices, or add nodes"
        )


def bundle_of(pool: spec.Pool, platform: str) -> dict[str, float]:
    """What one process of a pool reserves; simulated devices cost nothing."""
    if platform == "cpu":
        return {"CPU": 1}
    return {"CPU": 1, RESOURCES[platform]: pool.devices // pool.processes}


def request(pools: Sequence[spec.Pool], platform: str) -> str:
    """What all pools ask for, in words."""
    asked = Counter[str]()
    for pool in pools:
        asked.update({k: n * pool.processes for k, n in bundle_of(pool, platform).items()})
    named = ", ".join(f"{pool.name}: {pool.processes} process(es)" for pool in pools)
    return f"pools ask for {total(asked)} ({named})"


def total(resources: Mapping[str, float]) -> str:
    """Processors and accelerators, in words."""
    return ", ".join(f"{resources.get(k, 0):g} {k}" for k in ("CPU", "GPU") if resources.get(k))
