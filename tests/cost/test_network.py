"""The time of a collective: formulas by topology, where the mesh lies, and measured points."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshdsl as md
from meshdsl.cost.machine import machine, machines
from meshdsl.cost.network import KINDS, Network, NetworkTier, TimeTable, full_bytes, place
from meshdsl.errors import LayoutError

V = 1e9
W, A, LAUNCH = 45e9, 1e-6, 5e-6  # of TPU v5e
V5E = machine("tpu-v5e").network
ONE_WAY = Network((NetworkTier("ring", {"x": 8}, W, A),))
NODES = Network((NetworkTier("switch", {"gpu": 8}, 200e9), NetworkTier("switch", {"node": 4}, 50e9, share=8)))


def seconds(network: Network, mesh: str, kind: str, axes: str, size: float = V, **how) -> float:
    """The seconds of one collective over the axes, without its launch."""
    return place(network, md.Mesh(mesh), **how).seconds(kind, axes.split(), size) - network.launch


def torus(wrap: int, **axes: int) -> Network:
    return Network((NetworkTier("torus", axes, W, A, wrap=wrap),))


MESH = Network((NetworkTier("mesh", {"gpu": 8}, W, A),))


# (network, mesh, kind, axes, seconds): the table of formulas
FORMULAS = {
    "wrapped axis": (V5E, "x:16 y:16", "all_gather", "y", 15 / 16 * V / (2 * W) + 8 * A),
    "odd wrapped axis": (torus(5, x=5), "x:5", "all_gather", "x", 4 / 5 * V / (2 * W) + 3 * A),
    "axis without wrap": (V5E, "x:4 y:4", "all_gather", "x", 3 / 4 * V / W + 3 * A),
    "two wrapped axes": (V5E, "x:16 y:16", "all_gather", "x y", V / (4 * W)),
    "two wrapped axes, latency": (V5E, "x:16 y:16", "all_gather", "x y", 16 * A, 1.0),
    "three wrapped axes": (machine("tpu-v4").network, "m:64", "all_gather", "m", V / (6 * W)),
    "two axes, no wrap": (V5E, "x:4 y:4", "all_gather", "x y", 15 / 16 * V / (2 * W) + 6 * A),
    "one of two wraps": (V5E, "x:8 y:16", "all_gather", "x y", 127 / 128 * V / (3 * W) + (7 + 8) * A),
    "all_to_all, wrapped axis": (V5E, "x:16 y:16", "all_to_all", "x", V / (8 * W)),
    "all_to_all, no wrap": (V5E, "x:4 y:4", "all_to_all", "x", V / (4 * W)),
    "all_to_all, two axes": (V5E, "x:16 y:16", "all_to_all", "x y", V * 16 / (8 * 256 * W)),
    "all_to_all, unequal axes": (torus(4, x=4, y=8), "x:4 y:8", "all_to_all", "x y", V * 8 / (8 * 32 * W)),
    "permute": (V5E, "x:16 y:16", "permute", "x", V / W + A),
    "switch": (NODES, "x:8", "all_gather", "x", 7 / 8 * V / 200e9),
    "switch, all_to_all": (NODES, "x:8", "all_to_all", "x", 7 / 64 * V / 200e9),
    "hierarchy": (NODES, "x:32", "all_gather", "x", 3 / 4 * V / 50e9),
    "hierarchy, all_to_all": (NODES, "x:32", "all_to_all", "x", 3 / 16 * V / 50e9),
    "strided": (NODES, "x:4 y:8", "all_gather", "x", 3 / 4 * V * 8 / 50e9),
    "strided, all_to_all": (NODES, "x:4 y:8", "all_to_all", "x", 3 / 16 * V * 8 / 50e9),
    "ring of one direction": (ONE_WAY, "x:8", "all_gather", "x", 7 / 8 * V / W + 7 * A),
    "mesh of two": (MESH, "x:2", "all_gather", "x", V / 2 / W + A),
    "mesh of eight": (MESH, "x:8", "all_gather", "x", V / 8 / W + A),
    "mesh, all_to_all": (MESH, "x:8", "all_to_all", "x", V / 64 / W),
    "ring, all_to_all": (ONE_WAY, "x:8", "all_to_all", "x", 7 / 16 * V / W),
}  # fmt: skip


@pytest.mark.parametrize("case", FORMULAS, ids=lambda name: name.replace(" ", "_"))
def test_formula(case: str):
    network, mesh, kind, axes, expected, *size = FORMULAS[case]
    assert seconds(network, mesh, kind, axes, *size) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("all_gather", 3 / 4 * V * 4 / W + 3 * A), ("all_to_all", V * 4 / (4 * W)), ("permute", V * 4 / W + 4 * A)],
)
def test_interleaved_groups_share_the_links_of_a_torus_axis(kind: str, expected: float):
    assignment = {"a": "x:4", "b": "x:4"}
    assert seconds(V5E, "a:4 b:4", kind, "a", V, assignment=assignment) == pytest.approx(expected)
    apart = place(V5E, md.Mesh("a:4 b:4"), assignment).seconds(kind, ["b"], V)
    assert apart == place(V5E, md.Mesh("a:4 b:4"), {"a": "x", "b": "y"}).seconds(kind, ["b"], V)


def test_a_hierarchy_is_pipelined():
    slow = Network(
        (NetworkTier("switch", {"gpu": 8}, 200e9, A), NetworkTier("switch", {"node": 4}, 50e9, 100 * A, share=8))
    )
    outer, latency = 3 / 4 / 50e9, (7 + 300) * A
    assert seconds(slow, "x:32", "all_gather", "x", V) == pytest.approx(V * outer + 2 * latency)
    assert seconds(slow, "x:32", "all_gather", "x", 1e3) == pytest.approx(1e3 * outer + 2 * latency)


def test_a_measured_node_packed_and_strided():
    """Eight GPUs: 155.7 GB/s of bus bandwidth packed in a node, 20.8 strided over two (Galvatron, nccl-tests)."""
    network = Network(
        (NetworkTier("switch", {"gpu": 8}, 155e9), NetworkTier("switch", {"node": 2}, 11.9e9, share=4)), launch=20e-6
    )
    packed = place(network, md.Mesh("data:8")).seconds("all_reduce", ["data"], V)
    strided = place(network, md.Mesh("data:8"), {"data": "node:2 gpu:4"}).seconds("all_reduce", ["data"], V)
    bus = 2 * 7 / 8 * V
    assert bus / packed == pytest.approx(155.7e9, rel=0.02)
    assert bus / strided == pytest.approx(20.8e9, rel=0.02)


@pytest.mark.parametrize("name", machines())
def test_every_machine_laws(name: str):
    network = machine(name).network
    for mesh in ("a:2", "a:4 b:2", "a:4 b:8", "a:16 b:16"):
        placement = place(network, md.Mesh(mesh))
        sizes = [0.0, *(4.0**k for k in range(2, 18))]
        for axes in (["a"], ["b"], ["a", "b"]):
            if set(axes) - set(placement.mesh.axes):
                continue
            for kind in KINDS:
                times = [placement.seconds(kind, axes, size) for size in sizes]
                assert all(t > 0 for t in times)
                assert times == sorted(times), f"{kind} over {axes} of {mesh}: more bytes take less time"
                assert placement.seconds(kind, axes[::-1], 1e7) == placement.seconds(kind, axes, 1e7)
            group = placement.seconds("all_gather", axes, 1e8) - network.launch
            assert placement.seconds("reduce_scatter", axes, 1e8) - network.launch == pytest.approx(group)
            both_measured = len({t.kind for t in network.tables}) > 1
            if not both_measured:
                assert placement.seconds("all_reduce", axes, 1e8) - network.launch == pytest.approx(2 * group)


def test_all_to_all_grows_as_the_root_of_the_devices():
    """At fixed bytes on each device of a square torus (GShard, section 5)."""
    local = 1e8
    times = [seconds(torus(1, x=n, y=n), f"x:{n} y:{n}", "all_to_all", "x y", local * n * n) for n in (4, 8, 16, 32)]
    assert [b / a for a, b in itertools.pairwise(times)] == pytest.approx([2.0] * 3)


def test_one_device_sends_nothing():
    placement = place(V5E, md.Mesh("x:1 y:4"))
    assert placement.seconds("all_reduce", ["x"], V) == 0
    assert placement.seconds("all_reduce", [], V) == 0
    assert str(place(V5E, md.Mesh(""))) == "one device"


POINTS = ((1e6, 50e-6), (4e6, 80e-6), (64e6, 900e-6))
MEASURED = Network(
    NODES.levels, 10e-6, (TimeTable("all_reduce", (8,), POINTS), TimeTable("all_to_all", (8, 1), POINTS))
)


def test_tables_pass_through_their_points_and_scale_the_formula_outside():
    placement = place(MEASURED, md.Mesh("x:8"))
    for kind in ("all_reduce", "all_to_all"):
        for size, measured in POINTS:
            assert placement.seconds(kind, ["x"], size) == pytest.approx(measured, rel=1e-12)
    assert placement.seconds("all_reduce", ["x"], 2e6) == pytest.approx(60e-6)
    formula = place(Network(NODES.levels, 10e-6), md.Mesh("x:8"))
    for outside, end in ((1e5, POINTS[0]), (1e9, POINTS[-1])):
        ratio = formula.seconds("all_reduce", ["x"], outside) / formula.seconds("all_reduce", ["x"], end[0])
        assert placement.seconds("all_reduce", ["x"], outside) == pytest.approx(end[1] * ratio)


def test_a_table_of_another_ring_collective_stands_in():
    placement = place(MEASURED, md.Mesh("x:8"))
    for kind in ("all_gather", "reduce_scatter"):
        assert placement.seconds(kind, ["x"], 4e6) == pytest.approx(10e-6 + (80e-6 - 10e-6) / 2)


def test_a_table_is_of_its_group_only():
    placement = place(MEASURED, md.Mesh("y:4 x:8"))
    formula = place(Network(NODES.levels, 10e-6), md.Mesh("y:4 x:8"))
    assert placement.seconds("all_reduce", ["y"], V) == formula.seconds("all_reduce", ["y"], V)
    assert placement.seconds("all_reduce", ["x", "y"], V) == formula.seconds("all_reduce", ["x", "y"], V)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(1e-6, 1.0)), min_size=1, max_size=8))
def test_monotone_points_make_a_monotone_table(points: list[tuple[float, float]]):
    sizes, seconds = sorted(dict(points)), sorted(dict(points).values())
    table = TimeTable("all_reduce", (8,), tuple(zip(sizes, seconds, strict=True)))
    placement = place(Network(NODES.levels, 1e-6, (table,)), md.Mesh("x:8"))
    times = [placement.seconds("all_reduce", ["x"], size) for size in np.geomspace(1, 1e7, 60)]
    assert all(b >= a * (1 - 1e-12) for a, b in itertools.pairwise(times))


# (network, mesh, what `print(placement)` says)
PLACED = [
    (V5E, "a:4 b:4", "a:4 on x:4\nb:4 on y:4"),
    (V5E, "a:2 b:4", "a:2 on x:2\nb:4 on y:4"),
    (V5E, "a:8 b:4", "a:8 on x:8\nb:4 on y:4"),
    (V5E, "a:16", "a:16 on x:4 x y:4"),
    (V5E, "a:64 b:4", "a:64 on x:16 x y:4 step 4\nb:4 on y:4"),
    (V5E, "pod:2 a:16 b:16", "pod:2 on slice:2\na:16 on x:16\nb:16 on y:16"),
    (NODES, "a:4 b:8", "a:4 on node:4\nb:8 on gpu:8"),
    (NODES, "a:8 b:4", "a:8 on node:4 x gpu:2 step 4\nb:4 on gpu:4"),
    (NODES, "a:1 b:8", "b:8 on gpu:8"),
    (NODES, "a:2 b:6", "a:2 on node:2\nb:6 on gpu:6\nnote: 6 of 8 devices in use along gpu"),
    (machine("tpu-v4").network, "a:4 b:4 c:4", "a:4 on x:4\nb:4 on y:4\nc:4 on z:4"),
    (machine("tpu-v3").network, "a:4 b:2", "a:4 on x:2 x y:2\nb:2 on core:2"),
]  # fmt: skip


@pytest.mark.parametrize(("network", "mesh", "shown"), PLACED, ids=[f"{i}-{row[1]}" for i, row in enumerate(PLACED)])
def test_default_placement(network: Network, mesh: str, shown: str):
    assert str(place(network, md.Mesh(mesh))) == shown


def test_a_mesh_that_does_not_factor_is_a_best_effort_with_a_note():
    placement = place(Network((NetworkTier("torus", {"x": 6, "y": 6}, W),)), md.Mesh("a:9 b:4"))
    assert placement.notes == ("mesh axis b:4 does not factor the hardware axis y: a best effort",)
    assert str(placement).splitlines()[:2] == ["a:9 on x:3 step 2 x y:3 step 2", "b:4 on x:2 x y:2"]
    assert placement.seconds("all_reduce", ["a", "b"], V) > 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=3), st.sampled_from(machines()))
def test_every_device_has_one_place(sizes: list[int], name: str):
    network = machine(name).network
    mesh = md.Mesh({f"a{i}": n for i, n in enumerate(sizes)})
    try:
        placement = place(network, mesh)
    except LayoutError:
        return  # a number of devices that is no grid of the machine
    at = [()]
    for axis in mesh.axes:
        for part in placement.parts.get(axis, ()):
            at = [(*one, (part.level, part.axis, i * part.stride)) for one in at for i in range(part.size)]
    places = set()
    for one in at:
        there: dict[tuple[int, str], int] = {}
        for level, axis, offset in one:
            there[level, axis] = there.get((level, axis), 0) + offset
        places.add(tuple(sorted(there.items())))
    assert len(places) == mesh.size


def test_an_assignment_decides():
    placement = place(NODES, md.Mesh("data:2 model:16"), {"data": "gpu:2", "model": ["node", "gpu:4"]})
    assert str(placement) == "data:2 on gpu:2 step 4\nmodel:16 on node:4 x gpu:4"
    packed = place(NODES, md.Mesh("data:2 model:16"))
    assert placement.seconds("all_reduce", ["data"], V) < packed.seconds("all_reduce", ["data"], V)
    wide = place(V5E, md.Mesh("data:16 model:4"), {"data": "x", "model": "y"})
    assert wide.seconds("all_gather", ["data"], V) < place(V5E, md.Mesh("data:16 model:4")).seconds(
        "all_gather", ["data"], V
    )


def test_everything_wrong_with_an_assignment_at_once():
    with pytest.raises(LayoutError) as error:
        place(NODES, md.Mesh("data:2 model:8 expert:2"), {"dat": "node", "data": "nod:2", "model": "gpu:3 node:2"})
    assert error.value.args[0].splitlines()[1:] == [
        "  the mesh has no axis 'dat' of more than one device; did you mean 'data'? there are: data, model, expert",
        "  mesh axes without a place: expert; assign each to hardware axes",
        "  mesh axis 'data': the machine has no hardware axis 'nod'; did you mean 'node'? there are: gpu, node",
        "  mesh axis 'model' has 8 devices, the parts 'gpu:3 node:2' make 6",
    ]
    for assignment, said in [
        ({"a": "gpu:x"}, "a part is written axis or axis:size, got 'gpu:x'"),
        ({"a": "gpu node"}, "only one part may leave its size out, got gpu, node"),
        ({"a": "gpu:16"}, "hardware axis 'gpu' has 8 members, the assignment uses 16"),
    ]:
        with pytest.raises(LayoutError, match=said):
            place(NODES, md.Mesh("a:16"), assignment)


def test_a_mesh_larger_than_the_machine():
    with pytest.raises(LayoutError, match="the mesh 'a:64' has 64 devices, and the machine has at most 32"):
        place(NODES, md.Mesh("a:64"))
    with pytest.raises(LayoutError, match="31 devices cannot be placed as a grid on gpu:8, node:4"):
        place(NODES, md.Mesh("a:31"))


def test_a_device_order_is_not_read_and_says_so():
    assert "device_order" in place(NODES, md.Mesh("a:2", device_order=[1, 0])).notes[0]


def test_bad_questions():
    placement = place(NODES, md.Mesh("a:8"))
    with pytest.raises(ValueError, match="no collective is called 'gather'"):
        placement.seconds("gather", ["a"], V)
    with pytest.raises(ValueError, match="at least 0 bytes"):
        placement.seconds("all_reduce", ["a"], -1)
    with pytest.raises(LayoutError, match="the mesh has no axis 'b'"):
        placement.seconds("all_reduce", ["b"], V)


def test_full_bytes_of_every_kind():
    """V is the bytes of the whole array over the group, whichever way a collective goes."""
    batch, model = md.Dim("batch", 64), md.Dim("model", 32)
    whole = 64 * 32 * 4

    def first(layout, f, *dims):
        return md.compile(f, "rows:4", layout).program(md.spec(list(dims))).collectives[0]

    gather = first("batch:rows", lambda x: md.replicate(x), batch, model)
    reduce = first("batch:rows", lambda x: md.sum(x, over="batch"), batch, model)
    exchange = first("batch:rows", lambda x: md.shard(x, {"model": "rows"}), batch, model)
    scatter = first("model:rows", lambda x: md.shard(md.sum(x, over="model"), {"batch": "rows"}), model, batch)
    assert (gather.kind, full_bytes(gather, 4)) == ("all_gather", whole)
    assert (reduce.kind, full_bytes(reduce, 4)) == ("all_reduce", 32 * 4)
    assert (exchange.kind, full_bytes(exchange, 4)) == ("all_to_all", whole)
    assert (scatter.kind, full_bytes(scatter, 4)) == ("reduce_scatter", 64 * 4)


def test_each_message_of_an_all_to_all_takes_time():
    """The figure of TPU v3 is fitted to GShard's figure 9: 8 MB on each of 16 and of 2,048 cores, 9 times the time."""
    network = machine("tpu-v3").network
    free = dataclasses.replace(network, message=0.0)
    times: dict[int, float] = {}
    for n in (16, 2048):
        timed, without = (place(each, md.Mesh(f"d:{n}")) for each in (network, free))
        times[n] = timed.seconds("all_to_all", ["d"], 8e6 * n)
        assert times[n] == pytest.approx(without.seconds("all_to_all", ["d"], 8e6 * n) + (n - 1) * network.message)
        assert timed.seconds("all_gather", ["d"], 8e6) == without.seconds("all_gather", ["d"], 8e6)
    assert times[2048] / times[16] == pytest.approx(9, abs=0.1)
