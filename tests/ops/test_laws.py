"""The laws of operations, over every row of the table in tests/laws/."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl.control
import meshdsl.control.autodiff
import meshdsl.ops
import meshdsl.trace
from meshdsl import backend
from meshdsl.ir import Eqn, Graph, Op, walk
from meshdsl.ops.creation import EMPTY
from meshdsl.ops.placement import RESHARD_TO_PRIVATE_DIM
from meshdsl.trace import run_kernel
from tests.laws import INDEX, INDICES, SIZES, Row, gradient, leaves, operations, rows, run, widest

ROWS = rows()
EVERY = pytest.mark.parametrize("row", ROWS, ids=str)
# Relative to the largest element; a few roundings of the dtype.
TOLERANCE = {"float64": 1e-11, "float32": 3e-6, "float16": 2e-2, "bfloat16": 1e-1}


def same(row: Row, ours: Any, theirs: Any, *, bitwise: bool = False) -> None:
    """Equal sizes, and equal values: bitwise, or to the tolerance of the dtype."""
    assert np.shape(ours) == np.shape(theirs)
    dtype = np.asarray(ours).dtype
    ours, theirs = (np.asarray(x).astype(widest(dtype)) for x in (ours, theirs))
    if bitwise or dtype.kind in "biu":
        np.testing.assert_array_equal(ours, theirs, err_msg=row.name)
        return
    scale = np.max(np.abs(theirs), initial=1, where=np.isfinite(theirs))
    np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE[dtype.name], atol=TOLERANCE[dtype.name] * scale)


def rng(row: Row) -> np.random.Generator:
    return np.random.default_rng(list(row.name.encode()))


def type_law(graph: Graph) -> None:
    """Every declared type is what the kernel makes of undivided arrays."""
    for eqn, _ in walk(graph):
        if eqn.control is None:
            structs = [jax.ShapeDtypeStruct(tuple(d.size for d in v.dims), v.dtype) for v in eqn.ins]
            made = jax.eval_shape(lambda *xs, e=eqn: _outs(e, xs, backend.Jax), *structs)
            declared = [(tuple(d.size for d in v.dims), v.dtype) for v in eqn.outs]
            assert [(x.shape, x.dtype) for x in made] == declared, f"{eqn.op} at {eqn.where}"


def _outs(eqn: Eqn, xs: Any, xp: Any) -> list[Any]:
    return run_kernel(eqn.operation, xp, xs, [v.dims for v in eqn.ins], [v.type for v in eqn.outs], eqn.params)


@EVERY
def test_declared_types_are_those_of_the_kernels(row: Row) -> None:
    for dtype in row.dtypes:
        graph = row.graph(dtype=dtype)
        type_law(gradient(graph)[0] if row.differentiable else graph)


@EVERY
@pytest.mark.usefixtures("at_once_in_jax")
def test_numpy_and_eager_jax_agree(row: Row) -> None:
    dtype = row.dtypes[0]  # of every dtype: the law of runs
    tensors = row.make(rng(row), dtype=dtype)
    eager = leaves(row.call(*tensors))
    numpy = run(row.graph(dtype=dtype), [x.numpy() for x in tensors], backend.NumPy)
    for ours, theirs in zip(eager, numpy, strict=True):
        same(row, ours.numpy(), theirs, bitwise=row.exact)


def in_float64(row: Row) -> Graph:
    return row.graph(dtype="float64" if "float32" in row.dtypes else row.dtypes[0])


def drawn(row: Row, integer: bool) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Operands, and cotangents of the floating results."""
    draw, graph = rng(row), in_float64(row)
    xs = row.arrays(draw, integer=integer, dtype="float64" if "float32" in row.dtypes else row.dtypes[0])
    floating = [v for v in graph.outs if jnp.issubdtype(v.dtype, jnp.floating)]
    return xs, [draw.integers(-2, 3, tuple(d.size for d in v.dims)).astype(v.dtype) for v in floating]


def values_and_gradients(row: Row) -> Any:
    """The results of the kernels in JAX and, if the row is differentiable, their `jax.vjp`."""
    graph = in_float64(row)
    want = gradient(graph)[1] if row.differentiable else []
    floating = [jnp.issubdtype(v.dtype, jnp.floating) for v in graph.outs]

    def theirs(xs: list[Any], cts: list[Any]) -> Any:
        def f(moving: list[Any]) -> tuple[list[Any], list[Any]]:
            full = list(xs)
            for i, x in zip(want, moving, strict=True):
                full[i] = x
            outs = run(graph, full, backend.Jax)
            return [y for y, on in zip(outs, floating, strict=True) if on], outs

        _, pull, outs = jax.vjp(f, [xs[i] for i in want], has_aux=True)
        return outs, pull(cts)[0]

    return theirs


GROUP = 12  # rows that JAX compiles together


def together(rows: Sequence[Row], functions: Sequence[Any]) -> Any:
    """One program for a function of each row; it takes a list of arguments for each."""

    def all_of_them(each: Sequence[Any]) -> list[Any]:
        found: list[Any] = []
        for row, f, args in zip(rows, functions, each, strict=True):
            try:
                found.append(f(*args))
            except Exception as error:
                error.add_note(f"in the row {row}, which is compiled with its neighbours")
                raise
        return found

    return jax.jit(all_of_them, compiler_options={"xla_backend_optimization_level": 0})


@cache
def by_jax(group: int) -> dict[bool, Any]:
    """Values and gradients of the rows of a group, for whole numbers and for others."""
    some = ROWS[GROUP * group :][:GROUP]
    compiled = together(some, [values_and_gradients(row) for row in some])
    return {integer: compiled([drawn(row, integer) for row in some]) for integer in (True, False)}


@EVERY
def test_values_and_gradients(row: Row) -> None:
    """In float64: the values are the reference's, and our gradient in NumPy is `jax.vjp` of the same kernels in JAX."""
    graph = in_float64(row)
    joint = gradient(graph)[0] if row.differentiable else graph
    for integer in (True, False):
        xs, cts = drawn(row, integer)
        outs, wanted = by_jax(ROWS.index(row) // GROUP)[integer][ROWS.index(row) % GROUP]
        if row.reference is not None:
            for y, reference in zip(outs, leaves(row.reference(*xs)), strict=True):
                same(row, np.asarray(y), np.asarray(reference).astype(y.dtype))
        if not row.differentiable or (integer and not row.smooth):
            continue
        ours = run(joint, [*xs, *cts], backend.NumPy)[len(graph.outs) :]
        for a, b in zip(ours, wanted, strict=True):
            same(row, a, b)


def records(module: ModuleType) -> set[Op]:
    """Every `Op` that a module defines, also those that only a public function's closure holds."""
    found: set[Op] = set()
    for value in vars(module).values():
        cells = getattr(value, "__closure__", None) or ()
        found |= {x for x in (value, *(cell.cell_contents for cell in cells)) if isinstance(x, Op)}
    return found


def test_every_operation_has_a_row() -> None:
    names = {m.name for m in pkgutil.walk_packages(meshdsl.ops.__path__, "meshdsl.ops.")}
    names -= {"meshdsl.ops.index_map", "meshdsl.ops.attention.turns"}  # made by lowering; the layout law is theirs
    modules = [importlib.import_module(name) for name in sorted(names)]
    modules += [meshdsl.control.autodiff, meshdsl.control, meshdsl.trace]
    there = set().union(*(records(module) for module in modules)) - {RESHARD_TO_PRIVATE_DIM, EMPTY}
    # sharded updates make the first, and pipelines the second, whose elements have no value to compare
    assert len(there) > 80
    tested = set().union(*(operations(row.graph()) for row in ROWS))
    assert not sorted(str(op) for op in there - tested), "add a row to tests/laws/"


WITH_INDICES = [row for row in ROWS if any(x.dtype == INDEX for x in row.ins)]


@pytest.mark.parametrize("row", WITH_INDICES, ids=str)
def test_indices_of_every_integer_dtype(row: Row) -> None:
    """Also where the dim has more places than the dtype counts, and at the ends of the dtype's range."""
    for index in INDICES:
        arrays, graph = row.arrays(rng(row), index=index), row.graph(index=index)
        numpy = run(graph, arrays, backend.NumPy)
        wanted = leaves(row.reference(*arrays)) if row.reference is not None else numpy
        for ours, reference in zip(numpy, wanted, strict=True):
            same(row, ours, np.asarray(reference).astype(ours.dtype))


@cache
def indexed(group: int, index: str) -> Any:
    """The results in JAX of the rows of a group."""
    some = WITH_INDICES[GROUP * group :][:GROUP]
    graphs = [row.graph(index=index) for row in some]
    compiled = together(some, [lambda *xs, graph=graph: run(graph, xs, backend.Jax) for graph in graphs])
    return compiled([row.arrays(rng(row), index=index) for row in some])


@pytest.mark.parametrize("index", ["uint8", pytest.param("uint64", marks=pytest.mark.slow)])
@pytest.mark.parametrize("row", WITH_INDICES, ids=str)
def test_indices_of_odd_dtypes_in_jax(row: Row, index: str) -> None:
    arrays, graph = row.arrays(rng(row), index=index), row.graph(index=index)
    at = WITH_INDICES.index(row)
    for ours, theirs in zip(indexed(at // GROUP, index)[at % GROUP], run(graph, arrays, backend.NumPy), strict=True):
        same(row, ours, theirs, bitwise=row.exact)


@pytest.mark.parametrize("row", [row for row in ROWS if row.empty], ids=str)
def test_any_size_may_be_zero(row: Row) -> None:
    for name in row.dims():
        sizes = {**SIZES, name: 0}
        arrays, graph = row.arrays(rng(row), sizes), row.graph(sizes)
        run(graph, arrays, backend.NumPy)  # it compares shapes and dtypes with the declared ones
        jax.eval_shape(lambda *xs, g=graph: run(g, xs, backend.Jax), *arrays)
