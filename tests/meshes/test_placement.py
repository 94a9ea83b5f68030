# SPDX-License-Identifier: Apache-2.0
"""Placements: the file format, its refusals, presets, and the printed table."""

from pathlib import Path

import pytest

from meshes.mesh import MeshShape
from meshes.placement import (
    Placement,
    Pool,
    RolePlacement,
    load_placement,
    parse_placement,
    preset_names,
    single_pool,
)

GOOD = """
[pool.policy]
devices = 4
processes = 2
[pool.value]
devices = 4
[actor]
pool = "policy"
train = { data = 2, tensor = 2 }
generate = { tensor = 1 }
[critic]
pool = "value"
train = { fsdp = 4 }
[reward]
pool = "value"
infer = { data = 4 }
"""


def test_a_file_becomes_pools_and_split_meshes() -> None:
    placement = parse_placement(GOOD)
    assert placement.pools["policy"] == Pool("policy", 4, 2)
    actor = placement.roles["actor"]
    assert actor.train == MeshShape(data=2, tensor=2)
    assert actor.mesh_shape == MeshShape(data=2, tensor=1, tensor_micro=2)
    assert actor.micro_replicas == 2
    assert placement.roles["critic"].mesh_shape == MeshShape(fsdp=4)
    assert placement.roles["reward"].mesh_shape == MeshShape(data=4)
    assert placement.device_range("value") == range(4, 8)
    assert placement.devices == 8


def test_without_generate_the_actor_generates_in_its_training_layout() -> None:
    actor = RolePlacement("actor", "all", train=MeshShape(data=2, tensor=4))
    assert actor.mesh_shape == MeshShape(data=2, tensor=4)


REFUSALS = {
    "misspelt mesh axis": (
        ("tensor = 2", "tensr = 2"),
        r"\[actor.train\] unknown key 'tensr', did you mean 'tensor'",
    ),
    "misspelt role key": (("generate =", "genrate ="), r"\[actor\] .*'genrate', .*'generate'"),
    "hyphen": (("processes = 2", "process-es = 2"), r"\[pool.policy\] .* did you mean 'processes'"),
    "micro axis written by hand": (
        ("tensor = 2 ", "tensor_micro = 2 "),
        r"unknown key 'tensor_micro'",
    ),
    "data in generate": (("{ tensor = 1 }", "{ data = 1 }"), r"\[actor.generate\] .*'data'"),
    "text for a number": (
        ("devices = 4\nproc", "devices = '4'\nproc"),
        r"\[pool.policy\] devices = '4': must be a whole number",
    ),
    "text for a size": (("tensor = 2", 'tensor = "2"'), r"\[actor\] train: mesh axis tensor"),
    "number for a text": (('pool = "policy"', "pool = 1"), r"\[actor\] pool = 1: must be a text"),
    "number for a table": (("{ fsdp = 4 }", "4"), r"critic.train = 4: must be a table"),
    "missing pool": (('pool = "policy"\n', ""), r"\[actor\] lacks the key 'pool'"),
    "unknown pool": (('"policy"\n', '"polcy"\n'), r"unknown pool 'polcy', did you mean 'policy'"),
    "product": (
        ("data = 2, tensor = 2", "tensor = 2"),
        r"\[actor\] train: data 1 \* fsdp 1 \* pipe 1 \* tensor 2 = 2 devices, but "
        r"\[pool.policy\] has devices = 4; use data = 2",
    ),
    "product without a way out": (
        ("data = 2, tensor = 2", "tensor = 3"),
        r"= 3 devices, .* devices = 4; choose sizes whose product is 4",
    ),
    "processes": (
        ("processes = 2", "processes = 3"),
        r"processes = 3 does not divide devices = 4; use processes 1, 2 or 4",
    ),
    "generation does not divide": (
        ("{ tensor = 1 }", "{ tensor = 3 }"),
        r"generate: tensor = 3 does not divide train.tensor = 2; use tensor 1 or 2",
    ),
    "stage": (('"policy"\n', '"policy"\nzero = 4\n'), r"zero = 4: stages .* are 1, 2 or 3"),
    "stage 2 in a pipeline": (
        ("data = 2, tensor = 2 }", "fsdp = 2, pipe = 2 }\nzero = 2"),
        r"\[actor\] zero = 2 with pipe: .*use zero = 1 or 3",
    ),
    "ds-chat": (
        ('"policy"\n', '"policy"\nrelay = "ds-chat"\n'),
        r"'ds-chat' trains with ZeRO-3 alone .*use train = \{ fsdp = 4 \}",
    ),
    "relay": (('"policy"\n', '"policy"\nrelay = "hybird"\n'), r"'hybird' is unknown; use 'hybrid'"),
    "offload": (('"policy"\n', '"policy"\noffload = "yes"\n'), r'offload = "yes": must be true or'),
    "a layout to score in, of too few devices": (
        ("train = { fsdp = 4 }", "train = { fsdp = 4 }\ninfer = { tensor = 2 }"),
        r"\[critic\] infer: data 1 \* fsdp 1 \* pipe 1 \* tensor 2 = 2 devices, but "
        r"\[pool.value\] has devices = 4; use data = 2",
    ),
    "no mesh": (("infer = { data = 4 }", ""), r"\[reward\] has neither of train and infer"),
    "idle pool": (("[actor]", "[pool.idle]\ndevices = 1\n[actor]"), r"\[pool.idle\] holds no role"),
    "stray top-level key": (("[pool.policy]", "devices = 8\n[pool.policy]"), r"devices = 8: must"),
    "two copies in one pool": (
        ('"policy"\n', '"policy"\nrelay = "two-copies"\n'),
        r"relay = 'two-copies', generate_pool = None: .* go together",
    ),
    "a generation pool without its relay": (
        ('"policy"\n', '"policy"\ngenerate_pool = "value"\n'),
        r"relay = 'hybrid', generate_pool = \"value\": 'two-copies' .* go together",
    ),
    "the role's own pool": (
        ('"policy"\n', '"policy"\nrelay = "two-copies"\ngenerate_pool = "policy"\n'),
        r"generate_pool = \"policy\" is the role's own pool; name another",
    ),
    "unknown generation pool": (
        ('"policy"\n', '"policy"\nrelay = "two-copies"\ngenerate_pool = "valu"\n'),
        r"\[actor\] unknown pool 'valu', did you mean 'value'",
    ),
    "generation on another pool does not divide": (
        (
            '"policy"\n',
            '"policy"\nrelay = "two-copies"\ngenerate_pool = "value"\n',
            "tensor = 1 }",
            "pipe = 2, tensor = 3 }",
        ),
        r"pipe 2 \* tensor 3 does not divide the 4 devices of \[pool.value\]; use 1, 2 or 4",
    ),
    "a second copy of what only computes": (
        (
            "infer = { data = 4 }",
            'infer = { data = 4 }\nrelay = "two-copies"\ngenerate_pool = "policy"',
        ),
        r"\[reward\] relay = 'two-copies': only a role that is trained",
    ),
    "a negative micro-batch": (
        ('"value"\ntrain', '"value"\nmicro_sequences = -1\ntrain'),
        r"\[critic\] micro_sequences = -1: must be a whole number of rows, 0 for all",
    ),
    "half a wave": (
        ('"policy"\n', '"policy"\ngenerate_sequences = 1.5\n'),
        r"\[actor\] generate_sequences = 1.5: must be a whole number of rows",
    ),
    "rematerialisation": (
        ('"policy"\n', '"policy"\nremat = "layers"\n'),
        r"\[actor\] remat = \"layers\" is unknown; use 'none', 'layer' or 'dots'",
    ),
    "rematerialisation by number": (
        ('"policy"\n', '"policy"\nremat = 1\n'),
        r"\[actor\] remat = 1: must be a text",
    ),
    "a micro-batch of what only computes": (
        ("infer = { data = 4 }", "infer = { data = 4 }\nmicro_sequences = 4"),
        r"\[reward\] micro_sequences = 4: only a role that is trained has it; remove it",
    ),
    "rematerialisation of what only computes": (
        ("infer = { data = 4 }", 'infer = { data = 4 }\nremat = "layer"'),
        r"\[reward\] remat = \"layer\": only a role that is trained",
    ),
    "waves of what generates nothing": (
        ("infer = { data = 4 }", "infer = { data = 4 }\ngenerate_sequences = 8"),
        r"\[reward\] generate_sequences = 8: this role generates nothing; remove it",
    ),
    "broken TOML": (("devices = 4\nproc", "devices = \nproc"), r"line 3, column 11"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_name_section_value_and_choice(case: str, tmp_path: Path) -> None:
    changes, message = REFUSALS[case]
    text = GOOD
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in text
        text = text.replace(old, new, 1)
    path = tmp_path / "placement.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        load_placement(path)
    assert str(path) in str(error.value)


def test_all_contradictions_come_at_once() -> None:
    with pytest.raises(ValueError, match="devices") as error:
        parse_placement(GOOD.replace("devices = 4", "devices = 6"))
    assert [line.split("]")[0] for line in str(error.value).splitlines()] == [
        "[actor",
        "[critic",
        "[reward",
    ]


def test_roles_must_match_the_algorithm() -> None:
    placement = parse_placement(GOOD)
    placement.check(["actor", "critic", "reward"])
    with pytest.raises(ValueError, match=r"no section for role 'reference'.*add \[reference\]"):
        placement.check(["actor", "critic", "reward", "reference"])
    with pytest.raises(ValueError, match=r"section \[critic\] is no role of the algorithm; its"):
        placement.check(["actor", "reward"])
    misspelt = parse_placement(GOOD.replace("[reward]", "[rewrd]"))
    with pytest.raises(ValueError, match=r"section \[rewrd\] .*, did you mean 'reward'\?"):
        misspelt.check(["actor", "critic", "reward"])


ALGORITHMS = [
    ("actor", "critic", "reference", "reward"),
    ("actor", "critic", "reference"),  # PPO with a function reward
    ("actor", "critic", "reference", "reward", "cost"),
    ("actor", "reference"),
    ("actor",),
]


@pytest.mark.parametrize("roles", ALGORITHMS, ids=str)
@pytest.mark.parametrize("name", preset_names())
def test_presets_serve_every_algorithm(name: str, roles: tuple[str, ...]) -> None:
    placement = load_placement(name, roles)
    assert set(placement.roles) == set(roles)
    assert {role.pool for role in placement.roles.values()} == set(placement.pools)


def test_a_file_is_taken_at_its_word(tmp_path: Path) -> None:
    path = tmp_path / "placement.toml"
    path.write_text(GOOD)
    with pytest.raises(ValueError, match=r"section \[critic\]"):
        load_placement(path, ["actor", "reward"])


def test_unknown_presets_name_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"neither a file nor a preset, did you mean 'laptop'\?"):
        load_placement("laptp")


@pytest.mark.parametrize("name", preset_names())
def test_written_placements_read_back_equal(name: str) -> None:
    placement = load_placement(name)
    assert parse_placement(placement.to_toml()) == placement


SIZES = 'micro_sequences = 16\nremat = "layer"\ngenerate_sequences = 8\n'


def test_how_much_is_worked_on_at_a_time_reads_back_equal_and_is_written_only_where_set() -> None:
    placement = parse_placement(GOOD.replace('"policy"\n', f'"policy"\n{SIZES}', 1))
    actor, critic = placement.roles["actor"], placement.roles["critic"]
    assert (actor.micro_sequences, actor.remat, actor.generate_sequences) == (16, "layer", 8)
    assert (critic.micro_sequences, critic.remat, critic.generate_sequences) == (0, "", 0)
    written = placement.to_toml()
    assert parse_placement(written) == placement
    assert SIZES in written
    for line in SIZES.splitlines():
        assert written.count(line.split()[0]) == 1


def test_odd_names_read_back_equal() -> None:
    placement = Placement(
        {'a "b".c': Pool('a "b".c', 2)},
        {"my role": RolePlacement("my role", 'a "b".c', train=MeshShape(tensor=2))},
    )
    assert parse_placement(placement.to_toml()) == placement


def test_the_presets_of_simulated_devices_run_on_cpu_also_on_a_machine_with_gpus() -> None:
    for name in preset_names():
        placement = load_placement(name, ["actor", "reference"])
        assert placement.platform == ("cpu" if name.startswith("cpu") else None)
        assert parse_placement(placement.to_toml()) == placement
    assert "cpu device ids" in load_placement("cpu8_split").table()
    with pytest.raises(ValueError, match="platform = \"cuda\" is unknown; use 'cpu' or 'gpu'"):
        parse_placement('platform = "cuda"' + GOOD)


def test_single_pool() -> None:
    placement = single_pool(["actor", "reference"], 8, processes=2)
    assert placement.pools == {"all": Pool("all", 8, 2)}
    assert placement.roles["reference"].mesh_shape == MeshShape(data=8)


def test_a_frozen_role_only_computes() -> None:
    roles = single_pool(["actor", "reference"], 8, frozen=["reference"]).roles
    assert (roles["actor"].train, roles["actor"].infer) == (MeshShape(data=8), None)
    assert (roles["reference"].train, roles["reference"].infer) == (None, MeshShape(data=8))


def test_table() -> None:
    # Columns are as wide as their longest cell, two spaces apart.
    assert parse_placement(GOOD).table().splitlines() == [
        "role    pool    device ids          layout  mesh               generate          micro-DP",
        "actor   policy  0-3 in 2 processes  train   data 2 x tensor 2  pipe 1, tensor 1  2",
        "critic  value   4-7                 train   fsdp 4             -                 -",
        "reward  value   4-7                 infer   data 4             -                 -",
    ]


def test_a_role_that_is_updated_may_score_in_another_layout() -> None:
    text = GOOD.replace(
        "train = { fsdp = 4 }", "train = { fsdp = 4 }\nzero = 1\ninfer = { tensor = 4 }"
    )
    placement = parse_placement(text)
    assert parse_placement(placement.to_toml()) == placement
    critic = placement.roles["critic"]
    assert (critic.base, critic.mesh_shape, critic.replicas) == (critic.train, critic.train, 4)
    assert (critic.scoring.mesh_shape, critic.scoring.replicas) == (MeshShape(tensor=4), 1)
    for role in ("actor", "reward"):
        assert placement.roles[role].scoring is placement.roles[role]
    assert placement.table().splitlines()[2:4] == [
        "critic  value   4-7                 train   fsdp 4             -                 -",
        "critic  value   4-7                 infer   tensor 4           -                 -",
    ]


def test_a_second_copy_has_a_pool_of_its_own() -> None:
    actor = 'pool = "policy"\nrelay = "two-copies"\ngenerate_pool = "rollout"\n'
    actor += "generate_sequences = 4\n"
    text = GOOD.replace('pool = "policy"\n', actor, 1) + "[pool.rollout]\ndevices = 6\n"
    placement = parse_placement(text.replace("{ tensor = 1 }", "{ tensor = 3 }"))
    assert parse_placement(placement.to_toml()) == placement
    actor, copy = placement.roles["actor"], placement.rollout("actor")
    assert actor.mesh_shape == MeshShape(data=2, tensor=2)
    assert (copy.pool, copy.mesh_shape) == ("rollout", MeshShape(data=2, tensor=3))
    assert copy.generate_sequences == 4
    assert placement.rollout("critic") is None
    assert placement.only(["actor"]).pools.keys() == {"policy", "rollout"}
    assert placement.table().splitlines()[1:3] == [
        "actor   policy   0-3 in 2 processes  train     data 2 x tensor 2  -                 -",
        "actor   rollout  8-13                generate  data 2 x tensor 3  pipe 1, tensor 3  1",
    ]
