"""Every collective does on real devices what its definition says, in one operation of the bytes it states."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from meshdsl.dims import Dim, dims
from meshdsl.errors import InternalError
from meshdsl.layouts import Extents, Mesh, Sharding
from meshdsl.lowering.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Permute,
    ReduceScatter,
    Slice,
    Step,
)
from tests.lowering.definitions import linear, places

SHAPE = dims("x:24 y:24 z:12")
of = Sharding.of


class Row(NamedTuple):
    """One collective on a value of SHAPE, laid out so."""

    before: Sharding
    step: Step


def relabel(before: dict[str, str], after: dict[str, str], partial: str = "") -> Row:
    return Row(of(before, partial), Permute.between(of(before, partial), of(after, partial)))


ON_2X2X2 = [
    Row(of({}), Slice("x", ("a",))),
    Row(of({"x": "b"}), Slice("x", ("c", "a"))),
    Row(of({"x": "b"}, "c"), Slice("y", ("a",))),
    Row(of({"x": "ab"}), AllGather("x", ("b",))),
    Row(of({"x": "cab"}), AllGather("x", ("a", "b"))),
    Row(of({"y": "cba"}), AllGather("y", ("c", "b", "a"))),
    Row(of({"x": "ab", "y": "c"}), AllToAll("x", "y", ("b",))),
    Row(of({"z": "ca"}, "b"), AllToAll("z", "x", ("c", "a"))),
    Row(of({"z": "ac"}), AllToAll("z", "y", ("a", "c"))),
    Row(of({"x": "a"}, "bc"), AllReduce(("b",))),
    Row(of({"x": "a"}, "bc"), AllReduce(("b", "c"))),
    Row(of({"x": "a"}, "bc"), ReduceScatter("x", ("c", "b"))),
    Row(of({}, "abc"), ReduceScatter("y", ("b", "c", "a"))),
    relabel({"x": "ab"}, {"x": "ba"}),
    relabel({"x": "a"}, {"x": "c"}),
    relabel({"x": "a"}, {"x": "c"}, "b"),
    relabel({"x": "a", "y": "b", "z": "c"}, {"x": "b", "y": "c", "z": "a"}),
    relabel({"y": "abc"}, {"y": "cba"}),
    relabel({"x": "ab"}, {"x": "cb"}),
]
ON_2X3 = [
    Row(of({}), Slice("x", ("b", "a"))),
    Row(of({"x": "ab"}), AllGather("x", ("a", "b"))),
    Row(of({"x": "ba"}), AllGather("x", ("b", "a"))),
    Row(of({"x": "ba"}), AllToAll("x", "y", ("b", "a"))),
    Row(of({"x": "ab"}), AllToAll("x", "y", ("a", "b"))),
    Row(of({"y": "a"}, "b"), AllReduce(("b",))),
    Row(of({}, "ab"), AllReduce(("a", "b"))),
    Row(of({}, "ab"), ReduceScatter("x", ("a", "b"))),
    Row(of({}, "ab"), ReduceScatter("x", ("b", "a"))),
    Row(of({"x": "a"}, "b"), ReduceScatter("x", ("b",))),
    relabel({"x": "ab"}, {"x": "ba"}),
    relabel({"z": "ba", "x": ""}, {"z": "ab"}),
]
TABLES = [(Mesh("a:2 b:2 c:2"), ON_2X2X2), (Mesh("a:2 b:3"), ON_2X3)]
ROWS = [(mesh, row) for mesh, rows in TABLES for row in rows]


def blocks_for(mesh: Mesh, before: Sharding, dtype: Any, seed: int) -> np.ndarray:
    """Random small integers: an array of blocks, one dim per axis the value varies along, then the block's dims."""
    local = Extents().local_shape(SHAPE, before, mesh)
    grid = tuple(n for axis, n in mesh.axes.items() if axis in before.varying)
    return np.random.default_rng(seed).integers(-9, 9, grid + local).astype(dtype)


def per_device(grid: np.ndarray, mesh: Mesh, sharding: Sharding) -> list[np.ndarray]:
    along = [axis for axis in mesh.axes if axis in sharding.varying]
    return [grid[tuple(at[axis] for axis in along)] for at in places(mesh)]


def spec(mesh: Mesh, sharding: Sharding) -> PartitionSpec:
    return PartitionSpec(*(axis for axis in mesh.axes if axis in sharding.varying))


def emitted(mesh: Mesh, rows: list[Row]) -> Any:
    """One jitted function that runs every row; types are checked on the way in and on the way out."""

    def device(*grids: Any) -> tuple[Any, ...]:
        outs: list[Any] = []
        for (before, step), grid in zip(rows, grids, strict=True):
            block = grid.reshape(grid.shape[len(before.varying) :])
            assert jax.typeof(block).mat.varying == before.varying
            out = step.emit(block, SHAPE, before, mesh)
            after = step.step(before, mesh)
            assert jax.typeof(out).mat.varying == after.varying, f"{step} on {before}"
            outs.append(out.reshape((1,) * len(after.varying) + out.shape))
        return tuple(outs)

    return jax.jit(
        jax.shard_map(
            device,
            mesh=mesh.bind(),
            in_specs=tuple(spec(mesh, before) for before, _ in rows),
            out_specs=tuple(spec(mesh, step.step(before, mesh)) for before, step in rows),
        )
    )


@pytest.mark.parametrize("dtype", ["int32", "float32", "bfloat16"])
@pytest.mark.parametrize(("mesh", "rows"), TABLES, ids=["2x2x2", "2x3"])
def test_emit_is_simulate(mesh: Mesh, rows: list[Row], dtype: str):
    inputs = [blocks_for(mesh, row.before, jnp.dtype(dtype), i) for i, row in enumerate(rows)]
    outputs = emitted(mesh, rows)(*inputs)
    for (before, step), grid, out in zip(rows, inputs, outputs, strict=True):
        after = step.step(before, mesh)
        wanted = step.simulate(per_device(grid, mesh, before), SHAPE, before, mesh)
        got = per_device(np.asarray(out), mesh, after)
        local = Extents().local_shape(SHAPE, after, mesh)
        for a, b in zip(got, wanted, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape == local, f"{step} on {before}"
            np.testing.assert_array_equal(a, b, err_msg=f"{step} on {before}")


@pytest.mark.parametrize("length", [24, 0])
def test_blocks_that_jax_takes_for_equal(length: int):
    """A constant born split or pending is typed as equal everywhere, and may be empty; no collective minds."""
    mesh, rows = TABLES[1]
    shape = (Dim("x", length), Dim("y", length), Dim("z", 12))
    afters = [step.step(before, mesh) for before, step in rows]

    def device() -> tuple[Any, ...]:
        outs: list[Any] = []
        for (before, step), after in zip(rows, afters, strict=True):
            out = step.emit(jnp.ones(Extents().local_shape(shape, before, mesh)), shape, before, mesh)
            assert jax.typeof(out).mat.varying <= after.varying
            outs.append(out.reshape((1,) * len(after.varying) + out.shape))
        return tuple(outs)

    out_specs = tuple(spec(mesh, after) for after in afters)
    run = jax.jit(jax.shard_map(device, mesh=mesh.bind(), in_specs=(), out_specs=out_specs))
    for (before, step), after, out in zip(rows, afters, run(), strict=True):
        ones = [np.ones(Extents().local_shape(shape, before, mesh))] * mesh.size
        got, wanted = per_device(np.asarray(out), mesh, after), step.simulate(ones, shape, before, mesh)
        np.testing.assert_array_equal(got, wanted, err_msg=f"{step} on {before}")


def test_one_operation_each():
    """A row is one StableHLO collective, and only a slice is none."""
    for mesh, rows in TABLES:
        inputs = [blocks_for(mesh, row.before, np.float32, 0) for row in rows]
        text = emitted(mesh, rows).lower(*inputs).as_text()
        ops = "all_gather|all_to_all|all_reduce|reduce_scatter|collective_permute"
        found = Counter(name.replace("collective_", "") for name in re.findall(rf'"stablehlo\.({ops})"', text))
        assert found == Counter(step.name for _, step in rows if step.name != "slice")


def test_permute_moves_as_little_as_it_can():
    """Everyone sends to one and receives from one, and whoever holds the block it wants keeps it."""
    for mesh, (before, step) in ROWS:
        if isinstance(step, Permute):
            pairs = step.pairs(mesh)
            everyone = list(range(mesh.count(step.axes)))
            assert [receiver for _, receiver in pairs] == everyone
            assert sorted(sender for sender, _ in pairs) == everyone
            held, wanted = block_numbers(mesh, before), block_numbers(mesh, step.step(before, mesh))
            stay = sum(a == b for a, b in zip(held, wanted, strict=True))
            assert sum(a == b for a, b in pairs) * mesh.size == stay * len(pairs)


def block_numbers(mesh: Mesh, sharding: Sharding) -> list[tuple[int, ...]]:
    return [tuple(linear(at, sharding.axes(dim), mesh) for dim in SHAPE) for at in places(mesh)]


FLOATS = ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"]
OTHERS = ["int8", "uint8", "int16", "uint32", "int64", "bool"]


def test_max_and_min_keep_nan():
    """NaN wins, infinities and subnormals keep their order, -0.0 is below 0.0, and the bytes do not grow."""
    mesh, axes, pending = Mesh("a:2 b:2 c:2"), ("c", "a"), ("a", "c")
    cases = [(jnp.dtype(dtype), kind) for dtype in FLOATS + OTHERS for kind in ("max", "min")]
    inputs = [drawn(dtype) for dtype, _ in cases]

    def device(*grids: Any) -> tuple[Any, ...]:
        steps = [AllReduce(axes, kind) for _, kind in cases]
        befores = [of({}, pending, kind) for _, kind in cases]
        x = dims("x:400")
        return tuple(s.emit(g[0, 0], x, b, mesh) for s, g, b in zip(steps, grids, befores, strict=True))

    run = jax.jit(jax.shard_map(device, mesh=mesh.bind(), in_specs=PartitionSpec("a", "c"), out_specs=PartitionSpec()))
    text = run.lower(*inputs).as_text()
    sent = re.findall(r'"stablehlo.all_reduce".*?}\) : \(tensor<400x(\w+)>\)', text, re.DOTALL)
    wires = [AllReduce(axes, kind).wire_dtype(dtype) for dtype, kind in cases]
    assert sent == [f"{'ui' if wire.kind == 'u' else 'i'}{8 * wire.itemsize}" for wire in wires]
    assert [wire.itemsize for wire in wires] == [dtype.itemsize for dtype, _ in cases]
    for (dtype, kind), grid, out in zip(cases, inputs, run(*inputs), strict=True):
        blocks = [grid[at["a"], at["c"]] for at in places(mesh)]
        wanted = AllReduce(axes, kind).simulate(blocks, dims("x:400"), of({}, pending, kind), mesh)[0]
        assert out.dtype == dtype
        exact = "float64" if dtype.name in FLOATS else dtype  # NumPy's comparison knows no NaN in bfloat16
        got = np.asarray(out).astype(exact)
        np.testing.assert_array_equal(got, wanted.astype(exact), err_msg=f"{kind} {dtype}")
        if dtype.name in FLOATS:
            assert (np.isnan(wanted).any() and np.isinf(wanted).any()) or dtype.name == "float8_e4m3fn"
            grids = grid.reshape(4, -1)
            zero = (grids == 0).all(0)
            signs = np.signbit(grids[:, zero]).all(0) if kind == "max" else np.signbit(grids[:, zero]).any(0)
            np.testing.assert_array_equal(np.signbit(np.asarray(out)[zero]), signs)


def drawn(dtype: np.dtype[Any]) -> np.ndarray:
    """Blocks for 2x2 devices, drawn from the values that go wrong; every tenth place holds zeros only."""
    if dtype.name in FLOATS:
        limits = jnp.finfo(dtype)
        some = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 1.5, -2.0]
        edge = [limits.max, limits.min, limits.smallest_subnormal, -limits.smallest_subnormal]
        values = np.concatenate([np.array(some, dtype), np.array(edge, dtype), np.array([3.0] * 12, dtype)])
        zeros = np.array([0.0, -0.0], dtype)
    elif dtype == np.bool_:
        values = zeros = np.array([False, True])
    else:
        limits = jnp.iinfo(dtype)
        values = zeros = np.array([limits.min, limits.max, 0, 1, 2], dtype)
    random = np.random.default_rng(0)
    grid = random.choice(values, (2, 2, 400))
    grid[..., ::10] = random.choice(zeros, (2, 2, 40))
    return grid


def test_wire_dtype():
    """Only a max or a min travels as something else, of the same width."""
    float32 = np.dtype("float32")
    assert AllReduce(("a",)).wire_dtype(float32) == float32
    assert AllReduce(("a",), "max").wire_dtype(jnp.dtype("bfloat16")) == np.dtype("int16")
    assert AllReduce(("a",), "min").wire_dtype(np.dtype("bool")) == np.dtype("uint8")
    assert AllReduce(("a",), "min").wire_dtype(np.dtype("uint32")) == np.dtype("uint32")
    for _, (_, step) in ROWS:
        assert step.wire_dtype(float32) == float32


@pytest.mark.parametrize(
    ("step", "sent"),
    [
        (Slice("x", ("a",)), 0),
        (AllGather("x", ("a", "b")), 500),
        (AllToAll("x", "y", ("a", "b")), 84),  # 5/6 of 100 bytes, rounded up
        (AllReduce(("a", "b")), 167),
        (ReduceScatter("x", ("b",)), 67),
        (Permute((("x", ("a",), ("c",)),)), 100),
    ],
    ids=str,
)
def test_bytes_sent(step: Step, sent: int):
    """The bytes that one device sends around a ring if its block has 100 bytes, rounded up."""
    assert step.bytes_sent(100, Mesh("a:2 b:3 c:2")) == sent


@pytest.mark.parametrize(
    ("before", "step"),
    [
        (of({"x": "a"}), Slice("y", ("a",))),
        (of({}, "a"), Slice("y", ("a",))),
        (of({}), Slice("y", ())),
        (of({}), Slice("y", ("a", "a"))),
        (of({"x": "ab"}), AllGather("x", ("a",))),
        (of({"x": "ab"}), AllGather("x", ("b", "a"))),
        (of({"x": "ab"}), AllGather("y", ("b",))),
        (of({"x": "ab"}), AllToAll("x", "y", ("a",))),
        (of({"x": "ab"}), AllToAll("x", "x", ("b",))),
        (of({"x": "a"}), AllReduce(("a",))),
        (of({}, "a"), AllReduce(("a", "b"))),
        (of({}, "a"), AllReduce(("a",), "max")),
        (of({}, "a", "max"), AllReduce(("a",))),
        (of({}, "a", "max"), ReduceScatter("x", ("a",))),
        (of({"x": "a"}), ReduceScatter("x", ("a",))),
        (of({"x": "a"}), Permute((("x", ("a",), ("c",)),))),  # 2 blocks into 3
        (of({"x": "a", "y": "b"}), Permute((("x", ("a",), ("b",)),))),
        (of({"x": "a"}, "b"), Permute((("x", ("a",), ("b",)),))),
        (of({"x": "b"}), Permute((("x", ("a",), ("b",)),))),
        (of({"x": "b"}), Permute(())),
    ],
    ids=lambda x: str(x),
)
def test_rules_refuse(before: Sharding, step: Step):
    with pytest.raises(InternalError, match="does not apply"):
        step.step(before, Mesh("a:2 b:2 c:3"))


@pytest.mark.parametrize("at", range(len(ROWS)), ids=lambda at: str(ROWS[at][1].step))
def test_the_effect_is_what_the_definition_does(at: int):
    """Blocks grow and shrink along the dims it names, and rows along every other dim can be sent one by one."""
    mesh, (before, step) = ROWS[at]
    effect, n = step.effect, mesh.count(step.axes)
    blocks = per_device(blocks_for(mesh, before, np.int32, at), mesh, before)
    results = step.simulate(blocks, SHAPE, before, mesh)
    for axis, (dim, _) in enumerate((d.name, d.size) for d in SHAPE):
        old, new = blocks[0].shape[axis], results[0].shape[axis]
        assert new == (old * n if dim == effect.joins else old // n if dim == effect.cuts else old)
        if dim not in effect.dims:
            rows = [[x.take([i], axis) for x in blocks] for i in range(old)]
            alone = zip(*(step.simulate(each, SHAPE, before, mesh) for each in rows), strict=True)
            assert all(np.array_equal(np.concatenate(r, axis), x) for r, x in zip(alone, results, strict=True))
    assert effect.reduces == (len(step.step(before, mesh).partial) < len(before.partial))
    assert {dim for dim, _, _ in getattr(step, "moves", ())} == set(effect.moves)


def test_text():
    """Plans read as sentences."""
    assert [str(step) for _, (_, step) in ROWS[:12:3]] == [
        "slice x over a",
        "all_gather x over b",
        "all_to_all x -> y over b",
        "all_reduce(sum) over b",
    ]
    assert str(relabel({"x": "a", "y": "b"}, {"x": "b", "y": "a"}).step) == "permute x:a y:b -> x:b y:a"
