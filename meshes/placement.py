# SPDX-License-Identifier: Apache-2.0
"""Placements: the pool and mesh of every role, read from and written to TOML."""

import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshes.layouts import SHARED, divisors, either
from meshes.mesh import DATA, FSDP, PIPE, TENSOR, MeshShape
from meshes.role import GENERATE_KEYS, RolePlacement
from meshes.toml import (
    bare_key,
    checked_table,
    did_you_mean,
    shown,
    spelled,
    toml_file,
    unknown_name,
)

PRESETS = Path(__file__).parent / "presets"
PLATFORMS = ("cpu", "gpu")
MOST_DEVICES = 1 << 20  # of a pool

POOL_KEYS = ("devices", "processes")
ROLE_KEYS = (
    *("pool", "train", "infer", "generate", "generate_pool"),
    *("zero", "sequence_parallel", "relay", "offload"),
    *("micro_sequences", "remat", "generate_sequences"),
)
MESH_KEYS = (DATA, FSDP, PIPE, TENSOR)


@dataclass(frozen=True)
class Pool:
    """Devices shared by the roles placed on them, and by no other pool."""

    name: str
    devices: int  # in all
    processes: int = 1  # SPMD processes; each owns devices / processes neighbours

    def __post_init__(self) -> None:
        for key in POOL_KEYS:
            count = getattr(self, key)
            if type(count) is not int or not 1 <= count <= MOST_DEVICES:
                raise ValueError(
                    f"[pool.{self.name}] {key} = {shown(count)}: must be a whole number from 1 to "
                    f"{MOST_DEVICES}"
                )
        if self.devices % self.processes:
            legal = either(divisors(self.devices))
            raise ValueError(
                f"[pool.{self.name}] processes = {self.processes} does not divide "
                f"devices = {self.devices}; use processes {legal}"
            )


@dataclass(frozen=True)
class Placement:
    """Disjoint pools, in device order, and the roles on them."""

    pools: Mapping[str, Pool]
    roles: Mapping[str, RolePlacement]
    platform: str | None = None  # of all devices; None: whatever the runtime finds

    def __post_init__(self) -> None:
        if self.platform not in (None, *PLATFORMS):
            legal = either(map(repr, PLATFORMS))
            raise ValueError(f"platform = {spelled(self.platform)} is unknown; use {legal}")
        problems = [line for role in self.roles.values() for line in self._role_problems(role)]
        if not self.roles:
            problems.append("no role is placed; add a section such as [actor]")
        for name in self.pools:
            if self.roles and name not in _used(self.roles.values()):
                problems.append(f"[pool.{name}] holds no role; remove it or place a role there")
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def devices(self) -> int:
        return sum(pool.devices for pool in self.pools.values())

    def device_range(self, pool: str) -> range:
        """Which devices a pool takes when all pools lie on one list of devices."""
        start = 0
        for name, each in self.pools.items():
            if name == pool:
                return range(start, start + each.devices)
            start += each.devices
        raise ValueError(unknown_name("pool", pool, self.pools))

    def check(self, role_names: Collection[str]) -> None:
        """Refuses a placement that lacks a role of the algorithm, or holds one it has not."""
        have = ", ".join(f"[{name}]" for name in self.roles)
        need = ", ".join(role_names)
        problems = [
            f"no section for role {name!r}, which the algorithm needs; add [{name}] "
            f"with pool = {either(map(repr, self.pools))} (sections now: {have})"
            for name in role_names
            if name not in self.roles
        ]
        problems += [
            f"section [{name}] is no role of the algorithm{did_you_mean(name, role_names)}; "
            f"its roles: {need}"
            for name in self.roles
            if name not in role_names
        ]
        if problems:
            raise ValueError("\n".join(problems))

    def only(self, role_names: Collection[str]) -> "Placement":
        """The same placement without other roles, and without the pools that they leave empty."""
        roles = {name: role for name, role in self.roles.items() if name in role_names}
        used = _used(roles.values())
        pools = {name: pool for name, pool in self.pools.items() if name in used}
        return Placement(pools, roles, self.platform)

    def rollout(self, role: str) -> RolePlacement | None:
        """Where the second copy of a role with relay "two-copies" generates; None of others."""
        trained = self.roles[role]
        if trained.generate_pool is None:
            return None
        keep = trained.generate or MeshShape()
        data = self.pools[trained.generate_pool].devices // keep.devices
        shape = replace(keep, data=data)
        options: dict[str, Any] = {"relay": SHARED, "offload": trained.offload}
        options["generate_sequences"] = trained.generate_sequences
        return RolePlacement(role, trained.generate_pool, infer=shape, generate=keep, **options)

    def table(self) -> str:
        """role -> pool -> devices -> mesh as aligned plain text."""
        devices = f"{self.platform or ''} device ids".lstrip()
        rows: list[tuple[str, ...]] = [
            ("role", "pool", devices, "layout", "mesh", "generate", "micro-DP")
        ]
        for name in self.roles:
            rows += self._table_rows(name)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = (
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        )
        return "\n".join(line.rstrip() for line in lines)

    def _table_rows(self, name: str) -> Iterable[tuple[str, ...]]:
        """A line of the table for each mesh of a role."""
        role, second = self.roles[name], self.rollout(name)
        lines = [(role, "train" if role.train else "infer")]
        lines += [(role.scoring, "infer")] if role.scoring is not role else []
        lines += [(second, "generate")] if second else []
        for each, kind in lines:
            pool, span = self.pools[each.pool], self.device_range(each.pool)
            ids = str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}"
            split = f" in {pool.processes} processes" if pool.processes > 1 else ""
            keep = None if each is role and second else each.generate
            generate = f"pipe {keep.pipe}, tensor {keep.tensor}" if keep else "-"
            micro = str(each.micro_replicas) if keep else "-"
            yield name, pool.name, ids + split, kind, str(each.base), generate, micro

    def to_toml(self) -> str:
        """The placement file that reads back equal to this one."""
        lines = [f"platform = {spelled(self.platform)}", ""] if self.platform else []
        for pool in self.pools.values():
            lines += [f"[pool.{bare_key(pool.name)}]", f"devices = {pool.devices}"]
            lines += [f"processes = {pool.processes}", ""]
        for role in self.roles.values():
            lines += [f"[{bare_key(role.role)}]", f"pool = {spelled(role.pool)}"]
            for name, keys in (("train", MESH_KEYS), ("infer", MESH_KEYS)):
                if shape := getattr(role, name):
                    sizes = {k: getattr(shape, k) for k in keys if getattr(shape, k) > 1}
                    lines.append(f"{name} = {spelled(sizes or {DATA: 1})}")
            if role.generate:
                sizes = {key: getattr(role.generate, key) for key in GENERATE_KEYS}
                lines.append(f"generate = {spelled(sizes)}")
            if role.generate_pool is not None:
                lines.append(f"generate_pool = {spelled(role.generate_pool)}")
            lines += [f"zero = {role.zero}"] if role.base.fsdp > 1 else []
            lines += ["sequence_parallel = true"] if role.sequence_parallel else []
            lines += [
                f"relay = {spelled(role.relay)}",
                f"offload = {spelled(role.offload)}",
            ]
            for name in ("micro_sequences", "remat", "generate_sequences"):
                lines += [f"{name} = {spelled(value)}"] if (value := getattr(role, name)) else []
            lines.append("")
        return "\n".join(lines)

    def _role_problems(self, role: RolePlacement) -> Iterable[str]:
        used = [name for name in (role.pool, role.generate_pool) if name is not None]
        for name in used:
            if name not in self.pools:
                yield f"[{role.role}] {unknown_name('pool', name, self.pools)}"
                return
        keep = role.generate or MeshShape()
        if role.generate_pool and (have := self.pools[role.generate_pool].devices) % keep.devices:
            yield (
                f"[{role.role}] generate: pipe {keep.pipe} * tensor {keep.tensor} does not divide "
                f"the {have} devices of [pool.{role.generate_pool}]; use {either(divisors(have))}"
            )
        pool = self.pools[role.pool]
        for where, mesh in (("train", role.train), ("infer", role.infer)):
            if mesh is None or mesh.devices == pool.devices:
                continue
            product = " * ".join(f"{key} {getattr(mesh, key)}" for key in MESH_KEYS)
            rest = mesh.devices // mesh.data
            fix = (
                f"use {DATA} = {pool.devices // rest}"
                if pool.devices % rest == 0
                else f"choose sizes whose product is {pool.devices}"
            )
            yield (
                f"[{role.role}] {where}: {product} = {mesh.devices} devices, but "
                f"[pool.{pool.name}] has devices = {pool.devices}; {fix}"
            )


def single_pool(
    roles: Iterable[str],
    devices: int,
    processes: int = 1,
    *,
    frozen: Collection[str] = (),
    platform: str | None = None,
) -> Placement:
    """Every role on all devices, data parallel; `frozen` ones only compute."""
    shape = MeshShape(data=devices)
    return Placement(
        {"all": Pool("all", devices, processes)},
        {
            role: RolePlacement(role, "all", infer=shape)
            if role in frozen
            else RolePlacement(role, "all", train=shape)
            for role in roles
        },
        platform,
    )


def preset_names() -> list[str]:
    """Names that load_placement knows without a path."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def load_placement(source: str | Path, roles: Collection[str] | None = None) -> Placement:
    """A placement from a file or a preset's name, checked against the algorithm's roles if given.

    A preset serves every algorithm, so its roles that are not needed are dropped; a file is
    taken at its word.
    """
    preset = PRESETS / f"{source}.toml"
    is_preset = str(source) in preset_names()
    path = preset if is_preset else Path(source)
    if not path.is_file():
        near = did_you_mean(str(source), preset_names())
        raise ValueError(
            f"placement {str(source)!r} is neither a file nor a preset{near}; "
            f"presets: {', '.join(preset_names())}"
        )
    document = toml_file(path)
    try:
        placement = parsed_placement(document)
        if roles is not None:
            placement = placement.only(roles) if is_preset else placement
            placement.check(roles)
    except ValueError as error:
        raise ValueError(f"placement {path}: {error}") from error
    return placement


def parse_placement(text: str) -> Placement:
    """A placement from TOML text; unknown keys are errors."""
    return parsed_placement(tomllib.loads(text))


def parsed_placement(document: dict[str, Any]) -> Placement:
    """A placement from the table of its file."""
    platform = document.pop("platform", None)
    pools = {
        name: Pool(name, **checked_table(f"pool.{name}", table, POOL_KEYS, required=("devices",)))
        for name, table in checked_table("pool", document.pop("pool", {}), None).items()
    }
    roles = {role: _parse_role(role, table) for role, table in document.items()}
    return Placement(pools, roles, platform)


def _parse_role(role: str, table: Any) -> RolePlacement:
    fields = checked_table(role, table, ROLE_KEYS, required=("pool",))
    for key in ("pool", "generate_pool", "relay", "remat"):
        if not isinstance(fields.get(key, ""), str):
            raise ValueError(f"[{role}] {key} = {spelled(fields[key])}: must be a text in quotes")
    for key, legal in (("train", MESH_KEYS), ("infer", MESH_KEYS), ("generate", GENERATE_KEYS)):
        if key in fields:
            sizes = checked_table(f"{role}.{key}", fields[key], legal)
            try:
                fields[key] = MeshShape(**sizes)
            except ValueError as error:
                raise ValueError(f"[{role}] {key}: {error}") from error
    return RolePlacement(role, **fields)


def _used(roles: Iterable[RolePlacement]) -> set[str | None]:
    """Pools that roles lie or generate on."""
    return {pool for role in roles for pool in (role.pool, role.generate_pool)}
