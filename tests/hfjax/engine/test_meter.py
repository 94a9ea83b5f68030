# SPDX-License-Identifier: Apache-2.0
"""The meter: bytes worked out by hand, loops multiplied, nothing lost, nothing guessed."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import hfjax
from hfjax.engine.meter import count, held_bytes, memory

meter = hfjax.meter


def mesh_of(order=range(8), **sizes):
    grid = np.array(jax.devices())[list(order)].reshape(tuple(sizes.values()))
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


AB = mesh_of(a=2, b=4)
ABC = mesh_of(a=2, b=2, c=2)
# the devices of each mesh in another order than jax.devices()
SHUFFLED = mesh_of([3, 1, 4, 0, 5, 2, 7, 6], a=2, b=2, c=2)


def spec(*parts):
    return PartitionSpec(*parts)


def abstract(mesh, shape, *parts, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec(*parts)))


def gather(mesh):
    return jax.jit(lambda x: x * 2, out_shardings=NamedSharding(mesh, spec()))


def manual(mesh, function, in_specs, out_specs, **options):
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)
    )


def only(traffic):
    [collective] = traffic.collectives
    return collective


# ---- kinds


def test_all_gather():
    traffic = meter(gather(AB), abstract(AB, (8, 6), "b"), mesh=AB)
    one = only(traffic)
    assert (one.kind, one.axes, one.group_size, one.groups) == ("all-gather", ("b",), 4, 2)
    assert (one.element_types, one.trips, one.conditional) == (("f32",), 1, False)
    assert one.result_bytes == 192  # 8 * 6 * 4 B
    assert traffic.bytes_received == traffic.bytes_sent == 144  # all but one's own quarter


def test_reduce_scatter():
    f = manual(AB, lambda x: lax.psum_scatter(x, "b", tiled=True), spec("a"), spec(("a", "b")))
    traffic = meter(f, abstract(AB, (8, 6), "a"), mesh=AB)
    one = only(traffic)
    assert (one.kind, one.axes, one.group_size, one.groups) == ("reduce-scatter", ("b",), 4, 2)
    assert one.result_bytes == 24  # 8 / 8 rows * 6 * 4 B
    assert traffic.bytes_received == 72  # 24 from each of 3 others


def test_all_reduce_of_a_tuple_of_several_types():
    def f(x):
        return lax.psum((x, x * 2 + 1, x.astype(jnp.float16).sum()), "b")

    traffic = meter(manual(AB, f, spec("b"), spec()), abstract(AB, (8, 6), "b"), mesh=AB)
    assert set(traffic.by_kind()) == {"all-reduce"}
    assert traffic.element_types() == ("f16", "f32")
    # 2 arrays of 2 * 6 * 4 = 48 B and a scalar of 2 B, each 2 * 3/4 times
    assert traffic.bytes_received == (48 + 48 + 2) * 1.5


def test_all_to_all():
    f = manual(AB, lambda x: lax.all_to_all(x, "b", 1, 0, tiled=True), spec("b"), spec(None, "b"))
    traffic = meter(f, abstract(AB, (8, 4), "b"), mesh=AB)
    one = only(traffic)
    assert (one.kind, one.axes, one.group_size, one.groups) == ("all-to-all", ("b",), 4, 2)
    assert one.result_bytes == 32  # 8 * 1 * 4 B, a tuple of four in the text
    assert traffic.bytes_received == 24


@pytest.mark.parametrize(
    ("pairs", "groups"), [([(0, 1), (1, 2), (2, 3), (3, 0)], 8), ([(0, 1)], 2)]
)
def test_permute_over_a_sub_axis(pairs, groups):
    """With fewer pairs than devices the bytes are those of a device that receives."""
    f = manual(AB, lambda x: lax.ppermute(x, "b", pairs), spec("b"), spec("b"))
    traffic = meter(f, abstract(AB, (8, 6), "b"), mesh=AB)
    one = only(traffic)
    assert (one.kind, one.axes) == ("collective-permute", ("b",))
    assert (one.group_size, one.groups) == (2, groups)
    assert traffic.bytes_received == traffic.bytes_sent == 48  # 2 * 6 * 4 B


def test_permute_along_two_axes():
    pairs = [(i, (i + 3) % 8) for i in range(8)]  # 0 -> 3 changes b, 1 -> 4 changes a
    both = spec(("a", "b"))
    f = manual(AB, lambda x: lax.ppermute(x, ("a", "b"), pairs), both, both)
    assert only(meter(f, abstract(AB, (8, 6), ("a", "b")), mesh=AB)).axes == ("a", "b")


# ---- axes


@pytest.mark.parametrize("mesh", [ABC, SHUFFLED], ids=["in order", "shuffled"])
@pytest.mark.parametrize("axes", [("a",), ("b",), ("c",), ("a", "c"), ("a", "b", "c")])
def test_axes_are_found_in_compiler_groups_and_in_manual_ones(mesh, axes):
    """Ids in a program are places in the mesh's device order, not devices' own ids."""
    n = 2 ** len(axes)
    x = abstract(mesh, (8, 6), axes)
    gathered = only(meter(gather(mesh), x, mesh=mesh))
    f = manual(mesh, lambda x: lax.psum(x, axes), spec(axes), spec())
    reduced = only(meter(f, x, mesh=mesh))
    for one in (gathered, reduced):
        assert (one.axes, one.group_size, one.groups) == (axes, n, 8 // n)


def test_permutes_on_a_shuffled_mesh():
    f = manual(SHUFFLED, lambda x: lax.ppermute(x, "b", [(0, 1), (1, 0)]), spec("b"), spec("b"))
    assert only(meter(f, abstract(SHUFFLED, (8, 6), "b"), mesh=SHUFFLED)).axes == ("b",)


def test_a_mesh_in_another_device_order_is_refused():
    with pytest.raises(ValueError, match="order"):
        meter(gather(SHUFFLED), abstract(SHUFFLED, (8, 6), "b"), mesh=ABC)


def test_without_a_mesh_axes_are_unknown_and_bytes_are_not():
    traffic = meter(gather(AB), abstract(AB, (8, 6), "b"))
    assert only(traffic).axes == ("?",)
    assert traffic.bytes_received == 144


def test_half_of_an_axis_is_said_to_be_half():
    x = abstract(ABC, (8, 6), "c")
    assert only(meter(gather(ABC), x, mesh=AB)).axes == ("b[2 of 4]",)


@pytest.mark.parametrize(
    "groups",
    [
        "{{0,5},{1,4},{2,7},{3,6}}",  # diagonals of a and c
        "{{0,1},{2,3},{4,6},{5,7}}",  # c here, b there
    ],
)
def test_groups_that_are_no_product_of_axes_are_refused(groups):
    with pytest.raises(ValueError, match=r"no product of axes a=2, b=2, c=2.*all-gather"):
        count(all_gather(groups), ABC)


# ---- loops


def scanned(mesh, lengths, axis):
    """x = tanh(x @ w) for every w, the contraction sharded: an all-reduce of x a layer."""
    replicated = NamedSharding(mesh, spec())

    def layer(x, w):
        return lax.with_sharding_constraint(jnp.tanh(x @ w), replicated), None

    def f(x, w):
        if len(lengths) == 1:
            return lax.scan(layer, x, w)[0]
        return lax.scan(lambda x, w: (lax.scan(layer, x, w)[0], None), x, w)[0]

    weights = abstract(mesh, (*lengths, 8, 8), *(None,) * len(lengths), axis)
    return jax.jit(f), abstract(mesh, (4, 8)), weights


@pytest.mark.parametrize("lengths", [(5,), (1,), (3, 5)], ids=str)
def test_scanned_layers_are_multiplied(lengths):
    f, x, w = scanned(AB, lengths, "b")
    traffic = meter(f, x, w, mesh=AB)
    one = only(traffic)
    assert (one.kind, one.axes, one.trips) == ("all-reduce", ("b",), np.prod(lengths))
    assert one.bytes_received == 192  # 4 * 8 * 4 B * 2 * 3/4
    assert traffic.bytes_received == 192 * np.prod(lengths)


@pytest.mark.parametrize(("remat", "forward"), [(False, 1), (True, 2)])
def test_gradients_of_a_scan_with_and_without_remat(remat, forward):
    """A layer reduces x @ w going forward, and going back dL/dx; under remat x @ w once more."""

    def layer(x, w):
        return jnp.tanh(lax.psum(x[:, :2] @ w, "b")), None

    def loss(x, w):
        return lax.scan(jax.checkpoint(layer) if remat else layer, x, w)[0].sum()

    f = manual(AB, jax.grad(loss, argnums=1), (spec(), spec(None, "b")), spec(None, "b"))
    traffic = meter(f, abstract(AB, (4, 8)), abstract(AB, (7, 8, 8), None, "b"), mesh=AB)
    assert set(traffic.by_axes()) == {("b",)}
    # x @ w has 4 * 8 * 4 B, dL/dx of the two columns 4 * 2 * 4 B; each * 2 * 3/4, in 7 layers
    assert traffic.by_kind() == {"all-reduce": 7 * (forward * 192 + 48)}


def until(mesh):
    """A loop whose end depends on data, with an all-reduce over b inside."""

    def f(x):
        def go_on(state):
            return (state[0] < 32) & (state[1].sum() < 1e9)

        return lax.while_loop(go_on, lambda s: (s[0] + 1, lax.psum(s[1], "b")), (0, x))[1]

    return manual(mesh, f, spec("b"), spec("b"), check_vma=False), abstract(mesh, (8, 6), "b")


def test_a_loop_of_unknown_length_asks_for_its_trips():
    f, x = until(AB)
    with pytest.raises(ValueError, match=r"trips=\{'jit\(f\)/shard_map/while': N\}"):
        meter(f, x, mesh=AB)
    for trips in (10, {"jit(f)/shard_map/while": 10}):
        traffic = meter(f, x, mesh=AB, trips=trips)
        assert only(traffic).trips == 10
        assert traffic.bytes_received == 10 * 72  # 2 * 6 * 4 B * 2 * 3/4


def test_trips_for_a_loop_that_is_not_there_are_refused():
    f, x = until(AB)
    with pytest.raises(ValueError, match=r"'decode'.*jit\(f\)/shard_map/while"):
        meter(f, x, mesh=AB, trips={"decode": 3, "jit(f)/shard_map/while": 10})
    with pytest.raises(ValueError, match="-1"):
        meter(f, x, mesh=AB, trips=-1)


def test_a_loop_of_unknown_length_without_collectives_needs_no_trips():
    f = jax.jit(
        lambda x: lax.while_loop(lambda x: x.sum() < 9, lambda x: x * 2, x),
        out_shardings=NamedSharding(AB, spec()),
    )
    assert meter(f, abstract(AB, (8, 6)), mesh=AB).collectives == ()


def test_a_loop_condition_runs_once_more_than_its_body():
    def f(x):
        return lax.while_loop(
            lambda x: lax.psum(x.sum(), "a") < 1e3, lambda x: lax.psum(x, "b") * 2, x
        )

    f = manual(AB, f, spec(), spec(), check_vma=False)
    traffic = meter(f, abstract(AB, (8, 6)), mesh=AB, trips=10)
    # body: 192 B * 2 * 3/4, ten times; condition: 4 B * 2 * 1/2, eleven times
    assert traffic.by_axes() == {("a",): 11 * 4, ("b",): 10 * 288}


def test_branches_are_all_counted_and_marked_as_a_bound():
    def f(x):
        return lax.cond(
            x[0, 0] > 0, lambda x: lax.psum(x, "a"), lambda x: lax.psum(x, ("a", "b")), x
        )

    f = manual(AB, f, spec(), spec(), check_vma=False)
    traffic = meter(f, abstract(AB, (8, 6)), mesh=AB)
    assert all(one.conditional for one in traffic.collectives)
    assert traffic.is_bound
    # 192 B * 2 * 1/2 and 192 B * 2 * 7/8
    assert traffic.by_axes() == {("a",): 192, ("a", "b"): 336}
    assert not meter(gather(AB), abstract(AB, (8, 6), "b")).is_bound


# ---- text that the CPU compiler does not write


def module(*lines, partitions=8, more=""):
    body = "\n".join(f"  {line}" for line in lines)
    return (
        f"HloModule m, is_scheduled=true, num_partitions={partitions}\n\n"
        "%add (x: f32[], y: f32[]) -> f32[] {\n"
        "  %x = f32[] parameter(0)\n  %y = f32[] parameter(1)\n"
        "  ROOT %sum = f32[] add(%x, %y)\n}\n\n"
        f"{more}ENTRY %main (p: f32[4]) -> f32[4] {{\n{body}\n}}\n"
    )


GROUPS = "channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true"
ASYNC = {
    "gather": (
        "%s = (f32[4]{0}, f32[16]{0}) all-gather-start(%p), dimensions={0}, " + GROUPS,
        {"all-gather": 64 * 3 / 4},
    ),
    "gather of two": (
        "%s = ((f32[4]{0}, bf16[2]{0}), (f32[16]{0}, bf16[8]{0})) "
        "all-gather-start(%p, %q), dimensions={0}, " + GROUPS,
        {"all-gather": (64 + 16) * 3 / 4},
    ),
    "reduce": (
        "%s = f32[4]{0:T(256)} all-reduce-start(%p), to_apply=%add, " + GROUPS,
        {"all-reduce": 16 * 2 * 3 / 4},
    ),
    "reduce of two": (
        "%s = (f32[4]{0}, /*index=1*/ f32[2]{0}) all-reduce-start(%p, %q), to_apply=%add, "
        + GROUPS,
        {"all-reduce": (16 + 8) * 2 * 3 / 4},
    ),
    "scatter": (
        "%s = ((f32[8]{0}), f32[2]{0}, u32[], u32[]) reduce-scatter-start(f32[8]{0} %p), "
        "dimensions={0}, to_apply=%add, " + GROUPS,
        {"reduce-scatter": 8 * 3},
    ),
    "all to all": (
        "%s = ((f32[8]{0}), f32[8]{0}) all-to-all-start(%p), dimensions={0}, " + GROUPS,
        {"all-to-all": 32 * 3 / 4},
    ),
    "permute": (
        "%s = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%p), channel_id=1, "
        "source_target_pairs={{0,1},{4,5},{2,2}}",
        {"collective-permute": 32},
    ),
    "permute that stays": (
        "%s = f32[8]{0} collective-permute(%p), channel_id=1, source_target_pairs={{2,2}}",
        {"collective-permute": 0},
    ),
    "wrapped": (
        "%s = ((f32[4]{0}), f32[16]{0}) async-start(%p), calls=%wrapped",
        {"all-gather": 64 * 3 / 4},
    ),
}
WRAPPED = (
    "%wrapped (q: f32[4]) -> f32[16] {\n  %q = f32[4]{0} parameter(0)\n"
    f"  ROOT %g = f32[16]{{0}} all-gather(%q), dimensions={{0}}, {GROUPS}\n"
    '}, execution_thread="side"\n\n'
)


@pytest.mark.parametrize("name", list(ASYNC))
def test_asynchronous_forms_count_once(name):
    line, expected = ASYNC[name]
    done = "ROOT %d = f32[4]{0} all-gather-done(%s), calls=%wrapped"
    text = module(line, done, more=WRAPPED if name == "wrapped" else "")
    traffic = count(text, AB)
    assert traffic.by_kind() == expected
    assert traffic.by_axes() == {
        ("b",) if expected != {"collective-permute": 0} else (): sum(expected.values())
    }


def all_gather(groups):
    return module(
        "ROOT %g = f32[16]{0} all-gather(%p), channel_id=1, "
        f"replica_groups={groups}, dimensions={{0}}, use_global_device_ids=true, "
        'metadata={op_name="jit(f)/all-reduce(x), replica_groups={{0,1}}"}'
    )


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,4},{1,5},{2,6},{3,7}}", ("a",)),
        ("{}", ("a", "b", "c")),
        ("[4,2]<=[8]", ("c",)),
        ("[4,2]<=[2,4]T(1,0)", ("a",)),
        ("[2,4]<=[2,2,2]T(1,0,2)", ("a", "c")),
        ("mesh['x'=2,'y'=2,'z'=2] {'y'}", ("b",)),
        ("mesh['x'=2,'y'=1,'z'=4], device_ids=([2,2,2]T(1,0,2)) {'x'}", ("b",)),
        ("mesh['x'=8] {'x':(2)2}", ("b",)),
        ("mesh['x'=8] {'x':(1)2,'x':(4)2}", ("a", "c")),
        ("mesh[x=4,y=2] {x:(1)2,y}", ("a", "c")),
        ("mesh['x'=2,'y'=4], device_ids=(0,2,4,6,1,3,5,7) {'x'}", ("c",)),
        ("@mesh<x=2,y=2,z=2> {x,y}", ("a", "b")),
    ],
)
def test_every_spelling_of_replica_groups(groups, axes):
    one = only(count(all_gather(groups), ABC))
    assert (one.axes, one.group_size) == (axes, 2 ** len(axes))


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (["%g = f32[16] all-gather(%p), channel_id=1, dimensions={0}"], "replica_groups.*all-ga"),
        (["%g = f32[16] all-gather(%p), channel_id=1, replica_groups=new(8)"], "replica_groups"),
        (["%g = f32[16] all-gather(%p), replica_groups={{0,1}}"], "channel_id"),
        ([f"%g = f32[<=16] all-gather(%p), {GROUPS}"], r"<=16.*unknown size"),
        ([f"%g = q7[16] all-gather(%p), {GROUPS}"], "q7.*unknown size"),
        ([f"%g = (f32[16], f32[16]) all-gather(%p), {GROUPS}"], "operands"),
        ([f"%g = f32[16] ragged-all-to-all(%p), {GROUPS}"], "ragged-all-to-all"),
        (["%g = (f32[4], u32[], token[]) send(%p, %t), channel_id=1"], "send"),
        (["%g = f32[16] all-gather(%p), channel_id=1, replica_groups={{0,1},{2}}"], "groups"),
        (["%g = f32[16] all-gather(%p), channel_id=1, replica_groups={{0,1}}"], "8 devices once"),
        (["all-gather of something new"], "something new"),
    ],
)
def test_what_is_not_understood_is_refused_with_its_line(lines, complaint):
    with pytest.raises(ValueError, match=complaint):
        count(module(*lines))


def test_text_for_another_number_of_devices_than_the_mesh_is_refused():
    with pytest.raises(ValueError, match=r"4 devices.* 8"):
        count(all_gather("[2,2]<=[4]").replace("num_partitions=8", "num_partitions=4"), AB)


def test_collectives_of_several_replicas_are_refused():
    text = all_gather("{{0,1}}").replace("num_partitions=8", "replica_count=8")
    with pytest.raises(ValueError, match="replica_count=8"):
        count(text)


def test_a_collective_that_no_path_reaches_is_not_lost():
    with pytest.raises(ValueError, match="wrapped"):
        count(module("ROOT %d = f32[4] copy(%p)", more=WRAPPED))
    start, _ = ASYNC["gather"]  # if it named a computation too, which of them would count?
    with pytest.raises(ValueError, match="wrapped"):
        count(module(f"{start}, calls=%wrapped", more=WRAPPED))


def test_waiting_for_an_instruction_is_no_call():
    start, _ = ASYNC["wrapped"]
    later = "ROOT %d = f32[4] copy(%p), control-predecessors={%wrapped}"
    assert len(count(module(start, later, more=WRAPPED)).collectives) == 1


# ---- half precision


def test_bfloat16_on_cpu_is_refused_because_the_compiler_widens_it():
    x = abstract(AB, (8, 6), "b", dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="float16 in its place"):
        meter(gather(AB), x, mesh=AB)
    with pytest.raises(ValueError, match="float16 in its place"):
        meter(gather(AB).lower(x).compile(), mesh=AB)
    half = meter(gather(AB), abstract(AB, (8, 6), "b", dtype=jnp.float16), mesh=AB)
    assert half.element_types() == ("f16",)
    assert half.bytes_received == 72


# ---- the table


def test_table_adds_equal_rows_and_says_what_is_a_bound():
    f, x, w = scanned(AB, (5,), "b")
    lines = str(meter(f, x, w, mesh=AB)).splitlines()
    assert lines[0].split() == ["collective", "over", "type", "result_bytes", "times", "received"]
    assert lines[1].split() == ["all-reduce", "b=4", "f32", "128", "5", "960"]
    assert lines[-1] == "a device receives 960 bytes"
    assert str(meter(gather(AB), abstract(AB, (8, 6)))) == "no collectives"


# ---- memory


def test_held_bytes_counts_a_buffer_once_and_leaves_nothing_behind():
    full = NamedSharding(AB, spec())
    x = jax.device_put(np.ones((8, 6), np.float32), NamedSharding(AB, spec("b")))
    y = jax.device_put(np.ones((3,), np.float32), full)
    alias = jax.device_put(x, NamedSharding(AB, spec("b", None)))  # the same buffers
    key = jax.device_put(jax.random.key(0), full)  # two u32
    alone = jax.device_put(np.ones((5,), np.int8), jax.devices()[3])
    assert alias is not x
    gc.collect()
    before = len(jax.live_arrays())
    held = held_bytes({"x": [x, x, alias], "y": y, "key": key, "alone": alone, "host": np.ones(9)})
    gc.collect()
    assert len(jax.live_arrays()) == before
    # 2 * 6 * 4 + 3 * 4 + 8
    assert held == {d: 68 + 5 * (d.id == 3) for d in jax.devices()}


def test_held_bytes_of_deleted_arrays_is_nothing():
    x, y = (jax.device_put(np.ones((4,), np.float32), jax.devices()[0]) for _ in range(2))
    x.delete()
    assert held_bytes([x, y]) == {jax.devices()[0]: 16}


def test_memory_of_a_program_is_a_device_s():
    f = jax.jit(lambda x, y: (x + 1, y.sum()), donate_argnums=0)
    x = abstract(AB, (8, 6), "b")  # 48 B a device, given away
    used = memory(f.lower(x, abstract(AB, (4,))).compile())
    assert used.argument_bytes == 48 + 16
    assert used.alias_bytes == 48
    assert used.output_bytes >= 48 + 4  # a table of pointers may come on top
    assert used.total_bytes == (
        used.argument_bytes + used.output_bytes - used.alias_bytes + used.temp_bytes
    )
