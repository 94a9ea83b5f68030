# SPDX-License-Identifier: Apache-2.0
"""What the search found, as text and as a placement file."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from hfjax.mapping.devices import Cluster
from hfjax.mapping.partitions import processes_of
from hfjax.mapping.search import Found, Plan, PlanPool, Rejected
from hfjax.mapping.simulate import idle_shares, picture_of
from hfjax.mapping.work import Option, Problem, Workload
from meshes.mesh import MeshShape
from meshes.placement import Placement, Pool, RolePlacement

GB = 1e9
ALL = "all"  # the name of a pool that holds every role


def placement_of(plan: Plan, cluster: Cluster, work: Workload) -> Placement:
    """The plan as `hfjax train --placement` takes it: a process for each machine of a pool."""
    names = {
        pool.roles: ALL if len(plan.pools) == 1 else "-".join(pool.roles) for pool in plan.pools
    }
    pools = {names[pool.roles]: _pool(names[pool.roles], pool, cluster) for pool in plan.pools}
    roles = {
        role: _role(role, names[pool.roles], option, work)
        for pool in plan.pools
        for role, option in pool.options.items()
    }
    return Placement(pools, roles)


def _pool(name: str, pool: PlanPool, cluster: Cluster) -> Pool:
    return Pool(name, sum(pool.devices), processes_of(pool.devices, cluster))


def _role(role: str, pool: str, option: Option, work: Workload) -> RolePlacement:
    place = RolePlacement(
        role,
        pool,
        train=option.train,
        infer=option.infer,
        generate=option.generate,
        zero=option.zero,
        sequence_parallel=option.sequence_parallel,
        relay=option.relay,
    )
    if option.micro_sequences:
        place = replace(place, micro_sequences=option.micro_sequences)
    if option.train and option.remat != "none":
        place = replace(place, remat=option.remat)
    if option.generate and option.waves > 1:
        replicas = place.mesh_shape.over(place.generate_batch)
        prompts = math.ceil(work.prompts / replicas)  # of a replica
        rows = math.ceil(prompts / option.waves) * replicas * work.n
        place = replace(place, generate_sequences=rows)
    return place


def memory_bytes(pool: PlanPool) -> float:
    """The most that a device of a pool holds."""
    options = pool.options.values()
    return sum(o.resident_bytes for o in options) + max(o.working_bytes for o in options)


def plans_table(found: Found, problem: Problem, cluster: Cluster) -> str:
    """A block a plan: its seconds, and a line a role."""
    rows: list[tuple[str, ...]] = [
        ("plan", "pool", "devices", "role", "train", "infer", "generate", "micro", "GB", "idle")
    ]
    for rank, plan in enumerate(found.plans, 1):
        rate = problem.work.tokens / plan.seconds
        cost = f"{plan.devices} devices, {seconds_text(plan.seconds * plan.devices)} device-seconds"
        took = f"{seconds_text(plan.seconds)} s a step, {rate:,.0f} tokens/s"
        rows.append((f"{rank}: {took}; {cost}",))
        idle = idle_shares(plan.played)
        for number, pool in enumerate(plan.pools, 1):
            count = counted(pool, cluster)
            held = f"{memory_bytes(pool) / GB:.1f}"
            share = f"{max(0.0, idle[pool.name]):.0%}"
            for k, (role, option) in enumerate(pool.options.items()):
                own = ("", str(number), count) if k == 0 else ("", "", "")
                ends = (held, share) if k == 0 else ("", "")
                rows.append((*own, role, *_layouts(option), *ends))
    return aligned(rows)


def counted(pool: PlanPool, cluster: Cluster) -> str:
    """A pool's devices by kind."""
    kinds = zip(pool.devices, cluster, strict=True)
    return " + ".join(f"{count} {device.name}" for count, (device, _) in kinds if count)


def _layouts(option: Option) -> tuple[str, str, str, str]:
    """train, infer, generate and micro-batch."""
    train = _shape(option.train, option.zero) if option.train else "-"
    infer = _shape(option.infer, option.zero) if option.infer else "as train"
    generate = "-"
    if keep := option.generate:
        generate = f"pipe {keep.pipe} x tensor {keep.tensor}"
        generate += f" in {option.waves} waves" if option.waves > 1 else ""
    micro = str(option.micro_sequences or "all") if option.train else "-"
    return train, infer, generate, f"{micro} remat" if option.remat != "none" else micro


def _shape(shape: MeshShape, zero: int) -> str:
    return f"{shape}{f' zero {zero}' if shape.fsdp > 1 else ''}"


def rejected_text(rejected: Sequence[Rejected], most: int = 8) -> str:
    """Why other ways to share the devices are not among the plans, the nearest first."""
    order = sorted(rejected, key=lambda one: (one.value or one.bound, len(one.sets)))
    lines = [f"  {_sets(one.sets)}: {one.why}" for one in order[:most]]
    if len(order) > most:
        lines.append(f"  and {len(order) - most} more")
    return "\n".join(lines)


def _sets(sets: Iterable[Iterable[str]]) -> str:
    return " | ".join(" ".join(roles) for roles in sets)


def objectives_text(founds: Mapping[str, Found | ValueError]) -> str:
    """The objectives side by side: what each chose, and what the other says of it."""
    rows = [("objective", "chose", "seconds a step", "d_cost", "priced of", "searched s")]
    for name, found in founds.items():
        if isinstance(found, ValueError):
            rows.append((name, "nothing fits", "-", "-", "-", "-"))
            continue
        best = found.best
        pools = " | ".join(f"{' '.join(pool.roles)} on {sum(pool.devices)}" for pool in best.pools)
        counts = f"{found.priced:,} of {found.pairs:,}"
        rows.append(
            (
                name,
                pools,
                f"{best.seconds:.1f}",
                f"{best.d_cost:.1f}",
                counts,
                f"{found.search_s:.1f}",
            )
        )
    return aligned(rows)


def seconds_text(seconds: float) -> str:
    """Seconds to a tenth, of short ones the first three digits."""
    return f"{seconds:.1f}" if seconds >= 10 else f"{seconds:.3g}"


def timeline_text(plan: Plan) -> str:
    """The last of the simulated iterations."""
    return picture_of(plan.played)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns under one another; a row of one cell is a heading."""
    table = [row for row in rows if len(row) > 1]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        row[0]
        if len(row) == 1
        else "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)
